"""Where each rank's shard lies in a slot. Only tierd computes it; workers are told in ``Ready``.

This is the layout of an object in files, and of a slot that is one range. In a pool that is laid
out in parts (``store/pool_layout.py``) each shard of a slot lies in its own part, if all of them
have one size (``part_numbers``).

A slot of a group holds the shards of the ranks that write, in rank order, each at an aligned
offset. Pipeline stages with different numbers of layers have shards of different sizes. Ranks that
hold the same bytes, as with MLA under tensor parallelism, share one shard: the first of them writes
it, and all of them read it. A rank whose shard has 0 bytes, as a pipeline stage without a layer of
the group, is no writer and has no place in the slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvtier.tiers.base import aligned

MAX_SHARD_BYTES = 1 << 40
"""More than any host pool. Larger numbers are not sizes."""


@dataclass(frozen=True, slots=True)
class ShardRange:
    """Bytes ``offset`` to ``offset + size_bytes`` of a slot. ``writes``: whether this rank stores
    it; never if it has 0 bytes."""

    offset: int
    size_bytes: int
    writes: bool


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The slot of one group. ``ranges[r]``: what rank r reads. ``writers``: the ranks that write,
    ascending. ``shard_bytes[i]``: exact size of the shard of writer i."""

    slot_bytes: int
    writers: tuple[int, ...]
    shard_bytes: tuple[int, ...]
    ranges: tuple[ShardRange, ...]


def slot_layouts(
    shard_bytes: Sequence[Sequence[int]], shard_writers: Sequence[Sequence[int]]
) -> tuple[SlotLayout, ...]:
    """Returns the layout of each group's slot.

    ``shard_bytes[r][g]``: exact size of rank r's shard. ``shard_writers[g][r]``: the rank that
    writes what rank r reads; empty: every rank writes a shard of its own. Raises ``ValueError``,
    with the numbers, if the ranks contradict each other.
    """
    ranks = len(shard_bytes)
    counts = {len(sizes) for sizes in shard_bytes}
    if len(counts) != 1 or counts == {0}:
        numbers = [len(sizes) for sizes in shard_bytes]
        raise ValueError(f"groups per rank {numbers}: must be equal and positive")
    groups = counts.pop()
    writers = shard_writers or [range(ranks)] * groups
    if len(writers) != groups:
        raise ValueError(f"shard writers of {len(writers)} groups: must be of {groups} groups")
    return tuple(
        _layout(group, [sizes[group] for sizes in shard_bytes], tuple(writers[group]))
        for group in range(groups)
    )


def part_numbers(layouts: Sequence[SlotLayout]) -> tuple[tuple[int, ...], str]:
    """The part of the pool that each rank reads, if the pool has one part for each shard.

    Empty, and why, if there is none: with one shard, or if a rank would need several parts, or if
    the shards of a group differ in size, so that the smaller ones would waste their parts.
    """
    first = layouts[0]
    if len(first.writers) < 2:
        return (), "objects have one shard"
    parts: list[set[int]] = [set() for _ in first.ranges]
    for group, layout in enumerate(layouts):
        if len(layout.writers) != len(first.writers):
            shards = [len(each.writers) for each in layouts]
            return (), f"objects have different numbers of shards by group: {shards}"
        sizes = sorted(set(map(aligned, layout.shard_bytes)))
        if len(sizes) > 1:
            return (), f"shards of group {group} have {sizes} bytes: must have one size"
        for rank, shard in enumerate(layout.ranges):
            parts[rank].add(shard.offset // sizes[0])
    if any(len(numbers) != 1 for numbers in parts):
        return (), f"ranks read different shards by group: {[sorted(each) for each in parts]}"
    return tuple(numbers.pop() for numbers in parts), ""


def in_part(ranges: Sequence[ShardRange], begin: int) -> tuple[ShardRange, ...]:
    """The ranges of a rank whose part of the pool begins at ``begin``: relative to the slot's
    offset, as before."""
    return tuple(replace(shard, offset=begin) for shard in ranges)


def _layout(group: int, sizes: Sequence[int], writer_of: tuple[int, ...]) -> SlotLayout:
    where = f"group {group}: shards of {list(sizes)} bytes, written by ranks {list(writer_of)}"
    if not all(0 <= size <= MAX_SHARD_BYTES for size in sizes):
        raise ValueError(f"{where}: sizes must be between 0 and {MAX_SHARD_BYTES} bytes")
    if not any(sizes):
        raise ValueError(f"{where}: at least one must have bytes")
    if len(writer_of) != len(sizes) or not all(0 <= each < len(sizes) for each in writer_of):
        raise ValueError(f"{where}: must name one of {len(sizes)} ranks for each rank")
    for rank, writer in enumerate(writer_of):
        if writer_of[writer] != writer:
            raise ValueError(f"{where}: rank {writer} must write what rank {rank} reads")
        if sizes[rank] != sizes[writer]:
            raise ValueError(f"{where}: ranks {writer} and {rank} must have shards of one size")
    writers = tuple(sorted(writer for writer in set(writer_of) if sizes[writer]))
    offsets: dict[int, int] = {}
    end = 0
    for writer in writers:
        offsets[writer] = end
        end += aligned(sizes[writer])
    return SlotLayout(
        slot_bytes=end,
        writers=writers,
        shard_bytes=tuple(sizes[writer] for writer in writers),
        ranges=tuple(
            ShardRange(offsets.get(writer, 0), sizes[rank], writer == rank and sizes[rank] > 0)
            for rank, writer in enumerate(writer_of)
        ),
    )
