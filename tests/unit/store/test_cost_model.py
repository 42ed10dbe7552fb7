"""The cost model: prefill speed and tier throughput, as measured while serving."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.store.cost_model import (
    MIN_LOADS,
    MIN_STEP_TOKENS,
    MIN_STEPS,
    Prefill,
    PrefillModel,
    TierModel,
)

H200 = Prefill(23e-6, 2.1e-10)
MIB = 1 << 20


def steps(
    model: PrefillModel, engine: Prefill, prompts: list[int], step: int = 2_048, noise: float = 1.0
) -> None:
    """Chunked prefill of these prompts, one after another."""
    for prompt in prompts:
        for start in range(0, prompt, step):
            end = min(prompt, start + step)
            model.observe([(start, end)], engine.seconds(start, end) * noise)


def read(model: TierModel, now: float, reads: int, size: int, seconds: float) -> float:
    """One load: all its reads end ``seconds`` later. Returns that time."""
    batch = model.begin(now)
    for _ in range(reads):
        model.submitted(batch, size)
    for _ in range(reads):
        model.ended(batch, now + seconds, size, True)
    return now + seconds


@given(
    alpha=st.floats(1e-6, 1e-3),
    share=st.floats(0, 1e-4),
    prompts=st.lists(st.integers(3_000, 40_000), min_size=2, max_size=5, unique=True),
)
def test_an_undisturbed_engine_is_measured_exactly(
    alpha: float, share: float, prompts: list[int]
) -> None:
    model = PrefillModel()
    engine = Prefill(alpha, alpha * share)
    steps(model, engine, prompts)
    found = model.estimate()
    if found is None:
        return
    assert found.seconds(1_024, 20_000) == pytest.approx(engine.seconds(1_024, 20_000), rel=1e-6)


def test_before_enough_steps_there_is_no_estimate() -> None:
    model = PrefillModel()
    steps(model, H200, [2_048] * (MIN_STEPS - 1))
    assert model.estimate() is None
    steps(model, H200, [2_048])
    assert model.estimate() is not None


def test_steps_of_a_few_tokens_say_nothing_about_prefill() -> None:
    model = PrefillModel()
    for _ in range(20):
        model.observe([(0, MIN_STEP_TOKENS - 1)], 0.01)
    assert model.estimate() is None


def test_a_few_disturbed_steps_do_not_move_the_estimate() -> None:
    model = PrefillModel()
    for i in range(6):
        steps(model, H200, [2_048 * (i + 2)])
        steps(model, H200, [2_048], noise=40.0)
    found = model.estimate()
    assert found is not None
    assert found.seconds(0, 8_192) == pytest.approx(H200.seconds(0, 8_192), rel=0.02)


def test_an_engine_that_has_become_slower_is_noticed_within_a_dozen_steps() -> None:
    model = PrefillModel()
    steps(model, H200, [8_192, 16_384, 30_000])
    slower = Prefill(H200.alpha * 5, H200.beta * 5)
    steps(model, slower, [8_192, 10_240, 8_192])
    found = model.estimate()
    assert found is not None
    assert found.seconds(0, 8_192) == pytest.approx(slower.seconds(0, 8_192), rel=0.05)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 10_000), st.integers(1, 5_000), st.floats(1e-6, 1e3, allow_nan=False)
        ),
        min_size=1,
        max_size=40,
    )
)
def test_coefficients_are_never_negative_for_any_measurement(
    measured: list[tuple[int, int, float]],
) -> None:
    model = PrefillModel()
    for start, tokens, seconds in measured:
        model.observe([(start, start + tokens)], seconds)
    found = model.estimate()
    assert found is None or found.usable


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_an_invalid_time_is_ignored(seconds: float) -> None:
    model = PrefillModel()
    for _ in range(10):
        model.observe([(0, 1_000)], seconds)
    assert model.estimate() is None


@given(latency=st.floats(1e-4, 0.1), bandwidth=st.floats(1e6, 1e10))
def test_loads_of_different_sizes_separate_latency_from_bandwidth(
    latency: float, bandwidth: float
) -> None:
    model = TierModel(threads=8)
    now = 0.0
    for reads in (2, 16, 5, 40):
        rounds = -(-reads // 8)
        now = read(model, now, reads, 4 * MIB, latency * rounds + reads * 4 * MIB / bandwidth)
    found = model.estimate(now)
    assert found is not None
    expected = latency * 3 + 24 * 4 * MIB / bandwidth
    assert found.seconds(3, 24 * 4 * MIB) == pytest.approx(expected, rel=1e-3)
    assert found.spread < 1e-3


def test_before_enough_loads_there_is_no_estimate() -> None:
    model = TierModel(threads=8)
    now = 0.0
    for _ in range(MIN_LOADS - 1):
        now = read(model, now, 4, MIB, 0.1)
    assert model.estimate(now) is None
    now = read(model, now, 4, MIB, 0.1)
    assert model.estimate(now) is not None


def test_one_stalled_load_does_not_change_the_estimate() -> None:
    model = TierModel(threads=8)
    now = 0.0
    for seconds in (0.1, 0.1, 0.1, 0.1, 9.0):
        now = read(model, now, 4, MIB, seconds)
    found = model.estimate(now)
    assert found is not None
    assert found.seconds(1, 4 * MIB) == pytest.approx(0.1, rel=0.01)


def test_a_tier_that_stays_slow_is_slow_after_a_handful_of_loads() -> None:
    model = TierModel(threads=8)
    now = 0.0
    for _ in range(10):
        now = read(model, now, 4, MIB, 0.1)
    for _ in range(4):
        now = read(model, now, 4, MIB, 1.0)
    found = model.estimate(now)
    assert found is not None
    assert found.seconds(1, 4 * MIB) == pytest.approx(1.0, rel=0.05)


def test_a_load_that_was_given_up_counts_with_its_true_end() -> None:
    model = TierModel(threads=8)
    started = [model.begin(i * 10.0) for i in range(3)]
    for batch in started:
        model.submitted(batch, MIB)
    for batch in started:
        model.ended(batch, batch.began_at + 60.0, MIB, True)
    found = model.estimate(100.0)
    assert found is not None
    assert found.seconds(1, MIB) == pytest.approx(60.0)


def test_loads_that_hang_count_with_their_age() -> None:
    model = TierModel(threads=8)
    now = 0.0
    for _ in range(5):
        now = read(model, now, 4, MIB, 0.01)
    for _ in range(5):
        model.submitted(model.begin(now), 4 * MIB)
    before = model.estimate(now)
    after = model.estimate(now + 7.0)
    assert before is not None
    assert after is not None
    assert before.seconds(1, 4 * MIB) == pytest.approx(0.01, rel=0.05)
    assert after.seconds(1, 4 * MIB) == pytest.approx(7.0, rel=0.05)


def test_a_tier_that_hangs_from_the_beginning_gets_an_estimate_too() -> None:
    model = TierModel(threads=8)
    for _ in range(MIN_LOADS):
        model.submitted(model.begin(0.0), MIB)
    assert model.estimate(0.5) is None
    found = model.estimate(20.0)
    assert found is not None
    assert found.seconds(1, MIB) == pytest.approx(20.0)


def test_reads_that_fail_at_once_do_not_make_a_tier_look_fast() -> None:
    model = TierModel(threads=8)
    now = 0.0
    for _ in range(5):
        now = read(model, now, 4, MIB, 1.0)
    for _ in range(10):
        batch = model.begin(now)
        model.submitted(batch, MIB)
        model.ended(batch, now + 0.001, MIB, False)
    found = model.estimate(now)
    assert found is not None
    assert found.seconds(1, 4 * MIB) == pytest.approx(1.0)
    assert model.queued_reads == model.queued_bytes == 0


def test_two_concurrent_loads_share_the_bandwidth_of_the_tier() -> None:
    model = TierModel(threads=8)
    for i in range(4):
        first, second = model.begin(i * 10.0), model.begin(i * 10.0)
        for batch in (first, second):
            for _ in range(4):
                model.submitted(batch, MIB)
        assert model.queued_reads == 8
        for batch in (first, second):
            for _ in range(4):
                model.ended(batch, i * 10.0 + 2.0, MIB, True)
    found = model.estimate(100.0)
    assert found is not None
    # Eight reads took two seconds; that four of them belong to another batch does not make the tier
    # slower.
    assert found.seconds(1, 8 * MIB) == pytest.approx(2.0, rel=0.3)
