"""Addresses of the bytes that copies move, computed for all blocks of a submission at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.transfer.codec import Codec, layer_tensors
from kvtier.transfer.engine import Copy

Addresses = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class BlockRuns:
    """The contiguous byte ranges that make up one block of a group, in object order.

    ``table``: for each run its address in block 0, the bytes from block to block, its offset in a
    block of the object, and its length in words of ``word_bytes``. ``aligned``: all of these, and
    the size of a block of the object, are multiples of 16 bytes.
    """

    table: tuple[tuple[int, int, int, int], ...]
    word_bytes: int
    aligned: bool


def block_runs(kv_caches: Mapping[str, object], codec: Codec, group: int) -> BlockRuns:
    """Returns the runs of one group, at the addresses of this process.

    Raises ``CodecError`` if a layer is missing.
    """
    tensors = layer_tensors(kv_caches, codec)
    layout, word = codec.groups[group], codec.word_bytes
    table: list[tuple[int, int, int, int]] = []
    start = 0
    for layer in layout.layers:
        base = tensors[layer.name].untyped_storage().data_ptr() + layer.offset
        for steps in itertools.product(*(range(size) for size, _ in layer.outer)):
            offset = sum(
                step * stride for step, (_, stride) in zip(steps, layer.outer, strict=True)
            )
            table.append((base + offset, layer.block_stride, start, layer.run_bytes // word))
            start += layer.run_bytes
    table = _merged_runs(table, word)
    numbers = [number for run in table for number in (*run[:3], run[3] * word)]
    aligned = all(number % 16 == 0 for number in (*numbers, layout.block_bytes))
    return BlockRuns(tuple(table), word, aligned)


def _merged_runs(
    table: Sequence[tuple[int, int, int, int]], word: int
) -> list[tuple[int, int, int, int]]:
    """Joins runs that follow each other in the cache, as layers of one block may."""
    merged: list[tuple[int, int, int, int]] = []
    for base, stride, start, words in table:
        if merged:
            before = merged[-1]
            length = before[3] * word
            if (before[0] + length, before[1], before[2] + length) == (base, stride, start):
                merged[-1] = (before[0], stride, before[2], before[3] + words)
                continue
        merged.append((base, stride, start, words))
    return merged


@dataclass(frozen=True, slots=True)
class CopyRows:
    """Blocks of one group: their numbers in the cache and their byte offsets in the pool."""

    group: int
    blocks: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]


def rows_of(copies: Sequence[Copy], codec: Codec) -> Iterator[CopyRows]:
    """Returns the blocks of ``copies`` by group, in order."""
    for group in range(len(codec.groups)):
        of_group = [copy for copy in copies if copy.group == group]
        if not of_group:
            continue
        block_bytes = codec.groups[group].block_bytes
        lengths = np.array([len(copy.blocks) for copy in of_group])
        blocks = np.fromiter(
            (block for copy in of_group for block in copy.blocks), np.int64, int(lengths.sum())
        )
        begins = np.array(
            [copy.shard + copy.first * block_bytes for copy in of_group], dtype=np.int64
        )
        within = np.arange(len(blocks)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        yield CopyRows(group, blocks, np.repeat(begins, lengths) + within * block_bytes)


def run_ranges(
    table: Sequence[tuple[int, int, int, int]], codec: Codec, rows: CopyRows
) -> tuple[Addresses, Addresses, Addresses]:
    """Returns cache addresses, pool offsets and sizes of every run of every block."""
    runs = np.array(table, dtype=np.int64)
    cache = runs[None, :, 0] + rows.blocks[:, None] * runs[None, :, 1]
    host = rows.offsets[:, None] + runs[None, :, 2]
    sizes = np.broadcast_to(runs[None, :, 3] * codec.word_bytes, cache.shape)
    return (
        cache.ravel().astype(np.uint64),
        host.ravel().astype(np.uint64),
        sizes.ravel().astype(np.uint64),
    )


def split_ranges(
    host: Addresses,
    device: Addresses,
    sizes: Addresses,
    address: int,
    boundaries: Sequence[int],
) -> tuple[Addresses, Addresses, Addresses]:
    """Splits ranges of the pool at ``boundaries`` (offsets from ``address``, ascending).

    One transfer must not cross the boundary between two separately registered ranges.
    """
    if not boundaries or not len(sizes):
        return host, device, sizes
    edges = np.array(boundaries, dtype=np.uint64) + np.uint64(address)
    first = np.searchsorted(edges, host, side="right")
    last = np.searchsorted(edges, host + sizes, side="left")
    cuts = np.maximum(last - first, 0)
    if not cuts.any():
        return host, device, sizes
    # Range i has cuts[i] + 1 parts. Part k begins at the range's begin or at its k-th edge.
    index = np.repeat(np.arange(len(sizes)), cuts + 1)
    part = np.arange(len(index)) - np.repeat(np.cumsum(cuts + 1) - cuts - 1, cuts + 1)
    edge = first[index] + part
    begins = np.where(part == 0, host[index], edges[np.maximum(edge - 1, 0)])
    inner = edges[np.minimum(edge, len(edges) - 1)]
    ends = np.where(part == cuts[index], host[index] + sizes[index], inner)
    targets = (device[index] + (begins - host[index])).astype(np.uint64)
    return begins, targets, ends - begins


@dataclass(frozen=True, slots=True)
class StagedPiece:
    """The transfers between one staging buffer and the pool: addresses in the pool, byte offsets in
    the buffer, and sizes in bytes."""

    host: Addresses
    within: Addresses
    sizes: Addresses


def staged_pieces(
    rows: CopyRows,
    block_bytes: int,
    per_piece: int,
    address: int,
    boundaries: Sequence[int],
) -> list[StagedPiece]:
    """Returns the transfers of blocks that go through staging buffers of ``per_piece`` blocks.

    ``address``: of the pool. ``boundaries``: as for ``split_ranges``. Blocks that follow each other
    in the pool share a transfer. Computed for all pieces at once.
    """
    count, offsets = len(rows.blocks), rows.offsets
    begins = np.flatnonzero(np.diff(offsets, prepend=-1) != block_bytes)
    starts = np.union1d(begins, np.arange(0, count, per_piece))
    counts = np.diff(starts, append=count)
    host = (offsets[starts] + address).astype(np.uint64)
    staged = (starts * block_bytes).astype(np.uint64)
    sizes = (counts * block_bytes).astype(np.uint64)
    host, staged, sizes = split_ranges(host, staged, sizes, address, boundaries)
    piece_bytes = np.uint64(per_piece * block_bytes)
    edges = np.searchsorted(staged, np.arange(0, count * block_bytes, int(piece_bytes)))
    within = staged % piece_bytes
    return [
        StagedPiece(host[first:last], within[first:last], sizes[first:last])
        for first, last in itertools.pairwise((*edges.tolist(), len(sizes)))
    ]
