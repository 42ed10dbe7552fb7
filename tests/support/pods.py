"""Pods in every state that a kubelet can report, and reports of their tierd, as test values."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from kvtier_operator.api.policy import KVTierPolicy

NOON = 1_800_000_000.0
"""A moment, in seconds since 1970, that tests call now."""
HASH = "0123abcd"
POLICY_UID = "policy-uid"


def at(seconds: float = NOON) -> str:
    """A time as Kubernetes writes it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def policy(
    *tiers: Mapping[str, Any], status: Mapping[str, Any] | None = None, **spec: Any
) -> KVTierPolicy:
    """The policy ``chat`` of namespace ``serving``: memory, and the tiers given."""
    return KVTierPolicy.model_validate(
        {
            "apiVersion": "kvtier.io/v1alpha1",
            "kind": "KVTierPolicy",
            "metadata": {
                "name": "chat",
                "namespace": "serving",
                "uid": POLICY_UID,
                "generation": 3,
                "creationTimestamp": at(NOON - 7200),
            },
            "spec": {
                "podSelector": {"matchLabels": {"app": "chat"}},
                "tiers": [{"name": "ram", "memory": {"capacity": "1Gi"}}, *tiers],
                **spec,
            },
            **({"status": dict(status)} if status is not None else {}),
        }
    )


def file_tier(name: str, sharing: str, volume: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A file tier on a hostPath, or on the volume given."""
    chosen = dict(volume or {"hostPath": {"path": f"/mnt/{name}"}})
    return {"name": name, "fileSystem": {"capacity": "10Gi", "sharing": sharing, "volume": chosen}}


def bare_pod(
    name: str = "chat-1",
    *,
    created: float = NOON - 3600,
    owner: str = "ReplicaSet chat-5d",
    **labels: str,
) -> dict[str, Any]:
    """A selected, pending pod that was not injected. ``owner``: kind and name of its controller."""
    kind, _, owner_name = owner.partition(" ")
    references = [
        {
            "apiVersion": "apps/v1",
            "kind": kind,
            "name": owner_name,
            "uid": f"uid-of-{owner_name}",
            "controller": True,
        }
    ]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "serving",
            "uid": f"uid-of-{name}",
            "resourceVersion": "7",
            "creationTimestamp": at(created),
            "labels": {"app": "chat", **labels},
            **({"ownerReferences": references} if owner else {}),
        },
        "spec": {"containers": [{"name": "vllm", "image": "vllm"}]},
        "status": {"phase": "Pending"},
    }


def injected_pod(
    name: str = "chat-1",
    *,
    structural_hash: str = HASH,
    port: int = 9400,
    policy_uid: str = POLICY_UID,
    volumes: Sequence[Mapping[str, Any]] = (),
    **rest: Any,
) -> dict[str, Any]:
    """The same with tiers, pending."""
    pod = bare_pod(name, **rest)
    structural = {"contentHash": structural_hash, "http": {"host": "0.0.0.0", "port": port}}
    pod["metadata"]["annotations"] = {
        "kvtier.io/structural": json.dumps(structural),
        "kvtier.io/structural-hash": structural_hash,
        "kvtier.io/policy": "chat",
        "kvtier.io/policy-uid": policy_uid,
    }
    pod["spec"]["initContainers"] = [
        {"name": "kvtier-payload", "image": "registry.example/payload:1"},
        {
            "name": "kvtier-tierd",
            "image": "registry.example/tierd:1",
            "restartPolicy": "Always",
            "resources": {
                "requests": {"cpu": "1", "memory": "2Gi"},
                "limits": {"cpu": "8", "memory": "2Gi"},
            },
        },
    ]
    pod["spec"]["containers"][0]["volumeMounts"] = [
        {"name": "kvtier-run", "mountPath": "/run/kvtier"}
    ]
    pod["spec"]["volumes"] = [
        {"name": "kvtier-run", "emptyDir": {"medium": "Memory"}},
        *map(dict, volumes),
    ]
    return pod


def state(
    name: str,
    *,
    ready: bool = False,
    restarts: int = 0,
    last: Mapping[str, Any] | None = None,
    **found: Any,
) -> dict[str, Any]:
    """A container's status; ``found`` is its state, ``waiting={"reason": ...}`` say."""
    return {
        "name": name,
        "ready": ready,
        "restartCount": restarts,
        "state": found,
        **({"lastState": {"terminated": dict(last)}} if last else {}),
    }


def scheduled(
    pod: Mapping[str, Any], since: float = NOON - 3600, node: str = "node-a"
) -> dict[str, Any]:
    """It has a node, and its kubelet has started nothing."""
    found = copy.deepcopy(dict(pod))
    found["spec"]["nodeName"] = node
    found["status"] = {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": at(since)}],
        "initContainerStatuses": [
            state(each["name"], waiting={"reason": "PodInitializing"})
            for each in found["spec"].get("initContainers", ())
        ],
        "containerStatuses": [
            state(each["name"], waiting={"reason": "PodInitializing"})
            for each in found["spec"]["containers"]
        ],
    }
    return found


def unschedulable(pod: Mapping[str, Any], message: str) -> dict[str, Any]:
    """The scheduler found no node."""
    found = copy.deepcopy(dict(pod))
    entry = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": message,
    }
    found["status"] = {
        "phase": "Pending",
        "conditions": [{**entry, "lastTransitionTime": at(NOON - 3600)}],
    }
    return found


