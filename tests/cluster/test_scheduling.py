"""The scheduler of a real Kubernetes and ``injection.scheduling`` agree about nodes and pods."""

from __future__ import annotations

import random
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from kvtier_operator.api.nodes import Node, decode_node
from kvtier_operator.api.pods import PodSpec, decode
from kvtier_operator.injection.scheduling import schedulable

GPU = "nvidia.com/gpu"
SEED = 20261129
PODS = 120
POOLS, ZONES, TAINTS = ("cpu", "gpu", "old"), ("1", "2", "30"), ("dedicated", "gpu")
NODES = 6


def described_node(choose: random.Random) -> dict[str, Any]:
    """Labels, taints and a cordon."""
    taints = [
        {"key": key, "value": choose.choice("ab"), "effect": effect}
        for key in TAINTS
        if choose.random() < 0.3
        for effect in [choose.choice(("NoSchedule", "PreferNoSchedule", "NoExecute"))]
    ]
    return {
        "metadata": {"labels": {"pool": choose.choice(POOLS), "zone": choose.choice(ZONES)}},
        "spec": {"taints": taints, "unschedulable": choose.random() < 0.2},
    }


def requirement(choose: random.Random) -> dict[str, Any]:
    key = choose.choice(("pool", "zone", "absent"))
    operator = choose.choice(("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"))
    values = POOLS if key == "pool" else ZONES
    found: dict[str, Any] = {"key": key, "operator": operator}
    if operator in ("In", "NotIn"):
        found["values"] = choose.sample(values, choose.randint(1, 2))
    elif operator in ("Gt", "Lt"):
        found["values"] = [choose.choice(ZONES)]
    return found


def random_spec(choose: random.Random, names: list[str]) -> dict[str, Any]:
    """A pod's spec with some of the rules by which a scheduler excludes nodes."""
    spec: dict[str, Any] = {"containers": [{"name": "vllm", "image": "vllm"}]}
    if choose.random() < 0.4:
        spec["containers"][0]["resources"] = {"limits": {GPU: "1"}}
    if choose.random() < 0.3:
        spec["nodeSelector"] = {"pool": choose.choice(POOLS)}
    if choose.random() < 0.5:
        terms: list[dict[str, Any]] = [
            {"matchExpressions": [requirement(choose) for _ in range(choose.randint(1, 2))]}
            for _ in range(choose.randint(1, 2))
        ]
        if choose.random() < 0.2:
            field = {"key": "metadata.name", "operator": "In", "values": [choose.choice(names)]}
            terms.append({"matchFields": [field]})
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        spec["affinity"] = {"nodeAffinity": required}
    tolerations = []
    for key in (*TAINTS, "node.kubernetes.io/unschedulable", ""):
        if choose.random() < 0.3:
            value = {"operator": "Exists"} if not key or choose.random() < 0.5 else {"value": "a"}
            effect = choose.choice(({}, {"effect": "NoSchedule"}))
            tolerations.append({**({"key": key} if key else {}), **value, **effect})
    spec["tolerations"] = tolerations
    return spec


def test_pods_run_on_the_nodes_that_they_can_be_scheduled_on(
    full_api: Any, nodes: ModuleType
) -> None:
    choose = random.Random(SEED)
    space = nodes.make_namespace(full_api, "scheduling")
    pods = f"/api/v1/namespaces/{space}/pods"
    with ExitStack() as stack:
        found: list[Node] = []
        names = [f"scheduling-{index}" for index in range(NODES)]
        for index, name in enumerate(names):
            devices = {GPU: "1000"} if index % 2 else {}
            stack.enter_context(nodes.FakeNode(full_api, name, pods="1000", **devices))
            patch = described_node(choose)
            path = f"/api/v1/nodes/{name}"
            nodes.ok(full_api.request("PATCH", path, patch, content_type=nodes.MERGE))
            found.append(decode_node(nodes.ok(full_api.request("GET", path))))
        stack.callback(full_api.request, "DELETE", f"/api/v1/namespaces/{space}")
        specs = {f"pod-{index}": random_spec(choose, names) for index in range(PODS)}
        for name, spec in specs.items():
            body = {"metadata": {"name": name}, "spec": spec}
            nodes.ok(full_api.request("POST", pods, body))

        def decided() -> dict[str, str] | None:
            """The node of each pod, empty if there is none; None while some are undecided."""
            chosen = {}
            for pod in nodes.ok(full_api.request("GET", pods))["items"]:
                conditions = pod["status"].get("conditions", ())
                if not any(each["type"] == "PodScheduled" for each in conditions):
                    return None
                chosen[pod["metadata"]["name"]] = pod["spec"].get("nodeName", "")
            return chosen

        chosen = nodes.wait_for("the scheduler decides about every pod", decided, 180)
        assert len(chosen) == PODS
        placed = 0
        for name, spec in specs.items():
            possible = [each.metadata.name for each in schedulable(found, decode(spec, PodSpec))]
            assert (chosen[name] in possible) if chosen[name] else not possible, (name, spec)
            placed += bool(chosen[name])
        assert 0 < placed < PODS
