"""What a tier does beside its objects: keeps its own leases, is the janitor or watches him, refreshes the index.

One thread per tier runs ``turn`` again and again; a thread that needs a grant runs it as well. Everything that may block is below one lock, which
lookups never take.

The thread that turns a keeper, and room for its records where the file system has none left.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterator
from pathlib import Path

from kvtier.errors import TierError, TierNoSpaceError, TierUnavailableError
from kvtier.tiers.base import OnChange, TierLimits
from kvtier.tiers.filesystem.election import (
    BEAT_SECONDS,
    LEASE_SECONDS,
    Watch,
    acquire,
    make_control,
    read_ledger,
    top_fence,
    vacant,
)
from kvtier.tiers.filesystem.index import Index
from kvtier.tiers.filesystem.io import GONE, NO_SPACE, tier_error
from kvtier.tiers.filesystem.janitor import Janitor, LeadershipLostError
from kvtier.tiers.filesystem.layout import CONTROL, Modes, make_directory
from kvtier.tiers.filesystem.passes import Passes
from kvtier.tiers.filesystem.quota import ByteGrants, Taken, Writer
from kvtier.tiers.filesystem.walker import Pass, object_path

_log = logging.getLogger("kvtier.tiers.filesystem")
GRANT_SECONDS = 2.0
"""A store waits this long for a grant, then it is dropped: twice what the janitor may take to look, less than what a store may wait."""
BUSY_SECONDS = 0.02
_BUSY_FOR_SECONDS = 2.0
_STOP_SECONDS = 2.0
_SILENT_SECONDS = 3.0
"""Of a janitor that says nothing for so long, there may be a successor already."""


class DirectoryMaintenance:
    """See the module's text. ``clock``: monotonic seconds. ``shared``: other processes write here.

    ``turn``, ``obtain`` and ``first_pass`` block as long as the storage does. Errors are ``TierError``.
    """

    def __init__(
        self,
        root: Path,
        index: Index,
        limits: Callable[[], TierLimits],
        modes: Modes,
        *,
        shared: bool,
        on_change: OnChange,
        clock: Callable[[], float] = time.monotonic,
        in_use: Callable[[], Container[str]] = frozenset,
    ) -> None:
        self.allowance = ByteGrants()
        self.writer = Writer(root, modes, self.allowance)
        self.janitor: Janitor | None = None
        self.last_error = ""
        self.removed: deque[tuple[str, str, int, int]] = deque(maxlen=100_000)
        """Files that this tier deleted: namespace, path, bytes, the ledger's generation before."""
        self._root = root
        self._index = index
        self._limits = limits
        self._modes = modes
        self._on_change = on_change
        self._clock = clock
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._passes = Passes(
            root,
            index,
            limits,
            on_change,
            clock,
            shared=shared,
            janitor=lambda: self.janitor,
            server_time=lambda: self.writer.server_time,
            in_use=in_use,
        )
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._watch = Watch()
        self._fence = 0
        self._looked_at = float("-inf")
        self._quantum = 0
        self._hot_until = float("-inf")
        self._room_made_at = float("-inf")
        self._root_identity: tuple[int, int] | None = None

    # Life.

    def start(self) -> None:
        """Takes part: a directory of its own, the janitor's office if it is free. Raises ``TierError``."""
        with self._locked(None), self._mapped():
            self._stopping = False
            make_directory(self._root, self._modes)
            self._root_identity = None
            self._turn(self._clock(), supersede=True)

    def first_pass(self) -> Pass:
        """Reads the whole directory, at full speed; the leases are kept meanwhile, by one that has any. Raises ``TierError``."""

        def meanwhile() -> None:
            if self.writer.registered:
                self._beats(self._clock())

        with self._locked(None), self._mapped():
            return self._passes.whole(meanwhile)

    def run(self) -> None:
        """Starts the thread."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=maintenance_loop,
                args=(weakref.ref(self), self._wake),
                name="kvtier-file-tier",
                daemon=True,
            )
            self._thread.start()

    def stop(self) -> None:
        """Gives grants and office back, if the storage allows it within a short time."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)

    def leave(self) -> None:
        """Gives everything back, in the calling thread."""
        with self._locked(None), self._mapped():
            now = self._clock()
            self.writer.close(now)
            if self.janitor is not None:
                with contextlib.suppress(LeadershipLostError):
                    self.janitor.serve(now)
                    self.janitor.announce(now, released=True)
                self.janitor = None
            self._watch = Watch()
            self.writer.revoked()

    def wake(self) -> None:
        """Has the thread look at once."""
        self._hot_until = self._clock() + BEAT_SECONDS
        self._wake.set()

    @property
    def stopping(self) -> bool:
        """Whether the tier was closed."""
        return self._stopping

    def pause_seconds(self) -> float:
        """How long the thread may rest."""
        return BUSY_SECONDS if self._clock() < self._hot_until else BEAT_SECONDS

    # Grants.

    def obtain(self, size_bytes: int) -> Taken:
        """Bytes to write. Raises ``TierNoSpaceError`` if there is no room, or nobody to grant it in time, and ``TierUnavailableError``."""
        taken = self.allowance.take(size_bytes)
        if taken is not None:
            low = self.janitor is None and 2 * self.allowance.room_bytes() < self._quantum
            if low and self._clock() >= self._hot_until:
                self.wake()
            return taken
        if self._stopping:
            raise TierUnavailableError(f"{self._root}: the tier is closed")
        if size_bytes > self._limits().capacity_bytes:
            raise TierNoSpaceError(f"{self._root}: {size_bytes} bytes are more than the capacity")
        deadline = time.monotonic() + GRANT_SECONDS
        denials = self.allowance.denials
        waiter = self.allowance.enter(size_bytes)
        try:
            while True:
                left = deadline - time.monotonic()
                with self._locked(max(left, 0.01)), self._mapped():
                    taken = self.allowance.take(size_bytes)
                    if taken is not None:
                        return taken
                    self._turn(self._clock())
                taken = self.allowance.take(size_bytes)
                if taken is not None:
                    return taken
                if self.allowance.denials != denials:
                    raise TierNoSpaceError(
                        f"{self._root}: no room for {size_bytes} bytes within the capacity"
                    )
                if left <= 0:
                    raise TierNoSpaceError(
                        f"{self._root}: no grant for {size_bytes} bytes within {GRANT_SECONDS:g} s"
                    )
                self.allowance.wait(min(BUSY_SECONDS, left))
        finally:
            self.allowance.leave(waiter)

    def may_rename(self, taken: Taken) -> bool:
        """The check before a file gets its name: the grant counts and the lease is good."""
        return self.allowance.valid(taken) and self.writer.alive(self._clock())

    def full(self) -> None:
        """The file system has no room: something has to go, now if this is the janitor. Raises ``TierError``."""
        with self._locked(GRANT_SECONDS), self._mapped():
            if self.writer.registered:
                self.writer.note("full")
            self._turn(self._clock())

    def doubt(self) -> None:
        """The books may charge too much: a count is wanted."""
        if self.janitor is not None:
            self.janitor.recount_wanted = True

    def generation(self) -> int:
        """The ledger's generation; odd while it counts, -1 where this is not the janitor."""
        janitor = self.janitor
        return -1 if janitor is None else janitor.ledger.generation

    # Turning.

    def turn(self) -> None:
        """One round. Raises ``TierError``."""
        with self._locked(None), self._mapped():
            self._turn(self._clock())

    def maintain(self) -> None:
        """A round that does not rest before the limits are kept. Raises ``TierError``."""
        with self._locked(None), self._mapped():
            self._turn(self._clock())
            while (
                self.janitor is not None
                and (self._enforce() or self.janitor.hungry)
                and not self._stopping
            ):
                if self.janitor.hungry:
                    self._passes.whole(lambda: self._beats(self._clock()))
                self._beats(self._clock())

    def _turn(self, now: float, *, supersede: bool = False) -> None:
        try:
            self._take_part(now)
            self._beats(now, supersede=supersede)
        except OSError as error:
            if error.errno in NO_SPACE:
                self._make_room(now)
            raise
        janitor = self.janitor
        if janitor is not None:
            if self._enforce():
                self._hot_until = max(self._hot_until, self._clock() + BUSY_SECONDS)
            if self.janitor is not None and self.janitor.hungry and not supersede:
                self._passes.whole(lambda: self._beats(self._clock()))
                self._beats(self._clock())
        if not supersede:
            self._passes.some(self._clock())

    def _take_part(self, now: float) -> None:
        if self.writer.registered:
            return
        found = os.stat(self._root)
        identity = (found.st_dev, found.st_ino)
        if self._root_identity not in (None, identity) and not (self._root / CONTROL).is_dir():
            # The mount is gone, and this is what was below it: not to be filled.
            raise OSError(
                errno.ESTALE, "another directory has taken the tier's place", str(self._root)
            )
        self._root_identity = identity
        make_control(self._root, self._modes)
        self.writer.register(now)

    def _make_room(self, now: float) -> None:
        """For the records. Now and then only: it may be others who fill the file system, and then it is of no use."""
        if now - self._room_made_at < LEASE_SECONDS:
            return
        generation = self.generation()
        self._room_made_at = now if self._index.usage().objects else self._room_made_at
        for namespace, key, path, size in make_room(str(self._root), self._index):
            if generation >= 0 and size:
                self.removed.append((namespace, path, size, generation))
            self._forget(namespace, key)

    def _beats(self, now: float, *, supersede: bool = False) -> None:
        """Everything that must not wait for long: leases, wishes, answers."""
        if self.janitor is None:
            self._look(now, supersede)
        self.writer.settle()
        self._wish()
        if self.writer.registered:
            self.writer.flush(now)
        if not self.writer.registered:
            self._take_part(now)
        if self.janitor is not None:
            self._serve(now, supersede)
            self._look(now, False)
            self.writer.settle()
            self.writer.flush(now)

    def _wish(self) -> None:
        wanted, least = self.allowance.wanted()
        room = self.allowance.room_bytes()
        if wanted:
            self._hot_until = self._clock() + _BUSY_FOR_SECONDS
            self.writer.ask(wanted, least)
        elif self.janitor is None and self._quantum and room and 2 * room < self._quantum:
            self.writer.ask(self._quantum, 1)

    def _serve(self, now: float, supersede: bool) -> None:
        janitor = self.janitor
        if janitor is None:
            return
        self._credit(janitor)
        try:
            if janitor.serve(now, supersede=self.writer.name if supersede else ""):
                self._hot_until = self._clock() + _BUSY_FOR_SECONDS
        except LeadershipLostError:
            self._deposed()

    def _deposed(self) -> None:
        _log.warning("%s: another process has become the janitor", self._root)
        self.janitor = None
        self._watch = Watch()

    def _credit(self, janitor: Janitor) -> None:
        while self.removed:
            namespace, path, size_bytes, generation = self.removed.popleft()
            if generation == janitor.ledger.generation and not generation % 2:
                janitor.credit(namespace, path, size_bytes)
            else:
                janitor.recount_wanted = True

    def _look(self, now: float, supersede: bool) -> None:
        """Reads the janitor's record; takes the office if it is free."""
        silent = self.janitor is None and self._watch.unchanged_seconds > _SILENT_SECONDS
        ledger = read_ledger(self._root, self._fence) if self._fence and not silent else None
        if ledger is None:
            self._fence = self._top()
            if not self.writer.registered:
                return
            ledger = read_ledger(self._root, self._fence) if self._fence else None
        if ledger is not None:
            self._quantum = int(ledger.get("quantum", 0))
            if self.writer.registered:
                self.writer.collect(self._fence, ledger)
        if self.janitor is not None or not vacant(
            ledger, self._fence, self._watch, now, supersede=supersede
        ):
            return
        inherited = acquire(self._root, self._fence, self.writer.name, self._modes)
        self._watch = Watch()
        if inherited is None:
            self._fence = self._top()
            return
        self._fence = inherited.fence
        self.janitor = Janitor(
            self._root,
            self.writer.name,
            inherited,
            self._limits,
            self._index,
            self._modes,
            self._forget,
            self._clock,
        )
        self._serve(now, supersede)

    def _top(self) -> int:
        try:
            return top_fence(self._root, fresh=True)
        except OSError as error:
            if error.errno not in GONE:
                raise
            # The directory's books are gone, and this writer's record with them: registering anew makes both again.
            self.writer.revoked()
            return 0

    def _forget(self, namespace: str, key: bytes) -> None:
        if self._index.remove(namespace, key):
            self._on_change(namespace, key, False)

    def _enforce(self) -> bool:
        janitor = self.janitor
        if janitor is None:
            return False
        try:
            return janitor.enforce(self._clock())
        except LeadershipLostError:
            self._deposed()
            return False

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

    @contextlib.contextmanager
    def _locked(self, seconds: float | None) -> Iterator[None]:
        if not self._lock.acquire(timeout=-1 if seconds is None else seconds):
            raise TierNoSpaceError(
                f"{self._root}: the directory's books could not be reached in time"
            )
        try:
            yield
        finally:
            self._lock.release()


