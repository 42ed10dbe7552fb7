"""How the host pool is laid out: as one range, or in equal parts with one shard of each object.

With several parts each rank of an engine reads and writes only the part of its shard, so it maps
and registers only that. The slot at offset ``o`` has the shard of part ``p`` at
``p * part_bytes + o``. tierd chooses the layout for the first engine that opens while the pool holds
nothing; the slot table records it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.tiers.base import ALIGNMENT_BYTES

MAX_PARTS = 64


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
    return PoolLayout(parts, pool_bytes // parts // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
