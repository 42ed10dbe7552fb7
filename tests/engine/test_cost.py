"""Selection by cost: measured prefill speed reaches tierd, and bounds what a bad tier costs."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.believed_costs import BELIEVE, MEASURE

from kvtier.config.models import Daemon, Selection
from kvtier.harness.engine_requests import ReferenceEngine
from kvtier.harness.engine_testbed import CHUNK_TOKENS, EngineOptions, EngineTestbed
from kvtier.harness.tiny_model import prompt

CHUNKS = 16
LOAD_TIMEOUT_SECONDS = 60


class CostCase(EngineTestbed):
    """Tells how the daemon decided."""

    def selections(self) -> dict[str, int]:
        """How often the daemon decided, by reason."""
        found = {}
        for name, value in self.daemon_metrics().items():
            if value and name.startswith("kvtier_selections_total{"):
                found[name.split('reason="')[1].split('"')[0]] = int(value)
        return found


@pytest.fixture(scope="module")
def cost(model: Path, payload: Path, scratch: Path) -> Iterator[CostCase]:
    tuning = EngineOptions(
        daemon=Daemon.SIDECAR,
        persistence="Process",
        load_timeout_seconds=LOAD_TIMEOUT_SECONDS,
        selection=Selection.COST,
    )
    case = CostCase(scratch / "cost", model, payload, tuning)
    try:
        case.start_daemon()
        case.start()
        case.wait_attached()
        yield case
    finally:
        case.close()


@pytest.fixture(scope="module")
def stored(cost: CostCase, plain: ReferenceEngine) -> list[list[int]]:
    """Prompts from which the engine measured its prefill speed, and which are now in files only."""
    prompts = [prompt(CHUNKS * CHUNK_TOKENS + 5, 700 + i) for i in range(6)]
    for tokens in prompts:
        assert cost.requests().run(tokens) == plain.tokens(tokens)
    cost.settle_stores()
    cost.restart_daemon(signal.SIGKILL)
    cost.wait_attached()
    cost.empty_gpu_cache()
    return prompts


def test_tierd_decides_with_the_prefill_speed_that_the_engine_measured(
    cost: CostCase, plain: ReferenceEngine, stored: list[list[int]]
) -> None:
    assert cost.requests().run(stored[0]) == plain.tokens(stored[0])
    cost.wait_snapshot()
    cost.wait_for(lambda: sum(cost.selections().values()) >= 1, "no decision is counted")
    reasons = cost.selections()
    assert "longest_without_estimate" not in reasons
    assert set(reasons) <= {"tier_without_estimate", "least_time", "recomputing_is_faster"}


def test_a_load_that_begins_before_all_of_it_has_arrived_gives_the_same_tokens(
    cost: CostCase, plain: ReferenceEngine, stored: list[list[int]]
) -> None:
    """Four chunks arrive at once, and the others half a second later, while the engine copies the
    first ones."""
    cost.drive("call", function=BELIEVE)
    try:
        # tierd measures how fast the tier is.
        assert cost.requests().run(stored[5]) == plain.tokens(stored[5])
        cost.set_faults(read={"delay_seconds": 0.5, "delay_after": 4})
        early = cost.daemon_events("promotions_answered_early")
        with cost.loads("disk") as loads:
            assert cost.requests().run(stored[4]) == plain.tokens(stored[4])
        cost.wait_for(
            lambda: cost.daemon_events("promotions_answered_early") == early + 1,
            "not answered early",
        )
        assert loads.tokens == CHUNKS * CHUNK_TOKENS
    finally:
        cost.set_faults()
        cost.drive("call", function=MEASURE)


def test_a_hung_tier_costs_a_fraction_of_its_timeout(
    cost: CostCase, plain: ReferenceEngine, stored: list[list[int]]
) -> None:
    cost.set_faults(read={"hang": True})
    expected = [plain.tokens(tokens) for tokens in stored[1:4]]
    began = time.monotonic()
    assert [cost.requests().run(tokens) for tokens in stored[1:4]] == expected
    # Computing such a prompt takes a fraction of a second on any machine.
    assert time.monotonic() - began < LOAD_TIMEOUT_SECONDS / 2
