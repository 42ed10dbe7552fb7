"""Sums over the bytes of tensors on a device, from which their digests are computed.

Bytes are divided into chunks of ``CHUNK_BYTES``, the last one filled up with zeros. Of each chunk
two multilinear sums modulo 2^64 over its 32-bit words are computed, with fixed odd coefficients:
one changed word always changes both sums, and different chunks have equal sums with a probability
of about 2^-64. Integer sums do not depend on their order, so a Triton kernel and torch's own
operations give the same numbers. The kernel reads memory once, at its full speed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)
LANES = 2048
STEPS = 128
CHUNK_WORDS = LANES * STEPS
CHUNK_BYTES = CHUNK_WORDS * 4
MULTIPLIERS = (0x5851F42D, 0x2545F491)
"""The word of step ``s`` and lane ``l`` has the coefficient ``multiplier ** (STEPS - 1 - s) *
lanes[l]``. Odd, and below 2^31."""
TORCH_CHUNKS = 4
"""Chunks that torch sums at once: 8 MiB of scratch memory for each intermediate tensor."""
# The constants of splitmix64 as signed numbers.
_GOLDEN, _MIX1, _MIX2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """What is launched for ``tensors``. ``rows``: int64 [2, chunks], the address of each chunk's
    first word and its number of words; None without the kernel. ``padded``: tensors that are not
    whole words, each with the memory that it is copied to."""

    tensors: tuple[torch.Tensor, ...]
    rows: torch.Tensor | None
    padded: tuple[tuple[torch.Tensor, torch.Tensor], ...]


class WordSums:
    """Computes the sums of tensors on one device. One thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lanes = torch.stack([lane_coefficients(seed, device) for seed in (1, 2)])
        self._coefficients: torch.Tensor | None = None
        """Of a whole chunk, int64 [2, CHUNK_WORDS], for torch's own operations."""
        self._kernel = _kernel() if device.type == "cuda" else None

    def __call__(self, table: ChunkTable, into: torch.Tensor | None = None) -> torch.Tensor:
        """Returns int64 [chunks, 2] on the device, the chunks of the table's tensors one after
        another. The tensors must stay alive until they are computed. Does not synchronize.

        ``into``: the result of an earlier call with this table, whose memory the kernel uses again.
        """
        if self._kernel is None or table.rows is None:
            sums = [self._with_torch(_words(each)) for each in table.tensors]
            return torch.cat(sums) if sums else torch.empty(0, 2, dtype=torch.int64)
        for words, tensor in table.padded:
            words[: tensor.nbytes] = dense_bytes(tensor.detach())
        total = table.rows.shape[1]
        result = into
        if result is None:
            result = torch.empty(total, 2, dtype=torch.int64, device=self.device)
        if total:
            self._kernel(table.rows, self._lanes, result, MULTIPLIERS, STEPS)
        return result

    def table(self, tensors: Sequence[torch.Tensor]) -> ChunkTable:
        """Returns what is launched for ``tensors``, as long as they stay where they are.

        ``tensors``: of any type, dense (``is_dense``), on the device. Their bytes count in the
        order in which they lie in memory.
        """
        if self._kernel is None:
            return ChunkTable(tuple(tensors), None, ())
        # No operation of torch for each tensor: there are hundreds, and requests wait.
        sizes = np.fromiter((each.nbytes for each in tensors), np.int64, len(tensors))
        addresses = np.fromiter((each.data_ptr() for each in tensors), np.int64, len(tensors))
        padded = []
        for index in np.flatnonzero((sizes | addresses) & 3).tolist():
            size = -(-tensors[index].nbytes // 4) * 4
            words = torch.zeros(size, dtype=torch.uint8, device=self.device)
            padded.append((words, tensors[index]))
            sizes[index], addresses[index] = size, words.data_ptr()
        counts = sizes >> 2
        chunks = -(-counts // CHUNK_WORDS)
        total = int(chunks.sum())
        # One row per chunk: the address of its first word, and how many words it has.
        number = np.arange(total) - np.repeat(np.cumsum(chunks) - chunks, chunks)
        table = np.empty((2, total), np.int64)
        table[0] = np.repeat(addresses, chunks) + number * CHUNK_BYTES
        table[1] = np.minimum(np.repeat(counts, chunks) - number * CHUNK_WORDS, CHUNK_WORDS)
        return ChunkTable(tuple(tensors), torch.from_numpy(table).to(self.device), tuple(padded))

    def _with_torch(self, words: torch.Tensor) -> torch.Tensor:
        if self._coefficients is None:
            self._coefficients = chunk_coefficients(self._lanes)
        chunks = -(-words.numel() // CHUNK_WORDS)
        sums = torch.empty(chunks, 2, dtype=torch.int64, device=words.device)
        step = TORCH_CHUNKS * CHUNK_WORDS
        for first in range(0, chunks, TORCH_CHUNKS):
            piece = words[first * CHUNK_WORDS : first * CHUNK_WORDS + step].to(torch.int64)
            if piece.numel() % CHUNK_WORDS:
                missing = -piece.numel() % CHUNK_WORDS
                piece = torch.nn.functional.pad(piece, (0, missing))
            rows = piece.view(-1, CHUNK_WORDS)
            for column in range(2):
                products = rows * self._coefficients[column]
                sums[first : first + len(rows), column] = products.sum(dim=1)
        return sums


def is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether the elements fill a range of memory, in any order of the dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def dense_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a dense tensor in the order of memory, as a view: uint8 [n]."""
    order = sorted(range(tensor.dim()), key=lambda each: (-tensor.stride(each), each))
    dense = tensor.permute(order) if tensor.dim() else tensor
    return dense.reshape(-1).view(torch.uint8)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes as int32 words: a view, or a copy filled up with zeros."""
    part = dense_bytes(tensor)
    if part.numel() % 4 or part.data_ptr() % 4:
        size = -(-part.numel() // 4) * 4
        padded = torch.zeros(size, dtype=torch.uint8, device=part.device)
        padded[: part.numel()] = part
        part = padded
    return part.view(torch.int32)


def lane_coefficients(seed: int, device: torch.device) -> torch.Tensor:
    """Returns pseudo-random odd numbers (splitmix64), int64 [LANES]."""
    value = torch.arange(1, LANES + 1, dtype=torch.int64)
    value = (value + seed * (1 << 40)) * _GOLDEN
    value = (value ^ _logical_shift(value, 30)) * _MIX1
    value = (value ^ _logical_shift(value, 27)) * _MIX2
    return ((value ^ _logical_shift(value, 31)) | 1).to(device)


def chunk_coefficients(lanes: torch.Tensor) -> torch.Tensor:
    """Returns the coefficients of all words of a chunk, int64 [2, CHUNK_WORDS]. ``lanes``: int64
    [2, LANES]."""
    powers = torch.empty(2, STEPS, dtype=torch.int64)
    for column, multiplier in enumerate(MULTIPLIERS):
        value = 1
        for step in reversed(range(STEPS)):
            powers[column, step] = value if value < 1 << 63 else value - (1 << 64)
            value = value * multiplier % (1 << 64)
    return (powers.to(lanes.device)[:, :, None] * lanes[:, None, :]).reshape(2, CHUNK_WORDS)


def _logical_shift(value: torch.Tensor, bits: int) -> torch.Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _kernel() -> Any | None:
    """Returns the Triton kernel; None where Triton cannot be imported."""
    try:
        from kvtier.engines.vllm.word_sums_kernel import sum_chunks
    except Exception as error:  # noqa: BLE001 - Triton raises what it likes where it finds no driver
        logger.info("KVTier: weights are hashed without Triton: %s", error)
        return None
    return sum_chunks
