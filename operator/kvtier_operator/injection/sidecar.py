"""What is added to a pod: volumes with their mounts, and the containers of the payload and of
tierd. Pure.

``PodStorage`` collects the volumes and the mounts of each container; the ``add_*`` functions fill
it. Containers are rendered last, when their mounts are known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.config.host_ports import HOST_POD_VARIABLE
from kvtier.config.loader import LIVE_FILE, STRUCTURAL_FILE
from kvtier.hashing import sha256_hex
from kvtier_operator.api import names
from kvtier_operator.api.allowlist import AllowedVolume, is_below
from kvtier_operator.api.engine import Delivery
from kvtier_operator.api.pods import PodSpec
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.tiers import TierSpec
from kvtier_operator.api.volumes import Medium, Volume
from kvtier_operator.injection.engine_container import EnginePod
from kvtier_operator.injection.resources import (
    CPU,
    MEMORY,
    STORAGE,
    container_limits,
    parse_amount,
    parse_amounts,
)
from kvtier_operator.injection.structure import Structure
from kvtier_operator.render import volumes
from kvtier_operator.render.documents import (
    POD_KEY_DIRECTORY,
    POD_RUN_DIRECTORY,
    POD_SECRETS_DIRECTORY,
    POD_TIERS_DIRECTORY,
    POD_TOPOLOGY_DIRECTORY,
    live_name,
)
from kvtier_operator.settings import Settings

RUN_SLACK_BYTES = 128 << 20
"""Of the shared volume beside the pool: the slot table (at most 64 MiB), the 8 MiB that tierd keeps
free, sessions, and rounding to pages and slots."""
PAYLOAD_BYTES = 256 << 20
IMAGE_PAYLOAD = "opt/kvtier/engine"
"""Directory of the package and its metadata in the payload's image, for image volumes."""
DAEMON_BYTES = 512 << 20
"""Memory of tierd beside the pool and its indexes."""
INDEX_BYTES = 256 << 20
"""Memory for indexes of objects. tierd derives the maximum number of indexed objects from it, and
counts the others."""
LMCACHE_BYTES = 1 << 30
"""Memory of the process that runs LMCache, for each lmcache tier: 650 MiB, and staging memory for
the objects in transit."""
GUARANTEED_CPU = 4
"""Cores of tierd in a Guaranteed pod. An integer, because the pod's cores may be exclusive; several
threads prefault the pool."""
SCRATCH_BYTES = 512 << 20
"""Ephemeral storage beside tiers: the payload, and logs as the kubelet rotates them."""
DEFAULT_CPU_LIMIT = 8
PAYLOAD_RESOURCES = {"cpu": ("100m", "1"), "memory": ("128Mi", "128Mi")}
"""Request and limit."""
PORT_NAME = "kvtier-http"
Document = dict[str, Any]
"""A part of the patched pod."""


@dataclass(slots=True)
class PodStorage:
    """Volumes to add to the pod, and mounts to add to the engine's, tierd's and the payload's
    container.
    """

    volumes: list[Document] = field(default_factory=list)
    engine: list[Document] = field(default_factory=list)
    daemon: list[Document] = field(default_factory=list)
    payload: list[Document] = field(default_factory=list)

    @property
    def node_local(self) -> list[str]:
        """Names of volumes on the node. The cluster autoscaler evicts the pod only if they are
        declared safe to lose.
        """
        return [
            str(each["name"]) for each in self.volumes if "emptyDir" in each or "hostPath" in each
        ]


def pool_bytes(policy: KVTierPolicy) -> int:
    """Capacity of the memory tier."""
    memory = policy.spec.tiers[0].memory
    if memory is None:
        raise ValueError("the first tier must be a memory tier")
    return memory.capacity.size_bytes


