"""Selection by ``Cost``: load what is expected to be ready first, and never what is expected to lose to recomputing.

Pure: values in, one explained value out. The clock is part of the estimate: a load that its clock would cut off half-way
costs the wait and gains little, so it is not begun. Where reading everything at once would bring nothing before the clock
is out, fewer reads at a time bring the first keys earlier; then the plan says how many (``Candidate.parallel``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from kvtier.store.clock import RequestClock
from kvtier.store.estimates import IMMEDIATE, Prefill, TierEstimate
from kvtier.store.selection import Candidate, Decision, candidates

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
class Source:
    """Where one key of the prefix comes from. ``size_bytes``: to be read, 0 in RAM and where a read is under way.
    ``end_tokens``: tokens of the prompt that are there with it and all before it."""

    tier: int
    size_bytes: int
    end_tokens: int
    unproven: bool = False
    """In RAM, and not there before it is verified."""


@dataclass(frozen=True, slots=True)
class TierOutlook:
    """A tier at this moment. ``estimate``: None before there is one; then it is tried, as if it cost nothing."""

    weight: int = 100
    estimate: TierEstimate | None = IMMEDIATE
    threads: int = 1
    queued_reads: int = 0
    queued_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Question:
    """What ``Cost`` decides about. ``tiers[t]``: outlook of tier t. ``limit_seconds``: ``loadTimeoutSeconds``.
    ``waited_seconds``: how long the request's clock has been running."""

    sources: Sequence[Source]
    tiers: Sequence[TierOutlook]
    start_tokens: int
    prompt_tokens: int
    prefill: Prefill | None
    limit_seconds: float
    waited_seconds: float = 0.0
    min_tokens: int = 0

    def clock(self, keys: int) -> RequestClock:
        """The clock of a load of the first ``keys`` keys."""
        start = self.start_tokens
        for source in self.sources[:keys]:
            if source.tier or source.unproven:
                break
            start = source.end_tokens
        end = self.sources[keys - 1].end_tokens if keys else start
        return RequestClock(self.limit_seconds, start, end, self.prefill)


def choose_by_cost(question: Question) -> Decision:
    """Chooses a prefix, or nothing.

    Of the usable prefixes that end where the tier changes: least (time until all tiers have delivered, each divided by
    weight/100) + recomputing the rest. Out of the question is what, as measured, is ready no earlier than recomputing
    everything. Without an estimate of recomputing: the longest.
    """
    ends = [question.start_tokens, *(source.end_tokens for source in question.sources)]
    tokens = [end - begin for begin, end in pairwise(ends)]
    weights = [tier.weight for tier in question.tiers]
    usable = candidates([source.tier for source in question.sources], weights, tokens)
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
    rated = [_rate(question, prefill, candidate) for candidate in found]
    best: Candidate | None = None
    least = recompute
    for candidate in rated:
        if candidate.ready_seconds < recompute and candidate.judged_seconds < least:
            best, least = candidate, candidate.judged_seconds
    others = tuple(candidate for candidate in rated if candidate is not best)
    used = best.tiers if best is not None else ()
    too_slow = tuple(
        t for t in rated[-1].tiers if t not in used and question.tiers[t].estimate not in (None, IMMEDIATE)
    )
    if best is None:
        reason = "recomputing_is_faster"
    elif any(question.tiers[t].estimate is None for t in used):
        reason = "tier_without_estimate"
    else:
        reason = "least_time"
    return Decision(best, others, reason, recompute, too_slow)


def _rate(question: Question, prefill: Prefill, candidate: Candidate) -> Candidate:
    """With its estimates: read with all threads, or in stages where the clock would cut that off."""
    at_once = _expect(question, prefill, candidate, 1)
    if not at_once.cut:
        return at_once
    ways = [at_once, *(_expect(question, prefill, candidate, stages) for stages in STAGES)]
    return min(ways, key=lambda c: (c.cut, c.ready_seconds))


def _expect(question: Question, prefill: Prefill, candidate: Candidate, stages: int) -> Candidate:
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
                candidate, ready_seconds=limit + rest, judged_seconds=judged + rest, parallel=parallel, cut=True
            )
        there = source.end_tokens
    rest = prefill.seconds(there, question.prompt_tokens)
    return replace(candidate, ready_seconds=ready + rest, judged_seconds=judged + rest, parallel=parallel)


def _arrivals(tier: TierOutlook, sizes: Sequence[int], stages: int) -> list[float]:
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
