"""Where to split a prompt whose end is in a slow tier: the head is computed while the tail arrives.

vLLM asks for a prefix once, while nothing is computed, so it either waits for the whole load or
computes everything. ATOM can park a running prefill, so both may proceed at the same time. The best
boundary is where they end together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.store.cost_model import Prefill

ARRIVAL_MARGIN = 1.05
"""The tail should arrive a little before the head is computed: the next opportunity to hand over
is a whole prefill step later."""
WORTH = 0.95
"""A split that is not expected to save 5% is not made."""


@dataclass(frozen=True, slots=True)
class Tail:
    """Chunks that may be loaded, for a sequence that is computed up to ``computed_tokens``.

    ``first_chunk``: the first one; ``seconds[i]``: expected time to read the i-th of them.
    """

    computed_tokens: int
    first_chunk: int
    chunk_tokens: int
    seconds: Sequence[float]


def split(tail: Tail, prefill: Prefill) -> int | None:
    """Returns how many chunks to compute before the load; None if loading saves too little.

    The smallest number for which the rest has arrived by the time that these are computed.
    """
    left = sum(tail.seconds)
    whole = prefill.seconds(tail.computed_tokens, _end(tail, len(tail.seconds)))
    for skipped, seconds in enumerate(tail.seconds):
        head = prefill.seconds(tail.computed_tokens, max(tail.computed_tokens, _end(tail, skipped)))
        if head >= left * ARRIVAL_MARGIN:
            return skipped if head <= WORTH * whole else None
        left -= seconds
    return None


def _end(tail: Tail, chunks: int) -> int:
    return (tail.first_chunk + chunks) * tail.chunk_tokens


def first_step(computed: int, boundary: int, step: int) -> int:
    """Returns how many tokens the first prefill step should compute, at most ``step``.

    Later steps of a sequence that is alone have ``step`` tokens, so the last of them then ends at
    ``boundary``.
    """
    distance = boundary - computed
    return distance % step or min(step, distance)
