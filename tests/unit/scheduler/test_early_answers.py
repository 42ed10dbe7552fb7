"""Requests that are admitted while the end of their prefix is still being read."""

from __future__ import annotations

import pytest
from tests.unit.scheduler.scheduler_testbed import (
    CHUNK,
    DISK,
    SLOT_BYTES,
    FakeRequest,
    SchedulerTestbed,
    topology,
)

from kvtier.config.models import Selection
from kvtier.engines.common.jobs import LoadResult
from kvtier.store.generations import pack_location
from kvtier.tierd.wire import Arriving, Cancel, Load, LoadReleased, Promote

CHUNKS = 4


def waiting(testbed: SchedulerTestbed, request_id: str = "r") -> tuple[FakeRequest, int]:
    request = testbed.request(CHUNKS * CHUNK + 5, request_id)
    testbed.hold(request.keys(0, CHUNKS), DISK)
    assert testbed.ask(request) is None
    (promote,) = testbed.client.take(Promote)
    return request, promote.promotion


def arriving(
    testbed: SchedulerTestbed, promotion: int, first: int, count: int, predicted: int = CHUNKS
) -> None:
    testbed.client.sink(
        Arriving(
            promotion=promotion,
            predicted=predicted,
            first=first,
            tiers=(1,) * count,
            locations=tuple(pack_location(i * SLOT_BYTES, 6) for i in range(first, first + count)),
        )
    )


def admitted(testbed: SchedulerTestbed, named: int = 1) -> tuple[FakeRequest, int, int]:
    """A request that is loading ``named`` of ``CHUNKS`` keys, its promotion and its load."""
    request, promotion = waiting(testbed)
    arriving(testbed, promotion, 0, named)
    assert testbed.ask(request) == CHUNKS * CHUNK
    testbed.admit(request, 0, CHUNKS * CHUNK)
    (job,) = testbed.build().loads
    assert (len(job.runs), len(job.slots), job.arriving) == (CHUNKS, named, True)
    return request, promotion, job.load


def done(testbed: SchedulerTestbed, load: int, keys: int, reason: str = "") -> None:
    testbed.report(loads=[LoadResult(load, "r", keys, reason)])


def test_an_early_answer_admits_the_request_and_the_rest_follows(testbed: SchedulerTestbed) -> None:
    request, promotion, load = admitted(testbed)
    (message,) = testbed.client.take(Load)
    assert (message.promotion, len(message.keys)) == (promotion, CHUNKS)
    arriving(testbed, promotion, 1, 2)
    (keys,) = testbed.build().arrived_keys
    assert (keys.load, keys.slots, keys.last) == (load, (SLOT_BYTES, 2 * SLOT_BYTES), False)
    testbed.client.promoted(promotion, CHUNKS)
    (keys,) = testbed.build().arrived_keys
    assert (keys.load, keys.slots, keys.last) == (load, (3 * SLOT_BYTES,), True)
    assert testbed.build().arrived_keys == ()
    assert testbed.client.take(Cancel) == []
    done(testbed, load, CHUNKS)
    assert [each.load for each in testbed.client.take(LoadReleased)] == [load]
    assert testbed.scheduler.loads.in_flight.loaded_tokens[1] == CHUNKS * CHUNK
    assert testbed.scheduler.loads.in_flight.counts.promotions["early"] == 1
    assert request.num_computed_tokens == CHUNKS * CHUNK


@pytest.mark.parametrize("usable", [0, 1, 2])
def test_what_does_not_arrive_fails_the_load_from_there_on(
    testbed: SchedulerTestbed, usable: int
) -> None:
    """Zero: the promotion was cancelled, or tierd breaks its word."""
    request, promotion, load = admitted(testbed)
    testbed.client.promoted(promotion, usable, "partial" if usable else "cancelled")
    (keys,) = testbed.build().arrived_keys
    assert (len(keys.slots), keys.last) == (max(usable - 1, 0), True)
    done(testbed, load, max(usable, 1), "not_arrived")
    assert testbed.scheduler.loads.in_flight.counts.failures["not_arrived"] == 1
    request.num_computed_tokens = 0
    answer = testbed.ask(request)
    assert answer is None or answer < CHUNKS * CHUNK


def test_an_early_answer_that_is_not_taken_up_becomes_the_promotions_end(
    testbed: SchedulerTestbed,
) -> None:
    request, promotion = waiting(testbed)
    arriving(testbed, promotion, 0, 1)
    assert testbed.ask(request) == CHUNKS * CHUNK
    arriving(testbed, promotion, 1, 1)
    assert testbed.ask(request) == CHUNKS * CHUNK
    testbed.client.promoted(promotion, 2, "partial")
    assert testbed.ask(request) == 2 * CHUNK
    testbed.admit(request, 0, 2 * CHUNK)
    (job,) = testbed.build().loads
    assert (len(job.slots), job.arriving) == (2, False)


def test_a_request_that_ends_while_keys_arrive_cancels_its_load(testbed: SchedulerTestbed) -> None:
    request, promotion, load = admitted(testbed)
    testbed.finish(request)
    assert testbed.build().cancelled_loads == [load]
    arriving(testbed, promotion, 1, 2)
    testbed.client.promoted(promotion, CHUNKS)
    testbed.build()
    done(testbed, load, 1, "cancelled")
    assert [each.load for each in testbed.client.take(LoadReleased)] == [load]
    assert len(testbed.scheduler.loads.in_flight) == 0
    testbed.client.promoted(promotion, CHUNKS)
    assert testbed.build().arrived_keys == ()


def test_losing_tierd_leaves_nothing_of_what_was_arriving(testbed: SchedulerTestbed) -> None:
    _, promotion, load = admitted(testbed)
    arriving(testbed, promotion, 1, 1)
    testbed.client.lose()
    assert testbed.build().arrived_keys == ()
    done(testbed, load, 1, "lost")
    testbed.client.welcome(epoch=2)
    testbed.client.ready()
    testbed.client.promoted(promotion, CHUNKS)
    assert testbed.build().arrived_keys == ()
    assert len(testbed.scheduler.loads.in_flight) == 0


def test_messages_of_unknown_or_wrong_promotions_are_ignored(testbed: SchedulerTestbed) -> None:
    request, promotion = waiting(testbed)
    arriving(testbed, promotion + 7, 0, 2)
    arriving(testbed, promotion, 2, 1)
    assert testbed.ask(request) is None
    arriving(testbed, promotion, 0, 1, predicted=99)
    assert testbed.ask(request) == CHUNKS * CHUNK


def test_tierd_is_told_how_fast_copies_are_once_that_is_known() -> None:
    testbed = SchedulerTestbed(topology(selection=Selection.COST))
    request = testbed.request(CHUNKS * CHUNK + 5)
    testbed.hold(request.keys(0, CHUNKS), DISK)
    testbed.ask(request)
    (promote,) = testbed.client.take(Promote)
    assert promote.copy_seconds == 0.0
    for _ in range(16):
        testbed.scheduler.loads.in_flight.copies.observe(1_000, 0.5, testbed.now)
    other = testbed.request(CHUNKS * CHUNK + 5, "other", seed=1)
    testbed.hold(other.keys(0, CHUNKS), DISK)
    testbed.ask(other)
    (promote,) = testbed.client.take(Promote)
    assert promote.copy_seconds == pytest.approx(CHUNK * 0.5 / 1_000)
