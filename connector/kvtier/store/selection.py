"""Which of the usable prefixes to load. Pure: values in, one explained value out. ``Cost`` itself is in cost.py.

Candidates are the prefixes that end where the tier changes (and the whole): ending anywhere else loads less from a tier
that is used anyway. Parts of it may be read by a person, so each decision says what it chose, what it did not, and why.

How long a request may wait for tiers (DATAPATH 2).

Selection by ``Cost``: load what is expected to be ready first, and never what is expected to lose to recomputing.

Pure: values in, one explained value out. The clock is part of the estimate: a load that its clock would cut off half-way
costs the wait and gains little, so it is not begun. Where reading everything at once would bring nothing before the clock
is out, fewer reads at a time bring the first keys earlier; then the plan says how many (``Candidate.parallel``).

Which part of a promotion is worth it: what the store knows, put to the selection in force.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from kvtier.config.models import Selection
from kvtier.store.context import StoreContext
from kvtier.store.cost_model import IMMEDIATE, Prefill, PrefixCost, TierEstimate
from kvtier.store.secondary_tier import SecondaryTier, SecondaryTiers


@dataclass(frozen=True, slots=True)
class Candidate:
    """A usable prefix: its first ``keys`` keys, ``tokens`` tokens. ``tiers``: indexes of the tiers it needs, in
    document order. ``slowest``: the one of least weight among them, the later one where two weigh the same.

    Estimates of ``Cost``, infinite where there are none: ``ready_seconds`` until the whole prompt is computed with this
    loaded, ``weighted_seconds`` the same with the tiers' weights. ``parallel``: reads of a tier at a time, 0 for as many as it
    has threads. ``cut``: the request's clock is expected to end it before it is through.
    """

    keys: int
    tokens: int
    tiers: tuple[int, ...]
    slowest: int
    score: int
    ready_seconds: float = math.inf
    weighted_seconds: float = math.inf
    parallel: int = 0
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """``chosen`` is None where nothing is to be loaded. ``reason`` is a short fixed word per rule, for counting.

    ``recompute_seconds``: of computing everything, None without an estimate. ``too_slow``: tiers that hold a part of the prompt
    and were found too slow for it.
    """

    chosen: Candidate | None
    runners_up: tuple[Candidate, ...]
    reason: str
    recompute_seconds: float | None = None
    too_slow: tuple[int, ...] = ()

    def explain(self, tier_names: Sequence[str]) -> str:
        """One line for people."""

        def text(candidate: Candidate) -> str:
            names = "+".join(tier_names[i] for i in candidate.tiers)
            if math.isinf(candidate.ready_seconds):
                judged = f"score {candidate.score}"
            else:
                judged = f"ready in {candidate.ready_seconds * 1e3:.1f} ms{', cut by the clock' if candidate.cut else ''}"
            return f"{candidate.tokens} tokens from {names} ({judged})"

        rest = "; ".join(map(text, self.runners_up))
        if self.recompute_seconds is not None and self.chosen is not None:
            rest += ("; " if rest else "") + f"recomputing ({self.recompute_seconds * 1e3:.1f} ms)"
        chosen = "nothing" if self.chosen is None else text(self.chosen)
        if self.recompute_seconds is not None and self.chosen is None:
            chosen += f" ({self.recompute_seconds * 1e3:.1f} ms)"
        return f"{chosen}: {self.reason}" + (f"; instead of {rest}" if rest else "")


def prefix_candidates(
    tiers: Sequence[int], weights: Sequence[int], tokens: Sequence[int]
) -> list[Candidate]:
    """The prefixes worth comparing, shortest first.

    ``tiers[i]`` is the index of the tier that key i would come from, ``tokens[i]`` how many tokens it adds,
    ``weights[t]`` the load weight of tier t.
    """
    found = []
    used: set[int] = set()
    ends = list(accumulate(tokens))
    for i, tier in enumerate(tiers):
        used.add(tier)
        if i + 1 < len(tiers) and tiers[i + 1] == tier:
            continue
        slowest = min(used, key=lambda t: (weights[t], -t))
        found.append(
            Candidate(i + 1, ends[i], tuple(sorted(used)), slowest, ends[i] * weights[slowest])
        )
    return found


def choose_prefix(
    selection: Selection, tiers: Sequence[int], weights: Sequence[int], tokens: Sequence[int]
) -> Decision:
    """Chooses a prefix.

    ``Weighted``: the most tokens x weight of the slowest tier used; ties to the earlier of the slowest tiers, then to
    the longer prefix. ``Cost``, before anything was measured: the longest (DATAPATH 3).
    """
    found = prefix_candidates(tiers, weights, tokens)
    if not found:
        return Decision(None, (), "nothing_usable")
    if selection is Selection.WEIGHTED:
        best = max(found, key=lambda c: (c.score, -c.slowest, c.tokens))
        reason = "highest_score"
    else:
        best = found[-1]
        reason = "longest_without_estimate"
    return Decision(best, tuple(c for c in found if c is not best), reason)


LOSS_SHARE = 0.5
"""Share of the time to recompute that waiting may cost."""


@dataclass(frozen=True, slots=True)
class LoadDeadline:
    """The limit of one request. ``limit_seconds``: its tiers' ``loadTimeoutSeconds``, which nothing extends.

    With ``prefill``, no more than half of the time is lost that computing tokens ``start_tokens`` to ``end_tokens`` would
    take: those that wait for a tier, or for something a tier has to bring before. What has arrived in order is not lost, so
    it gives the time back that computing it would have taken. Whatever a tier does, the request's first token comes within
    1.5 x recomputing; and a steady tier that is faster than recomputing by little is not cut off half-way, where it would
    cost more than either of recomputing and loading.
    """

    limit_seconds: float
    start_tokens: int = 0
    end_tokens: int = 0
    prefill: Prefill | None = None

    def seconds(self, arrived_tokens: int) -> float:
        """How long the request may wait, counted from its first question, once this much of its prompt is there in order."""
        if self.prefill is None:
            return self.limit_seconds
        stake = self.prefill.seconds(self.start_tokens, self.end_tokens)
        gained = self.prefill.seconds(self.start_tokens, max(arrived_tokens, self.start_tokens))
        return min(self.limit_seconds, LOSS_SHARE * stake + gained)


MAX_CANDIDATES = 8
"""Of a prefix that changes its tier more often, what is in RAM and the longest are compared."""
STAGES = (2, 4)
"""Each stage pays the latency again, so as few as do. With four, what has arrived extends the clock of any load that is faster
than recomputing until the next stage is there, whatever the share of attention."""
SPREAD_FACTOR = 2.0
MARGIN = 0.03
"""A key that is expected within this much of the clock's end is expected too late, and so is one that usual deviations
(``SPREAD_FACTOR`` times the mean) would make late."""


@dataclass(frozen=True, slots=True)
class KeySource:
    """Where one key of the prefix comes from. ``size_bytes``: to be read, 0 in RAM and where a read is under way.
    ``end_tokens``: tokens of the prompt that are there with it and all before it."""

    tier: int
    size_bytes: int
    end_tokens: int
    unproven: bool = False
    """In RAM, and not there before it is verified."""


@dataclass(frozen=True, slots=True)
class TierLoad:
    """A tier at this moment. ``estimate``: None before there is one; then it is tried, as if it cost nothing."""

    weight: int = 100
    estimate: TierEstimate | None = IMMEDIATE
    threads: int = 1
    queued_reads: int = 0
    queued_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CostQuery:
    """What ``Cost`` decides about. ``tiers[t]``: outlook of tier t. ``limit_seconds``: ``loadTimeoutSeconds``.
    ``waited_seconds``: how long the request's clock has been running."""

    sources: Sequence[KeySource]
    tiers: Sequence[TierLoad]
    start_tokens: int
    prompt_tokens: int
    prefill: Prefill | None
    limit_seconds: float
    waited_seconds: float = 0.0
    min_tokens: int = 0

    def clock(self, keys: int) -> LoadDeadline:
        """The clock of a load of the first ``keys`` keys."""
        start = self.start_tokens
        for source in self.sources[:keys]:
            if source.tier or source.unproven:
                break
            start = source.end_tokens
        end = self.sources[keys - 1].end_tokens if keys else start
        return LoadDeadline(self.limit_seconds, start, end, self.prefill)


