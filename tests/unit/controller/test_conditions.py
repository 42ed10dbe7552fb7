"""What a policy's conditions say: every reason, and what Ready makes of them."""

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
from tests.unit.controller.world import (
    FINE,
    answered,
    condition,
    facts,
    looked_at,
    status,
    verdict,
)

from kvtier_operator.api.conditions import Reason
from kvtier_operator.api.status import PolicyStatus
from kvtier_operator.controller.injection_breaker.detectors import InjectionFailure
from kvtier_operator.controller.objects import Owner, plural
from kvtier_operator.controller.pods.pod_view import PodView
from kvtier_operator.controller.pods.reports import LastReport
from kvtier_operator.controller.pods.terminating import Overdue, overdue
from kvtier_operator.controller.rollout import Rollout
from kvtier_operator.controller.status.conditions import ConditionUpdate

SILENT = LastReport(failures=9, why="no answer in time")
OWNER = Owner("apps/v1", "ReplicaSet", "chat-5d", "uid-of-chat-5d")
SUSPENDED = {
    "kind": "ReplicaSet",
    "name": "chat-5d",
    "uid": "u",
    "reason": "ImageNotPulled",
    "until": at(NOON + 600),
}


def attached(name: str = "chat-1", *tiers: Any, generation: int = 5, **more: Any) -> PodView:
    return looked_at(
        running(injected_pod(name, **more)), status_document(*tiers, generation=generation)
    )


def nobody(name: str = "chat-2", **more: Any) -> PodView:
    return looked_at(running(injected_pod(name)), status_document(sessions="none", **more))


def starting(name: str = "chat-3") -> PodView:
    return looked_at(scheduled(injected_pod(name)))


def left(name: str = "chat-4", reason: str = "AlreadyConfigured") -> PodView:
    return looked_at(skipped(bare_pod(name), reason, "the command sets --kv-transfer-config"))


def silent(name: str = "chat-5") -> PodView:
    return looked_at(running(injected_pod(name)), SILENT)


def group(name: str, **more: Any) -> PodView:
    return attached(name, **{"leaderworkerset.sigs.k8s.io/group-key": "g"}, **more)


def stuck() -> Overdue:
    pod = terminating(
        running(
            injected_pod(volumes=[{"name": "kvtier-tier-nvme", "hostPath": {"path": "/mnt/nvme"}}])
        ),
        NOON - 300,
    )
    found = overdue(pod, None, ["nvme"], NOON)
    if found is None:
        raise AssertionError("a pod that should have gone five minutes ago is not overdue")
    return found


STUCK = stuck()

ATTACHED_CASES: list[tuple[str, str, list[PodView], dict[str, Any]]] = [
    ("True", "Attached", [attached()], {}),
    ("True", "Starting", [attached(), starting()], {}),
    ("False", "Starting", [starting()], {}),
    ("Unknown", "NoPods", [], {}),
    ("False", "NotAttached", [attached(), nobody()], {}),
    ("False", "AlreadyConfigured", [attached(), left()], {}),
    ("False", "Missed", [attached(), looked_at(bare_pod("chat-9"))], {}),
    ("Unknown", "Unreachable", [attached(), silent()], {}),
    ("False", "NotAttached", [silent(), nobody(), left()], {}),
    ("False", "ImageNotPulled", [attached()], {"suspended": [SUSPENDED]}),
    (
        "False",
        "Refused",
        [attached()],
        {"troubles": [InjectionFailure(OWNER, Reason.REFUSED, "a pod was refused")]},
    ),
]


@pytest.mark.parametrize(("expected", "reason", "pods", "found"), ATTACHED_CASES)
def test_attached_names_the_gravest(
    expected: str, reason: str, pods: list[PodView], found: dict[str, Any]
) -> None:
    if "suspended" in found:
        found = {
            "suspended": PolicyStatus.model_validate(
                {"suspendedOwners": found["suspended"]}
            ).suspended_owners
        }
    assert verdict(status(*pods, **found), "Attached") == (expected, reason)


def test_the_message_of_attached_counts_and_names() -> None:
    found = condition(status(attached("chat-1"), nobody("chat-2"), nobody("chat-6")), "Attached")
    assert found.message.startswith(
        "1 of 3 pods attached; chat-2, chat-6: tierd serves and vllm is ready, but"
    )


def test_where_the_engines_container_mounts_the_tiers_attached_says_what_does_not_hold() -> None:
    nvme = file_tier("nvme", "Node")
    words = "a mount that hangs can keep it from ending"
    for of, said in (
        (policy(nvme, engine={"daemon": "Engine"}), True),
        (policy(nvme, engine={"connector": "Offloading"}), True),
        (policy(engine={"daemon": "Engine"}), False),
        (policy(nvme), False),
    ):
        assert (words in condition(status(attached(), of=of), "Attached").message) is said