_PERCENT = 5


def make_room(root: str, index: Index) -> list[tuple[str, bytes, str, int]]:
    """Removes the objects that were used longest ago, a part of what there is: namespace, key, path and bytes of each. Everybody may do so
    at any time; it is for one whose records find no room, and who could not evict in order without them. Raises ``OSError``."""
    removed = []
    wanted = max(index.usage().used_bytes * _PERCENT // 100, 1)
    for namespace, key, _ in index.oldest(wanted):
        path = object_path(root, namespace, key)
        try:
            size = os.lstat(path).st_size
            os.unlink(path)
        except OSError as error:
            if error.errno not in GONE:
                raise
            size = 0
        removed.append((namespace, key, path, size))
    return removed


def maintenance_loop(keeper_of: weakref.ref[DirectoryMaintenance], wake: threading.Event) -> None:
    """The thread. It keeps no tier alive: one that was dropped without being closed ends it."""
    while True:
        keeper = keeper_of()
        if keeper is None:
            return
        pause = keeper.pause_seconds()
        del keeper
        wake.wait(pause)
        wake.clear()
        keeper = keeper_of()
        if keeper is None:
            return
        try:
            if keeper.stopping:
                keeper.leave()
                return
            keeper.turn()
            keeper.last_error = ""
        except TierError as error:
            if str(error) != keeper.last_error:
                _log.warning("%s", error)
            keeper.last_error = str(error)
        except Exception as error:  # noqa: BLE001
            # A bug must not end the thread that keeps the leases: others would take this process for dead, again and again.
            if repr(error) != keeper.last_error:
                _log.exception("the file tier's upkeep failed and goes on")
            keeper.last_error = repr(error)
