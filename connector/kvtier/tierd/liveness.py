"""Which process is at the other end, and whether it is provably gone.

A process id alone names nobody: ids are reused, and mean something only inside their pid namespace. With the start time (clock
ticks since boot, field 22 of ``/proc/<pid>/stat``) and the namespace's inode they name one process for good.

Gone means: no thread of it runs, so its memory mappings are released and its device contexts closed. The kernel does both
before a thread becomes a zombie, so a process all of whose threads are zombies is gone; one whose first thread alone has exited is not.

Locks that prove across containers that a process is gone.

Process ids of another pid namespace mean nothing, so each engine process holds a lock on a file of its own in ``peers/``, names the file in its
``Hello``, and tierd tries the lock. The kernel drops it with the process, however it ends.

Why flock(2), on a descriptor that is closed at exec and in forked children:

* It belongs to the open file, and is dropped when the last descriptor of it is released: in the course of the process's end, after all its
  threads have let go of their memory mappings. A lock of fcntl(2) is dropped when *any* descriptor of that file is closed by the process,
  and, at its end, before a single device is released.
* A child made by fork(2) without exec shares the open file, so it would keep the lock alive: late proof, never early. Children that Python
  makes close it (``os.register_at_fork``); the descriptor of the parent stays.
* Devices are released in the same sweep as the lock. Linux does that from the highest descriptor to the lowest, so a low descriptor is set
  aside early (``reserve``, when vLLM loads plugins and no device is open yet) and the lock is put there. For what is left of the order,
  ``SETTLE_SECONDS`` pass between the lock's being free and the proof.

A file that is missing proves nothing.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from pathlib import Path

_PROC = Path("/proc")
_DEAD_STATES = frozenset("ZXx")


class Liveness(Enum):
    """What is known about a process. ``UNKNOWN``: it lives, or lived, where this process cannot look."""

    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process: ``pid`` in the pid namespace ``pid_namespace`` (inode number as text), started at ``start`` (clock ticks).
    ``lock``: name of the lock that it holds while it lives (peers.py); empty: none."""

    pid: int
    start: int
    pid_namespace: str
    lock: str = field(default="", compare=False)


def pid_namespace() -> str:
    """Inode of this process's pid namespace as text; empty where /proc does not tell."""
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return ""


