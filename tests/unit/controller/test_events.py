"""Events: on a change, once, bounded."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.support.memory_cluster import MemoryCluster
from tests.support.pods import (
    NOON,
    bare_pod,
    injected_pod,
    policy,
    running,
    skipped,
    status_document,
    tier_document,
)
from tests.unit.controller.world import looked_at, status

from kvtier_operator.api.status import PolicyStatus
from kvtier_operator.controller.events import (
    BURST,
    MAX_PER_LOOK,
    SILENT_SECONDS,
    Event,
    Recorder,
    about_pod,
    of_pods,
    of_policy,
)
from kvtier_operator.controller.pods.pod_view import PodView
from kvtier_operator.kube.resources import EVENTS, ApiError


def attached(name: str = "chat-1", word: str = "Healthy") -> PodView:
    return looked_at(running(injected_pod(name)), status_document(tier_document("ram", word)))


def nobody(name: str = "chat-1") -> PodView:
    return looked_at(running(injected_pod(name)), status_document(sessions="none"))


def told(before: PolicyStatus | None, after: PolicyStatus) -> list[tuple[str, str]]:
    return [(note.type, note.reason) for note in of_policy(policy(), before, after)]


def test_of_a_first_status_only_what_is_wrong_is_told() -> None:
    assert told(None, status(attached())) == []
    assert told(None, status(nobody())) == [("Warning", "NotAttached")]


def test_what_becomes_wrong_and_what_becomes_right_is_told_once() -> None:
    good, bad = status(attached()), status(nobody())
    assert told(good, bad) == [("Warning", "NotAttached")]
    assert told(bad, bad) == []
    assert ("Normal", "Attached") in told(bad, good)


def test_a_tier_that_falls_ill_and_recovers_is_told() -> None:
    good, broken, slow = (
        status(attached(word=word)) for word in ("Healthy", "BreakerOpen", "Degraded")
    )
    assert told(good, broken) == [("Warning", "TierBreakerOpen")]
    assert told(good, slow) == [("Warning", "TierDegraded")]
    assert told(broken, good) == [("Normal", "TierHealthy")]
    assert told(status(), good) == [("Normal", "Attached")]


def test_a_pods_attaching_and_its_trouble_are_told_about_the_pod() -> None:
    notes = of_pods([attached("a"), nobody("b")], {})
    assert [(note.about[1:4], note.type, note.reason) for note in notes] == [
        (("Pod", "serving", "a"), "Normal", "Attached"),
        (("Pod", "serving", "b"), "Warning", "NotAttached"),
    ]
    assert of_pods([attached("a")], {"uid-of-a": "Attached"}) == []
    assert [note.reason for note in of_pods([attached("a")], {"uid-of-a": "NotAttached"})] == [
        "Attached"
    ]


def test_a_pod_that_was_left_alone_is_told_with_reason_and_message() -> None:
    pod = looked_at(
        skipped(bare_pod(), "AlreadyConfigured", "the command sets --kv-transfer-config")
    )
    (note,) = of_pods([pod], {})
    assert (note.type, note.reason) == ("Normal", "Skipped")
    assert note.message == "AlreadyConfigured: the command sets --kv-transfer-config"


def test_after_a_restart_only_problems_are_told_again() -> None:
    assert [note.about[3] for note in of_pods([attached("a"), nobody("b")], None)] == ["b"]


def note(number: int = 0, message: str = "m") -> Event:
    return Event(about_pod(bare_pod(f"chat-{number}")), "Warning", "NotAttached", message)


def post(cluster: Any, *rounds: list[Event], seconds_between: float = 0.0) -> Recorder:
    now = [0.0]
    recorder = Recorder(lambda: now[0])

    async def story() -> None:
        for notes in rounds:
            await recorder.post(cluster, notes, NOON + now[0])
            now[0] += seconds_between

    asyncio.run(story())
    return recorder


def test_an_event_says_whom_it_is_about_and_who_says_it() -> None:
    cluster = MemoryCluster()
    post(cluster, [note()])
    (found,) = cluster.list_now(EVENTS)
    assert found["involvedObject"] == {
        "apiVersion": "v1", "kind": "Pod", "namespace": "serving", "name": "chat-0", "uid": "uid-of-chat-0",
    }  # fmt: skip
    assert (found["type"], found["reason"], found["count"]) == ("Warning", "NotAttached", 1)
    assert found["source"] == {"component": "kvtier"}


def test_the_same_event_is_not_posted_again_for_a_while_and_then_counted() -> None:
    cluster = MemoryCluster()
    post(cluster, [note()], [note()], seconds_between=SILENT_SECONDS / 2)
    assert [each["count"] for each in cluster.list_now(EVENTS)] == [1]
    post(cluster, [note()], [note()], seconds_between=SILENT_SECONDS + 1)
    assert [each["count"] for each in cluster.list_now(EVENTS)] == [3]


def test_an_operator_that_restarts_adds_to_the_event_that_is_there() -> None:
    cluster = MemoryCluster()
    for _ in range(2):
        post(cluster, [note()])
    assert [each["count"] for each in cluster.list_now(EVENTS)] == [2]


def test_a_storm_is_bounded_per_look_and_over_time() -> None:
    cluster = MemoryCluster()
    recorder = post(cluster, [note(number) for number in range(500)])
    assert (recorder.posted, recorder.dropped) == (MAX_PER_LOOK, 500 - MAX_PER_LOOK)
    recorder = post(
        cluster,
        *([note(number, f"{turn}") for number in range(20)] for turn in range(10)),
        seconds_between=1.0,
    )
    assert recorder.posted <= BURST + 10


def test_an_api_server_that_refuses_events_harms_nobody() -> None:
    class Refusing(MemoryCluster):
        async def create(self, *args: Any, **kwargs: Any) -> Any:
            raise ApiError(403, "Forbidden", "no events here")

    recorder = post(Refusing(), [note()])
    assert (recorder.posted, recorder.dropped) == (0, 1)


def test_messages_and_names_fit_the_api() -> None:
    cluster = MemoryCluster()
    post(cluster, [Event(about_pod(bare_pod("x" * 253)), "Normal", "Attached", "y" * 5000)])
    (found,) = cluster.list_now(EVENTS)
    assert len(found["message"]) <= 1024
    assert len(found["metadata"]["name"]) <= 253
