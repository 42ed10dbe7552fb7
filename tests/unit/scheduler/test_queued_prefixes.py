"""tierd is told of the prefixes of requests that wait in vLLM's queue, and of their end: what it
shall keep in RAM, and what it shall bring there."""

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
from tests.unit.scheduler.test_groups import FULL, STATE, WINDOW, GroupsTestbed

from kvtier.engines.vllm import queued_prefixes
from kvtier.tierd.wire import Cancel, Load, Prefetch, Promote, Queued


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


# What is in RAM of prefixes stays there.


def protected(testbed: SchedulerTestbed) -> list[tuple[int, list[bytes]]]:
    """Number and keys of the requests that tierd was told of."""
    return [
        (number, [bytes([group]) + key for group, key in keys])
        for message in testbed.client.take(Queued)
        for number, keys in message.requests
    ]


def test_tierd_is_told_of_the_last_chunk_of_a_prefix_that_is_in_ram_once(
    testbed: SchedulerTestbed,
) -> None:
    requests = [queued(testbed, f"r{seed}", seed, RAM) for seed in (1, 2)]
    testbed.build()
    (message,) = testbed.client.take(Queued)
    assert [keys for _, keys in message.requests] == [
        ((0, request.key(3)[1:]),) for request in requests
    ]
    testbed.build()
    assert testbed.client.take(Queued) == []
    assert testbed.client.take(Prefetch) == []


def test_of_a_prefix_that_is_partly_in_ram_that_part_is_named_and_its_prefetch_extends_it(
    testbed: SchedulerTestbed,
) -> None:
    request = queued(testbed, "r", 1)
    testbed.hold(request.keys(0, 2), RAM | DISK)
    testbed.build()
    ((number, keys),) = protected(testbed)
    assert keys == [request.key(1)]
    (message,) = testbed.client.take(Prefetch)
    assert (message.queued, len(message.keys)) == (number, 4)
    assert message.promotion != number


def test_a_request_is_protected_until_its_load_is_sent(testbed: SchedulerTestbed) -> None:
    """Between the lookup and the load the prefix could be evicted: vLLM may have no room yet."""
    request = queued(testbed, "r", 1, RAM)
    testbed.build()
    ((number, _),) = protected(testbed)
    for _ in range(3):
        assert testbed.ask(request) == 256
        testbed.build()
    assert testbed.client.take(Cancel) == []
    testbed.admit(request, 0, 256)
    order = [type(message) for message in testbed.client.sent]
    assert order.index(Load) < order.index(Cancel)
    assert [each.promotion for each in testbed.client.take(Cancel)] == [number]
    testbed.finish(request)
    assert testbed.client.take(Cancel) == []


def test_a_request_that_vllm_has_looked_up_and_not_admitted_is_protected_without_a_prefetch(
    testbed: SchedulerTestbed,
) -> None:
    request = queued(testbed, "r", 1, RAM)
    other = queued(testbed, "s", 2)
    testbed.hold(other.keys(0, 2), RAM | DISK)
    assert testbed.ask(request) == 256
    assert testbed.ask(other) is None
    testbed.build()
    assert [keys for _, keys in protected(testbed)] == [[request.key(3)], [other.key(1)]]
    assert testbed.client.take(Prefetch) == []


@pytest.mark.parametrize("how", ["computed", "aborted"])
def test_a_request_that_is_admitted_without_a_load_or_gone_is_not_protected_any_longer(
    testbed: SchedulerTestbed, how: str
) -> None:
    request = queued(testbed, "r", 1, RAM)
    testbed.build()
    ((number, _),) = protected(testbed)
    if how == "computed":
        testbed.ask(request, 256)
        testbed.admit(request, 256, 0)
    else:
        testbed.finish(request, "FINISHED_ABORTED")
    assert [each.promotion for each in testbed.client.take(Cancel)] == [number]


def test_the_lookup_ends_the_prefetch_and_the_admission_the_protection(
    testbed: SchedulerTestbed,
) -> None:
    request = queued(testbed, "r", 1)
    testbed.build()
    (message,) = testbed.client.take(Prefetch)
    testbed.hold(request.keys(0, 4), RAM)
    assert testbed.ask(request) == 256
    assert [each.promotion for each in testbed.client.take(Cancel)] == [message.promotion]
    testbed.admit(request, 0, 256)
    assert [each.promotion for each in testbed.client.take(Cancel)] == [message.queued]


def test_no_more_requests_than_tierd_takes_are_named_and_others_follow(
    testbed: SchedulerTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queued_prefixes, "MAX_QUEUED_REQUESTS", 2)
    requests = [queued(testbed, f"r{seed}", seed, RAM) for seed in range(4)]
    testbed.build()
    assert [keys for _, keys in protected(testbed)] == [[each.key(3)] for each in requests[:2]]
    testbed.build()
    assert protected(testbed) == []
    testbed.finish(requests[1], "FINISHED_ABORTED")
    testbed.build()
    assert [keys for _, keys in protected(testbed)] == [[requests[2].key(3)]]


def test_a_step_looks_up_a_bounded_number_of_chunks_whether_they_are_in_ram_or_not(
    testbed: SchedulerTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queued_prefixes, "MAX_CHUNKS_PER_STEP", 8)
    for seed in range(6):
        queued(testbed, f"r{seed}", seed, RAM if seed % 2 else DISK)
    named = []
    for _ in range(4):
        testbed.build()
        named.append(len(protected(testbed)))
    assert named == [2, 2, 2, 0]


