"""Directory maintenance: what a file system tier does besides reading and writing its objects. It
renews this process's leases, leads the directory or watches its leader, obtains grants, and keeps
the index up to date.

Three background threads per tier do it (maintenance_threads.py): leases and grants, evictions, and
scans. No lock is held during I/O: who does one kind of work has its turn, and the others do not
wait for it. A thread that needs bytes requests them and waits until there are some. Without the
threads, as in ``kvtier gc``, it does the work itself.

``request_recount``, ``generation``, ``record_removal``, ``may_publish`` and ``wake`` do no I/O.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvtier.errors import TierError, TierNoSpaceError, TierUnavailableError
from kvtier.tiers.filesystem.announcements import LogRole, role_in_ledger
from kvtier.tiers.filesystem.directory import TierDirectory
from kvtier.tiers.filesystem.election import (
    HEARTBEAT_SECONDS,
    LEASE_SECONDS,
    LeadershipLostError,
    LeaseWatch,
    acquire,
    current_term,
    leadership_is_free,
    make_control_directory,
    read_ledger,
)
from kvtier.tiers.filesystem.io import GONE, NO_SPACE, tier_error
from kvtier.tiers.filesystem.janitor import Janitor
from kvtier.tiers.filesystem.layout import CONTROL, make_directory, term_path
from kvtier.tiers.filesystem.maintenance_threads import MaintenanceThreads, Turn
from kvtier.tiers.filesystem.quota import ByteAllocation, ByteGrants, Writer
from kvtier.tiers.filesystem.scan_scheduler import ScanScheduler
from kvtier.tiers.filesystem.walker import DirectoryScan, object_path

_log = logging.getLogger("kvtier.tiers.filesystem")
GRANT_SECONDS = 2.0
"""A store waits this long for a grant and is dropped then: twice the interval of the leader, and
less than a store may take."""
BUSY_SECONDS = 0.02
_BUSY_PERIOD_SECONDS = 2.0
_GRANT_ROUNDS = 3
_SILENT_SECONDS = 3.0
"""A leader that has been silent for so long may already have a successor."""
_MAX_REMOVALS = 100_000
_ENOSPC_PERCENT = 5


class DirectoryMaintenance:
    """Maintains one directory. Methods that do I/O block as long as the storage does and raise
    ``TierError``.

    Life cycle: ``join``, ``scan_completely``, ``start_loop``, then ``stop``. A caller without a
    loop uses ``run_once`` and ``release`` instead.
    """

    def __init__(self, directory: TierDirectory) -> None:
        self.grants = ByteGrants()
        self.writer = Writer(directory.root, directory.modes, self.grants)
        self.janitor: Janitor | None = None
        self._directory = directory
        self._root = directory.root
        self._index = directory.index
        self._clock = directory.clock
        self._leases, self._evictions, self._scanning = Turn(), Turn(), Turn()
        self._threads = MaintenanceThreads(self)
        self._failures = 0
        self._failure: TierError | None = None
        self._enospc = False
        self._scans = ScanScheduler(
            directory, lambda: self.janitor, lambda: self.writer.server_time
        )
        self._removals: deque[tuple[int, int]] = deque(maxlen=_MAX_REMOVALS)
        self._stopping = False
        self._watch = LeaseWatch()
        self._term = 0
        self._grant_bytes = 0
        self._followed_role = LogRole()
        self._busy_until = float("-inf")
        self._room_made_at = float("-inf")
        self._root_identity: tuple[int, int] | None = None

    # Life cycle.

    def join(self) -> None:
        """Registers as a writer of the directory, and as its leader if there is none."""
        with self._mapped():
            self._stopping = False
            make_directory(self._root, self._directory.modes)
            self._root_identity = None
            self._run_once(supersede=True)

    def scan_completely(self) -> DirectoryScan:
        """Scans the whole directory at full speed, renewing the leases."""
        with self._scanning.taken(None), self._mapped():
            return self._scans.scan_completely(self._heartbeat)

    def verify_in_background(self) -> bool:
        """Whether the index may be filled from a saved one, which the loop then verifies. False if
        the directory must be scanned first: what it holds is not known, or nothing scans it
        later."""
        if self.janitor is not None:
            known = self.janitor.ledger.base_bytes is not None
        else:
            known = self._directory.shared
        self._scans.verifying = known
        return known

    @property
    def verifying(self) -> bool:
        """Whether a saved index is being verified."""
        return self._scans.verifying

    def start_loop(self) -> None:
        """Starts the background threads."""
        self._threads.start()

    def stop(self) -> None:
        """Stops the threads; the last round is ``release``. Waits for a limited time."""
        self._stopping = True
        self._threads.stop()

    def release(self) -> None:
        """Returns the grants and resigns as the leader."""
        with self._leases.taken(None), self._mapped():
            now = self._clock()
            self.writer.close(now)
            if self.janitor is not None:
                with contextlib.suppress(LeadershipLostError):
                    self.janitor.serve_writers(now)
                    self.janitor.write_ledger(now, released=True)
                self.janitor = None
            self._watch = LeaseWatch()
            self.writer.unregister()

    def wake(self) -> None:
        """Makes the leases have their next round at once."""
        self._busy_until = self._clock() + HEARTBEAT_SECONDS
        self._threads.wake("leases")

    @property
    def stopping(self) -> bool:
        """Whether the tier was closed."""
        return self._stopping

    def pause_seconds(self, kind: str = "leases") -> float:
        """How long a loop pauses before its next round."""
        busy = self._scans.verifying or self._clock() < self._busy_until
        seconds = BUSY_SECONDS if busy and kind == "leases" else HEARTBEAT_SECONDS
        return seconds * self._directory.pace

    # Bytes.

    def acquire_bytes(self, size_bytes: int) -> ByteAllocation:
        """Bytes for a file. Raises ``TierNoSpaceError`` if there is no room or no grant in time,
        and ``TierUnavailableError``.
        """
        allocation = self.grants.allocate(size_bytes)
        if allocation is not None:
            low = self.janitor is None and 2 * self.grants.free_bytes() < self._grant_bytes
            if low and self._clock() >= self._busy_until:
                self.wake()
            return allocation
        if self._stopping:
            raise TierUnavailableError(f"{self._root}: the tier is closed")
        if size_bytes > self._directory.limits().capacity_bytes:
            raise TierNoSpaceError(f"{self._root}: {size_bytes} bytes exceed the capacity")
        pace = self._directory.pace
        deadline = time.monotonic() + GRANT_SECONDS * pace
        denials, failures = self.grants.denials, self._failures
        request = self.grants.request(size_bytes)
        try:
            while True:
                left = deadline - time.monotonic()
                self._advance()
                allocation = self.grants.allocate(size_bytes)
                if allocation is not None:
                    return allocation
                if self._failure is not None and self._failures != failures:
                    raise type(self._failure)(str(self._failure))
                if self.grants.denials != denials:
                    raise TierNoSpaceError(
                        f"{self._root}: no room for {size_bytes} bytes within the capacity"
                    )
                if left <= 0:
                    raise TierNoSpaceError(
                        f"{self._root}: no grant for {size_bytes} bytes within "
                        f"{GRANT_SECONDS * pace:g} s"
                    )
                self.grants.wait(min(BUSY_SECONDS * pace, left))
        finally:
            self.grants.withdraw(request)

    def may_publish(self, allocation: ByteAllocation) -> bool:
        """Whether a file may get its name: its grant is charged and this writer's lease holds."""
        return self.grants.is_valid(allocation) and self.writer.lease_valid(self._clock())

    def on_enospc(self) -> None:
        """The file system is full: objects have to go, at once if this process is the leader."""
        self._enospc = True
        self._advance()

    def _advance(self) -> None:
        """Makes progress with what a thread waits for."""
        if self._threads.running:
            self.wake()
            return
        with self._mapped():
            self._run_once()

    def request_recount(self) -> None:
        """The ledger may charge too much: requests a count, if this process is the leader."""
        if self.janitor is not None:
            self.janitor.request_recount()

    def generation(self) -> int:
        """The ledger's generation; odd during a count, -1 if this process is not the leader."""
        janitor = self.janitor
        return -1 if janitor is None else janitor.ledger.generation

    def record_removal(self, size_bytes: int, generation: int) -> None:
        """This tier has removed a file. ``generation``: before the removal."""
        if generation >= 0:
            self._removals.append((size_bytes, generation))

    # Rounds.

    def run_once(self) -> None:
        """One round of all maintenance."""
        with self._mapped():
            self._run_once()

    def run_leases(self) -> None:
        """One round of leases and grants."""
        with self._mapped():
            self._run_leases()
        janitor = self.janitor
        if janitor is not None and janitor.wanted_bytes:
            self._threads.wake("evictions")
        if janitor is not None and janitor.needs_full_count:
            self._threads.wake("scans")

    def run_evictions(self) -> None:
        """Evicts what grants wait for, and down to the watermarks."""
        with self._evictions.taken(None), self._mapped():
            while self._evict_for_grants() or self._evict_batch():
                self.wake()
                if self._stopping:
                    return

    def run_scans(self) -> None:
        """The part of a scan that is due, or a full count if one is needed."""
        with self._scanning.taken(None), self._mapped():
            self._scan()

    def note_failure(self, error: TierError) -> None:
        """A round of a background thread has failed: threads that wait for bytes stop waiting."""
        self._failure = error
        self._failures += 1

    def enforce_limits(self) -> None:
        """One round that does not end before the limits are met, if this process is the leader."""
        with self._mapped():
            self._run_once()
            while self.janitor is not None and not self._stopping:
                with self._evictions.taken(None):
                    more = self._evict_batch()
                if not more and not self.janitor.needs_full_count:
                    return
                if self.janitor.needs_full_count:
                    with self._scanning.taken(None):
                        self._scan()
                self._run_leases()

    def _run_once(self, *, supersede: bool = False) -> None:
        self._run_leases(supersede=supersede)
        for _ in range(_GRANT_ROUNDS):
            with self._evictions.taken(None):
                if not self._evict_for_grants():
                    break
            self._run_leases()
        with self._evictions.taken(None):
            if self._evict_batch():
                self._busy_until = max(self._busy_until, self._clock() + BUSY_SECONDS)
        if supersede:
            return
        with self._scanning.taken(None):
            counted = self._scan()
        if counted:
            self._run_leases()

    def _run_leases(self, *, supersede: bool = False) -> None:
        """What must not wait for anything else. Only the thread whose turn it is does this."""
        with self._leases.taken(None):
            now = self._clock()
            try:
                self._register(now)
                if self._enospc and self.writer.registered:
                    self._enospc = False
                    self.writer.report_enospc()
                self._renew(now, supersede=supersede)
            except OSError as error:
                if error.errno in NO_SPACE:
                    self._make_room(now)
                raise

    def _heartbeat(self) -> None:
        """Renews the leases during long work, unless another thread does."""
        with self._leases.taken(0.0) as mine:
            if mine and self.writer.registered:
                self._renew(self._clock())

    def _scan(self) -> bool:
        """One part of the scans. True after a full count."""
        if self.janitor is not None and self.janitor.needs_full_count:
            self._scans.scan_completely(self._heartbeat)
            return True
        self._scans.scan_due(self._clock())
        return False

    def _evict_for_grants(self) -> bool:
        janitor = self.janitor
        if janitor is None:
            return False
        try:
            return janitor.evict_for_grants()
        except LeadershipLostError:
            self._lose_leadership()
            return False

    def _register(self, now: float) -> None:
        if self.writer.registered:
            return
        found = os.stat(self._root)
        identity = (found.st_dev, found.st_ino)
        if self._root_identity not in (None, identity) and not (self._root / CONTROL).is_dir():
            # The mount was removed, and this is the mount point below it, which must not be filled.
            raise OSError(
                errno.ESTALE, "another directory has replaced the tier's directory", str(self._root)
            )
        self._root_identity = identity
        make_control_directory(self._root, self._directory.modes)
        self.writer.register(now)

    def _make_room(self, now: float) -> None:
        """Makes room for the records. At most once per lease: if other files fill the file system,
        removing objects does not help.
        """
        if now - self._room_made_at < LEASE_SECONDS:
            return
        generation = self.generation()
        self._room_made_at = now if self._index.usage().objects else self._room_made_at
        for size in remove_oldest(self._directory):
            if size:
                self.record_removal(size, generation)

    # Leases.

    def _renew(self, now: float, *, supersede: bool = False) -> None:
        """Everything that must not wait long: heartbeats, requests, answers."""
        self._prepare_record()
        if self.janitor is None:
            self._follow(now, supersede)
        self.writer.settle()
        self._request_grants()
        if self.writer.registered:
            self.writer.write_record(now)
        if not self.writer.registered:
            self._register(now)
        if self.janitor is not None:
            self._lead(now, supersede)
            self._follow(now, False)
            self.writer.settle()
            self.writer.write_record(now)
        self._publish_role()

    def _prepare_record(self) -> None:
        announcements, path = self._directory.announcements, self.writer.path
        if announcements.enabled:
            self.writer.announced = announcements.written(False, path) if path else 0

    def _publish_role(self) -> None:
        """Tells ``announcement_log`` what this process is."""
        path, janitor = self.writer.path, self.janitor
        self._directory.announcements.role = (
            replace(self._followed_role, path=path)
            if janitor is None
            else janitor.log_role(path, self.writer.name)
        )

    def _request_grants(self) -> None:
        requested, least = self.grants.requested_bytes()
        free = self.grants.free_bytes()
        if requested:
            self._busy_until = self._clock() + _BUSY_PERIOD_SECONDS
            self.writer.request_grant(requested, least)
        elif self.janitor is None and self._grant_bytes and free and 2 * free < self._grant_bytes:
            self.writer.request_grant(self._grant_bytes, 1)

    def _follow(self, now: float, supersede: bool) -> None:
        """Reads the leader's ledger; acquires the next term if leadership is free."""
        silent = self.janitor is None and self._watch.unchanged_seconds > _SILENT_SECONDS
        ledger = read_ledger(self._root, self._term) if self._term and not silent else None
        if ledger is None:
            self._term = self._current_term()
            if not self.writer.registered:
                return
            ledger = read_ledger(self._root, self._term) if self._term else None
        self._note_logs(ledger)
        if ledger is not None:
            self._grant_bytes = int(ledger.get("quantum", 0))
            if self.writer.registered:
                self.writer.apply_ledger(self._term, ledger)
        if self.janitor is not None or not leadership_is_free(
            ledger, self._term, self._watch, now, supersede=supersede
        ):
            return
        inherited = acquire(self._root, self._term, self.writer.name, self._directory.modes)
        self._watch = LeaseWatch()
        if inherited is None:
            self._term = self._current_term()
            return
        self._term = inherited.term
        self.janitor = Janitor(self._directory, self.writer.name, inherited)
        self.janitor.heartbeat = self._write_ledger
        self._lead(now, supersede)

    def _note_logs(self, ledger: dict[str, Any] | None) -> None:
        each, leader, written, complete = role_in_ledger(ledger)
        self._followed_role = LogRole(
            term_path=term_path(self._root, self._term) if ledger is not None else None,
            writer_blocks=each,
            leader_blocks=leader,
            expected=written,
            count=len(ledger["writers"]) if ledger is not None else 1,
            complete=complete,
        )

    def _current_term(self) -> int:
        try:
            return current_term(self._root, uncached=True)
        except OSError as error:
            if error.errno not in GONE:
                raise
            # The control directory is gone, and this writer's record with it. Registering again
            # creates both.
            self.writer.unregister()
            return 0

    def _lead(self, now: float, supersede: bool) -> None:
        janitor = self.janitor
        if janitor is None:
            return
        self._credit_removals(janitor)
        try:
            if janitor.serve_writers(now, supersede=self.writer.name if supersede else ""):
                self._busy_until = self._clock() + _BUSY_PERIOD_SECONDS
        except LeadershipLostError:
            self._lose_leadership()

    def _write_ledger(self) -> None:
        """The janitor's heartbeat while it evicts, unless another thread writes the ledger."""
        with self._leases.taken(0.0) as mine:
            if mine and self.janitor is not None:
                self.janitor.write_ledger(self._clock())

    def _credit_removals(self, janitor: Janitor) -> None:
        while self._removals:
            janitor.credit_removal(*self._removals.popleft())

    def _evict_batch(self) -> bool:
        janitor = self.janitor
        if janitor is None:
            return False
        try:
            return janitor.enforce_limits(self._clock())
        except LeadershipLostError:
            self._lose_leadership()
            return False

    def _lose_leadership(self) -> None:
        _log.warning("%s: lost leadership of the directory to another process", self._root)
        self.janitor = None
        self._watch = LeaseWatch()

    # Helpers.

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            mapped = tier_error(error, str(self._root))
            if not isinstance(mapped, TierNoSpaceError):
                mapped = TierUnavailableError(str(mapped))
            raise mapped from error


def remove_oldest(directory: TierDirectory) -> list[int]:
    """Removes the objects to evict next, 5% of the bytes, and returns the size of each. Any
    process may do so at any time; this is for one whose records find no room, and which cannot
    evict as the leader without them. Raises ``OSError``.
    """
    removed = []
    surplus = max(directory.index.usage().used_bytes * _ENOSPC_PERCENT // 100, 1)
    while surplus > 0 and (victim := directory.index.oldest()) is not None:
        path = object_path(str(directory.root), *victim)
        try:
            size = os.lstat(path).st_size
            os.unlink(path)
        except OSError as error:
            if error.errno not in GONE:
                raise
            size = 0
        directory.drop(*victim)
        if size:
            directory.announcements.removed(*victim)
        removed.append(size)
        surplus -= size
    return removed
