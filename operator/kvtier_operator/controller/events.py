"""Events: what changed, once, for people who run ``kubectl describe``.

An Event is a value (``Event``) until it is posted. Its name is made of whom it is about and what it says, so that a
restarted operator, or a second one, does not post it twice while it is there; what happens again is counted in the same
object. Bounded in every direction: per look, per minute, and in what is remembered.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.hashing import sha256_hex
from kvtier_operator.api.conditions import EventReason, Reason
from kvtier_operator.api.policy import API_VERSION, KIND, KVTierPolicy
from kvtier_operator.api.status import Condition, PolicyStatus, TierState
from kvtier_operator.controller import objects
from kvtier_operator.controller.pods.pod_view import PodState, PodView
from kvtier_operator.kube.resources import EVENTS, ApiError, Client, Object

logger = logging.getLogger(__name__)
NORMAL, WARNING = "Normal", "Warning"
SOURCE = "kvtier"
MAX_MESSAGE = 1000
"""The API server takes 1024."""
MAX_PER_LOOK = 20
BURST = 50.0
PER_SECOND = 1.0
SILENT_SECONDS = 600.0
"""The same Event is not posted again sooner."""
REMEMBERED = 4096
PROBLEMS = (PodState.NOT_ATTACHED, PodState.ENGINE_CRASHED, PodState.TIERD_FAILED, PodState.SKIPPED)
TOLD = (*PROBLEMS, PodState.ATTACHED)
"""States of a pod that are worth an Event; that one starts or cannot be reached for a moment is not."""
TELLING = ("Accepted", "StorageReady", "Attached", "UpToDate", "EnginesCompatible", "TiersHealthy")
TIER_HAPPENINGS = {
    TierState.BREAKER_OPEN: (WARNING, EventReason.TIER_BREAKER_OPEN),
    TierState.DEGRADED: (WARNING, EventReason.TIER_DEGRADED),
    TierState.HEALTHY: (NORMAL, EventReason.TIER_HEALTHY),
}


@dataclass(frozen=True, slots=True)
class Event:
    """An Event to be. ``about``: apiVersion, kind, namespace, name and uid of whom it is about."""

    about: tuple[str, str, str, str, str]
    type: str
    reason: str
    message: str

    @property
    def name(self) -> str:
        """Of the Event."""
        text = "\0".join((self.about[4], self.reason, self.message))
        return f"{self.about[3][:200]}.{sha256_hex(text, 16)}"


def about_policy(policy: KVTierPolicy) -> tuple[str, str, str, str, str]:
    """For ``Event``."""
    return API_VERSION, KIND, policy.namespace, policy.metadata.name, policy.metadata.uid or ""


def about_pod(pod: Object) -> tuple[str, str, str, str, str]:
    """For ``Event``."""
    return "v1", "Pod", objects.namespace(pod), objects.name(pod), objects.uid(pod)


def of_policy(
    policy: KVTierPolicy, before: PolicyStatus | None, after: PolicyStatus
) -> list[Event]:
    """What changed in a policy's conditions and tiers. Of a first status only what is wrong."""
    old = {each.type: each for each in (before.conditions if before is not None else None) or ()}
    notes = []
    for condition in after.conditions or ():
        if condition.type in TELLING and _news(old.get(condition.type), condition):
            kind = WARNING if condition.status == "False" else NORMAL
            notes.append(
                Event(
                    about_policy(policy),
                    kind,
                    condition.reason,
                    f"{condition.type}: {condition.message}",
                )
            )
    states = {
        tier.name: tier.state for tier in (before.tiers if before is not None else None) or ()
    }
    for tier in after.tiers or ():
        was = states.get(tier.name, TierState.UNKNOWN)
        told = TIER_HAPPENINGS.get(tier.state)
        # That a tier which was just being opened is well is no news.
        if (
            told is None
            or tier.state is was
            or (tier.state is TierState.HEALTHY and was is TierState.UNKNOWN)
        ):
            continue
        notes.append(
            Event(
                about_policy(policy),
                told[0],
                told[1].value,
                f"tier {tier.name} is {tier.state.value}",
            )
        )
    return notes


