"""Kubernetes Events: what changed, reported once, for ``kubectl describe``.

An ``Event`` is a value until ``EventRecorder`` posts it. Its name is a hash of the object it is
about and of its text, so a restarted operator, or a second replica, does not post it twice; a
repetition increments ``count`` of the same object. Everything is bounded: Events per reconcile,
Events per minute, and the memory of what was posted.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvtier.hashing import sha256_hex
from kvtier_operator.api.conditions import EventReason, Reason
from kvtier_operator.api.pods import Pod
from kvtier_operator.api.policy import API_VERSION, KIND, KVTierPolicy
from kvtier_operator.api.status import Condition, PolicyStatus, TierState
from kvtier_operator.controller import objects
from kvtier_operator.controller.pods.pod_view import PodState, PodView
from kvtier_operator.kube.resources import EVENTS, ApiError, Client

logger = logging.getLogger(__name__)
NORMAL, WARNING = "Normal", "Warning"
SOURCE = "kvtier"
MAX_MESSAGE = 1000
"""The API server accepts 1024."""
MAX_PER_RECONCILE = 20
BURST = 50.0
PER_SECOND = 1.0
REPEAT_SECONDS = 600.0
"""The same Event is not posted again sooner."""
MAX_REMEMBERED = 4096
PROBLEM_STATES = (
    PodState.NOT_ATTACHED,
    PodState.ENGINE_CRASHED,
    PodState.TIERD_FAILED,
    PodState.SKIPPED,
)
REPORTED_STATES = (*PROBLEM_STATES, PodState.ATTACHED)
"""Pod states that get an Event. Starting pods and short network failures do not."""
REPORTED_CONDITIONS = (
    "Accepted",
    "StorageReady",
    "Attached",
    "UpToDate",
    "EnginesCompatible",
    "TiersHealthy",
)
UNREPORTED_REASONS = frozenset(
    each.value for each in (Reason.DEGRADED, Reason.BREAKER_OPEN, Reason.HEALTHY, Reason.STARTING)
)
"""Condition reasons without an Event: tiers have their own Events, and starting is normal."""
TIER_EVENTS = {
    TierState.BREAKER_OPEN: (WARNING, EventReason.TIER_BREAKER_OPEN),
    TierState.DEGRADED: (WARNING, EventReason.TIER_DEGRADED),
    TierState.HEALTHY: (NORMAL, EventReason.TIER_HEALTHY),
}


class ObjectReference(NamedTuple):
    """The object that an Event is about."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Event:
    """An Event that has not been posted yet. ``type``: ``NORMAL`` or ``WARNING``."""

    involved: ObjectReference
    type: str
    reason: str
    message: str

    @property
    def name(self) -> str:
        """``metadata.name`` of the Event."""
        text = "\0".join((self.involved.uid, self.reason, self.message))
        return f"{self.involved.name[:200]}.{sha256_hex(text, 16)}"


def policy_reference(policy: KVTierPolicy) -> ObjectReference:
    """A reference to a policy."""
    metadata = policy.metadata
    return ObjectReference(API_VERSION, KIND, policy.namespace, metadata.name, metadata.uid or "")


def pod_reference(pod: Pod) -> ObjectReference:
    """A reference to a pod."""
    metadata = pod.metadata
    return ObjectReference("v1", "Pod", metadata.namespace, metadata.name, metadata.uid)


def policy_events(
    policy: KVTierPolicy, previous: PolicyStatus | None, status: PolicyStatus
) -> list[Event]:
    """Changes of a policy's conditions and tiers. Of a first status only the problems."""
    involved = policy_reference(policy)
    old_conditions = {
        each.type: each for each in (previous.conditions if previous is not None else None) or ()
    }
    events = [
        Event(
            involved,
            WARNING if condition.status == "False" else NORMAL,
            condition.reason,
            f"{condition.type}: {condition.message}",
        )
        for condition in status.conditions or ()
        if condition.type in REPORTED_CONDITIONS
        and _is_news(old_conditions.get(condition.type), condition)
    ]
    old_states = {
        tier.name: tier.state for tier in (previous.tiers if previous is not None else None) or ()
    }
    for tier in status.tiers or ():
        old_state = old_states.get(tier.name, TierState.UNKNOWN)
        reported = TIER_EVENTS.get(tier.state)
        opened = tier.state is TierState.HEALTHY and old_state is TierState.UNKNOWN
        if reported is None or tier.state is old_state or opened:
            continue
        event_type, reason = reported
        message = f"tier {tier.name} is {tier.state.value}"
        events.append(Event(involved, event_type, reason.value, message))
    return events


