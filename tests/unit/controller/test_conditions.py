"""Conditions: every reason about pods, and how Ready summarizes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.pods import (
    NOON,
    at,
    bare_pod,
    file_tier,
    injected_pod,
    policy,
    running,
    scheduled,
    skipped,
    status_document,
    terminating,
    tier_document,
)
from tests.unit.controller.builders import (
    FINE,
    answered,
    condition,
    reconcile_input,
    status,
    verdict,
    view_of,
)

from kvtier_operator.api.conditions import Reason
from kvtier_operator.api.pods import OwnerReference, decode_pod
from kvtier_operator.api.status import PolicyStatus
from kvtier_operator.controller.conditions import ConditionUpdate
from kvtier_operator.controller.injection_breaker.detectors import InjectionFailure
from kvtier_operator.controller.objects import plural
from kvtier_operator.controller.pods.pod_view import PodView
from kvtier_operator.controller.pods.reports import LastReport
from kvtier_operator.controller.pods.terminating import OverduePod, overdue_pod
from kvtier_operator.controller.rollout import RolloutProgress, Unsupported

UNREACHABLE = LastReport(failures=9, error="timeout")
OWNER = OwnerReference(
    api_version="apps/v1", kind="ReplicaSet", name="chat-5d", uid="uid-of-chat-5d", controller=True
)
SUSPENDED = {
    "kind": "ReplicaSet",
    "name": "chat-5d",
    "uid": "u",
    "reason": "ImageNotPulled",
    "until": at(NOON + 600),
}


def attached(name: str = "chat-1", *tiers: Any, generation: int = 5, **more: Any) -> PodView:
    return view_of(
        running(injected_pod(name, **more)), status_document(*tiers, generation=generation)
    )


def reporting(conditions: list[dict[str, str]]) -> PodView:
    return view_of(
        running(injected_pod("chat-1")), status_document(generation=5, conditions=conditions)
    )


def not_attached(name: str = "chat-2", **more: Any) -> PodView:
    return view_of(running(injected_pod(name)), status_document(sessions="none", **more))


def starting(name: str = "chat-3") -> PodView:
    return view_of(scheduled(injected_pod(name)))


def skipped_pod(name: str = "chat-4", reason: str = "AlreadyConfigured") -> PodView:
    return view_of(skipped(bare_pod(name), reason, "the command sets --kv-transfer-config"))


def unreachable(name: str = "chat-5") -> PodView:
    return view_of(running(injected_pod(name)), UNREACHABLE)


def group(name: str, **more: Any) -> PodView:
    return attached(name, **{"leaderworkerset.sigs.k8s.io/group-key": "g"}, **more)


def overdue() -> OverduePod:
    pod = terminating(
        running(
            injected_pod(volumes=[{"name": "kvtier-tier-nvme", "hostPath": {"path": "/mnt/nvme"}}])
        ),
        NOON - 300,
    )
    found = overdue_pod(decode_pod(pod), None, ["nvme"], NOON)
    if found is None:
        raise AssertionError("a pod five minutes after its grace period is not overdue")
    return found


OVERDUE = overdue()

ATTACHED_CASES: list[tuple[str, str, list[PodView], dict[str, Any]]] = [
    ("True", "Attached", [attached()], {}),
    ("True", "Starting", [attached(), starting()], {}),
    ("False", "Starting", [starting()], {}),
    ("Unknown", "NoPods", [], {}),
    ("False", "NotAttached", [attached(), not_attached()], {}),
    ("False", "AlreadyConfigured", [attached(), skipped_pod()], {}),
    ("False", "Missed", [attached(), view_of(bare_pod("chat-9"))], {}),
    ("Unknown", "Unreachable", [attached(), unreachable()], {}),
    ("False", "NotAttached", [unreachable(), not_attached(), skipped_pod()], {}),
    ("False", "ImageNotPulled", [attached()], {"suspended": [SUSPENDED]}),
    (
        "False",
        "Refused",
        [attached()],
        {"failures": [InjectionFailure(OWNER, Reason.REFUSED, "the API server rejected a pod")]},
    ),
]


@pytest.mark.parametrize(("expected", "reason", "pods", "found"), ATTACHED_CASES)
def test_attached_names_the_most_severe_problem(
    expected: str, reason: str, pods: list[PodView], found: dict[str, Any]
) -> None:
    if "suspended" in found:
        found = {
            "suspended": PolicyStatus.model_validate(
                {"suspendedOwners": found["suspended"]}
            ).suspended_owners
        }
    assert verdict(status(*pods, **found), "Attached") == (expected, reason)


def test_the_message_of_attached_counts_pods_and_names_those_with_problems() -> None:
    found = condition(
        status(attached("chat-1"), not_attached("chat-2"), not_attached("chat-6")), "Attached"
    )
    assert found.message.startswith(
        "1 of 3 pods attached; chat-2, chat-6: tierd is running and vllm is ready, but"
    )


def test_attached_warns_if_the_engines_container_mounts_the_tiers() -> None:
    nvme = file_tier("nvme", "Node")
    warning = "a hanging mount can prevent it from terminating"
    for of, expected in (
        (policy(nvme, engine={"daemon": "Engine"}), True),
        (policy(nvme, engine={"connector": "Offloading"}), True),
        (policy(engine={"daemon": "Engine"}), False),
        (policy(nvme), False),
    ):
        message = condition(status(attached(), of=of), "Attached").message
        assert (warning in message) is expected


def test_a_suspended_owner_is_named_with_the_end_of_its_suspension() -> None:
    owners = PolicyStatus.model_validate({"suspendedOwners": [SUSPENDED]}).suspended_owners
    message = condition(status(attached(), suspended=owners), "Attached").message
    assert f"ReplicaSet chat-5d until {at(NOON + 600)}" in message


def test_a_policy_whose_pods_are_all_governed_by_an_older_one_is_conflicted() -> None:
    planned = reconcile_input(governed_by_others=["older", "older"])
    found = status(plan=planned)
    assert verdict(found, "Attached") == ("False", "Conflicted")
    assert verdict(found, "Ready") == ("True", "Conflicted")
    assert (
        "2 pods that the selector matches are governed by an older policy: older"
        in condition(found, "Attached").message
    )


def test_a_policy_that_governs_only_some_of_its_pods_is_ready_with_reason_conflicted() -> None:
    found = status(attached(), plan=reconcile_input(governed_by_others=["older"]))
    assert verdict(found, "Ready") == ("True", "Conflicted")


UP_TO_DATE_CASES: list[tuple[str, str, list[PodView], dict[str, Any]]] = [
    ("True", "Current", [attached()], {}),
    ("Unknown", "NoPods", [skipped_pod()], {}),
    ("False", "Outdated", [attached(), attached("chat-2", structural_hash="older000")], {}),
    ("False", "Outdated", [attached("chat-2", policy_uid="a predecessor")], {}),
    ("False", "MixedGroup", [group("chat-1"), group("chat-2", structural_hash="older000")], {}),
    (
        "False",
        "RollingOut",
        [attached(structural_hash="older000")],
        {"rollout": RolloutProgress(in_progress="Deployment chat: 0 of 1 replicas are updated")},
    ),
    (
        "False",
        "RestartUnsupported",
        [attached(structural_hash="older000")],
        {
            "rollout": RolloutProgress(
                unsupported=(Unsupported("Job chat", "KVTier does not restart a Job"),)
            )
        },
    ),
    (
        "False",
        "Outdated",
        [attached(structural_hash="older000")],
        {"rollout": RolloutProgress(ineffective=("Deployment chat",))},
    ),
]


@pytest.mark.parametrize(("expected", "reason", "pods", "found"), UP_TO_DATE_CASES)
def test_up_to_date_gives_the_reason_of_outdated_pods(
    expected: str, reason: str, pods: list[PodView], found: dict[str, Any]
) -> None:
    assert verdict(status(*pods, **found), "UpToDate") == (expected, reason)


def test_a_group_of_which_some_have_tiers_and_some_have_none_is_mixed() -> None:
    without = view_of(
        skipped(
            bare_pod("chat-2", **{"leaderworkerset.sigs.k8s.io/group-key": "g"}), "MixedGroup", "x"
        )
    )
    found = status(group("chat-1"), without)
    assert verdict(found, "UpToDate") == ("False", "MixedGroup")
    assert (
        "chat-1, chat-2: some have tiers and some have none" in condition(found, "UpToDate").message
    )


TUNED_CASES = [
    ("True", "Applied", [attached()]),
    ("False", "Applying", [attached(), attached("chat-2", generation=4)]),
    ("Unknown", "NoPods", [not_attached()]),
    (
        "False",
        "LiveValuesRefused",
        [view_of(running(injected_pod()), status_document(liveRefusals=["ram.loadWeight: 0"]))],
    ),
]


@pytest.mark.parametrize(("expected", "reason", "pods"), TUNED_CASES)
def test_tuned_compares_the_generations_that_pods_report(
    expected: str, reason: str, pods: list[PodView]
) -> None:
    assert verdict(status(*pods), "Tuned") == (expected, reason)


REJECTED_SESSIONS = [{"name": "sessions_refused", "value": 3}]
COMPATIBLE_CASES = [
    ("True", "Compatible", [attached()]),
    ("Unknown", "NoPods", []),
    ("Unknown", "NotReported", [starting()]),
    ("False", "SessionsRefused", [not_attached(counters=REJECTED_SESSIONS)]),
    (
        "False",
        "EngineUnsupported",
        [not_attached(conditions=[{"type": "EngineOff", "message": "group 3 has block size 7"}])],
    ),
]


@pytest.mark.parametrize(("expected", "reason", "pods"), COMPATIBLE_CASES)
def test_engines_compatible_gives_the_cause(
    expected: str, reason: str, pods: list[PodView]
) -> None:
    assert verdict(status(*pods), "EnginesCompatible") == (expected, reason)


def test_engines_compatible_names_the_engines() -> None:
    document = status_document()
    for session, version in zip(document["sessions"], ("vllm 0.32.0", ""), strict=True):
        session["engineVersion"] = version
    found = status(view_of(running(injected_pod()), document))
    message = condition(found, "EnginesCompatible").message
    assert message == "Every engine that attached is compatible: vllm 0.32.0."


def unhealthy(state: str) -> PodView:
    return attached("chat-1", tier_document("ram", state, lastError="read timed out"))


HEALTHY_CASES: list[tuple[str, str, list[PodView], dict[str, Any]]] = [
    ("True", "Healthy", [attached()], {}),
    ("False", "Degraded", [unhealthy("Degraded")], {}),
    ("False", "BreakerOpen", [unhealthy("BreakerOpen")], {}),
    ("Unknown", "NotReported", [unhealthy("Unknown")], {}),
    ("Unknown", "NoPods", [], {}),
    (
        "False",
        "PoolMissing",
        [not_attached(conditions=[{"type": "PoolMissing", "message": "no space"}])],
        {},
    ),
    (
        "False",
        "TierNotServed",
        [
            not_attached(
                conditions=[{"type": "TierNotServed", "message": "tier nvme: no directory"}]
            )
        ],
        {},
    ),
    (
        "False",
        "KeyMissing",
        [not_attached(conditions=[{"type": "KeyMissing", "message": "no Secret"}])],
        {},
    ),
    (
        "False",
        "KeyInvalid",
        [not_attached(conditions=[{"type": "KeyInvalid", "message": "no current key"}])],
        {},
    ),
    (
        "False",
        "CapacityExceedsDisk",
        [reporting([{"type": "CapacityExceedsDisk", "message": "tier nvme"}])],
        {},
    ),
    (
        "False",
        "MinFreeReached",
        [
            reporting(
                [
                    {"type": "CapacityExceedsDisk", "message": "tier nvme"},
                    {"type": "MinFreeReached", "message": "tier nvme"},
                ]
            )
        ],
        {},
    ),
    ("False", "StuckTerminating", [attached()], {"overdue": [OVERDUE]}),
]


@pytest.mark.parametrize(("expected", "reason", "pods", "found"), HEALTHY_CASES)
def test_tiers_healthy_reports_the_worst_state(
    expected: str, reason: str, pods: list[PodView], found: dict[str, Any]
) -> None:
    assert verdict(status(*pods, **found), "TiersHealthy") == (expected, reason)


def test_an_open_breaker_is_reported_with_pod_and_error() -> None:
    message = condition(status(unhealthy("BreakerOpen")), "TiersHealthy").message
    assert message == (
        "ram is BreakerOpen in chat-1: read timed out. "
        "Engines recompute what the tier cannot serve."
    )


def test_an_overdue_pod_is_reported_with_node_and_mount() -> None:
    assert OVERDUE.message == (
        "pod chat-1 on node node-a still exists after its grace period; "
        "it may hang in hostPath /mnt/nvme (tier nvme)"
    )


def test_an_overdue_pod_names_the_unhealthy_tier_if_it_reported_one() -> None:
    volumes = [
        {"name": "kvtier-tier-nvme", "hostPath": {"path": "/mnt/nvme"}},
        {"name": "kvtier-tier-nas", "persistentVolumeClaim": {"claimName": "chat-nas-1"}},
    ]
    pod = terminating(running(injected_pod(volumes=volumes)), NOON - 61)
    report = answered(
        status_document(tier_document("nvme"), tier_document("nas", "BreakerOpen"))
    ).report
    found = overdue_pod(decode_pod(pod), report, ["nvme", "nas"], NOON)
    assert found is not None
    assert found.mounts == ("claim chat-nas-1 (tier nas)",)


@pytest.mark.parametrize(
    ("metadata", "state", "cause"),
    [
        ({"finalizers": ["example.com/keep"]}, {}, "it has the finalizer example.com/keep"),
        ({}, {"reason": "NodeLost"}, "its node does not respond"),
        (
            {},
            {"conditions": [{"type": "DisruptionTarget", "reason": "DeletionByTaintManager"}]},
            "its node does not respond",
        ),
    ],
)
def test_a_lost_node_or_a_finalizer_takes_precedence_over_a_mount(
    metadata: dict[str, Any], state: dict[str, Any], cause: str
) -> None:
    pod = terminating(running(injected_pod()), NOON - 300)
    pod["metadata"] |= metadata
    pod["status"] |= state
    found = overdue_pod(decode_pod(pod), None, ["nvme"], NOON)
    assert found is not None
    assert found.message.endswith(f"still exists after its grace period; {cause}")


def test_a_pod_within_its_grace_period_or_without_tiers_is_not_overdue() -> None:
    for pod in (
        terminating(running(injected_pod()), NOON - 59),
        terminating(running(bare_pod()), NOON - 9999),
        running(injected_pod()),
    ):
        assert overdue_pod(decode_pod(pod), None, [], NOON) is None


def test_ready_is_true_when_pods_have_working_tiers() -> None:
    found = status(attached(), attached("chat-2"))
    assert verdict(found, "Ready") == ("True", "InForce")
    assert [each.type for each in found.conditions or ()] == [
        "Ready", "Accepted", "StorageReady", "Attached", "UpToDate", "Tuned",
        "EnginesCompatible", "TiersHealthy",
    ]  # fmt: skip


READY_CASES: list[tuple[str, str, list[PodView], dict[str, Any]]] = [
    ("True", "NoPods", [], {}),
    ("True", "Starting", [starting()], {}),
    ("True", "NotAttached", [not_attached()], {}),
    ("True", "SessionsRefused", [not_attached(counters=REJECTED_SESSIONS)], {}),
    ("True", "BreakerOpen", [unhealthy("BreakerOpen")], {}),
    ("True", "Outdated", [attached(structural_hash="older000")], {}),
    ("True", "Applying", [attached(generation=4)], {}),
    ("True", "Starting", [attached(), starting()], {}),
    ("True", "Unreachable", [attached(), unreachable()], {}),
    ("False", "PartlyApplied", [], {"plan": reconcile_input(not_written="ConfigMap chat-live")}),
    ("False", "PartlyApplied", [attached()], {"plan": reconcile_input(not_written="denied")}),
]


@pytest.mark.parametrize(("expected", "reason", "pods", "found"), READY_CASES)
def test_ready_gives_the_most_useful_reason(
    expected: str, reason: str, pods: list[PodView], found: dict[str, Any]
) -> None:
    assert verdict(status(*pods, **found), "Ready") == (expected, reason)


def test_a_policy_for_another_connector_is_ready_with_its_engines_although_they_do_not_report() -> (
    None
):
    pod = injected_pod()
    pod["spec"]["volumes"] = []
    found = status(view_of(running(pod)))
    assert verdict(found, "Ready") == ("True", "InForce")
    assert verdict(found, "Tuned") == verdict(found, "TiersHealthy") == ("Unknown", "NotReported")


def test_a_paused_rollout_gives_the_cause() -> None:
    found = status(
        attached(structural_hash="older000"),
        rollout=RolloutProgress(waiting=1, paused="StorageReady is False"),
    )
    assert "Restarts are paused: StorageReady is False." in condition(found, "UpToDate").message


def test_conditions_of_the_plan_take_precedence() -> None:
    wrong = ConditionUpdate("StorageReady", "False", "Pending", "claim chat-nas is not bound")
    found = status(not_attached(), plan=reconcile_input(conditions=(FINE[0], wrong)))
    assert verdict(found, "Ready") == ("False", "Pending")
    assert condition(found, "Ready").message == "StorageReady: claim chat-nas is not bound"


def test_pods_are_counted() -> None:
    pods = [
        attached("a"),
        attached("b", generation=4),
        attached("c", structural_hash="older000"),
        not_attached("d"),
        skipped_pod("e"),
        unreachable("f"),
        starting("g"),
    ]
    found = status(*pods).pods
    assert found is not None
    assert found.model_dump() == {
        "selected": 7, "attached": 3, "current": 2, "outdated": 1, "skipped": 1, "tuned": 2,
    }  # fmt: skip


def test_the_summary_has_pods_tiers_and_hits() -> None:
    of = policy(file_tier("nvme", "Node"))
    tiers = (tier_document("ram", hitTokens=300), tier_document("nvme", "BreakerOpen"))
    pod = view_of(running(injected_pod()), status_document(*tiers, promptTokens=1000))
    summary = status(pod, skipped_pod(), of=of).summary
    assert summary is not None
    assert (summary.pods, summary.tiers, summary.hit_tokens_percent) == (
        "1/2",
        "ram,nvme(BreakerOpen)",
        30,
    )


def test_at_most_sixteen_skipped_pods_are_listed_in_the_order_of_their_names() -> None:
    found = status(*(skipped_pod(f"chat-{index:02}") for index in range(20)))
    assert [pod.name for pod in found.skipped_pods or ()] == [
        f"chat-{index:02}" for index in range(16)
    ]
    assert found.pods is not None
    assert found.pods.skipped == 20


def test_a_condition_keeps_its_transition_time_while_its_status_stays() -> None:
    before = status(attached(), now=NOON)
    after = status(attached(), skipped_pod(), previous=before, now=NOON + 60)
    later = status(attached(), not_attached(), previous=after, now=NOON + 120)
    times = [condition(found, "Attached").last_transition_time for found in (before, after, later)]
    assert times == [at(NOON), at(NOON + 60), at(NOON + 60)]
    assert condition(later, "Tuned").last_transition_time == at(NOON)
    assert {each.observed_generation for each in later.conditions or ()} == {3}


def test_the_same_pods_give_the_same_status() -> None:
    before = status(attached(), skipped_pod(), not_attached())
    assert (
        status(attached(), skipped_pod(), not_attached(), previous=before, now=NOON + 999) == before
    )


def test_after_a_restart_of_the_operator_nothing_changes_before_the_pods_are_polled() -> None:
    tiers = tier_document("ram", usedBytes=1 << 29, hitTokens=1)
    pods = [
        view_of(running(injected_pod(name)), status_document(tiers, promptTokens=2))
        for name in ("a", "b")
    ]
    before = status(*pods)
    not_polled = [view_of(running(injected_pod(name))) for name in ("a", "b")]
    assert status(*not_polled, previous=before, now=NOON + 60) == before
    half = [pods[0], not_polled[1]]
    assert status(*half, previous=before, now=NOON + 60) == before


def test_a_first_status_does_not_wait_for_reports() -> None:
    found = status(view_of(running(injected_pod())))
    assert verdict(found, "Attached") == ("False", "Starting")


def test_messages_are_bounded() -> None:
    pods = [skipped_pod(f"chat-{index}-{'x' * 200}") for index in range(50)]
    for each in status(*(replace(pod, message="y" * 5000) for pod in pods)).conditions or ():
        assert len(each.message) <= 1024


@pytest.mark.parametrize(
    ("number", "verb", "expected"),
    [
        (1, "", "1 pod"),
        (2, "", "2 pods"),
        (1, "have", "1 pod has"),
        (0, "have", "0 pods have"),
        (1, "wait", "1 pod waits"),
    ],
)
def test_plural_agrees_with_the_number(number: int, verb: str, expected: str) -> None:
    assert plural(number, "pod", verb) == expected


def test_a_single_conflicting_pod_is_reported_in_the_singular() -> None:
    found = status(plan=reconcile_input(governed_by_others=["older"]))
    assert (
        condition(found, "Attached").message
        == "1 pod that the selector matches is governed by an older policy: older."
    )
