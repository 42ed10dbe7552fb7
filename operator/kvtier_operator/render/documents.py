"""Renders a policy: the structural and the live document, and Kubernetes objects for
``ConfigMapOnly``. Pure.

``content_hash`` identifies the structure that a pod has. It must not change for an unchanged
policy, because every pod with another hash is outdated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from kvtier.config.loader import LIVE_FILE, STRUCTURAL_FILE
from kvtier.config.models import (
    SCHEMA_VERSION,
    BreakerSettings,
    Daemon,
    FileSystemTierDocument,
    HintSettings,
    HttpEndpoint,
    IsolationSettings,
    Live,
    LiveTier,
    LMCacheTierDocument,
    MemoryTierDocument,
    PolicyIdentity,
    Structural,
    TenantSettings,
    TierDocument,
    TierVolumeDocument,
    Topology,
)
from kvtier.config.writer import document_text
from kvtier.errors import ConfigurationError
from kvtier.hashing import sha256_hex
from kvtier.listening import EVERY_ADDRESS
from kvtier_operator.api.base import Change
from kvtier_operator.api.fields import fields_of
from kvtier_operator.api.file_tier import Sync
from kvtier_operator.api.policy import KVTierPolicy, PolicySpec
from kvtier_operator.api.quantity import Quantity
from kvtier_operator.api.tiers import TierSpec
from kvtier_operator.api.validation import FieldError, InvalidDocumentError
from kvtier_operator.render import volumes

POD_RUN_DIRECTORY = "/run/kvtier"
"""In pods: mount path of the shared memory-backed volume."""
POD_TIERS_DIRECTORY = "/var/lib/kvtier/tiers"
"""In pods: directory of the mounts of file tiers, named like the tiers."""
POD_SECRETS_DIRECTORY = "/etc/kvtier/secrets"
POD_KEY_DIRECTORY = "/etc/kvtier/isolation"
"""Not below the directory of secrets, where a tier may have any name."""
POD_TOPOLOGY_DIRECTORY = "/etc/kvtier/topology"
"""In pods: mount path of both documents."""
MAX_STRUCTURAL_BYTES = 16 << 10
"""Maximum size of the structural document as an annotation of a pod. The ConfigMap has the same
limit, so that a policy can change its mode."""
LOOPBACK = HttpEndpoint()
POD_HTTP = HttpEndpoint(host=EVERY_ADDRESS)
"""The operator and Prometheus are other pods."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What depends on the environment and not on the policy.

    ``tier_paths``: a directory for every volume of a file tier, by its key. ``storage_gid``: group
    of files; None: unchanged.
    """

    run_directory: str
    tier_paths: Mapping[str, str] = field(default_factory=dict)
    http: HttpEndpoint = LOOPBACK
    daemon: Daemon | None = None
    storage_gid: int | None = None
    secrets_directory: str = POD_SECRETS_DIRECTORY
    key_directory: str = POD_KEY_DIRECTORY


def pod_placement(policy: KVTierPolicy) -> Placement:
    """The placement in a pod."""
    return Placement(
        run_directory=POD_RUN_DIRECTORY,
        tier_paths={
            volume.key: f"{POD_TIERS_DIRECTORY}/{volume.key}"
            for tier in policy.spec.tiers
            for volume in tier.volumes
        },
        http=POD_HTTP,
        storage_gid=policy.spec.security.storage_gid,
    )


def local_run_directory(policy: KVTierPolicy, uid: int) -> str:
    """The run directory of engine and tierd outside Kubernetes, per user and policy."""
    digest = sha256_hex(f"{uid}\0{policy.namespace}/{policy.metadata.name}", 8)
    return f"/dev/shm/kvtier-{policy.metadata.name}-{digest}"  # noqa: S108


def local_tier_paths(
    policy: KVTierPolicy, overrides: Mapping[str, str], base: str
) -> tuple[dict[str, str], list[str]]:
    """Directories of the file tiers on this machine, and a note for each that differs from a pod's.

    ``overrides`` win. A hostPath is used as it is. Volumes that a pod would create get a directory
    below ``base``. An NFS export needs an override. Raises ``ConfigurationError``.
    """
    known = {volume.key for tier in policy.spec.tiers for volume in tier.volumes}
    for name in overrides:
        if name not in known:
            raise ConfigurationError(
                "--tier-path",
                name,
                f"must be a file tier of the policy: {', '.join(sorted(known)) or 'it has none'}",
            )
    paths: dict[str, str] = {}
    notes: list[str] = []
    places = [(i, each) for i, tier in enumerate(policy.spec.tiers) for each in tier.volumes]
    for index, each in places:
        key, volume = each.key, each.volume
        if key in overrides:
            paths[key] = overrides[key]
        elif volume.host_path is not None:
            paths[key] = volume.host_path.path
        elif volume.nfs is not None:
            raise ConfigurationError(
                f"spec.tiers[{index}].fileSystem.{each.field}.nfs",
                f"{volume.nfs.server}:{volume.nfs.path}",
                f"must be replaced by a local directory: --tier-path {key}=DIR",
            )
        else:
            paths[key] = f"{base}/{key}"
            notes.append(
                f"tier {key}: {volume.sources[0]} is replaced by {paths[key]}; to use "
                f"another directory, set --tier-path {key}=DIR"
            )
    used: dict[str, str] = {}
    for name, path in paths.items():
        other = used.setdefault(os.path.normpath(path), name)
        if other != name:
            raise ConfigurationError(
                "--tier-path", f"{name}={path}", f"must not be the directory of tier {other}"
            )
    return paths, notes


def content_hash(spec: PolicySpec) -> str:
    """8 hex digits of the structural fields as written and of the schema version.

    "As written": absent fields are not included, so that a changed default does not outdate pods.
    Sizes count by value: 64Gi and 65536Mi are the same.
    """
    canonical = json.dumps(
        [SCHEMA_VERSION, _structural_fields(spec)],
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
    )
    return sha256_hex(canonical, 8)


def _structural_fields(model: BaseModel) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for document in fields_of(type(model)):
        if document.attribute not in model.model_fields_set:
            continue
        value = getattr(model, document.attribute)
        holds_models = isinstance(value, BaseModel) or (
            isinstance(value, list) and bool(value) and isinstance(value[0], BaseModel)
        )
        if holds_models or document.change is Change.STRUCTURAL:
            canonical = _canonical(value)
            if canonical not in ({}, None):
                fields[document.alias] = canonical
    return fields


def _canonical(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return _structural_fields(value)
    if isinstance(value, Quantity):
        return str(value.value)
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    return value


def live(policy: KVTierPolicy, generation: int = 0) -> Live:
    """The live document."""
    spec = policy.spec
    return Live(
        generation=generation,
        selection=spec.selection,
        min_load_tokens=spec.min_load_tokens,
        min_store_tokens=spec.min_store_tokens,
        breaker=BreakerSettings(
            failure_threshold=spec.breaker.failure_threshold,
            period_seconds=spec.breaker.period_seconds,
        ),
        hints=HintSettings(
            honour=spec.hints.honour,
            max_pinned_percent=spec.hints.max_pinned_percent,
            default_retain_seconds=spec.hints.default_retain_seconds,
        ),
        tenants=TenantSettings(by=spec.tenants.by, max_percent=spec.tenants.max_percent),
        tiers={tier.name: _live_tier(tier) for tier in spec.tiers},
    )


def _live_tier(tier: TierSpec) -> LiveTier:
    common: dict[str, Any] = {
        "load_weight": tier.load_weight,
        "lookup_timeout_milliseconds": tier.lookup_timeout_milliseconds,
        "load_timeout_seconds": tier.load_timeout_seconds,
        "store_policy": tier.store_policy,
        "max_pending_store_bytes": tier.max_pending_store_bytes.size_bytes,
    }
    if tier.max_write_bytes_per_second is not None:
        common["max_write_bytes_per_second"] = tier.max_write_bytes_per_second.size_bytes
    if tier.file_system is not None:
        files = tier.file_system
        common |= {
            "capacity_bytes": files.total_bytes,
            "volume_capacity_bytes": {
                each.name: each.capacity.size_bytes for each in tier.volumes if each.name
            },
            "high_watermark_percent": files.high_watermark_percent,
            "low_watermark_percent": files.low_watermark_percent,
            "retention_seconds": files.retention_seconds,
            "sync_data": files.sync is Sync.DATA,
            "min_free_bytes": files.effective_min_free.size_bytes,
            "min_free_percent": files.effective_min_free.percent or 0,
        }
    elif tier.lmcache is not None and tier.lmcache.capacity is not None:
        common["capacity_bytes"] = tier.lmcache.capacity.size_bytes
    return LiveTier(**common)


def structural(policy: KVTierPolicy, placement: Placement, generation: int = 0) -> Structural:
    """The structural document, with the current live values."""
    spec = policy.spec
    key_secret = spec.isolation.key_secret_ref.name
    return Structural(
        policy=PolicyIdentity(
            namespace=policy.namespace, name=policy.metadata.name, uid=policy.metadata.uid or ""
        ),
        content_hash=content_hash(spec),
        engine_type=spec.engine.type.value,
        daemon=placement.daemon or spec.engine.daemon,
        run_directory=placement.run_directory,
        chunk_tokens=spec.tokens_per_chunk,
        hash_seed=spec.engine.hash_seed,
        local_ranks=spec.engine.local_ranks,
        tiers=[_tier(tier, placement) for tier in spec.tiers],
        isolation=IsolationSettings(
            salt=spec.isolation.salt,
            model_revision=spec.isolation.model_revision,
            key_directory=placement.key_directory if key_secret else None,
            encryption=spec.isolation.encryption,
        ),
        storage_gid=placement.storage_gid,
        http=placement.http,
        live=live(policy, generation),
    )


def _tier(tier: TierSpec, placement: Placement) -> TierDocument:
    if tier.memory is not None:
        return MemoryTierDocument(
            name=tier.name,
            capacity_bytes=tier.memory.capacity.size_bytes,
            eviction_policy=tier.memory.eviction_policy.value,
            persistence=tier.memory.persistence.value,
        )
    if tier.file_system is not None:
        files = tier.file_system
        return FileSystemTierDocument(
            name=tier.name,
            path="" if files.volumes else placement.tier_paths[tier.name],
            volumes=tuple(
                TierVolumeDocument(name=each.name, path=placement.tier_paths[each.key])
                for each in tier.volumes
                if each.name
            ),
            sharing=files.sharing.value,
            direct_io=files.direct_io.value,
            read_threads=files.read_threads,
            write_threads=files.write_threads,
        )
    if tier.lmcache is not None:
        reference = tier.lmcache.credentials_secret_ref
        return LMCacheTierDocument(
            name=tier.name,
            url=tier.lmcache.url,
            credentials_directory=f"{placement.secrets_directory}/{tier.name}"
            if reference is not None
            else None,
        )
    raise ConfigurationError(f"spec.tiers ({tier.name})", "none", "must have exactly one kind")


def topology(policy: KVTierPolicy, placement: Placement, generation: int = 0) -> Topology:
    """Both documents."""
    document = structural(policy, placement, generation)
    return Topology(structural=document, live=document.live)


def live_name(policy: KVTierPolicy) -> str:
    """The ConfigMap of live values."""
    return f"{policy.metadata.name}-live"


def structural_name(policy: KVTierPolicy) -> str:
    """The ConfigMap of the structural document."""
    return f"{policy.metadata.name}-structural"


def kubernetes(policy: KVTierPolicy, generation: int = 0) -> list[dict[str, Any]]:
    """ConfigMaps, PersistentVolumes and claims, in an order in which they can be applied. Raises
    ``ConfigurationError``.
    """
    document = structural(policy, pod_placement(policy), generation)
    return [
        *volumes.objects(policy),
        _config_map(policy, live_name(policy), LIVE_FILE, document_text(live(policy, generation))),
        _config_map(policy, structural_name(policy), STRUCTURAL_FILE, structural_text(document)),
    ]


def structural_text(document: Structural) -> str:
    """The structural document in pods.

    Raises ``InvalidDocumentError`` if it is too long for an annotation.
    """
    text = document_text(document)
    size = len(text.encode())
    if size > MAX_STRUCTURAL_BYTES:
        detail = (
            f"the structural document may have at most {MAX_STRUCTURAL_BYTES} bytes and has "
            f"{size}; "
            "shorten URLs, paths and mount options"
        )
        raise InvalidDocumentError([FieldError.too_long("spec", detail)])
    return text


def _config_map(policy: KVTierPolicy, name: str, file: str, text: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": policy.namespace, "labels": volumes.labels(policy)},
        "data": {file: text},
    }
