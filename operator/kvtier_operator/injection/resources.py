"""Requests and limits of containers and pods, as Kubernetes computes them: the only implementation.
Pure.

Sources of the rules: ``k8s.io/component-helpers/resource`` (effective requests and limits of a
pod), ``pkg/apis/core/v1/defaults.go`` (requests that default to limits),
``pkg/apis/core/helper/qos`` (the QoS class).

* A container's request defaults to its limit.
* A pod's request is the larger of what runs at once after initialization (containers and sidecars)
  and of what the most demanding init container needs (with the sidecars that started before it).
* Pod-level resources (``spec.resources``) replace that sum. A pod-level request that is not set
  defaults to the sum over containers, and to the pod-level limit for a resource that no container
  requests.
* ``overhead`` is added to requests; to limits only if there is a limit.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from kvtier_operator.api.pods import Container, PodSpec, ResourceList
from kvtier_operator.api.quantity import Quantity, QuantityError

CPU = "cpu"
MEMORY = "memory"
STORAGE = "ephemeral-storage"
SIZE_UNITS = ((1 << 40, "Ti"), (1 << 30, "Gi"), (1 << 20, "Mi"))
Amounts = dict[str, Fraction]
"""Quantities by resource name: cores, bytes, devices."""


def parse_amount(written: object) -> Fraction:
    """The value of a quantity. What is not a quantity counts as 0: the API server rejects it."""
    try:
        return Quantity.parse(written).value if isinstance(written, int | str) else Fraction(0)
    except QuantityError:
        return Fraction(0)


def parse_amounts(written: ResourceList) -> Amounts:
    """The values of a resource list."""
    return {name: parse_amount(value) for name, value in written.items()}


def container_requests(container: Container) -> Amounts:
    """The requests of a container."""
    resources = container.resources
    return {**parse_amounts(resources.limits), **parse_amounts(resources.requests)}


def container_limits(container: Container) -> Amounts:
    """The limits of a container."""
    return parse_amounts(container.resources.limits)


def aggregated_requests(spec: PodSpec) -> Amounts:
    """The requests of all containers together, without pod-level resources and overhead."""
    return _aggregated(spec, container_requests)


def pod_requests(spec: PodSpec, overhead: bool = True) -> Amounts:
    """The requests that the scheduler and quotas count for a pod."""
    total = aggregated_requests(spec)
    for name, value in parse_amounts(spec.resources.limits).items():
        total.setdefault(name, value)
    total.update(parse_amounts(spec.resources.requests))
    return _sum(total, parse_amounts(spec.overhead)) if overhead else total


def pod_limits(spec: PodSpec, overhead: bool = True) -> Amounts:
    """The limits that quotas count for a pod."""
    total = _aggregated(spec, container_limits)
    total.update(parse_amounts(spec.resources.limits))
    if overhead:
        for name, value in parse_amounts(spec.overhead).items():
            if total.get(name):
                total[name] += value
    return total


def has_pod_level_resources(spec: PodSpec) -> bool:
    """Whether the pod has requests or limits as a whole (``spec.resources``)."""
    return bool(spec.resources.requests or spec.resources.limits)


def qos_class(spec: PodSpec) -> str:
    """``Guaranteed``, ``Burstable`` or ``BestEffort``."""
    if has_pod_level_resources(spec):
        groups = [(pod_requests(spec, overhead=False), parse_amounts(spec.resources.limits))]
    else:
        groups = [
            (container_requests(each), container_limits(each)) for each in spec.all_containers
        ]
    requests: Amounts = {}
    limits: Amounts = {}
    all_limited = True
    for group_requests, group_limits in groups:
        requests = _sum(requests, _compute_resources(group_requests))
        limits = _sum(limits, _compute_resources(group_limits))
        all_limited = all_limited and len(_compute_resources(group_limits)) == 2
    if not requests and not limits:
        return "BestEffort"
    return "Guaranteed" if all_limited and requests == limits else "Burstable"


def format_amount(name: str, value: Fraction) -> str:
    """A value for messages: sizes in the largest unit that fits, cpu in cores or thousandths."""
    if name.endswith(("memory", "storage")):
        for scale, unit in SIZE_UNITS:
            if value >= scale:
                text = f"{float(value / scale):.2f}".rstrip("0").rstrip(".")
                return f"{text}{unit}"
        return str(-(-value.numerator // value.denominator))
    return str(value) if value.denominator == 1 else f"{-(-value * 1000 // 1)}m"


def _aggregated(spec: PodSpec, amounts_of: Callable[[Container], Amounts]) -> Amounts:
    running: Amounts = {}
    for container in spec.containers:
        running = _sum(running, amounts_of(container))
    sidecars: Amounts = {}
    initializing: Amounts = {}
    for container in spec.init_containers:
        amounts = amounts_of(container)
        if container.is_sidecar:
            sidecars = _sum(sidecars, amounts)
            running = _sum(running, amounts)
            initializing = _max(initializing, sidecars)
        else:
            initializing = _max(initializing, _sum(sidecars, amounts))
    return _max(running, initializing)


def _compute_resources(amounts: Amounts) -> Amounts:
    """The resources that decide the QoS class."""
    return {name: value for name, value in amounts.items() if name in (CPU, MEMORY) and value > 0}


def _sum(left: Amounts, right: Amounts) -> Amounts:
    names = {**left, **right}
    return {name: left.get(name, Fraction(0)) + right.get(name, Fraction(0)) for name in names}


def _max(left: Amounts, right: Amounts) -> Amounts:
    names = {**left, **right}
    return {name: max(left.get(name, Fraction(0)), right.get(name, Fraction(0))) for name in names}
