"""Effective requests and limits of a pod, and its QoS class, as Kubernetes computes them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from tests.support import pod_objects
from tests.support.pod_objects import GUARANTEED

from kvtier_operator.api.pods import PodSpec, decode
from kvtier_operator.injection.resources import format_amount, pod_limits, pod_requests

GIB = 1 << 30


def spec(*containers: dict[str, Any], **fields: Any) -> PodSpec:
    return decode({"containers": list(containers) or [{"name": "a"}], **fields}, PodSpec)


def container(requests: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    limits = fields.pop("limits", {})
    return {"name": "x", "resources": {"requests": requests or {}, "limits": limits}, **fields}


def sidecar(requests: dict[str, Any]) -> dict[str, Any]:
    return container(requests, restartPolicy="Always")


def test_containers_and_sidecars_are_added() -> None:
    found = spec(
        container({"cpu": "3"}),
        container({"cpu": "500m"}),
        initContainers=[sidecar({"cpu": "2"}), sidecar({"cpu": "1"})],
    )
    assert pod_requests(found) == {"cpu": Fraction(13, 2)}
    assert pod_limits(found) == {}


def test_the_most_demanding_init_container_counts_with_the_sidecars_before_it() -> None:
    found = spec(
        container({"cpu": "3"}),
        initContainers=[sidecar({"cpu": "2"}), container({"cpu": "7"}), sidecar({"cpu": "1"})],
    )
    assert pod_requests(found)["cpu"] == 9


def test_a_request_of_a_container_defaults_to_its_limit() -> None:
    found = spec(container({"cpu": "1"}, limits={"cpu": "2", "memory": "3Gi"}), container())
    assert pod_requests(found) == {"cpu": 1, "memory": 3 * GIB}
    assert pod_limits(found) == {"cpu": 2, "memory": 3 * GIB}


@pytest.mark.parametrize(
    ("containers", "resources", "requests", "limits"),
    [
        # Requests default to the limits.
        ([], {"limits": {"memory": "8Gi"}}, 8 * GIB, 8 * GIB),
        # A resource that containers request defaults to their sum.
        ([container({"memory": "2Gi"})] * 2, {"limits": {"memory": "8Gi"}}, 4 * GIB, 8 * GIB),
        ([container({"memory": "2Gi"})], {"requests": {"memory": "5Gi"}}, 5 * GIB, None),
        (
            [container({"memory": "2Gi"}, limits={"memory": "3Gi"})],
            {"requests": {"memory": "5Gi"}, "limits": {"memory": "8Gi"}},
            5 * GIB,
            8 * GIB,
        ),
    ],
)
def test_pod_level_resources_replace_the_sum_over_containers(
    containers: list[dict[str, Any]],
    resources: dict[str, Any],
    requests: int,
    limits: int | None,
) -> None:
    found = spec(*containers, resources=resources)
    assert pod_requests(found).get("memory") == requests
    assert pod_limits(found).get("memory") == limits


def test_overhead_is_added_to_requests_and_to_limits_that_are_set() -> None:
    overhead = {"cpu": "250m", "memory": "1Gi"}
    without_limits = spec(container({"cpu": "1"}), overhead=overhead)
    assert pod_requests(without_limits) == {"cpu": Fraction(5, 4), "memory": GIB}
    assert pod_limits(without_limits) == {}
    limited = spec(container(limits={"cpu": "1"}), overhead=overhead)
    assert pod_limits(limited) == {"cpu": Fraction(5, 4)}
    assert pod_requests(limited, overhead=False) == {"cpu": 1}
    pod_level = spec(resources={"limits": {"memory": "8Gi"}}, overhead=overhead)
    assert pod_requests(pod_level) == {"cpu": Fraction(1, 4), "memory": 9 * GIB}
    assert pod_limits(pod_level) == {"memory": 9 * GIB}


def test_an_invalid_quantity_counts_as_zero() -> None:
    assert pod_requests(spec(container({"cpu": "x", "memory": 5}))) == {"cpu": 0, "memory": 5}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"containers": [{"name": "a"}]}, "BestEffort"),
        ({"containers": [{"name": "a", "resources": GUARANTEED}]}, "Guaranteed"),
        (
            {"containers": [{"name": "a", "resources": {"limits": GUARANTEED["limits"]}}]},
            "Guaranteed",
        ),
        ({"containers": [{"name": "a", "resources": GUARANTEED}, {"name": "b"}]}, "Burstable"),
        (
            {
                "containers": [{"name": "a", "resources": GUARANTEED}],
                "initContainers": [{"name": "b"}],
            },
            "Burstable",
        ),
        ({"containers": [{"name": "a", "resources": {"limits": {"memory": "1Gi"}}}]}, "Burstable"),
        ({"containers": [{"name": "a"}], "resources": GUARANTEED}, "Guaranteed"),
        (
            {
                "containers": [{"name": "a", "resources": {"requests": {"memory": "1Gi"}}}],
                "resources": {"limits": GUARANTEED["limits"]},
            },
            "Burstable",
        ),
        (
            {"containers": [{"name": "a", "resources": {"limits": {"nvidia.com/gpu": 1}}}]},
            "BestEffort",
        ),
    ],
)
def test_the_qos_class_of_a_pod(spec: dict[str, Any], expected: str) -> None:
    assert pod_objects.qos_class(spec) == expected


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("memory", Fraction(GIB * 7, 4), "1.75Gi"),
        ("memory", Fraction(1000), "1000"),
        ("ephemeral-storage", Fraction(1 << 40), "1Ti"),
        ("cpu", Fraction(4), "4"),
        ("cpu", Fraction(1, 4), "250m"),
    ],
)
def test_amounts_in_messages(name: str, value: Fraction, expected: str) -> None:
    assert format_amount(name, value) == expected
