"""How the host pool is laid out: as one range, or in equal parts with one shard of each object.

With several parts each rank of an engine reads and writes only the part of its shard, so it maps
and registers only that. The slot at offset ``o`` has the shard of part ``p`` at
``p * part_bytes + o``. tierd chooses the layout for the first engine that opens while the pool
holds nothing; the slot table records it.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.tiers.base import ALIGNMENT_BYTES

MAX_PARTS = 64
LARGE_PART_BYTES = 1 << 30
LARGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """``parts`` of ``part_bytes`` each, from the beginning of the pool. One part is the whole
    pool."""

    parts: int
    part_bytes: int

    def span(self, part: int) -> tuple[int, int]:
        """Begin and end of a part."""
        return part * self.part_bytes, (part + 1) * self.part_bytes

    def fits(self, pool_bytes: int) -> bool:
        """Whether a pool of this size can have the layout."""
        return (
            1 <= self.parts <= MAX_PARTS
            and self.part_bytes > 0
            and self.part_bytes % ALIGNMENT_BYTES == 0
            and self.parts * self.part_bytes <= pool_bytes
        )


def pool_layout(pool_bytes: int, parts: int = 1) -> PoolLayout:
    """The layout of a pool of this size in so many equal parts."""
    unit = ALIGNMENT_BYTES
    if parts > 1:
        # A part is mapped by itself, with large pages if it can be.
        large = pool_bytes // parts >= LARGE_PART_BYTES
        unit = LARGE_PAGE_BYTES if large else max(unit, mmap.ALLOCATIONGRANULARITY)
    return PoolLayout(parts, pool_bytes // parts // unit * unit)


def expected_span(
    pool_bytes: int, shard_writers: Sequence[Sequence[int]], rank: int
) -> tuple[int, int]:
    """The bytes of a pool that a rank will probably be told to use. ``shard_writers[g][r]``: the
    rank that writes what rank r reads of group g."""
    parts = {tuple(sorted(set(writers))).index(writers[rank]) for writers in shard_writers}
    counts = {len(set(writers)) for writers in shard_writers}
    if len(parts) != 1 or len(counts) != 1 or counts == {1}:
        return 0, pool_bytes
    layout = pool_layout(pool_bytes, counts.pop())
    return layout.span(parts.pop()) if layout.part_bytes else (0, pool_bytes)
