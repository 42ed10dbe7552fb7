"""Memory of an engine's container that holds tiers itself (``daemon: Engine``, other connectors).
Pure.

Pages of a memory-backed volume count against the container that touches them first.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from kvtier_operator.api.conditions import SkipReason
from kvtier_operator.api.names import SHARED_MEMORY_VOLUME
from kvtier_operator.api.pods import Container, PodSpec, PodVolume
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.settings import MemoryPolicy
from kvtier_operator.injection.decision import Skipped
from kvtier_operator.injection.engine_container import EnginePod
from kvtier_operator.injection.resources import (
    MEMORY,
    container_limits,
    container_requests,
    format_amount,
    parse_amount,
)

SHARED_MEMORY = "/dev/shm"  # noqa: S108  (memory-backed on purpose)
ENGINE_SHARED_BYTES = 1 << 30
"""Of ``/dev/shm`` for the engine's own use (message queues of its ranks, NCCL), in a volume that
KVTier adds."""


def memory_too_small(policy: KVTierPolicy, engine: Container, needed_bytes: int) -> Skipped | None:
    """Checks the container's memory limit against what tiers need, under ``memoryPolicy:
    Validate``. A container without a limit passes.
    """
    limit = container_limits(engine).get(MEMORY)
    validates = policy.spec.resources.memory_policy is MemoryPolicy.VALIDATE
    if not validates or not limit or limit >= needed_bytes:
        return None
    return Skipped(
        SkipReason.MEMORY_TOO_SMALL,
        f"container {engine.name} has a memory limit of {format_amount(MEMORY, limit)}, and its "
        "tiers alone need "
        f"{_size(needed_bytes)}; raise the limit, or set spec.resources.memoryPolicy: Grow",
    )


def grow_memory(
    policy: KVTierPolicy, engine: Container, patched: dict[str, Any], needed_bytes: int
) -> Sequence[str]:
    """Raises memory limit and request of ``patched`` (the container ``engine`` as a document) by
    what tiers need, under ``memoryPolicy: Grow``. Returns notes. A container without a limit stays
    as it is.
    """
    limit = container_limits(engine).get(MEMORY)
    if (
        policy.spec.resources.memory_policy is not MemoryPolicy.GROW
        or not limit
        or not needed_bytes
    ):
        return ()
    resources = patched["resources"]
    request = container_requests(engine)[MEMORY]
    patched["resources"] = {
        **resources,
        "limits": {**resources["limits"], MEMORY: str(int(limit) + needed_bytes)},
        "requests": {**(resources.get("requests") or {}), MEMORY: str(int(request) + needed_bytes)},
    }
    return (
        f"memory limit and request of container {engine.name} are raised by {_size(needed_bytes)} "
        "for its tiers "
        "(spec.resources.memoryPolicy: Grow)",
    )


def grow_shared_memory(
    target: EnginePod, patched: tuple[dict[str, Any], dict[str, Any]], needed_bytes: int
) -> Sequence[str]:
    """Enlarges ``/dev/shm`` of the engine's container by what a connector needs there. ``patched``:
    the pod's spec and the container, as documents. Returns notes. A size that the pod sets is never
    lowered, and a volume without a size limit stays as it is.
    """
    if not needed_bytes:
        return ()
    pod, (spec, container) = target.pod.spec, patched
    size = _size(needed_bytes)
    if pod.host_ipc:
        return (f"hostIPC: {SHARED_MEMORY} of the node must have {size} for the tiers",)
    for mount in target.engine.volume_mounts:
        if posixpath.normpath(mount.mount_path) == SHARED_MEMORY:
            return _enlarge(pod, mount.name, spec, needed_bytes)
    volume = {"medium": "Memory", "sizeLimit": str(needed_bytes + ENGINE_SHARED_BYTES)}
    spec["volumes"] = [
        *(spec.get("volumes") or ()),
        {"name": SHARED_MEMORY_VOLUME, "emptyDir": volume},
    ]
    mount_document = {"name": SHARED_MEMORY_VOLUME, "mountPath": SHARED_MEMORY}
    container["volumeMounts"] = [*(container.get("volumeMounts") or ()), mount_document]
    return ()


def _enlarge(pod: PodSpec, name: str, spec: dict[str, Any], needed_bytes: int) -> Sequence[str]:
    index = next((index for index, each in enumerate(pod.volumes) if each.name == name), None)
    if index is None:
        return ()
    size_limit = _size_limit(pod.volumes[index])
    if not size_limit:
        return (
            f"volume {name} of the pod is {SHARED_MEMORY}; it must have {_size(needed_bytes)} for "
            "the tiers",
        )
    volume = spec["volumes"][index]
    grown = {**volume["emptyDir"], "sizeLimit": str(int(size_limit) + needed_bytes)}
    spec["volumes"][index] = {**volume, "emptyDir": grown}
    return (f"volume {name} ({SHARED_MEMORY}) is enlarged by {_size(needed_bytes)} for the tiers",)


def _size_limit(volume: PodVolume) -> Fraction | None:
    if volume.empty_dir is None or not volume.empty_dir.size_limit:
        return None
    return parse_amount(volume.empty_dir.size_limit)


def _size(size_bytes: int) -> str:
    return format_amount(MEMORY, parse_amount(size_bytes))
