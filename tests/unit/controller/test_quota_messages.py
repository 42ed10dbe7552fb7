"""Rejections by quota and LimitRange, and pods that fit no node, because of injection."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.pods import injected_pod

from kvtier_operator.api.pods import PodSpec, decode, decode_pod
from kvtier_operator.controller.injection_breaker import quota_messages
from kvtier_operator.controller.injection_breaker.insufficient_resources import (
    insufficient_resources,
    without_injected,
)
from kvtier_operator.injection.resources import pod_requests

TEMPLATE_DOCUMENT: dict[str, Any] = {
    "containers": [
        {
            "name": "vllm",
            "resources": {
                "requests": {"cpu": "4", "memory": "32Gi"},
                "limits": {"cpu": "8", "memory": "32Gi"},
            },
        }
    ]
}
TEMPLATE = decode(TEMPLATE_DOCUMENT, PodSpec)
QUOTA = 'pods "x" is forbidden: exceeded quota: gold, requested: {}, used: {}, limited: {}'
RANGE = 'pods "x" is forbidden: {}'


@pytest.mark.parametrize(
    ("requested", "used", "limited", "ours"),
    [
        ("limits.memory=98Gi", "limits.memory=10Gi", "limits.memory=64Gi", True),
        ("limits.memory=98Gi", "limits.memory=40Gi", "limits.memory=64Gi", False),
        ("memory=98Gi", "memory=10Gi", "memory=64Gi", True),
        (
            "limits.cpu=16,limits.memory=98Gi",
            "limits.cpu=0,limits.memory=10Gi",
            "limits.cpu=10,limits.memory=64Gi",
            True,
        ),
        (
            "limits.cpu=16,limits.memory=98Gi",
            "limits.cpu=9,limits.memory=10Gi",
            "limits.cpu=10,limits.memory=64Gi",
            False,
        ),
        ("pods=1", "pods=4", "pods=4", False),
        (
            "requests.nvidia.com/gpu=8",
            "requests.nvidia.com/gpu=0",
            "requests.nvidia.com/gpu=4",
            False,
        ),
    ],
)
def test_injection_is_the_cause_of_an_exceeded_quota_if_the_pod_alone_would_fit(
    requested: str, used: str, limited: str, ours: bool
) -> None:
    message = QUOTA.format(requested, used, limited)
    assert quota_messages.is_resource_rejection(message)
    assert quota_messages.caused_by_injection(TEMPLATE, message) is ours


@pytest.mark.parametrize(
    ("message", "ours"),
    [
        ("maximum memory usage per Container is 40Gi, but limit is 66Gi", True),
        ("maximum memory usage per Container is 16Gi, but limit is 32Gi", False),
        (
            "[maximum cpu usage per Container is 8, but limit is 16, "
            "maximum memory usage per Pod is 64Gi, but limit is 98Gi]",
            True,
        ),
        ("maximum memory usage per Pod is 16Gi, but limit is 98Gi", False),
        ("minimum cpu usage per Container is 2, but request is 1", True),
        ("cpu max limit to request ratio per Container is 4, but provided ratio is 8.000000", True),
        (
            "cpu max limit to request ratio per Container is 1, but provided ratio is 8.000000",
            False,
        ),
    ],
)
def test_injection_is_the_cause_of_a_limit_range_rejection_if_the_pods_own_containers_comply(
    message: str, ours: bool
) -> None:
    assert quota_messages.caused_by_injection(TEMPLATE, RANGE.format(message)) is ours


def test_another_rejection_is_not_about_resources() -> None:
    message = 'pods "x" is forbidden: error looking up service account'
    assert not quota_messages.is_resource_rejection(message)
    assert not quota_messages.caused_by_injection(TEMPLATE, message)


def node(name: str, memory: str = "64Gi", **spec: Any) -> dict[str, Any]:
    allocatable = {"cpu": "16", "memory": memory, "pods": "110", "nvidia.com/gpu": "8"}
    return {
        "metadata": {"name": name, "labels": {"zone": "a"}},
        "spec": spec,
        "status": {"allocatable": allocatable},
    }


def engine(
    name: str = "chat-1", memory: str = "32Gi", tiers: str = "40Gi", **spec: Any
) -> dict[str, Any]:
    pod = injected_pod(name)
    resources = {
        "requests": {"memory": memory, "nvidia.com/gpu": "8"},
        "limits": {"nvidia.com/gpu": "8"},
    }
    pod["spec"]["containers"][0]["resources"] = resources
    pod["spec"]["initContainers"][1]["resources"] = {"requests": {"memory": tiers, "cpu": "1"}}
    pod["spec"].update(spec)
    return pod


def test_a_pod_that_fits_only_without_tiers_has_insufficient_resources() -> None:
    message = insufficient_resources(decode_pod(engine()), [node("a")], [])
    assert message == (
        "node a has enough memory for the pod without tiers, and not enough with tiers"
    )


def test_a_full_cluster_or_one_that_waits_for_its_autoscaler_is_not_caused_by_injection() -> None:
    other = engine("other", tiers="1Gi")
    other["spec"]["nodeName"] = "a"
    assert insufficient_resources(decode_pod(engine()), [node("a")], [other]) == ""
    assert insufficient_resources(decode_pod(engine()), [], []) == ""


def test_a_pod_that_fits_with_tiers_waits_for_another_reason() -> None:
    assert (
        insufficient_resources(decode_pod(engine()), [node("small"), node("large", "256Gi")], [])
        == ""
    )


@pytest.mark.parametrize(
    ("spec", "node_spec", "expected"),
    [
        ({}, {"unschedulable": True}, False),
        ({}, {"taints": [{"key": "gpu", "effect": "NoSchedule"}]}, False),
        (
            {"tolerations": [{"key": "gpu", "operator": "Exists"}]},
            {"taints": [{"key": "gpu", "effect": "NoSchedule"}]},
            True,
        ),
        (
            {"tolerations": [{"operator": "Exists"}]},
            {"taints": [{"key": "gpu", "effect": "NoExecute"}]},
            True,
        ),
        ({}, {"taints": [{"key": "gpu", "effect": "PreferNoSchedule"}]}, True),
        ({"nodeSelector": {"zone": "a"}}, {}, True),
        ({"nodeSelector": {"zone": "b"}}, {}, False),
    ],
)
def test_nodes_that_do_not_accept_the_pod_are_ignored(
    spec: dict[str, Any], node_spec: dict[str, Any], expected: bool
) -> None:
    assert (
        bool(insufficient_resources(decode_pod(engine(**spec)), [node("a", **node_spec)], []))
        is expected
    )


def test_requests_are_counted_with_and_without_the_injected_containers() -> None:
    spec = decode_pod(engine()).spec
    with_tiers, without = pod_requests(spec), pod_requests(without_injected(spec))
    assert (without["memory"], with_tiers["memory"]) == (32 << 30, 72 << 30)
    assert "cpu" not in without
