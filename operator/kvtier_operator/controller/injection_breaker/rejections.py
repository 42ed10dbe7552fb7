"""Pods that the API server rejected, and whether injection is the cause.

A rejection (a ``FailedCreate`` Event of the pod's owner) counts whatever its words: admission
policies name no container. If the message names an injected part, or the numbers of a quota prove
it, injection is the cause. If it names what injection never touches, or the numbers prove the
opposite, it is not. Everything else is tried once: the owner is suspended, and if its pods are
rejected without tiers too, the suspension ends and that message does not count again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvtier_operator.api.conditions import Reason
from kvtier_operator.api.pods import OwnerReference, PodSpec
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.selector import matches
from kvtier_operator.api.status import SuspendedOwner
from kvtier_operator.controller import objects
from kvtier_operator.controller.cached_policy import parse_policy
from kvtier_operator.controller.conditions import ReconcileInput
from kvtier_operator.controller.injection_breaker import quota_messages
from kvtier_operator.controller.injection_breaker.detectors import (
    InjectionFailure,
    event_time,
    names_injected_part,
    shortened,
)
from kvtier_operator.controller.lookups import TEMPLATE_OWNERS, ClusterAccess
from kvtier_operator.injection.governing import governing
from kvtier_operator.kube.resources import EVENTS, POLICIES, Object

MAX_REJECTIONS = 8
"""Owners that one reconcile examines. The next ones follow once these are resolved."""
SUSTAINED_SECONDS = 5.0
"""Between the first and the last rejection before an unexplained one counts. What is created in the
wrong order (a service account after its Deployment) is there by then.
"""
TRIAL_SETTLE_SECONDS = 5.0
"""Between the suspension and a rejection that says something about a pod without tiers: every
webhook has seen the suspension by then.
"""
MAX_BACKOFF_SECONDS = 1_000.0
"""Kubernetes' controllers create a pod again after twice the time of before, and at most this."""
BACKOFF_MARGIN_SECONDS = 60.0
_UNRELATED = re.compile(
    r"error looking up service account|no PriorityClass with name|RuntimeClass \S+ not found"
    r"|because it is being terminated"
)
"""Rejections by admission plugins about parts of a pod that injection does not change."""
_COMBINED = "(combined from similar events): "


class Cause(Enum):
    """What a rejection says about injection."""

    INJECTION = "injection"
    OTHER = "other"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Trial:
    """A suspension that finds out whether injection is the cause. ``started_at``: seconds since
    1970.
    """

    fingerprint: str
    started_at: float


@dataclass(frozen=True, slots=True)
class Cleared:
    """A rejection that injection did not cause. ``text``: for messages."""

    fingerprint: str
    text: str


@dataclass(slots=True)
class RejectionMemory:
    """What is remembered of a policy's rejections between reconciles, by the owner's uid. After a
    restart of the operator an unexplained rejection is tried once more.

    ``changed_at``: when the policy last changed, in seconds since 1970. Earlier rejections are
    ignored.
    """

    changed_at: float = 0.0
    trials: dict[str, Trial] = field(default_factory=dict)
    cleared: dict[str, Cleared] = field(default_factory=dict)

    def record_change(self, now: float) -> None:
        """The policy changed: what was found out is about another one."""
        self.changed_at = now
        self.trials.clear()
        self.cleared.clear()

    def keep(self, owners: Iterable[str], suspended: Iterable[str]) -> None:
        """Drops what concerns neither rejected nor suspended owners."""
        rejected, kept = set(owners), set(suspended)
        self.trials = {uid: each for uid, each in self.trials.items() if uid in kept}
        self.cleared = {uid: each for uid, each in self.cleared.items() if uid in rejected}


@dataclass(frozen=True, slots=True)
class Rejections:
    """The ``FailedCreate`` Events of one owner, the newest first; at least one."""

    owner: OwnerReference
    events: tuple[Object, ...]

    @property
    def message(self) -> str:
        """The newest message."""
        return _message(self.events[0])

    @property
    def last_at(self) -> float:
        """Of the newest, in seconds since 1970."""
        return event_time(self.events[0])

    @property
    def began_at(self) -> float:
        """Of the first with the same cause as the newest, in seconds since 1970."""
        same = self.fingerprint
        return min(
            _first_time(event) for event in self.events if self._fingerprint_of(event) == same
        )

    @property
    def fingerprint(self) -> str:
        """The newest message without what changes from pod to pod."""
        return self._fingerprint_of(self.events[0])

    def _fingerprint_of(self, event: Object) -> str:
        text = _message(event).removeprefix(_COMBINED)
        text = re.sub(re.escape(self.owner.name) + r"-[a-z0-9]+", "POD", text)
        return re.sub(r"\d+", "#", text)


def cause_of(message: str, template: PodSpec | None) -> Cause:
    """What a message says about injection. ``template``: the spec of the owner's pod template; None
    if it is not known.
    """
    if names_injected_part(message):
        return Cause.INJECTION
    if quota_messages.is_resource_rejection(message):
        own = template if template is not None else PodSpec()
        if not quota_messages.caused_by_injection(own, message):
            return Cause.OTHER
        return Cause.INJECTION if template is not None else Cause.UNKNOWN
    return Cause.OTHER if _UNRELATED.search(message) else Cause.UNKNOWN


def event_owner(event: Object) -> OwnerReference | None:
    """The owner of the pod that was not created."""
    owner = objects.owner_reference(event.get("involvedObject") or {})
    return owner if owner.uid else None


