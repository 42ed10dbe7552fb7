"""Leader election for directory maintenance. The leader of term N owns the directory `janitor-N`;
creating it is atomic.

One process per directory is the leader, called its janitor: it grants bytes, counts and evicts.
Of several candidates for term N + 1 only one creates the directory. Removing `janitor-N` ends the
previous term: that janitor can neither write its ledger nor offer a grant. The term is the fencing
token; the highest directory always stays, so no term is used twice.

Janitor and writers are *holders* of a directory: each rewrites its record every
``HEARTBEAT_SECONDS``. The others watch the record. If it does not change for ``LEASE_SECONDS`` of
the watcher's own monotonic clock, over repeated reads, the holder is considered dead. Clocks of
different hosts are never compared, and time during which the watcher was stopped or could not read
does not count. Where holder and watcher share a host and its process ids, the process table answers
at once.

A wrong verdict is safe: what ends a holder is the removal of its directory (``fence_directory``),
which the file system orders with everything that the holder does in it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.processes import has_exited, is_observable, process_start, process_tag
from kvtier.tiers.filesystem import record
from kvtier.tiers.filesystem.io import GONE
from kvtier.tiers.filesystem.layout import (
    CONTROL,
    LEDGER,
    PREVIOUS,
    RECORD,
    Modes,
    grants_in,
    make_directory,
    term_path,
    terms_in,
    writers_path,
)
from kvtier.tiers.filesystem.record import is_ledger, is_writer

HEARTBEAT_SECONDS = 1.0
LEASE_SECONDS = 10.0
"""Ten heartbeats: a server that stalls for seconds ends no lease, and a lost host blocks the stores
of the others for no longer than this."""
_MAX_OBSERVED_SECONDS = 2 * HEARTBEAT_SECONDS
_HOLDER = re.compile(r"([0-9a-f]{8})-([0-9a-z]+)-(\d+)-(\d+)-[0-9a-f]{8}")
_FENCE_ATTEMPTS = 16
_BARRIER_PREFIX = ".eye-"
UNREADABLE = (*GONE, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO)
"""Errors of a record that does not exist, or of something else in its place."""


class LeadershipLostError(Exception):
    """Another process leads the directory."""


@dataclass(frozen=True, slots=True)
class InheritedState:
    """What a new leader starts from. ``base_bytes``: None if the predecessor's ledger cannot be
    read. ``grants``: bytes by number, for every writer.
    """

    term: int
    base_bytes: int | None
    grants: dict[str, dict[int, int]]


def make_control_directory(root: Path, modes: Modes) -> None:
    """Creates the control directories below ``root``, which must exist. Raises ``OSError``."""
    make_directory(root / CONTROL, modes)
    make_directory(writers_path(root), modes)


def current_term(root: Path, *, uncached: bool) -> int:
    """The highest term; 0 if the directory never had a leader. Raises ``OSError``."""
    control = root / CONTROL
    names = listdir_uncached(control) if uncached else os.listdir(control)
    return max(terms_in(names), default=0)


def leadership_is_free(
    ledger: dict[str, Any] | None, term: int, watch: LeaseWatch, now: float, *, supersede: bool
) -> bool:
    """Whether the next term may be acquired. ``supersede``: also from another tier of this process.
    ``now``: monotonic seconds.
    """
    if not term:
        return True
    heartbeat = None if ledger is None else ledger.get("beat")
    if watch.expired((term, heartbeat), now):
        return True
    if ledger is None:
        return False
    holder = str(ledger.get("holder"))
    return (
        bool(ledger.get("released")) or is_dead(holder) or (supersede and in_this_process(holder))
    )


def acquire(root: Path, previous_term: int, holder: str, modes: Modes) -> InheritedState | None:
    """Acquires the term after ``previous_term``. None if another process did.

    Raises ``OSError``.
    """
    term = previous_term + 1
    own = term_path(root, term)
    if not make_directory(own, modes):
        return None
    if current_term(root, uncached=True) != term:
        fence_directory(own)
        return None
    record.create(own / LEDGER, initial_ledger(term, holder), modes)
    try:
        # From here on the predecessor cannot write its ledger.
        os.rename(term_path(root, previous_term) / LEDGER, own / PREVIOUS)
    except OSError as error:
        if error.errno not in UNREADABLE:
            raise
    for lower in terms_in(os.listdir(root / CONTROL)):
        if lower < term and not fence_directory(term_path(root, lower)):
            raise OSError(f"{term_path(root, lower)} cannot be removed")
    grants = {
        writer: grants_in(_names(writers_path(root) / writer))
        for writer in listdir_uncached(writers_path(root))
    }
    # Read after the grants: the predecessor removes a grant only after its ledger accounts for it.
    return InheritedState(term, _take_base(own / PREVIOUS), grants)


def initial_ledger(term: int, holder: str) -> dict[str, Any]:
    """The record of a leader that has not counted yet."""
    return {
        "fence": term,
        "holder": holder,
        "beat": 0,
        "released": False,
        "base": None,
        "recall": 0,
        "writers": {},
    }


def read_ledger(root: Path, term: int) -> dict[str, Any] | None:
    """The leader's record. None if there is no complete and valid one. Raises ``OSError``."""
    found = _read(term_path(root, term) / LEDGER)
    return found if found is not None and is_ledger(found) else None


