"""Which nodes a pod can be scheduled on: the only implementation, used by webhook and controller.
Pure.

A node counts unless a rule of the scheduler excludes it for good: the pod's node name, selector and
required node affinity, the node's taints, a cordon, and devices that the node does not have. Taints
that Kubernetes sets and removes itself (not ready, memory pressure) exclude no node, and neither do
amounts in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from kvtier_operator.api.nodes import Node, Taint
from kvtier_operator.api.pods import NodeSelectorRequirement, NodeSelectorTerm, PodSpec, Toleration
from kvtier_operator.injection.resources import Amounts, parse_amount, pod_requests

CORDON = Taint(key="node.kubernetes.io/unschedulable", effect="NoSchedule")
"""What a cordoned node amounts to."""
BLOCKING_EFFECTS = ("NoSchedule", "NoExecute")
_TRANSIENT_PREFIXES = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")
_NAME_FIELD = "metadata.name"


def schedulable(nodes: Iterable[Node], spec: PodSpec) -> Iterator[Node]:
    """Those of ``nodes`` that the pod can be scheduled on, sooner or later."""
    devices = {name: amount for name, amount in pod_requests(spec).items() if "/" in name}
    for node in nodes:
        if spec.node_name:
            if spec.node_name == node.metadata.name:
                yield node
        elif (
            _has_devices(node, devices)
            and _matches_selector(node, spec)
            and _matches_affinity(node, spec)
            and _tolerates_all(node, spec)
        ):
            yield node


def _matches_selector(node: Node, spec: PodSpec) -> bool:
    labels = node.metadata.labels
    return all(labels.get(key) == value for key, value in spec.node_selector.items())


def _tolerates_all(node: Node, spec: PodSpec) -> bool:
    taints = [
        taint
        for taint in node.spec.taints
        if taint.effect in BLOCKING_EFFECTS and not taint.key.startswith(_TRANSIENT_PREFIXES)
    ]
    if node.spec.unschedulable:
        taints.append(CORDON)
    return all(any(_tolerates(each, taint) for each in spec.tolerations) for taint in taints)


def _tolerates(toleration: Toleration, taint: Taint) -> bool:
    if toleration.effect and toleration.effect != taint.effect:
        return False
    if not toleration.key:
        return toleration.operator == "Exists"
    if toleration.key != taint.key:
        return False
    return toleration.operator == "Exists" or toleration.value == taint.value


def _matches_affinity(node: Node, spec: PodSpec) -> bool:
    required = spec.affinity.node_affinity.required
    return required is None or any(
        _matches_term(node, term) for term in required.node_selector_terms
    )


def _matches_term(node: Node, term: NodeSelectorTerm) -> bool:
    """A term without requirements matches no node."""
    labels, fields = node.metadata.labels, {_NAME_FIELD: node.metadata.name}
    if not term.match_expressions and not term.match_fields:
        return False
    return all(_matches(labels, each) for each in term.match_expressions) and all(
        _matches(fields, each) for each in term.match_fields
    )


def _matches(labels: Mapping[str, str], requirement: NodeSelectorRequirement) -> bool:
    value = labels.get(requirement.key)
    match requirement.operator:
        case "In":
            return value in requirement.values
        case "NotIn":
            return value not in requirement.values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt":
            return _compares(value, requirement, int.__gt__)
        case "Lt":
            return _compares(value, requirement, int.__lt__)
    return False


def _compares(
    value: str | None, requirement: NodeSelectorRequirement, compare: Callable[[int, int], bool]
) -> bool:
    try:
        return value is not None and compare(int(value), int(requirement.values[0]))
    except (ValueError, IndexError):
        return False


def _has_devices(node: Node, devices: Amounts) -> bool:
    """Whether the node has the extended resources, such as GPUs, that the pod requests."""
    allocatable = node.status.allocatable
    return all(parse_amount(allocatable.get(name, 0)) >= amount for name, amount in devices.items())
