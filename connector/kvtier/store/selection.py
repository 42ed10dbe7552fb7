"""Selection: which of the usable prefixes to load, and how long to wait for it.

Candidates are the prefixes that end where the tier changes, and the whole: ending anywhere else
loads less from a tier that is used anyway. ``choose_prefix`` implements ``Weighted``,
``choose_by_cost`` implements ``Cost``: load what is expected to be ready first, and never what is
expected to be slower than recomputing. Both are pure: values in, one explained decision out.

The deadline is part of the estimate. A load that its deadline would cut off costs the wait and
gains little, so it is not started. Where reading everything at once would deliver nothing before
the deadline, fewer reads at a time deliver the first keys earlier; ``Candidate.parallel`` then says
how many.

``LoadPlanner`` applies the selection in force to the store's state. Only the store's thread uses
it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise

from kvtier.config.models import Live, Selection
from kvtier.store.context import StoreContext
from kvtier.store.cost_model import IMMEDIATE, Prefill, PrefixCost, TierEstimate
from kvtier.store.secondary_tier import SecondaryTiers
from kvtier.store.tier_group import SecondaryTier, TierGroup

LOSS_SHARE = 0.5
"""Share of the recomputing time that waiting may cost."""
LOOKUP_SHARE = 0.05
"""Share of the time to recompute unknown keys that looking them up may take."""
MAX_CANDIDATES = 8
"""Of a prefix with more candidates, the shortest and the longest ones are compared."""
STAGES = (2, 4)
"""Numbers of stages to try, fewest first, because each stage pays the latency again. With four
stages, the keys that have arrived extend the deadline of any load that is faster than recomputing
until the next stage arrives, whatever the share of attention."""
SPREAD_FACTOR = 2.0
MARGIN = 0.03
"""A key is expected to be late if its arrival, increased by this share and by ``SPREAD_FACTOR``
times the mean deviation, exceeds the deadline."""
PROBE_INTERVAL_SECONDS = 30.0
"""How often a tier that was found too slow is measured."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A usable prefix of ``keys`` keys with ``tokens`` tokens.

    * ``tiers``: indexes of the tiers that it needs, in the order of the topology. ``slowest``: the
      one with the least weight, the later one if two are equal.
    * ``ready_seconds``: estimated time until the whole prompt is computed if this is loaded;
      infinite without estimate. ``weighted_seconds``: the same with the tiers' weights.
    * ``parallel``: concurrent reads per tier; 0 for as many as it has threads.
    * ``cut``: the deadline is expected to pass before everything has arrived.
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
    """``chosen`` is None if nothing is worth loading. ``reason`` identifies the rule that decided.

    ``recompute_seconds``: estimate for computing everything; None without one. ``too_slow``: tiers
    that hold a part of the prompt and are too slow for it.
    """

    chosen: Candidate | None
    runners_up: tuple[Candidate, ...]
    reason: str
    recompute_seconds: float | None = None
    too_slow: tuple[int, ...] = ()

    def explain(self, tier_names: Sequence[str]) -> str:
        """The decision and its alternatives in one line."""

        def describe(candidate: Candidate) -> str:
            names = "+".join(tier_names[i] for i in candidate.tiers)
            if math.isinf(candidate.ready_seconds):
                estimate = f"score {candidate.score}"
            else:
                cut = ", cut by the deadline" if candidate.cut else ""
                estimate = f"ready in {candidate.ready_seconds * 1e3:.1f} ms{cut}"
            return f"{candidate.tokens} tokens from {names} ({estimate})"

        rest = "; ".join(map(describe, self.runners_up))
        if self.recompute_seconds is not None and self.chosen is not None:
            rest += ("; " if rest else "") + f"recomputing ({self.recompute_seconds * 1e3:.1f} ms)"
        chosen = "nothing" if self.chosen is None else describe(self.chosen)
        if self.recompute_seconds is not None and self.chosen is None:
            chosen += f" ({self.recompute_seconds * 1e3:.1f} ms)"
        return f"{chosen}: {self.reason}" + (f"; instead of {rest}" if rest else "")


