"""The lister returns the latest state of the cluster from memory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.webhook.fixtures import SERVING, Fixture, disk, pod

from kvtier_operator.api.pods import decode_pod
from kvtier_operator.injection import governing as rule
from kvtier_operator.injection.existing_config import GROUP_LABEL
from kvtier_operator.kube.resources import LIMIT_RANGES, NAMESPACES, NODES, PODS, POLICIES, QUOTAS
from kvtier_operator.webhook import lister

LABELS = {"app": "engine"}


def governing(fixture: Fixture, labels: dict[str, str] | None = None) -> str | None:
    policy = fixture.lister.governing(SERVING, labels or LABELS)
    return None if policy is None else policy.metadata.name


def context(fixture: Fixture, **metadata: Any) -> Any:
    policy = fixture.lister.governing(SERVING, LABELS)
    assert policy is not None
    return fixture.lister.admission_context(policy, SERVING, decode_pod(pod(**metadata)))


def test_the_older_policy_governs_then_the_smaller_uid() -> None:
    fixture = Fixture()
    fixture.policy("b", created=2, uid="1")
    fixture.policy("c", created=1, uid="3")
    fixture.policy("a", created=1, uid="2")
    assert governing(fixture) == "a"
    fixture.cache.drop(POLICIES, SERVING, "a")
    assert governing(fixture) == "c"


def test_no_policy_governs_other_pods_and_other_namespaces() -> None:
    fixture = Fixture()
    fixture.policy()
    assert governing(fixture, {"app": "other"}) is None
    assert fixture.lister.governing("elsewhere", LABELS) is None


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
def test_the_index_finds_the_same_policy_as_a_full_scan(
    changes: list[tuple[str, dict[str, Any] | None]], labels: dict[str, str]
) -> None:
    fixture, present = Fixture(), set()
    for number, (name, selector) in enumerate(changes):
        if selector is not None:
            fixture.policy(name, created=number, podSelector=selector)
            present.add(name)
        elif name in present:
            fixture.cache.drop(POLICIES, SERVING, name)
            present.remove(name)
    known = fixture.lister.policies(SERVING)
    assert {policy.metadata.name for policy in known} == present
    expected = rule.governing(known, SERVING, labels)
    assert fixture.lister.governing(SERVING, labels) is expected


def test_a_recreated_policy_replaces_the_old_one() -> None:
    fixture = Fixture()
    fixture.policy(uid="first")
    fixture.policy(uid="second")
    policy = fixture.lister.governing(SERVING, LABELS)
    assert policy is not None
    assert policy.metadata.uid == "second"


def test_a_status_change_does_not_parse_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = Fixture()
    document = fixture.policy()
    before = fixture.lister.governing(SERVING, LABELS)
    monkeypatch.setattr(lister, "read_stored", lambda *_: pytest.fail("parsed"))
    condition = {"type": "StorageReady", "status": "False"}
    fixture.cache.put(POLICIES, {**document, "status": {"conditions": [condition]}})
    assert fixture.lister.governing(SERVING, LABELS) is before
    assert not context(fixture).storage_ready


def test_a_changed_spec_takes_effect() -> None:
    fixture = Fixture()
    document = fixture.policy()
    fixture.cache.put(
        POLICIES,
        {**document, "spec": {**document["spec"], "podSelector": {"matchLabels": {"a": "b"}}}},
    )
    assert governing(fixture) is None
    assert governing(fixture, {"a": "b"}) == "chat"


def test_a_policy_with_a_field_of_a_newer_definition_still_governs() -> None:
    fixture = Fixture()
    document = fixture.policy()
    fixture.cache.put(POLICIES, {**document, "spec": {**document["spec"], "fromTheFuture": 1}})
    assert governing(fixture) == "chat"
    assert fixture.lister.counts() == (1, 0)


def test_a_policy_that_cannot_be_read_governs_nothing_and_is_counted() -> None:
    fixture = Fixture()
    document = fixture.policy()
    fixture.cache.put(POLICIES, {**document, "spec": {**document["spec"], "chunkTokens": 7}})
    assert governing(fixture) is None
    assert fixture.lister.counts() == (0, 1)
    fixture.cache.put(POLICIES, document)
    assert fixture.lister.counts() == (1, 0)
    fixture.cache.drop(POLICIES, SERVING, "chat")
    assert fixture.lister.counts() == (0, 0)


def test_the_admission_context_has_the_objects_of_the_pods_namespace() -> None:
    fixture = Fixture()
    fixture.policy()
    for kind in (LIMIT_RANGES, QUOTAS):
        for namespace in (SERVING, "elsewhere"):
            fixture.cache.put(
                kind, {"metadata": {"namespace": namespace, "name": f"x-{namespace}"}}
            )
    fixture.cache.put(NAMESPACES, {"metadata": {"name": SERVING, "labels": {"level": "baseline"}}})
    found = context(fixture)
    assert found.namespace_labels == {"level": "baseline"}
    assert [each.metadata.name for each in (*found.limit_ranges, *found.quotas)] == [
        f"x-{SERVING}",
        f"x-{SERVING}",
    ]
    assert found.storage_ready
    assert found.suspended is None
    assert found.policy_errors == ()


def test_kubelet_versions_are_those_of_the_current_nodes() -> None:
    fixture = Fixture()
    fixture.policy()

    def node(name: str, version: str) -> dict[str, Any]:
        return {"metadata": {"name": name}, "status": {"nodeInfo": {"kubeletVersion": version}}}

    for name, version in (("a", "v1.28.0"), ("b", "v1.28.0"), ("c", "v1.30.1")):
        fixture.cache.put(NODES, node(name, version))
    assert sorted(context(fixture).kubelet_versions) == ["v1.28.0", "v1.30.1"]
    fixture.cache.drop(NODES, "", "a")
    assert sorted(context(fixture).kubelet_versions) == ["v1.28.0", "v1.30.1"]
    fixture.cache.put(NODES, node("b", "v1.31.0"))
    fixture.cache.put(NODES, {"metadata": {"name": "d"}})
    assert sorted(context(fixture).kubelet_versions) == ["v1.30.1", "v1.31.0"]


def test_kubelets_count_only_of_nodes_that_the_pod_can_be_scheduled_on() -> None:
    fixture = Fixture()
    fixture.policy()
    policy = fixture.lister.governing(SERVING, LABELS)
    assert policy is not None

    def versions(**spec: Any) -> list[str]:
        body = pod()
        body["spec"].update(spec)
        found = fixture.lister.admission_context(policy, SERVING, decode_pod(body))
        return sorted(found.kubelet_versions)

    for name, version, gpus in (("old", "v1.27.0", "0"), ("new", "v1.36.0", "8")):
        fixture.cache.put(
            NODES,
            {
                "metadata": {"name": name, "labels": {"pool": name}},
                "status": {
                    "nodeInfo": {"kubeletVersion": version},
                    "allocatable": {"nvidia.com/gpu": gpus},
                },
            },
        )
    assert versions() == ["v1.27.0", "v1.36.0"]
    assert versions(nodeSelector={"pool": "new"}) == ["v1.36.0"]
    gpu = [{"name": "vllm", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]
    assert versions(containers=gpu) == ["v1.36.0"]
    assert versions(nodeSelector={"pool": "none"}) == []


def test_siblings_are_the_running_pods_of_the_group() -> None:
    fixture = Fixture()
    fixture.policy()

    def member(name: str, group: str, namespace: str = SERVING, **more: Any) -> dict[str, Any]:
        return {
            "metadata": {
                "namespace": namespace,
                "name": name,
                "labels": {GROUP_LABEL: group},
                **more,
            }
        }

    fixture.cache.put(PODS, member("leader", "g1"))
    fixture.cache.put(PODS, member("going", "g1", deletionTimestamp="2026-01-01T00:00:00Z"))
    fixture.cache.put(PODS, member("foreign", "g2"))
    fixture.cache.put(PODS, member("far", "g1", "elsewhere"))
    labels = {**LABELS, GROUP_LABEL: "g1"}
    assert [each.metadata.name for each in context(fixture, labels=labels).siblings] == ["leader"]
    assert context(fixture).siblings == ()
    fixture.cache.drop(PODS, SERVING, "leader")
    assert context(fixture, labels=labels).siblings == ()


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
    fixture = Fixture()
    document = fixture.policy()
    entry = {
        "kind": "ReplicaSet",
        "name": "engine-1",
        "uid": "rs",
        "reason": "WouldBeRefused",
        "until": until,
    }
    fixture.cache.put(POLICIES, {**document, "status": {"suspendedOwners": [entry]}})
    fixture.clock.now = 1_800_000_000.0  # 2027-01-15T08:00:00Z
    owner = {"kind": "ReplicaSet", "name": "engine-1", "uid": "rs", "controller": True}
    found = context(fixture, ownerReferences=[owner]).suspended
    assert (found is not None) == suspended
    if found is not None:
        assert "ReplicaSet engine-1" in found
        assert "WouldBeRefused" in found
    assert context(fixture, ownerReferences=[{**owner, "controller": False}]).suspended is None
    assert context(fixture, ownerReferences=[{**owner, "uid": "other"}]).suspended is None


def test_a_volume_that_is_not_allowed_is_an_error_in_the_context() -> None:
    tiers = [{"name": "ram", "memory": {"capacity": "1Gi"}}, disk("/mnt/kv/a")]
    fixture = Fixture(allowedVolumes=[{"namespaces": [SERVING], "hostPath": "/mnt/other"}])
    fixture.policy(tiers=tiers)
    (error,) = context(fixture).policy_errors
    assert "/mnt/kv/a" in error
    allowed = Fixture(allowedVolumes=[{"namespaces": [SERVING], "hostPath": "/mnt/kv"}])
    allowed.policy(tiers=tiers)
    assert context(allowed).policy_errors == ()