def test_after_a_loss_of_tierd_the_queue_is_protected_again(testbed: SchedulerTestbed) -> None:
    requests = [queued(testbed, f"r{seed}", seed, RAM) for seed in (1, 2)]
    testbed.build()
    assert len(protected(testbed)) == 2
    assert testbed.ask(requests[0]) == 256
    testbed.client.lose()
    testbed.build()
    testbed.client.welcome(epoch=2)
    testbed.client.ready()
    testbed.report()
    for request in requests:
        testbed.hold(request.keys(0, 4), RAM)
    testbed.build()
    assert [keys for _, keys in protected(testbed)] == [[each.key(3)] for each in requests]
    assert testbed.client.take(Cancel) == []


def test_other_weights_end_the_protection(testbed: SchedulerTestbed) -> None:
    queued(testbed, "r", 1, RAM)
    testbed.build()
    ((number, _),) = protected(testbed)
    testbed.scheduler.reset_cache()
    assert [each.promotion for each in testbed.client.take(Cancel)] == [number]


def test_a_tierd_that_takes_no_messages_is_told_nothing_and_owed_nothing(
    testbed: SchedulerTestbed,
) -> None:
    request = queued(testbed, "r", 1)
    testbed.client.accepts = False
    testbed.build()
    testbed.client.accepts = True
    testbed.finish(request, "FINISHED_ABORTED")
    assert testbed.client.sent == []


def test_what_the_client_has_no_room_for_is_sent_in_the_first_step_that_has_room(
    testbed: SchedulerTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queued_prefixes, "MAX_CHUNKS_PER_STEP", 8)
    requests = [queued(testbed, f"r{seed}", seed, RAM) for seed in range(3)]
    testbed.client.accepts = False
    testbed.build()
    gone = requests.pop(1)
    testbed.finish(gone, "FINISHED_ABORTED")
    testbed.client.delta(removed={requests[0].key(3): RAM})
    testbed.client.accepts = True
    testbed.build()
    named = protected(testbed)
    assert [keys for _, keys in named] == [[requests[0].key(2)], [requests[1].key(3)]], (
        "what is in RAM now, and in the order of the queue"
    )
    for _ in range(2):
        testbed.build()
    assert protected(testbed) == [], "each once"
    assert testbed.client.take(Cancel) == [], "tierd knew nothing of the one that is gone"
    for number, request in zip([number for number, _ in named], requests, strict=True):
        testbed.finish(request, "FINISHED_ABORTED")
        assert [each.promotion for each in testbed.client.take(Cancel)] == [number]


def test_a_client_without_room_is_asked_for_a_bounded_number_of_requests_per_step(
    testbed: SchedulerTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queued_prefixes, "MAX_CHUNKS_PER_STEP", 8)
    for seed in range(6):
        queued(testbed, f"r{seed}", seed, RAM)
    queue = testbed.scheduler.queue
    looked_up: list[str] = []
    look_up = queue._look_up
    monkeypatch.setattr(
        queue, "_look_up", lambda state: looked_up.append(state.request_id) or look_up(state)
    )
    testbed.client.accepts = False
    for _ in range(3):
        testbed.build()
    assert looked_up == ["r0", "r1"] * 3
    testbed.client.accepts = True
    for _ in range(4):
        testbed.build()
    assert len(protected(testbed)) == 6


def test_a_prefetch_that_the_client_has_no_room_for_follows_its_request(
    testbed: SchedulerTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The announcement of the queue was the last message that the client had room for."""
    request = queued(testbed, "r", 1)
    send = testbed.scheduler.session.send
    monkeypatch.setattr(
        testbed.scheduler.session,
        "send",
        lambda message: not isinstance(message, Prefetch) and send(message),
    )
    testbed.build()
    ((number, _),) = protected(testbed)
    assert testbed.client.take(Prefetch) == []
    monkeypatch.undo()
    testbed.build()
    (message,) = testbed.client.take(Prefetch)
    assert (message.queued, len(message.keys)) == (number, 4)
    assert protected(testbed) == []
    testbed.ask(request)
    assert message.promotion in [each.promotion for each in testbed.client.take(Cancel)]


def test_of_several_groups_the_last_object_of_each_is_named() -> None:
    testbed = GroupsTestbed()
    request = testbed.request(4 * CHUNK + 5)
    testbed.hold_groups(request, {FULL: range(4), WINDOW: range(4), STATE: range(4)}, RAM)
    testbed.scheduler.on_new_request(request)  # type: ignore[arg-type]
    testbed.compute(request, 0, ([], [], []))
    assert [keys for _, keys in protected(testbed)] == [
        [bytes([group]) + request.key(3)[1:] for group in (FULL, WINDOW, STATE)]
    ]


def test_of_a_group_that_is_partly_in_ram_what_can_be_used_is_named() -> None:
    testbed = GroupsTestbed()
    request = testbed.request(4 * CHUNK + 5)
    held = {FULL: range(4), WINDOW: range(4), STATE: range(4)}
    testbed.hold_groups(request, held, DISK)
    testbed.hold_groups(request, {FULL: range(2), STATE: (3,)}, RAM | DISK)
    testbed.scheduler.on_new_request(request)  # type: ignore[arg-type]
    testbed.compute(request, 0, ([], [], []))
    ((number, keys),) = protected(testbed)
    assert keys == [request.key(1), bytes([STATE]) + request.key(3)[1:]]
    (message,) = testbed.client.take(Prefetch)
    assert message.queued == number
