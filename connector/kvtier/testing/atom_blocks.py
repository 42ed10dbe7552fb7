"""The block manager of the ATOM stand-in: paged blocks with reference counts and a content index.

It behaves as ATOM's does towards a connector:

* Block 0 holds KV like any other, and free blocks without content go first, lowest number first.
* A freed block keeps its content until it is given out again, so a later sequence may claim it.
* A block is indexed only after its tokens were computed, or loaded and published.
* The last block of a sequence is never taken from the cache: a step must compute something.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from kvtier.testing.atom_sequence import StandInSequence

ROOT = b""


@dataclass(slots=True)
class StandInBlock:
    """One block. ``content``: the chained hash of what it holds, None if nothing is indexed."""

    number: int
    references: int = 0
    content: bytes | None = None
    tokens: tuple[int, ...] = ()


@dataclass(slots=True)
class StandInBlocks:
    """All blocks of one engine. ``block_size``: tokens per block."""

    num_blocks: int
    block_size: int
    blocks: list[StandInBlock] = field(init=False)
    _index: dict[bytes, int] = field(init=False, default_factory=dict)
    _empty: list[int] = field(init=False)
    _cached: OrderedDict[int, None] = field(init=False, default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.blocks = [StandInBlock(number) for number in range(self.num_blocks)]
        self._empty = list(range(self.num_blocks))

    @property
    def free(self) -> int:
        """Blocks that no sequence holds."""
        return len(self._empty) + len(self._cached)

    @property
    def hash_block_size(self) -> int:
        """Tokens per indexed unit."""
        return self.block_size

    def can_allocate(self, seq: StandInSequence) -> int:
        """Returns the number of cached blocks, or -1 if the sequence does not fit."""
        needed = -(-seq.num_tokens // self.block_size)
        hits = self._hits(seq, needed - 1)
        taken = sum(1 for number in hits if self.blocks[number].references == 0)
        return len(hits) if needed - len(hits) + taken <= self.free else -1

    def _hits(self, seq: StandInSequence, limit: int) -> list[int]:
        found: list[int] = []
        parent = ROOT
        for index in range(limit):
            tokens = seq.block_tokens(index)
            parent = chained(parent, tokens)
            number = self._index.get(parent)
            if number is None or self.blocks[number].tokens != tuple(tokens):
                break
            found.append(number)
        return found

    def allocate(self, seq: StandInSequence, cached_blocks: int) -> None:
        """Gives the sequence its block table, of which ``cached_blocks`` blocks hold its tokens."""
        if seq.block_table:
            raise RuntimeError(f"sequence {seq.id} has blocks already")
        for number in self._hits(seq, cached_blocks):
            block = self.blocks[number]
            if block.references == 0:
                del self._cached[number]
            block.references += 1
            seq.block_table.append(number)
        while len(seq.block_table) * self.block_size < seq.num_tokens:
            seq.block_table.append(self._take())
        seq.num_cached_tokens = cached_blocks * self.block_size

    def _take(self) -> int:
        number = heapq.heappop(self._empty) if self._empty else self._cached.popitem(last=False)[0]
        block = self.blocks[number]
        if block.references:
            raise RuntimeError(f"block {number} is in use")
        if block.content is not None and self._index.get(block.content) == number:
            del self._index[block.content]
        block.content, block.tokens, block.references = None, (), 1
        return number

    def deallocate(self, seq: StandInSequence) -> None:
        """Takes the blocks back; their content stays until they are given out again."""
        for number in reversed(seq.block_table):
            block = self.blocks[number]
            block.references -= 1
            if block.references < 0:
                raise RuntimeError(f"block {number} was freed twice")
            if block.references:
                continue
            if block.content is None:
                heapq.heappush(self._empty, number)
            else:
                self._cached[number] = None
        seq.block_table.clear()
        seq.num_cached_tokens = 0

    def can_append(self, seq: StandInSequence) -> bool:
        """Returns whether there is a block for one more token."""
        missing = -(-(seq.num_tokens + 1) // self.block_size) - len(seq.block_table)
        return missing <= self.free

    def may_append(self, seq: StandInSequence) -> None:
        """Makes room for the token that is computed next."""
        while len(seq.block_table) * self.block_size < seq.num_tokens:
            seq.block_table.append(self._take())

    def index_computed(self, seq: StandInSequence, start: int, end: int) -> None:
        """Indexes the blocks that tokens ``start`` to ``end`` have filled."""
        self._index_blocks(seq, start // self.block_size, end // self.block_size)

    def publish_loaded_prefix(self, seq: StandInSequence, start_token: int, end_token: int) -> int:
        """Indexes loaded blocks; returns the number of tokens. 0 if the start is inside a block."""
        if start_token % self.block_size:
            return 0
        first, last = start_token // self.block_size, end_token // self.block_size
        return self._index_blocks(seq, first, last) * self.block_size

    def _index_blocks(self, seq: StandInSequence, first: int, last: int) -> int:
        parent: bytes | None = ROOT if first == 0 else self._content(seq, first - 1)
        if parent is None:
            return 0
        for index in range(first, last):
            tokens = seq.block_tokens(index)
            parent = chained(parent, tokens)
            block = self.blocks[seq.block_table[index]]
            block.content, block.tokens = parent, tuple(tokens)
            self._index.setdefault(parent, block.number)
        return max(0, last - first)

    def _content(self, seq: StandInSequence, index: int) -> bytes | None:
        return self.blocks[seq.block_table[index]].content

    def clear_index(self) -> None:
        """Forgets all cached content."""
        self._index.clear()
        for number in self._cached:
            heapq.heappush(self._empty, number)
            self.blocks[number].content = None
        self._cached.clear()


def chained(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Returns the content hash of a block."""
    return blake2b(parent + repr(list(tokens)).encode(), digest_size=16).digest()
