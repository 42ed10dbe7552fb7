"""The state of one pod: attached, starting, skipped or failed, and why."""

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
from tests.unit.controller.builders import answered, view_of

from kvtier_operator.controller.pods.pod_view import PodState
from kvtier_operator.controller.pods.reports import LastReport

INIT = running(injected_pod(), ready_since=None)


def test_a_pod_whose_engine_has_its_sessions_is_attached() -> None:
    found = view_of(running(injected_pod()), status_document())
    assert (found.state, found.has_tiers, found.structural_hash) == (
        PodState.ATTACHED,
        True,
        "0123abcd",
    )


def test_an_injected_pod_whose_engine_never_attached_is_not_attached() -> None:
    found = view_of(running(injected_pod()), status_document(sessions="none"))
    assert found.state is PodState.NOT_ATTACHED
    assert "no engine process has attached" in found.message


def test_an_engine_with_missing_ranks_is_not_attached() -> None:
    found = view_of(running(injected_pod()), status_document(sessions="unready"))
    assert found.state is PodState.NOT_ATTACHED
    assert "some of the engine's processes have not attached" in found.message


def test_rejected_sessions_are_the_reason() -> None:
    rejected = status_document(sessions="none", counters=[{"name": "sessions_refused", "value": 4}])
    assert (
        "tierd rejected the engine's sessions" in view_of(running(injected_pod()), rejected).message
    )


def test_an_engine_that_is_ready_gets_the_start_timeout_to_attach() -> None:
    no_sessions = status_document(sessions="none")
    for ready_since, expected in (
        (NOON - 119, PodState.STARTING),
        (NOON - 121, PodState.NOT_ATTACHED),
    ):
        assert (
            view_of(running(injected_pod(), ready_since=ready_since), no_sessions).state is expected
        )
    patient = policy(attach={"startTimeoutSeconds": 600})
    assert (
        view_of(running(injected_pod(), ready_since=NOON - 121), no_sessions, patient).state
        is PodState.STARTING
    )


def test_an_engine_that_loads_its_model_for_an_hour_is_starting() -> None:
    assert view_of(INIT, status_document(sessions="none")).state is PodState.STARTING
    assert (
        view_of(INIT, LastReport(failures=9, error="connection failed")).state is PodState.STARTING
    )


def test_a_pod_that_has_not_been_polled_has_a_state_of_its_own() -> None:
    assert view_of(running(injected_pod())).state is PodState.NOT_POLLED
    assert view_of(scheduled(injected_pod())).state is PodState.STARTING


def test_a_pod_that_does_not_answer_is_unreachable_never_not_attached() -> None:
    unreachable = LastReport(failures=3, error="timeout")
    found = view_of(running(injected_pod()), unreachable)
    assert (found.state, found.message) == (PodState.UNREACHABLE, "timeout")


def test_an_attached_pod_is_unreachable_after_its_second_failed_poll() -> None:
    report = answered().report
    pod = running(injected_pod())
    assert view_of(pod, LastReport(report, 1, "timeout")).state is PodState.ATTACHED
    assert view_of(pod, LastReport(report, 2, "timeout")).state is PodState.UNREACHABLE


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
def test_an_engine_that_exits_repeatedly_is_crashed(
    entry: dict[str, object], crashes: bool
) -> None:
    found = view_of(with_state(INIT, "vllm", **entry), status_document(sessions="none"))
    assert (found.state is PodState.ENGINE_CRASHED) is crashes
    assert ("code 1" in found.message) is crashes


def test_the_message_about_a_crash_is_the_same_in_each_of_its_phases() -> None:
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
    assert view_of(waiting).message == view_of(again).message
    assert "137 (OOMKilled)" in view_of(again).message


def test_a_failed_sidecar_beside_a_serving_engine_is_reported() -> None:
    pod = running(injected_pod())
    pod = with_state(pod, "kvtier-tierd", restarts=4, waiting={"reason": "CrashLoopBackOff"})
    found = view_of(pod, LastReport(failures=5, error="connection failed"))
    assert found.state is PodState.TIERD_FAILED
    assert "the engine serves without tiers" in found.message


