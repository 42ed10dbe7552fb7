"""Who holds something in a shared directory, and whether that process still lives.

A holder rewrites its record every ``BEAT_SECONDS``. Others judge it by watching: a record that did not change for ``LEASE_SECONDS`` of
their own monotonic clock, seen again and again, is given up. No clock is compared with that of another host, and time in which the watcher
itself was stopped, or could not see, does not count. Where holder and watcher share a host and its process numbers, the process table says it at once.

A wrong judgement is safe: what ends a holder is the removal of its directory (``remove_fenced``), which the file system orders with
everything that the holder does in it.

Being the janitor of a directory: a numbered directory whose existence is the office.

Making ``janitor-<n + 1>`` is atomic, so one of those who try gets it; removing ``janitor-<n>`` is what deposes its holder, who can neither
announce nor offer anything any more. The number is the fencing number; the highest directory always stays, so none is used twice.
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
    grants_among,
    make_directory,
    seat_fences,
    seat_path,
    writers_path,
)
from kvtier.tiers.filesystem.record import is_ledger, is_writer

BEAT_SECONDS = 1.0
LEASE_SECONDS = 10.0
"""Ten beats: a server that stalls for some seconds deposes nobody, and a lost host blocks the others' stores for no longer than this."""
_MAX_OBSERVED_SECONDS = 2 * BEAT_SECONDS
_HOLDER = re.compile(r"([0-9a-f]{8})-([0-9a-z]+)-(\d+)-(\d+)-[0-9a-f]{8}")
_FENCE_ATTEMPTS = 16
_EYE_PREFIX = ".eye-"
BROKEN = (*GONE, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO)
"""What reading or writing a record ends with that is not there, or has something else in its place."""


def new_holder() -> str:
    """A name for a holder in this process: boot, process-number space, process, its start, and something random."""
    return f"{process_tag()}-{process_start(os.getpid())}-{os.urandom(4).hex()}"


def in_this_process(holder: str) -> bool:
    """Whether the holder was made by this very process."""
    return holder.rsplit("-", 1)[0] == new_holder().rsplit("-", 1)[0]


def surely_gone(holder: str) -> bool:
    """Whether the process is known to be dead. False for one that cannot be asked from here."""
    match = _HOLDER.fullmatch(holder)
    return match is not None and here(holder) and has_exited(int(match[3]), int(match[4]))


def here(holder: str) -> bool:
    """Whether the process could be asked from here: it shares boot and process numbers with this one."""
    match = _HOLDER.fullmatch(holder)
    return match is not None and is_observable(match[1], match[2])


class Watch:
    """Watches one record. Not for several threads."""

    def __init__(self) -> None:
        self._value: object = None
        self._seen_at: float | None = None
        self.unchanged_seconds = 0.0

    def expired(self, value: object, now: float) -> bool:
        """Takes what is seen at ``now`` (monotonic); whether it has been the same for ``LEASE_SECONDS`` of watching."""
        if self._seen_at is None or value != self._value:
            self.unchanged_seconds = 0.0
        else:
            self.unchanged_seconds += min(now - self._seen_at, _MAX_OBSERVED_SECONDS)
        self._value, self._seen_at = value, now
        return self.unchanged_seconds >= LEASE_SECONDS