class RejectionDetector:
    """Detects rejections of one policy's pods in one reconcile. ``now``: seconds since 1970.
    ``memory``: is changed.
    """

    def __init__(
        self,
        cluster: ClusterAccess,
        policy: KVTierPolicy,
        inputs: ReconcileInput,
        memory: RejectionMemory,
        now: float,
    ) -> None:
        self._cluster = cluster
        self._policy = policy
        self._inputs = inputs
        self._memory = memory
        self._now = now

    async def detect(self, suspended: Sequence[SuspendedOwner]) -> list[InjectionFailure]:
        """Rejections that suspend their owner. Owners that are ``suspended`` already are only
        examined for the end of a trial, after which ``memory.cleared`` has them.
        """
        found = self._by_owner()
        known = {entry.uid for entry in suspended}
        self._memory.keep(found, known)
        self._end_trials(found)
        retry = self._policy.spec.attach.retry_seconds
        since = max(self._memory.changed_at, self._now - retry)
        failures: list[InjectionFailure] = []
        for uid, rejections in found.items():
            if rejections.last_at <= since or len(failures) >= MAX_REJECTIONS:
                break
            failure = await self._failure(rejections) if uid not in known else None
            if failure is not None:
                failures.append(failure)
        return failures

    def _by_owner(self) -> Mapping[str, Rejections]:
        """By the owner's uid, the newest first."""
        events = self._cluster.cache.list(EVENTS, self._policy.namespace)
        grouped: dict[str, Rejections] = {}
        for event in sorted(events, key=event_time, reverse=True):
            owner = event_owner(event)
            if event.get("reason") != "FailedCreate" or owner is None:
                continue
            earlier = grouped.get(owner.uid)
            newer = earlier.events if earlier is not None else ()
            grouped[owner.uid] = Rejections(owner, (*newer, event))
        return grouped

    def _end_trials(self, found: Mapping[str, Rejections]) -> None:
        for uid, trial in list(self._memory.trials.items()):
            rejections = found.get(uid)
            if rejections is None or names_injected_part(rejections.message):
                continue
            if rejections.last_at > trial.started_at + TRIAL_SETTLE_SECONDS:
                text = (
                    f"the API server rejects pods of {objects.owner_text(rejections.owner)} "
                    f"without tiers too: {shortened(rejections.message)}"
                )
                self._memory.cleared[uid] = Cleared(rejections.fingerprint, text)
                del self._memory.trials[uid]

    async def _failure(self, rejections: Rejections) -> InjectionFailure | None:
        namespace, owner = self._policy.namespace, rejections.owner
        if not self._inputs.accepted or not self._may_govern(rejections):
            return None
        if await self._cluster.lookups.injection_enabled(namespace) is False:
            return None
        template = None
        if quota_messages.is_resource_rejection(rejections.message):
            template = await self._cluster.lookups.pod_template(namespace, owner)
        cause = cause_of(rejections.message, template)
        if cause is Cause.OTHER:
            return None
        if cause is Cause.UNKNOWN and not self._is_worth_a_trial(rejections):
            return None
        self._memory.cleared.pop(owner.uid, None)
        text = (
            f"the API server rejected a pod of {objects.owner_text(owner)}: "
            f"{shortened(rejections.message)}"
        )
        if cause is Cause.UNKNOWN:
            self._memory.trials[owner.uid] = Trial(rejections.fingerprint, self._now)
            text += "; the next pod shows whether tiers are the cause"
        backoff = min(MAX_BACKOFF_SECONDS, rejections.last_at - rejections.began_at)
        return InjectionFailure(
            owner,
            Reason.REFUSED,
            text,
            is_certain=cause is Cause.INJECTION,
            retried_within_seconds=backoff + BACKOFF_MARGIN_SECONDS,
        )

    def _is_worth_a_trial(self, rejections: Rejections) -> bool:
        """Whether an unexplained rejection may come from the injection, has lasted, and was
        not tried before.
        """
        cleared = self._memory.cleared.get(rejections.owner.uid)
        if cleared is not None and cleared.fingerprint == rejections.fingerprint:
            return False
        began = rejections.began_at
        created = objects.parse_time(self._policy.metadata.creation_timestamp) or 0.0
        return began >= created and rejections.last_at - began >= SUSTAINED_SECONDS

    def _may_govern(self, rejections: Rejections) -> bool:
        """Whether this policy governs the pods of an owner, or may govern them because pods of such
        owners cannot be predicted. To suspend an owner whose pods it does not govern changes
        nothing.
        """
        namespace, cache, owner = self._policy.namespace, self._cluster.cache, rejections.owner
        if owner.kind == "DaemonSet":
            return False  # never injected
        kind = TEMPLATE_OWNERS.get(owner.kind)
        if kind is None:
            return True
        workload = cache.get(kind, namespace, owner.name)
        if workload is None:
            siblings = (pod.controller for pod in self._inputs.pods)
            if any(sibling is not None and sibling.uid == owner.uid for sibling in siblings):
                return True
            is_only_policy = len(cache.list(POLICIES, namespace)) == 1
            return is_only_policy and names_injected_part(rejections.message)
        labels = objects.labels(objects.spec(workload).get("template") or {})
        if not matches(self._policy.spec.pod_selector, labels):
            return False
        policies = [parse_policy(raw).policy for raw in cache.list(POLICIES, namespace)]
        chosen = governing([each for each in policies if each is not None], namespace, labels)
        return chosen is not None and chosen.metadata.uid == self._policy.metadata.uid


def _message(event: Object) -> str:
    return str(event.get("message") or "")


def _first_time(event: Object) -> float:
    """When an Event first occurred, in seconds since 1970."""
    first = objects.parse_time(event.get("firstTimestamp"))
    return first if first is not None else event_time(event)