def test_a_skipped_pod_has_the_webhooks_reason() -> None:
    found = view_of(
        skipped(bare_pod(), "AlreadyConfigured", "the command sets --kv-transfer-config")
    )
    assert (found.state, found.reason) == (PodState.SKIPPED, "AlreadyConfigured")
    assert "--kv-transfer-config" in found.message


@pytest.mark.parametrize(
    "annotation", ["", "x", "[]", '{"reason": "<b>"}', "[" * 9000, '{"reason": 7}']
)
def test_an_invalid_annotation_reads_as_skipped(annotation: str) -> None:
    pod = bare_pod()
    pod["metadata"]["annotations"] = {"kvtier.io/skipped": annotation}
    found = view_of(pod)
    assert (found.state, found.reason) == (PodState.SKIPPED, "Skipped")


def test_a_pod_without_a_webhook_call_is_missed_and_the_message_gives_the_cause() -> None:
    young, old = bare_pod(created=NOON - 60), bare_pod(created=NOON - 99_999)
    assert view_of(old).reason == view_of(young).reason == "Missed"
    assert "older than the policy" in view_of(old).message
    assert (
        "do not match the webhook's namespaceSelector"
        in view_of(young, injection_enabled=False).message
    )
    assert "the webhook was not called" in view_of(young, injection_enabled=True).message


def test_pods_of_a_daemon_set_and_static_pods_are_unsupported_not_missed() -> None:
    static = bare_pod()
    static["metadata"]["annotations"] = {"kubernetes.io/config.mirror": "x"}
    for pod in (static, bare_pod(owner="DaemonSet engines")):
        assert view_of(pod).reason == "UnsupportedOwner"


def test_with_config_map_only_pods_that_mount_a_config_map_of_the_policy_count() -> None:
    by_hand = policy(attach={"mode": "ConfigMapOnly"})
    pod = running(bare_pod())
    assert view_of(pod, of=by_hand).reason == "Missed"
    pod["spec"]["volumes"] = [
        {"name": "topology", "projected": {"sources": [{"configMap": {"name": "chat-structural"}}]}}
    ]
    found = view_of(pod, status_document(contentHash="feedbeef"), by_hand)
    assert (found.state, found.structural_hash) == (PodState.ATTACHED, "feedbeef")


def test_the_structure_that_tierd_reports_takes_precedence_over_the_annotation() -> None:
    found = view_of(
        running(injected_pod(structural_hash="edited00")), status_document(contentHash="0123abcd")
    )
    assert found.structural_hash == "0123abcd"


def test_a_pod_of_a_predecessor_of_the_policy_is_not_of_this_policy() -> None:
    assert view_of(running(injected_pod())).same_policy
    assert not view_of(running(injected_pod(policy_uid="an older one"))).same_policy


def test_the_engine_is_the_named_container_else_the_one_with_the_shared_volume() -> None:
    pod = injected_pod()
    pod["spec"]["containers"].insert(0, {"name": "istio-proxy", "image": "istio"})
    pod = running(pod, ready_since=None)
    pod["status"]["containerStatuses"] = [
        state("istio-proxy", ready=True, running={"startedAt": at(NOON - 999)}),
        state("vllm", running={"startedAt": at(NOON - 999)}),
    ]
    no_sessions = status_document(sessions="none")
    assert view_of(pod, no_sessions).state is PodState.STARTING
    assert (
        view_of(pod, no_sessions, policy(engine={"containerName": "istio-proxy"})).state
        is PodState.NOT_ATTACHED
    )


def test_with_another_connector_a_ready_engine_counts_as_attached() -> None:
    pod = injected_pod()
    pod["spec"]["initContainers"].pop()
    pod["spec"]["volumes"] = [{"name": "kvtier-payload", "emptyDir": {}}]
    pod["spec"]["containers"][0]["volumeMounts"] = [
        {"name": "kvtier-payload", "mountPath": "/opt/kvtier/payload"}
    ]
    found = view_of(running(pod))
    assert (found.state, found.cannot_report) == (PodState.ATTACHED, True)
    assert view_of(running(pod, ready_since=None)).state is PodState.STARTING
    assert not view_of(running(injected_pod())).cannot_report
