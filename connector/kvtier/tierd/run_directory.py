"""The run directory: where engine processes and tierd meet.

::

    <runDirectory>/          memory-backed, e.g. /dev/shm/kvtier-<name>-<hash>
        alive                shared lock held by every attached process and by tierd: nobody holds it, nobody lives here
        tierd.lock           exclusive lock held by the living tierd, which touches the file with every beat of its loop
        spawn.lock           exclusive lock held while somebody starts a tierd
        aside.lock           exclusive lock held while the lock of a dead tierd is set aside
        reads/               where tierds read into, should one die and a thread of it hang (hung.py)
        epoch                the last epoch that was given out, as text
        pool                 the host pool
        slots, namespaces/   what is in the pool, for the next tierd (takeover.py)
        tierd.sock           the socket
        http.json            where /status and /metrics really are
        sessions/            one file per attached worker: what a new tierd must wait for

Locks are flock(2): the kernel drops them with the last process that holds them, however it ended.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path

from kvtier.errors import ConfigurationError
from kvtier.files import replace_file
from kvtier.processes import ProcessIdentity, main_thread_exited, own_identity

ALIVE_NAME = "alive"
LOCK_NAME = "tierd.lock"
SPAWN_NAME = "spawn.lock"
ASIDE_NAME = "aside.lock"
EPOCH_NAME = "epoch"
HTTP_NAME = "http.json"
SESSIONS_NAME = "sessions"
PREFIX = "kvtier-"
MARKER = b"kvtier run directory\n"
SHARED_MARKER = b"kvtier run directory of a pod\n"
"""Content of ``alive``: nothing is ever removed from a directory whose ``alive`` says something else, such as
the other one: between two lives of a sidecar's tierd nobody may hold the lock, and its RAM shall still be there."""
MAX_SOCKET_PATH_BYTES = 107
MAX_EPOCH = 1 << 62
"""More than can ever be counted, and less than what does not fit a message."""
_JOIN_SECONDS = 5.0
_log = logging.getLogger("kvtier.tierd")


class FileLock:
    """An flock on an open file. ``close`` releases it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def close(self) -> None:
        """Releases the lock. May be called twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def try_lock(path: Path, mode: int, *, shared: bool = False) -> FileLock | None:
    """Locks ``path`` (made if missing, with ``mode``) without waiting; None if somebody else holds it.

    Raises ``OSError`` where the file cannot be opened.
    """
    descriptor = open_shared(path, os.O_RDWR | os.O_CREAT, mode)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return FileLock(descriptor)


def open_shared(path: Path, flags: int, mode: int) -> int:
    """Opens a file of the run directory; one that this call makes gets exactly ``mode``, whatever the umask. Raises ``OSError``."""
    try:
        return os.open(path, (flags & ~os.O_CREAT) | os.O_CLOEXEC)
    except FileNotFoundError:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, mode)
        os.fchmod(descriptor, mode)
        return descriptor


def is_private(path: Path) -> bool:
    """Whether only this user may write to a run directory, or it is a volume of the pod. Its name can be guessed and /dev/shm is everybody's:
    whoever made it first, or may write there, could answer in tierd's place. Raises ``FileNotFoundError``.
    """
    status = os.lstat(path)
    own = (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & 0o022
    )
    return own or os.path.ismount(path)