def with_state(pod: Mapping[str, Any], container: str, **found: Any) -> dict[str, Any]:
    """One container's status replaced; see ``state``."""
    changed = copy.deepcopy(dict(pod))
    for group in ("initContainerStatuses", "containerStatuses"):
        changed["status"][group] = [
            state(container, **found) if each["name"] == container else each
            for each in changed["status"].get(group, ())
        ]
    return changed


def running(
    pod: Mapping[str, Any],
    *,
    ready_since: float | None = NOON - 3000,
    node: str = "node-a",
    address: str = "10.1.2.3",
) -> dict[str, Any]:
    """Its containers run; the engine is ready since then, or not (None)."""
    found = scheduled(pod, node=node)
    began = {"startedAt": at(NOON - 3500)}
    found["status"] |= {"phase": "Running", "podIP": address}
    ready = ready_since is not None
    since = ready_since if ready_since is not None else NOON - 3500
    found["status"]["conditions"].append(
        {"type": "ContainersReady", "status": str(ready), "lastTransitionTime": at(since)}
    )
    found["status"]["initContainerStatuses"] = [
        state(
            each["name"],
            ready=True,
            **(
                {"running": began} if each.get("restartPolicy") else {"terminated": {"exitCode": 0}}
            ),
        )
        for each in found["spec"].get("initContainers", ())
    ]
    found["status"]["containerStatuses"] = [
        state(each["name"], ready=ready, running=began) for each in found["spec"]["containers"]
    ]
    return found


def terminating(pod: Mapping[str, Any], since: float) -> dict[str, Any]:
    """Its grace period ended then."""
    found = copy.deepcopy(dict(pod))
    found["metadata"]["deletionTimestamp"] = at(since)
    return found


def skipped(pod: Mapping[str, Any], reason: str, message: str) -> dict[str, Any]:
    """The webhook left it alone."""
    found = copy.deepcopy(dict(pod))
    note = json.dumps({"policy": "chat", "reason": reason, "message": message})
    found["metadata"].setdefault("annotations", {})["kvtier.io/skipped"] = note
    return found


def tier_document(name: str = "ram", status: str = "Healthy", **more: Any) -> dict[str, Any]:
    """One tier of ``status_document``."""
    found = {
        "name": name,
        "kind": "memory",
        "state": status,
        "usedBytes": 0,
        "capacityBytes": 1 << 30,
        "lastError": "",
    }
    return {**found, **more}


def status_document(
    *tiers: Mapping[str, Any], sessions: str = "ready", generation: int = 5, **more: Any
) -> dict[str, Any]:
    """The response of ``/status``. ``sessions``: ``ready``, ``none``, ``unready`` (no worker)."""
    ready = sessions == "ready"
    scheduler = {
        "engine": "e",
        "role": "scheduler",
        "rank": 0,
        "pid": 1,
        "epoch": 1,
        "ready": ready,
    }
    worker = {**scheduler, "role": "worker"}
    return {
        "version": "1",
        "policy": "serving/chat",
        "started": True,
        "appliedGeneration": generation,
        "liveRefusals": [],
        "tiers": [dict(each) for each in tiers] or [tier_document()],
        "sessions": [] if sessions == "none" else [scheduler, worker] if ready else [scheduler],
        "conditions": [],
        "counters": [],
        **more,
    }
