"""Copies where the KV cache is in host memory, on the calling thread.

torch does not move the bytes: it would start a second team of OpenMP threads beside the engine's
own, on the same cores. How the bytes of a block move depends on where they are:

* Contiguous and few: a slice of memory, which costs a third of a microsecond per call, and holds
  the interpreter lock for tens of microseconds.
* Contiguous and many: ``memmove``, which costs three times that per call and holds no lock.
* Scattered: numpy.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from kvtier.transfer.codec import Codec
from kvtier.transfer.engine import IN_FLIGHT_BYTES, Copy, CopyEngine, CopyHandle, Direction
from kvtier.transfer.strided_views import segment_views

SLICE_BYTES = 256 << 10
"""Larger blocks are copied with ``memmove``."""
_Slices = tuple[memoryview, int, int, int]
"""A segment's memory, its stride from block to block, its offset in a block of the object, and its
size; all in bytes."""
_WORDS: dict[int, npt.DTypeLike] = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


@dataclass(frozen=True, slots=True)
class _CpuSegment:
    """Words ``start .. start + words`` of a block of the object, which are ``cache[block]``.

    ``address``: that of block 0 if the bytes of a block are contiguous, else 0. ``stride_bytes``:
    from block to block. ``memory``: all blocks, if the bytes of a block are contiguous and few.
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
    """Copies synchronously: every copy is complete when ``submit`` returns."""

    kind = "cpu"
    batch_bytes = 24 << 20
    """5 ms: the engine waits for one batch per hook."""

    def __init__(
        self, kv_caches: Mapping[str, object], codec: Codec, in_flight_bytes: int = IN_FLIGHT_BYTES
    ) -> None:
        super().__init__(codec, in_flight_bytes)
        self._segments = [
            [_segment(view.cache.numpy(), view.start, view.words) for view in group]
            for group in segment_views(kv_caches, codec)
        ]
        self._slices = [_slices(group) for group in self._segments]

    @property
    def synchronous(self) -> bool:
        return True

    def _start(self, handle: CopyHandle, copies: Sequence[Copy], after: object | None) -> None:
        started_at = time.perf_counter()
        for copy in copies:
            self._move(copy, handle.direction)
        handle.seconds = time.perf_counter() - started_at

    def _move(self, copy: Copy, direction: Direction) -> None:
        pool = self._pool
        if pool is None:
            raise RuntimeError("no pool is attached")
        word = self._codec.word_bytes
        block_bytes = self._codec.groups[copy.group].block_bytes
        begin = copy.shard + copy.first * block_bytes
        size = len(copy.blocks) * block_bytes
        memory = pool.memory[begin : begin + size]
        segments = self._segments[copy.group]
        if all(segment.address for segment in segments):
            slices = self._slices[copy.group]
            if slices:
                _move_slices(memory.data, block_bytes, slices, copy.blocks, direction)
                return
            _move_contiguous(memory.ctypes.data, block_bytes, segments, copy.blocks, direction)
            return
        rows = memory.view(_WORDS[word]).reshape(len(copy.blocks), block_bytes // word)
        for segment in segments:
            _move_scattered(
                rows[:, segment.start : segment.start + segment.words],
                segment,
                copy.blocks,
                direction,
            )

    def _ready(self, handle: CopyHandle) -> bool:
        return True

    def _drain(self) -> None:
        return None


def _segment(cache: npt.NDArray[Any], start: int, words: int) -> _CpuSegment:
    contiguous = cache.shape[0] > 0 and cache[0].flags.c_contiguous
    address, word, stride = cache.ctypes.data if contiguous else 0, cache.itemsize, cache.strides[0]
    memory = None
    if contiguous and words * word <= SLICE_BYTES:
        first = cache[0].reshape(-1).view(np.uint8)
        memory = as_strided(first, ((cache.shape[0] - 1) * stride + words * word,), (1,)).data
    return _CpuSegment(cache, start, words, address, stride, start * word, words * word, memory)


def _slices(segments: Sequence[_CpuSegment]) -> list[_Slices]:
    """Returns the slices of every segment; none unless each has ``memory``."""
    found = [
        (segment.memory, segment.stride_bytes, segment.start_bytes, segment.size_bytes)
        for segment in segments
        if segment.memory is not None
    ]
    return found if len(found) == len(segments) else []


def _move_slices(
    host: memoryview,
    block_bytes: int,
    segments: Sequence[_Slices],
    blocks: Sequence[int],
    direction: Direction,
) -> None:
    """As ``_move_contiguous``. A slice beyond the cache has the wrong length, and raises."""
    to_host = direction is Direction.TO_HOST
    at = 0
    for block in blocks:
        for cache, stride, start, size in segments:
            begin, place = block * stride, at + start
            if to_host:
                host[place : place + size] = cache[begin : begin + size]
            else:
                cache[begin : begin + size] = host[place : place + size]
        at += block_bytes


def _move_contiguous(
    host: int,
    block_bytes: int,
    segments: Sequence[_CpuSegment],
    blocks: Sequence[int],
    direction: Direction,
) -> None:
    # Block by block, so that the slot is accessed in order and each of its pages misses once.
    move, to_host = ctypes.memmove, direction is Direction.TO_HOST
    pieces = [
        (segment.address, segment.stride_bytes, segment.start_bytes, segment.size_bytes)
        for segment in segments
    ]
    for block in blocks:
        for address, stride, start, size in pieces:
            if to_host:
                move(host + start, address + block * stride, size)
            else:
                move(address + block * stride, host + start, size)
        host += block_bytes


def _move_scattered(
    rows: npt.NDArray[Any], segment: _CpuSegment, blocks: Sequence[int], direction: Direction
) -> None:
    for row, block in enumerate(blocks):
        piece = rows[row].reshape(segment.cache.shape[1:])
        if direction is Direction.TO_HOST:
            piece[...] = segment.cache[block]
        else:
            segment.cache[block] = piece
