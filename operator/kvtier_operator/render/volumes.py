"""Kubernetes objects of file tiers: claims, PersistentVolumes, and the volumes of pods. Pure.

Names end in a hash of the policy's uid and the volume's specification, so that a re-created policy,
or one with another export, does not use an object of its predecessor. A claim of the same name
would stay Pending because of a Released volume.
"""

from __future__ import annotations

import json
from typing import Any

from kvtier.hashing import sha256_hex
from kvtier_operator.api.fields import jsonable
from kvtier_operator.api.file_tier import MountedVolume
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.quantity import Quantity
from kvtier_operator.api.volumes import ClaimSpec, NfsVolume

POLICY_LABEL = "kvtier.io/policy"
TIER_LABEL = "kvtier.io/tier"
MANAGED_BY = {"app.kubernetes.io/managed-by": "kvtier"}
NFS_OPTIONS = {
    "soft": ("soft", "hard", "softerr"),
    "timeo=50": ("timeo",),
    "retrans=2": ("retrans",),
}
"""Default options of an NFS mount, and the options that replace each. With them an unavailable
server causes errors instead of hangs."""
NFS_NOMINAL_SIZE = "1Gi"
"""Size of PersistentVolume and claim, which is required and not enforced for NFS. It is not the
tier's capacity, because that can change and the size of a bound claim cannot, and because storage
quotas would count it."""


def labels(policy: KVTierPolicy, tier: str | None = None) -> dict[str, str]:
    """Labels of everything that is rendered for a policy."""
    return {
        **MANAGED_BY,
        POLICY_LABEL: policy.metadata.name,
        **({TIER_LABEL: tier} if tier is not None else {}),
    }


def volume_hash(policy: KVTierPolicy, mounted: MountedVolume) -> str:
    """8 hex digits of the policy's uid and the volume's specification."""
    described = jsonable(mounted.volume)
    text = json.dumps([policy.metadata.uid or "", described], sort_keys=True, separators=(",", ":"))
    return sha256_hex(text, 8)


def claim_name(policy: KVTierPolicy, mounted: MountedVolume) -> str | None:
    """Name of the claim that pods mount for this volume, or None for other volumes."""
    volume = mounted.volume
    if volume.persistent_volume_claim is not None:
        return volume.persistent_volume_claim.claim_name
    if volume.claim_template is not None or volume.nfs is not None:
        return f"{policy.metadata.name}-{mounted.tier}-{volume_hash(policy, mounted)}"
    return None


def mount_options(nfs: NfsVolume) -> list[str]:
    """The policy's options, and defaults."""
    given = list(nfs.mount_options or ())
    names = {option.split("=", 1)[0] for option in given}
    return given + [
        option for option, said_by in NFS_OPTIONS.items() if not names.intersection(said_by)
    ]


def objects(policy: KVTierPolicy) -> list[dict[str, Any]]:
    """Claims and PersistentVolumes that the operator creates for the policy."""
    rendered: list[dict[str, Any]] = []
    for each in [each for tier in policy.spec.tiers for each in tier.volumes]:
        template, nfs = each.volume.claim_template, each.volume.nfs
        if template is not None:
            spec = _claim_spec(template, each.capacity, "ReadWriteMany")
            rendered.append(_claim(policy, each, spec))
        elif nfs is not None:
            rendered += _nfs_pair(policy, each, nfs)
    return rendered


def pod_volume(policy: KVTierPolicy, mounted: MountedVolume) -> dict[str, Any]:
    """The source of a pod's volume for a file tier."""
    volume = mounted.volume
    name = claim_name(policy, mounted)
    if name is not None:
        return {"persistentVolumeClaim": {"claimName": name}}
    if volume.host_path is not None:
        return {"hostPath": {"path": volume.host_path.path, "type": volume.host_path.type}}
    if volume.empty_dir is not None:
        limit = volume.empty_dir.size_limit
        medium = volume.empty_dir.medium.value
        return {
            "emptyDir": {
                **({"medium": medium} if medium else {}),
                **({"sizeLimit": limit.text} if limit else {}),
            }
        }
    if volume.ephemeral is not None:
        template = volume.ephemeral.volume_claim_template
        metadata = jsonable(template.metadata) if template.metadata is not None else {}
        spec = _claim_spec(template.spec, mounted.capacity, "ReadWriteOnce")
        return {
            "ephemeral": {
                "volumeClaimTemplate": {
                    **({"metadata": metadata} if metadata else {}),
                    "spec": spec,
                }
            }
        }
    raise ValueError(f"tier {mounted.key} has no volume source")


def _claim_spec(claim: ClaimSpec, capacity: Quantity, default_mode: str) -> dict[str, Any]:
    storage = claim.storage or capacity
    spec: dict[str, Any] = {
        "accessModes": [mode.value for mode in claim.access_modes or ()] or [default_mode],
        "resources": {"requests": {"storage": storage.text}},
    }
    if claim.storage_class_name is not None:
        spec["storageClassName"] = claim.storage_class_name
    return spec


def _claim(policy: KVTierPolicy, mounted: MountedVolume, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {
            "name": claim_name(policy, mounted),
            "namespace": policy.namespace,
            "labels": labels(policy, mounted.tier),
        },
        "spec": spec,
    }


def _nfs_pair(policy: KVTierPolicy, mounted: MountedVolume, nfs: NfsVolume) -> list[dict[str, Any]]:
    volume_name = f"kvtier-{policy.namespace}-{claim_name(policy, mounted)}"
    size = {"storage": NFS_NOMINAL_SIZE}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": volume_name, "labels": labels(policy, mounted.tier)},
        "spec": {
            "capacity": size,
            "accessModes": ["ReadWriteMany"],
            # Data outlives policy and claim; `kvtier gc` or an administrator removes it.
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
            "volumeMode": "Filesystem",
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "name": claim_name(policy, mounted),
                "namespace": policy.namespace,
            },
            "mountOptions": mount_options(nfs),
            "nfs": {"server": nfs.server, "path": nfs.path},
        },
    }
    claim = _claim(
        policy,
        mounted,
        {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": size},
            # Empty, not absent, because the default class would provision another volume.
            "storageClassName": "",
            "volumeName": volume_name,
        },
    )
    return [volume, claim]
