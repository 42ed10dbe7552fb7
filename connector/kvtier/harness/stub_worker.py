"""The worker side of the stub engine: copies between the host pool and bytes derived from keys."""

from __future__ import annotations

import hashlib
import mmap
import queue
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier.processes import own_identity
from kvtier.store.generations import PAGE_SHIFT, unpack_location
from kvtier.tierd.client import TierdClient
from kvtier.tierd.liveness import hold_peer_lock
from kvtier.tierd.wire import (
    GENERATIONS_NAME,
    PROTOCOL,
    Abort,
    Deliver,
    Hello,
    Message,
    Welcome,
)

Bytes = npt.NDArray[np.uint8]
STRICT_SECONDS = 0.05
"""What a worker allows beyond the deadline of a request (docs/datapath.md)."""


def block_hash(number: int, salt: str = "") -> bytes:
    """32 bytes in place of vLLM's block hash of chunk ``number``."""
    return hashlib.sha256(f"{salt}/{number}".encode()).digest()


def content(key: bytes, size_bytes: int) -> Bytes:
    """The bytes of an object. Any eight of them are unique over all keys and offsets."""
    seed = int.from_bytes(key[-8:], "little")
    words = np.arange(-(-size_bytes // 8), dtype=np.uint64) * np.uint64(
        0x9E3779B97F4A7C15
    ) + np.uint64(seed)
    return words.view(np.uint8)[:size_bytes]


@dataclass(frozen=True, slots=True)
class StubEngineOptions:
    """``copy_seconds``: how long one copy takes, in ``copy_pieces`` pieces. ``drains``: whether the
    worker reports that it has drained. ``limit_seconds``: how long a load waits for its slots.
    ``strict``: a load ends at its deadline, as a scheduler's does. ``protocol``: its version.
    ``courteous``: whether it acknowledges evictions and tells tierd of its loads. ``compares``:
    whether its worker compares generations, which the rules demand.
    """

    run_directory: Path
    engine: str = ""
    identity: str = "stub"
    ephemeral_reason: str = ""
    object_bytes: int = 64 << 10
    copy_seconds: float = 0.0
    copy_pieces: int = 16
    drains: bool = True
    limit_seconds: float = 60.0
    strict: bool = False
    protocol: str = PROTOCOL
    courteous: bool = True
    compares: bool = True


@dataclass(slots=True)
class Seen:
    """Counters. ``wrong``: objects whose bytes were not those of their key. ``reused``: slots that
    were reused while they were copied."""

    stored: int = 0
    loaded: int = 0
    promoted: int = 0
    load_failed: int = 0
    misses: int = 0
    wrong: int = 0
    lost: int = 0
    attached: int = 0
    reused: int = 0


@dataclass(slots=True, eq=False)
class StubJob:
    """A load from ``locations`` (``slot`` < 0) or a store into ``slot``."""

    number: int
    keys: tuple[bytes, ...]
    epoch: int
    slot: int
    done: threading.Event
    locations: tuple[int, ...] = ()
    ended: int = 0
    """Keys that were copied and are correct."""


class StubWorker:
    """The worker side: one thread makes the copies, in the order of the jobs."""

    def __init__(self, options: StubEngineOptions, engine: str, seen: Seen) -> None:
        self._options = options
        self._engine = engine
        self._seen = seen
        self._inbox: queue.SimpleQueue[Message | StubJob | str | None] = queue.SimpleQueue()
        self._pool: Bytes | None = None
        self._words: memoryview | None = None
        self.epoch = 0
        self.drained_epoch = 0
        self.copying = threading.Event()
        """Set while a copy runs."""
        self.client = TierdClient(
            options.run_directory, self._hello, self._inbox.put, self._inbox.put
        )
        self._thread = threading.Thread(target=self._run, name="stub-worker", daemon=True)

    def _hello(self) -> Hello:
        me = own_identity()
        return Hello(
            protocol=self._options.protocol,
            role="worker",
            engine=self._engine,
            pid=me.pid,
            pid_namespace=me.pid_namespace,
            process_start=me.start,
            drained_epoch=self.drained_epoch,
            codec="stub",
            shard_bytes=(self._options.object_bytes,),
            lock=hold_peer_lock(Path(self._options.run_directory)),
        )

    def start(self) -> None:
        """Attaches in the background."""
        self._thread.start()
        self.client.start()

    def put(self, job: StubJob) -> None:
        """Any thread."""
        self._inbox.put(job)

    def close(self, timeout_seconds: float) -> None:
        """Drains and closes the session."""
        self._inbox.put(None)
        self._thread.join(timeout_seconds)
        if not self._thread.is_alive():
            self.client.close(timeout_seconds)

    def _run(self) -> None:
        while True:
            item = self._inbox.get()
            if item is None:
                return
            if isinstance(item, str):
                self._lost()
            elif isinstance(item, StubJob):
                self._begin(item)
            elif isinstance(item, Welcome):
                self._map(item)

    def _map(self, welcome: Welcome) -> None:
        with open(welcome.pool_path, "r+b") as file:
            self._pool = np.frombuffer(mmap.mmap(file.fileno(), welcome.pool_bytes), dtype=np.uint8)
        words = Path(welcome.pool_path).with_name(GENERATIONS_NAME)
        with open(words, "rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
        self._words = memoryview(mapping).cast("I")
        self.epoch = welcome.epoch

    def _lost(self) -> None:
        # Copies are made on this thread, so none is running now: the worker has drained.
        self.drained_epoch = max(self.drained_epoch, self.epoch)
        self.epoch = 0
        if self._options.drains:
            self.client.reattach(self.drained_epoch)

    def _begin(self, job: StubJob) -> None:
        pool, words = self._pool, self._words
        if self.epoch and job.epoch == self.epoch and pool is not None and words is not None:
            if job.slot >= 0:
                self._store(job, pool)
            else:
                self._load(job, pool, words)
        job.done.set()

    def _store(self, job: StubJob, pool: Bytes) -> None:
        key = job.keys[0]
        self._copy(
            pool[job.slot : job.slot + self._options.object_bytes],
            content(key, self._options.object_bytes),
        )
        if self.client.epoch == job.epoch:
            self.client.send(Deliver(reservations=(job.number,)))
        else:
            self.client.send(Abort(reservations=(job.number,)))
        job.ended = 1

    def _load(self, job: StubJob, pool: Bytes, words: memoryview) -> None:
        size = self._options.object_bytes
        target = np.empty(size, dtype=np.uint8)
        for key, location in zip(job.keys, job.locations, strict=False):
            slot, generation = unpack_location(location)
            page = slot >> PAGE_SHIFT
            if not location or (words[page] != generation and self._options.compares):
                break
            self._copy(target, pool[slot : slot + size])
            reused = words[page] != generation
            if reused:
                self._seen.reused += 1
            if self.client.epoch != job.epoch or (reused and self._options.compares):
                # tierd was lost or reused the slot during the copy: what was copied does not count.
                break
            if np.array_equal(target, content(key, size)):
                job.ended += 1
            else:
                self._seen.wrong += 1

    def _copy(self, target: Bytes, source: Bytes) -> None:
        if not self._options.copy_seconds:
            target[:] = source
            return
        self.copying.set()
        pieces = self._options.copy_pieces
        size = -(-len(target) // pieces)
        for start in range(0, len(target), size):
            time.sleep(self._options.copy_seconds / pieces)
            target[start : start + size] = source[start : start + size]
        self.copying.clear()
