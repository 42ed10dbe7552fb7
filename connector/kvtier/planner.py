"""Which objects a prefix needs, and how far a prefix is usable: one frozen value per engine, built once from its KV groups.

Groups differ in block size and in what a prefix needs from them: of full attention every chunk, of a sliding window the chunks
that cover the last window, of a linear state the state at the end. The interface speaks of groups throughout; served are models
with one full-attention group. Anything else is refused with the numbers, and KVTier stays off for that engine.

How far one request's KV is computed and how far it is dealt with: the save frontier.

Tokens that are merely scheduled may be rejected (speculative decoding), or their step may not have run yet (asynchronous
scheduling), so only executed tokens count. What was recorded for a life of the request's blocks says nothing about the next: each
preemption begins a new generation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvtier.errors import KVTierError

MAX_CHUNK_TOKENS = 1 << 20
"""Above any context length in use; a common multiple of odd block sizes can explode."""


class UnsupportedGeometryError(KVTierError):
    """The engine's KV groups are none that the planner can serve. The message has the numbers."""


class GroupKind(Enum):
    """What a prefix needs from a group. ``OTHER``: not known, so not served."""

    FULL = "full attention"
    SLIDING = "sliding window"
    STATE = "linear state"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Group:
    """One KV cache group. ``name`` is the engine's own word for its type, for messages; ``window_tokens`` is for sliding windows."""

    kind: GroupKind
    block_tokens: int
    name: str = ""
    window_tokens: int = 0

    def __str__(self) -> str:
        window = f", window {self.window_tokens}" if self.window_tokens else ""
        return f"{self.kind.value} ({self.name or 'unnamed'}) with blocks of {self.block_tokens} tokens{window}"


@dataclass(frozen=True, slots=True)
class Part:
    """The blocks of one chunk of one group that hold the tokens from ``start`` to ``stop``.

    ``first`` is the number of the first of them within the chunk, ``block`` its number within the request's block table,
    ``blocks`` how many there are.
    """

    group: int
    chunk: int
    first: int
    block: int
    blocks: int


def effective_chunk_tokens(groups: Sequence[Group], chunk_tokens: int) -> int:
    """The smallest common multiple of the groups' block sizes that is at least ``chunk_tokens`` (DATAPATH 6).

    Raises ``UnsupportedGeometryError`` for block sizes that have none of a usable size.
    """
    sizes = [group.block_tokens for group in groups]
    if not sizes or min(sizes) < 1 or chunk_tokens < 1:
        raise UnsupportedGeometryError(
            f"block sizes {sizes} and chunks of {chunk_tokens} tokens; all must be positive"
        )
    common = math.lcm(*sizes)
    effective = -(-chunk_tokens // common) * common
    if effective > MAX_CHUNK_TOKENS:
        raise UnsupportedGeometryError(
            f"block sizes {sizes} and chunks of {chunk_tokens} tokens make chunks of {effective}; at most {MAX_CHUNK_TOKENS} are served"
        )
    return effective


def check_served(groups: Sequence[Group]) -> None:
    """Raises ``UnsupportedGeometryError`` for groups that the planner does not serve."""
    if len(groups) != 1 or groups[0].kind is not GroupKind.FULL:
        raise UnsupportedGeometryError(
            f"one full-attention group is served, this model has {_numbers(groups)}"
        )


def _numbers(groups: Sequence[Group]) -> str:
    return (
        "; ".join(f"group {number}: {group}" for number, group in enumerate(groups))
        or "no KV cache group"
    )


@dataclass(frozen=True, slots=True)
class Planner:
    """Arithmetic over chunks. Everything is O(1), except where it says otherwise. Any thread.

    ``chunk_tokens`` is the effective chunk, ``hash_tokens`` how many tokens one of the engine's block hashes covers, ``ranks`` how
    many ranks hold a shard of each object.
    """

    groups: tuple[Group, ...]
    chunk_tokens: int
    hash_tokens: int
    ranks: int = 1

    @classmethod
    def build(
        cls, groups: Sequence[Group], chunk_tokens: int, hash_tokens: int, ranks: int = 1
    ) -> Planner:
        """The planner for an engine; ``chunk_tokens`` as the topology asks. Raises ``UnsupportedGeometryError``."""
        check_served(groups)
        effective = effective_chunk_tokens(groups, chunk_tokens)
        if hash_tokens < 1 or effective % hash_tokens:
            raise UnsupportedGeometryError(
                f"block hashes of {hash_tokens} tokens do not divide chunks of {effective}; {_numbers(groups)}"
            )
        if ranks < 1:
            raise UnsupportedGeometryError(f"{ranks} ranks; at least one holds the KV cache")
        return cls(tuple(groups), effective, hash_tokens, ranks)

    def chunks(self, tokens: int) -> int:
        """Whole chunks in ``tokens``."""
        return tokens // self.chunk_tokens

    def tokens(self, chunks: int) -> int:
        """Tokens that ``chunks`` whole chunks cover."""
        return chunks * self.chunk_tokens

    @property
    def hashes_per_chunk(self) -> int:
        """How many of the engine's block hashes one chunk has; the last of them names it."""
        return self.chunk_tokens // self.hash_tokens

    def blocks_per_chunk(self, group: int) -> int:
        """How many blocks of ``group`` one object has."""
        return self.chunk_tokens // self.groups[group].block_tokens

    def starts_at_block(self, tokens: int) -> bool:
        """Whether a load may begin after ``tokens``: at a block boundary of every group."""
        return all(tokens % group.block_tokens == 0 for group in self.groups)

    def needed(self, start_tokens: int, end_tokens: int) -> list[Part]:
        """What must be loaded so that a prefix of ``end_tokens`` is there, where the first ``start_tokens`` are there already.

        In prefix order; both are block boundaries. O(number of chunks).
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

    def usable_chunks(self, first: int, end: int, present: Callable[[int, int], bool]) -> int:
        """How many chunks from ``first`` on, at most up to ``end``, form a usable prefix.

        ``present(group, chunk)``. With full attention alone the first gap ends it. O(number of chunks).
        """
        for chunk in range(first, end):
            if not all(present(group, chunk) for group in range(len(self.groups))):
                return chunk - first
        return max(0, end - first)


class Frontier:
    """Of one request; the scheduler's thread only.

    ``next_chunk``: every chunk before it is stored, on its way, there already, or given up. ``executed_tokens``: what the blocks of
    the present generation are known to hold.
    """

    __slots__ = ("executed_tokens", "generation", "next_chunk")

    def __init__(self) -> None:
        self.next_chunk = 0
        self.executed_tokens = 0
        self.generation = 0

    def lose_blocks(self) -> None:
        """The request's blocks were given back: nothing of it is computed. What was stored stays stored."""
        self.executed_tokens = 0
        self.generation += 1

    def executed(self, generation: int, tokens: int) -> None:
        """A step of ``generation`` was executed, after which ``tokens`` tokens are computed."""
        if generation == self.generation and tokens > self.executed_tokens:
            self.executed_tokens = tokens

    def storable_chunks(self, chunk_tokens: int, total_tokens: int, hashed_tokens: int) -> int:
        """Chunks that are final: executed, without the last sampled token (its KV is never computed), with a hash (DATAPATH 6)."""
        return min(self.executed_tokens, total_tokens - 1, hashed_tokens) // chunk_tokens

    def move_back(self, chunk: int) -> None:
        """What was taken for loaded from ``chunk`` on is not there, and will be computed."""
        self.next_chunk = min(self.next_chunk, chunk)
