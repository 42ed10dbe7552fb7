"""The chunk planner and the save frontier.

``Planner`` says which objects a prefix needs, and how chunks map to the engine's blocks: one
frozen value per engine, built once from its KV groups. Groups differ in block size and in what a
prefix of n chunks needs from them:

* full attention: every chunk
* sliding window: the blocks that cover the last window
* chunked local attention: the blocks from the last multiple of the attention chunk on
* linear state: the state at the end

There is one object for each chunk and group. It holds the blocks of the chunk that a prefix that
ends with the chunk, or after it, can need: of a window shorter than the chunk only the end, of a
linear state one block. A prefix is usable if every group has what it needs. For any other model
``UnsupportedGeometryError`` says why, and KVTier stays off for that engine.

``Frontier`` says how far one request's KV is computed, and how far its chunks have been handled.
Scheduled tokens may be rejected (speculative decoding), or their step may not have run
(asynchronous scheduling), so only executed tokens count. A preemption discards the request's
blocks and starts a new generation; steps of an earlier generation say nothing about it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain, repeat
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import KVTierError

MAX_CHUNK_TOKENS = 1 << 20
"""Above any context length in use. The common multiple of odd block sizes can be very large."""


FIRST_BATCH = 64
"""Chunks that are looked up together first. Most prompts are not held at all, which this tells."""
FURTHER_BATCH = 1_024
"""Chunks that are looked up together next."""


Numbers = NDArray[np.int64]
_Tokens = TypeVar("_Tokens", int, Numbers)


class UnsupportedGeometryError(KVTierError):
    """The planner does not serve the engine's KV groups. The message has the numbers."""


class GroupKind(Enum):
    """What a prefix needs from a group. ``OTHER``: unknown, and therefore not served."""

    FULL = "full attention"
    SLIDING = "sliding window"
    CHUNKED = "chunked local attention"
    STATE = "linear state"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """One KV cache group.

    ``name``: the engine's name of its type, for messages. ``window_tokens``: of a sliding window,
    or the attention chunk of chunked local attention.

    ``replicated``: all tensor-parallel ranks of a pipeline stage hold the same bytes.
    """

    kind: GroupKind
    block_tokens: int
    name: str = ""
    window_tokens: int = 0
    replicated: bool = False

    def __str__(self) -> str:
        window = f", window {self.window_tokens}" if self.window_tokens else ""
        return (
            f"{self.kind.value} ({self.name or 'unnamed'}) with blocks of "
            f"{self.block_tokens} tokens{window}"
        )

    def first_needed_block(self, end_tokens: _Tokens) -> _Tokens:
        """The first block that a prefix of ``end_tokens`` tokens, a block boundary, needs. Of an
        array of prefixes, that of each.

        The engine allocates no block before it, so nothing may be copied there. It does not move
        back when a prefix grows.
        """
        block, window = self.block_tokens, self.window_tokens
        if self.kind is GroupKind.SLIDING:
            before = end_tokens - window + 1
            return before * (before > 0) // block
        if self.kind is GroupKind.CHUNKED:
            return end_tokens // window * window // block
        if self.kind is GroupKind.STATE:
            return end_tokens // block - (end_tokens >= block)
        return 0 * end_tokens


class ChunkPresence(Protocol):
    """Which objects of a request's chunks are there."""

    def first_missing(self, group: int, begin: int, end: int) -> int:
        """The first chunk from ``begin`` on of which a group has no object; ``end`` if it has each
        one before ``end``."""
        ...

    def held(self, group: int, begin: int, end: int) -> NDArray[np.bool_]:
        """Of each chunk from ``begin`` to before ``end``: whether a group has its object."""
        ...


class Part(NamedTuple):
    """The blocks of one object that a prefix needs.

    ``first`` is the number of the first of them within the object, ``block`` its number within the
    request's block table, ``blocks`` how many there are. ``tokens``: how many tokens of the prefix
    are counted for this part, so that all parts together have as many as the prefix.
    """

    group: int
    chunk: int
    first: int
    block: int
    blocks: int
    tokens: int = 0


class PartRun(NamedTuple):
    """The parts of so many ``chunks`` in a row of one group, which are alike. From one to the next
    ``block`` rises by ``step`` and ``chunk`` by 1."""

    group: int
    chunk: int
    first: int
    block: int
    blocks: int
    tokens: int
    chunks: int
    step: int

    def parts(self) -> Iterable[Part]:
        """Without a call in Python for each."""
        fields = zip(
            repeat(self.group, self.chunks),
            range(self.chunk, self.chunk + self.chunks),
            repeat(self.first),
            range(self.block, self.block + self.chunks * self.step, self.step),
            repeat(self.blocks),
            repeat(self.tokens),
            strict=False,
        )
        return map(tuple.__new__, repeat(Part), fields)

    def table_blocks(self, table: Sequence[int]) -> Sequence[int]:
        """The blocks of all parts in a request's block ``table``; fewer if that is shorter."""
        if self.blocks == self.step:
            return table[self.block : self.block + self.chunks * self.step]
        begins = range(self.block, self.block + self.chunks * self.step, self.step)
        return [block for begin in begins for block in table[begin : begin + self.blocks]]


