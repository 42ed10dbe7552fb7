"""A whole look, against an API server in memory: what is written, deleted and restarted, and in which order."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from typing import Any

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
from tests.unit.controller.world import answered, condition, facts, verdict

from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.controller.pod_reconciler import PodReports, StatusResult, reconcile_pods
from kvtier_operator.controller.pods.reports import LastReport
from kvtier_operator.kube.resources import (
    DEPLOYMENTS,
    EVENTS,
    NAMESPACES,
    NODES,
    PODS,
    POLICIES,
    REPLICA_SETS,
    SECRETS,
    ApiError,
    Kind,
)
from kvtier_operator.settings import Settings

LABELLED = {"metadata": {"name": "serving", "labels": {"kvtier.io/inject": "enabled"}}}


class World:
    """A cluster in memory, a policy in it, and a clock. ``said``: what pods answered, by name."""

    def __init__(self, of: KVTierPolicy | None = None, **settings: Any) -> None:
        self.now = NOON
        self.policy = of or policy()
        self.settings = Settings.model_validate(settings)
        self.cluster = MemoryCluster([(NAMESPACES, LABELLED)])
        self.said: dict[str, LastReport] = {}
        self.calls: list[tuple[str, str]] = []
        self.restart_operator()
        self._put_policy()

    def restart_operator(self) -> None:
        self.reports = PodReports(self.settings, lambda key: None, clock=lambda: self.now)

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
        self.cluster.put(
            POLICIES,
            self.policy.model_dump(
                mode="json", by_alias=True, exclude_none=True, exclude_unset=True
            ),
        )

    def add(self, *pods: Mapping[str, Any]) -> None:
        for pod in pods:
            self.cluster.put(PODS, pod)

    def refuse(self, message: str, kind: str = "ReplicaSet", age: float = 1.0) -> None:
        about = {"apiVersion": "apps/v1", "kind": kind, "name": "chat-5d", "uid": "uid-of-chat-5d"}
        metadata = {"name": f"refused-{self.now}", "namespace": "serving"}
        event = {
            "metadata": metadata,
            "reason": "FailedCreate",
            "message": message,
            "involvedObject": about,
        }
        self.cluster.put(EVENTS, {**event, "lastTimestamp": at(self.now - age)})

    def look(self, seconds: float = 0.0, **planned: Any) -> StatusResult:
        """The next look, after so many seconds; its status is written."""
        self.now += seconds
        said = {f"uid-of-{name}": answer for name, answer in self.said.items()}
        self.reports.said = lambda uid: said.get(uid, LastReport())  # type: ignore[method-assign]
        pods = [
            pod
            for pod in self.cluster.list_now(PODS)
            if pod["metadata"]["labels"].get("app") == "chat"
        ]
        result = asyncio.run(
            reconcile_pods(
                self.policy,
                self.cluster.cached(),
                self.cluster,
                self.reports,
                lambda: self.now,
                self.settings,
                facts(pods=pods, token="t", **planned),
            )
        )
        self.policy = self.policy.model_copy(update={"status": result.status})
        return result

    def names(self, kind: Kind = PODS) -> list[str]:
        return sorted(found["metadata"]["name"] for found in self.cluster.list_now(kind))

    def events(self) -> list[tuple[str, str]]:
        """Whom they are about, and their reasons."""
        return sorted(
            (found["involvedObject"]["name"], found["reason"])
            for found in self.cluster.list_now(EVENTS)
            if found["metadata"].get("namespace") == "serving" and found["reason"] != "FailedCreate"
        )


def stuck(name: str = "chat-1", **more: Any) -> dict[str, Any]:
    waiting = {"reason": "ImagePullBackOff", "message": "not found"}
    return with_state(scheduled(injected_pod(name, **more)), "kvtier-tierd", waiting=waiting)


def owners(result: StatusResult) -> list[tuple[str, str | None, str | None]]:
    return [(each.uid, each.reason, each.until) for each in result.status.suspended_owners or ()]


def test_the_breaker_suspends_then_deletes_and_lets_the_next_pod_alone() -> None:
    world = World()
    world.add(stuck())
    first = world.look()
    assert owners(first) == [("uid-of-chat-5d", "ImageNotPulled", at(NOON + 600))]
    assert verdict(first.status, "Attached") == ("False", "ImageNotPulled")
    assert "kvtier-tierd is in ImagePullBackOff" in condition(first.status, "Attached").message
    assert world.names() == ["chat-1"]
    assert first.wake_seconds is not None
    assert first.wake_seconds <= 2.0
    second = world.look(2.1)
    assert world.names() == []
    assert owners(second) == owners(first)
    world.add(skipped(running(bare_pod("chat-2")), "Suspended", "its owner is left alone"))
    third = world.look(10)
    assert verdict(third.status, "Attached") == ("False", "ImageNotPulled")
    assert "1 more" not in condition(third.status, "Attached").message
    assert {
        ("chat", "Suspended"),
        ("chat-1", "StuckPodDeleted"),
        ("chat-1", "ImageNotPulled"),
        ("chat-2", "Skipped"),
    } <= set(world.events())


def test_a_suspension_ends_after_the_retry_time_and_the_reason_then_is_the_pods() -> None:
    world = World()
    world.add(stuck())
    world.look()
    world.look(2.1)
    world.add(skipped(running(bare_pod("chat-2")), "Suspended", "its owner is left alone"))
    assert owners(world.look(590)) != []
    over = world.look(10)
    assert owners(over) == []
    assert verdict(over.status, "Attached") == ("False", "Suspended")


def test_a_changed_policy_ends_suspensions_and_frees_what_is_stuck_at_once() -> None:
    world = World()
    world.add(stuck("chat-1"), stuck("chat-2"))
    world.look()
    world.change(attach={"retrySeconds": 60})
    result = world.look(1)
    assert owners(result) == []
    assert world.names() == []


def test_a_restart_of_the_operator_between_suspension_and_deletion_changes_nothing() -> None:
    world = World()
    world.add(stuck())
    first = world.look()
    world.restart_operator()
    second = world.look(3)
    assert owners(second) == owners(first)
    assert world.names() == []


def test_a_pod_that_started_in_the_meantime_is_not_deleted() -> None:
    class Late(MemoryCluster):
        async def delete(self, kind: Kind, namespace: str | None, name: str, **which: Any) -> None:
            if kind is PODS:
                self.put(PODS, running(injected_pod()))
            await super().delete(kind, namespace, name, **which)

    world = World()
    world.cluster = Late([(NAMESPACES, LABELLED)])
    world.add(stuck())
    world.look()
    result = world.look(3)
    assert world.names() == ["chat-1"]
    assert result.wake_seconds is not None


def test_a_deployment_of_many_is_freed_a_few_at_a_time() -> None:
    world = World()
    world.add(*(stuck(f"chat-{index:02}") for index in range(20)))
    world.look()
    world.look(3)
    assert len(world.names()) == 12
    for _ in range(2):
        world.look(1)
    assert world.names() == []


def test_a_refused_pod_suspends_its_owner() -> None:
    world = World()
    template = {"metadata": {"labels": {"app": "chat"}}, "spec": {"containers": [{"name": "vllm"}]}}
    world.cluster.put(
        REPLICA_SETS,
        {
            "metadata": {"name": "chat-5d", "namespace": "serving", "uid": "uid-of-chat-5d"},
            "spec": {"template": template},
        },
    )
    world.refuse(
        'pods "x" is forbidden: violates PodSecurity "baseline:latest": hostPath volumes (volume "kvtier-tier-nvme")'
    )
    result = world.look()
    assert owners(result) == [("uid-of-chat-5d", "Refused", at(NOON + 600))]
    assert 'volume "kvtier-tier-nvme"' in condition(result.status, "Attached").message


def test_a_refusal_by_quota_is_judged_by_the_owners_template() -> None:
    message = 'pods "x" is forbidden: exceeded quota: gold, requested: limits.memory=98Gi, used: limits.memory=0, limited: limits.memory=64Gi'
    for own, expected in (("32Gi", ["uid-of-chat-5d"]), ("96Gi", [])):
        world = World()
        containers = [{"name": "vllm", "resources": {"limits": {"memory": own}}}]
        template = {"metadata": {"labels": {"app": "chat"}}, "spec": {"containers": containers}}
        world.cluster.put(
            REPLICA_SETS,
            {
                "metadata": {"name": "chat-5d", "namespace": "serving", "uid": "uid-of-chat-5d"},
                "spec": {"template": template},
            },
        )
        world.refuse(message)
        assert [uid for uid, _, _ in owners(world.look())] == expected


def test_a_refusal_of_another_workloads_pod_or_in_a_namespace_without_the_label_is_not_ours() -> (
    None
):
    message = 'pods "x" is forbidden: violates PodSecurity "restricted:latest": (volume "kvtier-tier-nvme")'
    world = World()
    template = {"metadata": {"labels": {"app": "web"}}}
    world.cluster.put(
        REPLICA_SETS,
        {
            "metadata": {"name": "chat-5d", "namespace": "serving", "uid": "uid-of-chat-5d"},
            "spec": {"template": template},
        },
    )
    world.refuse(message)
    assert owners(world.look()) == []
    world = World()
    world.cluster.put(NAMESPACES, {"metadata": {"name": "serving"}})
    world.refuse(message, kind="Job")
    assert owners(world.look()) == []


def test_a_job_or_a_foreign_owner_is_suspended_by_what_the_message_names() -> None:
    for kind in ("Job", "InferenceGroup"):
        world = World()
        world.refuse(
            'pods "x" is forbidden: violates PodSecurity "baseline:latest": (volume "kvtier-tier-nvme")',
            kind=kind,
        )
        assert [uid for uid, _, _ in owners(world.look())] == ["uid-of-chat-5d"]


def test_an_old_refusal_does_not_suspend_again_when_the_suspension_is_over() -> None:
    world = World()
    world.refuse('pods "x" is forbidden: (volume "kvtier-tier-nvme")', kind="Job")
    assert owners(world.look()) != []
    assert owners(world.look(601)) == []
    assert owners(world.look(1)) == []


def test_a_refusal_from_before_a_change_of_the_policy_says_nothing() -> None:
    world = World()
    world.refuse('pods "x" is forbidden: (volume "kvtier-tier-nvme")', kind="Job")
    assert owners(world.look()) != []
    world.change(minLoadTokens=640)
    assert owners(world.look(5)) == []


def test_a_pod_that_is_crowded_out_is_looked_at_with_the_clusters_nodes() -> None:
    allocatable = {"cpu": "16", "memory": "16Gi", "pods": "110"}
    world = World()
    pod = injected_pod()
    pod["spec"]["containers"][0]["resources"] = {"requests": {"memory": "15Gi"}}
    world.cluster.put(NODES, {"metadata": {"name": "a"}, "status": {"allocatable": allocatable}})
    world.add(unschedulable(pod, "0/1 nodes are available: 1 Insufficient memory."))
    assert [reason for _, reason, _ in owners(world.look())] == ["Unschedulable"]
    few = World(watchNamespaces=["serving"])
    few.add(unschedulable(pod, "0/1 nodes are available: 1 Insufficient memory."))
    assert owners(few.look()) == []


def test_a_bare_pod_that_is_kept_down_is_reported_and_left() -> None:
    world = World()
    world.add(stuck(owner=""))
    world.look()
    result = world.look(10)
    assert world.names() == ["chat-1"]
    assert owners(result) == []
    assert verdict(result.status, "Attached") == ("False", "ImageNotPulled")


def test_a_pod_that_does_not_end_is_told_of_with_node_and_mount() -> None:
    world = World()
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
    world = World(of)
    world.add(terminating(running(injected_pod(volumes=volumes)), NOON + 10))
    early = world.look()
    assert verdict(early.status, "TiersHealthy")[1] != "StuckTerminating"
    assert early.wake_seconds == 70.5
    late = world.look(71)
    assert verdict(late.status, "TiersHealthy") == ("False", "StuckTerminating")
    assert "on node node-a" in condition(late.status, "TiersHealthy").message
    assert "hostPath /mnt/nvme (tier nvme)" in condition(late.status, "TiersHealthy").message
    assert ("chat-1", "StuckTerminating") in world.events()
    assert late.status.pods is not None
    assert late.status.pods.selected == 0


def workload(mark: str = "", **status: int) -> tuple[dict[str, Any], dict[str, Any]]:
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


def test_an_outdated_workload_is_restarted_by_one_annotation_and_only_once() -> None:
    world = World(policy(rollout={"strategy": "RestartWorkloads"}))
    deployment, replicas = workload()
    world.cluster.put(DEPLOYMENTS, deployment)
    world.cluster.put(REPLICA_SETS, replicas)
    world.add(running(injected_pod(structural_hash="older000")))
    world.said["chat-1"] = answered()
    result = world.look()
    assert verdict(result.status, "UpToDate") == ("False", "RollingOut")
    found = world.cluster.get_now(DEPLOYMENTS, "serving", "chat")
    assert found is not None
    assert found["spec"]["template"]["metadata"]["annotations"] == {"kvtier.io/restarted-for": HASH}
    assert ("chat", "WorkloadRestarted") in world.events()
    version = found["metadata"]["resourceVersion"]
    for _ in range(3):
        result = world.look(60)
    found = world.cluster.get_now(DEPLOYMENTS, "serving", "chat")
    assert found is not None
    assert found["metadata"]["resourceVersion"] == version
    assert verdict(result.status, "UpToDate") == ("False", "RollingOut")


def test_nothing_is_restarted_while_storage_is_not_ready_or_an_owner_is_suspended() -> None:
    from tests.unit.controller.world import FINE

    from kvtier_operator.controller.status.conditions import ConditionUpdate

    world = World(policy(rollout={"strategy": "RestartWorkloads"}))
    deployment, replicas = workload()
    world.cluster.put(DEPLOYMENTS, deployment)
    world.cluster.put(REPLICA_SETS, replicas)
    world.add(running(injected_pod(structural_hash="older000")))
    world.look(
        findings=(
            FINE[0],
            ConditionUpdate("StorageReady", "False", "Pending", "a claim is not bound"),
        )
    )
    world.look(accepted=False)
    world.add(stuck("chat-2"))
    world.look()
    found = world.cluster.get_now(DEPLOYMENTS, "serving", "chat")
    assert found is not None
    assert found["metadata"]["generation"] == 1


def test_a_settled_policy_costs_no_call_and_writes_nothing() -> None:
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

    world = World()
    counting = world.cluster = Counting()
    for index in range(50):
        world.add(running(injected_pod(f"chat-{index}")))
        world.said[f"chat-{index}"] = answered()
    first = world.look()
    counting.calls = 0
    second = world.look(30)
    assert second.status == first.status
    assert counting.calls == 0


def test_the_api_server_refusing_everything_still_gives_a_status() -> None:
    class Refusing(MemoryCluster):
        async def get(self, *args: Any, **kwargs: Any) -> Any:
            raise ApiError(403, "Forbidden", "no")

        list = create = patch = delete = get  # type: ignore[assignment]

    world = World(policy(rollout={"strategy": "RestartWorkloads"}))
    world.cluster = Refusing()
    deployment, replicas = workload()
    world.cluster.put(DEPLOYMENTS, deployment)
    world.cluster.put(REPLICA_SETS, replicas)
    world.add(
        stuck(), bare_pod("chat-2"), running(injected_pod("chat-3", structural_hash="older000"))
    )
    world.look()
    result = world.look(3)
    assert verdict(result.status, "Attached") == ("False", "ImageNotPulled")
    assert result.wake_seconds is not None


def test_looking_twice_at_the_same_state_gives_the_same_status_whatever_was_forgotten() -> None:
    world = World()
    world.add(
        running(injected_pod("chat-1")),
        stuck("chat-2"),
        skipped(bare_pod("chat-3"), "AlreadyConfigured", "x"),
    )
    world.said["chat-1"] = answered(status_document(sessions="none"))
    first = copy.deepcopy(world.look().status)
    world.restart_operator()
    assert world.look(1).status == first


def test_a_pull_secret_that_is_not_in_the_namespace_is_named() -> None:
    for there in (False, True):
        world = World(images={"pullSecret": "registry-login"})
        if there:
            world.cluster.put(
                SECRETS, {"metadata": {"name": "registry-login", "namespace": "serving"}}
            )
        world.add(stuck())
        message = condition(world.look().status, "Attached").message
        assert (
            "(the pull secret registry-login is not in namespace serving)" in message
        ) is not there
