"""From the topology document to tiers, and what could not be built.

What tierd may allocate beside the pool.

The sidecar's memory limit is the pool and a fixed sum. Running into it makes the kernel kill the container; running into a limit of the
process's own makes one allocation fail, and at worst tierd is restarted over the same pool.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtier.config.models import (
    FileSystemTierDocument,
    LiveTier,
    MemoryTierDocument,
    Structural,
    TierDocument,
    Topology,
)
from kvtier.errors import KVTierError
from kvtier.tierd.status import Condition
from kvtier.tiers.base import Tier, TierLimits

_log = logging.getLogger("kvtier.tierd")
WrapTier = Callable[[Tier], Tier]


@dataclass(frozen=True, slots=True)
class BuiltTiers:
    """``tiers``: the lower ones that work, in the document's order. ``missing``: documents of those that do not."""

    tiers: tuple[Tier, ...]
    missing: tuple[TierDocument, ...]
    conditions: tuple[Condition, ...]


def memory_document(structural: Structural) -> MemoryTierDocument:
    """The memory tier; loading has made sure that there is one."""
    for tier in structural.tiers:
        if isinstance(tier, MemoryTierDocument):
            return tier
    raise KVTierError("the topology has no memory tier")


def limits_of(live: LiveTier) -> TierLimits:
    """The live values that a tier itself has to know."""
    return TierLimits(
        capacity_bytes=sys.maxsize if live.capacity_bytes is None else live.capacity_bytes,
        high_watermark_percent=live.high_watermark_percent,
        low_watermark_percent=live.low_watermark_percent,
        retention_seconds=live.retention_seconds,
        sync_data=live.sync_data,
    )


def storage_group(gid: int | None) -> tuple[int | None, tuple[Condition, ...]]:
    """The group that files can be given, and what is to be said where that is not the one asked for."""
    if gid is None or gid == os.getegid() or gid in os.getgroups() or _may_change_owners():
        return gid, ()
    return None, (
        Condition(
            "StorageGroupMissing",
            f"this process is not in group {gid} (security.storageGid), so files are made for its own user and group: other pods "
            "may not be able to read them; the pod's securityContext.supplementalGroups must list the group",
        ),
    )


def _may_change_owners() -> bool:
    """Whether this process has CAP_CHOWN: root without capabilities may no more than others."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) & 1)
    except (OSError, ValueError):
        pass
    return os.geteuid() == 0


def build_tiers(topology: Topology, wrap: WrapTier | None = None) -> BuiltTiers:
    """Makes the lower tiers; does no I/O. A tier that cannot be made leaves the others working, and a condition."""
    tiers: list[Tier] = []
    missing: list[TierDocument] = []
    gid, said = storage_group(topology.structural.storage_gid)
    has_files = _file_tiers(topology) > 0
    conditions: list[Condition] = list(said) if has_files else []
    for document in topology.structural.tiers:
        if isinstance(document, MemoryTierDocument):
            continue
        try:
            tier = _build(document, topology, gid)
        except (KVTierError, ImportError, OSError, ValueError) as error:
            _log.error("tier %s is not served: %s", document.name, error)
            missing.append(document)
            conditions.append(Condition("TierNotServed", f"tier {document.name}: {error}"))
            continue
        tiers.append(tier if wrap is None else wrap(tier))
    return BuiltTiers(tuple(tiers), tuple(missing), tuple(conditions))


def _file_tiers(topology: Topology) -> int:
    return sum(
        isinstance(document, FileSystemTierDocument) for document in topology.structural.tiers
    )


def _build(document: TierDocument, topology: Topology, gid: int | None) -> Tier:
    if isinstance(document, FileSystemTierDocument):
        from kvtier.tiers.filesystem import FileSystemTier
        from kvtier.tiers.filesystem.index import MAX_INDEXED_OBJECTS

        live = topology.live.tiers.get(document.name, LiveTier())
        # Shares are fixed: one that depended on what the others hold would change with every object of theirs.
        share = MAX_INDEXED_OBJECTS // _file_tiers(topology)
        return FileSystemTier(document, limits_of(live), gid, max_objects=share)
    raise KVTierError(f"tiers of kind {document.kind} are not served by this version")


DATA_BYTES = 640 << 20
"""Of the 512 MiB for tierd and 256 MiB for indexes that the container's limit has beside the pool: what is left for the supervisor, code and
the kernel's own use is 128 MiB."""
STACK_BYTES = 1 << 20
"""Of each thread; the kernel counts address space, so the usual 8 MiB would be most of the limit."""
_OTHER_THREADS = 64


def data_limit(structural: Structural, data_bytes: int) -> int:
    """``RLIMIT_DATA`` for a topology: ``data_bytes``, and the address space of the stacks of as many threads as its tiers have."""
    threads = _OTHER_THREADS + sum(
        tier.read_threads + tier.write_threads
        for tier in structural.tiers
        if isinstance(tier, FileSystemTierDocument)
    )
    return data_bytes + threads * STACK_BYTES


def limit_data(structural: Structural, data_bytes: int) -> int:
    """Limits this process, before it starts threads; returns the limit in bytes. What cannot be limited is logged."""
    limit = data_limit(structural, data_bytes)
    threading.stack_size(STACK_BYTES)
    try:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        bound = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    except (OSError, ValueError) as error:
        _log.warning("RLIMIT_DATA cannot be set: %s", error)
        return 0
    return bound
