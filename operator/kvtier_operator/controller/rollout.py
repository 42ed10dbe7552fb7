"""Restarting workloads whose pods run with an older structure (``rollout.strategy:
RestartWorkloads``). Pure.

The structural hash is set as an annotation of the pod template, so the workload's own controller
replaces the pods according to its update strategy. One workload restarts at a time; the next one
starts when it is available. A workload that already has the annotation for this hash is not
restarted again: if its pods are still outdated, a restart did not help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier_operator.api.names import RESTART_ANNOTATION
from kvtier_operator.api.pods import OwnerReference, Pod
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.settings import RolloutStrategy
from kvtier_operator.controller import objects
from kvtier_operator.controller.pods.pod_view import PodView
from kvtier_operator.kube.resources import (
    DEPLOYMENTS,
    LEADER_WORKER_SETS,
    REPLICA_SETS,
    STATEFUL_SETS,
    Kind,
    Object,
)

RECHECK_SECONDS = 5.0
"""While a workload restarts. Changes of pods and workloads trigger a reconcile sooner."""
GetObject = Callable[[Kind, str], Object | None]
"""An object of the policy's namespace by kind and name, from the cache."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The top-level owner of pods. ``outdated``: how many of its pods have an older structure."""

    kind: Kind
    body: Object
    outdated: int

    def __str__(self) -> str:
        return f"{self.kind.kind} {objects.name(self.body)}"


@dataclass(frozen=True, slots=True)
class Unsupported:
    """An owner of outdated pods that is not restarted, and why."""

    owner: str
    reason: str


@dataclass(frozen=True, slots=True)
class Rollout:
    """The progress of a rollout.

    ``restart``: the workload to restart now. ``in_progress``: the workload that is restarting, and
    what is missing; empty: none. ``ineffective``: workloads that were restarted for this structure
    and still have outdated pods. ``waiting``: number of workloads to restart. ``paused``: why none
    may be restarted; empty: it may.
    """

    restart: Workload | None = None
    in_progress: str = ""
    ineffective: tuple[str, ...] = ()
    unsupported: tuple[Unsupported, ...] = ()
    waiting: int = 0
    paused: str = ""


NO_ROLLOUT = Rollout()


def outdated(policy: KVTierPolicy, pods: Iterable[PodView], structural_hash: str) -> list[PodView]:
    """Pods whose structure is another one, or comes from a policy that no longer exists."""
    return [
        pod
        for pod in pods
        if pod.has_tiers
        and (
            not pod.same_policy or (pod.structural_hash and pod.structural_hash != structural_hash)
        )
    ]


def plan_rollout(
    policy: KVTierPolicy,
    pods: Sequence[PodView],
    structural_hash: str,
    get: GetObject,
    paused: str = "",
) -> Rollout:
    """Chooses the workload to restart. ``paused``: why nothing may be restarted now, because new
    pods would get no tiers or the wrong ones.
    """
    if policy.spec.rollout.strategy is not RolloutStrategy.RESTART_WORKLOADS:
        return NO_ROLLOUT
    outdated_uids = {pod.uid for pod in outdated(policy, pods, structural_hash)}
    workloads: dict[str, Workload] = {}
    unsupported: dict[str, str] = {}
    for pod in pods:
        is_outdated = pod.uid in outdated_uids
        owner = _top_owner(pod.pod, get)
        if isinstance(owner, Unsupported):
            if is_outdated:
                unsupported[owner.owner] = owner.reason
            continue
        kind, body = owner
        uid = objects.uid(body)
        count = workloads[uid].outdated if uid in workloads else 0
        workloads[uid] = Workload(kind, body, count + is_outdated)
    ordered = sorted(workloads.values(), key=lambda each: (each.kind.kind, objects.name(each.body)))
    restarted = [each for each in ordered if _restarted_for(each) == structural_hash]
    waiting = []
    for each in ordered:
        if not each.outdated or _restarted_for(each) == structural_hash:
            continue
        obstacle = _obstacle(each)
        if obstacle:
            unsupported[str(each)] = obstacle
        else:
            waiting.append(each)
    missing = {str(each): _missing(each) for each in restarted}
    in_progress = next((f"{name}: {what}" for name, what in missing.items() if what), "")
    return Rollout(
        restart=waiting[0] if waiting and not in_progress and not paused else None,
        in_progress=in_progress,
        ineffective=tuple(
            str(each) for each in restarted if each.outdated and not missing[str(each)]
        ),
        unsupported=tuple(Unsupported(*each) for each in sorted(unsupported.items())),
        waiting=len(waiting),
        paused=paused if waiting else "",
    )


