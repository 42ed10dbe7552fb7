"""The run directory, where engine processes and tierd meet.

::

    <runDirectory>/          memory-backed, e.g. /dev/shm/kvtier-<name>-<hash>
        alive                shared lock of every attached process and of tierd; unlocked: abandoned
        tierd.lock           exclusive lock of the running tierd; heartbeats set the file's time
        spawn.lock           exclusive lock of the process that is starting a tierd
        aside.lock           exclusive lock while the lock file of a tierd that hangs is discarded
        reads/               slots that tierds read into (fencing.py)
        epoch                the latest epoch, as text
        pool                 the host pool
        slots, namespaces/   what is in the pool, for the next tierd (host_pool.py)
        generations          generation words of the pool, mapped by the engines
        peers/               locks of engine processes in other containers (liveness.py)
        tierd.sock           the socket
        http.json            the address of /status and /metrics
        sessions/            one file per attached worker, for the next tierd (fencing.py)

Locks are flock(2): the kernel drops them with the last process that holds them, however it ends.
One thread per object.
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
"""Content of ``alive``. Only a directory with ``MARKER`` is ever removed. A pod's directory has
``SHARED_MARKER``: while the sidecar restarts tierd, possibly no process holds the lock, and the
pool must survive."""
MAX_SOCKET_PATH_BYTES = 107
MAX_EPOCH = 1 << 62
"""More than can ever be counted, and small enough for a message."""
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
    """Locks ``path`` without waiting, creating it with ``mode`` if needed; None if it is locked.

    Raises ``OSError`` if the file cannot be opened.
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
    """Opens a file, creating it with exactly ``mode``, whatever the umask. Raises ``OSError``."""
    try:
        return os.open(path, (flags & ~os.O_CREAT) | os.O_CLOEXEC)
    except FileNotFoundError:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, mode)
        os.fchmod(descriptor, mode)
        return descriptor


def is_private(path: Path) -> bool:
    """Whether only this user may write to a run directory, or it is a volume of the pod.

    Every user may create directories in /dev/shm and the name can be guessed, so another user's
    process could answer in tierd's place. Raises ``FileNotFoundError``.
    """
    status = os.lstat(path)
    own = (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & 0o022
    )
    return own or os.path.ismount(path)


