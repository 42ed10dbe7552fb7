"""Who holds something in a shared directory, and whether that process still lives.

A holder rewrites its record every ``BEAT_SECONDS``. Others judge it by watching: a record that did not change for ``LEASE_SECONDS`` of
their own monotonic clock, seen again and again, is given up. No clock is compared with that of another host, and time in which the watcher
itself was stopped, or could not see, does not count. Where holder and watcher share a host and its process numbers, the process table says it at once.

A wrong judgement is safe: what ends a holder is the removal of its directory (``remove_fenced``), which the file system orders with
everything that the holder does in it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from pathlib import Path

from kvtier.tiers.filesystem.direct import GONE
from kvtier.tiers.filesystem.scan import process_tag

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
    return f"{process_tag()}-{_started(os.getpid()) or 0}-{os.urandom(4).hex()}"


def in_this_process(holder: str) -> bool:
    """Whether the holder was made by this very process."""
    return holder.rsplit("-", 1)[0] == new_holder().rsplit("-", 1)[0]


def surely_gone(holder: str) -> bool:
    """Whether the process is known to be dead. False for one that cannot be asked from here."""
    match = _HOLDER.fullmatch(holder)
    # The number of the first process-number space is the same on every host: another boot may be another host.
    return match is not None and here(holder) and _started(int(match[3])) != int(match[4])


def here(holder: str) -> bool:
    """Whether the process could be asked from here: it shares boot and process numbers with this one."""
    match = _HOLDER.fullmatch(holder)
    boot, space, _ = process_tag().split("-")
    return match is not None and match[1] == boot and match[2] == space


def _started(pid: int) -> int | None:
    """When a process began, in ticks since the boot; None if there is none, or only what is left of one."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


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


def fresh_names(directory: Path) -> list[str]:
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
                if not stat.S_ISDIR(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
                    raise
                shutil.rmtree(name, dir_fd=descriptor)
    finally:
        os.close(descriptor)