def choose_by_cost(question: CostQuery) -> Decision:
    """Chooses a prefix, or nothing.

    Of the usable prefixes that end where the tier changes: least (time until all tiers have delivered, each divided by
    weight/100) + recomputing the rest. Out of the question is what, as measured, is ready no earlier than recomputing
    everything. Without an estimate of recomputing: the longest.
    """
    ends = [question.start_tokens, *(source.end_tokens for source in question.sources)]
    tokens = [end - begin for begin, end in pairwise(ends)]
    weights = [tier.weight for tier in question.tiers]
    usable = prefix_candidates([source.tier for source in question.sources], weights, tokens)
    if not usable:
        return Decision(None, (), "nothing_usable")
    found = [candidate for candidate in usable if candidate.tokens >= question.min_tokens]
    if not found:
        return Decision(None, tuple(usable), "below_min_load_tokens")
    if question.prefill is None:
        return Decision(found[-1], tuple(found[:-1]), "longest_without_estimate")
    if len(found) > MAX_CANDIDATES:
        found = [found[0], *found[1 - MAX_CANDIDATES :]]
    prefill = question.prefill
    recompute = prefill.seconds(question.start_tokens, question.prompt_tokens)
    rated = [_weighted(question, prefill, candidate) for candidate in found]
    best: Candidate | None = None
    least = recompute
    for candidate in rated:
        if candidate.ready_seconds < recompute and candidate.weighted_seconds < least:
            best, least = candidate, candidate.weighted_seconds
    others = tuple(candidate for candidate in rated if candidate is not best)
    used = best.tiers if best is not None else ()
    too_slow = tuple(
        t
        for t in rated[-1].tiers
        if t not in used and question.tiers[t].estimate not in (None, IMMEDIATE)
    )
    if best is None:
        reason = "recomputing_is_faster"
    elif any(question.tiers[t].estimate is None for t in used):
        reason = "tier_without_estimate"
    else:
        reason = "least_time"
    return Decision(best, others, reason, recompute, too_slow)


