"""Copies where the KV cache lies in host memory: plain memory copies on the calling thread.

Not torch moves the bytes: it would start a second team of OpenMP threads beside the engine's own, on the same cores. A
block's bytes that lie together are one copy: of a slice of memory where they are few, which costs a third of a
microsecond to call and holds the interpreter lock for as long as they take, tens of microseconds; of ``memmove`` where
they are many, which costs three times that and holds no lock. What does not lie together numpy copies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from kvtier.transfer.codec import Codec, segment_views
from kvtier.transfer.engine import IN_FLIGHT_BYTES, Copy, CopyEngine, CopyHandle, Direction

SLICE_BYTES = 256 << 10
"""Up to here slices are copied."""
_Slices = tuple[memoryview, int, int, int]
"""A band's memory, bytes from block to block, its place in a block of the object, its size."""
_WORDS: dict[int, npt.DTypeLike] = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


@dataclass(frozen=True, slots=True)
class _CpuSegment:
    """Words ``start .. start + words`` of a block, which are ``cache[block]``. ``address`` is block 0's where a block's
    bytes lie together, else 0; ``stride_bytes`` from block to block. ``memory``: all bytes from block 0's to the last
    block's, where they lie together and are few.
    """

    cache: npt.NDArray[Any]
    start: int
    words: int
    address: int
    stride_bytes: int
    start_bytes: int
    size_bytes: int
    memory: memoryview | None


class CpuCopyEngine(CopyEngine):
    """Every copy is done when ``submit`` returns."""

    kind = "cpu"

    def __init__(
        self, kv_caches: Mapping[str, object], codec: Codec, in_flight_bytes: int = IN_FLIGHT_BYTES
    ) -> None:
        super().__init__(codec, in_flight_bytes)
        self._bands = [
            [_band(view.cache.numpy(), view.start, view.words) for view in group]
            for group in segment_views(kv_caches, codec)
        ]
        self._slices = [_slices(group) for group in self._bands]

    def _start(self, handle: CopyHandle, copies: Sequence[Copy], after: object | None) -> None:
        for copy in copies:
            self._move(copy, handle.direction)

    def _move(self, copy: Copy, direction: Direction) -> None:
        pool = self._pool
        if pool is None:
            raise RuntimeError("no pool is attached")
        word = self._codec.word_bytes
        block_bytes = self._codec.groups[copy.group].block_bytes
        begin = copy.shard + copy.first * block_bytes
        size = len(copy.blocks) * block_bytes
        memory = pool.memory[begin : begin + size]
        bands = self._bands[copy.group]
        if all(band.address for band in bands):
            slices = self._slices[copy.group]
            if slices:
                _move_slices(memory.data, block_bytes, slices, copy.blocks, direction)
                return
            _move_together(memory.ctypes.data, block_bytes, bands, copy.blocks, direction)
            return
        rows = memory.view(_WORDS[word]).reshape(len(copy.blocks), block_bytes // word)
        for band in bands:
            _move_scattered(
                rows[:, band.start : band.start + band.words], band, copy.blocks, direction
            )

    def _ready(self, handle: CopyHandle) -> bool:
        return True

    def _drain(self) -> None:
        return None


def _band(cache: npt.NDArray[Any], start: int, words: int) -> _CpuSegment:
    together = cache.shape[0] > 0 and cache[0].flags.c_contiguous
    address, word, stride = cache.ctypes.data if together else 0, cache.itemsize, cache.strides[0]
    memory = None
    if together and words * word <= SLICE_BYTES:
        first = cache[0].reshape(-1).view(np.uint8)
        memory = as_strided(first, ((cache.shape[0] - 1) * stride + words * word,), (1,)).data
    return _CpuSegment(cache, start, words, address, stride, start * word, words * word, memory)


def _slices(bands: Sequence[_CpuSegment]) -> list[_Slices]:
    """Of every band; none at all unless each has ``memory``."""
    found = [
        (band.memory, band.stride_bytes, band.start_bytes, band.size_bytes)
        for band in bands
        if band.memory is not None
    ]
    return found if len(found) == len(bands) else []


def _move_slices(
    host: memoryview,
    block_bytes: int,
    bands: Sequence[_Slices],
    blocks: Sequence[int],
    direction: Direction,
) -> None:
    """As ``_move_together``. A slice beyond the cache is shorter than the one that it is assigned to, and raises."""
    to_host = direction is Direction.TO_HOST
    at = 0
    for block in blocks:
        for cache, stride, start, size in bands:
            begin, place = block * stride, at + start
            if to_host:
                host[place : place + size] = cache[begin : begin + size]
            else:
                cache[begin : begin + size] = host[place : place + size]
        at += block_bytes


def _move_together(
    host: int,
    block_bytes: int,
    bands: Sequence[_CpuSegment],
    blocks: Sequence[int],
    direction: Direction,
) -> None:
    # Block by block, so that the slot is walked through in order: its pages then cost one miss each.
    move, to_host = ctypes.memmove, direction is Direction.TO_HOST
    pieces = [
        (band.address, band.stride_bytes, band.start_bytes, band.size_bytes) for band in bands
    ]
    for block in blocks:
        for address, stride, start, size in pieces:
            if to_host:
                move(host + start, address + block * stride, size)
            else:
                move(address + block * stride, host + start, size)
        host += block_bytes


def _move_scattered(
    rows: npt.NDArray[Any], band: _CpuSegment, blocks: Sequence[int], direction: Direction
) -> None:
    for row, block in enumerate(blocks):
        piece = rows[row].reshape(band.cache.shape[1:])
        if direction is Direction.TO_HOST:
            piece[...] = band.cache[block]
        else:
            band.cache[block] = piece