def add_shared(storage: PodStorage, policy: KVTierPolicy) -> None:
    """The run directory and the topology, which engine and tierd mount."""
    run = {
        "name": names.RUN_VOLUME,
        "emptyDir": {
            "medium": "Memory",
            "sizeLimit": str(_round_to_pages(pool_bytes(policy)) + RUN_SLACK_BYTES),
        },
    }
    source = {"fieldRef": {"fieldPath": f"metadata.annotations['{names.STRUCTURAL_ANNOTATION}']"}}
    topology = {
        "name": names.TOPOLOGY_VOLUME,
        "projected": {
            "sources": [
                {"downwardAPI": {"items": [{"path": STRUCTURAL_FILE, **source}]}},
                {
                    "configMap": {
                        "name": live_name(policy),
                        "optional": True,
                        "items": [{"key": LIVE_FILE, "path": LIVE_FILE}],
                    }
                },
            ]
        },
    }
    storage.volumes += [run, topology]
    for mounts in (storage.engine, storage.daemon):
        mounts.append({"name": names.RUN_VOLUME, "mountPath": POD_RUN_DIRECTORY})
        mounts.append(
            {"name": names.TOPOLOGY_VOLUME, "mountPath": POD_TOPOLOGY_DIRECTORY, "readOnly": True}
        )


def add_payload(storage: PodStorage, policy: KVTierPolicy, settings: Settings) -> None:
    """The connector, unless it is in the engine's image."""
    mount: Document = {
        "name": names.PAYLOAD_VOLUME,
        "mountPath": names.PAYLOAD_DIRECTORY,
        "readOnly": True,
    }
    if policy.spec.engine.delivery is Delivery.INIT_CONTAINER:
        storage.volumes.append(
            {"name": names.PAYLOAD_VOLUME, "emptyDir": {"sizeLimit": str(PAYLOAD_BYTES)}}
        )
        storage.payload.append({"name": names.PAYLOAD_VOLUME, "mountPath": names.PAYLOAD_DIRECTORY})
        storage.engine.append(mount)
    elif policy.spec.engine.delivery is Delivery.IMAGE_VOLUME:
        image = {
            "reference": settings.images.payload,
            "pullPolicy": settings.images.pull_policy.value,
        }
        storage.volumes.append({"name": names.PAYLOAD_VOLUME, "image": image})
        storage.engine.append({**mount, "subPath": IMAGE_PAYLOAD})


def hide_service_account(storage: PodStorage) -> None:
    """An empty directory over the service account's token, in the injected containers."""
    storage.volumes.append({"name": names.NO_ACCOUNT_VOLUME, "emptyDir": {"sizeLimit": "1Mi"}})
    hidden = {
        "name": names.NO_ACCOUNT_VOLUME,
        "mountPath": names.SERVICE_ACCOUNT_DIRECTORY,
        "readOnly": True,
    }
    storage.daemon.append(hidden)
    storage.payload.append(dict(hidden))


def add_token(storage: PodStorage, policy: KVTierPolicy, mounts: list[Document]) -> None:
    """The bearer token of the HTTP server. Without the Secret the server rejects all requests."""
    secret = {
        "secretName": names.token_secret(policy.metadata.name),
        "optional": True,
        "items": [{"key": "token", "path": "token"}],
    }
    storage.volumes.append({"name": names.TOKEN_VOLUME, "secret": secret})
    mounts.append(
        {"name": names.TOKEN_VOLUME, "mountPath": names.TOKEN_DIRECTORY, "readOnly": True}
    )


def add_secrets(
    storage: PodStorage, policy: KVTierPolicy, tiers: Sequence[TierSpec], mounts: list[Document]
) -> None:
    """Secrets of tiers: the keys of objects in file tiers, credentials of remote stores.

    Optional: a missing Secret suspends tiers, and must not keep the pod from starting. All entries
    are mounted, because their names are the ids of keys.
    """
    key = policy.spec.isolation.key_secret_ref.name
    if key:
        storage.volumes.append(
            {"name": names.KEY_VOLUME, "secret": {"secretName": key, "optional": True}}
        )
        mounts.append({"name": names.KEY_VOLUME, "mountPath": POD_KEY_DIRECTORY, "readOnly": True})
    for tier in tiers:
        reference = tier.lmcache.credentials_secret_ref if tier.lmcache is not None else None
        if reference is None:
            continue
        name = names.credentials_volume(tier.name)
        storage.volumes.append(
            {"name": name, "secret": {"secretName": reference.name, "optional": True}}
        )
        mounts.append(
            {"name": name, "mountPath": f"{POD_SECRETS_DIRECTORY}/{tier.name}", "readOnly": True}
        )


