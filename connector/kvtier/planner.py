"""The chunk planner and the save frontier.

``Planner`` says which objects a prefix needs, and how chunks map to the engine's blocks: one
frozen value per engine, built once from its KV groups. Groups differ in block size and in what a
prefix needs from them: of full attention every chunk, of a sliding window the chunks that cover
the last window, of a linear state the state at the end. The interface has groups throughout, but
only models with one full-attention group are served. For any other model
``UnsupportedGeometryError`` says why, and KVTier stays off for that engine.

``Frontier`` says how far one request's KV is computed, and how far its chunks have been handled.
Scheduled tokens may be rejected (speculative decoding), or their step may not have run
(asynchronous scheduling), so only executed tokens count. A preemption discards the request's
blocks and starts a new generation; steps of an earlier generation say nothing about it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from kvtier.errors import KVTierError

MAX_CHUNK_TOKENS = 1 << 20
"""Above any context length in use. The common multiple of odd block sizes can be very large."""


class UnsupportedGeometryError(KVTierError):
    """The planner does not serve the engine's KV groups. The message has the numbers."""


class GroupKind(Enum):
    """What a prefix needs from a group. ``OTHER``: unknown, and therefore not served."""

    FULL = "full attention"
    SLIDING = "sliding window"
    STATE = "linear state"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """One KV cache group.

    ``name``: the engine's name of its type, for messages. ``window_tokens``: for sliding windows.
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


@dataclass(frozen=True, slots=True)
class Part:
    """The blocks of one chunk of one group that hold the tokens from ``start`` to ``stop``.

    ``first`` is the number of the first of them within the chunk, ``block`` its number within the
    request's block table, ``blocks`` how many there are.
    """

    group: int
    chunk: int
    first: int
    block: int
    blocks: int


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
    if len(groups) != 1 or groups[0].kind is not GroupKind.FULL:
        raise UnsupportedGeometryError(f"{_describe(groups)}: must be one full-attention group")


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

    def blocks_per_chunk(self, group: int) -> int:
        """Number of blocks of ``group`` per object."""
        return self.chunk_tokens // self.groups[group].block_tokens

    def starts_at_block(self, tokens: int) -> bool:
        """Whether a load may start after ``tokens``, that is, at a block boundary of every
        group."""
        return all(tokens % group.block_tokens == 0 for group in self.groups)

    def needed(self, start_tokens: int, end_tokens: int) -> list[Part]:
        """What to load for a prefix of ``end_tokens`` tokens.

        The first ``start_tokens`` are computed. Both are block boundaries. In prefix order.
        O(number of chunks).
        """
        size = self.chunk_tokens
        parts = []
        for number, group in enumerate(self.groups):
            block = group.block_tokens
            for chunk in range(start_tokens // size, -(-end_tokens // size)):
                begin = max(start_tokens, chunk * size)
                stop = min(end_tokens, (chunk + 1) * size)
                first = (begin - chunk * size) // block
                parts.append(Part(number, chunk, first, begin // block, (stop - begin) // block))
        return parts


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
