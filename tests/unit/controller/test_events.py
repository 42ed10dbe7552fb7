"""Events: posted on a change, once, and bounded."""

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
from tests.unit.controller.builders import status, view_of

from kvtier_operator.api.pods import decode_pod
from kvtier_operator.api.status import PolicyStatus
from kvtier_operator.controller.events import (
    BURST,
    MAX_PER_RECONCILE,
    REPEAT_SECONDS,
    Event,
    EventRecorder,
    pod_events,
    pod_reference,
    policy_events,
)
from kvtier_operator.controller.pods.pod_view import PodView
from kvtier_operator.kube.resources import EVENTS, ApiError


def attached(name: str = "chat-1", state: str = "Healthy") -> PodView:
    return view_of(running(injected_pod(name)), status_document(tier_document("ram", state)))


def not_attached(name: str = "chat-1") -> PodView:
    return view_of(running(injected_pod(name)), status_document(sessions="none"))


def reported(before: PolicyStatus | None, after: PolicyStatus) -> list[tuple[str, str]]:
    return [(event.type, event.reason) for event in policy_events(policy(), before, after)]


def test_a_first_status_reports_only_problems() -> None:
    assert reported(None, status(attached())) == []
    assert reported(None, status(not_attached())) == [("Warning", "NotAttached")]


def test_a_problem_and_its_end_are_each_reported_once() -> None:
    good, bad = status(attached()), status(not_attached())
    assert reported(good, bad) == [("Warning", "NotAttached")]
    assert reported(bad, bad) == []
    assert ("Normal", "Attached") in reported(bad, good)


def test_state_changes_of_a_tier_are_reported() -> None:
    good, broken, slow = (
        status(attached(state=state)) for state in ("Healthy", "BreakerOpen", "Degraded")
    )
    assert reported(good, broken) == [("Warning", "TierBreakerOpen")]
    assert reported(good, slow) == [("Warning", "TierDegraded")]
    assert reported(broken, good) == [("Normal", "TierHealthy")]
    assert reported(status(), good) == [("Normal", "Attached")]


def test_state_changes_of_a_pod_are_reported_on_the_pod() -> None:
    events = pod_events([attached("a"), not_attached("b")], {})
    assert [(event.involved[1:4], event.type, event.reason) for event in events] == [
        (("Pod", "serving", "a"), "Normal", "Attached"),
        (("Pod", "serving", "b"), "Warning", "NotAttached"),
    ]
    assert pod_events([attached("a")], {"uid-of-a": "Attached"}) == []
    assert [event.reason for event in pod_events([attached("a")], {"uid-of-a": "NotAttached"})] == [
        "Attached"
    ]


def test_a_skipped_pod_is_reported_with_reason_and_message() -> None:
    pod = view_of(skipped(bare_pod(), "AlreadyConfigured", "the command sets --kv-transfer-config"))
    (event,) = pod_events([pod], {})
    assert (event.type, event.reason) == ("Normal", "Skipped")
    assert event.message == "AlreadyConfigured: the command sets --kv-transfer-config"


def test_after_a_restart_only_problems_are_reported_again() -> None:
    assert [
        event.involved.name for event in pod_events([attached("a"), not_attached("b")], None)
    ] == ["b"]


def event(number: int = 0, message: str = "m") -> Event:
    return Event(
        pod_reference(decode_pod(bare_pod(f"chat-{number}"))), "Warning", "NotAttached", message
    )


def post(cluster: Any, *rounds: list[Event], seconds_between: float = 0.0) -> EventRecorder:
    now = [0.0]
    recorder = EventRecorder(cluster, lambda: now[0])

    async def scenario() -> None:
        for events in rounds:
            await recorder.post(events, NOON + now[0])
            now[0] += seconds_between

    asyncio.run(scenario())
    return recorder


def test_an_event_has_the_involved_object_and_the_source() -> None:
    cluster = MemoryCluster()
    post(cluster, [event()])
    (found,) = cluster.list_now(EVENTS)
    assert found["involvedObject"] == {
        "apiVersion": "v1", "kind": "Pod", "namespace": "serving",
        "name": "chat-0", "uid": "uid-of-chat-0",
    }  # fmt: skip
    assert (found["type"], found["reason"], found["count"]) == ("Warning", "NotAttached", 1)
    assert found["source"] == {"component": "kvtier"}


def test_the_same_event_is_not_posted_again_for_a_while_and_then_counted() -> None:
    cluster = MemoryCluster()
    post(cluster, [event()], [event()], seconds_between=REPEAT_SECONDS / 2)
    assert [each["count"] for each in cluster.list_now(EVENTS)] == [1]
    post(cluster, [event()], [event()], seconds_between=REPEAT_SECONDS + 1)
    assert [each["count"] for each in cluster.list_now(EVENTS)] == [3]


def test_a_restarted_operator_increments_the_count_of_the_existing_event() -> None:
    cluster = MemoryCluster()
    for _ in range(2):
        post(cluster, [event()])
    assert [each["count"] for each in cluster.list_now(EVENTS)] == [2]


def test_events_are_bounded_per_reconcile_and_over_time() -> None:
    cluster = MemoryCluster()
    recorder = post(cluster, [event(number) for number in range(500)])
    assert (recorder.posted, recorder.dropped) == (MAX_PER_RECONCILE, 500 - MAX_PER_RECONCILE)
    recorder = post(
        cluster,
        *([event(number, f"{index}") for number in range(20)] for index in range(10)),
        seconds_between=1.0,
    )
    assert recorder.posted <= BURST + 10


def test_an_event_that_the_api_server_rejects_is_dropped() -> None:
    class Rejecting(MemoryCluster):
        async def create(self, *args: Any, **kwargs: Any) -> Any:
            raise ApiError(403, "Forbidden", "no events here")

    recorder = post(Rejecting(), [event()])
    assert (recorder.posted, recorder.dropped) == (0, 1)


def test_messages_and_names_fit_the_api() -> None:
    cluster = MemoryCluster()
    post(
        cluster,
        [Event(pod_reference(decode_pod(bare_pod("x" * 253))), "Normal", "Attached", "y" * 5000)],
    )
    (found,) = cluster.list_now(EVENTS)
    assert len(found["message"]) <= 1024
    assert len(found["metadata"]["name"]) <= 253