def _stat_fields(path: Path) -> list[str] | None:
    """Fields of a stat file from the third (the state) on; the second may hold spaces and parentheses."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields if len(fields) > 19 else None


def process_start(pid: int) -> int:
    """When ``pid`` was started, in clock ticks since boot; 0 if that cannot be told."""
    fields = _stat_fields(_PROC / str(pid) / "stat")
    return int(fields[19]) if fields else 0


@lru_cache(maxsize=4)
def _identity_of(pid: int) -> ProcessIdentity:
    return ProcessIdentity(pid, process_start(pid), pid_namespace())


def own_identity() -> ProcessIdentity:
    """This process. After a fork the child gets its own."""
    return _identity_of(os.getpid())


def liveness_of(process: ProcessIdentity) -> Liveness:
    """Whether ``process`` is provably gone. Reads /proc, takes well under a millisecond."""
    own = own_identity()
    if not process.pid_namespace or process.pid_namespace != own.pid_namespace or process.pid <= 0:
        return Liveness.UNKNOWN
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return Liveness.GONE
    except PermissionError:
        # Somebody has this id; /proc tells below whether it is still the same one.
        pass
    fields = _stat_fields(_PROC / str(process.pid) / "stat")
    if fields is None or not process.start:
        # Either it went between the two looks (the next look tells), or /proc hides other users' processes.
        return Liveness.ALIVE
    if int(fields[19]) != process.start:
        return Liveness.GONE
    if fields[0] not in _DEAD_STATES:
        return Liveness.ALIVE
    return Liveness.ALIVE if _any_thread_runs(process.pid) else Liveness.GONE


def leader_is_dead(process: ProcessIdentity) -> bool:
    """Whether the first thread of ``process`` has ended for good, though others may hang in the kernel: none of them ever runs a line of
    its program again. False where it cannot be seen."""
    if liveness_of(process) is Liveness.GONE:
        return True
    own = own_identity()
    if not process.pid_namespace or process.pid_namespace != own.pid_namespace or not process.start:
        return False
    fields = _stat_fields(_PROC / str(process.pid) / "stat")
    if fields is None or int(fields[19]) != process.start or fields[0] not in _DEAD_STATES:
        return False
    return _every_thread_ends(process.pid)


def _every_thread_ends(pid: int) -> bool:
    """Whether SIGKILL is on its way to every thread that still is there, as when the whole process ends; not when one thread has."""
    try:
        threads = os.listdir(_PROC / str(pid) / "task")
        texts = [
            (_PROC / str(pid) / "task" / thread / "status").read_text(errors="replace")
            for thread in threads
        ]
    except OSError:
        return False
    return all(_is_killed(text) for text in texts)


def _is_killed(status: str) -> bool:
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if fields.get("State", "").strip()[:1] in _DEAD_STATES:
        return True
    pending = int(fields.get("SigPnd", "0").strip() or "0", 16) | int(
        fields.get("ShdPnd", "0").strip() or "0", 16
    )
    return bool(pending >> (signal.SIGKILL - 1) & 1)


def _any_thread_runs(pid: int) -> bool:
    try:
        threads = os.listdir(_PROC / str(pid) / "task")
    except OSError:
        return False
    for thread in threads:
        fields = _stat_fields(_PROC / str(pid) / "task" / thread / "stat")
        if fields is not None and fields[0] not in _DEAD_STATES:
            return True
    return False


PEERS_NAME = "peers"
SETTLE_SECONDS = 0.5
"""An H200 wrote for up to 11 ms after a lock on a high descriptor was free, and not at all after one on a low descriptor (docs/sidecar.md)."""
LEFTOVER_SECONDS = 120.0
_NAME_CHARACTERS = frozenset("0123456789abcdef")
_log = logging.getLogger("kvtier.tierd")


class _OwnLock:
    """Of this process: the descriptor that was set aside, and the locks it holds by directory."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """``own_lock`` may be called by the I/O threads of several clients."""
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


def reserve() -> None:
    """Sets a low descriptor aside for this process's lock. Any number of times; what fails costs only the order (see above)."""
    with _own.lock:
        if _own.reserved >= 0:
            return
        try:
            _own.reserved = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            _log.debug("no descriptor set aside: %s", error)


def own_lock(run_directory: Path) -> str:
    """Name of the lock that this process holds in ``run_directory``, and until it ends; taken at the first call. Empty where that is not possible: then its
    end cannot be proven from another container, and is waited for.
    """
    with _own.lock:
        held = _own.held.get(run_directory)
        if held is not None and _is_there(run_directory / PEERS_NAME / held[0], held[1]):
            return held[0]
        try:
            name, descriptor = _take(run_directory / PEERS_NAME)
        except OSError as error:
            _log.warning(
                "no lock in %s: %s; if this process dies it takes longer to be noticed",
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
        # tierd may be another user, and opens it to try the lock.
        os.fchmod(descriptor, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return name, descriptor


def open_directory(directory: Path) -> None:
    """Makes ``peers/`` for every user, whatever the umask, unless it is there. Raises ``OSError``."""
    try:
        directory.mkdir()
    except FileExistsError:
        return
    directory.chmod(0o777)


def is_held(directory: Path, name: str) -> bool | None:
    """Whether somebody holds the lock; None: that cannot be told, as there is no such file."""
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
    """``liveness_of`` for processes that may be in other containers. Owner's thread only."""

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
        """What is known about ``process``: by its id where it can be seen, else by its lock."""
        seen = self._visible(process)
        if seen is not Liveness.UNKNOWN or not process.lock:
            return seen
        held = is_held(self._directory, process.lock)
        if held is None:
            return Liveness.UNKNOWN
        if held:
            self._free_since.pop(process.lock, None)
            return Liveness.ALIVE
        now = self._clock()
        since = self._free_since.setdefault(process.lock, now)
        return Liveness.GONE if now - since >= self._settle_seconds else Liveness.ALIVE

    def sweep(self, in_use: set[str]) -> int:
        """Removes files that nobody holds and nobody is waited for by (``in_use``); returns how many."""
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
                    and is_held(self._directory, entry.name) is False
                ):
                    os.unlink(entry.path)
                    self._free_since.pop(entry.name, None)
                    count += 1
            except OSError as error:
                _log.debug("%s: %s", entry.path, error)
        return count