def prefix_candidates(
    tiers: Sequence[int], weights: Sequence[int], tokens: Sequence[int]
) -> list[Candidate]:
    """The prefixes to compare, shortest first.

    ``tiers[i]``: index of the tier that key i comes from. ``tokens[i]``: tokens that it adds.
    ``weights[t]``: load weight of tier t.
    """
    found = []
    used: set[int] = set()
    end = total = 0
    for tier, keys in groupby(tiers):
        used.add(tier)
        begin, end = end, end + len(list(keys))
        total += sum(tokens[begin:end])
        slowest = min(used, key=lambda t: (weights[t], -t))
        found.append(Candidate(end, total, tuple(sorted(used)), slowest, total * weights[slowest]))
    return found


def choose_prefix(
    selection: Selection, tiers: Sequence[int], weights: Sequence[int], tokens: Sequence[int]
) -> Decision:
    """Chooses a prefix.

    ``Weighted``: the most tokens x weight of the slowest tier used; ties to the earlier of the
    slowest tiers, then to the longer prefix. ``Cost`` without any measurement: the longest.
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


@dataclass(frozen=True, slots=True)
class LoadDeadline:
    """How long one request may wait for its tiers.

    ``limit_seconds`` is an upper bound: ``loadTimeoutSeconds``. With ``prefill``, waiting may cost
    at most half of the time that computing tokens ``start_tokens`` to ``end_tokens`` takes. Each
    key that arrives in order extends the deadline by the time that computing it would have taken.
    So the first token never comes later than 1.5 times recomputing, whatever a tier does; and a
    steady tier that is only a little faster than recomputing is not cut off half-way, which would
    cost more than either alternative.
    """

    limit_seconds: float
    start_tokens: int = 0
    end_tokens: int = 0
    prefill: Prefill | None = None

    def seconds(self, arrived_tokens: int) -> float:
        """The deadline in seconds after the request's first lookup, once ``arrived_tokens`` have
        arrived in order."""
        if self.prefill is None:
            return self.limit_seconds
        stake = self.prefill.seconds(self.start_tokens, self.end_tokens)
        gained = self.prefill.seconds(self.start_tokens, max(arrived_tokens, self.start_tokens))
        return min(self.limit_seconds, LOSS_SHARE * stake + gained)


@dataclass(frozen=True, slots=True)
class KeySource:
    """Where one key of the prefix comes from.

    ``size_bytes``: bytes to be read; 0 in RAM, and for a read in progress. ``end_tokens``: tokens
    of the prompt up to the end of this key. ``unverified``: in RAM, but to be verified before use.
    """

    tier: int
    size_bytes: int
    end_tokens: int
    unverified: bool = False


@dataclass(frozen=True, slots=True)
class TierLoad:
    """The present load of a tier. A tier without ``estimate`` is tried, as if it cost nothing."""

    weight: int = 100
    estimate: TierEstimate | None = IMMEDIATE
    threads: int = 1
    queued_reads: int = 0
    queued_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CostQuery:
    """The input of ``choose_by_cost``. ``limit_seconds``: ``loadTimeoutSeconds``.
    ``waited_seconds``: time since the request's first lookup."""

    sources: Sequence[KeySource]
    tiers: Sequence[TierLoad]
    start_tokens: int
    prompt_tokens: int
    prefill: Prefill | None
    limit_seconds: float
    waited_seconds: float = 0.0
    min_tokens: int = 0

    def deadline(self, keys: int) -> LoadDeadline:
        """The deadline of a load of the first ``keys`` keys."""
        start = self.start_tokens
        for source in self.sources[:keys]:
            if source.tier or source.unverified:
                break
            start = source.end_tokens
        end = self.sources[keys - 1].end_tokens if keys else start
        return LoadDeadline(self.limit_seconds, start, end, self.prefill)