def test_a_suspended_owner_is_named_with_the_time_until_which() -> None:
    owners = PolicyStatus.model_validate({"suspendedOwners": [SUSPENDED]}).suspended_owners
    message = condition(status(attached(), suspended=owners), "Attached").message
    assert f"ReplicaSet chat-5d until {at(NOON + 600)}" in message


def test_a_policy_all_of_whose_pods_belong_to_an_older_one_says_so() -> None:
    planned = facts(conflicted=[(bare_pod(), "older"), (bare_pod("chat-2"), "older")])
    found = status(planned=planned)
    assert verdict(found, "Attached") == verdict(found, "Ready") == ("False", "Conflicted")
    assert (
        "2 pods that the selector matches belong to an older policy: older"
        in condition(found, "Attached").message
    )


def test_a_policy_some_of_whose_pods_belong_to_an_older_one_is_ready_and_says_so() -> None:
    found = status(attached(), planned=facts(conflicted=[(bare_pod("chat-2"), "older")]))
    assert verdict(found, "Ready") == ("True", "Conflicted")


UP_TO_DATE_CASES: list[tuple[str, str, list[PodView], dict[str, Any]]] = [
    ("True", "Current", [attached()], {}),
    ("Unknown", "NoPods", [left()], {}),
    ("False", "Outdated", [attached(), attached("chat-2", structural_hash="older000")], {}),
    ("False", "Outdated", [attached("chat-2", policy_uid="a predecessor")], {}),
    ("False", "MixedGroup", [group("chat-1"), group("chat-2", structural_hash="older000")], {}),
    (
        "False",
        "RollingOut",
        [attached(structural_hash="older000")],
        {"rollout": Rollout(under_way="Deployment chat: 0 of 1 replicas are replaced")},
    ),
    (
        "False",
        "RestartUnsupported",
        [attached(structural_hash="older000")],
        {"rollout": Rollout(unsupported=(("Job chat", "a Job is not restarted by KVTier"),))},
    ),
    (
        "False",
        "Outdated",
        [attached(structural_hash="older000")],
        {"rollout": Rollout(tried=("Deployment chat",))},
    ),
]


@pytest.mark.parametrize(("expected", "reason", "pods", "found"), UP_TO_DATE_CASES)
def test_up_to_date_says_what_is_old_and_what_is_done_about_it(
    expected: str, reason: str, pods: list[PodView], found: dict[str, Any]
) -> None:
    assert verdict(status(*pods, **found), "UpToDate") == (expected, reason)


def test_a_group_of_which_some_have_tiers_and_some_have_none_is_mixed() -> None:
    without = looked_at(
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
    ("Unknown", "NoPods", [nobody()]),
    (
        "False",
        "LiveValuesRefused",
        [looked_at(running(injected_pod()), status_document(liveRefusals=["ram.loadWeight: 0"]))],
    ),
]


@pytest.mark.parametrize(("expected", "reason", "pods"), TUNED_CASES)
def test_tuned_compares_the_generation_that_pods_report(
    expected: str, reason: str, pods: list[PodView]
) -> None:
    assert verdict(status(*pods), "Tuned") == (expected, reason)


REFUSING = [{"name": "sessions_refused", "value": 3}]
COMPATIBLE_CASES = [
    ("True", "Compatible", [attached()]),
    ("Unknown", "NoPods", []),
    ("Unknown", "NotReported", [starting()]),
    ("False", "SessionsRefused", [nobody(counters=REFUSING)]),
    (
        "False",
        "EngineUnsupported",
        [nobody(conditions=[{"type": "EngineOff", "message": "group 3 has block size 7"}])],
    ),
]


@pytest.mark.parametrize(("expected", "reason", "pods"), COMPATIBLE_CASES)
def test_engines_compatible_says_what_was_refused(
    expected: str, reason: str, pods: list[PodView]
) -> None:
    assert verdict(status(*pods), "EnginesCompatible") == (expected, reason)


def test_engines_compatible_names_the_engines() -> None:
    document = status_document()
    for session, version in zip(document["sessions"], ("vllm 0.32.0", ""), strict=True):
        session["engineVersion"] = version
    found = status(looked_at(running(injected_pod()), document))
    message = condition(found, "EnginesCompatible").message
    assert message == "Every engine that attached was accepted: vllm 0.32.0."


def ill(word: str) -> PodView:
    return attached("chat-1", tier_document("ram", word, lastError="read timed out"))


