"""Which part of a promotion is worth it: what the store knows, put to the selection in force."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from itertools import pairwise

from kvtier.store.clock import RequestClock
from kvtier.store.cost import Question, Source, TierOutlook, choose_by_cost
from kvtier.store.estimates import IMMEDIATE, PromptShape
from kvtier.store.lower import LowerTier, LowerTiers
from kvtier.store.selection import Decision, choose
from kvtier.store.shared import Shared
from kvtier.topology.models import Selection

logger = logging.getLogger(__name__)

TRIAL_SECONDS = 30.0
"""A tier judged too slow gets one trial load this often (DATAPATH 3)."""


def usable_shape(shape: PromptShape | None, keys: int) -> bool:
    """Whether a prompt's shape fits its keys. What an engine says is not believed unseen."""
    if shape is None or len(shape.ends) != keys or (shape.prefill is not None and not shape.prefill.usable):
        return False
    rising = all(a < b for a, b in pairwise((shape.start_tokens, *shape.ends)))
    return rising and shape.start_tokens >= 0 and 0 <= shape.waited_seconds < float("inf")


class Decider:
    """Asks the selection in force. Owner's thread only."""

    def __init__(self, shared: Shared, lowers: LowerTiers, selection: Selection) -> None:
        self.selection = selection
        self.memory_weight = 100
        self.min_load_tokens = 0
        self._shared = shared
        self._lowers = lowers

    def decide(
        self,
        sources: Sequence[int],
        sizes: Sequence[int],
        shape: PromptShape | None,
        limit_seconds: float,
        unproven: Collection[int] = (),
    ) -> tuple[Decision, RequestClock]:
        """``sources[i]``: index of the tier that key i comes from; ``sizes[i]``: bytes to be read for it. The clock is that of the
        chosen part, ``limit_seconds`` its end in any case, both counted from the request's first question. ``unproven``: keys in RAM
        that have to be verified first."""
        if self.selection is Selection.COST and shape is not None:
            decision, clock = self._by_cost(sources, sizes, shape, limit_seconds, unproven)
        else:
            weights = [self.memory_weight] + [lower.settings.load_weight for lower in self._lowers.all]
            decision = choose(self.selection, sources, weights, [1] * len(sources))
            clock = RequestClock(limit_seconds)
        self._shared.count("selections", "", decision.reason)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s", decision.explain(["RAM", *(lower.name for lower in self._lowers.all)]))
        return decision, clock

    def _by_cost(
        self,
        sources: Sequence[int],
        sizes: Sequence[int],
        shape: PromptShape,
        limit_seconds: float,
        unproven: Collection[int],
    ) -> tuple[Decision, RequestClock]:
        now = self._shared.clock()
        used = set(sources)
        memory = TierOutlook(self.memory_weight, IMMEDIATE)
        question = Question(
            [
                Source(tier, size, end, position in unproven)
                for position, (tier, size, end) in enumerate(zip(sources, sizes, shape.ends, strict=False))
            ],
            [memory] + [_outlook(lower, now) if lower.index in used else memory for lower in self._lowers.all],
            shape.start_tokens,
            shape.ends[len(sources) - 1] if sources else shape.start_tokens,
            shape.prefill,
            limit_seconds,
            shape.waited_seconds,
            self.min_load_tokens,
        )
        decision = choose_by_cost(question)
        for tier in decision.too_slow:
            self._shared.count("tier_too_slow", self._lowers.all[tier - 1].name)
        return decision, question.clock(decision.chosen.keys if decision.chosen is not None else 0)

    def trial_due(self, lower: LowerTier) -> bool:
        """Whether a tier that was judged too slow is to be measured again."""
        idle = lower.model.queued_reads == 0
        return idle and lower.usable and self._shared.clock() - lower.model.last_began_at >= TRIAL_SECONDS


def _outlook(lower: LowerTier, now: float) -> TierOutlook:
    model = lower.model
    threads = max(1, lower.read_threads - lower.late_reads)
    return TierOutlook(lower.settings.load_weight, model.estimate(now), threads, model.queued_reads, model.queued_bytes)
