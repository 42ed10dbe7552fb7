"""Builds the secondary tiers of a topology, and limits the memory that tierd may allocate beside
the pool.

The sidecar's memory limit is the pool plus a fixed amount. Exceeding it makes the kernel kill the
container; exceeding a limit of the process makes one allocation fail and at worst restarts tierd
over the same pool.
"""

from __future__ import annotations

import logging
import os
import resource
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtier.config.models import (
    Encryption,
    FileSystemTierDocument,
    LiveTier,
    LMCacheTierDocument,
    MemoryTierDocument,
    Structural,
    TierDocument,
    Topology,
)
from kvtier.errors import KVTierError
from kvtier.store.tier_group import limits_of
from kvtier.tierd.status import StatusCondition
from kvtier.tiers.base import Tier
from kvtier.tiers.filesystem.seal import Sealing, require_cipher
from kvtier.tiers.isolation_keys import KeyRing
from kvtier.tiers.volume_set import VolumeSet

_log = logging.getLogger("kvtier.tierd")
WrapTier = Callable[[Tier], Tier]


@dataclass(frozen=True, slots=True)
class BuiltTiers:
    """``tiers``: the secondary tiers, in the document's order. ``missing``: documents of those that
    could not be built. ``keys``: those of ``isolation.keySecretRef``, not read yet; None if objects
    in file tiers are not sealed."""

    tiers: tuple[Tier, ...]
    missing: tuple[TierDocument, ...]
    conditions: tuple[StatusCondition, ...]
    keys: KeyRing | None = None


def memory_document(structural: Structural) -> MemoryTierDocument:
    """The memory tier; loading has checked that there is one."""
    for tier in structural.tiers:
        if isinstance(tier, MemoryTierDocument):
            return tier
    raise KVTierError("the topology has no memory tier")


def storage_group(gid: int | None) -> tuple[int | None, tuple[StatusCondition, ...]]:
    """The group that new files get, with a condition if it is not ``gid``."""
    if gid is None or gid == os.getegid() or gid in os.getgroups() or _may_change_owners():
        return gid, ()
    return None, (
        StatusCondition(
            "StorageGroupMissing",
            f"this process is not in group {gid} (security.storageGid), so files belong to its own "
            "user and group and other pods may be unable to read them: add the group to the pod's "
            "securityContext.supplementalGroups",
        ),
    )


