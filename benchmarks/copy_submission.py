"""What submitting a load costs the engine's thread, without a device.

Everything that runs in Python for a load of 4,096 blocks: the job's copies, the check of their
addresses, the comparison of generations, the address table and the transfers of all staging pieces.
Launches are left out; their number follows from the bytes. The ratio compares 64 layers with 32:
the cost must not grow with layers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch
from benchmarks.common import options, report

from kvtier.engines.common.jobs import BlockRun, LoadJob
from kvtier.engines.common.worker_loads import WorkerLoads
from kvtier.engines.common.worker_state import (
    CompletionQueue,
    Counters,
    RankContext,
    RankShards,
    SlotGenerations,
)
from kvtier.store.generations import generation_bytes
from kvtier.tierd.wire import Ready
from kvtier.transfer.codec import Codec, build_codec
from kvtier.transfer.copy_ranges import rows_of, staged_pieces
from kvtier.transfer.cuda import STAGING_BYTES
from kvtier.transfer.engine import Copy, CopyEngine, CopyHandle
from kvtier.transfer.host_pool import HostPool
from kvtier.transfer.synthetic_layouts import LAYOUT_NAMES, CacheGeometry, make_cache

BLOCK, PER_CHUNK = 16, 16
GENERATION = 2


class AddressEngine(CopyEngine):
    """Computes what a CUDA engine computes for staged copies, and launches nothing."""

    kind = "addresses"

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec, 1 << 60)
        self.batch_bytes = 512 << 20
        self.table = np.zeros((2, 1 << 20), dtype=np.int64)
        self.pieces = 0

    def _start(self, handle: CopyHandle, copies: Sequence[Copy], after: object | None) -> None:
        for rows in rows_of(copies, self._codec):
            block_bytes = self._codec.groups[rows.group].block_bytes
            per_piece = max(1, STAGING_BYTES // block_bytes)
            pieces = staged_pieces(rows, block_bytes, per_piece, 1 << 40, ())
            count = len(rows.blocks)
            self.table[0, :count] = rows.blocks
            self.table[1, :count] = np.arange(count) % per_piece * block_bytes
            self.pieces += len(pieces)

    def _ready(self, handle: CopyHandle) -> bool:
        return True

    def _drain(self) -> None:
        return None


def submission(layers: int, blocks: int) -> tuple[float, int]:
    """Median seconds to submit a load of ``blocks`` blocks, and the number of staging pieces."""
    # One byte per element and head keeps the made-up cache small; counts are those of a real one.
    geometry = CacheGeometry(layers, blocks + 1, BLOCK, 1, 8, torch.uint8)
    layout = make_cache(LAYOUT_NAMES[0], geometry)
    codec = build_codec(layout.caches, layout, BLOCK * PER_CHUNK)
    engine = AddressEngine(codec)
    slot_bytes = -(-codec.shard_bytes[0] // 4096) * 4096
    chunks = blocks // PER_CHUNK
    engine.attach(HostPool(np.zeros(chunks * slot_bytes, dtype=np.uint8)))
    shards = RankShards(codec.shard_bytes)
    ranges = ((0, codec.shard_bytes[0], True),)
    shards.set(Ready(namespace="", slot_bytes=(slot_bytes,), persistent=True, shards=ranges))
    words = memoryview(bytearray(generation_bytes(chunks * slot_bytes))).cast("I")
    for chunk in range(chunks):
        words[chunk * slot_bytes // 4096] = GENERATION
    clock = time.perf_counter
    context = RankContext(
        engine, shards, CompletionQueue(True), Counters(), clock, SlotGenerations(words)
    )
    runs = tuple(
        BlockRun(0, 0, tuple(range(1 + chunk * PER_CHUNK, 1 + (chunk + 1) * PER_CHUNK)))
        for chunk in range(chunks)
    )
    slots = tuple(chunk * slot_bytes for chunk in range(chunks))
    seconds = []
    for number in range(1, 31):
        loads = WorkerLoads(context)
        job = LoadJob(number, f"r{number}", runs, 5.0, 1, slots, (GENERATION,) * chunks)
        started_at = clock()
        loads.add((job,), None, started_at, 1)
        while len(loads):
            loads.advance()
        seconds.append(clock() - started_at)
        (end,) = context.completions.take().loads
        if end.keys_loaded != chunks:
            raise RuntimeError(f"loaded {end.keys_loaded} of {chunks} keys: {end.reason}")
    return statistics.median(seconds[5:]), engine.pieces // 30


def main() -> None:
    """Entry point."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--blocks", type=int, default=4096, help="blocks of the load")

    given = options(str(__doc__).splitlines()[0], add)
    rows, medians = [], {}
    for layers in (16, 32, 64):
        medians[layers], pieces = submission(layers, given.blocks)
        rows.append((layers, given.blocks, f"{medians[layers] * 1e3:.2f}", pieces))
    report(
        given.json,
        "Submitting one load",
        ("layers", "blocks", "milliseconds, median", "staging pieces"),
        rows,
        medians[64] / medians[32],
        "64 layers against 32, at most 1.2; with 32 layers at most 2 ms",
    )


if __name__ == "__main__":
    main()
