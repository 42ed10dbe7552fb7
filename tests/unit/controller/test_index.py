"""The policy index: after any changes it equals the result of comparing every policy with every
pod.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import controllers
from tests.support.memory_cluster import MemoryCluster

from kvtier_operator.controller.cached_policy import parse_policy
from kvtier_operator.controller.index import PolicyIndex, SelectedPods
from kvtier_operator.injection.governing import precedence, selects
from kvtier_operator.kube.resources import PODS, POLICIES

LABELS = ("x", "y", "z")
steps = st.lists(
    st.tuples(
        st.sampled_from(["policy", "terminating policy", "pod", "drop policy", "drop pod"]),
        st.integers(0, 3),
        st.sampled_from(LABELS),
        st.integers(0, 2),
    ),
    max_size=40,
)


def _policy(number: int, label: str, created: int, uid: str) -> dict[str, Any]:
    # One kind of policy requires no label, so it cannot be found by one.
    any_but_x = {"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["x"]}]}
    selector = any_but_x if label == "z" else {"matchLabels": {"app": label}}
    body = controllers.policy("n", f"p{number}", podSelector=selector)
    body["metadata"] |= {
        "uid": uid,
        "creationTimestamp": f"2026-01-0{created + 1}T00:00:00Z",
        "generation": 1,
    }
    return body


def _expected(cluster: MemoryCluster) -> dict[str, list[str]]:
    """The policies that select each pod, oldest first, by comparing every policy with every pod."""
    policies = [parse_policy(raw).policy for raw in cluster.list_now(POLICIES)]
    found = {}
    for pod in cluster.list_now(PODS):
        selecting = [
            each
            for each in policies
            if each is not None and selects(each, "n", pod["metadata"]["labels"])
        ]
        found[pod["metadata"]["name"]] = [
            each.metadata.name for each in sorted(selecting, key=precedence)
        ]
    return found


@settings(max_examples=150, deadline=None)
@given(steps)
def test_after_any_changes_the_index_equals_a_full_comparison(
    changes: list[tuple[str, int, str, int]],
) -> None:
    cluster, index = MemoryCluster(), PolicyIndex()
    cache = cluster.cached()
    for what, number, label, created in changes:
        before = _expected(cluster)
        if what in ("policy", "terminating policy"):
            held = cluster.get_now(POLICIES, "n", f"p{number}")
            uid = held["metadata"]["uid"] if held is not None else f"uid-{number}-{len(changes)}"
            made = (
                held["metadata"]["creationTimestamp"]
                if held is not None
                else f"2026-01-0{created + 1}T00:00:00Z"
            )
            body = _policy(number, label, created, uid)
            body["metadata"]["creationTimestamp"] = made
            if what == "terminating policy":
                body["metadata"]["deletionTimestamp"] = "2026-02-01T00:00:00Z"
            affected = index.put_policy(cluster.put(POLICIES, body), cache)
        elif what == "pod":
            metadata = {"name": f"pod{number}", "namespace": "n", "labels": {"app": label}}
            affected = index.put_pod(cluster.put(PODS, {"metadata": metadata}))
        elif what == "drop policy":
            cluster.remove(POLICIES, "n", f"p{number}")
            affected = index.drop_policy("n", f"p{number}")
        else:
            cluster.remove(PODS, "n", f"pod{number}")
            affected = index.drop_pod("n", f"pod{number}")
        expected = _expected(cluster)
        for raw in cluster.list_now(POLICIES):
            name = raw["metadata"]["name"]
            pods = index.pods(("n", name), cache)
            assert {pod.metadata.name for pod in pods.governed} == {
                pod for pod, names in expected.items() if names[:1] == [name]
            }
            assert sorted(pods.governed_by_others) == sorted(
                names[0] for names in expected.values() if name in names[1:]
            )
            touched = {
                pod
                for pod in before.keys() | expected.keys()
                if before.get(pod) != expected.get(pod)
                and name in [*before.get(pod, []), *expected.get(pod, [])]
            }
            assert not touched or ("n", name) in affected, (
                "a policy whose pods change is reconciled"
            )


def test_of_two_policies_of_the_same_second_the_lower_uid_governs() -> None:
    cluster, index = MemoryCluster(), PolicyIndex()
    for number, uid in ((1, "b"), (2, "a")):
        index.put_policy(cluster.put(POLICIES, _policy(number, "x", 0, uid)), cluster.cached())
    index.put_pod(
        cluster.put(PODS, {"metadata": {"name": "pod", "namespace": "n", "labels": {"app": "x"}}})
    )
    assert len(index.pods(("n", "p2"), cluster.cached()).governed) == 1
    assert index.pods(("n", "p1"), cluster.cached()).governed_by_others == ("p2",)


def test_a_terminating_policy_governs_no_pod_and_the_younger_one_is_not_conflicted() -> None:
    cluster, index = MemoryCluster(), PolicyIndex()
    older, younger = _policy(1, "x", 0, "a"), _policy(2, "x", 1, "b")
    for body in (older, younger):
        index.put_policy(cluster.put(POLICIES, body), cluster.cached())
    pod = {"metadata": {"name": "pod", "namespace": "n", "labels": {"app": "x"}}}
    index.put_pod(cluster.put(PODS, pod))
    assert index.pods(("n", "p2"), cluster.cached()).governed_by_others == ("p1",)
    older["metadata"]["deletionTimestamp"] = "2026-02-01T00:00:00Z"
    affected = index.put_policy(cluster.put(POLICIES, older), cluster.cached())
    assert affected == {("n", "p1"), ("n", "p2")}
    pods = index.pods(("n", "p2"), cluster.cached())
    assert [pod.metadata.name for pod in pods.governed] == ["pod"]
    assert pods.governed_by_others == ()
    assert index.pods(("n", "p1"), cluster.cached()) == SelectedPods()


def test_policies_are_found_by_the_claim_that_they_use() -> None:
    cluster, index = MemoryCluster(), PolicyIndex()
    body = _policy(1, "x", 0, "a")
    body["spec"]["tiers"].append(
        controllers.file_tier("disk", {"persistentVolumeClaim": {"claimName": "mine"}})
    )
    index.put_policy(cluster.put(POLICIES, body), cluster.cached())
    assert index.using_claim("n", "mine") == [("n", "p1")]
    index.drop_policy("n", "p1")
    assert index.using_claim("n", "mine") == []
    assert index.keys() == []
