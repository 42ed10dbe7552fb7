"""Which workers a tierd has to wait for before it touches the pool of its predecessor.

Each attached worker has a small file in ``sessions/``: written before it is welcomed, removed when it said ``Bye`` or is proven gone.
A new tierd finds those whose workers may still be copying into slots that it knows nothing about. It is *fenced* until each of
them has said that every epoch up to the file's is drained, or is provably gone, or, where processes cannot be seen, for
``BLIND_SECONDS`` (DATAPATH 4).

Slots into which threads of dead tierds may still be reading.

The kernel lets go of a thread in a hung mount only when the mount answers. Until then a process that was killed, or has ended, stays: its
first thread is a zombie, the other one waits in the kernel, and when the answer comes it is written where the read was told to, which
is a slot of the pool. So each tierd notes the slots that it reads into, in a file of its own::

    reads/<epoch>     locked for as long as any thread of its tierd lives; records of ``RECORD_BYTES``: offset and size of a slot, start and
                      number of slots of its segment; all zero: none

A lock that can be taken is the proof that nobody reads into those slots any more, also between containers, where process ids mean nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtier.files import replace_file
from kvtier.processes import Liveness, ProcessIdentity
from kvtier.store.slot_table import SlotLocation
from kvtier.tierd.run_directory import open_shared

BLIND_SECONDS = 60.0
"""How long a process that cannot be seen is waited for. Copies last milliseconds; a frozen container thaws or is killed."""
_TEMPORARY_PREFIX = "."
_log = logging.getLogger("kvtier.tierd")


@dataclass(frozen=True, slots=True)
class AttachedWorker:
    """A worker rank in the epoch in which it was attached."""

    engine: str
    rank: int
    epoch: int
    process: ProcessIdentity


class SessionFiles:
    """The files in ``sessions/``. Owner's thread only; the directory is memory-backed, so these calls are short."""

    def __init__(self, directory: Path, mode: int) -> None:
        self._directory = directory
        self._mode = mode

    def _path(self, worker: AttachedWorker) -> Path:
        text = f"{worker.engine}\0{worker.rank}\0{worker.epoch}\0{worker.process}"
        return (
            self._directory / f"{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}.json"
        )

    def add(self, worker: AttachedWorker) -> None:
        """Raises ``OSError``; then the worker must not be welcomed."""
        document = {
            "engine": worker.engine,
            "rank": worker.rank,
            "epoch": worker.epoch,
            "pid": worker.process.pid,
            "processStart": worker.process.start,
            "pidNamespace": worker.process.pid_namespace,
            "lock": worker.process.lock,
        }
        replace_file(self._path(worker), json.dumps(document).encode(), self._mode)

    def remove(self, worker: AttachedWorker) -> None:
        """Nothing of this worker's epoch needs waiting for any more."""
        try:
            self._path(worker).unlink(missing_ok=True)
        except OSError as error:
            # The next tierd waits for somebody who is not there, and finds out.
            _log.warning("a session file could not be removed: %s", error)

    def read(self) -> list[AttachedWorker]:
        """All of them. One that cannot be read stands for a worker that cannot be seen."""
        found = []
        for path in sorted(self._directory.glob("*.json")):
            if path.name.startswith(_TEMPORARY_PREFIX):
                continue
            try:
                document = json.loads(path.read_bytes())
                process = ProcessIdentity(
                    int(document["pid"]),
                    int(document["processStart"]),
                    str(document["pidNamespace"]),
                    str(document.get("lock", "")),
                )
                worker = AttachedWorker(
                    str(document["engine"]), int(document["rank"]), int(document["epoch"]), process
                )
            except FileNotFoundError:
                continue
            except (OSError, ValueError, KeyError, TypeError) as error:
                _log.error(
                    "%s: %s; its worker is waited for as long as for one that cannot be seen",
                    path,
                    error,
                )
                worker = AttachedWorker(path.name, -1, 0, ProcessIdentity(0, 0, ""))
            if self._path(worker) != path:
                # Not written by this code; what it stands for is waited for, and then it goes.
                path.unlink(missing_ok=True)
            found.append(worker)
        return found


