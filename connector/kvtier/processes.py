"""Process identity, and whether a process has ended.

A process id alone does not identify a process: ids are reused, and each pid namespace has its own.
Together with the start time (clock ticks since boot, field 22 of ``/proc/<pid>/stat``) and the
inode of the pid namespace it does. Where processes of several hosts meet, such as in a shared
directory, the host's boot id belongs to it as well.

Two questions have different answers while a thread hangs in the kernel:

* ``liveness_of``: are the process's memory mappings and devices released? The kernel releases them
  before a thread becomes a zombie, so a process is gone when *all* its threads are zombies.
* ``has_exited`` and ``main_thread_exited``: will the process ever execute another instruction of
  its program?

All functions may be called from any thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from pathlib import Path

_PROC = Path("/proc")
_DEAD_STATES = frozenset("ZXx")
_START_FIELD = 19
"""Index of the start time, counted from the state."""


class Liveness(Enum):
    """What is known about a process. ``UNKNOWN``: this process cannot observe it."""

    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process: ``pid`` in the pid namespace ``pid_namespace`` (inode number as text), started
    at ``start`` (clock ticks since boot; 0: unknown). ``lock``: name of the lock file that it holds
    while it lives; empty: none."""

    pid: int
    start: int
    pid_namespace: str
    lock: str = field(default="", compare=False)


def pid_namespace() -> str:
    """Inode of this process's pid namespace as text; empty if /proc does not show it."""
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return ""


def boot_id() -> str:
    """The first 8 hex digits of the host's boot id; zeros if /proc does not show it."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return "00000000"


def process_start(pid: int) -> int:
    """Start time of ``pid`` in clock ticks since boot; 0 if unknown."""
    fields = _stat_fields(_PROC / str(pid) / "stat")
    return int(fields[_START_FIELD]) if fields else 0


def own_identity() -> ProcessIdentity:
    """This process. A forked child gets its own identity."""
    return _identity_of(os.getpid())


@lru_cache(maxsize=4)
def _identity_of(pid: int) -> ProcessIdentity:
    return ProcessIdentity(pid, process_start(pid), pid_namespace())


def liveness_of(process: ProcessIdentity) -> Liveness:
    """Whether ``process`` is provably gone, with its memory mappings and devices released."""
    if not _is_observable(process):
        return Liveness.UNKNOWN
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return Liveness.GONE
    except PermissionError:
        # Another user's process has this id. The start time below tells whether it is the same
        # process.
        pass
    fields = _stat_fields(_PROC / str(process.pid) / "stat")
    if fields is None or not process.start:
        # The process ended between the two checks (the next call tells), or /proc hides other
        # users' processes.
        return Liveness.ALIVE
    if int(fields[_START_FIELD]) != process.start:
        return Liveness.GONE
    if fields[0] not in _DEAD_STATES:
        return Liveness.ALIVE
    return Liveness.ALIVE if _any_thread_runs(process.pid) else Liveness.GONE


def main_thread_exited(process: ProcessIdentity) -> bool:
    """Whether the main thread of ``process`` has ended and every other thread is being killed,
    though some may still hang in the kernel. False if the process cannot be observed."""
    if liveness_of(process) is Liveness.GONE:
        return True
    if not _is_observable(process) or not process.start:
        return False
    fields = _stat_fields(_PROC / str(process.pid) / "stat")
    if (
        fields is None
        or int(fields[_START_FIELD]) != process.start
        or fields[0] not in _DEAD_STATES
    ):
        return False
    return _all_threads_are_killed(process.pid)


def process_tag() -> str:
    """This process in directories that hosts share: ``<boot id>-<pid namespace>-<pid>``."""
    return f"{boot_id()}-{pid_namespace() or '0'}-{os.getpid()}"


def is_observable(boot: str, namespace: str) -> bool:
    """Whether a process with this boot id and pid namespace (two parts of a ``process_tag``) shares
    both with this one.

    The pid namespace alone does not say so: the initial one has the same inode on every host.
    """
    return namespace == (pid_namespace() or "0") and boot == boot_id()


def has_exited(pid: int, start: int) -> bool:
    """Whether the process ``pid`` that started at ``start`` has ended. A zombie has ended. For
    observable processes."""
    fields = _stat_fields(_PROC / str(pid) / "stat")
    return fields is None or fields[0] in _DEAD_STATES or int(fields[_START_FIELD]) != start


def _is_observable(process: ProcessIdentity) -> bool:
    return (
        bool(process.pid_namespace)
        and process.pid_namespace == own_identity().pid_namespace
        and process.pid > 0
    )


def _stat_fields(path: Path) -> list[str] | None:
    """Fields of a stat file from the third (the state) on. The second may contain spaces and
    parentheses."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields if len(fields) > _START_FIELD else None


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


def _all_threads_are_killed(pid: int) -> bool:
    """Whether every thread is dead or has SIGKILL pending: the whole process is ending, not one
    thread."""
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
