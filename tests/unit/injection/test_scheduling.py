"""Which nodes a pod can be scheduled on."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier_operator.api.nodes import Node, decode_node
from kvtier_operator.api.pods import PodSpec, decode
from kvtier_operator.injection.scheduling import schedulable

GPU = "nvidia.com/gpu"


def node(name: str = "a", **fields: Any) -> Node:
    """``labels``, ``taints``, ``allocatable`` and ``unschedulable``."""
    return decode_node(
        {
            "metadata": {"name": name, "labels": fields.get("labels", {"pool": "gpu", "gen": "3"})},
            "spec": {
                "taints": fields.get("taints"),
                "unschedulable": fields.get("unschedulable", False),
            },
            "status": {"allocatable": fields.get("allocatable", {GPU: "8", "memory": "1Ti"})},
        }
    )


def affinity(*terms: dict[str, Any]) -> dict[str, Any]:
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    return {"affinity": {"nodeAffinity": {required: {"nodeSelectorTerms": list(terms)}}}}


def labels(*requirements: tuple[str, str, list[str]]) -> dict[str, Any]:
    return {
        "matchExpressions": [
            {"key": key, "operator": operator, "values": values}
            for key, operator, values in requirements
        ]
    }


def gpus(number: str) -> dict[str, Any]:
    return {"containers": [{"name": "vllm", "resources": {"limits": {GPU: number}}}]}


def taint(effect: str = "NoSchedule", key: str = "gpu", value: str = "yes") -> dict[str, str]:
    return {"key": key, "value": value, "effect": effect}


@pytest.mark.parametrize(
    ("spec", "fields", "expected"),
    [
        ({}, {}, True),
        ({"nodeName": "a"}, {"taints": [taint()]}, True),
        ({"nodeName": "b"}, {}, False),
        ({"nodeSelector": {"pool": "gpu"}}, {}, True),
        ({"nodeSelector": {"pool": "cpu"}}, {}, False),
        ({"nodeSelector": {"zone": ""}}, {}, False),
        (affinity(labels(("pool", "In", ["x", "gpu"]))), {}, True),
        (affinity(labels(("pool", "NotIn", ["gpu"]))), {}, False),
        (affinity(labels(("zone", "NotIn", ["gpu"]))), {}, True),
        (affinity(labels(("pool", "Exists", []), ("zone", "DoesNotExist", []))), {}, True),
        (affinity(labels(("pool", "DoesNotExist", []))), {}, False),
        (affinity(labels(("gen", "Gt", ["2"]))), {}, True),
        (affinity(labels(("gen", "Gt", ["3"]))), {}, False),
        (affinity(labels(("gen", "Lt", ["10"]))), {}, True),
        (affinity(labels(("pool", "Lt", ["10"]))), {}, False),
        (affinity(labels(("pool", "In", ["x"])), labels(("gen", "Exists", []))), {}, True),
        (affinity({}), {}, False),
        (
            affinity(
                {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["b"]}]}
            ),
            {},
            False,
        ),
        ({}, {"taints": [taint()]}, False),
        ({}, {"taints": [taint("NoExecute")]}, False),
        ({}, {"taints": [taint("PreferNoSchedule")]}, True),
        ({"tolerations": [{"operator": "Exists"}]}, {"taints": [taint()]}, True),
        ({"tolerations": [{"key": "gpu", "value": "yes"}]}, {"taints": [taint()]}, True),
        ({"tolerations": [{"key": "gpu", "value": "no"}]}, {"taints": [taint()]}, False),
        (
            {"tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoExecute"}]},
            {"taints": [taint()]},
            False,
        ),
        ({}, {"taints": [taint(key="node.kubernetes.io/not-ready")]}, True),
        ({}, {"unschedulable": True}, False),
        (
            {"tolerations": [{"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}]},
            {"unschedulable": True},
            True,
        ),
        (gpus("8"), {}, True),
        (gpus("9"), {}, False),
        (gpus("1"), {"allocatable": {"memory": "1Ti"}}, False),
        (gpus("0"), {"allocatable": {}}, True),
    ],
)
def test_a_pod_can_be_scheduled_on_a_node(
    spec: dict[str, Any], fields: dict[str, Any], expected: bool
) -> None:
    found = list(schedulable([node(**fields)], decode(spec, PodSpec)))
    assert (found != []) is expected
