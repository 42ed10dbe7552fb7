"""Violations that the API server would reject are found before injection and reported with the
numbers. A test with a real API server compares the results:
``tests/cluster/test_attached_pods.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.support import pod_objects
from tests.support.pod_objects import GUARANTEED, container, engine, file_tier, memory_tier

from kvtier_operator.api.conditions import SkipReason
from kvtier_operator.api.names import TIERD_CONTAINER
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.injection.decision import Injected, Skipped
from kvtier_operator.injection.inject import inject
from kvtier_operator.settings import Settings

# With a memory tier of 1Gi tierd has 1792Mi and cpu 1 to 8; the payload has 128Mi and cpu 100m to
# 1.


def limit_range(kind: str, **item: Any) -> dict[str, Any]:
    return {"metadata": {"name": "bounds"}, "spec": {"limits": [{"type": kind, **item}]}}


def quota(hard: dict[str, str], used: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "share"},
        "spec": {"hard": hard, **spec},
        "status": {"hard": hard, "used": used or {}},
    }


def decide(
    pod: dict[str, Any], policy: KVTierPolicy | None = None, **around: Any
) -> Injected | Skipped:
    return inject(policy or pod_objects.policy(), pod, pod_objects.context(**around), Settings())


@pytest.mark.parametrize(
    ("bounds", "numbers"),
    [
        (limit_range("Container", max={"memory": "1791Mi"}), ("1.75Gi", "kvtier-tierd")),
        (limit_range("Container", max={"cpu": "4"}), ("8 cpu", "4")),
        (limit_range("Container", min={"memory": "256Mi"}), ("128Mi", "kvtier-payload")),
        (limit_range("Container", min={"cpu": "200m"}), ("100m", "kvtier-payload")),
        (limit_range("Container", maxLimitRequestRatio={"cpu": "5"}), ("5 times",)),
        (limit_range("Container", max={"ephemeral-storage": "1Gi"}), ("ephemeral-storage",)),
        (limit_range("Pod", max={"memory": "9Gi"}), ("9.75Gi", "9Gi", "per pod")),
        (limit_range("Pod", max={"cpu": "11"}), ("12 cpu", "11")),
    ],
)
def test_a_pod_outside_a_limit_range_is_skipped(
    bounds: dict[str, Any], numbers: tuple[str, ...]
) -> None:
    pod = pod_objects.pod(
        engine(
            resources={
                "requests": {"cpu": "1", "memory": "8Gi"},
                "limits": {"cpu": "4", "memory": "8Gi"},
            }
        )
    )
    decision = decide(pod, limit_ranges=[bounds])
    assert isinstance(decision, Skipped)
    assert decision.reason is SkipReason.WOULD_BE_REFUSED
    assert all(number in decision.message for number in numbers), decision.message


@pytest.mark.parametrize(
    "bounds",
    [
        limit_range(
            "Container", max={"memory": "8Gi", "cpu": "8"}, min={"memory": "128Mi", "cpu": "100m"}
        ),
        limit_range(
            "Container", default={"ephemeral-storage": "1Gi"}, max={"ephemeral-storage": "1Gi"}
        ),
        limit_range("Container", maxLimitRequestRatio={"memory": "1", "cpu": "10"}),
        limit_range("Pod", max={"memory": "9984Mi", "cpu": "12"}),
        limit_range("PersistentVolumeClaim", max={"storage": "1"}),
    ],
)
def test_a_pod_within_limit_ranges_is_injected(bounds: dict[str, Any]) -> None:
    pod = pod_objects.pod(
        engine(
            resources={
                "requests": {"cpu": "1", "memory": "8Gi"},
                "limits": {"cpu": "4", "memory": "8Gi"},
            }
        )
    )
    assert isinstance(decide(pod, limit_ranges=[bounds]), Injected)


@pytest.mark.parametrize(
    ("hard", "used", "refused"),
    [
        ({"limits.memory": "10Gi"}, {"limits.memory": "1Gi"}, True),
        ({"limits.memory": "10Gi"}, {"limits.memory": "256Mi"}, False),
        ({"requests.cpu": "5"}, {"requests.cpu": "1"}, True),
        ({"cpu": "8"}, {}, False),
        ({"memory": "9Gi"}, {}, True),
        ({"limits.cpu": "8"}, {"limits.cpu": "1"}, True),
        ({"pods": "3"}, {"pods": "3"}, True),
        ({"count/pods": "3"}, {"count/pods": "2"}, False),
        ({"requests.nvidia.com/gpu": "1"}, {"requests.nvidia.com/gpu": "1"}, False),
        ({"services": "0"}, {}, False),
    ],
)
def test_a_pod_that_exceeds_a_quota_is_skipped(
    hard: dict[str, str], used: dict[str, str], refused: bool
) -> None:
    pod = pod_objects.pod(engine(resources=GUARANTEED))
    decision = decide(pod, quotas=[quota(hard, used)])
    assert isinstance(decision, Skipped) == refused, decision
    if isinstance(decision, Skipped):
        assert "ResourceQuota share" in decision.message


@pytest.mark.parametrize(
    ("scope", "spec", "refused"),
    [
        ({"scopes": ["BestEffort"]}, {}, False),
        ({"scopes": ["NotBestEffort"]}, {}, True),
        ({"scopes": ["Terminating"]}, {}, False),
        ({"scopes": ["Terminating"]}, {"activeDeadlineSeconds": 60}, True),
        ({"scopes": ["NotTerminating"]}, {}, True),
        (
            {
                "scopeSelector": {
                    "matchExpressions": [
                        {"scopeName": "PriorityClass", "operator": "In", "values": ["high"]}
                    ]
                }
            },
            {"priorityClassName": "high"},
            True,
        ),
        (
            {
                "scopeSelector": {
                    "matchExpressions": [
                        {"scopeName": "PriorityClass", "operator": "In", "values": ["high"]}
                    ]
                }
            },
            {"priorityClassName": "low"},
            False,
        ),
        ({"scopes": ["CrossNamespacePodAffinity"]}, {}, False),
    ],
)
def test_a_quota_applies_to_pods_in_its_scope(
    scope: dict[str, Any], spec: dict[str, Any], refused: bool
) -> None:
    # Without tiers the pod is BestEffort; with them it is not, and the other quota counts.
    decision = decide(
        pod_objects.pod(**spec), quotas=[quota({"pods": "1"}, {"pods": "1"}, **scope)]
    )
    assert isinstance(decision, Skipped) == refused


class TestPodLevelResources:
    def test_a_pod_with_headroom_is_injected_with_a_note(self) -> None:
        resources = {
            "requests": {"cpu": "6", "memory": "12Gi"},
            "limits": {"cpu": "6", "memory": "12Gi"},
        }
        pod = pod_objects.pod(
            engine(resources={"requests": {"cpu": "4", "memory": "8Gi"}}), resources=resources
        )
        decision = decide(pod)
        assert isinstance(decision, Injected)
        assert container(decision.pod, TIERD_CONTAINER)["resources"]["limits"]["cpu"] == "6"
        assert any("12Gi" in note for note in decision.notes)
        assert pod_objects.qos_class(decision.pod["spec"]) == "Guaranteed"

    @pytest.mark.parametrize(
        ("resources", "own"),
        [
            ({"requests": {"memory": "9Gi"}}, {"requests": {"memory": "8Gi"}}),
            ({"limits": {"memory": "9Gi"}}, {"requests": {"memory": "8Gi"}}),
            ({"requests": {"cpu": "4"}}, {"requests": {"cpu": "4"}}),
            ({"limits": {"memory": "1Gi"}}, {}),
        ],
    )
    def test_a_pod_without_headroom_is_skipped(
        self, resources: dict[str, Any], own: dict[str, Any]
    ) -> None:
        decision = decide(pod_objects.pod(engine(resources=own), resources=resources))
        assert isinstance(decision, Skipped)
        assert decision.reason is SkipReason.WOULD_BE_REFUSED
        assert "spec.resources" in decision.message


class TestPodSecurity:
    HOST = file_tier("nvme", {"hostPath": {"path": "/mnt/kv"}})

    @pytest.mark.parametrize("level", ["baseline", "restricted"])
    def test_a_host_path_is_skipped_and_a_claim_is_injected(self, level: str) -> None:
        labels = {"pod-security.kubernetes.io/enforce": level}
        decision = decide(
            pod_objects.pod(), pod_objects.policy(memory_tier(), self.HOST), namespace_labels=labels
        )
        assert isinstance(decision, Skipped)
        assert level in decision.message
        claim = file_tier("kv", {"persistentVolumeClaim": {"claimName": "kv"}})
        assert isinstance(
            decide(
                pod_objects.pod(), pod_objects.policy(memory_tier(), claim), namespace_labels=labels
            ),
            Injected,
        )

    @pytest.mark.parametrize("labels", [{}, {"pod-security.kubernetes.io/enforce": "privileged"}])
    def test_a_host_path_is_injected_without_an_enforced_level(
        self, labels: dict[str, str]
    ) -> None:
        assert isinstance(
            decide(
                pod_objects.pod(),
                pod_objects.policy(memory_tier(), self.HOST),
                namespace_labels=labels,
            ),
            Injected,
        )


def test_tierd_has_whole_cpus_in_a_guaranteed_pod() -> None:
    pod = pod_objects.pod(engine(resources=GUARANTEED))
    for resources, cpu in (
        ({}, "4"),
        ({"daemon": {"requests": {"cpu": "2500m"}}}, "3"),
        ({"daemon": {"limits": {"cpu": "16"}}}, "4"),
    ):
        decision = decide(pod, pod_objects.policy(resources=resources))
        assert isinstance(decision, Injected)
        found = container(decision.pod, TIERD_CONTAINER)["resources"]
        assert found["requests"] == found["limits"]
        assert found["limits"]["cpu"] == cpu
        assert pod_objects.qos_class(decision.pod["spec"]) == "Guaranteed"