def restart_patch(workload: Workload, structural_hash: str) -> dict[str, Any]:
    """The merge patch that restarts a workload."""
    template = {"metadata": {"annotations": {RESTART_ANNOTATION: structural_hash}}}
    if workload.kind is not LEADER_WORKER_SETS:
        return {"spec": {"template": template}}
    parts = {"workerTemplate": template}
    if _leader_worker_template(workload).get("leaderTemplate"):
        parts["leaderTemplate"] = template
    return {"spec": {"leaderWorkerTemplate": parts}}


def _top_owner(pod: Pod, get: GetObject) -> tuple[Kind, Object] | Unsupported:
    """The workload at the top of a pod's owners."""
    group = pod.metadata.labels.get(objects.SET_NAME_LABEL)
    if group:
        found = get(LEADER_WORKER_SETS, group)
        if found is not None:
            return LEADER_WORKER_SETS, found
    owner = pod.controller
    if owner is None:
        return Unsupported(f"pod {pod.metadata.name}", "it has no owner that would replace it")
    name = objects.owner_text(owner)
    if owner.kind == "StatefulSet":
        return _workload(STATEFUL_SETS, owner, get)
    if owner.kind != "ReplicaSet":
        return Unsupported(name, f"KVTier does not restart a {owner.kind}")
    replica_set = get(REPLICA_SETS, owner.name)
    deployment = objects.controller_owner(replica_set) if replica_set is not None else None
    if deployment is None or deployment.kind != "Deployment":
        return Unsupported(name, "a ReplicaSet without a Deployment does not replace its pods")
    return _workload(DEPLOYMENTS, deployment, get)


def _workload(
    kind: Kind, owner: OwnerReference, get: GetObject
) -> tuple[Kind, Object] | Unsupported:
    found = get(kind, owner.name)
    if found is None or objects.uid(found) != owner.uid:
        return Unsupported(objects.owner_text(owner), "it no longer exists")
    parent = objects.controller_owner(found)
    if parent is not None:
        # The parent would revert the annotation, and the restart would repeat without end.
        reason = f"{objects.owner_text(parent)} manages its template"
        return Unsupported(objects.owner_text(owner), reason)
    return kind, found


def _leader_worker_template(workload: Workload) -> Mapping[str, Any]:
    return objects.spec(workload.body).get("leaderWorkerTemplate") or {}


def _restarted_for(workload: Workload) -> str:
    """The structural hash that the workload was last restarted for; empty: none."""
    if workload.kind is LEADER_WORKER_SETS:
        parts = _leader_worker_template(workload)
        templates = [parts[key] for key in ("workerTemplate", "leaderTemplate") if parts.get(key)]
    else:
        templates = [objects.spec(workload.body).get("template") or {}]
    hashes = {
        str((objects.metadata(template).get("annotations") or {}).get(RESTART_ANNOTATION) or "")
        for template in templates
    }
    return hashes.pop() if len(hashes) == 1 else ""


def _obstacle(workload: Workload) -> str:
    """Why a changed template would not replace the pods; empty: it would."""
    spec = objects.spec(workload.body)
    if workload.kind is DEPLOYMENTS and spec.get("paused"):
        return "it is paused"
    strategy = spec.get("updateStrategy") or {}
    if workload.kind is STATEFUL_SETS and strategy.get("type") == "OnDelete":
        return "its update strategy is OnDelete"
    partition = (strategy.get("rollingUpdate") or {}).get("partition") or 0
    if workload.kind is STATEFUL_SETS and partition > 0:
        return "its update strategy has a partition"
    return ""


def _missing(workload: Workload) -> str:
    """What is missing until all pods of a workload are replaced and available; empty: nothing."""
    spec, status = objects.spec(workload.body), objects.status(workload.body)
    replicas = spec.get("replicas")
    desired = 1 if replicas is None else int(replicas)
    generation = objects.metadata(workload.body).get("generation") or 0
    # A LeaderWorkerSet does not report the generation that its status is about.
    observed = status.get("observedGeneration") or 0
    if workload.kind is not LEADER_WORKER_SETS and observed < generation:
        return "its controller has not started the update"
    updated = int(status.get("updatedReplicas") or 0)
    if (
        workload.kind is STATEFUL_SETS
        and not updated
        and status.get("currentRevision") == status.get("updateRevision")
    ):
        updated = desired
    if updated < desired:
        return f"{updated} of {desired} replicas are updated"
    available_key = "readyReplicas" if workload.kind is LEADER_WORKER_SETS else "availableReplicas"
    available = int(status.get(available_key) or 0)
    if available < desired:
        return f"{available} of {desired} replicas are available"
    if workload.kind is DEPLOYMENTS and int(status.get("replicas") or 0) > desired:
        return "old pods still exist"
    return ""
