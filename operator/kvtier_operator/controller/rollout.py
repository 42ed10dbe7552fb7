"""Restarting workloads whose pods have an older structure, where the policy asks for it. Pure.

One annotation of the pod template, with the structural hash as its value, makes the workload's own controller replace its
pods as its update strategy says. One workload at a time, the next when the last is available. A workload that has the
annotation for this hash is never touched again for it: if its pods are still outdated, restarting did not help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier_operator.api.names import RESTART_ANNOTATION
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.settings import RolloutStrategy
from kvtier_operator.controller import objects
from kvtier_operator.controller.objects import Owner
from kvtier_operator.controller.pods.pod_view import PodView
from kvtier_operator.kube.resources import (
    DEPLOYMENTS,
    LEADER_WORKER_SETS,
    REPLICA_SETS,
    STATEFUL_SETS,
    Kind,
    Object,
)

LOOK_AGAIN_SECONDS = 5.0
"""While a workload is being replaced. Changes of pods and workloads come sooner."""
Find = Callable[[Kind, str], Object | None]
"""An object of the policy's namespace by kind and name, as last seen."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What owns pods at the top. ``outdated``: how many of its pods have an older structure."""

    kind: Kind
    found: Object
    outdated: int

    def __str__(self) -> str:
        return f"{self.kind.kind} {objects.name(self.found)}"


@dataclass(frozen=True, slots=True)
class Rollout:
    """Where it stands. ``restart``: the workload whose turn it is; ``under_way``: one that is being replaced, and why it
    counts as that; ``tried``: those that were restarted for this structure and have outdated pods still;
    ``unsupported``: owner and why; ``remaining``: how many wait for their turn; ``held``: why none has it.
    """

    restart: Workload | None = None
    under_way: str = ""
    tried: tuple[str, ...] = ()
    unsupported: tuple[tuple[str, str], ...] = ()
    remaining: int = 0
    held: str = ""


NO_ROLLOUT = Rollout()


def outdated(policy: KVTierPolicy, pods: Iterable[PodView], structural_hash: str) -> list[PodView]:
    """Pods whose tiers are of another structure, or of a policy that is gone."""
    return [
        pod
        for pod in pods
        if pod.injected
        and (
            not pod.same_policy or (pod.structural_hash and pod.structural_hash != structural_hash)
        )
    ]


def rollout(
    policy: KVTierPolicy, pods: Sequence[PodView], structural_hash: str, find: Find, held: str = ""
) -> Rollout:
    """Whose turn it is. ``held``: why nothing may be restarted: new pods would get no tiers, or not those they should."""
    if policy.spec.rollout.strategy is not RolloutStrategy.RESTART_WORKLOADS:
        return NO_ROLLOUT
    late = {pod.uid for pod in outdated(policy, pods, structural_hash)}
    workloads: dict[str, Workload] = {}
    unsupported: dict[str, str] = {}
    counts: dict[str, int] = {}
    for pod in pods:
        found, why = _top(pod.pod, find)
        is_late = pod.uid in late
        if found is None:
            if is_late:
                unsupported[why[0]] = why[1]
            continue
        uid = objects.uid(found[1])
        counts[uid] = counts.get(uid, 0) + is_late
        workloads[uid] = Workload(*found, counts[uid])
    ordered = sorted(
        workloads.values(), key=lambda each: (each.kind.kind, objects.name(each.found))
    )
    begun = [each for each in ordered if _restarted_for(each) == structural_hash]
    waiting = [
        each for each in ordered if each.outdated and _restarted_for(each) != structural_hash
    ]
    for each in list(waiting):
        why_not = _cannot(each)
        if why_not:
            unsupported[str(each)] = why_not
            waiting.remove(each)
    pending = next(
        (f"{each}: {_not_available(each)}" for each in begun if _not_available(each)), ""
    )
    tried = tuple(str(each) for each in begun if each.outdated and not _not_available(each))
    restart = waiting[0] if waiting and not pending and not held else None
    return Rollout(
        restart,
        pending,
        tried,
        tuple(sorted(unsupported.items())),
        len(waiting),
        held if waiting else "",
    )