def _news(old: Condition | None, new: Condition) -> bool:
    if new.reason in {
        Reason.DEGRADED.value,
        Reason.BREAKER_OPEN.value,
        Reason.HEALTHY.value,
        Reason.STARTING.value,
    }:
        return False
    if old is None:
        return new.status == "False"
    if new.status == "Unknown":
        return False
    if old.status == "Unknown" and new.status == "True":
        return new.type == "Attached"
    return (old.status, old.reason) != (new.status, new.reason)


def of_pods(pods: Sequence[PodView], before: dict[str, str] | None) -> list[Event]:
    """What changed in pods. ``before``: state by uid at the last look; None: this is the first since a start, and only
    problems are told (again: the Event's name keeps it from being doubled).
    """
    notes = []
    for pod in pods:
        was = (before or {}).get(pod.uid)
        if (
            pod.state not in TOLD
            or pod.state.value == was
            or (before is None and pod.state not in PROBLEMS)
        ):
            continue
        if pod.state is PodState.SKIPPED:
            reason, message = EventReason.SKIPPED.value, f"{pod.reason}: {pod.message}"
        else:
            reason, message = pod.reason, pod.message
        kind = NORMAL if pod.state in (PodState.ATTACHED, PodState.SKIPPED) else WARNING
        notes.append(Event(about_pod(pod.pod), kind, reason, message))
    return notes


class Recorder:
    """Posts notes. For one event loop. ``clock``: monotonic. ``posted``, ``dropped``: counted since the start."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._allowance = BURST
        self._allowed_at = clock()
        self._told: OrderedDict[str, float] = OrderedDict()
        self.posted = 0
        self.dropped = 0

    async def post(self, client: Client, notes: Iterable[Event], wall_clock: float) -> None:
        """Posts what is news. An Event that cannot be posted is dropped: nothing depends on it."""
        count = 0
        for note in notes:
            now = self._clock()
            key = f"{note.about[2]}/{note.name}"
            if now - self._told.get(key, float("-inf")) < SILENT_SECONDS:
                continue
            count += 1
            if count > MAX_PER_LOOK or not self._allowed(now):
                self.dropped += 1
                continue
            self._told[key] = now
            self._told.move_to_end(key)
            while len(self._told) > REMEMBERED:
                self._told.popitem(last=False)
            try:
                await self._create(client, note, wall_clock)
                self.posted += 1
            except ApiError as error:
                logger.info("an Event was not posted: %s", error, extra={"event": note.reason})
                self.dropped += 1

    def _allowed(self, now: float) -> bool:
        self._allowance = min(BURST, self._allowance + (now - self._allowed_at) * PER_SECOND)
        self._allowed_at = now
        if self._allowance < 1.0:
            return False
        self._allowance -= 1.0
        return True

    async def _create(self, client: Client, note: Event, wall_clock: float) -> None:
        api_version, kind, namespace, name, uid = note.about
        moment = objects.format_time(wall_clock)
        body: dict[str, Any] = {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"namespace": namespace, "name": note.name},
            "involvedObject": {
                "apiVersion": api_version,
                "kind": kind,
                "namespace": namespace,
                "name": name,
                "uid": uid,
            },
            "type": note.type,
            "reason": note.reason,
            "message": note.message[:MAX_MESSAGE],
            "source": {"component": SOURCE},
            "reportingComponent": SOURCE,
            "firstTimestamp": moment,
            "lastTimestamp": moment,
            "count": 1,
        }
        try:
            await client.create(EVENTS, namespace, body)
        except ApiError as error:
            if error.status != 409:
                raise
            there = await client.get(EVENTS, namespace, note.name)
            again = {"lastTimestamp": moment, "count": int(there.get("count") or 0) + 1}
            await client.patch(EVENTS, namespace, note.name, again)
