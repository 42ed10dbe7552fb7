"""Locks that prove to other containers that a process has exited.

Process ids of another pid namespace have no meaning here. Each engine process therefore holds a
lock on a file in ``peers/`` and names the file in its ``Hello``; tierd tries the lock. The kernel
drops it when the process ends, however it ends. A missing file proves nothing.

Why flock(2), on a descriptor that is closed at exec and in forked children:

* The lock belongs to the open file and is dropped when its last descriptor is released. At the end
  of a process that happens after all its threads have released their memory mappings. A lock of
  fcntl(2) is dropped when the process closes *any* descriptor of the file and, at its end, before
  any device is released.
* A child made by fork(2) without exec shares the open file and would hold the lock on: late proof,
  never early. Children that Python makes close it (``os.register_at_fork``); the parent's
  descriptor is unaffected.
* Devices are released in the same sweep as the lock, on Linux from the highest descriptor to the
  lowest. A low descriptor is therefore reserved early (``reserve_descriptor``, when vLLM loads
  plugins and no device is open), and the lock is put there. ``SETTLE_SECONDS`` pass between the
  release of the lock and the proof, which covers the rest of the sweep.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvtier.processes import Liveness, ProcessIdentity, liveness_of

PEERS_NAME = "peers"
SETTLE_SECONDS = 0.5
"""An H200 wrote for up to 11 ms after a lock on a high descriptor was free, and not at all after
one on a low descriptor (docs/sidecar.md)."""
LEFTOVER_SECONDS = 120.0
_NAME_CHARACTERS = frozenset("0123456789abcdef")
_log = logging.getLogger("kvtier.tierd")


class _OwnLock:
    """Of this process: the reserved descriptor, and the held locks by directory."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """The I/O threads of several clients may call ``hold_peer_lock``."""
        self.reserved = -1
        self.held: dict[Path, tuple[str, int]] = {}

    def after_fork(self) -> None:
        self.lock = threading.Lock()
        held, self.held = self.held, {}
        for _, descriptor in held.values():
            os.close(descriptor)
            if descriptor == self.reserved:
                self.reserved = -1


_own = _OwnLock()
os.register_at_fork(after_in_child=_own.after_fork)


def reserve_descriptor() -> None:
    """Reserves a low descriptor for this process's lock. May be repeated. Failure costs only the
    order (see above)."""
    with _own.lock:
        if _own.reserved >= 0:
            return
        try:
            _own.reserved = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            _log.debug("cannot reserve a descriptor: %s", error)


def hold_peer_lock(run_directory: Path) -> str:
    """Name of the lock in ``run_directory`` that this process holds until it ends, taken by the
    first call.

    Empty if it cannot be taken: other containers then cannot prove the end of this process and wait
    for a timeout.
    """
    with _own.lock:
        held = _own.held.get(run_directory)
        if held is not None and _is_there(run_directory / PEERS_NAME / held[0], held[1]):
            return held[0]
        try:
            name, descriptor = _take(run_directory / PEERS_NAME)
        except OSError as error:
            _log.warning(
                "cannot take a lock in %s: %s; tierd will detect the end of this process late",
                run_directory,
                error,
            )
            return ""
        if _own.reserved >= 0 and all(each != _own.reserved for _, each in _own.held.values()):
            os.dup2(descriptor, _own.reserved, inheritable=False)
            os.close(descriptor)
            descriptor = _own.reserved
        _own.held[run_directory] = (name, descriptor)
        return name


def _is_there(path: Path, descriptor: int) -> bool:
    try:
        at_path = os.stat(path)
    except OSError:
        return False
    opened = os.fstat(descriptor)
    return (opened.st_dev, opened.st_ino) == (at_path.st_dev, at_path.st_ino)


def _take(directory: Path) -> tuple[str, int]:
    """Raises ``OSError``."""
    open_directory(directory)
    name = secrets.token_hex(12)
    descriptor = os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        # tierd may run as another user, and opens the file to try the lock.
        os.fchmod(descriptor, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return name, descriptor


def open_directory(directory: Path) -> None:
    """Makes ``peers/`` for every user, whatever the umask. Raises ``OSError``."""
    try:
        directory.mkdir()
    except FileExistsError:
        return
    directory.chmod(0o777)


def is_lock_held(directory: Path, name: str) -> bool | None:
    """Whether the lock is held; None: unknown, because there is no such file."""
    if not name or not _NAME_CHARACTERS.issuperset(name):
        return None
    try:
        descriptor = os.open(
            directory / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        )
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return True if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN) else None
    finally:
        os.close(descriptor)
    return False


class PeerLiveness:
    """``liveness_of`` for processes that may be in other containers. Only the loop's thread uses
    it."""

    def __init__(
        self,
        run_directory: Path,
        clock: Callable[[], float] = time.monotonic,
        settle_seconds: float = SETTLE_SECONDS,
        visible: Callable[[ProcessIdentity], Liveness] = liveness_of,
    ) -> None:
        self._directory = run_directory / PEERS_NAME
        self._clock = clock
        self._settle_seconds = settle_seconds
        self._visible = visible
        self._free_since: dict[str, float] = {}

    def __call__(self, process: ProcessIdentity) -> Liveness:
        """What is known about ``process``: by its id if it is observable, else by its lock."""
        seen = self._visible(process)
        if seen is not Liveness.UNKNOWN or not process.lock:
            return seen
        held = is_lock_held(self._directory, process.lock)
        if held is None:
            return Liveness.UNKNOWN
        if held:
            self._free_since.pop(process.lock, None)
            return Liveness.ALIVE
        now = self._clock()
        since = self._free_since.setdefault(process.lock, now)
        return Liveness.GONE if now - since >= self._settle_seconds else Liveness.ALIVE

    def sweep(self, in_use: set[str]) -> int:
        """Removes files that are not locked and not ``in_use``; returns how many."""
        count = 0
        try:
            found = list(os.scandir(self._directory))
        except OSError:
            return 0
        for entry in found:
            try:
                age = time.time() - entry.stat(follow_symlinks=False).st_mtime
                if (
                    entry.name not in in_use
                    and age > LEFTOVER_SECONDS
                    and is_lock_held(self._directory, entry.name) is False
                ):
                    os.unlink(entry.path)
                    self._free_since.pop(entry.name, None)
                    count += 1
            except OSError as error:
                _log.debug("%s: %s", entry.path, error)
        return count
