"""tierd is told of the prefixes of requests that wait in vLLM's queue, and of their end."""

from __future__ import annotations

import pytest
from tests.unit.scheduler.scheduler_testbed import (
    DISK,
    RAM,
    FakeRequest,
    SchedulerTestbed,
    topology,
)

from kvtier.engines.vllm import queued_prefixes
from kvtier.tierd.wire import Cancel, Prefetch, Promote


@pytest.fixture
def testbed() -> SchedulerTestbed:
    return SchedulerTestbed()


def queued(testbed: SchedulerTestbed, name: str, seed: int, bits: int = DISK) -> FakeRequest:
    """A request of four chunks and a bit that has come into the queue."""
    request = testbed.request(300, name, seed)
    testbed.hold(request.keys(0, 4), bits)
    testbed.scheduler.on_new_request(request)  # type: ignore[arg-type]
    return request


def test_the_prefix_of_a_request_that_waits_is_prefetched_once(testbed: SchedulerTestbed) -> None:
    request = queued(testbed, "r", 1)
    testbed.build()
    (message,) = testbed.client.take(Prefetch)
    assert [b"\0" + key for _, key in message.keys] == request.keys(0, 4)
    testbed.build()
    assert testbed.client.take(Prefetch) == []


def test_a_request_that_is_looked_up_in_the_step_of_its_arrival_is_not_prefetched(
    testbed: SchedulerTestbed,
) -> None:
    request = queued(testbed, "r", 1)
    testbed.ask(request)
    testbed.build()
    assert testbed.client.take(Prefetch) == []
    assert testbed.client.take(Cancel) == []


def test_the_lookup_of_a_request_ends_its_prefetch_and_its_promotion_follows(
    testbed: SchedulerTestbed,
) -> None:
    request = queued(testbed, "r", 1)
    testbed.build()
    (message,) = testbed.client.take(Prefetch)
    assert testbed.ask(request) is None
    (cancel,) = testbed.client.take(Cancel)
    (promote,) = testbed.client.take(Promote)
    assert cancel.promotion == message.promotion != promote.promotion
    testbed.ask(request)
    assert testbed.client.take(Cancel) == []


def test_what_arrives_in_ram_meanwhile_is_matched_without_a_promotion(
    testbed: SchedulerTestbed,
) -> None:
    request = queued(testbed, "r", 1)
    testbed.build()
    testbed.hold(request.keys(0, 4), RAM)
    assert testbed.ask(request) == 256
    assert testbed.client.take(Promote) == []


def test_a_request_that_is_gone_ends_its_prefetch(testbed: SchedulerTestbed) -> None:
    request = queued(testbed, "r", 1)
    testbed.build()
    (message,) = testbed.client.take(Prefetch)
    testbed.finish(request, "FINISHED_ABORTED")
    ended = [each.promotion for each in testbed.client.take(Cancel)]
    assert ended == [message.promotion, message.queued]
    assert testbed.scheduler.snapshot()["requests"] == 0


def test_nothing_is_prefetched_that_is_in_ram_or_too_short(testbed: SchedulerTestbed) -> None:
    queued(testbed, "ram", 1, RAM)
    queued(testbed, "nowhere", 2, 0)
    testbed.build()
    assert testbed.client.take(Prefetch) == []
    short = SchedulerTestbed(topology(min_load_tokens=1_000))
    queued(short, "r", 1)
    short.build()
    assert short.client.take(Prefetch) == []


def test_the_first_requests_of_the_queue_come_first_and_others_follow(
    testbed: SchedulerTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queued_prefixes, "MAX_PREFETCHES", 2)
    requests = [queued(testbed, f"r{number}", number) for number in range(4)]
    testbed.build()
    first = testbed.client.take(Prefetch)
    assert [b"\0" + each.keys[0][1] for each in first] == [each.key(0) for each in requests[:2]]
    testbed.ask(requests[0])
    testbed.build()
    (third,) = testbed.client.take(Prefetch)
    assert b"\0" + third.keys[0][1] == requests[2].key(0)


def test_a_request_without_keys_of_its_own_is_not_prefetched(testbed: SchedulerTestbed) -> None:
    request = testbed.request(300, "r", 1, prompt_embeds=object())
    testbed.hold(request.keys(0, 4), DISK)
    testbed.scheduler.on_new_request(request)  # type: ignore[arg-type]
    other = testbed.request(300, "s", 2, skip_reading_prefix_cache=True)
    testbed.hold(other.keys(0, 4), DISK)
    testbed.scheduler.on_new_request(other)  # type: ignore[arg-type]
    testbed.build()
    assert testbed.client.take(Prefetch) == []


def test_after_a_loss_of_tierd_the_queue_is_prefetched_again(testbed: SchedulerTestbed) -> None:
    request = queued(testbed, "r", 1)
    testbed.build()
    testbed.client.take(Prefetch)
    testbed.client.lose()
    testbed.build()
    assert testbed.client.take(Prefetch) == []
    testbed.client.welcome(epoch=2)
    testbed.client.ready()
    testbed.report()
    testbed.hold(request.keys(0, 4), DISK)
    testbed.build()
    assert len(testbed.client.take(Prefetch)) == 1
    assert testbed.client.take(Cancel) == []
