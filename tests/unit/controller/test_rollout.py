"""RestartWorkloads: one workload at a time, never twice for the same structure."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.pods import HASH, bare_pod, injected_pod, policy, running, status_document
from tests.unit.controller.world import looked_at

from kvtier_operator.controller.pods.pod_view import PodView
from kvtier_operator.controller.rollout import Rollout, outdated, restart_body, rollout
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


class Space:
    """Workloads of a namespace, by kind and name."""

    def __init__(self) -> None:
        self.objects: dict[tuple[Kind, str], dict[str, Any]] = {}

    def find(self, kind: Kind, name: str) -> Object | None:
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
    return looked_at(running(found), status_document())


def decide(space: Space, *pods: PodView, held: str = "", of: Any = RESTARTING) -> Rollout:
    return rollout(of, pods, HASH, space.find, held)


def chosen(found: Rollout) -> str:
    return str(found.restart) if found.restart is not None else ""


def test_without_the_strategy_nothing_is_restarted() -> None:
    space = Space()
    space.deployment("chat")
    assert decide(space, pod("a", "ReplicaSet chat-5d"), of=policy()) == Rollout()


def test_a_deployment_with_outdated_pods_is_restarted() -> None:
    space = Space()
    space.deployment("chat")
    assert chosen(decide(space, pod("a", "ReplicaSet chat-5d"))) == "Deployment chat"
    assert chosen(decide(space, pod("a", "ReplicaSet chat-5d", HASH))) == ""


def test_pods_without_tiers_are_not_outdated() -> None:
    space = Space()
    space.deployment("chat")
    assert decide(space, looked_at(bare_pod(owner="ReplicaSet chat-5d"))) == Rollout()


def test_one_workload_after_the_other_in_the_order_of_their_names() -> None:
    space = Space()
    pods = [pod(name, f"ReplicaSet {name}-5d") for name in ("b", "a", "c")]
    for name in ("a", "b", "c"):
        space.deployment(name)
    first = decide(space, *pods)
    assert (chosen(first), first.remaining) == ("Deployment a", 3)
    space.deployment("a", mark=HASH, status={"updatedReplicas": 0})
    second = decide(space, *pods)
    assert (chosen(second), second.under_way, second.remaining) == (
        "",
        "Deployment a: 0 of 1 replicas are replaced",
        2,
    )
    space.deployment("a", mark=HASH)
    third = decide(space, pods[0], pods[2], pod("a2", "ReplicaSet a-5d", HASH))
    assert chosen(third) == "Deployment b"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"status": {"observedGeneration": 0}}, "its controller has not begun"),
        ({"status": {"updatedReplicas": 0}}, "0 of 1 replicas are replaced"),
        ({"status": {"availableReplicas": 0}}, "0 of 1 replicas are available"),
        ({"status": {"replicas": 2}}, "replaced pods are still there"),
    ],
)
def test_the_next_waits_until_the_last_is_available(changes: dict[str, Any], words: str) -> None:
    space = Space()
    space.deployment("a", mark=HASH, **changes)
    space.deployment("b")
    found = decide(space, pod("a", "ReplicaSet a-5d", HASH), pod("b", "ReplicaSet b-5d"))
    assert (chosen(found), found.under_way) == ("", f"Deployment a: {words}")


def test_never_twice_for_the_same_structure() -> None:
    space = Space()
    space.deployment("chat", mark=HASH)
    found = decide(space, pod("a", "ReplicaSet chat-5d"))
    assert (chosen(found), found.tried) == ("", ("Deployment chat",))


def test_again_for_another_structure() -> None:
    space = Space()
    space.deployment("chat", mark="of last week")
    assert chosen(decide(space, pod("a", "ReplicaSet chat-5d"))) == "Deployment chat"


def test_nothing_is_restarted_while_new_pods_would_get_no_tiers() -> None:
    space = Space()
    space.deployment("chat")
    assert chosen(decide(space, pod("a", "ReplicaSet chat-5d"), held="StorageReady is False")) == ""


def test_a_stateful_set_and_a_leader_worker_set_are_restarted() -> None:
    space = Space()
    space.add(STATEFUL_SETS, "chat")
    assert chosen(decide(space, pod("chat-0", "StatefulSet chat"))) == "StatefulSet chat"
    space = Space()
    space.add(LEADER_WORKER_SETS, "chat")
    space.add(STATEFUL_SETS, "chat-0", ("LeaderWorkerSet", "chat"))
    label = {"leaderworkerset.sigs.k8s.io/name": "chat"}
    assert (
        chosen(decide(space, pod("chat-0-1", "StatefulSet chat-0", **label)))
        == "LeaderWorkerSet chat"
    )


@pytest.mark.parametrize(
    ("owner", "why"),
    [
        ("Job chat", "a Job is not restarted by KVTier"),
        ("InferenceGroup chat", "a InferenceGroup is not restarted by KVTier"),
        ("ReplicaSet alone", "a ReplicaSet without a Deployment does not replace its pods"),
        ("", "nobody would replace it"),
        ("StatefulSet gone", "it is gone"),
        (
            "ReplicaSet served-5d",
            "it belongs to InferenceService served, which writes its template",
        ),
        ("ReplicaSet paused-5d", "it is paused"),
        ("StatefulSet by-hand", "its update strategy is OnDelete"),
        ("StatefulSet canary", "its update has a partition"),
    ],
)
def test_what_cannot_be_restarted_says_why(owner: str, why: str) -> None:
    space = Space()
    space.add(REPLICA_SETS, "alone")
    space.deployment("served", owner=("InferenceService", "served"))
    space.deployment("paused", spec={"paused": True})
    space.add(STATEFUL_SETS, "by-hand", spec={"updateStrategy": {"type": "OnDelete"}})
    space.add(STATEFUL_SETS, "canary", spec={"updateStrategy": {"rollingUpdate": {"partition": 1}}})
    found = decide(space, pod("chat-x", owner))
    assert [words for _, words in found.unsupported] == [why]
    assert chosen(found) == ""


def test_what_cannot_be_restarted_does_not_hold_up_the_others() -> None:
    space = Space()
    space.deployment("chat")
    found = decide(space, pod("a", "Job x"), pod("b", "ReplicaSet chat-5d"))
    assert (chosen(found), len(found.unsupported)) == ("Deployment chat", 1)


def test_one_annotation_of_the_template_is_all_that_is_written() -> None:
    template = {"metadata": {"annotations": {MARK: HASH}}}
    assert restart_body(DEPLOYMENTS, {}, HASH) == {"spec": {"template": template}}
    whole = {
        "spec": {"leaderWorkerTemplate": {"workerTemplate": {}, "leaderTemplate": {"spec": {}}}}
    }
    parts = {"workerTemplate": template, "leaderTemplate": template}
    assert restart_body(LEADER_WORKER_SETS, whole, HASH) == {
        "spec": {"leaderWorkerTemplate": parts}
    }
    assert restart_body(LEADER_WORKER_SETS, {}, HASH) == {
        "spec": {"leaderWorkerTemplate": {"workerTemplate": template}}
    }


def test_an_upgrade_of_the_operator_outdates_nobody() -> None:
    written = policy()
    given = content_hash(written.spec)
    pods = [pod("a", "ReplicaSet chat-5d", given)]
    # What an upgrade changes: defaults, which are not written; images and version, which are in annotations only.
    pods[0].pod["metadata"]["annotations"]["kvtier.io/version"] = "0.0.1"  # type: ignore[index]
    pods[0].pod["spec"]["initContainers"][1]["image"] = "registry.example/tierd:0.0.1"  # type: ignore[index]
    spelled_out = policy(chunkTokens=256)
    assert content_hash(spelled_out.spec) != given
    assert outdated(written, pods, content_hash(policy().spec)) == []


def test_a_live_change_outdates_nobody_either() -> None:
    changed = policy(
        minLoadTokens=4096, rollout={"strategy": "RestartWorkloads"}, attach={"retrySeconds": 77}
    )
    assert content_hash(changed.spec) == content_hash(policy().spec)