def read_writer(root: Path, writer: str) -> dict[str, Any] | None:
    """A writer's record. None if there is no complete and valid one. Raises ``OSError``."""
    found = _read(writers_path(root) / writer / RECORD)
    return found if found is not None and is_writer(found) else None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return record.read(path)
    except OSError as error:
        if error.errno in UNREADABLE:
            return None
        raise


def _names(directory: Path) -> list[str]:
    try:
        return listdir_uncached(directory)
    except OSError as error:
        if error.errno in UNREADABLE:
            return []
        raise


def _take_base(previous: Path) -> int | None:
    try:
        found = record.read(previous)
        os.unlink(previous)
    except OSError as error:
        if error.errno in UNREADABLE:
            return None
        raise
    base = None if found is None else found.get("base")
    return base if isinstance(base, int) and not isinstance(base, bool) and base >= 0 else None


# Holders.


def new_holder() -> str:
    """A name for a holder in this process: boot, pid namespace, pid, start, and a random part."""
    return f"{process_tag()}-{process_start(os.getpid())}-{os.urandom(4).hex()}"


def in_this_process(holder: str) -> bool:
    """Whether the holder belongs to this process."""
    return holder.rsplit("-", 1)[0] == new_holder().rsplit("-", 1)[0]


def is_dead(holder: str) -> bool:
    """Whether the holder's process is proven to be dead. False if it is not visible from here."""
    match = _HOLDER.fullmatch(holder)
    return match is not None and is_visible(holder) and has_exited(int(match[3]), int(match[4]))


def is_visible(holder: str) -> bool:
    """Whether this process sees the holder's process id: same boot and same pid namespace."""
    match = _HOLDER.fullmatch(holder)
    return match is not None and is_observable(match[1], match[2])


class LeaseWatch:
    """Watches the record of one holder. Not thread-safe."""

    def __init__(self) -> None:
        self._value: object = None
        self._seen_at: float | None = None
        self.unchanged_seconds = 0.0

    def expired(self, value: object, now: float) -> bool:
        """Notes the value read at ``now`` (monotonic). True if it has not changed for
        ``LEASE_SECONDS`` of observation.
        """
        if self._seen_at is None or value != self._value:
            self.unchanged_seconds = 0.0
        else:
            self.unchanged_seconds += min(now - self._seen_at, _MAX_OBSERVED_SECONDS)
        self._value, self._seen_at = value, now
        return self.unchanged_seconds >= LEASE_SECONDS


# Directories that several hosts change.


def listdir_uncached(directory: Path) -> list[str]:
    """The names in a directory as the file system has them now. Raises ``OSError``.

    An NFS client answers from its cache for up to a minute unless it has changed the directory
    itself; creating and removing a file makes it ask the server.
    """
    barrier = directory / f"{_BARRIER_PREFIX}{os.urandom(6).hex()}"
    os.close(os.open(barrier, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(barrier)
    names = os.listdir(directory)
    for name in names:
        if name.startswith(_BARRIER_PREFIX):
            # Left by a process that was killed. Its purpose was fulfilled when it was created.
            with contextlib.suppress(OSError):
                os.unlink(directory / name)
    return [name for name in names if not name.startswith(_BARRIER_PREFIX)]


def fence_directory(directory: Path) -> bool:
    """Empties and removes a holder's directory. Raises ``OSError``.

    After True, nothing that the holder still attempts in it can succeed. Anything else in its
    place, such as a link, is removed itself; the target of a link is not touched.
    """
    for _ in range(_FENCE_ATTEMPTS):
        try:
            _empty(directory)
            os.rmdir(directory)
        except NotADirectoryError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(directory)
            return True
        except OSError as error:
            if error.errno in GONE:
                return True
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(directory)
                return True
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return True
    return False


def _empty(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for name in os.listdir(descriptor):
            try:
                os.unlink(name, dir_fd=descriptor)
            except FileNotFoundError:
                continue
            except (IsADirectoryError, PermissionError):
                # Unlinking a directory is EISDIR on Linux and EPERM elsewhere. KVTier creates none.
                status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                if not stat.S_ISDIR(status.st_mode):
                    raise
                shutil.rmtree(name, dir_fd=descriptor)
    finally:
        os.close(descriptor)
