"""Copies where the KV cache lies in host memory: plain memory copies on the calling thread.

numpy moves the bytes, not torch: torch would start a second team of OpenMP threads beside the engine's own, on the same
cores, while numpy copies on one thread and holds no interpreter lock while it does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.transfer.base import IN_FLIGHT_BYTES, Copy, CopyEngine, CopyHandle, Direction
from kvtier.transfer.codec import Codec
from kvtier.transfer.views import band_views

_WORDS: dict[int, npt.DTypeLike] = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


class CpuCopyEngine(CopyEngine):
    """Every copy is done when ``submit`` returns."""

    kind = "cpu"

    def __init__(self, kv_caches: Mapping[str, object], codec: Codec, in_flight_bytes: int = IN_FLIGHT_BYTES) -> None:
        super().__init__(codec, in_flight_bytes)
        self._bands: list[list[tuple[npt.NDArray[Any], int, int]]] = [
            [(view.cache.numpy(), view.start, view.words) for view in group] for group in band_views(kv_caches, codec)
        ]

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
        rows = pool.memory[begin : begin + len(copy.blocks) * block_bytes].view(_WORDS[word])
        rows = rows.reshape(len(copy.blocks), block_bytes // word)
        for cache, start, words in self._bands[copy.group]:
            for row, block in enumerate(copy.blocks):
                piece = rows[row, start : start + words].reshape(cache.shape[1:])
                if direction is Direction.TO_HOST:
                    piece[...] = cache[block]
                else:
                    cache[block] = piece

    def _ready(self, handle: CopyHandle) -> bool:
        return True

    def _drain(self) -> None:
        return None