class RunDirectory:
    """One run directory. ``shared``: it is a volume of a pod that belongs to engine and sidecar, which may run as different users;
    its files are for both, and it is never removed. Otherwise it belongs to one user."""

    def __init__(self, path: Path | str, *, shared: bool = False) -> None:
        self.path = Path(path)
        self.shared = shared
        self.file_mode = 0o666 if shared else 0o600
        self._alive: FileLock | None = None
        socket = os.fsencode(self.path / "tierd.sock")
        if len(socket) > MAX_SOCKET_PATH_BYTES:
            raise ConfigurationError(
                "runDirectory",
                str(self.path),
                f"a path of at most {MAX_SOCKET_PATH_BYTES - len('/tierd.sock')} bytes, because a socket is made in it",
            )

    def join(self) -> None:
        """Makes the directory if needed and takes the shared lock on ``alive``. Raises ``OSError``, and ``ConfigurationError`` for a directory
        that is not this user's alone.

        Somebody may be removing a dead directory of the same name: then this makes a fresh one.
        """
        deadline = time.monotonic() + _JOIN_SECONDS
        while True:
            lock = self._try_join()
            if lock is not None:
                self._alive = lock
                return
            if time.monotonic() > deadline:
                raise TimeoutError(None, "another process keeps removing it", str(self.path))
            time.sleep(0.01)

    def _try_join(self) -> FileLock | None:
        self.path.mkdir(mode=0o777 if self.shared else 0o700, parents=True, exist_ok=True)
        alive = self.path / ALIVE_NAME
        try:
            self._refuse_foreign()
            lock = try_lock(alive, self.file_mode, shared=True)
            if lock is None:
                return None
            if not _is_file(lock.descriptor, alive):
                lock.close()
                return None
            if os.fstat(lock.descriptor).st_size == 0:
                os.pwrite(lock.descriptor, SHARED_MARKER if self.shared else MARKER, 0)
            sessions = self.path / SESSIONS_NAME
            sessions.mkdir(exist_ok=True)
        except FileNotFoundError:
            return None
        return lock

    def _refuse_foreign(self) -> None:
        if not self.shared and not is_private(self.path):
            raise ConfigurationError(
                "runDirectory", str(self.path), "a directory that only this user may write to"
            )

    def rejoin(self) -> None:
        """As ``join`` if not joined, or if somebody removed the directory all the same. Raises ``OSError``."""
        if self._alive is not None:
            if _is_file(self._alive.descriptor, self.path / ALIVE_NAME):
                return
            self._alive.close()
            self._alive = None
        self.join()

    def leave(self) -> bool:
        """Drops the shared lock; removes the directory if nobody else holds it and it is not a pod's volume. True: removed."""
        lock, self._alive = self._alive, None
        if lock is None:
            return False
        try:
            if self.shared:
                return False
            try:
                # Turning a shared lock into an exclusive one gives up the shared one first, so of several that leave
                # at once the last one succeeds.
                fcntl.flock(lock.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
            if not _is_file(lock.descriptor, self.path / ALIVE_NAME):
                return False
            return _remove(self.path)
        finally:
            lock.close()

    def try_daemon_lock(self) -> FileLock | None:
        """The lock of the one living tierd; None if there is one. Raises ``OSError``.

        A tierd that was killed keeps its lock for as long as a thread of it hangs in a mount. Its file is set aside.
        """
        path = self.path / LOCK_NAME
        lock = try_lock(path, self.file_mode)
        if lock is None and self._set_aside(path):
            lock = try_lock(path, self.file_mode)
        if lock is not None and not _is_file(lock.descriptor, path):
            lock.close()
            return None
        if lock is not None:
            me = own_identity()
            text = json.dumps(
                {"pid": me.pid, "processStart": me.start, "pidNamespace": me.pid_namespace}
            )
            os.ftruncate(lock.descriptor, 0)
            os.pwrite(lock.descriptor, text.encode(), 0)
        return lock

    def _set_aside(self, path: Path) -> bool:
        """Removes the lock file of a tierd that will never run again. One at a time, so that nobody's new file is taken for the old one."""
        if not self._holder_is_dead(path):
            return False
        turn = try_lock(self.path / ASIDE_NAME, self.file_mode)
        if turn is None:
            return False
        try:
            if not self._holder_is_dead(path):
                return False
            path.unlink(missing_ok=True)
            _log.warning("a thread of the last tierd hangs; its lock is set aside")
            return True
        finally:
            turn.close()

    @staticmethod
    def _holder_is_dead(path: Path) -> bool:
        try:
            document = json.loads(path.read_bytes())
            holder = ProcessIdentity(
                int(document["pid"]), int(document["processStart"]), str(document["pidNamespace"])
            )
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return main_thread_exited(holder)

    def daemon_lives(self) -> bool:
        """Whether some process holds the daemon's lock. A look is a shared lock for a moment, so looks do not see each other."""
        try:
            lock = try_lock(self.path / LOCK_NAME, self.file_mode, shared=True)
        except OSError:
            return False
        if lock is None:
            return not self._holder_is_dead(self.path / LOCK_NAME)
        lock.close()
        return False

    def try_spawn_lock(self) -> FileLock | None:
        """The right to start a tierd; None while somebody else is at it. Raises ``OSError``."""
        return try_lock(self.path / SPAWN_NAME, self.file_mode)

    def beat(self, lock: FileLock) -> None:
        """tierd's loop: shows whoever looks at the lock file that it goes round."""
        os.utime(lock.descriptor)

    def last_beat(self) -> int:
        """A number that changes with every ``beat``; 0 before the first."""
        try:
            return os.stat(self.path / LOCK_NAME).st_mtime_ns
        except OSError:
            return 0

    def read_epoch(self) -> int:
        """The last epoch that was given out; 0 in a fresh directory."""
        try:
            epoch = int((self.path / EPOCH_NAME).read_text())
            if not 0 <= epoch < MAX_EPOCH:
                raise ValueError("no epoch is that number")
            return epoch
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:
            # An epoch that is too low could be taken for one already drained, so it jumps where no count can have reached.
            _log.error("%s: %s; the epoch jumps ahead", self.path / EPOCH_NAME, error)
            return time.time_ns() // 1_000_000

    def write_epoch(self, epoch: int) -> None:
        """Publishes an epoch before anybody is told of it. Raises ``OSError``."""
        replace_file(self.path / EPOCH_NAME, str(epoch).encode(), self.file_mode)


def _is_file(descriptor: int, path: Path) -> bool:
    """Whether ``path`` still is the open file, not one made after it was removed."""
    try:
        at_path = os.stat(path)
    except FileNotFoundError:
        return False
    opened = os.fstat(descriptor)
    return (opened.st_dev, opened.st_ino) == (at_path.st_dev, at_path.st_ino)


def _remove(path: Path) -> bool:
    """Removes a run directory whose ``alive`` the caller holds exclusively; ``alive`` goes last, so that a removal
    that was interrupted is finished by the next sweep."""
    try:
        for entry in list(os.scandir(path)):
            if entry.name == ALIVE_NAME:
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry.path)
        os.unlink(path / ALIVE_NAME)
        os.rmdir(path)
    except OSError as error:
        _log.warning("%s could not be removed: %s", path, error)
        return False
    return True


def remove_abandoned(own: Path, removed: Callable[[Path], None] | None = None) -> int:
    """Removes the run directories beside ``own`` in which nobody lives any more; returns how many.

    Only directories of this user, named like a run directory, with a marked ``alive`` file. Called by whoever starts a tierd: a
    process that was killed cannot clean up after itself, and memory-backed leftovers are memory.
    """
    if not own.name.startswith(PREFIX):
        return 0
    count = 0
    try:
        names = [
            entry.name
            for entry in os.scandir(own.parent)
            if entry.name.startswith(PREFIX) and entry.name != own.name
        ]
    except OSError:
        return 0
    for name in names:
        path = own.parent / name
        if _sweep_one(path):
            count += 1
            _log.info("removed the leftover run directory %s", path)
            if removed is not None:
                removed(path)
    return count


def _sweep_one(path: Path) -> bool:
    try:
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return False
        descriptor = os.open(path / ALIVE_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.pread(descriptor, len(MARKER), 0) != MARKER or not _is_file(
            descriptor, path / ALIVE_NAME
        ):
            return False
        return _remove(path)
    except OSError:
        return False
    finally:
        os.close(descriptor)
