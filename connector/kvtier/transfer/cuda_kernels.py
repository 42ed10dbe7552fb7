"""A Triton kernel that copies the blocks of a KV cache to or from other memory, in object order.

One launch moves any number of blocks of any number of layers. The other side of a block (staging
memory on the GPU, or its place in the registered host pool) is contiguous. What the kernel reads
about the cache is a table of *runs*: the contiguous byte ranges that make up a block.

Importing this module needs Triton; a caller without it uses torch's own kernels.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from kvtier.transfer.copy_ranges import BlockRuns

TILE_WORDS = 1024
WARPS = 8
_WORDS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit(do_not_specialize=["first_row", "rows", "runs"])  # type: ignore[untyped-decorator]
def _copy_rows(  # type: ignore[no-untyped-def]
    run_table,
    blocks,
    others,
    first_row,
    rows,
    runs,
    to_cache: tl.constexpr,
    word: tl.constexpr,
    aligned: tl.constexpr,
    tile: tl.constexpr,
):
    """``run_table``: four int64 per run (address in block 0, bytes from block to block, offset in
    a block of the object, words). ``blocks``, ``others``: by row, the block's number and the
    address of its other side."""
    offsets = tl.arange(0, tile)
    item = tl.program_id(0)
    while item < rows * runs:
        row = first_row + item // runs
        run = run_table + (item % runs) * 4
        cache_at = tl.load(run) + tl.load(blocks + row) * tl.load(run + 1)
        other_at = tl.load(others + row) + tl.load(run + 2)
        words = tl.load(run + 3)
        if aligned:
            cache_at = tl.multiple_of(cache_at, 16)
            other_at = tl.multiple_of(other_at, 16)
        cache = cache_at.to(tl.pointer_type(word))
        other = other_at.to(tl.pointer_type(word))
        for begin in range(0, words, tile):
            index = begin + offsets
            mask = index < words
            if to_cache:
                tl.store(cache + index, tl.load(other + index, mask=mask), mask=mask)
            else:
                tl.store(other + index, tl.load(cache + index, mask=mask), mask=mask)
        item += tl.num_programs(0)


class RowKernel:
    """The kernel for one KV cache group. ``run_table`` stays on the device for its life."""

    def __init__(self, runs: BlockRuns, device: torch.device) -> None:
        self._runs = len(runs.table)
        self._word_bytes = runs.word_bytes
        self._aligned = runs.aligned
        self._table = torch.tensor(runs.table, dtype=torch.int64).to(device)
        nothing = torch.zeros((2, 16), dtype=torch.int64, device=device)
        for to_cache in (False, True):
            # Compiles: that must not happen while the engine serves. Rows of 16 numbers are
            # aligned like those of real tables, for which Triton would compile again.
            self.launch(nothing, 0, 0, to_cache, 1)

    def launch(
        self,
        tables: torch.Tensor,
        first_row: int,
        rows: int,
        to_cache: bool,
        programs: int,
    ) -> None:
        """Copies ``rows`` blocks on the current stream.

        ``tables``: int64 of shape (2, capacity) on the device: block numbers, and addresses of the
        other side. Raises ``RuntimeError`` if the launch fails.
        """
        _copy_rows[(min(programs, max(1, rows * self._runs)),)](
            self._table,
            tables[0],
            tables[1],
            first_row,
            rows,
            self._runs,
            to_cache=to_cache,
            word=_WORDS[self._word_bytes],
            aligned=self._aligned,
            tile=TILE_WORDS,
            num_warps=WARPS,
        )