def listdir_uncached(directory: Path) -> list[str]:
    """The names in a directory as the file system has them at this moment. An NFS client answers from what it remembers for up to a
    minute, unless it has changed the directory itself. Raises ``OSError``."""
    eye = directory / f"{_EYE_PREFIX}{os.urandom(6).hex()}"
    os.close(os.open(eye, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(eye)
    names = os.listdir(directory)
    for name in names:
        if name.startswith(_EYE_PREFIX):
            # Made, it has done what it is for, whoever's it is. One that was killed, or could not remove it, left it for ever.
            with contextlib.suppress(OSError):
                os.unlink(directory / name)
    return [name for name in names if not name.startswith(_EYE_PREFIX)]


def remove_fenced(directory: Path) -> bool:
    """Empties and removes a directory. After True, nothing that its holder still tries in it can succeed. What stands in its place, such as a
    link, goes itself; what it points to is nobody's business here. Raises ``OSError``."""
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
                # Unlinking a directory is EISDIR here and EPERM elsewhere. Nobody of ours makes one.
                if not stat.S_ISDIR(
                    os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode
                ):
                    raise
                shutil.rmtree(name, dir_fd=descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Inherited:
    """What a new janitor finds. ``base_bytes``: None if the predecessor's books cannot be read. ``grants``: of every writer."""

    fence: int
    base_bytes: int | None
    grants: dict[str, dict[int, int]]


def make_control(root: Path, modes: Modes) -> None:
    """Makes the directories below ``root``, which must be there. Raises ``OSError``."""
    make_directory(root / CONTROL, modes)
    make_directory(writers_path(root), modes)


def top_fence(root: Path, *, fresh: bool) -> int:
    """The janitor's fencing number, 0 if there never was one. Raises ``OSError``."""
    control = root / CONTROL
    names = listdir_uncached(control) if fresh else os.listdir(control)
    return max(seat_fences(names), default=0)


def read_ledger(root: Path, fence: int) -> dict[str, Any] | None:
    """The janitor's record; None if there is none that is whole and understood. Raises ``OSError``."""
    try:
        found = record.read(seat_path(root, fence) / LEDGER)
    except OSError as error:
        if error.errno in BROKEN:
            return None
        raise
    return found if found is not None and is_ledger(found) else None


def vacant(
    ledger: dict[str, Any] | None, fence: int, watch: Watch, now: float, *, supersede: bool
) -> bool:
    """Whether the office may be taken. ``supersede``: also from another tier of this process."""
    if not fence:
        return True
    beat = None if ledger is None else ledger.get("beat")
    if watch.expired((fence, beat), now):
        return True
    if ledger is None:
        return False
    holder = str(ledger.get("holder"))
    return (
        bool(ledger.get("released"))
        or surely_gone(holder)
        or (supersede and in_this_process(holder))
    )


def acquire(root: Path, above: int, holder: str, modes: Modes) -> Inherited | None:
    """Takes the office above fencing number ``above``; None if somebody else did. Raises ``OSError``."""
    fence = above + 1
    mine = seat_path(root, fence)
    if not make_directory(mine, modes):
        return None
    if top_fence(root, fresh=True) != fence:
        remove_fenced(mine)
        return None
    record.create(mine / LEDGER, first_record(fence, holder), modes)
    try:
        # The predecessor cannot announce anything from here on.
        os.rename(seat_path(root, above) / LEDGER, mine / PREVIOUS)
    except OSError as error:
        if error.errno not in BROKEN:
            raise
    for lower in seat_fences(os.listdir(root / CONTROL)):
        if lower < fence and not remove_fenced(seat_path(root, lower)):
            raise OSError(f"{seat_path(root, lower)} cannot be removed")
    grants = {
        writer: grants_among(_names(writers_path(root) / writer))
        for writer in listdir_uncached(writers_path(root))
    }
    # Read after the grants: one that the predecessor had struck off by then is in what it wrote before it did so.
    return Inherited(fence, _base(mine / PREVIOUS), grants)


def first_record(fence: int, holder: str) -> dict[str, Any]:
    """A janitor's record before it knows anything."""
    return {
        "fence": fence,
        "holder": holder,
        "beat": 0,
        "released": False,
        "base": None,
        "recall": 0,
        "writers": {},
    }


def _names(directory: Path) -> list[str]:
    try:
        return listdir_uncached(directory)
    except OSError as error:
        if error.errno in BROKEN:
            return []
        raise


def _base(previous: Path) -> int | None:
    try:
        found = record.read(previous)
        os.unlink(previous)
    except OSError as error:
        if error.errno in BROKEN:
            return None
        raise
    base = None if found is None else found.get("base")
    return base if isinstance(base, int) and not isinstance(base, bool) and base >= 0 else None


def read_writer(root: Path, writer: str) -> dict[str, Any] | None:
    """A writer's record; None if there is none that is whole and understood. Raises ``OSError``."""
    try:
        found = record.read(writers_path(root) / writer / RECORD)
    except OSError as error:
        if error.errno in BROKEN:
            return None
        raise
    return found if found is not None and is_writer(found) else None
