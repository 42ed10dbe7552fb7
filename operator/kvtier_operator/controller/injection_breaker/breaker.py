"""Looking for pods that attaching keeps from starting: what is asked of the caches and the API server, for ``injection`` to
judge. Costs nothing where every pod starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvtier_operator.api.conditions import Reason
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.selector import matches
from kvtier_operator.api.settings import AttachMode
from kvtier_operator.api.status import SuspendedOwner
from kvtier_operator.controller import objects
from kvtier_operator.controller.children.observe import read
from kvtier_operator.controller.index import age
from kvtier_operator.controller.injection_breaker import detectors, quota_messages
from kvtier_operator.controller.injection_breaker.detectors import (
    DetectionContext,
    InjectionFailure,
)
from kvtier_operator.controller.injection_breaker.insufficient_resources import (
    insufficient_resources,
)
from kvtier_operator.controller.lookups import Lookups
from kvtier_operator.controller.status.conditions import PlanFacts
from kvtier_operator.kube.resources import (
    CLAIMS,
    EVENTS,
    PODS,
    POLICIES,
    REPLICA_SETS,
    STATEFUL_SETS,
    Cache,
    Client,
    Object,
)
from kvtier_operator.settings import Settings

MAX_LOOKED_INTO = 8
"""Pods and refusals that are looked into per look; the others' turn comes when these are settled."""


class Search:
    """One search, for one policy. ``changed_at``: when the policy last changed; what was refused before says nothing."""

    def __init__(
        self,
        policy: KVTierPolicy,
        facts: PlanFacts,
        cache: Cache,
        client: Client,
        lookups: Lookups,
        settings: Settings,
        now: float,
        changed_at: float,
    ) -> None:
        self._policy = policy
        self._facts = facts
        self._cache = cache
        self._client = client
        self._lookups = lookups
        self._settings = settings
        self._now = now
        self._changed_at = changed_at

    async def troubles(self, in_force: Sequence[SuspendedOwner]) -> list[InjectionFailure]:
        """Pods that are kept down, then owners whose pods were refused. Owners in ``in_force`` are not searched for
        refusals again.
        """
        if self._policy.spec.attach.mode is not AttachMode.WEBHOOK:
            return []
        waiting = [pod for pod in self._facts.pods if detectors.waits(self._policy, pod, self._now)]
        found = []
        for pod in sorted(waiting, key=objects.name)[:MAX_LOOKED_INTO]:
            trouble = await self._kept_down(pod)
            if trouble is not None:
                found.append(await self._with_pull_secret(trouble))
        return [*found, *await self._refused({entry.uid for entry in in_force})]

    async def _kept_down(self, pod: Object) -> InjectionFailure | None:
        namespace = objects.namespace(pod)
        scheduled = objects.condition(pod, "PodScheduled").get("status") == "True"
        around = DetectionContext(claim=lambda name: self._cache.get(CLAIMS, namespace, name))
        trouble = detectors.kept_down(self._policy, pod, around, self._now)
        if trouble is not None:
            return trouble
        if scheduled:
            around = DetectionContext(around.claim, await self._lookups.events(self._client, pod))
        elif "Insufficient" in str(objects.condition(pod, "PodScheduled").get("message")):
            around = DetectionContext(around.claim, crowded_out=await self._crowded_out(pod))
        return detectors.kept_down(self._policy, pod, around, self._now)

    async def _with_pull_secret(self, trouble: InjectionFailure) -> InjectionFailure:
        """Says so where an image is not pulled because the Secret for it was never put into this namespace."""
        secret, namespace = self._settings.images.pull_secret, self._policy.namespace
        if not secret or trouble.reason is not Reason.IMAGE_NOT_PULLED:
            return trouble
        if not await self._lookups.lacks_secret(self._client, namespace, secret):
            return trouble
        message = f"{trouble.message} (the pull secret {secret} is not in namespace {namespace})"
        return replace(trouble, message=message)

    async def _crowded_out(self, pod: Object) -> str:
        if self._settings.watch_namespaces:
            # Of the other namespaces' pods nothing is known, so neither is what is free.
            return ""
        whole = await self._lookups.pod(self._client, pod)
        nodes = await self._lookups.nodes(self._client)
        return (
            insufficient_resources(whole, nodes, self._cache.list(PODS))
            if whole is not None
            else ""
        )

    async def _refused(self, known: set[str]) -> list[InjectionFailure]:
        namespace = self._policy.namespace
        since = max(self._changed_at, self._now - self._policy.spec.attach.retry_seconds)
        found: dict[str, InjectionFailure] = {}
        for event in sorted(
            self._cache.list(EVENTS, namespace), key=detectors.happened, reverse=True
        ):
            if len(found) >= MAX_LOOKED_INTO or detectors.happened(event) <= since:
                break
            owner = detectors.refused_owner(event)
            if event.get("reason") != "FailedCreate" or owner is None or owner.uid in known:
                continue
            known.add(owner.uid)
            message = str(event.get("message") or "")
            if not self._governs(event) or not self._facts.accepted:
                continue
            if await self._lookups.namespace_asks(self._client, namespace) is False:
                continue
            by_added = False
            if quota_messages.by_numbers(message):
                template = await self._lookups.template(self._client, namespace, owner)
                by_added = template is not None and quota_messages.ours(
                    template.get("spec") or {}, message
                )
            trouble = detectors.refused(event, by_added)
            if trouble is not None:
                found[owner.uid] = trouble
        return list(found.values())

    def _governs(self, event: Object) -> bool:
        """Whether the pods of the owner that an Event is about are, or would be, this policy's."""
        owner = detectors.refused_owner(event)
        if owner is None:
            return False
        namespace = self._policy.namespace
        kind = {"ReplicaSet": REPLICA_SETS, "StatefulSet": STATEFUL_SETS}.get(owner.kind)
        made_by = self._cache.get(kind, namespace, owner.name) if kind is not None else None
        if made_by is not None:
            labels = objects.labels(objects.spec(made_by).get("template") or {})
            if not matches(self._policy.spec.pod_selector, labels):
                return False
            policies = [read(raw) for raw in self._cache.list(POLICIES, namespace)]
            selecting = [
                known
                for known in policies
                if known.policy and matches(known.policy.spec.pod_selector, labels)
            ]
            return bool(selecting) and min(selecting, key=age).uid == self._policy.metadata.uid
        siblings = (objects.controller(pod) for pod in self._facts.pods)
        if any(other is not None and other.uid == owner.uid for other in siblings):
            return True
        # What such an owner's pods look like cannot be seen; with a single policy there is nobody else to have changed them.
        alone = len(self._cache.list(POLICIES, namespace)) == 1
        return alone and detectors.names_a_part(str(event.get("message") or ""))