class StartupFence:
    """The workers of earlier epochs that have not drained. Owner's thread only."""

    def __init__(
        self,
        files: SessionFiles,
        now: float,
        fate: Callable[[ProcessIdentity], Liveness],
        blind_seconds: float = BLIND_SECONDS,
    ) -> None:
        self._files = files
        self._fate = fate
        self._deadline = now + blind_seconds
        self.waiting = files.read()

    @property
    def closed(self) -> bool:
        """Whether anybody still has to be waited for."""
        return bool(self.waiting)

    def hello(self, worker: AttachedWorker, drained_epoch: int) -> None:
        """A worker attaches and says up to which epoch it has drained."""
        self._resolve(
            lambda other: (
                other.engine == worker.engine
                and other.rank == worker.rank
                and other.process == worker.process
                and drained_epoch >= other.epoch
            )
        )

    def check(self, now: float) -> None:
        """Looks which of them are provably gone, or have been waited for long enough."""
        if not self.waiting:
            return

        def over(worker: AttachedWorker) -> bool:
            fate = self._fate(worker.process)
            return fate is Liveness.GONE or (fate is Liveness.UNKNOWN and now >= self._deadline)

        self._resolve(over)

    def _resolve(self, over: Callable[[AttachedWorker], bool]) -> None:
        left = []
        for worker in self.waiting:
            if over(worker):
                self._files.remove(worker)
            else:
                left.append(worker)
        self.waiting = left


DIRECTORY_NAME = "reads"
_RECORD = struct.Struct("<QQQQ")
RECORD_BYTES = _RECORD.size
_EMPTY = bytes(RECORD_BYTES)
_MAX_BYTES = 16 << 20


class ReadsFile:
    """The file of the living tierd, as the store's ``ReadLog``. Raises ``OSError`` where it cannot be made."""

    def __init__(self, run_directory: Path, epoch: int, mode: int) -> None:
        directory = run_directory / DIRECTORY_NAME
        directory.mkdir(exist_ok=True)
        self.path = directory / str(epoch)
        # Never closed before the process ends: every thread holds it open, and the last one lets go of the lock.
        self._descriptor = open_shared(self.path, os.O_RDWR | os.O_CREAT, mode)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(self._descriptor, 0)
        self._numbers: dict[int, int] = {}
        self._free: list[int] = []

    def begin(self, place: SlotLocation) -> bool:
        """A read into this slot is about to begin; False if that cannot be noted, and it must not."""
        number = self._free.pop() if self._free else len(self._numbers)
        data = _RECORD.pack(
            place.offset, place.slot_bytes, place.segment_start, place.segment_slots
        )
        try:
            written = os.pwrite(self._descriptor, data, number * RECORD_BYTES)
        except OSError:
            written = 0
        if written != RECORD_BYTES:
            self._free.append(number)
            return False
        self._numbers[place.offset] = number
        return True

    def end(self, offset: int) -> None:
        """No read into this slot runs any more. One that stays noted costs its slot, and only in the next life."""
        number = self._numbers.pop(offset, None)
        if number is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._descriptor, _EMPTY, number * RECORD_BYTES)
            self._free.append(number)

    def leave(self) -> None:
        """The process ends: the file goes too, unless a read hangs."""
        if not self._numbers:
            self.path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class OrphanedReadsFile:
    """A dead tierd of which a thread may live, and where that may write."""

    path: Path
    places: tuple[SlotLocation, ...]

    def over(self) -> bool:
        """Whether no thread of it lives any more; then its file goes."""
        return _take_away(self.path)


def find_orphaned_reads(run_directory: Path, own: Path | None = None) -> list[OrphanedReadsFile]:
    """The dead tierds of this run directory that are not quite gone. The caller holds the lock of the one living tierd."""
    found = []
    for path in sorted((run_directory / DIRECTORY_NAME).glob("*")):
        if path == own or not path.is_file() or path.is_symlink():
            # What is no file is none of a tierd's, and no reason not to start.
            continue
        if _take_away(path):
            continue
        places = _places(path)
        _log.warning(
            "a thread of an earlier tierd hangs in a call; %d slots are left to it", len(places)
        )
        found.append(OrphanedReadsFile(path, places))
    return found


def _take_away(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError as error:
        _log.warning("%s: %s", path, error)
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _places(path: Path) -> tuple[SlotLocation, ...]:
    data = path.read_bytes()[:_MAX_BYTES]
    whole = len(data) // RECORD_BYTES * RECORD_BYTES
    records = (_RECORD.unpack_from(data, start) for start in range(0, whole, RECORD_BYTES))
    return tuple(SlotLocation(*record) for record in records if any(record))