HEALTHY_CASES: list[tuple[str, str, list[PodView], dict[str, Any]]] = [
    ("True", "Healthy", [attached()], {}),
    ("False", "Degraded", [ill("Degraded")], {}),
    ("False", "BreakerOpen", [ill("BreakerOpen")], {}),
    ("Unknown", "NotReported", [ill("Unknown")], {}),
    ("Unknown", "NoPods", [], {}),
    (
        "False",
        "PoolMissing",
        [nobody(conditions=[{"type": "PoolMissing", "message": "no space"}])],
        {},
    ),
    (
        "False",
        "TierNotServed",
        [nobody(conditions=[{"type": "TierNotServed", "message": "tier nvme: no directory"}])],
        {},
    ),
    ("False", "StuckTerminating", [attached()], {"overdue": [STUCK]}),
]


@pytest.mark.parametrize(("expected", "reason", "pods", "found"), HEALTHY_CASES)
def test_tiers_healthy_takes_the_worst(
    expected: str, reason: str, pods: list[PodView], found: dict[str, Any]
) -> None:
    assert verdict(status(*pods, **found), "TiersHealthy") == (expected, reason)


def test_a_breaker_that_is_open_is_named_with_pod_and_error() -> None:
    message = condition(status(ill("BreakerOpen")), "TiersHealthy").message
    assert (
        message
        == "ram is BreakerOpen in chat-1: read timed out. Its hits are recomputed meanwhile."
    )


def test_a_pod_that_does_not_end_is_reported_with_node_and_mount() -> None:
    assert STUCK.message == (
        "pod chat-1 on node node-a should be gone and is not; it may hang in hostPath /mnt/nvme (tier nvme)"
    )


def test_a_pod_that_does_not_end_names_the_ill_tier_if_it_told_of_one() -> None:
    volumes = [
        {"name": "kvtier-tier-nvme", "hostPath": {"path": "/mnt/nvme"}},
        {"name": "kvtier-tier-nas", "persistentVolumeClaim": {"claimName": "chat-nas-1"}},
    ]
    pod = terminating(running(injected_pod(volumes=volumes)), NOON - 61)
    said = answered(
        status_document(tier_document("nvme"), tier_document("nas", "BreakerOpen"))
    ).report
    found = overdue(pod, said, ["nvme", "nas"], NOON)
    assert found is not None
    assert found.mounts == ("claim chat-nas-1 (tier nas)",)


@pytest.mark.parametrize(
    ("about", "state", "why"),
    [
        ({"finalizers": ["example.com/keep"]}, {}, "it has the finalizer example.com/keep"),
        ({}, {"reason": "NodeLost"}, "its node does not answer"),
        (
            {},
            {"conditions": [{"type": "DisruptionTarget", "reason": "DeletionByTaintManager"}]},
            "its node does not answer",
        ),
    ],
)
def test_a_lost_node_and_a_finalizer_are_not_blamed_on_a_mount(
    about: dict[str, Any], state: dict[str, Any], why: str
) -> None:
    pod = terminating(running(injected_pod()), NOON - 300)
    pod["metadata"] |= about
    pod["status"] |= state
    found = overdue(pod, None, ["nvme"], NOON)
    assert found is not None
    assert found.message.endswith(f"should be gone and is not; {why}")


def test_a_pod_that_ends_within_its_time_or_has_no_tiers_is_not_overdue() -> None:
    assert overdue(terminating(running(injected_pod()), NOON - 59), None, [], NOON) is None
    assert overdue(terminating(running(bare_pod()), NOON - 9999), None, [], NOON) is None
    assert overdue(running(injected_pod()), None, [], NOON) is None


def test_ready_is_true_when_pods_have_working_tiers() -> None:
    found = status(attached(), attached("chat-2"))
    assert verdict(found, "Ready") == ("True", "InForce")
    assert [each.type for each in found.conditions or ()] == [
        "Ready", "Accepted", "StorageReady", "Attached", "UpToDate", "Tuned", "EnginesCompatible", "TiersHealthy",
    ]  # fmt: skip


READY_CASES: list[tuple[str, str, list[PodView], dict[str, Any]]] = [
    ("Unknown", "NoPods", [], {}),
    ("False", "Starting", [starting()], {}),
    ("False", "NotAttached", [nobody()], {}),
    ("False", "SessionsRefused", [nobody(counters=REFUSING)], {}),
    ("False", "BreakerOpen", [ill("BreakerOpen")], {}),
    ("True", "Outdated", [attached(structural_hash="older000")], {}),
    ("True", "Applying", [attached(generation=4)], {}),
    ("True", "Starting", [attached(), starting()], {}),
    ("Unknown", "Unreachable", [attached(), silent()], {}),
]


@pytest.mark.parametrize(("expected", "reason", "pods", "found"), READY_CASES)
def test_ready_gives_the_most_useful_reason(
    expected: str, reason: str, pods: list[PodView], found: dict[str, Any]
) -> None:
    assert verdict(status(*pods, **found), "Ready") == (expected, reason)


