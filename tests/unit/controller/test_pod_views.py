"""One pod: attached, starting, left alone, or in trouble, and why."""

from __future__ import annotations

import pytest
from tests.support.pods import (
    NOON,
    at,
    bare_pod,
    injected_pod,
    policy,
    running,
    scheduled,
    skipped,
    state,
    status_document,
    with_state,
)
from tests.unit.controller.world import answered, looked_at

from kvtier_operator.controller.pods.pod_view import PodState
from kvtier_operator.controller.pods.reports import LastReport

INIT = running(injected_pod(), ready_since=None)


def test_a_pod_whose_engine_has_its_sessions_is_attached() -> None:
    found = looked_at(running(injected_pod()), status_document())
    assert (found.state, found.injected, found.structural_hash) == (
        PodState.ATTACHED,
        True,
        "0123abcd",
    )


def test_a_pod_that_was_injected_but_whose_engine_never_came_is_told_apart() -> None:
    found = looked_at(running(injected_pod()), status_document(sessions="none"))
    assert found.state is PodState.NOT_ATTACHED
    assert "no engine process has attached" in found.message


def test_an_engine_of_which_only_a_part_came_is_not_attached() -> None:
    found = looked_at(running(injected_pod()), status_document(sessions="unready"))
    assert found.state is PodState.NOT_ATTACHED
    assert "not all of the engine's processes" in found.message


def test_sessions_that_were_refused_are_the_reason() -> None:
    refused = status_document(sessions="none", counters=[{"name": "sessions_refused", "value": 4}])
    assert (
        "tierd refused the engine's sessions" in looked_at(running(injected_pod()), refused).message
    )


def test_an_engine_that_is_ready_gets_the_start_timeout_to_attach() -> None:
    nobody = status_document(sessions="none")
    for ready_since, expected in (
        (NOON - 119, PodState.STARTING),
        (NOON - 121, PodState.NOT_ATTACHED),
    ):
        assert looked_at(running(injected_pod(), ready_since=ready_since), nobody).state is expected
    patient = policy(attach={"startTimeoutSeconds": 600})
    assert (
        looked_at(running(injected_pod(), ready_since=NOON - 121), nobody, patient).state
        is PodState.STARTING
    )


def test_an_engine_that_loads_its_model_for_an_hour_is_starting() -> None:
    assert looked_at(INIT, status_document(sessions="none")).state is PodState.STARTING
    assert looked_at(INIT, LastReport(failures=9, why="no connection")).state is PodState.STARTING


def test_a_pod_that_has_not_been_asked_is_none_of_these() -> None:
    assert looked_at(running(injected_pod())).state is PodState.UNASKED
    assert looked_at(scheduled(injected_pod())).state is PodState.STARTING


def test_a_pod_that_does_not_answer_is_unreachable_never_not_attached() -> None:
    silent = LastReport(failures=3, why="no answer in time")
    found = looked_at(running(injected_pod()), silent)
    assert (found.state, found.message) == (PodState.UNREACHABLE, "no answer in time")


def test_one_missed_answer_changes_nothing_and_the_second_does() -> None:
    report = answered().report
    pod = running(injected_pod())
    assert looked_at(pod, LastReport(report, 1, "no answer in time")).state is PodState.ATTACHED
    assert looked_at(pod, LastReport(report, 2, "no answer in time")).state is PodState.UNREACHABLE


@pytest.mark.parametrize(
    ("entry", "crashes"),
    [
        ({"restarts": 2, "waiting": {"reason": "CrashLoopBackOff"}, "last": {"exitCode": 1}}, True),
        (
            {
                "restarts": 3,
                "running": {"startedAt": at()},
                "last": {"exitCode": 1, "finishedAt": at(NOON - 30)},
            },
            True,
        ),
        (
            {
                "restarts": 3,
                "running": {"startedAt": at()},
                "last": {"exitCode": 1, "finishedAt": at(NOON - 900)},
            },
            False,
        ),
        (
            {
                "restarts": 1,
                "running": {"startedAt": at()},
                "last": {"exitCode": 1, "finishedAt": at(NOON - 30)},
            },
            False,
        ),
        (
            {"restarts": 9, "running": {"startedAt": at()}, "ready": True, "last": {"exitCode": 1}},
            False,
        ),
    ],
)
def test_an_engine_that_ends_again_and_again_is_said_to_crash(
    entry: dict[str, object], crashes: bool
) -> None:
    found = looked_at(with_state(INIT, "vllm", **entry), status_document(sessions="none"))
    assert (found.state is PodState.ENGINE_CRASHED) is crashes
    assert ("exit code 1" in found.message) is crashes


def test_the_words_about_a_crash_stay_while_it_goes_on() -> None:
    waiting = with_state(
        INIT,
        "vllm",
        restarts=2,
        waiting={"reason": "CrashLoopBackOff"},
        last={"exitCode": 137, "reason": "OOMKilled"},
    )
    again = with_state(
        INIT,
        "vllm",
        restarts=7,
        running={"startedAt": at()},
        last={"exitCode": 137, "reason": "OOMKilled", "finishedAt": at()},
    )
    assert looked_at(waiting).message == looked_at(again).message
    assert "137 (OOMKilled)" in looked_at(again).message


