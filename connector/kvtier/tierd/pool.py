"""The host pool file: made by tierd, mapped by everybody.

Every byte is allocated with ``fallocate`` before its range is published, and the file never shrinks: a write past what a tmpfs
can hold is a SIGBUS in the engine (DATAPATH 4). A file that is there already is taken over as it is, because workers of the
last tierd may have it mapped and may still be writing into it.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtier.store.records import table_bytes
from kvtier.tierd.rundir import open_shared

PIECE_BYTES = 64 << 20
"""Allocated and touched at a time: tens of milliseconds, so that stopping is never far."""
PAGE_BYTES = 4096
RESERVE_BYTES = 8 << 20
"""Left free on the volume beside what the slot table may take: sessions, epoch and socket must still be writable beside a pool that
fills it."""
MIN_POOL_BYTES = 1 << 20
_MADV_POPULATE_WRITE = 23

_log = logging.getLogger("kvtier.tierd")


@dataclass(frozen=True, slots=True)
class PoolSize:
    """What was asked for and what the volume had room for."""

    wanted_bytes: int
    bytes: int

    @property
    def condition(self) -> str:
        """A sentence for people where the pool is smaller than asked for; else empty."""
        if self.bytes >= self.wanted_bytes:
            return ""
        return (
            f"the host pool has {self.bytes} of {self.wanted_bytes} bytes: the volume of the run directory has no room for more; "
            "make it larger than the memory tier's capacity"
        )


class PoolFile:
    """The pool file, allocated and mapped. ``memory`` is valid until ``close``.

    Raises ``OSError`` when the file cannot be made or mapped, or not even ``MIN_POOL_BYTES`` fit.
    """

    def __init__(
        self, path: Path, wanted_bytes: int, mode: int = 0o600, keep_going: Callable[[], bool] = lambda: True
    ) -> None:
        self.path = path
        self._stop = threading.Event()
        self._toucher: threading.Thread | None = None
        self.touched_bytes = 0
        wanted = max(MIN_POOL_BYTES, wanted_bytes // PAGE_BYTES * PAGE_BYTES)
        descriptor = open_shared(path, os.O_RDWR | os.O_CREAT, mode)
        try:
            size = _allocate(descriptor, wanted, keep_going)
            self.size = PoolSize(wanted, size)
            self._mapping = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(descriptor)
        self.memory = memoryview(self._mapping)

    @property
    def bytes(self) -> int:
        """Size of the published range."""
        return self.size.bytes

    def touch_in_background(self) -> None:
        """Brings every page in, so that no first copy pays for it and the memory is charged to this process."""
        self._toucher = threading.Thread(target=self._touch, name="kvtier-touch", daemon=True)
        self._toucher.start()

    def _touch(self) -> None:
        populate = _populate(self._mapping, self.bytes)
        for start in range(0, self.bytes, PIECE_BYTES):
            if self._stop.is_set():
                return
            length = min(PIECE_BYTES, self.bytes - start)
            if populate is None or not populate(start, length):
                populate = None
                # Reading one byte a page maps it without changing what a worker may be writing there.
                self.memory[start : start + length : PAGE_BYTES].tobytes()
            self.touched_bytes = start + length

    def close(self) -> None:
        """Unmaps, unless somebody still holds a view; the file stays."""
        self._stop.set()
        if self._toucher is not None:
            self._toucher.join(5)
        try:
            self.memory.release()
            self._mapping.close()
        except BufferError:
            # A read that hangs in a dead mount still has its slot; the mapping goes with the process.
            _log.debug("the pool stays mapped: a call on an I/O thread still uses it")


def _allocate(descriptor: int, wanted: int, keep_going: Callable[[], bool]) -> int:
    """Allocates up to ``wanted`` bytes, as many as fit, and returns how many of them are usable."""
    status = os.fstat(descriptor)
    # What is published once stays: a file of the right size has all its pages, one that was left half-made has those below its size.
    done = min(wanted, status.st_size // PAGE_BYTES * PAGE_BYTES)
    piece = PIECE_BYTES
    while done < wanted and keep_going():
        volume = os.fstatvfs(descriptor)
        room = volume.f_bavail * volume.f_frsize - RESERVE_BYTES - table_bytes(wanted)
        length = min(piece, wanted - done, room // PAGE_BYTES * PAGE_BYTES)
        if length <= 0:
            break
        try:
            os.posix_fallocate(descriptor, done, length)
        except InterruptedError:
            continue
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG):
                raise
            if piece <= PAGE_BYTES:
                break
            piece = max(PAGE_BYTES, piece // 8)
            continue
        done += length
    if done < MIN_POOL_BYTES:
        raise OSError(errno.ENOSPC, f"no room for a pool of at least {MIN_POOL_BYTES} bytes")
    return done


def _populate(mapping: mmap.mmap, size: int) -> Callable[[int, int], bool] | None:
    """``madvise(MADV_POPULATE_WRITE)`` without the interpreter lock; it changes no content. None where the C library is unusual."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
        madvise = library.madvise
    except (OSError, AttributeError):
        return None
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise.restype = ctypes.c_int
    holder = (ctypes.c_char * size).from_buffer(mapping)
    base = ctypes.addressof(holder)

    def populate(start: int, length: int) -> bool:
        # ``holder`` keeps the mapping exported, hence valid, for as long as this function lives.
        return holder is not None and bool(madvise(base + start, length, _MADV_POPULATE_WRITE) == 0)

    return populate
