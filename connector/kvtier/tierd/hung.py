"""Slots into which threads of dead tierds may still be reading.

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
import logging
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from kvtier.store.records import SlotPlace
from kvtier.tierd.rundir import open_shared

DIRECTORY_NAME = "reads"
_RECORD = struct.Struct("<QQQQ")
RECORD_BYTES = _RECORD.size
_EMPTY = bytes(RECORD_BYTES)
_MAX_BYTES = 16 << 20

_log = logging.getLogger("kvtier.tierd")


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

    def begin(self, place: SlotPlace) -> bool:
        """A read into this slot is about to begin; False if that cannot be noted, and it must not."""
        number = self._free.pop() if self._free else len(self._numbers)
        data = _RECORD.pack(place.offset, place.slot_bytes, place.segment_start, place.segment_slots)
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
class Hung:
    """A dead tierd of which a thread may live, and where that may write."""

    path: Path
    places: tuple[SlotPlace, ...]

    def over(self) -> bool:
        """Whether no thread of it lives any more; then its file goes."""
        return _take_away(self.path)


def find(run_directory: Path, own: Path | None = None) -> list[Hung]:
    """The dead tierds of this run directory that are not quite gone. The caller holds the lock of the one living tierd."""
    found = []
    for path in sorted((run_directory / DIRECTORY_NAME).glob("*")):
        if path == own or not path.is_file() or path.is_symlink():
            # What is no file is none of a tierd's, and no reason not to start.
            continue
        if _take_away(path):
            continue
        places = _places(path)
        _log.warning("a thread of an earlier tierd hangs in a call; %d slots are left to it", len(places))
        found.append(Hung(path, places))
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


def _places(path: Path) -> tuple[SlotPlace, ...]:
    data = path.read_bytes()[:_MAX_BYTES]
    whole = len(data) // RECORD_BYTES * RECORD_BYTES
    records = (_RECORD.unpack_from(data, start) for start in range(0, whole, RECORD_BYTES))
    return tuple(SlotPlace(*record) for record in records if any(record))
