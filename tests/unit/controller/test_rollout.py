"""``rollout.strategy: RestartWorkloads``: one workload at a time, never twice for the same
structure.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.pods import HASH, bare_pod, injected_pod, policy, running, status_document
from tests.unit.controller.builders import view_of

from kvtier_operator.controller.pods.pod_view import PodView
from kvtier_operator.controller.rollout import (
    Rollout,
    Workload,
    outdated,
    plan_rollout,
    restart_patch,
)
from kvtier_operator.kube.resources import (
    DEPLOYMENTS,
    LEADER_WORKER_SETS,
    REPLICA_SETS,
    STATEFUL_SETS,
    Kind,
    Object,
)
from kvtier_operator.render.documents import content_hash

RESTARTING = policy(rollout={"strategy": "RestartWorkloads"})
MARK = "kvtier.io/restarted-for"


class Workloads:
    """Workloads of a namespace, by kind and name."""

    def __init__(self) -> None:
        self.objects: dict[tuple[Kind, str], dict[str, Any]] = {}

    def get(self, kind: Kind, name: str) -> Object | None:
        return self.objects.get((kind, name))

    def add(
        self,
        kind: Kind,
        name: str,
        owner: tuple[str, str] | None = None,
        mark: str = "",
        **more: Any,
    ) -> None:
        references = (
            [
                {
                    "apiVersion": "v1",
                    "kind": owner[0],
                    "name": owner[1],
                    "uid": f"uid-of-{owner[1]}",
                    "controller": True,
                }
            ]
            if owner
            else []
        )
        template = {"metadata": {"annotations": {MARK: mark}} if mark else {}}
        spec = {
            "replicas": 1,
            **(
                {"leaderWorkerTemplate": {"workerTemplate": template}}
                if kind is LEADER_WORKER_SETS
                else {"template": template}
            ),
        }
        status = {
            "observedGeneration": 1,
            "replicas": 1,
            "updatedReplicas": 1,
            "availableReplicas": 1,
            "readyReplicas": 1,
        }
        self.objects[kind, name] = {
            "metadata": {
                "name": name,
                "uid": f"uid-of-{name}",
                "generation": 1,
                "ownerReferences": references,
            },
            "spec": {**spec, **more.pop("spec", {})},
            "status": {**status, **more.pop("status", {})},
        }

    def deployment(self, name: str, **more: Any) -> None:
        self.add(DEPLOYMENTS, name, **more)
        self.add(REPLICA_SETS, f"{name}-5d", ("Deployment", name))


def pod(name: str, owner: str, structural_hash: str = "older000", **labels: str) -> PodView:
    found = injected_pod(name, owner=owner, structural_hash=structural_hash, **labels)
    return view_of(running(found), status_document())


def decide(workloads: Workloads, *pods: PodView, paused: str = "", of: Any = RESTARTING) -> Rollout:
    return plan_rollout(of, pods, HASH, workloads.get, paused)


def chosen(found: Rollout) -> str:
    return str(found.restart) if found.restart is not None else ""


def test_without_the_strategy_nothing_is_restarted() -> None:
    workloads = Workloads()
    workloads.deployment("chat")
    assert decide(workloads, pod("a", "ReplicaSet chat-5d"), of=policy()) == Rollout()


def test_a_deployment_with_outdated_pods_is_restarted() -> None:
    workloads = Workloads()
    workloads.deployment("chat")
    assert chosen(decide(workloads, pod("a", "ReplicaSet chat-5d"))) == "Deployment chat"
    assert chosen(decide(workloads, pod("a", "ReplicaSet chat-5d", HASH))) == ""


def test_pods_without_tiers_are_not_outdated() -> None:
    workloads = Workloads()
    workloads.deployment("chat")
    assert decide(workloads, view_of(bare_pod(owner="ReplicaSet chat-5d"))) == Rollout()


def test_workloads_restart_one_at_a_time_in_the_order_of_their_names() -> None:
    workloads = Workloads()
    pods = [pod(name, f"ReplicaSet {name}-5d") for name in ("b", "a", "c")]
    for name in ("a", "b", "c"):
        workloads.deployment(name)
    first = decide(workloads, *pods)
    assert (chosen(first), first.waiting) == ("Deployment a", 3)
    workloads.deployment("a", mark=HASH, status={"updatedReplicas": 0})
    second = decide(workloads, *pods)
    assert (chosen(second), second.in_progress, second.waiting) == (
        "",
        "Deployment a: 0 of 1 replicas are updated",
        2,
    )
    workloads.deployment("a", mark=HASH)
    third = decide(workloads, pods[0], pods[2], pod("a2", "ReplicaSet a-5d", HASH))
    assert chosen(third) == "Deployment b"


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"status": {"observedGeneration": 0}}, "its controller has not started the update"),
        ({"status": {"updatedReplicas": 0}}, "0 of 1 replicas are updated"),
        ({"status": {"availableReplicas": 0}}, "0 of 1 replicas are available"),
        ({"status": {"replicas": 2}}, "old pods still exist"),
    ],
)
def test_the_next_workload_waits_until_the_last_is_available(
    changes: dict[str, Any], missing: str
) -> None:
    workloads = Workloads()
    workloads.deployment("a", mark=HASH, **changes)
    workloads.deployment("b")
    found = decide(workloads, pod("a", "ReplicaSet a-5d", HASH), pod("b", "ReplicaSet b-5d"))
    assert (chosen(found), found.in_progress) == ("", f"Deployment a: {missing}")


def test_a_workload_is_not_restarted_twice_for_the_same_structure() -> None:
    workloads = Workloads()
    workloads.deployment("chat", mark=HASH)
    found = decide(workloads, pod("a", "ReplicaSet chat-5d"))
    assert (chosen(found), found.ineffective) == ("", ("Deployment chat",))


def test_a_workload_is_restarted_again_for_another_structure() -> None:
    workloads = Workloads()
    workloads.deployment("chat", mark="of last week")
    assert chosen(decide(workloads, pod("a", "ReplicaSet chat-5d"))) == "Deployment chat"


def test_nothing_is_restarted_while_new_pods_would_get_no_tiers() -> None:
    workloads = Workloads()
    workloads.deployment("chat")
    assert (
        chosen(decide(workloads, pod("a", "ReplicaSet chat-5d"), paused="StorageReady is False"))
        == ""
    )


def test_a_stateful_set_and_a_leader_worker_set_are_restarted() -> None:
    workloads = Workloads()
    workloads.add(STATEFUL_SETS, "chat")
    assert chosen(decide(workloads, pod("chat-0", "StatefulSet chat"))) == "StatefulSet chat"
    workloads = Workloads()
    workloads.add(LEADER_WORKER_SETS, "chat")
    workloads.add(STATEFUL_SETS, "chat-0", ("LeaderWorkerSet", "chat"))
    label = {"leaderworkerset.sigs.k8s.io/name": "chat"}
    assert (
        chosen(decide(workloads, pod("chat-0-1", "StatefulSet chat-0", **label)))
        == "LeaderWorkerSet chat"
    )


@pytest.mark.parametrize(
    ("owner", "reason"),
    [
        ("Job chat", "KVTier does not restart a Job"),
        ("InferenceGroup chat", "KVTier does not restart a InferenceGroup"),
        ("ReplicaSet alone", "a ReplicaSet without a Deployment does not replace its pods"),
        ("", "it has no owner that would replace it"),
        ("StatefulSet gone", "it no longer exists"),
        (
            "ReplicaSet served-5d",
            "InferenceService served manages its template",
        ),
        ("ReplicaSet paused-5d", "it is paused"),
        ("StatefulSet by-hand", "its update strategy is OnDelete"),
        ("StatefulSet canary", "its update strategy has a partition"),
    ],
)
def test_an_owner_that_cannot_be_restarted_gives_the_reason(owner: str, reason: str) -> None:
    workloads = Workloads()
    workloads.add(REPLICA_SETS, "alone")
    workloads.deployment("served", owner=("InferenceService", "served"))
    workloads.deployment("paused", spec={"paused": True})
    workloads.add(STATEFUL_SETS, "by-hand", spec={"updateStrategy": {"type": "OnDelete"}})
    workloads.add(
        STATEFUL_SETS, "canary", spec={"updateStrategy": {"rollingUpdate": {"partition": 1}}}
    )
    found = decide(workloads, pod("chat-x", owner))
    assert [each.reason for each in found.unsupported] == [reason]
    assert chosen(found) == ""


def test_an_owner_that_cannot_be_restarted_does_not_block_the_others() -> None:
    workloads = Workloads()
    workloads.deployment("chat")
    found = decide(workloads, pod("a", "Job x"), pod("b", "ReplicaSet chat-5d"))
    assert (chosen(found), len(found.unsupported)) == ("Deployment chat", 1)


def test_a_restart_only_sets_an_annotation_of_the_pod_template() -> None:
    template = {"metadata": {"annotations": {MARK: HASH}}}
    assert restart_patch(Workload(DEPLOYMENTS, {}, 1), HASH) == {"spec": {"template": template}}
    with_leader = {
        "spec": {"leaderWorkerTemplate": {"workerTemplate": {}, "leaderTemplate": {"spec": {}}}}
    }
    parts = {"workerTemplate": template, "leaderTemplate": template}
    assert restart_patch(Workload(LEADER_WORKER_SETS, with_leader, 1), HASH) == {
        "spec": {"leaderWorkerTemplate": parts}
    }
    assert restart_patch(Workload(LEADER_WORKER_SETS, {}, 1), HASH) == {
        "spec": {"leaderWorkerTemplate": {"workerTemplate": template}}
    }


def test_an_upgrade_of_the_operator_does_not_make_pods_outdated() -> None:
    written = policy()
    given = content_hash(written.spec)
    # An upgrade changes defaults, which are not part of the hash, and images and version.
    document = running(injected_pod("a", owner="ReplicaSet chat-5d", structural_hash=given))
    document["metadata"]["annotations"]["kvtier.io/version"] = "0.0.1"
    document["spec"]["initContainers"][1]["image"] = "registry.example/tierd:0.0.1"
    pods = [view_of(document, status_document())]
    spelled_out = policy(chunkTokens=256)
    assert content_hash(spelled_out.spec) != given
    assert outdated(written, pods, content_hash(policy().spec)) == []


def test_a_change_of_live_values_does_not_make_pods_outdated() -> None:
    changed = policy(
        minLoadTokens=4096, rollout={"strategy": "RestartWorkloads"}, attach={"retrySeconds": 77}
    )
    assert content_hash(changed.spec) == content_hash(policy().spec)
