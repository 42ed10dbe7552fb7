"""Selection ``Cost``."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.store.cost_model import IMMEDIATE, Prefill, TierEstimate
from kvtier.store.selection import (
    MAX_CANDIDATES,
    CostQuery,
    KeySource,
    LoadDeadline,
    TierLoad,
    choose_by_cost,
)

CHUNK = 256
MIB = 1 << 20
SIZE = 32 * MIB
PREFILL = Prefill(25e-6, 0.0)
CHUNK_SECONDS = CHUNK * PREFILL.alpha
RAM = TierLoad()
NAMES = ("ram", "disk", "nfs")


def tier(
    speed: float,
    latency: float = 0.0,
    weight: int = 100,
    threads: int = 8,
    queued: int = 0,
    spread: float = 0.0,
) -> TierLoad:
    """A tier that delivers ``speed`` times as fast as recomputing."""
    estimate = TierEstimate(latency, speed * SIZE / CHUNK_SECONDS, spread)
    return TierLoad(weight, estimate, threads, queued, queued * SIZE)


def ask(
    tiers: list[int], *outlooks: TierLoad, prefill: Prefill | None = PREFILL, **other: float
) -> CostQuery:
    sources = [KeySource(t, SIZE if t else 0, (i + 1) * CHUNK) for i, t in enumerate(tiers)]
    values = {"start_tokens": 0, "prompt_tokens": len(tiers) * CHUNK, "limit_seconds": 5.0} | other
    return CostQuery(sources, (RAM, *outlooks), prefill=prefill, **values)  # type: ignore[arg-type]


def test_a_tier_faster_than_recomputing_is_loaded_whole() -> None:
    decision = choose_by_cost(ask([1] * 32, tier(4)))
    assert decision.chosen is not None
    assert (decision.chosen.keys, decision.chosen.parallel, decision.reason) == (
        32,
        0,
        "least_time",
    )
    assert decision.chosen.ready_seconds == pytest.approx(32 * CHUNK_SECONDS / 4)


def test_a_tier_slower_than_recomputing_is_not_loaded() -> None:
    decision = choose_by_cost(ask([1] * 32, tier(0.9)))
    assert decision.chosen is None
    assert decision.reason == "recomputing_is_faster"
    assert decision.too_slow == (1,)


def test_the_part_in_ram_is_loaded_where_the_rest_is_not_worth_it() -> None:
    decision = choose_by_cost(ask([0] * 10 + [1] * 10, tier(0.9)))
    assert decision.chosen is not None
    assert (decision.chosen.keys, decision.chosen.tiers, decision.too_slow) == (10, (0,), (1,))


def test_a_fast_tier_is_used_up_to_where_a_slow_one_begins() -> None:
    decision = choose_by_cost(ask([1] * 16 + [2] * 16, tier(10), tier(0.5)))
    assert decision.chosen is not None
    assert (decision.chosen.keys, decision.too_slow) == (16, (2,))


def test_tiers_deliver_at_the_same_time() -> None:
    decision = choose_by_cost(ask([1] * 16 + [2] * 16, tier(4), tier(4)))
    assert decision.chosen is not None
    assert decision.chosen.ready_seconds == pytest.approx(16 * CHUNK_SECONDS / 4)


def test_queued_reads_of_a_tier_count() -> None:
    assert choose_by_cost(ask([1] * 16, tier(4))).chosen is not None
    assert choose_by_cost(ask([1] * 16, tier(4, queued=100))).chosen is None


def test_a_tier_just_faster_than_recomputing_is_read_in_stages_that_extend_the_deadline() -> None:
    decision = choose_by_cost(ask([1] * 8, tier(1.2)))
    assert decision.chosen is not None
    assert (decision.chosen.keys, decision.chosen.parallel, decision.chosen.cut) == (8, 4, False)
    # Where attention dominates, the first half of a prompt is a quarter of the work, and buys a
    # quarter of the time.
    attention = Prefill(0.0, 25e-6 / (8 * CHUNK))
    decision = choose_by_cost(ask([1] * 8, tier(1.2), prefill=attention))
    assert decision.chosen is not None
    assert (decision.chosen.keys, decision.chosen.parallel, decision.chosen.cut) == (8, 2, False)


def test_a_load_that_delivers_nothing_before_the_deadline_is_not_started() -> None:
    # A tier that has not answered for half of the time to recompute may be slow or may hang.
    slow_to_start = tier(math.inf, latency=16 * CHUNK_SECONDS * 0.8)
    assert choose_by_cost(ask([1] * 8, slow_to_start)).chosen is None
    assert choose_by_cost(ask([1] * 32, slow_to_start, limit_seconds=600.0)).chosen is None


def test_a_tier_that_varies_needs_a_larger_margin_to_the_deadline() -> None:
    keys, near = [1], tier(2.2)
    assert choose_by_cost(ask(keys, near)).chosen is not None
    assert choose_by_cost(ask(keys, tier(2.2, spread=0.1))).chosen is None


def test_weights_favour_one_tier_but_never_a_load_that_loses() -> None:
    for weight in (100, 10_000):
        assert choose_by_cost(ask([1] * 32, tier(0.9, weight=weight))).chosen is None
    assert choose_by_cost(ask([1] * 32, tier(1.5))).chosen is not None
    assert choose_by_cost(ask([1] * 32, tier(1.5, weight=50))).chosen is None


def test_load_timeout_seconds_limits_the_deadline() -> None:
    assert choose_by_cost(ask([1] * 400, tier(4), limit_seconds=0.9)).chosen is not None
    cut = choose_by_cost(ask([1] * 400, tier(4, threads=256), limit_seconds=0.3))
    assert cut.chosen is None or cut.chosen.cut


def test_without_an_estimate_everything_is_loaded() -> None:
    decision = choose_by_cost(ask([0, 1, 1, 2], tier(0.01), tier(0.01), prefill=None))
    assert decision.chosen is not None
    assert (decision.chosen.keys, decision.reason) == (4, "longest_without_estimate")


def test_a_tier_without_an_estimate_is_tried() -> None:
    decision = choose_by_cost(ask([1] * 8, TierLoad(estimate=None)))
    assert decision.chosen is not None
    assert (decision.chosen.keys, decision.reason) == (8, "tier_without_estimate")


def test_too_few_tokens_are_not_loaded() -> None:
    decision = choose_by_cost(ask([1], tier(100), min_tokens=512))
    assert (decision.chosen, decision.reason) == (None, "below_min_load_tokens")
    assert choose_by_cost(ask([1, 1], tier(100), min_tokens=512)).chosen is not None


def test_a_prefix_that_changes_its_tier_at_every_key_is_decided_on_too() -> None:
    decision = choose_by_cost(ask([1, 0] * 500, tier(4), limit_seconds=60.0))
    assert decision.chosen is not None
    assert decision.chosen.keys == 1_000
    assert len(decision.runners_up) < MAX_CANDIDATES


def test_the_decision_can_be_read() -> None:
    decision = choose_by_cost(ask([0] * 4 + [1] * 4, tier(4)))
    assert decision.explain(NAMES) == (
        "2048 tokens from ram+disk (ready in 6.4 ms): least_time; "
        "instead of 1024 tokens from ram (ready in 25.6 ms); "
        "recomputing (51.2 ms)"
    )
    assert choose_by_cost(ask([1] * 4, tier(0.5))).explain(NAMES) == (
        "nothing (25.6 ms): recomputing_is_faster; "
        "instead of 1024 tokens from disk (ready in 38.4 ms, cut by the deadline)"
    )


tiers_and_speeds = st.tuples(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.floats(0.01, 100),
    st.floats(0.01, 100),
    st.floats(0, 0.2),
    st.integers(1, 10_000),
    st.integers(0, 20),
)


@given(tiers_and_speeds, st.floats(0, 1e-9))
def test_nothing_chosen_is_expected_to_lose_to_recomputing(
    drawn: tuple[list[int], float, float, float, int, int], beta: float
) -> None:
    keys, first, second, latency, weight, queued = drawn
    prefill = Prefill(25e-6, beta)
    question = ask(keys, tier(first, latency, weight, queued=queued), tier(second), prefill=prefill)
    decision = choose_by_cost(question)
    recompute = prefill.seconds(0, question.prompt_tokens)
    if decision.chosen is not None:
        assert decision.chosen.ready_seconds < recompute
    assert choose_by_cost(question) == decision


@given(
    start=st.integers(0, 10_000),
    spans=st.lists(st.integers(1, 4_000), min_size=1, max_size=20),
    stop=st.integers(0, 20),
    alpha=st.floats(1e-7, 1e-2),
    beta=st.floats(0, 1e-6),
    limit=st.floats(0.001, 600),
)
def test_a_wait_ended_by_the_deadline_costs_at_most_half_of_the_recomputing_time(
    start: int, spans: list[int], stop: int, alpha: float, beta: float, limit: float
) -> None:
    prefill = Prefill(alpha, beta)
    end = start + sum(spans)
    arrived = start + sum(spans[:stop])
    clock = LoadDeadline(limit, start, end, prefill)
    wait = clock.seconds(arrived)
    assert wait <= limit
    assert wait + prefill.seconds(arrived, end) <= 1.5 * prefill.seconds(start, end) * (1 + 1e-9)
    assert clock.seconds(0) <= 0.5 * prefill.seconds(start, end) * (1 + 1e-9)


def test_without_an_estimate_the_deadline_is_load_timeout_seconds() -> None:
    assert LoadDeadline(5.0).seconds(0) == LoadDeadline(5.0).seconds(10_000) == 5.0


def test_ram_costs_nothing() -> None:
    assert IMMEDIATE.seconds(3, 1 << 40) == 0.0
