"""Volumes that a pod is given, and where its containers mount them. Pure.

Containers that are added to a pod: the payload's and tierd's. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.config.loader import LIVE_FILE, STRUCTURAL_FILE
from kvtier.hashing import sha256_hex
from kvtier_operator.api import names
from kvtier_operator.api.allowlist import AllowedVolume, is_below
from kvtier_operator.api.engine import Delivery
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.tiers import Tier
from kvtier_operator.api.volumes import Medium
from kvtier_operator.injection.resources import (
    CPU,
    MEMORY,
    STORAGE,
    amount,
    amounts,
    containers,
    limits_of,
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
"""Of the shared volume beside the pool: the slot table (64 MiB at most), the 8 MiB that tierd keeps free, sessions, and
rounding up to pages and slots."""
PAYLOAD_BYTES = 256 << 20
IMAGE_SOURCE = "opt/kvtier/source"
"""Where the payload's image has the package and its metadata, for image volumes."""
Entry = dict[str, Any]


@dataclass(slots=True)
class Storage:
    """``volumes`` of the pod; ``engine``, ``daemon`` and ``payload``: mounts of these containers. ``local``: names of volumes
    that live on the node, of which the cluster autoscaler has to know that they may go.
    """

    volumes: list[Entry] = field(default_factory=list)
    engine: list[Entry] = field(default_factory=list)
    daemon: list[Entry] = field(default_factory=list)
    payload: list[Entry] = field(default_factory=list)

    @property
    def local(self) -> list[str]:
        """See above."""
        return [
            str(each["name"]) for each in self.volumes if "emptyDir" in each or "hostPath" in each
        ]


def pool_bytes(policy: KVTierPolicy) -> int:
    """What the memory tier takes."""
    memory = policy.spec.tiers[0].memory
    if memory is None:
        raise ValueError("the first tier is no memory tier")
    return memory.capacity.size_bytes


def add_shared(found: Storage, policy: KVTierPolicy) -> None:
    """What engine and tierd both mount: the run directory and the topology."""
    run = {
        "name": names.RUN_VOLUME,
        "emptyDir": {
            "medium": "Memory",
            "sizeLimit": str(_up(pool_bytes(policy)) + RUN_SLACK_BYTES),
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
    found.volumes += [run, topology]
    for mounts in (found.engine, found.daemon):
        mounts.append({"name": names.RUN_VOLUME, "mountPath": POD_RUN_DIRECTORY})
        mounts.append(
            {"name": names.TOPOLOGY_VOLUME, "mountPath": POD_TOPOLOGY_DIRECTORY, "readOnly": True}
        )


def add_payload(found: Storage, policy: KVTierPolicy, settings: Settings) -> None:
    """The connector, unless the engine's image has it."""
    mount: Entry = {
        "name": names.PAYLOAD_VOLUME,
        "mountPath": names.PAYLOAD_DIRECTORY,
        "readOnly": True,
    }
    if policy.spec.engine.delivery is Delivery.INIT_CONTAINER:
        found.volumes.append(
            {"name": names.PAYLOAD_VOLUME, "emptyDir": {"sizeLimit": str(PAYLOAD_BYTES)}}
        )
        found.payload.append({"name": names.PAYLOAD_VOLUME, "mountPath": names.PAYLOAD_DIRECTORY})
        found.engine.append(mount)
    elif policy.spec.engine.delivery is Delivery.IMAGE_VOLUME:
        image = {
            "reference": settings.images.payload,
            "pullPolicy": settings.images.pull_policy.value,
        }
        found.volumes.append({"name": names.PAYLOAD_VOLUME, "image": image})
        found.engine.append({**mount, "subPath": IMAGE_SOURCE})


def add_no_account(found: Storage) -> None:
    """An empty directory over the service account's token, in containers of KVTier's own."""
    found.volumes.append({"name": names.NO_ACCOUNT_VOLUME, "emptyDir": {"sizeLimit": "1Mi"}})
    hidden = {
        "name": names.NO_ACCOUNT_VOLUME,
        "mountPath": names.SERVICE_ACCOUNT_DIRECTORY,
        "readOnly": True,
    }
    found.daemon.append(hidden)
    found.payload.append(dict(hidden))


def add_token(found: Storage, policy: KVTierPolicy, mounts: list[Entry]) -> None:
    """The bearer token of the HTTP server; without its Secret the server lets nobody in."""
    secret = {
        "secretName": names.token_secret(policy.metadata.name),
        "optional": True,
        "items": [{"key": "token", "path": "token"}],
    }
    found.volumes.append({"name": names.TOKEN_VOLUME, "secret": secret})
    mounts.append(
        {"name": names.TOKEN_VOLUME, "mountPath": names.TOKEN_DIRECTORY, "readOnly": True}
    )


def add_secrets(
    found: Storage, policy: KVTierPolicy, tiers: Sequence[Tier], mounts: list[Entry]
) -> None:
    """What tiers need to know in secret: the key of shared directories, credentials of remote stores."""
    key = policy.spec.isolation.key_secret_ref.name
    if key:
        secret = {"secretName": key, "optional": True, "items": [{"key": "key", "path": "key"}]}
        found.volumes.append({"name": names.KEY_VOLUME, "secret": secret})
        mounts.append({"name": names.KEY_VOLUME, "mountPath": POD_KEY_DIRECTORY, "readOnly": True})
    for tier in tiers:
        reference = tier.lmcache.credentials_secret_ref if tier.lmcache is not None else None
        if reference is None:
            continue
        name = names.credentials_volume(tier.name)
        found.volumes.append(
            {"name": name, "secret": {"secretName": reference.name, "optional": True}}
        )
        mounts.append(
            {"name": name, "mountPath": f"{POD_SECRETS_DIRECTORY}/{tier.name}", "readOnly": True}
        )


def add_tiers(
    found: Storage,
    policy: KVTierPolicy,
    tiers: Sequence[Tier],
    settings: Settings,
    mounts: list[Entry],
) -> None:
    """Directories of the file tiers."""
    for tier in tiers:
        if tier.file_system is None:
            continue
        name = names.tier_volume(tier.name)
        found.volumes.append({"name": name, **volumes.pod_volume(policy, tier)})
        mount = {"name": name, "mountPath": f"{POD_TIERS_DIRECTORY}/{tier.name}"}
        below = sub_path(policy, tier, settings.allowed_volumes)
        mounts.append({**mount, **({"subPath": below} if below else {})})


def sub_path(policy: KVTierPolicy, tier: Tier, allowed: Sequence[AllowedVolume]) -> str | None:
    """Where in a directory that others use as well a policy's own begins: ``<namespace>/<policy uid>``. None for volumes
    that are a policy's alone, and where the administrator shares the directory (``shared: true`` of the longest entry
    that matches).
    """
    volume = tier.file_system.volume if tier.file_system is not None else None
    if volume is None or (volume.host_path is None and volume.nfs is None):
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


def _up(size: int) -> int:
    return -(-size // 4096) * 4096


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
    settings: Settings,
    engine: Mapping[str, Any],
    spec: Mapping[str, Any],
    found: Storage,
    whole: bool,
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
            "preStop": {
                "exec": {
                    "command": ["kvtier-sidecar", "drain", "--run-directory", POD_RUN_DIRECTORY]
                }
            }
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
        limits[CPU] = (
            requests[CPU] if amount(requests[CPU]) > USUAL_CPU_LIMIT else str(USUAL_CPU_LIMIT)
        )
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
