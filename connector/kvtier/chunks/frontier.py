"""How far one request's KV is computed and how far it is dealt with: the save frontier.

Tokens that are merely scheduled may be rejected (speculative decoding), or their step may not have run yet (asynchronous
scheduling), so only executed tokens count. What was recorded for a life of the request's blocks says nothing about the next: each
preemption begins a new generation.
"""

from __future__ import annotations


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
