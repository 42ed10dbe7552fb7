"""References to the engine's blocks, which keep them while they are copied (docs/datapath.md).

The scheduler's thread only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

MAX_CACHE_FRACTION = 4
"""Stores in flight reference at most a quarter of the KV cache: slow copies must leave blocks for
requests."""
NULL_BLOCK = 0
"""In a block table: there is no block, as behind a window."""


class BlockPool(Protocol):
    """The part of vLLM's block pool that is used."""

    blocks: Sequence[Any]

    def touch(self, blocks: Sequence[Any]) -> None: ...

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...


class ReferencedBlocks:
    """The blocks that one engine's stores reference. Errors of the engine's pool pass through."""

    def __init__(self) -> None:
        self.pool: BlockPool | None = None
        """vLLM binds its block pool after it has built the connector. Without one nothing can be
        referenced."""
        self.count = 0
        """Blocks that are referenced, counted once for each reference."""

    def fit(self, blocks: int) -> bool:
        """Whether so many more may be referenced. The blocks of one object always may."""
        if not self.count or self.pool is None:
            return True
        return self.count + blocks <= len(self.pool.blocks) // MAX_CACHE_FRACTION

    def cannot_reference(self, ids: Sequence[int], expected: int) -> str:
        """Returns why the ``expected`` blocks of an object cannot be referenced; empty if they
        can."""
        if self.pool is None:
            return "no_block_pool"
        if len(ids) < expected or NULL_BLOCK in ids:
            return "blocks_gone"
        return "" if self.fit(expected) else "in_flight_blocks"

    def touch(self, ids: Sequence[int]) -> list[Any]:
        """References these blocks, and returns what ``free`` needs."""
        pool = self.pool
        if pool is None:
            return []
        blocks = [pool.blocks[block] for block in ids]
        pool.touch(blocks)
        self.count += len(blocks)
        return blocks

    def free(self, blocks: Sequence[Any]) -> None:
        """Gives back the references that ``touch`` has returned."""
        self.count -= len(blocks)
        if self.pool is not None:
            # The end of a prefix is useless without its beginning, so vLLM evicts it first.
            self.pool.free_blocks(reversed(blocks))
