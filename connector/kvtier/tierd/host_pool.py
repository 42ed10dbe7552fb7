"""The host pool file: tierd allocates it, tierd and the engines map it.

Every byte is allocated before its range is published, and a published range never shrinks, because
a write past what a tmpfs can hold is a SIGBUS in the engine. An existing file is taken over as it
is: workers of the previous tierd may have it mapped and may still be writing to it.

Beside the pool, a tierd leaves in the run directory what the next one needs to recover objects::

    slots            the slot table (kvtier/store/slot_table.py)
    generations      the generation words (kvtier/store/generations.py), also mapped by the engines
    namespaces/      <namespace>.json: the canonical text of each namespace in the table

With ``persistence: Process`` neither exists, and files of an earlier tierd are removed.

``PoolAllocation`` does all this on its own thread, because allocating a hundred gigabytes takes a
while.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvtier.config.models import Structural
from kvtier.files import replace_file
from kvtier.namespace import namespace_digest
from kvtier.store.generations import generation_bytes
from kvtier.store.slot_table import SlotTable, TableIdentity, slot_table_bytes
from kvtier.tierd.run_directory import (
    RunDirectory,
    open_shared,
    remove_abandoned,
)
from kvtier.tierd.tier_factory import memory_document
from kvtier.tierd.wire import GENERATIONS_NAME, POOL_NAME

PIECE_BYTES = 64 << 20
"""Allocated and touched at a time, in tens of milliseconds, so that stopping is prompt."""
POPULATE_THREADS = 8
"""Filling one file of a tmpfs: 1.3 GiB/s with one thread, 3.8 with eight."""
PAGE_BYTES = 4096
RESERVE_BYTES = 8 << 20
"""Left free on the volume in addition to the slot table, for session files, epoch and socket."""
MIN_POOL_BYTES = 1 << 20
_MADV_POPULATE_WRITE = 23
_log = logging.getLogger("kvtier.tierd")


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The configured size and the size that the volume had room for."""

    wanted_bytes: int
    bytes: int

    @property
    def condition(self) -> str:
        """Describes a pool that is smaller than configured; else empty."""
        if self.bytes >= self.wanted_bytes:
            return ""
        return (
            f"the host pool has {self.bytes} of {self.wanted_bytes} bytes because the volume of "
            "the run directory is full: make the volume larger than the memory tier's capacity"
        )


