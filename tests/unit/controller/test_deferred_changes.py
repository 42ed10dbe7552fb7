"""Status writes: major changes are written at once, changes of bytes and messages are deferred."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.pods import injected_pod, running, status_document, tier_document
from tests.unit.controller.builders import condition, status, view_of

from kvtier_operator.api.status import PolicyStatus
from kvtier_operator.controller.status.compute import defer_minor_changes

GIB = 1 << 30


def found(
    state: str = "Healthy",
    *,
    used: int = 0,
    hits: int = 0,
    error: str = "",
    previous: PolicyStatus | None = None,
    pods: int = 1,
    prompts: int = 100,
    **more: Any,
) -> PolicyStatus:
    tier = tier_document(
        "ram", state, usedBytes=used, capacityBytes=GIB, hitTokens=hits, lastError=error
    )
    document = status_document(tier, promptTokens=prompts, **more)
    views = [view_of(running(injected_pod(f"chat-{index}")), document) for index in range(pods)]
    return status(*views, previous=previous)


def test_the_first_status_is_written_unchanged() -> None:
    after = found(used=GIB // 2)
    assert defer_minor_changes(None, after, 0, 300) == (after, None)


@pytest.mark.parametrize("changes", [{"used": GIB // 2, "hits": 10}, {"hits": 50}, {"hits": 0}])
def test_bytes_and_percentages_wait_for_the_next_period(changes: dict[str, Any]) -> None:
    before = found(hits=10)
    after = found(previous=before, **changes)
    assert after != before
    assert defer_minor_changes(before, after, 100, 300) == (before, 200)
    assert defer_minor_changes(before, after, 300, 300) == (after, None)


@pytest.mark.parametrize("prompts", [0, 100], ids=["without requests", "without hits"])
def test_the_first_hits_are_written_at_once(prompts: int) -> None:
    """A short test has no hits any longer when the next period starts."""
    before = found(prompts=prompts)
    after = found(hits=50, previous=before)
    assert defer_minor_changes(before, after, 0, 300) == (after, None)
    assert defer_minor_changes(after, before, 0, 300) == (after, 300)


def test_intermittent_hits_cost_two_writes_in_five_minutes() -> None:
    in_force, written_at, writes = found(), 0.0, 0
    for now in range(30, 3601, 30):
        fresh = found(hits=50 * (now // 30 % 2), previous=in_force)
        held, _ = defer_minor_changes(in_force, fresh, now - written_at, 300)
        if held != in_force:
            in_force, written_at, writes = held, now, writes + 1
    assert 2 <= writes <= 24


def test_a_change_below_one_step_does_not_change_the_status() -> None:
    before = found(used=GIB // 2)
    assert found(used=GIB // 2 + 1000, previous=before) == before


@pytest.mark.parametrize(
    "changes", [{"state": "BreakerOpen"}, {"pods": 2}, {"generation": 4}, {"sessions": "none"}]
)
def test_conditions_states_and_pod_counts_are_written_at_once(
    changes: dict[str, Any],
) -> None:
    before = found()
    after = found(previous=before, **changes)
    assert defer_minor_changes(before, after, 0, 300) == (after, None)


def test_a_major_change_includes_the_current_bytes() -> None:
    before = found()
    after = found("Degraded", used=GIB // 2, previous=before)
    written, _ = defer_minor_changes(before, after, 0, 300)
    assert written.tiers is not None
    assert written.tiers[0].used_bytes == after.tiers[0].used_bytes  # type: ignore[index]


def test_a_changed_error_message_waits() -> None:
    before = found("Degraded", error="timed out after 5.01 s")
    after = found("Degraded", error="timed out after 5.02 s", previous=before)
    held, wake = defer_minor_changes(before, after, 10, 300)
    assert (held, wake) == (before, 20)
    written, wake = defer_minor_changes(before, after, 31, 300)
    assert "5.02" in condition(written, "TiersHealthy").message
    assert wake is None


def test_an_hour_of_changing_bytes_costs_at_most_twelve_writes() -> None:
    in_force, written_at, writes = found(), 0.0, 0
    for now in range(30, 3601, 30):
        fresh = found(used=GIB * now // 3600, hits=10 + now % 90, previous=in_force)
        held, _ = defer_minor_changes(in_force, fresh, now - written_at, 300)
        if held != in_force:
            in_force, written_at, writes = held, now, writes + 1
    assert writes <= 12