def choose_by_cost(query: CostQuery) -> Decision:
    """Chooses a prefix, or nothing.

    The candidate with the least (time until all tiers have delivered, each divided by weight/100) +
    recomputing the rest. Candidates that are ready no earlier than recomputing everything are
    excluded. Without an estimate for recomputing: the longest.
    """
    ends = [query.start_tokens, *(source.end_tokens for source in query.sources)]
    tokens = [end - begin for begin, end in pairwise(ends)]
    weights = [tier.weight for tier in query.tiers]
    usable = prefix_candidates([source.tier for source in query.sources], weights, tokens)
    if not usable:
        return Decision(None, (), "nothing_usable")
    found = [candidate for candidate in usable if candidate.tokens >= query.min_tokens]
    if not found:
        return Decision(None, tuple(usable), "below_min_load_tokens")
    if query.prefill is None:
        return Decision(found[-1], tuple(found[:-1]), "longest_without_estimate")
    if len(found) > MAX_CANDIDATES:
        found = [found[0], *found[1 - MAX_CANDIDATES :]]
    prefill = query.prefill
    recompute = prefill.seconds(query.start_tokens, query.prompt_tokens)
    rated = [_weighted(query, prefill, candidate) for candidate in found]
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
        if t not in used and query.tiers[t].estimate not in (None, IMMEDIATE)
    )
    if best is None:
        reason = "recomputing_is_faster"
    elif any(query.tiers[t].estimate is None for t in used):
        reason = "tier_without_estimate"
    else:
        reason = "least_time"
    return Decision(best, others, reason, recompute, too_slow)


def _weighted(query: CostQuery, prefill: Prefill, candidate: Candidate) -> Candidate:
    """Adds estimates: for reading with all threads, or in stages if the deadline would cut that
    off."""
    at_once = _expect(query, prefill, candidate, 1)
    if not at_once.cut:
        return at_once
    ways = [at_once, *(_expect(query, prefill, candidate, stages) for stages in STAGES)]
    return min(ways, key=lambda c: (c.cut, c.ready_seconds))


