"""The host pool file: made by tierd, mapped by everybody.

Every byte is allocated with ``fallocate`` before its range is published, and the file never shrinks: a write past what a tmpfs
can hold is a SIGBUS in the engine (DATAPATH 4). A file that is there already is taken over as it is, because workers of the
last tierd may have it mapped and may still be writing into it.

What a tierd leaves in the run directory for the one after it, beside the pool itself.

::

    slots            the slot table (kvtier/store/slot_table.py)
    namespaces/      <namespace>.json, its canonical text, for each namespace whose objects the table may name

With ``persistence: Process`` there is neither, and what an earlier life left goes.

The host pool's beginning, which takes a while where it has a hundred gigabytes.
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

from kvtier.config.models import Structural
from kvtier.files import replace_file
from kvtier.namespace import namespace_digest
from kvtier.store.slot_table import SlotTable, TableIdentity, slot_table_bytes
from kvtier.tierd.run_directory import (
    RunDirectory,
    open_shared,
    remove_abandoned,
)
from kvtier.tierd.tier_factory import memory_document
from kvtier.tierd.wire import POOL_NAME

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
        self,
        path: Path,
        wanted_bytes: int,
        mode: int = 0o600,
        keep_going: Callable[[], bool] = lambda: True,
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
            self._mapping = mmap.mmap(
                descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE
            )
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
        room = volume.f_bavail * volume.f_frsize - RESERVE_BYTES - slot_table_bytes(wanted)
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


TABLE_NAME = "slots"
NAMESPACES_NAME = "namespaces"
_SUFFIX = ".json"


def open_table(
    run_directory: Path, mode: int, pool: PoolFile, topology: str, persists: bool
) -> SlotTable | None:
    """The slot table of this pool with what can be taken over; None where nothing shall be, or the table cannot be had.

    ``topology``: digest of the structural document. Reads the whole table: a thread of its own may do it.
    """
    path = run_directory / TABLE_NAME
    try:
        if not persists:
            path.unlink(missing_ok=True)
            _remove_namespaces(run_directory, set())
            return None
        identity = TableIdentity(pool.bytes, os.stat(pool.path).st_ino, topology)
        descriptor = open_shared(path, os.O_RDWR | os.O_CREAT, mode)
        try:
            table = SlotTable(descriptor, identity, _namespaces(run_directory))
        except OSError:
            os.close(descriptor)
            raise
        _remove_namespaces(run_directory, {record.namespace for record in table.recovered})
    except OSError as error:
        _log.error("%s: %s; what is in RAM will not outlive this process", path, error)
        return None
    if table.recovered or table.rejected:
        _log.info(
            "%d objects of the last tierd are in the pool; not taken over: %s",
            len(table),
            dict(table.rejected),
        )
    return table


def describe_namespace(run_directory: Path, mode: int, namespace: str, text: str) -> None:
    """Notes what a namespace stands for, before an object of it is noted."""
    directory = run_directory / NAMESPACES_NAME
    try:
        directory.mkdir(exist_ok=True)
        replace_file(directory / f"{namespace}{_SUFFIX}", text.encode(), mode)
    except OSError as error:
        _log.warning(
            "%s: %s; what is stored in namespace %s does not outlive this process",
            directory,
            error,
            namespace,
        )


def _namespaces(run_directory: Path) -> set[str]:
    """Namespaces whose texts are there and are theirs."""
    found = set()
    for path in (run_directory / NAMESPACES_NAME).glob(f"*{_SUFFIX}"):
        try:
            text = path.read_text()
        except (OSError, ValueError) as error:
            _log.warning("%s: %s", path, error)
            continue
        if namespace_digest(text) == path.name.removesuffix(_SUFFIX):
            found.add(namespace_digest(text))
    return found


def _remove_namespaces(run_directory: Path, but: set[str]) -> None:
    for path in (run_directory / NAMESPACES_NAME).glob(f"*{_SUFFIX}"):
        if path.name.removesuffix(_SUFFIX) not in but:
            path.unlink(missing_ok=True)


class PoolStart:
    """Allocates the pool on a thread of its own, after making room: dead engines' pools are removed first. ``done`` is called on
    that thread at the end, whatever came of it: ``error`` says why there is no ``pool``."""

    def __init__(self, run: RunDirectory, structural: Structural, done: Callable[[], None]) -> None:
        self.pool: PoolFile | None = None
        self.table: SlotTable | None = None
        self.error = ""
        self.finished = False
        self._run = run
        self._memory = memory_document(structural)
        self._topology = structural.content_hash
        self._done = done
        self._stop = threading.Event()
        threading.Thread(target=self._start, name="kvtier-pool", daemon=True).start()

    def _start(self) -> None:
        try:
            if not self._run.shared:
                remove_abandoned(self._run.path)
            path = self._run.path / POOL_NAME
            mode, persists = self._run.file_mode, self._memory.persistence == "Pod"
            pool = PoolFile(
                path, self._memory.capacity_bytes, mode, lambda: not self._stop.is_set()
            )
            self.table = open_table(self._run.path, mode, pool, self._topology, persists)
            self.pool = pool
            self.pool.touch_in_background()
        except OSError as error:
            self.error = f"the host pool cannot be allocated in {self._run.path}: {error}"
            _log.error("%s", self.error)
        except Exception as error:  # noqa: BLE001
            # Whatever it is: a thread that ends without a word would keep everybody waiting for the pool.
            self.error = f"the host pool cannot be allocated in {self._run.path}: {error!r}"
            _log.exception("%s", self.error)
        self.finished = True
        self._done()

    def stop(self) -> None:
        """Ends allocating at the next piece."""
        self._stop.set()
