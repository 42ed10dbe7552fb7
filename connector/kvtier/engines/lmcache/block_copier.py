"""Copies between GPU blocks and objects of LMCache, through a staging area that KVTier owns.

LMCache's memory is not known to the device, and may be anywhere. So a shard passes a buffer of one
shard per direction, page-locked where the cache is on a GPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from kvtier.engines.common.jobs import BlockRun
from kvtier.tiers.base import aligned
from kvtier.transfer.engine import Copy, CopyEngine, CopyError, Direction
from kvtier.transfer.host_pool import Bytes, HostPool

COPY_SECONDS = 20.0
"""Timeout of one shard. A slower device is of no use."""
POLL_SECONDS = 0.0002


class BlockCopier:
    """Any thread; one copy at a time in each direction."""

    def __init__(self, engine: CopyEngine, scratch: Callable[[int], HostPool]) -> None:
        """``scratch``: returns host memory that the device can copy to. One KV cache group."""
        if len(engine.codec.groups) != 1:
            raise CopyError("the CacheEngine path serves models with one KV cache group")
        self._engine = engine
        self.shard_bytes = engine.codec.groups[0].shard_bytes
        size = aligned(self.shard_bytes)
        self._offsets = {Direction.TO_HOST: 0, Direction.TO_DEVICE: size}
        self._staging = scratch(2 * size)
        self._submit = threading.Lock()
        """Of the copy engine, which takes calls one at a time."""
        self._busy = {direction: threading.Lock() for direction in Direction}
        self._entered = threading.local()
        engine.attach(self._staging)

    def fence(self) -> object | None:
        """A mark in the stream of the engine's kernels. Raises ``RuntimeError``."""
        with self._submit:
            return self._engine.fence()

    def store(self, run: BlockRun, target: memoryview, after: object | None) -> None:
        """Copies the blocks of a whole chunk into ``target``. Raises ``CopyError``."""
        whole = self._engine.codec.groups[0].blocks_per_chunk
        if run.first or len(run.blocks) != whole:
            end = run.first + len(run.blocks)
            raise CopyError(f"blocks {run.first} to {end} are no whole chunk of {whole} blocks")
        with self._busy[Direction.TO_HOST]:
            self._copy(run, Direction.TO_HOST, after)
            target[:] = self._part(Direction.TO_HOST).data

    def load(self, run: BlockRun, source: memoryview, after: object | None) -> None:
        """Copies a part of a chunk into its blocks. Raises ``CopyError``."""
        with self._busy[Direction.TO_DEVICE]:
            self._part(Direction.TO_DEVICE)[:] = np.frombuffer(source, dtype=np.uint8)
            self._copy(run, Direction.TO_DEVICE, after)

    def _part(self, direction: Direction) -> Bytes:
        start = self._offsets[direction]
        return self._staging.memory[start : start + self.shard_bytes]

    def _copy(self, run: BlockRun, direction: Direction, after: object | None) -> None:
        if not getattr(self._entered, "done", False):
            self._engine.enter_thread()
            self._entered.done = True
        copy = Copy(run.group, self._offsets[direction], run.first, run.blocks)
        with self._submit:
            handle = self._engine.submit([copy], direction, after)
        until = time.monotonic() + COPY_SECONDS
        while True:
            with self._submit:
                if self._engine.done(handle):
                    return
            if time.monotonic() > until:
                # Before the caller gives the blocks away, nothing may access them.
                self._engine.wait_idle()
                raise CopyError(f"a copy did not end within {COPY_SECONDS:.0f} s")
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Waits for what runs on the device, and releases the buffers. Raises ``CopyError``."""
        with self._submit:
            self._engine.synchronize()
            self._engine.close()