class RunDirectory:
    """One run directory. ``shared``: a pod's volume for engine and sidecar, which may run as
    different users; it is never removed. Otherwise the directory belongs to one user."""

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
                f"must have at most {MAX_SOCKET_PATH_BYTES - len('/tierd.sock')} bytes, because it "
                "holds a socket",
            )

    def join(self) -> None:
        """Makes the directory if needed and takes the shared lock on ``alive``.

        If another process is removing an abandoned directory of that name, this makes a new one.
        Raises ``OSError``, and ``ConfigurationError`` for a directory that other users may write
        to.
        """
        deadline = time.monotonic() + _JOIN_SECONDS
        while True:
            lock = self._try_join()
            if lock is not None:
                self._alive = lock
                return
            if time.monotonic() > deadline:
                raise TimeoutError(
                    None, "another process keeps removing the run directory", str(self.path)
                )
            time.sleep(0.01)

    def _try_join(self) -> FileLock | None:
        self.path.mkdir(mode=0o777 if self.shared else 0o700, parents=True, exist_ok=True)
        alive = self.path / ALIVE_NAME
        try:
            self._check_private()
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

    def _check_private(self) -> None:
        if not self.shared and not is_private(self.path):
            raise ConfigurationError(
                "runDirectory", str(self.path), "must be writable by this user only"
            )

    def rejoin(self) -> None:
        """As ``join``, if not joined or if the directory was removed. Raises ``OSError``."""
        if self._alive is not None:
            if _is_file(self._alive.descriptor, self.path / ALIVE_NAME):
                return
            self._alive.close()
            self._alive = None
        self.join()

    def leave(self) -> bool:
        """Drops the shared lock; the last one removes the directory. True: removed."""
        lock, self._alive = self._alive, None
        if lock is None:
            return False
        try:
            if self.shared:
                return False
            try:
                # Upgrading a lock releases the shared one first, so of several processes that leave
                # at the same time
                # the last one succeeds.
                fcntl.flock(lock.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
            if not _is_file(lock.descriptor, self.path / ALIVE_NAME):
                return False
            return _remove(self.path)
        finally:
            lock.close()

    def try_daemon_lock(self) -> FileLock | None:
        """Takes the lock of the one running tierd; None if another one holds it. Raises
        ``OSError``.

        A killed tierd holds its lock while one of its threads hangs in a mount. Its lock file is
        discarded.
        """
        path = self.path / LOCK_NAME
        lock = try_lock(path, self.file_mode)
        if lock is None and self._discard_orphaned_lock(path):
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

    def _discard_orphaned_lock(self, path: Path) -> bool:
        """Removes the lock file of an exited tierd. One process at a time, so that none removes
        another's new file."""
        if not self._holder_exited(path):
            return False
        discard_lock = try_lock(self.path / ASIDE_NAME, self.file_mode)
        if discard_lock is None:
            return False
        try:
            if not self._holder_exited(path):
                return False
            path.unlink(missing_ok=True)
            _log.warning("discarded the lock of the previous tierd: one of its threads hangs")
            return True
        finally:
            discard_lock.close()

    @staticmethod
    def _holder_exited(path: Path) -> bool:
        try:
            document = json.loads(path.read_bytes())
            holder = ProcessIdentity(
                int(document["pid"]), int(document["processStart"]), str(document["pidNamespace"])
            )
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return main_thread_exited(holder)

    def is_daemon_running(self) -> bool:
        """Whether a tierd holds the daemon's lock. Checks take a shared lock for a moment, so they
        do not disturb each other."""
        try:
            lock = try_lock(self.path / LOCK_NAME, self.file_mode, shared=True)
        except OSError:
            return False
        if lock is None:
            return not self._holder_exited(self.path / LOCK_NAME)
        lock.close()
        return False

    def try_spawn_lock(self) -> FileLock | None:
        """Takes the right to start tierd; None while another process has it. Raises ``OSError``."""
        return try_lock(self.path / SPAWN_NAME, self.file_mode)

    def heartbeat(self, lock: FileLock) -> None:
        """Shows supervisors that tierd's loop runs. Raises ``OSError``."""
        os.utime(lock.descriptor)

    def last_heartbeat(self) -> int:
        """A number that changes with every heartbeat; 0 before the first."""
        try:
            return os.stat(self.path / LOCK_NAME).st_mtime_ns
        except OSError:
            return 0

    def read_epoch(self) -> int:
        """The latest epoch; 0 in a new directory."""
        try:
            epoch = int((self.path / EPOCH_NAME).read_text())
            if not 0 <= epoch < MAX_EPOCH:
                raise ValueError("epoch out of range")
            return epoch
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:
            # A reused epoch would count as drained, so continue with a number that no counter has
            # reached.
            _log.error(
                "cannot read %s: %s; continuing with a higher epoch", self.path / EPOCH_NAME, error
            )
            return time.time_ns() // 1_000_000

    def write_epoch(self, epoch: int) -> None:
        """Records an epoch, before it is used. Raises ``OSError``."""
        replace_file(self.path / EPOCH_NAME, str(epoch).encode(), self.file_mode)


def _is_file(descriptor: int, path: Path) -> bool:
    """Whether ``path`` is still the open file, not one that replaced it."""
    try:
        at_path = os.stat(path)
    except FileNotFoundError:
        return False
    opened = os.fstat(descriptor)
    return (opened.st_dev, opened.st_ino) == (at_path.st_dev, at_path.st_ino)


def _remove(path: Path) -> bool:
    """Removes a run directory whose ``alive`` the caller has locked exclusively. ``alive`` is
    removed last, so that an interrupted removal is completed later."""
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
        _log.warning("cannot remove %s: %s", path, error)
        return False
    return True


def remove_abandoned(own: Path, removed: Callable[[Path], None] | None = None) -> int:
    """Removes abandoned run directories beside ``own``; returns how many.

    Only directories of this user with the name and the marker of a run directory. A killed process
    cannot clean up, and its leftovers occupy memory.
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
        if _remove_if_abandoned(path):
            count += 1
            _log.info("removed abandoned run directory %s", path)
            if removed is not None:
                removed(path)
    return count


def _remove_if_abandoned(path: Path) -> bool:
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