def restart_body(kind: Kind, found: Object, structural_hash: str) -> dict[str, Any]:
    """The merge patch that restarts a workload."""
    template = {"metadata": {"annotations": {RESTART_ANNOTATION: structural_hash}}}
    if kind is not LEADER_WORKER_SETS:
        return {"spec": {"template": template}}
    described = objects.spec(found).get("leaderWorkerTemplate") or {}
    parts = {"workerTemplate": template}
    if described.get("leaderTemplate"):
        parts["leaderTemplate"] = template
    return {"spec": {"leaderWorkerTemplate": parts}}


def _top(pod: Object, find: Find) -> tuple[tuple[Kind, Object] | None, tuple[str, str]]:
    """The workload at the top of a pod's owners, or whom to name and why it is not restarted."""
    group = objects.labels(pod).get(objects.SET_NAME_LABEL)
    if group:
        found = find(LEADER_WORKER_SETS, group)
        if found is not None:
            return (LEADER_WORKER_SETS, found), ("", "")
    owner = objects.controller(pod)
    if owner is None:
        return None, (f"pod {objects.name(pod)}", "nobody would replace it")
    if owner.kind == "StatefulSet":
        return _workload(STATEFUL_SETS, owner, find)
    if owner.kind != "ReplicaSet":
        return None, (str(owner), f"a {owner.kind} is not restarted by KVTier")
    replicas = find(REPLICA_SETS, owner.name)
    above = objects.controller(replicas) if replicas is not None else None
    if above is None or above.kind != "Deployment":
        return None, (str(owner), "a ReplicaSet without a Deployment does not replace its pods")
    return _workload(DEPLOYMENTS, above, find)


def _workload(
    kind: Kind, owner: Owner, find: Find
) -> tuple[tuple[Kind, Object] | None, tuple[str, str]]:
    found = find(kind, owner.name)
    if found is None or objects.uid(found) != owner.uid:
        return None, (str(owner), "it is gone")
    above = objects.controller(found)
    if above is not None:
        # Whoever writes the workload's template would take the annotation back, and the restart would begin again.
        return None, (str(owner), f"it belongs to {above}, which writes its template")
    return (kind, found), ("", "")


def _templates(workload: Workload) -> list[Mapping[str, Any]]:
    described = objects.spec(workload.found)
    if workload.kind is not LEADER_WORKER_SETS:
        return [described.get("template") or {}]
    parts = described.get("leaderWorkerTemplate") or {}
    return [parts[key] for key in ("workerTemplate", "leaderTemplate") if parts.get(key)]


def _restarted_for(workload: Workload) -> str:
    found = {
        str(objects.annotated(template).get(RESTART_ANNOTATION) or "")
        for template in _templates(workload)
    }
    return found.pop() if len(found) == 1 else ""


def _cannot(workload: Workload) -> str:
    """Why a changed template would not replace its pods."""
    described = objects.spec(workload.found)
    if workload.kind is DEPLOYMENTS and described.get("paused"):
        return "it is paused"
    strategy = described.get("updateStrategy") or {}
    if workload.kind is STATEFUL_SETS and strategy.get("type") == "OnDelete":
        return "its update strategy is OnDelete"
    if (
        workload.kind is STATEFUL_SETS
        and ((strategy.get("rollingUpdate") or {}).get("partition") or 0) > 0
    ):
        return "its update has a partition"
    return ""


def _not_available(workload: Workload) -> str:
    """What is missing until a workload has all its pods replaced and available; empty: nothing."""
    about, reported, described = (
        objects.metadata(workload.found),
        objects.status(workload.found),
        objects.spec(workload.found),
    )
    wanted = described.get("replicas")
    wanted = 1 if wanted is None else int(wanted)
    # A LeaderWorkerSet says nothing of the generation that its status is about.
    if workload.kind is not LEADER_WORKER_SETS and (reported.get("observedGeneration") or 0) < (
        about.get("generation") or 0
    ):
        return "its controller has not begun"
    updated = int(reported.get("updatedReplicas") or 0)
    if (
        workload.kind is STATEFUL_SETS
        and not updated
        and reported.get("currentRevision") == reported.get("updateRevision")
    ):
        updated = wanted
    if updated < wanted:
        return f"{updated} of {wanted} replicas are replaced"
    available_key = "readyReplicas" if workload.kind is LEADER_WORKER_SETS else "availableReplicas"
    available = int(reported.get(available_key) or 0)
    if available < wanted:
        return f"{available} of {wanted} replicas are available"
    if workload.kind is DEPLOYMENTS and int(reported.get("replicas") or 0) > wanted:
        return "replaced pods are still there"
    return ""