def effective_chunk_tokens(groups: Sequence[KVCacheGroup], chunk_tokens: int) -> int:
    """The smallest common multiple of the groups' block sizes that is at least ``chunk_tokens``.

    Raises ``UnsupportedGeometryError`` if there is none up to ``MAX_CHUNK_TOKENS``.
    """
    sizes = [group.block_tokens for group in groups]
    if not sizes or min(sizes) < 1 or chunk_tokens < 1:
        raise UnsupportedGeometryError(
            f"block sizes {sizes} and chunks of {chunk_tokens} tokens: must all be positive"
        )
    common = math.lcm(*sizes)
    effective = -(-chunk_tokens // common) * common
    if effective > MAX_CHUNK_TOKENS:
        raise UnsupportedGeometryError(
            f"block sizes {sizes} and chunks of {chunk_tokens} tokens need chunks of "
            f"{effective} tokens: "
            f"must be at most {MAX_CHUNK_TOKENS}"
        )
    return effective


def check_served(groups: Sequence[KVCacheGroup]) -> None:
    """Raises ``UnsupportedGeometryError`` for groups that the planner does not serve."""
    for number, group in enumerate(groups):
        if group.kind is GroupKind.OTHER:
            raise UnsupportedGeometryError(
                f"group {number}: {group}: must be full attention, sliding window, chunked local "
                f"attention or linear state ({_describe(groups)})"
            )
        windowed = group.kind in (GroupKind.SLIDING, GroupKind.CHUNKED)
        if windowed and group.window_tokens < 2:
            raise UnsupportedGeometryError(
                f"group {number}: {group}: the window must be at least 2 tokens"
            )
    if not groups:
        raise UnsupportedGeometryError("no KV cache group: must be at least one")


def _check_attention_chunks(groups: Sequence[KVCacheGroup], chunk_tokens: int) -> None:
    """A prefix that ends at a multiple of the attention chunk needs nothing of such a group, so
    larger chunks would never be loaded, and others would be cut inside."""
    if all(group.kind is GroupKind.CHUNKED for group in groups):
        raise UnsupportedGeometryError(
            f"{_describe(groups)}: must have a group that is not chunked local attention"
        )
    for number, group in enumerate(groups):
        if group.kind is GroupKind.CHUNKED and (
            group.window_tokens % chunk_tokens or group.window_tokens == chunk_tokens
        ):
            raise UnsupportedGeometryError(
                f"group {number}: {group}: chunks of {chunk_tokens} tokens must divide the "
                f"attention chunk of {group.window_tokens} tokens, and be smaller; set chunkTokens "
                f"to a divisor of {group.window_tokens} that is a multiple of "
                f"{math.lcm(*(each.block_tokens for each in groups))}"
            )


def _describe(groups: Sequence[KVCacheGroup]) -> str:
    return (
        "; ".join(f"group {number}: {group}" for number, group in enumerate(groups))
        or "no KV cache group"
    )


@dataclass(frozen=True, slots=True)
class Planner:
    """Arithmetic over chunks. O(1) unless stated otherwise. Any thread.

    ``chunk_tokens`` is the effective chunk, ``hash_tokens`` how many tokens one of the engine's
    block hashes covers, ``ranks`` how many ranks hold a shard of each object. Consecutive
    ``stage_ranks`` of them are the tensor-parallel ranks of one pipeline stage.
    """

    groups: tuple[KVCacheGroup, ...]
    chunk_tokens: int
    hash_tokens: int
    ranks: int = 1
    stage_ranks: int = 1

    @classmethod
    def build(
        cls, groups: Sequence[KVCacheGroup], chunk_tokens: int, hash_tokens: int, ranks: int = 1
    ) -> Planner:
        """The planner of an engine.

        ``chunk_tokens``: as configured. Raises ``UnsupportedGeometryError``.
        """
        check_served(groups)
        effective = effective_chunk_tokens(groups, chunk_tokens)
        _check_attention_chunks(groups, effective)
        if hash_tokens < 1 or effective % hash_tokens:
            raise UnsupportedGeometryError(
                f"block hashes of {hash_tokens} tokens: must divide chunks of {effective} tokens "
                f"({_describe(groups)})"
            )
        if ranks < 1:
            raise UnsupportedGeometryError(f"{ranks} ranks: must be at least one")
        return cls(tuple(groups), effective, hash_tokens, ranks)

    def with_stages(self, stage_ranks: int) -> Planner:
        """The same planner for pipeline stages of ``stage_ranks`` ranks.

        Raises ``UnsupportedGeometryError`` if that does not divide the number of ranks.
        """
        if stage_ranks < 1 or self.ranks % stage_ranks:
            raise UnsupportedGeometryError(
                f"{self.ranks} ranks in pipeline stages of {stage_ranks}: must be a multiple"
            )
        return replace(self, stage_ranks=stage_ranks)

    @property
    def shard_writers(self) -> tuple[tuple[int, ...], ...]:
        """By group and rank, the rank that writes the shard that the rank reads.

        Of ranks that hold the same bytes the first one writes.
        """
        ranks, stage = self.ranks, self.stage_ranks
        return tuple(
            tuple(rank - rank % stage if group.replicated else rank for rank in range(ranks))
            for group in self.groups
        )

    def chunks(self, tokens: int) -> int:
        """Whole chunks in ``tokens``."""
        return tokens // self.chunk_tokens

    def tokens(self, chunks: int) -> int:
        """Tokens that ``chunks`` whole chunks cover."""
        return chunks * self.chunk_tokens

    @property
    def hashes_per_chunk(self) -> int:
        """Number of the engine's block hashes per chunk. The last one is the chunk's key."""
        return self.chunk_tokens // self.hash_tokens

    @property
    def prefix_only(self) -> bool:
        """Whether the beginning of a usable prefix is usable as well, and a block number says which
        tokens it holds: there is one group, of full attention.

        Otherwise a load is useful as a whole or not at all.
        """
        return len(self.groups) == 1 and self.groups[0].kind is GroupKind.FULL

    def max_hit_chunks(self, tokens: int) -> int:
        """How many chunks of a request of ``tokens`` tokens may be loaded.

        The engine computes the last token of a whole-prompt hit once more. A linear state would
        absorb it twice.
        """
        return self.chunks(tokens if self.prefix_only else tokens - 1)

    def blocks_per_chunk(self, group: int) -> int:
        """Number of blocks of ``group`` that the tokens of a chunk take."""
        return self.chunk_tokens // self.groups[group].block_tokens

    def object_blocks(self, group: int) -> int:
        """Number of blocks of ``group`` per object: the last ones of the chunk."""
        what, blocks = self.groups[group], self.blocks_per_chunk(group)
        if what.kind is GroupKind.STATE:
            return 1
        if what.kind is GroupKind.SLIDING:
            return min(blocks, -(-(what.window_tokens - 1) // what.block_tokens))
        return blocks

    @property
    def all_object_blocks(self) -> tuple[int, ...]:
        """``object_blocks`` by group."""
        return tuple(map(self.object_blocks, range(len(self.groups))))

    def object_range(self, group: int, chunk: int) -> tuple[int, int]:
        """Numbers of the first block of an object, and of the first one after it, in a request's
        block table."""
        end = (chunk + 1) * self.blocks_per_chunk(group)
        return end - self.object_blocks(group), end

    def is_needed(self, group: int, chunk: int) -> bool:
        """Whether any prefix needs this object. A prefix that ends with an attention chunk needs
        nothing of it."""
        what = self.groups[group]
        return (
            what.kind is not GroupKind.CHUNKED
            or (chunk + 1) * self.chunk_tokens % what.window_tokens != 0
        )

    def starts_at_block(self, tokens: int) -> bool:
        """Whether a load may start after ``tokens``, that is, at a block boundary of every
        group."""
        return all(tokens % group.block_tokens == 0 for group in self.groups)

    def needed(self, start_tokens: int, end_tokens: int) -> list[Part]:
        """What to load for a prefix of ``end_tokens`` tokens.

        The first ``start_tokens`` are computed. Both are block boundaries, the end is also one of a
        chunk unless there is one group of full attention. In prefix order within each group.
        O(number of chunks).
        """
        runs = self.needed_runs(start_tokens, end_tokens)
        return list(chain.from_iterable(run.parts() for run in runs))

    def needed_runs(self, start_tokens: int, end_tokens: int) -> list[PartRun]:
        """``needed``, with parts that are alike together: at most three runs for each group."""
        counted = self.counted_group
        runs: list[PartRun] = []
        for number, begin, stop in self.needed_chunks(start_tokens, end_tokens):
            group, per_chunk = self.groups[number], self.blocks_per_chunk(number)
            block, held = group.block_tokens, self.object_blocks(number)
            token_block = block if number == counted else 0
            first_block = max(start_tokens // block, group.first_needed_block(end_tokens))
            end_block = end_tokens // block
            # The objects between the first and the last one are needed as a whole.
            between, last = stop - begin - 2, min(1, stop - begin - 1)
            for chunk, count in (begin, 1), (begin + 1, between), (stop - 1, last):
                end = (chunk + 1) * per_chunk
                at = max(end - held, first_block)
                blocks = min(end, end_block) - at
                if count > 0 and blocks > 0:
                    tokens, first = blocks * token_block, at - end + held
                    runs.append(PartRun(number, chunk, first, at, blocks, tokens, count, per_chunk))
        if counted < 0 and runs:
            # This run is the last chunk, which the prefix needs: it ends there.
            runs[-1] = runs[-1]._replace(tokens=end_tokens - start_tokens)
        return runs

    def needed_chunks(self, start_tokens: int, end_tokens: int) -> list[tuple[int, int, int]]:
        """Which objects ``needed`` names: for each group, in order, the group, the first chunk of
        which the prefix needs the object, and the first one after these."""
        size = self.chunk_tokens
        found = []
        for number, group in enumerate(self.groups):
            block = group.block_tokens
            begin_block = max(start_tokens // block, group.first_needed_block(end_tokens))
            begin, stop = begin_block * block // size, -(-end_tokens // size)
            if begin < stop:
                found.append((number, begin, stop))
        return found

    @property
    def counted_group(self) -> int:
        """The group whose objects are counted as chunks, and whose parts have the tokens of the
        prefix; -1: the last part has them."""
        for number, group in enumerate(self.groups):
            if group.kind is GroupKind.FULL:
                return number
        return -1

    def longest_prefix(self, start_tokens: int, max_chunks: int, presence: ChunkPresence) -> int:
        """Chunks of the longest usable prefix of at most ``max_chunks`` chunks; 0 if none is longer
        than ``start_tokens``, which are computed.

        O(number of chunks), in batches, whatever is missing. Of groups that are not full attention
        what is needed for the longest prefixes is looked up first, and nothing for prefixes that
        another group excludes, except for those between two others of a batch.
        """
        first, end = self.chunks(start_tokens), max_chunks
        others = []
        for number, group in enumerate(self.groups):
            if group.kind is not GroupKind.FULL:
                others.append(number)
            elif end > first:
                end = presence.first_missing(number, first, end)
        # A state is one lookup, a window is many.
        others.sort(key=lambda number: self.groups[number].kind is not GroupKind.STATE)
        size = FIRST_BATCH
        while end > first:
            begin = max(first, end - size)
            ends: Numbers = np.arange(begin + 1, end + 1)
            for number in others:
                ends = self._usable_ends(number, start_tokens, ends, presence)
                if not ends.size:
                    break
            else:
                return int(ends[-1])
            end = begin
            size = FURTHER_BATCH
        return 0

    def _usable_ends(
        self, number: int, start_tokens: int, ends: Numbers, presence: ChunkPresence
    ) -> Numbers:
        """Those of ``ends``, chunks of prefixes, in order, for which a group has what it needs."""
        group, size = self.groups[number], self.chunk_tokens
        needed = group.first_needed_block(ends * size) * group.block_tokens
        begins = np.maximum(needed, start_tokens) // size
        low = int(begins[0])
        missing = np.zeros(int(ends[-1]) - low + 1, np.int64)
        """Before each chunk from ``low`` on, how many."""
        np.cumsum(~presence.held(number, low, int(ends[-1])), out=missing[1:])
        usable: Numbers = ends[missing[ends - low] == missing[begins - low]]
        return usable


class Frontier:
    """The save frontier of one request. Only the scheduler's thread uses it.

    ``next_chunk``: every chunk before it is stored, being stored, already present, or skipped.
    ``executed_tokens``: tokens whose KV the blocks of this generation are known to hold.
    """

    __slots__ = ("executed_tokens", "generation", "next_chunk")

    def __init__(self) -> None:
        self.next_chunk = 0
        self.executed_tokens = 0
        self.generation = 0

    def lose_blocks(self) -> None:
        """The request was preempted: none of its tokens is computed. Stored chunks stay stored."""
        self.executed_tokens = 0
        self.generation += 1

    def executed(self, generation: int, tokens: int) -> None:
        """A step of ``generation`` has been executed, after which ``tokens`` tokens are
        computed."""
        if generation == self.generation and tokens > self.executed_tokens:
            self.executed_tokens = tokens

    def storable_chunks(self, chunk_tokens: int, total_tokens: int, hashed_tokens: int) -> int:
        """Number of chunks that are executed and hashed, without the last sampled token, whose
        KV is not computed."""
        return min(self.executed_tokens, total_tokens - 1, hashed_tokens) // chunk_tokens

    def move_back(self, chunk: int) -> None:
        """A load failed: the chunks from ``chunk`` on will be computed."""
        self.next_chunk = min(self.next_chunk, chunk)
