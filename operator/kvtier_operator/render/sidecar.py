"""Containers that are added to a pod: the payload's and tierd's. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.tiers import Tier
from kvtier_operator.api.volumes import Medium
from kvtier_operator.render import names
from kvtier_operator.render.documents import POD_TOPOLOGY_DIRECTORY
from kvtier_operator.render.resources import CPU, MEMORY, STORAGE, amount, amounts, containers, limits_of
from kvtier_operator.render.storage import Storage, pool_bytes
from kvtier_operator.render.structure import Structure
from kvtier_operator.render.topology import POD_RUN_DIRECTORY
from kvtier_operator.settings import Settings

DAEMON_BYTES = 512 << 20
"""What tierd needs beside the pool and its indexes."""
INDEX_BYTES = 256 << 20
"""For indexes of objects: tierd bounds how many there are by it; those beyond are not indexed, and counted."""
GUARANTEED_CPU = 4
"""Whole, because a Guaranteed pod's cpus may be exclusive, and enough for a pool to be touched by several threads."""
SCRATCH_BYTES = 512 << 20
"""Of the node's disk beside tiers: the payload, and logs as the kubelet rotates them."""
USUAL_CPU_LIMIT = 8
PAYLOAD_RESOURCES = {"cpu": ("100m", "1"), "memory": ("128Mi", "128Mi")}
PORT_NAME = "kvtier-http"

Container = dict[str, Any]


def daemon_bytes(policy: KVTierPolicy, tiers: Sequence[Tier]) -> int:
    """Memory of tierd's container, request and limit: pool, tierd itself, indexes, and file tiers that are in memory, whose
    pages count against who writes them.
    """
    return pool_bytes(policy) + DAEMON_BYTES + INDEX_BYTES + _empty_dir_bytes(tiers, Medium.MEMORY)


def scratch_bytes(tiers: Sequence[Tier], spec: Mapping[str, Any]) -> int:
    """Ephemeral storage of tierd's container. The kubelet evicts a pod whose containers and directories together exceed the
    sum of its limits, so where there is a limit, or a tier lives in such a directory, what is added has to have its own.
    """
    files = _empty_dir_bytes(tiers, Medium.DISK)
    limited = any(STORAGE in limits_of(each) for each in containers(spec))
    return files + SCRATCH_BYTES if files or limited else 0


def _empty_dir_bytes(tiers: Sequence[Tier], medium: Medium) -> int:
    found = 0
    for tier in tiers:
        empty = tier.file_system.volume.empty_dir if tier.file_system is not None else None
        if tier.file_system is not None and empty is not None and empty.medium is medium:
            found += (empty.size_limit or tier.file_system.capacity).size_bytes
    return found


def payload(
    settings: Settings, engine: Mapping[str, Any], spec: Mapping[str, Any], found: Storage, whole: bool
) -> Container:
    """The init container that copies the connector. ``whole``: for a Guaranteed pod."""
    requests = {name: pair[1 if whole else 0] for name, pair in PAYLOAD_RESOURCES.items()}
    limits = {name: pair[1] for name, pair in PAYLOAD_RESOURCES.items()}
    return {
        "name": names.PAYLOAD_CONTAINER,
        "image": settings.images.payload,
        "imagePullPolicy": settings.images.pull_policy.value,
        "command": ["kvtier-payload", names.PAYLOAD_DIRECTORY],
        "resources": {"requests": requests, "limits": limits},
        "securityContext": security(engine, spec),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": found.payload,
    }


def tierd(
    policy: KVTierPolicy,
    settings: Settings,
    engine: Mapping[str, Any],
    spec: Mapping[str, Any],
    found: Storage,
    given: Structure,
    whole: bool,
) -> Container:
    """The native sidecar. It has no probe: process 1 restarts a tierd that died or hangs, and a container that the
    kubelet restarted would leave the pool charged to the pod and to no container's limit (CLUSTER, The sidecar).
    """
    return {
        "name": names.TIERD_CONTAINER,
        "image": settings.images.tierd,
        "imagePullPolicy": settings.images.pull_policy.value,
        "restartPolicy": "Always",
        "command": [
            "kvtier-sidecar",
            "run",
            "--topology",
            POD_TOPOLOGY_DIRECTORY,
            "--run-directory",
            POD_RUN_DIRECTORY,
            "--token-file",
            names.TOKEN_FILE,
        ],
        "ports": [{"name": PORT_NAME, "containerPort": given.port, "protocol": "TCP"}],
        "resources": daemon_resources(policy, given.tiers, spec, whole),
        "securityContext": security(engine, spec),
        "lifecycle": {
            "preStop": {"exec": {"command": ["kvtier-sidecar", "drain", "--run-directory", POD_RUN_DIRECTORY]}}
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": found.daemon,
    }


def daemon_resources(
    policy: KVTierPolicy, tiers: Sequence[Tier], spec: Mapping[str, Any], whole: bool
) -> dict[str, dict[str, str]]:
    """Requests and limits of tierd. Whatever the policy says, both have cpu and memory. Within a pod that has limits of
    its own no container may exceed them.
    """
    written = policy.spec.resources.daemon
    requests = {name: value.text for name, value in written.requests.items()}
    limits = {name: value.text for name, value in written.limits.items()}
    requests.setdefault(CPU, "1")
    if CPU not in limits:
        limits[CPU] = requests[CPU] if amount(requests[CPU]) > USUAL_CPU_LIMIT else str(USUAL_CPU_LIMIT)
    memory = str(daemon_bytes(policy, tiers))
    scratch = scratch_bytes(tiers, spec)
    if scratch and STORAGE not in {**requests, **limits}:
        requests[STORAGE] = limits[STORAGE] = str(scratch)
    if whole:
        said = "requests" in written.model_fields_set and CPU in written.requests
        cpu = str(max(1, math.ceil(amount(requests[CPU]))) if said else GUARANTEED_CPU)
        requests[CPU] = limits[CPU] = cpu
    bound = amounts((spec.get("resources") or {}).get("limits")).get(CPU)
    if bound is not None and amount(limits[CPU]) > bound:
        limits[CPU] = str((spec["resources"]["limits"])[CPU])
    return {"requests": {**requests, MEMORY: memory}, "limits": {**limits, MEMORY: memory}}


def security(engine: Mapping[str, Any], spec: Mapping[str, Any]) -> dict[str, Any]:
    """User, group and SELinux options as the engine's container has them, so that both may use the shared volume; the
    rest as the strictest Pod Security level wants it.
    """
    own, pod = engine.get("securityContext") or {}, spec.get("securityContext") or {}
    found: dict[str, Any] = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    for name in ("runAsUser", "runAsGroup", "seLinuxOptions"):
        if own.get(name) is not None:
            found[name] = own[name]
    user = own.get("runAsUser", pod.get("runAsUser"))
    # Without a user of its own the container runs as the image's, which is none of root's.
    if user != 0:
        found["runAsNonRoot"] = True
    return found
