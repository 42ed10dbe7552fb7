"""The pod reconciler with an in-memory API server: writes, deletions, restarts, their order."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from typing import Any

import pytest
from tests.support.memory_cluster import MemoryCluster
from tests.support.pods import (
    HASH,
    NOON,
    at,
    bare_pod,
    injected_pod,
    policy,
    running,
    scheduled,
    skipped,
    status_document,
    terminating,
    unschedulable,
    with_state,
)
from tests.unit.controller.builders import FINE, answered, condition, reconcile_input, verdict

from kvtier_operator.api.pods import decode_pod
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.controller.conditions import ConditionUpdate
from kvtier_operator.controller.events import EventRecorder
from kvtier_operator.controller.lookups import ClusterAccess, Lookups
from kvtier_operator.controller.pod_reconciler import PodReconciler, PodReconcileResult
from kvtier_operator.controller.pods.poll import PodPoller
from kvtier_operator.controller.pods.reports import LastReport
from kvtier_operator.kube.resources import (
    DEPLOYMENTS,
    EVENTS,
    NAMESPACES,
    NODES,
    PODS,
    POLICIES,
    REPLICA_SETS,
    ApiError,
    Kind,
)
from kvtier_operator.settings import Settings

LABELLED = {"metadata": {"name": "serving", "labels": {"kvtier.io/inject": "enabled"}}}


class FixedReports(PodPoller):
    """A poller that polls no pod: ``answers`` are the results, by name of the pod."""

    def __init__(self, settings: Settings, answers: Mapping[str, LastReport]) -> None:
        super().__init__(settings, lambda key: None)
        self._answers = answers

    def last_report(self, uid: str) -> LastReport:
        return self._answers.get(uid.removeprefix("uid-of-"), LastReport())


class Cluster:
    """An API server in memory with a policy, the pod reconciler, and a clock. ``answers``: of pods,
    by name.
    """

    def __init__(
        self, of: KVTierPolicy | None = None, api: MemoryCluster | None = None, **settings: Any
    ) -> None:
        self.now = NOON
        self.policy = of or policy()
        self.settings = Settings.model_validate(settings)
        self.api = api or MemoryCluster([(NAMESPACES, LABELLED)])
        self.answers: dict[str, LastReport] = {}
        self.restart_operator()
        self._put_policy()

    def restart_operator(self) -> None:
        def clock() -> float:
            return self.now

        lookups = Lookups(self.api, clock, self.settings.webhook.namespace_selector)
        self.reconciler = PodReconciler(
            ClusterAccess(self.api.cached(), self.api, lookups),
            self.settings,
            FixedReports(self.settings, self.answers),
            EventRecorder(self.api, clock),
            clock,
        )

    def change(self, **spec: Any) -> None:
        """Another generation of the policy."""
        document = self.policy.model_dump(
            mode="json", by_alias=True, exclude_none=True, exclude_unset=True
        )
        document["spec"].update(spec)
        document["metadata"]["generation"] += 1
        self.policy = KVTierPolicy.model_validate(document)
        self._put_policy()

    def _put_policy(self) -> None:
        self.api.put(
            POLICIES,
            self.policy.model_dump(
                mode="json", by_alias=True, exclude_none=True, exclude_unset=True
            ),
        )

    def add(self, *pods: Mapping[str, Any]) -> None:
        for pod in pods:
            self.api.put(PODS, pod)

    def reject(self, message: str, kind: str = "ReplicaSet", age: float = 1.0) -> None:
        about = {"apiVersion": "apps/v1", "kind": kind, "name": "chat-5d", "uid": "uid-of-chat-5d"}
        metadata = {"name": f"rejected-{self.now}", "namespace": "serving"}
        event = {
            "metadata": metadata,
            "reason": "FailedCreate",
            "message": message,
            "involvedObject": about,
        }
        self.api.put(EVENTS, {**event, "lastTimestamp": at(self.now - age)})

    def reconcile(self, seconds: float = 0.0, **plan: Any) -> PodReconcileResult:
        """The next reconcile, after so many seconds. Its status is written."""
        self.now += seconds
        pods = [
            decode_pod(pod)
            for pod in self.api.list_now(PODS)
            if pod["metadata"]["labels"].get("app") == "chat"
        ]
        result = asyncio.run(
            self.reconciler.reconcile(self.policy, reconcile_input(pods=pods, token="t", **plan))
        )
        self.policy = self.policy.model_copy(update={"status": result.status})
        return result

    def names(self, kind: Kind = PODS) -> list[str]:
        return sorted(found["metadata"]["name"] for found in self.api.list_now(kind))

    def events(self) -> list[tuple[str, str]]:
        """Name of the involved object and reason of each Event."""
        return sorted(
            (found["involvedObject"]["name"], found["reason"])
            for found in self.api.list_now(EVENTS)
            if found["metadata"].get("namespace") == "serving" and found["reason"] != "FailedCreate"
        )


def blocked_pod(name: str = "chat-1", **more: Any) -> dict[str, Any]:
    waiting = {"reason": "ImagePullBackOff", "message": "not found"}
    return with_state(scheduled(injected_pod(name, **more)), "kvtier-tierd", waiting=waiting)


def owners(result: PodReconcileResult) -> list[tuple[str, str | None, str | None]]:
    return [(each.uid, each.reason, each.until) for each in result.status.suspended_owners or ()]


def test_the_breaker_suspends_the_owner_then_deletes_the_blocked_pod() -> None:
    cluster = Cluster()
    cluster.add(blocked_pod())
    first = cluster.reconcile()
    assert owners(first) == [("uid-of-chat-5d", "ImageNotPulled", at(NOON + 600))]
    assert verdict(first.status, "Attached") == ("False", "ImageNotPulled")
    assert "kvtier-tierd is in ImagePullBackOff" in condition(first.status, "Attached").message
    assert cluster.names() == ["chat-1"]
    assert first.wake_seconds is not None
    assert first.wake_seconds <= 2.0
    second = cluster.reconcile(2.1)
    assert cluster.names() == []
    assert owners(second) == owners(first)
    cluster.add(skipped(running(bare_pod("chat-2")), "Suspended", "its owner is suspended"))
    third = cluster.reconcile(10)
    assert verdict(third.status, "Attached") == ("False", "ImageNotPulled")
    assert "1 more" not in condition(third.status, "Attached").message
    assert {
        ("chat", "Suspended"),
        ("chat-1", "StuckPodDeleted"),
        ("chat-1", "ImageNotPulled"),
        ("chat-2", "Skipped"),
    } <= set(cluster.events())


def test_a_suspension_ends_after_the_retry_time_and_attached_then_has_the_pods_reason() -> None:
    cluster = Cluster()
    cluster.add(blocked_pod())
    cluster.reconcile()
    cluster.reconcile(2.1)
    cluster.add(skipped(running(bare_pod("chat-2")), "Suspended", "its owner is suspended"))
    assert owners(cluster.reconcile(590)) != []
    over = cluster.reconcile(10)
    assert owners(over) == []
    assert verdict(over.status, "Attached") == ("False", "Suspended")


def test_a_changed_policy_ends_suspensions_and_deletes_blocked_pods_at_once() -> None:
    cluster = Cluster()
    cluster.add(blocked_pod("chat-1"), blocked_pod("chat-2"))
    cluster.reconcile()
    cluster.change(attach={"retrySeconds": 60})
    result = cluster.reconcile(1)
    assert owners(result) == []
    assert cluster.names() == []


def test_a_restart_of_the_operator_between_suspension_and_deletion_changes_nothing() -> None:
    cluster = Cluster()
    cluster.add(blocked_pod())
    first = cluster.reconcile()
    cluster.restart_operator()
    second = cluster.reconcile(3)
    assert owners(second) == owners(first)
    assert cluster.names() == []


def test_a_blocked_pod_that_starts_before_its_deletion_is_not_deleted() -> None:
    class Late(MemoryCluster):
        async def delete(self, kind: Kind, namespace: str | None, name: str, **which: Any) -> None:
            if kind is PODS:
                self.put(PODS, running(injected_pod()))
            await super().delete(kind, namespace, name, **which)

    cluster = Cluster(api=Late([(NAMESPACES, LABELLED)]))
    cluster.add(blocked_pod())
    cluster.reconcile()
    result = cluster.reconcile(3)
    assert cluster.names() == ["chat-1"]
    assert result.wake_seconds is not None


def test_blocked_pods_are_deleted_a_few_at_a_time() -> None:
    cluster = Cluster()
    cluster.add(*(blocked_pod(f"chat-{index:02}") for index in range(20)))
    cluster.reconcile()
    cluster.reconcile(3)
    assert len(cluster.names()) == 12
    for _ in range(2):
        cluster.reconcile(1)
    assert cluster.names() == []


def test_a_rejected_pod_suspends_its_owner() -> None:
    cluster = Cluster()
    template = {"metadata": {"labels": {"app": "chat"}}, "spec": {"containers": [{"name": "vllm"}]}}
    cluster.api.put(
        REPLICA_SETS,
        {
            "metadata": {"name": "chat-5d", "namespace": "serving", "uid": "uid-of-chat-5d"},
            "spec": {"template": template},
        },
    )
    cluster.reject(
        'pods "x" is forbidden: violates PodSecurity "baseline:latest": '
        'hostPath volumes (volume "kvtier-tier-nvme")'
    )
    result = cluster.reconcile()
    assert owners(result) == [("uid-of-chat-5d", "Refused", at(NOON + 600))]
    assert 'volume "kvtier-tier-nvme"' in condition(result.status, "Attached").message


def test_an_unexplained_rejection_is_tried_without_tiers_and_the_outcome_is_reported() -> None:
    cluster = Cluster()
    cluster.reject("images must come from registry.corp", kind="Job", age=9)
    cluster.now += 1
    cluster.reject("images must come from registry.corp", kind="Job")
    result = cluster.reconcile()
    assert [uid for uid, _, _ in owners(result)] == ["uid-of-chat-5d"]
    attached = condition(result.status, "Attached")
    assert attached.message.startswith("Injection may prevent a pod from starting: ")
    assert "images must come from registry.corp" in attached.message
    attached = condition(cluster.reconcile(120).status, "Attached")
    assert attached.message.startswith("The API server rejected pods with tiers")
    cluster.now += 20
    cluster.reject("images must come from registry.corp", kind="Job")
    result = cluster.reconcile()
    assert owners(result) == []
    attached = condition(result.status, "Attached")
    assert attached.reason == "NoPods"
    assert attached.message == (
        "The selector matches no running pod. The API server rejects pods of Job chat-5d without "
        "tiers too: images must come from registry.corp."
    )
    assert ("chat", "Resumed") in cluster.events()


def test_a_rejection_by_quota_is_traced_with_the_owners_pod_template() -> None:
    message = (
        'pods "x" is forbidden: exceeded quota: gold, requested: limits.memory=98Gi, '
        "used: limits.memory=0, limited: limits.memory=64Gi"
    )
    for own, expected in (("32Gi", ["uid-of-chat-5d"]), ("96Gi", [])):
        cluster = Cluster()
        containers = [{"name": "vllm", "resources": {"limits": {"memory": own}}}]
        template = {"metadata": {"labels": {"app": "chat"}}, "spec": {"containers": containers}}
        cluster.api.put(
            REPLICA_SETS,
            {
                "metadata": {"name": "chat-5d", "namespace": "serving", "uid": "uid-of-chat-5d"},
                "spec": {"template": template},
            },
        )
        cluster.reject(message)
        assert [uid for uid, _, _ in owners(cluster.reconcile())] == expected


def test_a_rejection_of_a_pod_that_is_not_selected_or_not_injected_is_ignored() -> None:
    message = (
        'pods "x" is forbidden: violates PodSecurity "restricted:latest": '
        '(volume "kvtier-tier-nvme")'
    )
    cluster = Cluster()
    template = {"metadata": {"labels": {"app": "web"}}}
    cluster.api.put(
        REPLICA_SETS,
        {
            "metadata": {"name": "chat-5d", "namespace": "serving", "uid": "uid-of-chat-5d"},
            "spec": {"template": template},
        },
    )
    cluster.reject(message)
    assert owners(cluster.reconcile()) == []
    cluster = Cluster()
    cluster.api.put(NAMESPACES, {"metadata": {"name": "serving"}})
    cluster.reject(message, kind="Job")
    assert owners(cluster.reconcile()) == []


def test_a_job_or_a_custom_owner_is_suspended_if_the_message_names_an_injected_part() -> None:
    for kind in ("Job", "InferenceGroup"):
        cluster = Cluster()
        cluster.reject(
            'pods "x" is forbidden: violates PodSecurity "baseline:latest": '
            '(volume "kvtier-tier-nvme")',
            kind=kind,
        )
        assert [uid for uid, _, _ in owners(cluster.reconcile())] == ["uid-of-chat-5d"]


def test_an_old_rejection_does_not_suspend_again_after_the_suspension() -> None:
    cluster = Cluster()
    cluster.reject('pods "x" is forbidden: (volume "kvtier-tier-nvme")', kind="Job")
    assert owners(cluster.reconcile()) != []
    assert owners(cluster.reconcile(601)) == []
    assert owners(cluster.reconcile(1)) == []


def test_a_rejection_that_predates_a_policy_change_is_ignored() -> None:
    cluster = Cluster()
    cluster.reject('pods "x" is forbidden: (volume "kvtier-tier-nvme")', kind="Job")
    assert owners(cluster.reconcile()) != []
    cluster.change(minLoadTokens=640)
    assert owners(cluster.reconcile(5)) == []


def test_insufficient_resources_are_detected_with_the_nodes_of_the_whole_cluster() -> None:
    allocatable = {"cpu": "16", "memory": "16Gi", "pods": "110"}
    cluster = Cluster()
    pod = injected_pod()
    pod["spec"]["containers"][0]["resources"] = {"requests": {"memory": "15Gi"}}
    cluster.api.put(NODES, {"metadata": {"name": "a"}, "status": {"allocatable": allocatable}})
    cluster.add(unschedulable(pod, "0/1 nodes are available: 1 Insufficient memory."))
    assert [reason for _, reason, _ in owners(cluster.reconcile())] == ["Unschedulable"]
    few = Cluster(watchNamespaces=["serving"])
    few.add(unschedulable(pod, "0/1 nodes are available: 1 Insufficient memory."))
    assert owners(few.reconcile()) == []


def test_a_blocked_pod_without_owner_is_reported_and_not_deleted() -> None:
    cluster = Cluster()
    cluster.add(blocked_pod(owner=""))
    cluster.reconcile()
    result = cluster.reconcile(10)
    assert cluster.names() == ["chat-1"]
    assert owners(result) == []
    assert verdict(result.status, "Attached") == ("False", "ImageNotPulled")


def test_an_overdue_pod_is_reported_with_node_and_mount() -> None:
    cluster = Cluster()
    volumes = [{"name": "kvtier-tier-nvme", "hostPath": {"path": "/mnt/nvme"}}]
    of = policy(
        {
            "name": "nvme",
            "fileSystem": {
                "capacity": "1Gi",
                "sharing": "Node",
                "volume": {"hostPath": {"path": "/mnt/nvme"}},
            },
        }
    )
    cluster = Cluster(of)
    cluster.add(terminating(running(injected_pod(volumes=volumes)), NOON + 10))
    early = cluster.reconcile()
    assert verdict(early.status, "TiersHealthy")[1] != "StuckTerminating"
    assert early.wake_seconds == 70.5
    late = cluster.reconcile(71)
    assert verdict(late.status, "TiersHealthy") == ("False", "StuckTerminating")
    assert "on node node-a" in condition(late.status, "TiersHealthy").message
    assert "hostPath /mnt/nvme (tier nvme)" in condition(late.status, "TiersHealthy").message
    assert ("chat-1", "StuckTerminating") in cluster.events()
    assert late.status.pods is not None
    assert late.status.pods.selected == 0


def deployment_of_chat(mark: str = "", **status: int) -> tuple[dict[str, Any], dict[str, Any]]:
    template = {
        "metadata": {
            "labels": {"app": "chat"},
            "annotations": {"kvtier.io/restarted-for": mark} if mark else {},
        }
    }
    done = {
        "observedGeneration": 1,
        "replicas": 1,
        "updatedReplicas": 1,
        "availableReplicas": 1,
        **status,
    }
    deployment = {
        "metadata": {"name": "chat", "namespace": "serving", "uid": "uid-of-chat"},
        "spec": {"replicas": 1, "template": template},
        "status": done,
    }
    owner = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": "chat",
        "uid": "uid-of-chat",
        "controller": True,
    }
    replicas = {
        "metadata": {
            "name": "chat-5d",
            "namespace": "serving",
            "uid": "uid-of-chat-5d",
            "ownerReferences": [owner],
        }
    }
    return deployment, replicas


def test_an_outdated_workload_is_restarted_once() -> None:
    cluster = Cluster(policy(rollout={"strategy": "RestartWorkloads"}), rollout={"enabled": True})
    deployment, replicas = deployment_of_chat()
    cluster.api.put(DEPLOYMENTS, deployment)
    cluster.api.put(REPLICA_SETS, replicas)
    cluster.add(running(injected_pod(structural_hash="older000")))
    cluster.answers["chat-1"] = answered()
    result = cluster.reconcile()
    assert verdict(result.status, "UpToDate") == ("False", "RollingOut")
    found = cluster.api.get_now(DEPLOYMENTS, "serving", "chat")
    assert found is not None
    assert found["spec"]["template"]["metadata"]["annotations"] == {"kvtier.io/restarted-for": HASH}
    assert ("chat", "WorkloadRestarted") in cluster.events()
    version = found["metadata"]["resourceVersion"]
    for _ in range(3):
        result = cluster.reconcile(60)
    found = cluster.api.get_now(DEPLOYMENTS, "serving", "chat")
    assert found is not None
    assert found["metadata"]["resourceVersion"] == version
    assert verdict(result.status, "UpToDate") == ("False", "RollingOut")


def test_no_workload_is_restarted_without_the_administrators_consent() -> None:
    cluster = Cluster(policy(rollout={"strategy": "RestartWorkloads"}))
    deployment, replicas = deployment_of_chat()
    cluster.api.put(DEPLOYMENTS, deployment)
    cluster.api.put(REPLICA_SETS, replicas)
    cluster.add(running(injected_pod(structural_hash="older000")))
    cluster.answers["chat-1"] = answered()
    result = cluster.reconcile()
    assert verdict(result.status, "UpToDate") == ("False", "Outdated")
    message = next(
        each.message for each in result.status.conditions or () if each.type == "UpToDate"
    )
    assert "Restarts are paused: rollout.enabled is false" in message
    found = cluster.api.get_now(DEPLOYMENTS, "serving", "chat")
    assert found is not None
    assert not found["spec"]["template"]["metadata"]["annotations"]


def test_restarts_are_paused_while_storage_is_not_ready_or_injection_blocks_pods() -> None:
    cluster = Cluster(policy(rollout={"strategy": "RestartWorkloads"}), rollout={"enabled": True})
    deployment, replicas = deployment_of_chat()
    cluster.api.put(DEPLOYMENTS, deployment)
    cluster.api.put(REPLICA_SETS, replicas)
    cluster.add(running(injected_pod(structural_hash="older000")))
    cluster.reconcile(
        conditions=(
            FINE[0],
            ConditionUpdate("StorageReady", "False", "Pending", "a claim is not bound"),
        )
    )
    cluster.reconcile(accepted=False)
    cluster.add(blocked_pod("chat-2"))
    cluster.reconcile()
    found = cluster.api.get_now(DEPLOYMENTS, "serving", "chat")
    assert found is not None
    assert found["metadata"]["generation"] == 1


def test_a_reconcile_without_changes_makes_no_call() -> None:
    class Counting(MemoryCluster):
        calls = 0

        async def get(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return await super().get(*args, **kwargs)

        async def list(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return await super().list(*args, **kwargs)

        async def create(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return await super().create(*args, **kwargs)

    counting = Counting()
    cluster = Cluster(api=counting)
    for index in range(50):
        cluster.add(running(injected_pod(f"chat-{index}")))
        cluster.answers[f"chat-{index}"] = answered()
    first = cluster.reconcile()
    counting.calls = 0
    second = cluster.reconcile(30)
    assert second.status == first.status
    assert counting.calls == 0


def test_a_status_is_computed_even_if_the_api_server_rejects_every_call() -> None:
    class Rejecting(MemoryCluster):
        async def get(self, *args: Any, **kwargs: Any) -> Any:
            raise ApiError(403, "Forbidden", "no")

        list = create = patch = delete = get  # type: ignore[assignment]

    cluster = Cluster(
        policy(rollout={"strategy": "RestartWorkloads"}), Rejecting(), rollout={"enabled": True}
    )
    deployment, replicas = deployment_of_chat()
    cluster.api.put(DEPLOYMENTS, deployment)
    cluster.api.put(REPLICA_SETS, replicas)
    cluster.add(
        blocked_pod(),
        bare_pod("chat-2"),
        running(injected_pod("chat-3", structural_hash="older000")),
    )
    cluster.reconcile()
    result = cluster.reconcile(3)
    assert verdict(result.status, "Attached") == ("False", "ImageNotPulled")
    assert result.wake_seconds is not None


def test_a_restarted_operator_computes_the_same_status() -> None:
    cluster = Cluster()
    cluster.add(
        running(injected_pod("chat-1")),
        blocked_pod("chat-2"),
        skipped(bare_pod("chat-3"), "AlreadyConfigured", "x"),
    )
    cluster.answers["chat-1"] = answered(status_document(sessions="none"))
    first = copy.deepcopy(cluster.reconcile().status)
    cluster.restart_operator()
    assert cluster.reconcile(1).status == first


@pytest.mark.parametrize(
    ("named", "expected"), [("registry-login", True), ("other, registry-login", True), ("o", False)]
)
def test_a_missing_pull_secret_is_reported(named: str, expected: bool) -> None:
    """The operator may not read Secrets; the kubelet's Event names those that it did not find."""
    cluster = Cluster(images={"pullSecret": "registry-login"})
    cluster.add(blocked_pod())
    cluster.api.put(
        EVENTS,
        {
            "metadata": {"name": "e", "namespace": "serving"},
            "reason": "FailedToRetrieveImagePullSecret",
            "message": f"Unable to retrieve some image pull secrets ({named}); attempting to pull "
            "the image may not succeed.",
            "involvedObject": {"kind": "Pod", "uid": blocked_pod()["metadata"]["uid"]},
        },
    )
    message = condition(cluster.reconcile().status, "Attached").message
    assert ("(namespace serving has no pull secret registry-login)" in message) is expected