def _weighted(question: CostQuery, prefill: Prefill, candidate: Candidate) -> Candidate:
    """With its estimates: read with all threads, or in stages where the clock would cut that off."""
    at_once = _expect(question, prefill, candidate, 1)
    if not at_once.cut:
        return at_once
    ways = [at_once, *(_expect(question, prefill, candidate, stages) for stages in STAGES)]
    return min(ways, key=lambda c: (c.cut, c.ready_seconds))


def _expect(question: CostQuery, prefill: Prefill, candidate: Candidate, stages: int) -> Candidate:
    sources = question.sources[: candidate.keys]
    clock = question.clock(candidate.keys)
    arrivals: dict[int, list[float]] = {}
    parallel = 0
    judged = 0.0
    for tier in candidate.tiers:
        sizes = [source.size_bytes for source in sources if source.tier == tier]
        if stages > 1:
            parallel = max(parallel, sum(map(bool, sizes)) // stages, 1)
        arrivals[tier] = _arrivals(question.tiers[tier], sizes, stages)
        judged = max(judged, arrivals[tier][-1] * 100 / question.tiers[tier].weight)
    taken = dict.fromkeys(candidate.tiers, 0)
    ready = cautious = 0.0
    there = question.start_tokens
    for source in sources:
        arrival = arrivals[source.tier][taken[source.tier]]
        taken[source.tier] += 1
        estimate = question.tiers[source.tier].estimate or IMMEDIATE
        ready = max(ready, arrival)
        cautious = max(cautious, arrival * (1 + MARGIN + SPREAD_FACTOR * estimate.spread))
        limit = clock.seconds(there) - question.waited_seconds
        if source.tier and cautious > limit:
            rest = prefill.seconds(there, question.prompt_tokens)
            judged = limit * 100 / min(question.tiers[t].weight for t in candidate.tiers)
            return replace(
                candidate,
                ready_seconds=limit + rest,
                weighted_seconds=judged + rest,
                parallel=parallel,
                cut=True,
            )
        there = source.end_tokens
    rest = prefill.seconds(there, question.prompt_tokens)
    return replace(
        candidate, ready_seconds=ready + rest, weighted_seconds=judged + rest, parallel=parallel
    )


def _arrivals(tier: TierLoad, sizes: Sequence[int], stages: int) -> list[float]:
    """Seconds until each key of a tier is there. Reads that run together end together: nothing says which is first."""
    estimate = tier.estimate or IMMEDIATE
    reads = sum(map(bool, sizes))
    if stages == 1:
        parallel, ahead, queue_rounds = tier.threads, tier.queued_reads, 0
    else:
        parallel, ahead = min(tier.threads, max(1, reads // stages)), 0
        queue_rounds = -(-tier.queued_reads // tier.threads)
    totals = list(accumulate((size for size in sizes if size), initial=tier.queued_bytes))
    found = []
    number = 0
    for size in sizes:
        number += bool(size)
        rounds = -(-(ahead + number) // parallel)
        done = min(max(rounds * parallel - ahead, 0), reads) if number else 0
        found.append(estimate.seconds(queue_rounds + rounds, totals[done]))
    return found


logger = logging.getLogger(__name__)
TRIAL_SECONDS = 30.0
"""A tier judged too slow gets one trial load this often (DATAPATH 3)."""


def usable_shape(shape: PrefixCost | None, keys: int) -> bool:
    """Whether a prompt's shape fits its keys. What an engine says is not believed unseen."""
    if (
        shape is None
        or len(shape.ends) != keys
        or (shape.prefill is not None and not shape.prefill.usable)
    ):
        return False
    rising = all(a < b for a, b in pairwise((shape.start_tokens, *shape.ends)))
    return rising and shape.start_tokens >= 0 and 0 <= shape.waited_seconds < float("inf")


class LoadPlanner:
    """Asks the selection in force. Owner's thread only."""

    def __init__(self, shared: StoreContext, lowers: SecondaryTiers, selection: Selection) -> None:
        self.selection = selection
        self.memory_weight = 100
        self.min_load_tokens = 0
        self._shared = shared
        self._lowers = lowers

    def decide(
        self,
        sources: Sequence[int],
        sizes: Sequence[int],
        shape: PrefixCost | None,
        limit_seconds: float,
        unproven: Collection[int] = (),
    ) -> tuple[Decision, LoadDeadline]:
        """``sources[i]``: index of the tier that key i comes from; ``sizes[i]``: bytes to be read for it. The clock is that of the
        chosen part, ``limit_seconds`` its end in any case, both counted from the request's first question. ``unproven``: keys in RAM
        that have to be verified first."""
        if self.selection is Selection.COST and shape is not None:
            decision, clock = self._by_cost(sources, sizes, shape, limit_seconds, unproven)
        else:
            weights = [self.memory_weight] + [
                lower.settings.load_weight for lower in self._lowers.all
            ]
            decision = choose_prefix(self.selection, sources, weights, [1] * len(sources))
            clock = LoadDeadline(limit_seconds)
        self._shared.count("selections", "", decision.reason)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "%s", decision.explain(["RAM", *(lower.name for lower in self._lowers.all)])
            )
        return decision, clock

    def _by_cost(
        self,
        sources: Sequence[int],
        sizes: Sequence[int],
        shape: PrefixCost,
        limit_seconds: float,
        unproven: Collection[int],
    ) -> tuple[Decision, LoadDeadline]:
        now = self._shared.clock()
        used = set(sources)
        memory = TierLoad(self.memory_weight, IMMEDIATE)
        question = CostQuery(
            [
                KeySource(tier, size, end, position in unproven)
                for position, (tier, size, end) in enumerate(
                    zip(sources, sizes, shape.ends, strict=False)
                )
            ],
            [memory]
            + [
                _outlook(lower, now) if lower.index in used else memory
                for lower in self._lowers.all
            ],
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

    def trial_due(self, lower: SecondaryTier) -> bool:
        """Whether a tier that was judged too slow is to be measured again."""
        idle = lower.model.queued_reads == 0
        return (
            idle
            and lower.usable
            and self._shared.clock() - lower.model.last_began_at >= TRIAL_SECONDS
        )


def _outlook(lower: SecondaryTier, now: float) -> TierLoad:
    model = lower.model
    threads = max(1, lower.read_threads - lower.late_reads)
    return TierLoad(
        lower.settings.load_weight,
        model.estimate(now),
        threads,
        model.queued_reads,
        model.queued_bytes,
    )