class PoolFile:
    """The pool file, allocated and mapped. ``memory`` is valid until ``close``.

    Raises ``OSError`` if the file cannot be made or mapped, or has less than ``MIN_POOL_BYTES``.
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
            if on_tmpfs(path):
                _populate_file(descriptor, wanted, keep_going)
            size = _allocate(descriptor, wanted, keep_going)
            self.size = PoolSize(wanted, size)
            self._mapping = mmap.mmap(
                descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE
            )
        finally:
            os.close(descriptor)
        self.memory = memoryview(self._mapping)
        self._words = _map_generations(path.with_name(GENERATIONS_NAME), size, mode)
        self.generations = memoryview(self._words)
        """Memory of the generation words; valid until ``close``."""

    @property
    def bytes(self) -> int:
        """Size of the published range."""
        return self.size.bytes

    def touch_in_background(self) -> None:
        """Faults in every page: the first copies do not pay for it, and the memory is charged to
        this process."""
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
                # Reading one byte a page maps it without changing what a worker may be writing
                # there.
                self.memory[start : start + length : PAGE_BYTES].tobytes()
            self.touched_bytes = start + length

    def close(self) -> None:
        """Unmaps, unless a view is in use; the file stays."""
        self._stop.set()
        if self._toucher is not None:
            self._toucher.join(5)
        try:
            self.memory.release()
            self._mapping.close()
            self.generations.release()
            self._words.close()
        except BufferError:
            # A read that hangs in a dead mount uses its slot; the mapping ends with the process.
            _log.debug("the host pool stays mapped: an I/O thread uses it")


def on_tmpfs(path: Path) -> bool:
    """Whether ``path`` lies on a tmpfs. False if that cannot be determined."""
    try:
        device = os.stat(path).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                before, _, after = line.partition(" - ")
                if before.split()[2] == wanted:
                    return after.split()[0] == "tmpfs"
    except (OSError, IndexError):
        return False
    return False


def _populate_file(descriptor: int, wanted: int, keep_going: Callable[[], bool]) -> None:
    """Extends a file on tmpfs to ``wanted`` bytes, allocated by several threads.

    ``fallocate`` holds the file's lock, so it fills pages with one thread; page faults do not. What
    could not be allocated is cut off again: ``_allocate`` tries it page by page.
    """
    done = os.fstat(descriptor).st_size // PAGE_BYTES * PAGE_BYTES
    volume = os.fstatvfs(descriptor)
    beside = RESERVE_BYTES + slot_table_bytes(wanted) + generation_bytes(wanted)
    room = (volume.f_bavail * volume.f_frsize - beside) // PAGE_BYTES * PAGE_BYTES
    end = min(wanted, done + max(0, room))
    if end - done < 2 * PIECE_BYTES:
        return
    os.ftruncate(descriptor, end)
    filled = done
    try:
        mapping = mmap.mmap(descriptor, end, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        populate = _populate(mapping, end)
        if populate is not None:
            filled = _populate_pieces(populate, (done, end), keep_going)
    finally:
        if filled < end:
            # No process has mapped this part: its size was not published.
            os.ftruncate(descriptor, filled)


def _populate_pieces(
    populate: Callable[[int, int], bool], span: tuple[int, int], keep_going: Callable[[], bool]
) -> int:
    """Populates ``span``; returns the end of the part of it that has no gap."""
    begin, end = span
    starts = range(begin, end, PIECE_BYTES)

    def fill(start: int) -> bool:
        return keep_going() and populate(start, min(PIECE_BYTES, end - start))

    threads = max(1, min(POPULATE_THREADS, os.cpu_count() or 1))
    with ThreadPoolExecutor(threads, thread_name_prefix="kvtier-populate") as executor:
        for start, filled in zip(starts, executor.map(fill, starts), strict=True):
            if not filled:
                executor.shutdown(wait=True, cancel_futures=True)
                return start
    return end


def _allocate(descriptor: int, wanted: int, keep_going: Callable[[], bool]) -> int:
    """Allocates up to ``wanted`` bytes, as many as fit, and returns how many of them are usable."""
    status = os.fstat(descriptor)
    # Published bytes stay allocated: all bytes below the size of an existing file have their pages.
    done = min(wanted, status.st_size // PAGE_BYTES * PAGE_BYTES)
    piece = PIECE_BYTES
    while done < wanted and keep_going():
        volume = os.fstatvfs(descriptor)
        beside = slot_table_bytes(wanted) + generation_bytes(wanted)
        room = volume.f_bavail * volume.f_frsize - RESERVE_BYTES - beside
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
        raise OSError(errno.ENOSPC, f"no room for a host pool of at least {MIN_POOL_BYTES} bytes")
    return done


def _map_generations(path: Path, pool_bytes: int, mode: int) -> mmap.mmap:
    """Maps the generation words of the pool; words of an earlier tierd are kept."""
    size = generation_bytes(pool_bytes)
    descriptor = open_shared(path, os.O_RDWR | os.O_CREAT, mode)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)


def _populate(mapping: mmap.mmap, size: int) -> Callable[[int, int], bool] | None:
    """``madvise(MADV_POPULATE_WRITE)``, which changes no content and runs without the GIL. None if
    unavailable."""
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
    """The slot table of this pool with the records that can be recovered; None without persistence
    or on failure.

    ``topology``: digest of the structural document. Reads the whole table.
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
        _log.error(
            "cannot open slot table %s: %s; objects in RAM will not survive this process",
            path,
            error,
        )
        return None
    if table.recovered or table.rejected:
        _log.info(
            "recovered %d objects of the previous tierd; rejected records by reason: %s",
            len(table),
            dict(table.rejected),
        )
    return table


def describe_namespace(run_directory: Path, mode: int, namespace: str, text: str) -> None:
    """Records the text of a namespace before the slot table names an object of it."""
    directory = run_directory / NAMESPACES_NAME
    try:
        directory.mkdir(exist_ok=True)
        replace_file(directory / f"{namespace}{_SUFFIX}", text.encode(), mode)
    except OSError as error:
        _log.warning(
            "cannot write to %s: %s; objects of namespace %s will not survive this process",
            directory,
            error,
            namespace,
        )


def _namespaces(run_directory: Path) -> set[str]:
    """Namespaces whose recorded text has the right digest."""
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


class PoolAllocation:
    """Allocates the pool on its own thread, after removing abandoned run directories to make room.

    ``on_finished`` is called on that thread. Then ``finished`` is true, and either ``pool`` is set
    or ``error`` says why it is not.
    """

    def __init__(
        self, run: RunDirectory, structural: Structural, on_finished: Callable[[], None]
    ) -> None:
        self.pool: PoolFile | None = None
        self.table: SlotTable | None = None
        self.error = ""
        self.finished = False
        self._run = run
        self._memory = memory_document(structural)
        self._topology = structural.content_hash
        self._on_finished = on_finished
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
            self.error = f"cannot allocate the host pool in {self._run.path}: {error}"
            _log.error("%s", self.error)
        except Exception as error:  # noqa: BLE001
            # A thread that ended silently would leave every session waiting for the pool.
            self.error = f"cannot allocate the host pool in {self._run.path}: {error!r}"
            _log.exception("%s", self.error)
        self.finished = True
        self._on_finished()

    def stop(self) -> None:
        """Stops allocating after the current piece."""
        self._stop.set()
