"""The Triton kernel of ``word_sums``. Importing this module needs Triton."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

WARPS = 4
UNROLL = 4


@triton.jit
def _sum_chunk(  # type: ignore[no-untyped-def]
    table,
    lanes,
    sums,
    rows,
    first_multiplier: tl.constexpr,
    second_multiplier: tl.constexpr,
    width: tl.constexpr,
    steps: tl.constexpr,
    unroll: tl.constexpr,
):
    """One program per chunk. ``table``: int64 [2, rows], addresses and numbers of words.

    Each lane computes a polynomial of its words by Horner's rule. The coefficients of the lanes are
    applied once, at the end.
    """
    row = tl.program_id(0)
    words = tl.load(table + row).to(tl.pointer_type(tl.int32))
    count = tl.load(table + rows + row)
    lane = tl.arange(0, width)
    first = tl.zeros([width], tl.int64)
    second = tl.zeros([width], tl.int64)
    for step in tl.range(0, steps, loop_unroll_factor=unroll):
        index = step * width + lane
        word = tl.load(words + index, mask=index < count, other=0).to(tl.int64)
        first = first * first_multiplier + word
        second = second * second_multiplier + word
    first = tl.sum(first * tl.load(lanes + lane))
    second = tl.sum(second * tl.load(lanes + width + lane))
    tl.store(sums + row * 2, first)
    tl.store(sums + row * 2 + 1, second)


def sum_chunks(
    table: torch.Tensor,
    lanes: torch.Tensor,
    sums: torch.Tensor,
    multipliers: tuple[int, int],
    steps: int,
) -> None:
    """Launches the kernel on the current stream.

    ``table``: int64 [2, rows]. ``lanes``: int64 [2, width]. ``sums``: int64 [rows, 2], written.
    ``steps``: words of a chunk by ``width``.
    """
    rows = table.shape[1]
    _sum_chunk[(rows,)](
        table,
        lanes,
        sums,
        rows,
        first_multiplier=multipliers[0],
        second_multiplier=multipliers[1],
        width=lanes.shape[1],
        steps=steps,
        unroll=UNROLL,
        num_warps=WARPS,
    )