def test_a_policy_for_another_connector_is_ready_with_its_engines_and_says_what_it_does_not_know() -> (
    None
):
    pod = injected_pod()
    pod["spec"]["volumes"] = []
    found = status(looked_at(running(pod)))
    assert verdict(found, "Ready") == ("True", "InForce")
    assert verdict(found, "Tuned") == verdict(found, "TiersHealthy") == ("Unknown", "NotReported")


def test_a_rollout_that_is_held_says_why() -> None:
    found = status(
        attached(structural_hash="older000"),
        rollout=Rollout(remaining=1, held="StorageReady is False"),
    )
    assert (
        "Nothing is restarted while StorageReady is False" in condition(found, "UpToDate").message
    )


def test_what_the_plan_found_wrong_comes_first() -> None:
    wrong = ConditionUpdate("StorageReady", "False", "Pending", "claim chat-nas is not bound")
    found = status(nobody(), planned=facts(findings=(FINE[0], wrong)))
    assert verdict(found, "Ready") == ("False", "Pending")
    assert condition(found, "Ready").message == "StorageReady: claim chat-nas is not bound"


def test_pods_are_counted() -> None:
    pods = [
        attached("a"),
        attached("b", generation=4),
        attached("c", structural_hash="older000"),
        nobody("d"),
        left("e"),
        silent("f"),
        starting("g"),
    ]
    found = status(*pods).pods
    assert found is not None
    assert found.model_dump() == {
        "selected": 7, "attached": 3, "current": 2, "outdated": 1, "skipped": 1, "tuned": 2,
    }  # fmt: skip


def test_the_summary_answers_at_a_glance() -> None:
    of = policy(file_tier("nvme", "Node"))
    tiers = (tier_document("ram", hitTokens=300), tier_document("nvme", "BreakerOpen"))
    pod = looked_at(running(injected_pod()), status_document(*tiers, promptTokens=1000))
    summary = status(pod, left(), of=of).summary
    assert summary is not None
    assert (summary.pods, summary.tiers, summary.hit_tokens_percent) == (
        "1/2",
        "ram,nvme(BreakerOpen)",
        30,
    )


def test_at_most_sixteen_skipped_pods_are_listed_in_the_order_of_their_names() -> None:
    found = status(*(left(f"chat-{index:02}") for index in range(20)))
    assert [pod.name for pod in found.skipped_pods or ()] == [
        f"chat-{index:02}" for index in range(16)
    ]
    assert found.pods is not None
    assert found.pods.skipped == 20


def test_a_condition_keeps_its_transition_time_while_its_status_stays() -> None:
    before = status(attached(), now=NOON)
    after = status(attached(), left(), previous=before, now=NOON + 60)
    later = status(attached(), nobody(), previous=after, now=NOON + 120)
    times = [condition(found, "Attached").last_transition_time for found in (before, after, later)]
    assert times == [at(NOON), at(NOON + 60), at(NOON + 60)]
    assert condition(later, "Tuned").last_transition_time == at(NOON)
    assert {each.observed_generation for each in later.conditions or ()} == {3}


def test_the_same_pods_give_the_same_status() -> None:
    before = status(attached(), left(), nobody())
    assert status(attached(), left(), nobody(), previous=before, now=NOON + 999) == before


def test_after_a_restart_of_the_operator_nothing_changes_before_the_pods_were_asked() -> None:
    tiers = tier_document("ram", usedBytes=1 << 29, hitTokens=1)
    pods = [
        looked_at(running(injected_pod(name)), status_document(tiers, promptTokens=2))
        for name in ("a", "b")
    ]
    before = status(*pods)
    unasked = [looked_at(running(injected_pod(name))) for name in ("a", "b")]
    assert status(*unasked, previous=before, now=NOON + 60) == before
    half = [pods[0], unasked[1]]
    assert status(*half, previous=before, now=NOON + 60) == before


def test_a_first_status_waits_for_nobody() -> None:
    found = status(looked_at(running(injected_pod())))
    assert verdict(found, "Attached") == ("False", "Starting")


def test_messages_are_bounded() -> None:
    pods = [left(f"chat-{index}-{'x' * 200}") for index in range(50)]
    for each in status(*(replace(pod, message="y" * 5000) for pod in pods)).conditions or ():
        assert len(each.message) <= 1024


@pytest.mark.parametrize(
    ("number", "verb", "words"),
    [
        (1, "", "1 pod"),
        (2, "", "2 pods"),
        (1, "have", "1 pod has"),
        (0, "have", "0 pods have"),
        (1, "wait", "1 pod waits"),
    ],
)
def test_one_is_spoken_of_as_one(number: int, verb: str, words: str) -> None:
    assert plural(number, "pod", verb) == words


def test_one_pod_of_an_older_policy_belongs_to_it() -> None:
    found = status(planned=facts(conflicted=[(bare_pod(), "older")]))
    assert (
        condition(found, "Attached").message
        == "1 pod that the selector matches belongs to an older policy: older."
    )
