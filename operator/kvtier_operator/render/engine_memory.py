"""Memory of an engine that pays for tiers itself (``daemon: Engine``, other connectors): pages of a memory-backed volume
count against the container that touches them first. Pure.
"""

from __future__ import annotations

import posixpath
from typing import Any

from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.settings import MemoryPolicy
from kvtier_operator.render.attachment import Skipped, SkipReason
from kvtier_operator.render.names import SHARED_MEMORY_VOLUME
from kvtier_operator.render.resources import MEMORY, amount, limits_of, requests_of, shown

SHARED_MEMORY = "/dev/shm"  # noqa: S108  (memory-backed on purpose)
OWN_SHARED_BYTES = 1 << 30
"""Of ``/dev/shm`` for what the engine puts there itself (its ranks' message queues, NCCL), where the pod did not say."""


def fit(policy: KVTierPolicy, engine: dict[str, Any], needed: int, notes: list[str]) -> Skipped | None:
    """Checks the engine's memory limit against what tiers take of it, or raises limit and request, as
    ``resources.memoryPolicy`` says. A container without a limit is let be.
    """
    limit = limits_of(engine).get(MEMORY)
    what = policy.spec.resources.memory_policy
    if not limit or not needed or what is MemoryPolicy.IGNORE:
        return None
    if what is MemoryPolicy.VALIDATE:
        if limit >= needed:
            return None
        return Skipped(
            SkipReason.MEMORY_TOO_SMALL,
            f"container {engine['name']} may use {shown(MEMORY, limit)} of memory and its tiers alone take "
            f"{shown(MEMORY, amount(needed))}; raise its limit, or set spec.resources.memoryPolicy: Grow",
        )
    resources = engine.get("resources") or {}
    grown = {"limits": {**resources["limits"], MEMORY: str(int(limit) + needed)}}
    request = requests_of(engine)[MEMORY]
    grown["requests"] = {**(resources.get("requests") or {}), MEMORY: str(int(request) + needed)}
    engine["resources"] = {**resources, **grown}
    notes.append(
        f"memory of container {engine['name']} was raised by {shown(MEMORY, amount(needed))} for its tiers "
        "(resources.memoryPolicy: Grow)"
    )
    return None


def shared_memory(spec: dict[str, Any], engine: dict[str, Any], needed: int, notes: list[str]) -> None:
    """Makes ``/dev/shm`` of the engine's container larger by what a connector takes there. What the pod says is never
    lowered, and what is no volume of the pod's is left alone.
    """
    if not needed:
        return
    size = shown(MEMORY, amount(needed))
    if spec.get("hostIPC"):
        notes.append(f"hostIPC: {SHARED_MEMORY} is the node's and has to have {size} for the tiers")
        return
    for mount in engine.get("volumeMounts") or ():
        if posixpath.normpath(str(mount.get("mountPath"))) == SHARED_MEMORY:
            _enlarge(spec, str(mount.get("name")), needed, notes)
            return
    volume = {"medium": "Memory", "sizeLimit": str(needed + OWN_SHARED_BYTES)}
    spec["volumes"] = [*(spec.get("volumes") or ()), {"name": SHARED_MEMORY_VOLUME, "emptyDir": volume}]
    mount = {"name": SHARED_MEMORY_VOLUME, "mountPath": SHARED_MEMORY}
    engine["volumeMounts"] = [*(engine.get("volumeMounts") or ()), mount]


def _enlarge(spec: dict[str, Any], name: str, needed: int, notes: list[str]) -> None:
    for index, volume in enumerate(spec.get("volumes") or ()):
        if volume.get("name") != name:
            continue
        empty = volume.get("emptyDir")
        if empty is None or not empty.get("sizeLimit"):
            notes.append(
                f"{SHARED_MEMORY} is the pod's volume {name}; it has to have {shown(MEMORY, amount(needed))} for the tiers"
            )
            return
        size = int(amount(empty["sizeLimit"])) + needed
        spec["volumes"][index] = {**volume, "emptyDir": {**empty, "sizeLimit": str(size)}}
        notes.append(f"volume {name} ({SHARED_MEMORY}) was enlarged by {shown(MEMORY, amount(needed))} for the tiers")