def add_tiers(
    storage: PodStorage,
    policy: KVTierPolicy,
    tiers: Sequence[TierSpec],
    settings: Settings,
    mounts: list[Document],
) -> None:
    """Volumes of the file tiers."""
    for each in [each for tier in tiers for each in tier.volumes]:
        name = names.tier_volume(each.tier, each.name)
        storage.volumes.append({"name": name, **volumes.pod_volume(policy, each)})
        mount = {"name": name, "mountPath": f"{POD_TIERS_DIRECTORY}/{each.key}"}
        below = sub_path(policy, each.volume, settings.allowed_volumes)
        mounts.append({**mount, **({"subPath": below} if below else {})})


def sub_path(policy: KVTierPolicy, volume: Volume, allowed: Sequence[AllowedVolume]) -> str | None:
    """The policy's directory in a volume that other policies may use: ``<namespace>/<policy uid>``.
    None for claims and other volumes of one policy, and if the administrator shares the directory
    (``shared: true`` in the longest entry that matches).
    """
    if volume.host_path is None and volume.nfs is None:
        return None
    matching: list[tuple[int, bool]] = []
    for entry in allowed:
        if not entry.covers(policy.namespace):
            continue
        if volume.host_path is not None and entry.host_path is not None:
            path, prefix, same = volume.host_path.path, entry.host_path, True
        elif volume.nfs is not None and entry.nfs is not None:
            path, prefix = volume.nfs.path, entry.nfs.export_prefix
            same = volume.nfs.server.lower() == entry.nfs.server.lower()
        else:
            continue
        if same and is_below(path, prefix):
            matching.append((len(prefix), entry.shared))
    if matching and max(matching)[1]:
        return None
    own = policy.metadata.uid or sha256_hex(policy.metadata.name, 16)
    return f"{policy.namespace}/{own}"


