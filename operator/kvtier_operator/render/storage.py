"""Volumes that a pod is given, and where its containers mount them. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.topology.loading import LIVE_FILE, STRUCTURAL_FILE
from kvtier_operator.api.allowlist import AllowedVolume, is_below
from kvtier_operator.api.engine import Delivery
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.tiers import Tier
from kvtier_operator.render import names, volumes
from kvtier_operator.render.documents import POD_TOPOLOGY_DIRECTORY, live_name
from kvtier_operator.render.topology import (
    POD_KEY_DIRECTORY,
    POD_RUN_DIRECTORY,
    POD_SECRETS_DIRECTORY,
    POD_TIERS_DIRECTORY,
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
        return [str(each["name"]) for each in self.volumes if "emptyDir" in each or "hostPath" in each]


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
        "emptyDir": {"medium": "Memory", "sizeLimit": str(_up(pool_bytes(policy)) + RUN_SLACK_BYTES)},
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
        mounts.append({"name": names.TOPOLOGY_VOLUME, "mountPath": POD_TOPOLOGY_DIRECTORY, "readOnly": True})


def add_payload(found: Storage, policy: KVTierPolicy, settings: Settings) -> None:
    """The connector, unless the engine's image has it."""
    mount: Entry = {"name": names.PAYLOAD_VOLUME, "mountPath": names.PAYLOAD_DIRECTORY, "readOnly": True}
    if policy.spec.engine.delivery is Delivery.INIT_CONTAINER:
        found.volumes.append({"name": names.PAYLOAD_VOLUME, "emptyDir": {"sizeLimit": str(PAYLOAD_BYTES)}})
        found.payload.append({"name": names.PAYLOAD_VOLUME, "mountPath": names.PAYLOAD_DIRECTORY})
        found.engine.append(mount)
    elif policy.spec.engine.delivery is Delivery.IMAGE_VOLUME:
        image = {"reference": settings.images.payload, "pullPolicy": settings.images.pull_policy.value}
        found.volumes.append({"name": names.PAYLOAD_VOLUME, "image": image})
        found.engine.append({**mount, "subPath": IMAGE_SOURCE})


def add_no_account(found: Storage) -> None:
    """An empty directory over the service account's token, in containers of KVTier's own."""
    found.volumes.append({"name": names.NO_ACCOUNT_VOLUME, "emptyDir": {"sizeLimit": "1Mi"}})
    hidden = {"name": names.NO_ACCOUNT_VOLUME, "mountPath": names.SERVICE_ACCOUNT_DIRECTORY, "readOnly": True}
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
    mounts.append({"name": names.TOKEN_VOLUME, "mountPath": names.TOKEN_DIRECTORY, "readOnly": True})


def add_secrets(found: Storage, policy: KVTierPolicy, tiers: Sequence[Tier], mounts: list[Entry]) -> None:
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
        found.volumes.append({"name": name, "secret": {"secretName": reference.name, "optional": True}})
        mounts.append({"name": name, "mountPath": f"{POD_SECRETS_DIRECTORY}/{tier.name}", "readOnly": True})


def add_tiers(
    found: Storage, policy: KVTierPolicy, tiers: Sequence[Tier], settings: Settings, mounts: list[Entry]
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
    own = policy.metadata.uid or hashlib.sha256(policy.metadata.name.encode()).hexdigest()[:16]
    return f"{policy.namespace}/{own}"


def _up(size: int) -> int:
    return -(-size // 4096) * 4096
