"""Requests whose prefix the replica lacks wait for a lookup, for a moment and once."""

from __future__ import annotations

import pytest
from tests.unit.scheduler.scheduler_testbed import (
    CHUNK,
    DISK,
    NFS,
    RAM,
    SchedulerTestbed,
    topology,
)

from kvtier.config.models import Selection
from kvtier.engines.vllm.scheduler_loads import PROMOTION_GRACE_SECONDS
from kvtier.tierd.wire import Cancel, Promote, Usable

ALL = RAM | DISK | NFS
LOOKUP_SECONDS = 0.05


@pytest.fixture
def asking(testbed: SchedulerTestbed) -> SchedulerTestbed:
    """tierd says that the NFS tier may hold more than the replica."""
    testbed.client.sink(Usable(bits=ALL, asked_bits=NFS))
    return testbed


def test_a_miss_is_looked_up_once(asking: SchedulerTestbed) -> None:
    request = asking.request(4 * CHUNK + 5)
    assert asking.ask(request) is None
    (promote,) = asking.client.take(Promote)
    assert promote.look_up
    assert len(promote.keys) == 4
    assert asking.ask(request) is None
    asking.client.promoted(promote.promotion, 0, "absent")
    assert asking.ask(request) == 0
    asking.now += 1
    assert asking.ask(request) == 0
    assert asking.client.sent == []
    assert asking.scheduler.loads.in_flight.counts.promotions == {"absent": 1}


def test_what_is_found_is_loaded(asking: SchedulerTestbed) -> None:
    request = asking.request(4 * CHUNK + 5)
    asking.hold(request.keys(0, 1), RAM)
    assert asking.ask(request) is None
    (promote,) = asking.client.take(Promote)
    assert len(promote.keys) == 4
    asking.client.promoted(promote.promotion, 3)
    assert asking.ask(request) == 3 * CHUNK


def test_a_tierd_that_does_not_answer_costs_the_time_of_a_lookup(
    asking: SchedulerTestbed,
) -> None:
    request = asking.request(4 * CHUNK + 5)
    asking.hold(request.keys(0, 2), RAM)
    assert asking.ask(request) is None
    (promote,) = asking.client.take(Promote)
    asking.now += LOOKUP_SECONDS + PROMOTION_GRACE_SECONDS + 0.001
    assert asking.ask(request) == 2 * CHUNK
    assert [cancel.promotion for cancel in asking.client.take(Cancel)] == [promote.promotion]


def test_once_the_first_key_is_found_the_request_waits_as_for_any_promotion(
    asking: SchedulerTestbed,
) -> None:
    request = asking.request(4 * CHUNK + 5)
    assert asking.ask(request) is None
    (promote,) = asking.client.take(Promote)
    asking.hold(request.keys(0, 1), NFS)
    asking.now += 5
    assert asking.ask(request) is None
    asking.client.promoted(promote.promotion, 2)
    assert asking.ask(request) == 2 * CHUNK


def test_a_known_part_in_a_tier_is_promoted_with_what_is_looked_up(
    asking: SchedulerTestbed,
) -> None:
    request = asking.request(4 * CHUNK + 5)
    asking.hold(request.keys(0, 2), DISK)
    assert asking.ask(request) is None
    (promote,) = asking.client.take(Promote)
    assert promote.look_up
    assert len(promote.keys) == 4
    asking.now += 1
    assert asking.ask(request) is None


@pytest.mark.parametrize("bits", [0, DISK])
def test_without_a_tier_to_ask_a_miss_is_answered_at_once(
    testbed: SchedulerTestbed, bits: int
) -> None:
    testbed.client.sink(Usable(bits=RAM | DISK, asked_bits=NFS))
    request = testbed.request(4 * CHUNK + 5)
    testbed.hold(request.keys(0, 1), bits or RAM)
    if bits:
        assert testbed.ask(request) is None
        assert not testbed.client.take(Promote)[0].look_up
    else:
        assert testbed.ask(request) == CHUNK
        assert testbed.client.take(Promote) == []


def test_a_prompt_below_the_minimum_is_not_looked_up() -> None:
    testbed = SchedulerTestbed(topology(min_load_tokens=5 * CHUNK))
    testbed.client.sink(Usable(bits=ALL, asked_bits=NFS))
    assert testbed.ask(testbed.request(4 * CHUNK + 5)) == 0
    assert testbed.client.take(Promote) == []


def test_no_lookup_that_takes_longer_than_a_share_of_recomputing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvtier.store.cost_model import Prefill

    testbed = SchedulerTestbed(topology(selection=Selection.COST))
    testbed.client.sink(Usable(bits=ALL, asked_bits=NFS))
    lookups = testbed.scheduler.loads._lookups
    for seconds, worth in ((0.01, False), (0.1, True)):
        prefill = Prefill(seconds / (4 * CHUNK), 0.0)
        monkeypatch.setattr(lookups._prefill, "estimate", lambda p=prefill: p)
        testbed.client.sent.clear()
        waits = testbed.ask(testbed.request(4 * CHUNK + 5)) is None
        assert waits is worth
        assert bool(testbed.client.take(Promote)) is worth
        if worth:
            assert lookups.seconds(0, 0, 4) == pytest.approx(0.005)