def _is_news(old: Condition | None, new: Condition) -> bool:
    if new.reason in UNREPORTED_REASONS:
        return False
    if old is None:
        return new.status == "False"
    if new.status == "Unknown":
        return False
    if old.status == "Unknown" and new.status == "True":
        return new.type == "Attached"
    return (old.status, old.reason) != (new.status, new.reason)


def pod_events(pods: Sequence[PodView], old_states: dict[str, str] | None) -> list[Event]:
    """Changes of pod states. ``old_states``: by uid, as of the last reconcile; None in the first
    one of this process: then only problems are reported (the Event's name prevents a duplicate).
    """
    events = []
    for pod in pods:
        if (
            pod.state not in REPORTED_STATES
            or pod.state.value == (old_states or {}).get(pod.uid)
            or (old_states is None and pod.state not in PROBLEM_STATES)
        ):
            continue
        reason, message = pod.reason, pod.message
        if pod.state is PodState.SKIPPED:
            reason, message = EventReason.SKIPPED.value, f"{pod.reason}: {pod.message}"
        event_type = NORMAL if pod.state in (PodState.ATTACHED, PodState.SKIPPED) else WARNING
        events.append(Event(pod_reference(pod.pod), event_type, reason, message))
    return events


class EventRecorder:
    """Posts Events. For one event loop. ``clock``: monotonic. ``posted`` and ``dropped`` count
    since the start.
    """

    def __init__(self, client: Client, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock
        self._budget = BURST
        self._budget_at = clock()
        self._posted_at: OrderedDict[str, float] = OrderedDict()
        self.posted = 0
        self.dropped = 0

    async def post(self, events: Iterable[Event], now: float) -> None:
        """Posts the Events that are not repetitions. Does not raise: an Event that cannot be posted
        is dropped, since nothing depends on it. ``now``: seconds since 1970.
        """
        count = 0
        for event in events:
            monotonic_now = self._clock()
            key = f"{event.involved.namespace}/{event.name}"
            if monotonic_now - self._posted_at.get(key, float("-inf")) < REPEAT_SECONDS:
                continue
            count += 1
            if count > MAX_PER_RECONCILE or not self._take_from_budget(monotonic_now):
                self.dropped += 1
                continue
            self._posted_at[key] = monotonic_now
            self._posted_at.move_to_end(key)
            while len(self._posted_at) > MAX_REMEMBERED:
                self._posted_at.popitem(last=False)
            try:
                await self._create(event, now)
                self.posted += 1
            except ApiError as error:
                logger.info("could not post an Event: %s", error, extra={"event": event.reason})
                self.dropped += 1

    def _take_from_budget(self, now: float) -> bool:
        self._budget = min(BURST, self._budget + (now - self._budget_at) * PER_SECOND)
        self._budget_at = now
        if self._budget < 1.0:
            return False
        self._budget -= 1.0
        return True

    async def _create(self, event: Event, now: float) -> None:
        namespace, timestamp = event.involved.namespace, objects.format_time(now)
        body: dict[str, Any] = {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"namespace": namespace, "name": event.name},
            "involvedObject": {
                "apiVersion": event.involved.api_version,
                "kind": event.involved.kind,
                "namespace": namespace,
                "name": event.involved.name,
                "uid": event.involved.uid,
            },
            "type": event.type,
            "reason": event.reason,
            "message": event.message[:MAX_MESSAGE],
            "source": {"component": SOURCE},
            "reportingComponent": SOURCE,
            "firstTimestamp": timestamp,
            "lastTimestamp": timestamp,
            "count": 1,
        }
        try:
            await self._client.create(EVENTS, namespace, body)
        except ApiError as error:
            if error.status != 409:
                raise
            existing = await self._client.get(EVENTS, namespace, event.name)
            repetition = {"lastTimestamp": timestamp, "count": int(existing.get("count") or 0) + 1}
            await self._client.patch(EVENTS, namespace, event.name, repetition)
