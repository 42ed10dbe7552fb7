"""Fencing: keeps a new tierd away from slots that workers or threads of earlier tierds may still
access.

**Workers.** Each attached worker has a file in ``sessions/``, written before its ``Welcome`` and
removed after its ``Bye`` or when it is proven gone. The files that a new tierd finds belong to
workers that may still be copying into slots it knows nothing about. ``StartupFence`` keeps the
store fenced until each of them has drained every epoch up to the file's, is provably gone, or, if
its process cannot be observed, ``UNVERIFIABLE_TIMEOUT_SECONDS`` have passed.

**Reads.** A thread that hangs in a dead mount outlives its process: the main thread is a zombie
while the other waits in the kernel, and when the mount answers, the data is written into the slot
that the read was given. Each tierd therefore records the slots it reads into::

    reads/<epoch>     locked while any thread of its tierd exists; records of
                      ``READ_RECORD_BYTES``: offset and size of a slot, start and number of slots
                      of its segment; all zero: free

A lock that can be taken proves that those reads have ended, also between containers, where process
ids mean nothing.

Only the loop's thread uses this module.
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
from kvtier.store.pool_layout import PoolLayout
from kvtier.store.slot_table import SlotLocation
from kvtier.tierd.run_directory import open_shared
from kvtier.tiers.base import ALIGNMENT_BYTES

UNVERIFIABLE_TIMEOUT_SECONDS = 60.0
"""How long an unobservable process is waited for. Copies take milliseconds; a frozen container
thaws or is killed."""
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
    """The files in ``sessions/``. The directory is memory-backed, so calls are short."""

    def __init__(self, directory: Path, mode: int) -> None:
        self._directory = directory
        self._mode = mode

    def _path(self, worker: AttachedWorker) -> Path:
        text = f"{worker.engine}\0{worker.rank}\0{worker.epoch}\0{worker.process}"
        return (
            self._directory / f"{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}.json"
        )

    def add(self, worker: AttachedWorker) -> None:
        """Raises ``OSError``; the worker must then not be admitted."""
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
        """Removes the file of a worker that no longer accesses slots of its epoch."""
        try:
            self._path(worker).unlink(missing_ok=True)
        except OSError as error:
            # The next tierd waits for it and finds that it has exited.
            _log.warning("cannot remove a session file: %s", error)

    def read(self) -> list[AttachedWorker]:
        """All recorded workers. An unreadable file counts as an unobservable worker."""
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
                    "cannot read session file %s: %s; fencing until the timeout",
                    path,
                    error,
                )
                worker = AttachedWorker(path.name, -1, 0, ProcessIdentity(0, 0, ""))
            if self._path(worker) != path:
                # Not a name that this code writes, so ``remove`` would not find it.
                path.unlink(missing_ok=True)
            found.append(worker)
        return found


class StartupFence:
    """The workers of earlier epochs that have not drained."""

    def __init__(
        self,
        files: SessionFiles,
        now: float,
        liveness: Callable[[ProcessIdentity], Liveness],
        unverifiable_timeout_seconds: float = UNVERIFIABLE_TIMEOUT_SECONDS,
    ) -> None:
        self._files = files
        self._liveness = liveness
        self._deadline = now + unverifiable_timeout_seconds
        self.waiting = files.read()

    @property
    def is_active(self) -> bool:
        """Whether a worker has not drained."""
        return bool(self.waiting)

    def worker_attached(self, worker: AttachedWorker, drained_epoch: int) -> None:
        """Notes that a worker attached and has drained up to an epoch."""
        self._resolve(
            lambda other: (
                other.engine == worker.engine
                and other.rank == worker.rank
                and other.process == worker.process
                and drained_epoch >= other.epoch
            )
        )

    def check(self, now: float) -> None:
        """Removes workers that are provably gone or whose timeout has passed."""
        if not self.waiting:
            return

        def over(worker: AttachedWorker) -> bool:
            liveness = self._liveness(worker.process)
            return liveness is Liveness.GONE or (
                liveness is Liveness.UNKNOWN and now >= self._deadline
            )

        self._resolve(over)

    def _resolve(self, over: Callable[[AttachedWorker], bool]) -> None:
        left = []
        for worker in self.waiting:
            if over(worker):
                self._files.remove(worker)
            else:
                left.append(worker)
        self.waiting = left


READS_DIRECTORY_NAME = "reads"
_READ_RECORD = struct.Struct("<QQQQ")
READ_RECORD_BYTES = _READ_RECORD.size
_PARTS_SHIFT, _PART_PAGES_SHIFT = 57, 25
_SLOTS_MASK, _PART_PAGES_MASK = (1 << 25) - 1, (1 << 32) - 1
"""The last number of a record: how many slots the segment has and, for a pool in several parts,
their number and size in pages above that."""
_EMPTY_RECORD = bytes(READ_RECORD_BYTES)
_MAX_READ_LOG_BYTES = 16 << 20


def _pack_place(place: SlotLocation) -> bytes:
    slots = place.segment_slots
    if place.layout is not None:
        slots |= place.layout.parts << _PARTS_SHIFT
        slots |= place.layout.part_bytes // ALIGNMENT_BYTES << _PART_PAGES_SHIFT
    return _READ_RECORD.pack(place.offset, place.slot_bytes, place.segment_start, slots)


def _unpack_place(record: tuple[int, int, int, int]) -> SlotLocation:
    offset, slot_bytes, segment_start, packed = record
    parts = packed >> _PARTS_SHIFT
    if not parts:
        return SlotLocation(offset, slot_bytes, segment_start, packed)
    pages = packed >> _PART_PAGES_SHIFT & _PART_PAGES_MASK
    layout = PoolLayout(parts, pages * ALIGNMENT_BYTES)
    return SlotLocation(offset, slot_bytes, segment_start, packed & _SLOTS_MASK, layout)


class ReadLogFile:
    """The file of the running tierd; implements the store's ``ReadLog``. Raises ``OSError`` if it
    cannot be made."""

    def __init__(self, run_directory: Path, epoch: int, mode: int) -> None:
        directory = run_directory / READS_DIRECTORY_NAME
        directory.mkdir(exist_ok=True)
        self.path = directory / str(epoch)
        # Never closed before the process ends: every thread holds it open, and the lock is
        # released with the last one.
        self._descriptor = open_shared(self.path, os.O_RDWR | os.O_CREAT, mode)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(self._descriptor, 0)
        self._numbers: dict[int, int] = {}
        self._free: list[int] = []

    def begin(self, place: SlotLocation) -> bool:
        """Records a read into this slot. False: the read is not recorded and must not start."""
        number = self._free.pop() if self._free else len(self._numbers)
        data = _pack_place(place)
        try:
            written = os.pwrite(self._descriptor, data, number * READ_RECORD_BYTES)
        except OSError:
            written = 0
        if written != READ_RECORD_BYTES:
            self._free.append(number)
            return False
        self._numbers[place.offset] = number
        return True

    def end(self, offset: int) -> None:
        """The read ended. If the record cannot be erased, the next tierd loses the slot until this
        process has exited."""
        number = self._numbers.pop(offset, None)
        if number is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._descriptor, _EMPTY_RECORD, number * READ_RECORD_BYTES)
            self._free.append(number)

    def close(self) -> None:
        """Removes the file, unless a read hangs."""
        if not self._numbers:
            self.path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class OrphanedReadsFile:
    """A previous tierd with a thread that may still read, and the slots it may write to."""

    path: Path
    places: tuple[SlotLocation, ...]

    def is_released(self) -> bool:
        """Whether all its threads have ended. Removes the file then."""
        return _remove_if_released(self.path)


def find_orphaned_reads(run_directory: Path, own: Path | None = None) -> list[OrphanedReadsFile]:
    """Previous tierds of this run directory with threads that have not ended. The caller holds the
    daemon's lock."""
    found = []
    for path in sorted((run_directory / READS_DIRECTORY_NAME).glob("*")):
        if path == own or not path.is_file() or path.is_symlink():
            # Not written by tierd, and no reason not to start.
            continue
        if _remove_if_released(path):
            continue
        places = _read_places(path)
        _log.warning(
            "quarantined %d slots: a thread of an earlier tierd hangs in a read", len(places)
        )
        found.append(OrphanedReadsFile(path, places))
    return found


def _remove_if_released(path: Path) -> bool:
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


def _read_places(path: Path) -> tuple[SlotLocation, ...]:
    data = path.read_bytes()[:_MAX_READ_LOG_BYTES]
    whole = len(data) // READ_RECORD_BYTES * READ_RECORD_BYTES
    records = (
        _READ_RECORD.unpack_from(data, start) for start in range(0, whole, READ_RECORD_BYTES)
    )
    return tuple(_unpack_place(record) for record in records if any(record))
