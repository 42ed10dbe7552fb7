"""What is known of the cluster is what the cluster last said, and costs nothing to ask."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.webhook.world import SERVING, World, disk, pod

from kvtier_operator.injection import governing as rule
from kvtier_operator.injection.existing_config import GROUP_LABEL
from kvtier_operator.kube.resources import LIMIT_RANGES, NAMESPACES, NODES, PODS, POLICIES, QUOTAS
from kvtier_operator.webhook import lister

LABELS = {"app": "engine"}


def governing(world: World, labels: dict[str, str] | None = None) -> str | None:
    policy = world.knowledge.governing(SERVING, labels or LABELS)
    return None if policy is None else policy.metadata.name


def around(world: World, **metadata: Any) -> Any:
    policy = world.knowledge.governing(SERVING, LABELS)
    assert policy is not None
    return world.knowledge.surroundings(policy, SERVING, pod(**metadata))


def test_the_older_policy_governs_then_the_smaller_uid() -> None:
    world = World()
    world.policy("b", created=2, uid="1")
    world.policy("c", created=1, uid="3")
    world.policy("a", created=1, uid="2")
    assert governing(world) == "a"
    world.cache.drop(POLICIES, SERVING, "a")
    assert governing(world) == "c"


def test_no_policy_governs_other_pods_and_other_namespaces() -> None:
    world = World()
    world.policy()
    assert governing(world, {"app": "other"}) is None
    assert world.knowledge.governing("elsewhere", LABELS) is None


FEW_LABELS = st.dictionaries(st.sampled_from("ab"), st.sampled_from("xy"), max_size=2)
SELECTORS = st.builds(
    lambda labels, key: {
        "matchLabels": labels,
        **({"matchExpressions": [{"key": key, "operator": "Exists"}]} if key else {}),
    },
    FEW_LABELS,
    st.sampled_from(["", "a"]),
)
CHANGES = st.lists(st.tuples(st.sampled_from("pqrs"), st.none() | SELECTORS), max_size=12)


@given(CHANGES, FEW_LABELS)
def test_what_governs_is_what_comparing_with_every_policy_would_find(
    changes: list[tuple[str, dict[str, Any] | None]], labels: dict[str, str]
) -> None:
    world, present = World(), set()
    for number, (name, selector) in enumerate(changes):
        if selector is not None:
            world.policy(name, created=number, podSelector=selector)
            present.add(name)
        elif name in present:
            world.cache.drop(POLICIES, SERVING, name)
            present.remove(name)
    known = world.knowledge.policies(SERVING)
    assert {policy.metadata.name for policy in known} == present
    expected = rule.governing(known, SERVING, labels)
    assert world.knowledge.governing(SERVING, labels) is expected


def test_a_policy_that_is_made_again_is_another() -> None:
    world = World()
    world.policy(uid="first")
    world.policy(uid="second")
    policy = world.knowledge.governing(SERVING, LABELS)
    assert policy is not None
    assert policy.metadata.uid == "second"


def test_a_change_of_status_alone_parses_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    document = world.policy()
    before = world.knowledge.governing(SERVING, LABELS)
    monkeypatch.setattr(lister, "validated", lambda *_: pytest.fail("parsed"))
    condition = {"type": "StorageReady", "status": "False"}
    world.cache.put(POLICIES, {**document, "status": {"conditions": [condition]}})
    assert world.knowledge.governing(SERVING, LABELS) is before
    assert not around(world).storage_ready


def test_a_changed_spec_is_what_counts() -> None:
    world = World()
    document = world.policy()
    world.cache.put(
        POLICIES,
        {**document, "spec": {**document["spec"], "podSelector": {"matchLabels": {"a": "b"}}}},
    )
    assert governing(world) is None
    assert governing(world, {"a": "b"}) == "chat"


def test_a_policy_that_cannot_be_read_governs_nothing_and_is_counted() -> None:
    world = World()
    document = world.policy()
    world.cache.put(POLICIES, {**document, "spec": {**document["spec"], "fromTheFuture": 1}})
    assert governing(world) is None
    assert world.knowledge.counts() == (0, 1)
    world.cache.put(POLICIES, document)
    assert world.knowledge.counts() == (1, 0)
    world.cache.drop(POLICIES, SERVING, "chat")
    assert world.knowledge.counts() == (0, 0)


def test_what_is_around_a_pod_is_that_of_its_namespace() -> None:
    world = World()
    world.policy()
    for kind in (LIMIT_RANGES, QUOTAS):
        for namespace in (SERVING, "elsewhere"):
            world.cache.put(
                kind, {"metadata": {"namespace": namespace, "name": "x"}, "spec": {"of": namespace}}
            )
    world.cache.put(NAMESPACES, {"metadata": {"name": SERVING, "labels": {"level": "baseline"}}})
    found = around(world)
    assert found.namespace_labels == {"level": "baseline"}
    assert [entry["spec"]["of"] for entry in (*found.limit_ranges, *found.quotas)] == [
        SERVING,
        SERVING,
    ]
    assert found.storage_ready
    assert found.suspended is None
    assert found.refusals == ()


def test_versions_of_kubelets_are_those_of_nodes_that_exist() -> None:
    world = World()
    world.policy()

    def node(name: str, version: str) -> dict[str, Any]:
        return {"metadata": {"name": name}, "status": {"nodeInfo": {"kubeletVersion": version}}}

    for name, version in (("a", "v1.28.0"), ("b", "v1.28.0"), ("c", "v1.30.1")):
        world.cache.put(NODES, node(name, version))
    assert sorted(around(world).kubelet_versions) == ["v1.28.0", "v1.30.1"]
    world.cache.drop(NODES, "", "a")
    assert sorted(around(world).kubelet_versions) == ["v1.28.0", "v1.30.1"]
    world.cache.put(NODES, node("b", "v1.31.0"))
    world.cache.put(NODES, {"metadata": {"name": "d"}})
    assert sorted(around(world).kubelet_versions) == ["v1.30.1", "v1.31.0"]


def test_siblings_are_the_living_pods_of_the_group() -> None:
    world = World()
    world.policy()

    def member(name: str, group: str, namespace: str = SERVING, **more: Any) -> dict[str, Any]:
        return {
            "metadata": {
                "namespace": namespace,
                "name": name,
                "labels": {GROUP_LABEL: group},
                **more,
            }
        }

    world.cache.put(PODS, member("leader", "g1"))
    world.cache.put(PODS, member("going", "g1", deletionTimestamp="2026-01-01T00:00:00Z"))
    world.cache.put(PODS, member("foreign", "g2"))
    world.cache.put(PODS, member("far", "g1", "elsewhere"))
    labels = {**LABELS, GROUP_LABEL: "g1"}
    assert [each["metadata"]["name"] for each in around(world, labels=labels).siblings] == [
        "leader"
    ]
    assert around(world).siblings == ()
    world.cache.drop(PODS, SERVING, "leader")
    assert around(world, labels=labels).siblings == ()


@pytest.mark.parametrize(
    ("until", "suspended"),
    [
        ("2027-01-15T08:00:01Z", True),
        ("2027-01-15T08:00:00Z", False),
        ("2027-01-15T10:00:01+02:00", True),
        ("nonsense", False),
        (None, True),
    ],
)
def test_an_owner_is_suspended_until_its_time_is_over(until: str | None, suspended: bool) -> None:
    world = World()
    document = world.policy()
    entry = {
        "kind": "ReplicaSet",
        "name": "engine-1",
        "uid": "rs",
        "reason": "WouldBeRefused",
        "until": until,
    }
    world.cache.put(POLICIES, {**document, "status": {"suspendedOwners": [entry]}})
    world.clock.now = 1_800_000_000.0  # 2027-01-15T08:00:00Z
    owner = {"kind": "ReplicaSet", "name": "engine-1", "uid": "rs", "controller": True}
    found = around(world, ownerReferences=[owner]).suspended
    assert (found is not None) == suspended
    if found is not None:
        assert "ReplicaSet engine-1" in found
        assert "WouldBeRefused" in found
    assert around(world, ownerReferences=[{**owner, "controller": False}]).suspended is None
    assert around(world, ownerReferences=[{**owner, "uid": "other"}]).suspended is None


def test_what_the_allow_list_does_not_cover_is_among_the_refusals() -> None:
    tiers = [{"name": "ram", "memory": {"capacity": "1Gi"}}, disk("/mnt/kv/a")]
    world = World(allowedVolumes=[{"namespaces": [SERVING], "hostPath": "/mnt/other"}])
    world.policy(tiers=tiers)
    (refusal,) = around(world).refusals
    assert "/mnt/kv/a" in refusal
    allowed = World(allowedVolumes=[{"namespaces": [SERVING], "hostPath": "/mnt/kv"}])
    allowed.policy(tiers=tiers)
    assert around(allowed).refusals == ()