def _expect(query: CostQuery, prefill: Prefill, candidate: Candidate, stages: int) -> Candidate:
    sources = query.sources[: candidate.keys]
    deadline = query.deadline(candidate.keys)
    arrivals: dict[int, list[float]] = {}
    parallel = 0
    weighted = 0.0
    for tier in candidate.tiers:
        sizes = [source.size_bytes for source in sources if source.tier == tier]
        if stages > 1:
            parallel = max(parallel, sum(map(bool, sizes)) // stages, 1)
        arrivals[tier] = _arrivals(query.tiers[tier], sizes, stages)
        weighted = max(weighted, arrivals[tier][-1] * 100 / query.tiers[tier].weight)
    taken = dict.fromkeys(candidate.tiers, 0)
    ready = cautious = 0.0
    arrived = query.start_tokens
    for source in sources:
        arrival = arrivals[source.tier][taken[source.tier]]
        taken[source.tier] += 1
        estimate = query.tiers[source.tier].estimate or IMMEDIATE
        ready = max(ready, arrival)
        cautious = max(cautious, arrival * (1 + MARGIN + SPREAD_FACTOR * estimate.spread))
        limit = deadline.seconds(arrived) - query.waited_seconds
        if source.tier and cautious > limit:
            rest = prefill.seconds(arrived, query.prompt_tokens)
            weighted = limit * 100 / min(query.tiers[t].weight for t in candidate.tiers)
            return replace(
                candidate,
                ready_seconds=limit + rest,
                weighted_seconds=weighted + rest,
                parallel=parallel,
                cut=True,
            )
        arrived = source.end_tokens
    rest = prefill.seconds(arrived, query.prompt_tokens)
    return replace(
        candidate, ready_seconds=ready + rest, weighted_seconds=weighted + rest, parallel=parallel
    )


def _arrivals(tier: TierLoad, sizes: Sequence[int], stages: int) -> list[float]:
    """Seconds until each key of a tier arrives. Reads that run together are expected to end
    together."""
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


@dataclass(frozen=True, slots=True)
class PrefixSources:
    """Where the keys of a prefix would come from. ``tiers[i]``: index of the tier, 0 for RAM.
    ``sizes[i]``: bytes to be read. ``unverified``: positions of keys in RAM that have to be
    verified."""

    tiers: Sequence[int]
    sizes: Sequence[int]
    unverified: Collection[int] = ()


class LoadPlanner:
    """Applies the selection in force to the store's state."""

    def __init__(
        self, context: StoreContext, tiers: SecondaryTiers, memory_name: str, live: Live
    ) -> None:
        self._context = context
        self._tiers = tiers
        self._memory_name = memory_name
        self._memory_weight = 100
        self.configure(live)

    def configure(self, live: Live) -> None:
        """Applies live settings."""
        self._selection = live.selection
        self._min_load_tokens = live.min_load_tokens
        memory = live.tiers.get(self._memory_name)
        if memory is not None:
            self._memory_weight = memory.load_weight

    def decide(
        self, sources: PrefixSources, cost: PrefixCost | None, limit_seconds: float
    ) -> tuple[Decision, LoadDeadline]:
        """What to load, and the deadline for it. ``limit_seconds`` counts from the request's first
        lookup."""
        if cost is not None and cost.whole and len(sources.tiers) < len(cost.ends):
            decision, deadline = Decision(None, (), "nothing_usable"), LoadDeadline(limit_seconds)
        elif self._selection is Selection.COST and cost is not None:
            decision, deadline = self._by_cost(sources, cost, limit_seconds)
        else:
            weights = [self._memory_weight] + [
                group.settings.load_weight for group in self._tiers.groups
            ]
            tiers = sources.tiers
            decision = choose_prefix(self._selection, tiers, weights, [1] * len(tiers))
            if cost is not None and cost.whole:
                # The scheduler side has chosen already.
                whole = prefix_candidates(tiers, weights, [1] * len(tiers))[-1:]
                decision = replace(decision, chosen=whole[0] if whole else None, runners_up=())
            deadline = LoadDeadline(limit_seconds)
        self._context.count("selections", "", decision.reason)
        if _log.isEnabledFor(logging.DEBUG):
            names = ["RAM", *(group.name for group in self._tiers.groups)]
            _log.debug("%s", decision.explain(names))
        return decision, deadline

    def _by_cost(
        self, sources: PrefixSources, cost: PrefixCost, limit_seconds: float
    ) -> tuple[Decision, LoadDeadline]:
        now = self._context.clock()
        used = set(sources.tiers)
        least = self._min_load_tokens
        if cost.whole and cost.ends:
            least = max(least, cost.ends[-1] - cost.start_tokens)
        memory = TierLoad(self._memory_weight, IMMEDIATE)
        query = CostQuery(
            [
                KeySource(tier, size, end, position in sources.unverified)
                for position, (tier, size, end) in enumerate(
                    zip(sources.tiers, sources.sizes, cost.ends, strict=False)
                )
            ],
            [memory]
            + [
                _tier_load(group, now) if group.index in used else memory
                for group in self._tiers.groups
            ],
            cost.start_tokens,
            cost.ends[len(sources.tiers) - 1] if sources.tiers else cost.start_tokens,
            cost.prefill,
            limit_seconds,
            cost.waited_seconds,
            least,
        )
        decision = choose_by_cost(query)
        for tier in decision.too_slow:
            self._context.count("tier_too_slow", self._tiers.groups[tier - 1].name)
        return decision, query.deadline(decision.chosen.keys if decision.chosen is not None else 0)

    def probe_due(self, secondary: SecondaryTier) -> bool:
        """Whether to measure a tier that was found too slow: it is idle, and has not been read from
        lately."""
        model = secondary.model
        idle_seconds = self._context.clock() - model.last_began_at
        return (
            model.queued_reads == 0 and secondary.usable and idle_seconds >= PROBE_INTERVAL_SECONDS
        )


def _tier_load(group: TierGroup, now: float) -> TierLoad:
    return TierLoad(group.settings.load_weight, *group.load(now))
