"""The injection breaker: injection must never prevent a pod from starting.

Each reconcile detects failures (``FailureDetector``), suspends the owners of the affected pods
(``suspended_owners``), and deletes blocked pods (``deletable_pods``), so that their owner replaces
them with pods that are not injected.

A suspended owner is listed in the policy's status with its uid. New pods name that uid in
``ownerReferences``, so the webhook needs nothing else to skip them. The owner of a Deployment's
pods is a ReplicaSet: a changed pod template is another ReplicaSet, and is injected at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvtier_operator.api.conditions import Reason
from kvtier_operator.api.pods import Pod
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.settings import AttachMode
from kvtier_operator.api.status import SuspendedOwner
from kvtier_operator.controller import objects
from kvtier_operator.controller.conditions import ReconcileInput
from kvtier_operator.controller.injection_breaker import detectors
from kvtier_operator.controller.injection_breaker.detectors import InjectionFailure, PodContext
from kvtier_operator.controller.injection_breaker.insufficient_resources import (
    insufficient_resources,
)
from kvtier_operator.controller.injection_breaker.rejections import (
    RejectionDetector,
    RejectionMemory,
)
from kvtier_operator.controller.lookups import ClusterAccess
from kvtier_operator.kube.resources import CLAIMS, PODS
from kvtier_operator.settings import Settings

MAX_EXAMINED = 8
"""Blocked pods that one reconcile examines. The next ones follow once these are resolved."""
MAX_SUSPENDED = 16
NO_PULL_SECRET = "FailedToRetrieveImagePullSecret"  # noqa: S105  (a reason)
SETTLE_SECONDS = 2.0
"""Between writing a suspension to the status and deleting the blocked pod: the webhook has seen the
suspension by then.
"""


class FailureDetector:
    """Detects injection failures of one policy in one reconcile. Makes no calls while every pod
    starts.

    ``now``: seconds since 1970. ``memory``: of the policy's rejections; is changed.
    """

    def __init__(
        self,
        cluster: ClusterAccess,
        settings: Settings,
        policy: KVTierPolicy,
        inputs: ReconcileInput,
        now: float,
        memory: RejectionMemory,
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._policy = policy
        self._inputs = inputs
        self._now = now
        self._rejections = RejectionDetector(cluster, policy, inputs, memory, now)

    async def detect(self, suspended: Sequence[SuspendedOwner]) -> list[InjectionFailure]:
        """Blocked pods, then rejections."""
        if self._policy.spec.attach.mode is not AttachMode.WEBHOOK:
            return []
        blocked = [
            pod for pod in self._inputs.pods if detectors.is_blocked(self._policy, pod, self._now)
        ]
        failures = []
        for pod in sorted(blocked, key=lambda pod: pod.metadata.name)[:MAX_EXAMINED]:
            failure = await self._blocked(pod)
            if failure is not None:
                failures.append(await self._with_pull_secret(failure))
        return [*failures, *await self._rejections.detect(suspended)]

    async def _blocked(self, pod: Pod) -> InjectionFailure | None:
        """Decides from the caches if it can; else from the pod's Events or the nodes, which cost
        calls.
        """
        namespace, cache = pod.metadata.namespace, self._cluster.cache
        context = PodContext(get_claim=lambda name: cache.get(CLAIMS, namespace, name))
        failure = detectors.blocked_pod_failure(self._policy, pod, context, self._now)
        if failure is not None:
            return failure
        scheduled = pod.status.condition("PodScheduled")
        if scheduled is not None and scheduled.status == "True":
            context = replace(context, events=await self._cluster.lookups.events(pod))
        elif scheduled is not None and "Insufficient" in scheduled.message:
            message = await self._insufficient_resources(pod)
            context = replace(context, insufficient_resources=message)
        return detectors.blocked_pod_failure(self._policy, pod, context, self._now)

    async def _with_pull_secret(self, failure: InjectionFailure) -> InjectionFailure:
        """Adds to the message that the pull secret is missing, if the kubelet says so."""
        secret, namespace = self._settings.images.pull_secret, self._policy.namespace
        if not secret or failure.pod is None or failure.reason is not Reason.IMAGE_NOT_PULLED:
            return failure
        events = await self._cluster.lookups.events(failure.pod)
        missing = (each for each in events if each.get("reason") == NO_PULL_SECRET)
        if not any(secret in _names(str(each.get("message"))) for each in missing):
            return failure
        message = f"{failure.message} (namespace {namespace} has no pull secret {secret})"
        return replace(failure, message=message)

    async def _insufficient_resources(self, pod: Pod) -> str:
        if self._settings.watch_namespaces:
            # The pods of the other namespaces are not known, so neither are the free resources of
            # nodes.
            return ""
        complete = await self._cluster.lookups.pod(pod)
        if complete is None:
            return ""
        nodes = await self._cluster.lookups.nodes()
        return insufficient_resources(complete, nodes, self._cluster.cache.list(PODS))


def _names(message: str) -> list[str]:
    """The Secrets that the kubelet's message has in parentheses."""
    return re.findall(r"[^\s,]+", message.partition("(")[2].partition(")")[0])


def suspended_owners(
    policy: KVTierPolicy,
    current: Iterable[SuspendedOwner],
    failures: Iterable[InjectionFailure],
    now: float,
) -> list[SuspendedOwner]:
    """Owners whose new pods are not injected: the ``current`` ones until they expire, then those of
    ``failures``. At most ``MAX_SUSPENDED``, the current ones first.
    """
    suspended: dict[str, SuspendedOwner] = {}
    for entry in current:
        until = objects.parse_time(entry.until)
        if until is not None and until > now:
            suspended.setdefault(entry.uid, entry)
    for failure in failures:
        owner = failure.owner
        if owner is None or owner.uid in suspended or len(suspended) >= MAX_SUSPENDED:
            continue
        # It has to last until the owner creates the next pod.
        seconds = max(policy.spec.attach.retry_seconds, failure.retried_within_seconds)
        suspended[owner.uid] = SuspendedOwner(
            kind=owner.kind,
            name=owner.name,
            uid=owner.uid,
            reason=failure.reason.value,
            until=objects.format_time(now + seconds),
        )
    return list(suspended.values())


def deletable_pods(
    policy: KVTierPolicy,
    current: Iterable[SuspendedOwner],
    failures: Iterable[InjectionFailure],
    now: float,
    changed_at: float = 0.0,
) -> tuple[list[InjectionFailure], float | None]:
    """Failures whose blocked pod can be deleted: its replacement is not injected, because the owner
    has been suspended for ``SETTLE_SECONDS``, or is injected according to a policy that changed
    since. Also returns the seconds until the other owners' suspensions have settled; None if there
    are none.
    """
    suspended_at = {
        entry.uid: (objects.parse_time(entry.until) or now) - policy.spec.attach.retry_seconds
        for entry in current
    }
    deletable: list[InjectionFailure] = []
    wake: float | None = None
    for failure in failures:
        if failure.pod is None or failure.owner is None:
            continue
        since = suspended_at.get(failure.owner.uid)
        settled = since is not None and now - since >= SETTLE_SECONDS
        if failure.predates(changed_at) or settled:
            deletable.append(failure)
        else:
            wake = SETTLE_SECONDS
    return deletable, wake
