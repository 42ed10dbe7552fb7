"""Costs that the scheduler side measures, and sends to tierd for selection by cost."""

from __future__ import annotations

import pytest
from tests.unit.scheduler.scheduler_testbed import (
    CHUNK,
    DISK,
    RAM,
    FakeRequest,
    SchedulerTestbed,
    topology,
)

from kvtier.config.models import Selection
from kvtier.engines.common.jobs import LoadResult
from kvtier.engines.vllm.cost_estimates import (
    COPY_SAMPLE_SECONDS,
    COPY_SAMPLES,
    MIN_COPY_SAMPLES,
    CopyEstimator,
)
from kvtier.tierd.wire import Promote

ALPHA = 25e-6


@pytest.fixture
def cost() -> SchedulerTestbed:
    return SchedulerTestbed(topology(selection=Selection.COST))


def prefill(
    testbed: SchedulerTestbed,
    tokens: int = 1_024,
    alpha: float = ALPHA,
    beside: int = 0,
    number: int = 0,
) -> None:
    """A prompt is computed in one step, with some requests that decode beside it."""
    scheduled = {}
    for i in range(beside):
        other = testbed.requests.get(f"other{i}") or testbed.request(
            CHUNK, f"other{i}", seed=500 + i
        )
        testbed.ask(other)
        other.num_computed_tokens = other.num_tokens - 1
        scheduled[other.request_id] = 1
    request = testbed.request(
        tokens, f"p{len(testbed.requests)}", seed=1_000 + number + len(testbed.requests)
    )
    testbed.ask(request)
    testbed.build({request.request_id: tokens, **scheduled})
    testbed.now += tokens * alpha
    testbed.report()


def promoted(testbed: SchedulerTestbed, chunks: int = 4, computed: int = 0) -> Promote:
    request = testbed.request(
        chunks * CHUNK + 5, f"hit{len(testbed.requests)}", seed=900 + len(testbed.requests)
    )
    testbed.hold(request.keys(0, chunks), DISK)
    assert testbed.ask(request, computed) is None
    return testbed.client.take(Promote)[-1]


def test_under_cost_a_promotion_carries_token_ends_and_prefill_cost(cost: SchedulerTestbed) -> None:
    for _ in range(6):
        prefill(cost)
    promote = promoted(cost, computed=CHUNK // 2)
    assert promote.alpha == pytest.approx(ALPHA)
    assert promote.beta == 0
    assert promote.start_tokens == CHUNK // 2
    assert promote.ends == (CHUNK, 2 * CHUNK, 3 * CHUNK, 4 * CHUNK)


def test_without_an_estimate_the_tier_timeout_applies(cost: SchedulerTestbed) -> None:
    promote = promoted(cost)
    assert (promote.alpha, promote.beta, promote.budget_seconds) == (0.0, 0.0, 4)
    assert len(promote.ends) == 4


def test_with_an_estimate_the_wait_is_bounded_by_recomputation(cost: SchedulerTestbed) -> None:
    for _ in range(6):
        prefill(cost)
    assert promoted(cost).budget_seconds == pytest.approx(1.5 * 4 * CHUNK * ALPHA)


def test_under_weighted_a_promotion_carries_no_cost(testbed: SchedulerTestbed) -> None:
    for _ in range(6):
        prefill(testbed)
    promote = promoted(testbed)
    assert (promote.ends, promote.alpha, promote.budget_seconds) == ((), 0.0, 4)


def test_steps_that_mostly_decode_are_not_measured(cost: SchedulerTestbed) -> None:
    for _ in range(6):
        prefill(cost, tokens=100, alpha=1.0, beside=20)
    assert cost.scheduler.prefill.estimate() is None
    for _ in range(6):
        prefill(cost, tokens=1_024, beside=3)
    assert cost.scheduler.prefill.estimate() is not None


def test_a_step_built_ahead_counts_from_the_end_of_the_previous_step(
    cost: SchedulerTestbed,
) -> None:
    requests = [cost.request(1_024, f"r{i}", seed=i + 1) for i in range(8)]
    for request in requests:
        cost.ask(request)
    cost.build({"r0": 1_024})
    for i in range(1, 8):
        cost.build({f"r{i}": 1_024})
        cost.now += 1_024 * ALPHA
        cost.report(step=i)
    found = cost.scheduler.prefill.estimate()
    assert found is not None
    assert found.seconds(0, 1_024) == pytest.approx(1_024 * ALPHA)


def test_steps_that_are_reported_together_are_not_measured(cost: SchedulerTestbed) -> None:
    for i in range(8):
        request = cost.request(1_024, f"r{i}", seed=i + 1)
        cost.ask(request)
        cost.build({f"r{i}": 1_024})
        cost.now += 1.0
        if i % 2:
            cost.report()
    assert cost.scheduler.prefill.estimate() is None


def load(
    testbed: SchedulerTestbed, tokens: int, copy_seconds: float, waited_seconds: float = 0.0
) -> int | None:
    """A hit in RAM, copied in this time after a wait, if it is offered."""
    seconds = waited_seconds + copy_seconds
    request: FakeRequest = testbed.request(
        tokens + 5, f"ram{len(testbed.requests)}", seed=2_000 + len(testbed.requests)
    )
    testbed.hold(request.keys(0, tokens // CHUNK), RAM)
    offered = testbed.ask(request)
    if offered:
        testbed.admit(request, 0, offered)
        (job,) = testbed.build().loads
        testbed.now += seconds
        testbed.report(
            loads=[
                LoadResult(
                    job.load,
                    request.request_id,
                    tokens // CHUNK,
                    "",
                    seconds,
                    copy_seconds,
                )
            ]
        )
    return offered


def test_waiting_for_a_step_does_not_count_as_copy_time(cost: SchedulerTestbed) -> None:
    for _ in range(6):
        prefill(cost)
    for i in range(COPY_SAMPLES + 4):
        tokens = CHUNK * (4 + i)
        # A second of waiting for other loads, and then copies at ten times the speed of computing.
        assert load(cost, tokens, tokens * ALPHA / 10, 1.0) == tokens


def test_ram_is_not_loaded_while_copies_are_slower_than_recomputation(
    cost: SchedulerTestbed,
) -> None:
    for _ in range(6):
        prefill(cost)
    slow = [load(cost, CHUNK * 4, CHUNK * 4 * ALPHA * 3) for _ in range(MIN_COPY_SAMPLES)]
    assert all(slow)
    assert not load(cost, CHUNK * 4, 0.001)
    cost.now += COPY_SAMPLE_SECONDS + 0.1
    assert load(cost, CHUNK * 4, 0.001)


def test_one_bad_stretch_does_not_outweigh_the_usual_speed() -> None:
    copies = CopyEstimator()
    for number in range(8):
        copies.observe(1_000, 0.002 if number % 3 else 5.0, 0.0)
    assert copies.beats_recompute(1_000, 0.01, 0.1)
    copies.observe(1_000, 0.0, 0.0)
    assert copies.beats_recompute(1_000, 0.01, 0.1)