def _may_change_owners() -> bool:
    """Whether this process has CAP_CHOWN, which root may lack."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) & 1)
    except (OSError, ValueError):
        pass
    return os.geteuid() == 0


def build_tiers(topology: Topology, wrap: WrapTier | None = None) -> BuiltTiers:
    """Builds the secondary tiers without I/O. A tier that cannot be built becomes a condition."""
    tiers: list[Tier] = []
    missing: list[TierDocument] = []
    gid, said = storage_group(topology.structural.storage_gid)
    has_files = _file_tiers(topology) > 0
    conditions: list[StatusCondition] = list(said) if has_files else []
    directory = topology.structural.isolation.key_directory
    keys = KeyRing(Path(directory)) if directory is not None and has_files else None
    for document in topology.structural.tiers:
        if isinstance(document, MemoryTierDocument):
            continue
        try:
            tier = _build(document, topology, gid, keys, wrap)
        except (KVTierError, ImportError, OSError, ValueError) as error:
            _log.error("cannot build tier %s: %s", document.name, error)
            missing.append(document)
            conditions.append(StatusCondition("TierNotServed", f"tier {document.name}: {error}"))
            continue
        limitation = getattr(tier, "limitations", "")
        if limitation:
            conditions.append(StatusCondition("TierLimited", f"tier {document.name}: {limitation}"))
        tiers.append(tier if wrap is None or isinstance(tier, VolumeSet) else wrap(tier))
    return BuiltTiers(tuple(tiers), tuple(missing), tuple(conditions), keys)


def _file_tiers(topology: Topology) -> int:
    return sum(
        isinstance(document, FileSystemTierDocument) for document in topology.structural.tiers
    )


def _indexed_tiers(topology: Topology) -> int:
    return sum(
        isinstance(document, FileSystemTierDocument | LMCacheTierDocument)
        for document in topology.structural.tiers
    )


def key_condition(keys: KeyRing | None) -> StatusCondition | None:
    """What is wrong with the keys; None if nothing is."""
    if keys is None or not keys.problem:
        return None
    if keys.available:
        return StatusCondition("KeyInvalid", keys.problem)
    return StatusCondition(
        "KeyMissing", f"file tiers are suspended until their keys are available: {keys.problem}"
    )


def _sealing(topology: Topology, keys: KeyRing | None) -> Sealing | None:
    """Raises ``KVTierError`` if the settings cannot be followed."""
    encrypt = topology.structural.isolation.encryption is not Encryption.NONE
    if keys is None:
        if encrypt:
            raise KVTierError("isolation.encryption requires isolation.keyDirectory")
        return None
    if encrypt:
        require_cipher()
    return Sealing(keys.keys, encrypt)


def _build(
    document: TierDocument,
    topology: Topology,
    gid: int | None,
    keys: KeyRing | None,
    wrap: WrapTier | None,
) -> Tier:
    """``wrap``: for each volume, if the tier has several."""
    from kvtier.tiers.filesystem.index import MAX_INDEXED_OBJECTS

    live = topology.live.tiers.get(document.name, LiveTier())
    # Fixed shares: otherwise the share would change with every object of the other tiers.
    share = MAX_INDEXED_OBJECTS // max(_indexed_tiers(topology), 1)
    if isinstance(document, FileSystemTierDocument):
        from kvtier.tiers.filesystem import FileSystemTier

        sealing, built = _sealing(topology, keys), []
        places = [(volume.name, volume.path) for volume in document.volumes]
        for name, path in places or [("", document.path)]:
            part = document.model_copy(
                update={"name": name or document.name, "path": path, "volumes": ()}
            )
            objects = share // max(len(places), 1)
            tier = FileSystemTier(
                part, limits_of(live, name), gid, max_objects=objects, sealing=sealing
            )
            if keys is not None:
                keys.on_change(tier.keys_changed)
            built.append(wrap(tier) if places and wrap is not None else tier)
        return VolumeSet(document.name, built) if places else built[0]
    if isinstance(document, LMCacheTierDocument):
        if topology.structural.isolation.key_directory is not None:
            raise KVTierError("objects in lmcache tiers cannot be protected by isolation keys")
        from kvtier.tiers.lmcache import LMCacheTier

        return LMCacheTier(document, limits_of(live), max_objects=share)
    raise KVTierError(f"this version does not support tiers of kind {document.kind}")


DATA_BYTES = 640 << 20
"""The container's limit has 512 MiB for tierd and 256 MiB for indexes beside the pool. 128 MiB of
them remain for the supervisor, code and the kernel."""
STACK_BYTES = 1 << 20
"""Stack of each thread. The kernel counts address space, so the usual 8 MiB would be most of the
limit."""
_OTHER_THREADS = 64


def data_limit(structural: Structural, data_bytes: int) -> int:
    """``RLIMIT_DATA`` for a topology: ``data_bytes`` and the stacks of its tiers' threads."""
    threads = _OTHER_THREADS + sum(
        (tier.read_threads + tier.write_threads) * _volumes(tier)
        for tier in structural.tiers
        if isinstance(tier, FileSystemTierDocument | LMCacheTierDocument)
    )
    return data_bytes + threads * STACK_BYTES


def _volumes(tier: FileSystemTierDocument | LMCacheTierDocument) -> int:
    return max(len(tier.volumes), 1) if isinstance(tier, FileSystemTierDocument) else 1


def limit_data(structural: Structural, data_bytes: int) -> int:
    """Limits this process before it starts threads; returns the limit in bytes, 0 if it cannot be
    set."""
    limit = data_limit(structural, data_bytes)
    threading.stack_size(STACK_BYTES)
    has_child = any(isinstance(tier, LMCacheTierDocument) for tier in structural.tiers)
    try:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        bound = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        # The process of an lmcache tier inherits the hard limit and needs more than tierd.
        resource.setrlimit(resource.RLIMIT_DATA, (bound, hard if has_child else bound))
    except (OSError, ValueError) as error:
        _log.warning("cannot set RLIMIT_DATA: %s", error)
        return 0
    return bound
