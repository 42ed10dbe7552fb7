"""Chooses how a CUDA copy engine copies, by measuring every way for the layout at hand."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence

from kvtier.transfer.cuda import CudaCopyEngine
from kvtier.transfer.engine import Copy, CopyEngine, CopyError, Direction
from kvtier.transfer.host_pool import HostPool

SCRATCH_BYTES = 128 << 20
"""Long enough for a rate (2.5 ms), and short enough for the start of an engine."""
COPY_SECONDS = 5.0
"""Timeout of one copy."""
REPEATS = 3
EQUAL_SHARE = 0.97
"""Ways that reach this share of the best rate count as equal; the one that disturbs the engine's
kernels least is taken."""
_PREFERENCE = ("batch", "staged", "direct")
logger = logging.getLogger(__name__)


def calibrate(engine: CopyEngine, scratch: HostPool) -> dict[str, float]:
    """Measures every way, and chooses one for each direction. Other engines have no choice.

    ``scratch``: registered host memory. Blocks at the end of the cache are copied to it and back.
    Call it on the thread that launches the engine's kernels, before requests run. Returns bytes per
    second by direction and way; empty if nothing was measured. Raises ``CopyError`` if no way
    works.
    """
    copies = _copies(engine, scratch.nbytes)
    if not isinstance(engine, CudaCopyEngine) or not copies:
        return {}
    rates: dict[str, float] = {}
    engine.attach(scratch)
    try:
        for direction in (Direction.TO_HOST, Direction.TO_DEVICE):
            of_direction = _measure_ways(engine, copies, direction)
            best = max(of_direction.values())
            chosen = next(
                way for way in _PREFERENCE if of_direction.get(way, 0.0) >= EQUAL_SHARE * best
            )
            engine.choose(direction, chosen)
            engine.set_rate(direction, of_direction[chosen])
            rates.update({f"{direction.value} {way}": rate for way, rate in of_direction.items()})
    finally:
        engine.synchronize()
        engine.detach()
    return rates


def _measure_ways(
    engine: CudaCopyEngine, copies: Sequence[Copy], direction: Direction
) -> dict[str, float]:
    rates: dict[str, float] = {}
    for way in engine.ways(direction):
        engine.choose(direction, way)
        try:
            rates[way] = _rate(engine, copies, direction)
        except CopyError as error:
            if way != "batch":
                raise
            # Old drivers have the call and reject it. The other ways do not need it.
            logger.warning("KVTier: copies do without batches: %s", error)
            engine.synchronize()
            engine.give_up_batches()
    return rates


def _copies(engine: CopyEngine, scratch_bytes: int) -> list[Copy]:
    """Returns copies of whole chunks of the largest group, from the last block downwards."""
    groups = engine.codec.groups
    group = max(range(len(groups)), key=lambda index: groups[index].block_bytes)
    per_chunk, slot_bytes = groups[group].blocks_per_chunk, groups[group].shard_bytes
    last = engine.codec.num_blocks - 1
    return [
        Copy(
            group,
            chunk * slot_bytes,
            0,
            tuple(last - chunk * per_chunk - block for block in range(per_chunk)),
        )
        for chunk in range(min(scratch_bytes // slot_bytes, last // per_chunk))
    ]


def _rate(engine: CudaCopyEngine, copies: Sequence[Copy], direction: Direction) -> float:
    """Returns the median rate; the first copy, which may compile something, does not count."""
    seconds = []
    for _ in range(1 + REPEATS):
        handle = engine.submit(copies, direction, engine.fence())
        deadline = time.monotonic() + COPY_SECONDS
        while not engine.done(handle):
            if time.monotonic() > deadline:
                raise CopyError(
                    f"a copy of {handle.total_bytes} bytes took longer than {COPY_SECONDS:.0f} s"
                )
            time.sleep(0.0002)
        seconds.append(handle.seconds)
    median = statistics.median(seconds[1:])
    return sum(map(engine.copy_bytes, copies)) / median if median > 0 else 0.0
