"""Under which conditions chunks may be stored, and by which word each obstacle is counted."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.scheduler.scheduler_testbed import SchedulerTestbed, topology

from kvtier.engines.common.hints import INVALID_HINTS, NO_HINTS, RequestHints
from kvtier.engines.common.request_state import RequestState
from kvtier.engines.common.store_conditions import PASSING_REASONS, StoreConditions
from kvtier.tierd.wire import LiveSettings


@pytest.fixture
def testbed() -> SchedulerTestbed:
    """Attached, as an engine that has made a step."""
    testbed = SchedulerTestbed()
    testbed.build()
    return testbed


def conditions(testbed: SchedulerTestbed) -> StoreConditions:
    found: StoreConditions = testbed.scheduler.stores.conditions
    return found


def state(testbed: SchedulerTestbed, hints: RequestHints = NO_HINTS) -> RequestState:
    request: Any = testbed.request(300)
    return RequestState(request, hints)


def test_nothing_blocks_a_request_without_hints(testbed: SchedulerTestbed) -> None:
    assert conditions(testbed).blocked_reason() == ""
    assert conditions(testbed).blocked_reason(state(testbed)) == ""
    assert conditions(testbed).may_be_stored(state(testbed))


@pytest.mark.parametrize(
    ("hints", "reason"),
    [
        (INVALID_HINTS, "invalid_hints"),
        (RequestHints(skip_store=True), "skip_store"),
        (RequestHints(tiers=frozenset({"no such tier"})), "tiers"),
        (RequestHints(tiers=frozenset({"disk"})), ""),
        (RequestHints(skip_load=True), ""),
    ],
)
def test_a_request_can_exclude_itself(
    testbed: SchedulerTestbed, hints: RequestHints, reason: str
) -> None:
    request = state(testbed, hints)
    assert conditions(testbed).blocked_reason(request) == reason
    assert conditions(testbed).may_be_stored(request) == (not reason)
    assert conditions(testbed).blocked_reason() == "", "others are stored"


def test_a_short_prompt_is_not_stored(testbed: SchedulerTestbed) -> None:
    live = topology().live.model_copy(update={"min_store_tokens": 301})
    testbed.client.sink(LiveSettings(settings=live.model_dump_json(by_alias=True)))
    testbed.build()
    assert conditions(testbed).blocked_reason(state(testbed)) == "short_prompt"
    assert not conditions(testbed).may_be_stored(state(testbed))
    assert conditions(testbed).blocked_reason() == ""


def test_without_a_block_pool_nothing_is_stored(testbed: SchedulerTestbed) -> None:
    testbed.scheduler.stores.blocks.pool = None
    assert conditions(testbed).blocked_reason() == "no_block_pool"


def test_without_a_namespace_nothing_is_stored(testbed: SchedulerTestbed) -> None:
    testbed.client.lose()
    testbed.build()
    assert conditions(testbed).blocked_reason() == "not_attached"
    testbed.client.welcome(epoch=2)
    testbed.client.ready(snapshot=False)
    testbed.build()
    assert conditions(testbed).blocked_reason() == "replica_incomplete"
    testbed.client.delta(snapshot=True)
    testbed.build()
    assert conditions(testbed).blocked_reason() == ""


def test_a_worker_of_another_epoch_blocks_stores(testbed: SchedulerTestbed) -> None:
    found = conditions(testbed)
    found.worker_epoch = testbed.scheduler.session.epoch + 1
    assert found.blocked_reason() == "worker_not_attached"
    found.worker_epoch = None
    assert found.blocked_reason() == "", "no report yet"


@pytest.mark.parametrize(("stale", "reason"), [(True, "weights_stale"), (False, "weights_unknown")])
def test_a_suspended_namespace_takes_no_stores(
    testbed: SchedulerTestbed, stale: bool, reason: str
) -> None:
    session = testbed.scheduler.session
    session.suspended, session.stale_weights = True, stale
    assert conditions(testbed).blocked_reason() == reason
    assert (reason in PASSING_REASONS) == (not stale)
