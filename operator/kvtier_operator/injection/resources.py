"""Requests and limits of containers and pods, counted as Kubernetes counts them. Pure.

Sources of the rules: ``k8s.io/component-helpers/resource`` (a pod's sum), ``pkg/apis/core/helper/qos`` (its class).

Memory of an engine that pays for tiers itself (``daemon: Engine``, other connectors): pages of a memory-backed volume
count against the container that touches them first. Pure.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from kvtier_operator.api.conditions import SkipReason
from kvtier_operator.api.names import SHARED_MEMORY_VOLUME
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.quantity import Quantity, QuantityError
from kvtier_operator.api.settings import MemoryPolicy
from kvtier_operator.injection.decision import Skipped

CPU = "cpu"
MEMORY = "memory"
STORAGE = "ephemeral-storage"
SCALE = ((1 << 40, "Ti"), (1 << 30, "Gi"), (1 << 20, "Mi"))
Amounts = dict[str, Fraction]
Spec = Mapping[str, Any]


def amount(written: object) -> Fraction:
    """A quantity's value; what is none counts as nothing, the API server refuses it anyway."""
    try:
        return Quantity.parse(written).value if isinstance(written, int | str) else Fraction(0)
    except QuantityError:
        return Fraction(0)


def amounts(written: Mapping[str, Any] | None) -> Amounts:
    """The values of a resource list."""
    return {str(name): amount(value) for name, value in (written or {}).items()}


def requests_of(container: Spec) -> Amounts:
    """What a container asks for. Where it has only a limit, the API server makes that the request."""
    resources = container.get("resources") or {}
    return {**amounts(resources.get("limits")), **amounts(resources.get("requests"))}


def limits_of(container: Spec) -> Amounts:
    """What a container may use."""
    return amounts((container.get("resources") or {}).get("limits"))


def is_sidecar(container: Spec) -> bool:
    """Whether an init container stays: a native sidecar."""
    return container.get("restartPolicy") == "Always"


def containers(spec: Spec) -> list[Mapping[str, Any]]:
    """All containers that the kubelet runs, init containers first."""
    return [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]


def pod_requests(spec: Spec, overhead: bool = True) -> Amounts:
    """What the scheduler and quotas count for a pod."""
    found = _total(spec, "requests")
    for name, value in amounts(_pod_level(spec, "requests")).items():
        found[name] = value
    return _plus(found, amounts(spec.get("overhead"))) if overhead else found


def pod_limits(spec: Spec, overhead: bool = True) -> Amounts:
    """What quotas on limits count for a pod. Overhead counts only where there is a limit at all."""
    found = _total(spec, "limits")
    for name, value in amounts(_pod_level(spec, "limits")).items():
        found[name] = value
    if overhead:
        for name, value in amounts(spec.get("overhead")).items():
            if found.get(name):
                found[name] += value
    return found


def container_requests(spec: Spec) -> Amounts:
    """The sum over containers alone, which must stay within what the pod itself asks for."""
    return _total(spec, "requests")


def has_pod_level(spec: Spec) -> bool:
    """Whether the pod itself has requests or limits."""
    resources = spec.get("resources") or {}
    return bool(resources.get("requests") or resources.get("limits"))


def qos_class(spec: Spec) -> str:
    """``Guaranteed``, ``Burstable`` or ``BestEffort``."""
    if has_pod_level(spec):
        groups = [(amounts(_pod_level(spec, "requests")), amounts(_pod_level(spec, "limits")))]
    else:
        groups = [(requests_of(each), limits_of(each)) for each in containers(spec)]
    asked: Amounts = {}
    allowed: Amounts = {}
    complete = True
    for requests, limits in groups:
        asked = _plus(asked, _positive(requests))
        allowed = _plus(allowed, _positive(limits))
        complete = complete and len(_positive(limits)) == 2
    if not asked and not allowed:
        return "BestEffort"
    return "Guaranteed" if complete and asked == allowed else "Burstable"


def shown(name: str, value: Fraction) -> str:
    """A value for people: sizes in the largest unit that fits, cpu in cores or thousandths."""
    if name.endswith(("memory", "storage")):
        for scale, unit in SCALE:
            if value >= scale:
                text = f"{float(value / scale):.2f}".rstrip("0").rstrip(".")
                return f"{text}{unit}"
        return str(-(-value.numerator // value.denominator))
    return str(value) if value.denominator == 1 else f"{-(-value * 1000 // 1)}m"


def _pod_level(spec: Spec, which: str) -> Mapping[str, Any]:
    resources = spec.get("resources") or {}
    own = dict(resources.get(which) or {})
    if which == "requests" and resources:
        # As for containers: a limit alone is the request too.
        own = {**(resources.get("limits") or {}), **own}
    return own


def _total(spec: Spec, which: str) -> Amounts:
    of = requests_of if which == "requests" else limits_of
    total = _sum(of(each) for each in spec.get("containers") or ())
    sidecars: Amounts = {}
    highest: Amounts = {}
    for each in spec.get("initContainers") or ():
        if is_sidecar(each):
            sidecars = _plus(sidecars, of(each))
            total = _plus(total, of(each))
            highest = _highest(highest, sidecars)
        else:
            highest = _highest(highest, _plus(sidecars, of(each)))
    return _highest(total, highest)


def _positive(found: Amounts) -> Amounts:
    return {name: value for name, value in found.items() if name in (CPU, MEMORY) and value > 0}


def _sum(parts: Iterable[Amounts]) -> Amounts:
    total: Amounts = {}
    for part in parts:
        total = _plus(total, part)
    return total


def _plus(left: Amounts, right: Amounts) -> Amounts:
    return {
        name: left.get(name, Fraction(0)) + right.get(name, Fraction(0))
        for name in {**left, **right}
    }


def _highest(left: Amounts, right: Amounts) -> Amounts:
    return {
        name: max(left.get(name, Fraction(0)), right.get(name, Fraction(0)))
        for name in {**left, **right}
    }


SHARED_MEMORY = "/dev/shm"  # noqa: S108  (memory-backed on purpose)
OWN_SHARED_BYTES = 1 << 30
"""Of ``/dev/shm`` for what the engine puts there itself (its ranks' message queues, NCCL), where the pod did not say."""


def fit(
    policy: KVTierPolicy, engine: dict[str, Any], needed: int, notes: list[str]
) -> Skipped | None:
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


def shared_memory(
    spec: dict[str, Any], engine: dict[str, Any], needed: int, notes: list[str]
) -> None:
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
    spec["volumes"] = [
        *(spec.get("volumes") or ()),
        {"name": SHARED_MEMORY_VOLUME, "emptyDir": volume},
    ]
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
        notes.append(
            f"volume {name} ({SHARED_MEMORY}) was enlarged by {shown(MEMORY, amount(needed))} for the tiers"
        )
