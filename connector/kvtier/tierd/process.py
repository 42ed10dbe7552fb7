"""Which process is at the other end, and whether it is provably gone.

A process id alone names nobody: ids are reused, and mean something only inside their pid namespace. With the start time (clock
ticks since boot, field 22 of ``/proc/<pid>/stat``) and the namespace's inode they name one process for good.

Gone means: no thread of it runs, so its memory mappings are released and its device contexts closed. The kernel does both
before a thread becomes a zombie, so a process all of whose threads are zombies is gone; one whose first thread alone has exited is not.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from pathlib import Path

_PROC = Path("/proc")
_DEAD_STATES = frozenset("ZXx")


class Fate(Enum):
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


def fate(process: ProcessIdentity) -> Fate:
    """Whether ``process`` is provably gone. Reads /proc, takes well under a millisecond."""
    own = own_identity()
    if not process.pid_namespace or process.pid_namespace != own.pid_namespace or process.pid <= 0:
        return Fate.UNKNOWN
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return Fate.GONE
    except PermissionError:
        # Somebody has this id; /proc tells below whether it is still the same one.
        pass
    fields = _stat_fields(_PROC / str(process.pid) / "stat")
    if fields is None or not process.start:
        # Either it went between the two looks (the next look tells), or /proc hides other users' processes.
        return Fate.ALIVE
    if int(fields[19]) != process.start:
        return Fate.GONE
    if fields[0] not in _DEAD_STATES:
        return Fate.ALIVE
    return Fate.ALIVE if _any_thread_runs(process.pid) else Fate.GONE


def leader_is_dead(process: ProcessIdentity) -> bool:
    """Whether the first thread of ``process`` has ended for good, though others may hang in the kernel: none of them ever runs a line of
    its program again. False where it cannot be seen."""
    if fate(process) is Fate.GONE:
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
        texts = [(_PROC / str(pid) / "task" / thread / "status").read_text(errors="replace") for thread in threads]
    except OSError:
        return False
    return all(_is_killed(text) for text in texts)


def _is_killed(status: str) -> bool:
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if fields.get("State", "").strip()[:1] in _DEAD_STATES:
        return True
    pending = int(fields.get("SigPnd", "0").strip() or "0", 16) | int(fields.get("ShdPnd", "0").strip() or "0", 16)
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
