"""Whether the resources of injected containers make a pod unschedulable: it fits without them, and
does not fit with them. Pure.

In a cluster that is full, or that waits for its autoscaler, the pod would not fit without them
either. That is not an injection failure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

import msgspec

from kvtier_operator.api.nodes import decode_node
from kvtier_operator.api.pods import Pod, PodSpec, decode
from kvtier_operator.controller import objects
from kvtier_operator.injection.resources import parse_amount, pod_requests
from kvtier_operator.injection.scheduling import schedulable
from kvtier_operator.kube.resources import Object

Amounts = Mapping[str, Fraction]
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
    for node in schedulable(map(decode_node, nodes), pod.spec):
        name = node.metadata.name
        taken: Amounts = used.get(name, {})
        free = {
            resource: parse_amount(value) - taken.get(resource, NOTHING)
            for resource, value in node.status.allocatable.items()
        }
        if _exceeded({**own, "pods": Fraction(1)}, free):
            continue
        exceeded = _exceeded(total, free)
        if not exceeded:
            # The pod fits with tiers, so its size is not the cause.
            return ""
        if not message:
            message = (
                f"node {name} has enough {exceeded[0]} for the pod without tiers, "
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