def test_a_sidecar_that_does_not_run_beside_a_serving_engine_is_named() -> None:
    pod = running(injected_pod())
    pod = with_state(pod, "kvtier-tierd", restarts=4, waiting={"reason": "CrashLoopBackOff"})
    found = looked_at(pod, LastReport(failures=5, why="no connection"))
    assert found.state is PodState.TIERD_FAILED
    assert "the engine serves without tiers" in found.message


def test_what_the_webhook_left_alone_says_why() -> None:
    found = looked_at(
        skipped(bare_pod(), "AlreadyConfigured", "the command sets --kv-transfer-config")
    )
    assert (found.state, found.reason) == (PodState.SKIPPED, "AlreadyConfigured")
    assert "--kv-transfer-config" in found.message


@pytest.mark.parametrize(
    "annotation", ["", "x", "[]", '{"reason": "<b>"}', "[" * 9000, '{"reason": 7}']
)
def test_an_annotation_that_somebody_else_wrote_is_data(annotation: str) -> None:
    pod = bare_pod()
    pod["metadata"]["annotations"] = {"kvtier.io/skipped": annotation}
    found = looked_at(pod)
    assert (found.state, found.reason) == (PodState.SKIPPED, "Skipped")


def test_a_pod_that_nobody_asked_the_webhook_about_is_missed_and_the_message_says_why() -> None:
    young, old = bare_pod(created=NOON - 60), bare_pod(created=NOON - 99_999)
    assert looked_at(old).reason == looked_at(young).reason == "Missed"
    assert "older than the policy" in looked_at(old).message
    assert (
        "is not labelled kvtier.io/inject=enabled" in looked_at(young, namespace_asks=False).message
    )
    assert "the webhook was not asked" in looked_at(young, namespace_asks=True).message


def test_pods_of_a_daemon_set_and_static_pods_are_unsupported_not_missed() -> None:
    static = bare_pod()
    static["metadata"]["annotations"] = {"kubernetes.io/config.mirror": "x"}
    for pod in (static, bare_pod(owner="DaemonSet engines")):
        assert looked_at(pod).reason == "UnsupportedOwner"


def test_in_mode_config_map_only_pods_that_mount_the_documents_count() -> None:
    by_hand = policy(attach={"mode": "ConfigMapOnly"})
    pod = running(bare_pod())
    assert looked_at(pod, of=by_hand).reason == "Missed"
    pod["spec"]["volumes"] = [
        {"name": "topology", "projected": {"sources": [{"configMap": {"name": "chat-structural"}}]}}
    ]
    found = looked_at(pod, status_document(contentHash="feedbeef"), by_hand)
    assert (found.state, found.structural_hash) == (PodState.ATTACHED, "feedbeef")


def test_tierds_word_about_its_structure_beats_an_annotation_that_was_changed_since() -> None:
    found = looked_at(
        running(injected_pod(structural_hash="edited00")), status_document(contentHash="0123abcd")
    )
    assert found.structural_hash == "0123abcd"


def test_a_pod_of_a_predecessor_of_the_policy_is_not_of_this_policy() -> None:
    assert looked_at(running(injected_pod())).same_policy
    assert not looked_at(running(injected_pod(policy_uid="an older one"))).same_policy


def test_the_engine_is_the_named_container_else_the_one_with_the_shared_volume() -> None:
    pod = injected_pod()
    pod["spec"]["containers"].insert(0, {"name": "istio-proxy", "image": "istio"})
    pod = running(pod, ready_since=None)
    pod["status"]["containerStatuses"] = [
        state("istio-proxy", ready=True, running={"startedAt": at(NOON - 999)}),
        state("vllm", running={"startedAt": at(NOON - 999)}),
    ]
    nobody = status_document(sessions="none")
    assert looked_at(pod, nobody).state is PodState.STARTING
    assert (
        looked_at(pod, nobody, policy(engine={"containerName": "istio-proxy"})).state
        is PodState.NOT_ATTACHED
    )


def test_with_another_connector_nobody_can_be_asked_and_a_ready_engine_counts() -> None:
    pod = injected_pod()
    pod["spec"]["initContainers"].pop()
    pod["spec"]["volumes"] = [{"name": "kvtier-payload", "emptyDir": {}}]
    pod["spec"]["containers"][0]["volumeMounts"] = [
        {"name": "kvtier-payload", "mountPath": "/opt/kvtier/payload"}
    ]
    found = looked_at(running(pod))
    assert (found.state, found.silent) == (PodState.ATTACHED, True)
    assert looked_at(running(pod, ready_since=None)).state is PodState.STARTING
    assert not looked_at(running(injected_pod())).silent
