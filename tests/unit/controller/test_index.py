"""Which policy governs which pod, kept up with every change: always what comparing all with all would give."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import controllers
from tests.support.memory_cluster import MemoryCluster

from kvtier_operator.api.selector import matches
from kvtier_operator.controller.children.observe import read
from kvtier_operator.controller.index import PolicyIndex, age
from kvtier_operator.kube.resources import PODS, POLICIES

LABELS = ("x", "y", "z")
steps = st.lists(
    st.tuples(
        st.sampled_from(["policy", "pod", "drop policy", "drop pod"]),
        st.integers(0, 3),
        st.sampled_from(LABELS),
        st.integers(0, 2),
    ),
    max_size=40,
)


def _policy(number: int, label: str, created: int, uid: str) -> dict[str, Any]:
    # One kind of policy demands no label at all, so that it cannot be found by one.
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
    """Per pod the policies that select it, oldest first, by comparing all with all."""
    policies = [read(raw) for raw in cluster.list_now(POLICIES)]
    found = {}
    for pod in cluster.list_now(PODS):
        selecting = [
            each
            for each in policies
            if each.policy is not None
            and matches(each.policy.spec.pod_selector, pod["metadata"]["labels"])
        ]
        found[pod["metadata"]["name"]] = [
            each.raw["metadata"]["name"] for each in sorted(selecting, key=age)
        ]
    return found


@settings(max_examples=150, deadline=None)
@given(steps)
def test_after_any_changes_it_is_what_comparing_all_with_all_gives(
    done: list[tuple[str, int, str, int]],
) -> None:
    cluster, index = MemoryCluster(), PolicyIndex()
    cache = cluster.cached()
    for what, number, label, created in done:
        before = _expected(cluster)
        if what == "policy":
            held = cluster.get_now(POLICIES, "n", f"p{number}")
            uid = held["metadata"]["uid"] if held is not None else f"uid-{number}-{len(done)}"
            made = (
                held["metadata"]["creationTimestamp"]
                if held is not None
                else f"2026-01-0{created + 1}T00:00:00Z"
            )
            body = _policy(number, label, created, uid)
            body["metadata"]["creationTimestamp"] = made
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
            governed, conflicted = index.pods(("n", name), cache)
            assert {pod["metadata"]["name"] for pod in governed} == {
                pod for pod, names in expected.items() if names[:1] == [name]
            }
            assert {(pod["metadata"]["name"], other) for pod, other in conflicted} == {
                (pod, names[0]) for pod, names in expected.items() if name in names[1:]
            }
            touched = {
                pod
                for pod in before.keys() | expected.keys()
                if before.get(pod) != expected.get(pod)
                and name in [*before.get(pod, []), *expected.get(pod, [])]
            }
            assert not touched or ("n", name) in affected, (
                "whoever's pods have changed is looked at"
            )


def test_of_two_of_the_same_second_the_uid_decides() -> None:
    cluster, index = MemoryCluster(), PolicyIndex()
    for number, uid in ((1, "b"), (2, "a")):
        index.put_policy(cluster.put(POLICIES, _policy(number, "x", 0, uid)), cluster.cached())
    index.put_pod(
        cluster.put(PODS, {"metadata": {"name": "pod", "namespace": "n", "labels": {"app": "x"}}})
    )
    assert index.pods(("n", "p2"), cluster.cached())[0]
    assert index.pods(("n", "p1"), cluster.cached())[1][0][1] == "p2"


def test_policies_are_found_by_the_claim_they_name() -> None:
    cluster, index = MemoryCluster(), PolicyIndex()
    body = _policy(1, "x", 0, "a")
    body["spec"]["tiers"].append(
        controllers.file_tier("disk", {"persistentVolumeClaim": {"claimName": "mine"}})
    )
    index.put_policy(cluster.put(POLICIES, body), cluster.cached())
    assert index.naming_claim("n", "mine") == [("n", "p1")]
    index.drop_policy("n", "p1")
    assert index.naming_claim("n", "mine") == []
    assert index.keys() == []
