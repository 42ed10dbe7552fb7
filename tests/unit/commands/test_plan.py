"""``kvtier plan``: which pods change live, become outdated, are restarted, or get nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.support import pod_objects, pods
from tests.unit.commands.test_why import Forbidding, installed, policy_document

from kvtier.cli.cluster import plan
from kvtier.cli.cluster.access import ClusterReader
from kvtier.cli.cluster.plan import PolicyPlan, changes, plan_policy
from kvtier.cli.inputs import CommandError
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.kube.resources import DEPLOYMENTS, PODS, POLICIES, REPLICA_SETS
from kvtier_operator.render.documents import content_hash

ROLLOUT = "rollout: {enabled: true}\n"


def changed(**spec: Any) -> KVTierPolicy:
    """The policy ``chat`` with other values, as a file has it."""
    return pods.policy(**spec)


def current(name: str, **spec: Any) -> dict[str, Any]:
    """A running pod with the structure of this policy."""
    return pods.running(pods.injected_pod(name, structural_hash=content_hash(changed(**spec).spec)))


def planned(cluster: Forbidding, policy: KVTierPolicy) -> PolicyPlan:
    return asyncio.run(plan_policy(ClusterReader(cluster, "serving"), policy))


def effects(found: PolicyPlan) -> dict[str, str]:
    return {each.pod: each.effect for each in found.pods}


def test_a_live_value_reaches_running_pods() -> None:
    found = planned(installed((PODS, current("a"))), changed(minLoadTokens=2048))
    assert effects(found) == {"a": "Live"}
    (change,) = found.changes
    assert (change.path, change.before, change.after, change.live) == (
        "spec.minLoadTokens",
        "512",
        "2048",
        True,
    )


def test_an_unchanged_file_changes_nothing_although_the_server_added_defaults() -> None:
    stored = policy_document()
    stored["spec"] |= {"minLoadTokens": 512, "selection": "Cost", "breaker": {"periodSeconds": 60}}
    found = planned(installed((PODS, current("a")), policy=stored), changed())
    assert effects(found) == {"a": "Unchanged"}
    assert found.changes == ()


def test_a_structural_change_outdates_running_pods() -> None:
    found = planned(installed((PODS, current("a"))), changed(chunkTokens=512))
    assert effects(found) == {"a": "Outdated"}
    assert [each.live for each in found.changes] == [False]


def test_the_same_size_in_other_units_is_no_change() -> None:
    policy = changed()
    same = KVTierPolicy.model_validate(
        {
            **policy_document(),
            "spec": {
                **policy_document()["spec"],
                "tiers": [{"name": "ram", "memory": {"capacity": "1024Mi"}}],
            },
        }
    )
    assert changes(policy, same) == []
    assert content_hash(policy.spec) == content_hash(same.spec)


def _deployment(name: str = "chat") -> list[tuple[Any, dict[str, Any]]]:
    owner = {"kind": "Deployment", "name": name, "uid": f"uid-{name}", "controller": True}
    metadata = {"name": f"{name}-5d", "namespace": "serving", "uid": f"uid-of-{name}-5d"}
    return [
        (REPLICA_SETS, {"metadata": {**metadata, "ownerReferences": [owner]}}),
        (
            DEPLOYMENTS,
            {
                "metadata": {"name": name, "namespace": "serving", "uid": f"uid-{name}"},
                "spec": {"replicas": 1, "template": {}},
                "status": {"updatedReplicas": 1, "availableReplicas": 1, "observedGeneration": 1},
            },
        ),
    ]


def test_workloads_that_the_controller_would_restart_are_named_in_their_order() -> None:
    policy = changed(chunkTokens=512, rollout={"strategy": "RestartWorkloads"})
    other = pods.running(
        pods.injected_pod(
            "z", structural_hash=content_hash(changed().spec), owner="ReplicaSet other-5d"
        )
    )
    cluster = installed(
        (PODS, current("a")),
        (PODS, other),
        (PODS, pods.running(pods.injected_pod("job", owner="Job batch"))),
        *_deployment(),
        *_deployment("other"),
        settings=ROLLOUT,
    )
    found = planned(cluster, policy)
    assert effects(found) == {"a": "Restarted", "z": "Restarted", "job": "Outdated"}
    assert found.restarts == ("Deployment chat", "Deployment other")
    (job,) = [each for each in found.pods if each.pod == "job"]
    assert "restart Job batch yourself: KVTier does not restart a Job" in job.detail


def test_restarts_that_the_administrator_did_not_allow_do_not_happen() -> None:
    policy = changed(chunkTokens=512, rollout={"strategy": "RestartWorkloads"})
    found = planned(installed((PODS, current("a")), *_deployment()), policy)
    assert effects(found) == {"a": "Outdated"}
    assert "rollout.enabled is false" in found.pods[0].detail


def test_a_new_policy_names_pods_that_run_without_tiers_and_what_new_ones_get() -> None:
    pod = pods.running(pods.bare_pod("a"))
    pod["spec"]["containers"] = [pod_objects.engine()]
    tool = pods.running(pods.bare_pod("tool"))
    tool["spec"]["containers"] = [pod_objects.engine(command=["sleep"], image="busybox")]
    found = planned(installed((PODS, pod), (PODS, tool), policy=None), changed())
    assert found.is_new
    assert effects(found) == {"a": "WithoutTiers", "tool": "WithoutTiers"}
    details = {each.pod: each.detail for each in found.pods}
    assert details["a"] == "a new one: Attached"
    assert details["tool"].startswith("a new one: Skipped (")


def test_a_policy_that_is_younger_than_another_governs_none_of_its_pods() -> None:
    older = policy_document()
    older["metadata"] |= {"name": "first", "uid": "first"}
    pod = pods.running(pods.bare_pod("a"))
    found = planned(installed((PODS, pod), policy=older), changed())
    assert effects(found) == {}


def test_a_selector_that_leaves_a_pod_out_releases_it() -> None:
    policy = changed(podSelector={"matchLabels": {"app": "other"}})
    found = planned(installed((PODS, current("a"))), policy)
    assert effects(found) == {"a": "Released"}
    assert found.pods[0].detail == "no policy selects it"


def test_a_volume_that_is_not_allowed_is_an_error() -> None:
    policy = pods.policy(pods.file_tier("disk", "Node"))
    found = planned(installed((PODS, current("a"))), policy)
    assert found.errors
    assert "is not allowed" in found.errors[0]


def test_the_plan_agrees_with_the_controllers_own_functions_after_the_change() -> None:
    """Whatever is planned as outdated is what the controller calls outdated once it is applied."""
    from kvtier_operator.api.pods import decode_pod
    from kvtier_operator.controller.pods import pod_view
    from kvtier_operator.controller.pods.reports import NO_REPORT
    from kvtier_operator.controller.rollout import outdated

    running = [current("a"), current("b", chunkTokens=512), current("c", minLoadTokens=64)]
    for spec in ({}, {"chunkTokens": 512}, {"minLoadTokens": 64}, {"engine": {"hashSeed": "1"}}):
        policy = changed(**spec)
        cluster = installed(*((PODS, each) for each in running))
        planned_outdated = {
            name
            for name, effect in effects(planned(cluster, policy)).items()
            if effect == "Outdated"
        }
        views = [pod_view.view(policy, decode_pod(each), NO_REPORT, pods.NOON) for each in running]
        expected = {each.name for each in outdated(policy, views, content_hash(policy.spec))}
        assert planned_outdated == expected, spec


def test_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = installed((PODS, current("a")))
    before = cluster.version
    found = planned(cluster, changed(chunkTokens=512, minLoadTokens=64))
    plan.show(found)
    assert cluster.version == before
    out = capsys.readouterr().out
    assert "spec.chunkTokens: none -> 512 (structural)" in out
    assert "spec.minLoadTokens: 512 -> 64 (live)" in out
    assert "1 pod Outdated: keeps its earlier structure until it is replaced" in out
    document = plan.to_json([found])["policies"][0]
    assert document["counts"] == {"Outdated": 1}
    assert document["accepted"] is True


def test_the_namespace_is_chosen_as_kubectl_does() -> None:
    policy = changed()
    assert plan.policy_namespace(policy, None, "default") == "serving"
    assert plan.policy_namespace(policy, "serving", "default") == "serving"
    with pytest.raises(CommandError, match="is in namespace serving, and --namespace is other"):
        plan.policy_namespace(policy, "other", "default")


def test_a_stored_policy_that_cannot_be_read_counts_as_absent() -> None:
    broken = policy_document()
    broken["spec"]["chunkTokens"] = 7
    cluster = installed((PODS, current("a")), policy=broken)
    assert cluster.get_now(POLICIES, "serving", "chat") is not None
    found = planned(cluster, changed())
    assert effects(found) == {"a": "Live"}