def _round_to_pages(size: int) -> int:
    return -(-size // 4096) * 4096


def daemon_bytes(policy: KVTierPolicy, tiers: Sequence[TierSpec]) -> int:
    """Memory request and limit of tierd's container: the pool, tierd itself, indexes, processes of
    lmcache tiers, and memory-backed file tiers, whose pages count against the container that writes
    them.
    """
    remote = sum(tier.lmcache is not None for tier in tiers)
    return (
        pool_bytes(policy)
        + DAEMON_BYTES
        + INDEX_BYTES
        + remote * LMCACHE_BYTES
        + _empty_dir_bytes(tiers, Medium.MEMORY)
    )


def scratch_bytes(tiers: Sequence[TierSpec], spec: PodSpec) -> int:
    """Ephemeral storage of tierd's container. The kubelet evicts a pod that exceeds the sum of its
    containers' limits, so tierd needs a limit of its own if a container of the pod has one, or if a
    tier uses ephemeral storage.
    """
    files = _empty_dir_bytes(tiers, Medium.DISK)
    limited = any(STORAGE in container_limits(each) for each in spec.all_containers)
    return files + SCRATCH_BYTES if files or limited else 0


def _empty_dir_bytes(tiers: Sequence[TierSpec], medium: Medium) -> int:
    total = 0
    for each in [each for tier in tiers for each in tier.volumes]:
        empty = each.volume.empty_dir
        if empty is not None and empty.medium is medium:
            total += (empty.size_limit or each.capacity).size_bytes
    return total


def payload_container(settings: Settings, target: EnginePod, storage: PodStorage) -> Document:
    """The init container that copies the connector."""
    limits = {name: limit for name, (_, limit) in PAYLOAD_RESOURCES.items()}
    requests = {name: request for name, (request, _) in PAYLOAD_RESOURCES.items()}
    return {
        "name": names.PAYLOAD_CONTAINER,
        "image": settings.images.payload,
        "imagePullPolicy": settings.images.pull_policy.value,
        "command": ["kvtier-payload", names.PAYLOAD_DIRECTORY],
        "resources": {
            "requests": dict(limits) if target.guaranteed else requests,
            "limits": limits,
        },
        "securityContext": security_context(target),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": storage.payload,
    }


def tierd_container(
    policy: KVTierPolicy,
    settings: Settings,
    target: EnginePod,
    storage: PodStorage,
    structure: Structure,
) -> Document:
    """The native sidecar. It has no probe: process 1 restarts a tierd that exits or hangs. If the
    kubelet restarted the container instead, the pool would stay charged to the pod, outside of any
    container's limit.
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
        **_port_and_variables(structure),
        "resources": daemon_resources(policy, structure.tiers, target),
        "securityContext": security_context(target),
        "lifecycle": {
            "preStop": {
                "exec": {
                    "command": ["kvtier-sidecar", "drain", "--run-directory", POD_RUN_DIRECTORY]
                }
            }
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": storage.daemon,
    }


def _port_and_variables(structure: Structure) -> Document:
    if structure.port is None:
        return {"env": [host_pod_variable()]}
    return {"ports": [{"name": PORT_NAME, "containerPort": structure.port, "protocol": "TCP"}]}


def host_pod_variable() -> Document:
    """Makes tierd derive its port from the pod's uid."""
    return {"name": HOST_POD_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}


def daemon_resources(
    policy: KVTierPolicy, tiers: Sequence[TierSpec], target: EnginePod
) -> dict[str, dict[str, str]]:
    """Requests and limits of tierd. Both always have cpu and memory. No limit exceeds the pod-level
    limit.
    """
    spec, written = target.pod.spec, policy.spec.resources.daemon
    requests = {name: value.text for name, value in written.requests.items()}
    limits = {name: value.text for name, value in written.limits.items()}
    requests.setdefault(CPU, "1")
    if CPU not in limits:
        exceeds_default = parse_amount(requests[CPU]) > DEFAULT_CPU_LIMIT
        limits[CPU] = requests[CPU] if exceeds_default else str(DEFAULT_CPU_LIMIT)
    memory = str(daemon_bytes(policy, tiers))
    scratch = scratch_bytes(tiers, spec)
    if scratch and STORAGE not in {**requests, **limits}:
        requests[STORAGE] = limits[STORAGE] = str(scratch)
    if target.guaranteed:
        is_set = "requests" in written.model_fields_set and CPU in written.requests
        cores = max(1, math.ceil(parse_amount(requests[CPU]))) if is_set else GUARANTEED_CPU
        requests[CPU] = limits[CPU] = str(cores)
    pod_limit = parse_amounts(spec.resources.limits).get(CPU)
    if pod_limit is not None and parse_amount(limits[CPU]) > pod_limit:
        limits[CPU] = str(spec.resources.limits[CPU])
    return {"requests": {**requests, MEMORY: memory}, "limits": {**limits, MEMORY: memory}}


def security_context(target: EnginePod) -> Document:
    """User, group and SELinux options of the engine's container, so that both can use the shared
    volume. The rest meets the strictest Pod Security level.
    """
    engine, pod = target.engine.security_context, target.pod.spec.security_context
    context: Document = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    if names.SCC_ANNOTATION not in target.pod.metadata.annotations:
        # OpenShift's SCCs set the profile that they require, and some (anyuid) reject a pod in
        # which any profile is set.
        context["seccompProfile"] = {"type": "RuntimeDefault"}
    if engine.run_as_user is not None:
        context["runAsUser"] = engine.run_as_user
    if engine.run_as_group is not None:
        context["runAsGroup"] = engine.run_as_group
    if engine.se_linux_options is not None:
        context["seLinuxOptions"] = dict(engine.se_linux_options)
    user = pod.run_as_user if engine.run_as_user is None else engine.run_as_user
    # Without a user in the pod the container runs as the image's user, which is not root.
    if user != 0:
        context["runAsNonRoot"] = True
    return context
