"""Whether the resources of injected containers make a pod unschedulable: it fits without them, and
does not fit with them. Pure.

In a cluster that is full, or that waits for its autoscaler, the pod would not fit without them
either. That is not an injection failure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import msgspec

from kvtier_operator.api.pods import Pod, PodSpec, Toleration, decode
from kvtier_operator.controller import objects
from kvtier_operator.injection.resources import parse_amount, pod_requests
from kvtier_operator.kube.resources import Object

Amounts = Mapping[str, Fraction]
BLOCKING_EFFECTS = ("NoSchedule", "NoExecute")
NOTHING = Fraction(0)


def without_injected(spec: PodSpec) -> PodSpec:
    """The spec without injected containers."""
    own = tuple(each for each in spec.init_containers if not objects.is_injected_name(each.name))
    return msgspec.structs.replace(spec, init_containers=own)


def insufficient_resources(pod: Pod, nodes: Sequence[Object], pods: Iterable[Object]) -> str:
    """A message with the node and the resource; empty if injection is not the cause. ``pods``: all
    pods of the cluster.
    """
    own, total = pod_requests(without_injected(pod.spec)), pod_requests(pod.spec)
    if own == total:
        return ""
    used = _used_by_node(pods)
    message = ""
    for node in nodes:
        if not _accepts(node, pod.spec):
            continue
        taken: Amounts = used.get(objects.name(node), {})
        free = {
            resource: parse_amount(value) - taken.get(resource, NOTHING)
            for resource, value in (objects.status(node).get("allocatable") or {}).items()
        }
        if _exceeded({**own, "pods": Fraction(1)}, free):
            continue
        exceeded = _exceeded(total, free)
        if not exceeded:
            # The pod fits with tiers, so its size is not the cause.
            return ""
        if not message:
            message = (
                f"node {objects.name(node)} has enough {exceeded[0]} for the pod without tiers, "
                "and not enough with tiers"
            )
    return message


def _used_by_node(pods: Iterable[Object]) -> dict[str, dict[str, Fraction]]:
    used: dict[str, dict[str, Fraction]] = {}
    for pod in pods:
        if objects.status(pod).get("phase") in ("Succeeded", "Failed"):
            continue
        spec = decode(objects.spec(pod), PodSpec)
        if spec.node_name:
            sums = used.setdefault(spec.node_name, defaultdict(Fraction))
            sums["pods"] += 1
            for resource, value in pod_requests(spec).items():
                sums[resource] += value
    return used


def _exceeded(requests: Amounts, free: Amounts) -> list[str]:
    return sorted(
        name for name, value in requests.items() if value > 0 and value > free.get(name, NOTHING)
    )


def _accepts(node: Object, spec: PodSpec) -> bool:
    """Whether the node matches the pod's node selector and tolerations. Affinity is ignored."""
    node_spec = objects.spec(node)
    if node_spec.get("unschedulable"):
        return False
    labels = objects.labels(node)
    if any(labels.get(key) != value for key, value in spec.node_selector.items()):
        return False
    return all(
        any(_tolerates(toleration, taint) for toleration in spec.tolerations)
        for taint in node_spec.get("taints") or ()
        if taint.get("effect") in BLOCKING_EFFECTS
    )


def _tolerates(toleration: Toleration, taint: Mapping[str, Any]) -> bool:
    if toleration.effect and toleration.effect != taint.get("effect"):
        return False
    if not toleration.key:
        return toleration.operator == "Exists"
    if toleration.key != taint.get("key"):
        return False
    return toleration.operator == "Exists" or toleration.value == (taint.get("value") or "")
