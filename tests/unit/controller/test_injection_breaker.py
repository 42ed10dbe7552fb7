"""The injection breaker: which failures injection causes, and how the controller reacts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from tests.support.pods import (
    NOON,
    at,
    bare_pod,
    injected_pod,
    policy,
    running,
    scheduled,
    terminating,
    unschedulable,
    with_state,
)

from kvtier_operator.api.conditions import Reason
from kvtier_operator.api.pods import OwnerReference, decode_pod
from kvtier_operator.api.status import SuspendedOwner
from kvtier_operator.controller.injection_breaker import breaker, detectors
from kvtier_operator.controller.injection_breaker.detectors import (
    InjectionFailure,
    PodContext,
)

NAS = {"name": "kvtier-tier-nas", "persistentVolumeClaim": {"claimName": "chat-nas-0123"}}
MODEL = {"name": "model", "persistentVolumeClaim": {"claimName": "models"}}
INJECTED = injected_pod(volumes=[NAS])


def context(
    *events: Mapping[str, Any],
    claims: Mapping[str, Any] | None = None,
    insufficient_resources: str = "",
) -> PodContext:
    return PodContext((claims or {}).get, events, insufficient_resources)


def event(reason: str, message: str, age: float = 10) -> dict[str, Any]:
    return {"reason": reason, "message": message, "lastTimestamp": at(NOON - age)}


def failure_of(
    document: Mapping[str, Any], *events: Mapping[str, Any], **more: Any
) -> InjectionFailure | None:
    """The failure of a pod that is blocked because of an injected part."""
    pod = decode_pod(document)
    if not detectors.is_blocked(policy(), pod, NOON):
        return None
    return detectors.blocked_pod_failure(policy(), pod, context(*events, **more), NOON)


def reason(pod: Mapping[str, Any], *events: Mapping[str, Any], **more: Any) -> Reason | None:
    failure = failure_of(pod, *events, **more)
    return None if failure is None else failure.reason


def waiting(container: str, word: str, message: str = "") -> dict[str, Any]:
    return with_state(scheduled(INJECTED), container, waiting={"reason": word, "message": message})


@pytest.mark.parametrize("container", ["kvtier-payload", "kvtier-tierd"])
@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("ErrImagePull", Reason.IMAGE_NOT_PULLED),
        ("ImagePullBackOff", Reason.IMAGE_NOT_PULLED),
        ("InvalidImageName", Reason.IMAGE_NOT_PULLED),
        ("ErrImageNeverPull", Reason.IMAGE_NOT_PULLED),
        ("CreateContainerConfigError", Reason.CONTAINER_NOT_STARTED),
        ("CreateContainerError", Reason.CONTAINER_NOT_STARTED),
        ("RunContainerError", Reason.CONTAINER_NOT_STARTED),
        ("PodInitializing", None),
        ("ContainerCreating", None),
    ],
)
def test_an_injected_container_that_cannot_start_is_the_reason(
    container: str, word: str, expected: Reason | None
) -> None:
    assert reason(waiting(container, word)) is expected


def test_the_message_names_pod_container_and_cause() -> None:
    failure = failure_of(
        waiting(
            "kvtier-payload",
            "ImagePullBackOff",
            'Back-off pulling image "registry.example/payload:1"',
        )
    )
    assert failure is not None
    assert failure.message == (
        "pod chat-1: kvtier-payload is in ImagePullBackOff: "
        'Back-off pulling image "registry.example/payload:1"'
    )
    assert failure.owner is not None
    assert (failure.owner.kind, failure.owner.name) == ("ReplicaSet", "chat-5d")


def test_the_engines_own_image_is_not_an_injection_failure() -> None:
    for word in (
        "ErrImagePull",
        "ImagePullBackOff",
        "CreateContainerConfigError",
        "CrashLoopBackOff",
    ):
        assert reason(waiting("vllm", word)) is None


def test_an_image_volume_that_is_not_pulled_is_found_at_the_container_that_mounts_it() -> None:
    pod = injected_pod(
        volumes=[{"name": "kvtier-payload", "image": {"reference": "registry.example/payload:1"}}]
    )
    message = 'failed to pull "registry.example/payload:1"'
    held = with_state(
        scheduled(pod), "vllm", waiting={"reason": "ImagePullBackOff", "message": message}
    )
    assert reason(held) is Reason.IMAGE_NOT_PULLED


def test_a_payload_that_crashes_or_hangs_is_the_reason() -> None:
    crash = {"waiting": {"reason": "CrashLoopBackOff"}, "restarts": 3, "last": {"exitCode": 2}}
    assert (
        reason(with_state(scheduled(INJECTED), "kvtier-payload", **crash))
        is Reason.CONTAINER_NOT_STARTED
    )
    for since, expected in ((NOON - 200, Reason.CONTAINER_NOT_STARTED), (NOON - 20, None)):
        hangs = with_state(scheduled(INJECTED), "kvtier-payload", running={"startedAt": at(since)})
        assert reason(hangs) is expected


def test_a_crashing_sidecar_is_the_reason_only_while_the_engine_waits_for_it() -> None:
    crash = {"waiting": {"reason": "CrashLoopBackOff"}, "restarts": 3, "last": {"exitCode": 2}}
    crashing = with_state(scheduled(INJECTED), "kvtier-tierd", **crash)
    assert reason(crashing) is Reason.CONTAINER_NOT_STARTED
    # Initialized: from here on the engine's own image is the cause.
    assert reason(with_state(crashing, "vllm", waiting={"reason": "ContainerCreating"})) is None
    serving = with_state(scheduled(INJECTED), "kvtier-tierd", running={"startedAt": at(NOON - 999)})
    assert reason(serving) is None


def test_a_pod_is_not_blocked_before_the_start_timeout_or_once_its_engine_has_run() -> None:
    held = waiting("kvtier-tierd", "ImagePullBackOff")
    young = with_state(
        scheduled(INJECTED, since=NOON - 119),
        "kvtier-tierd",
        waiting={"reason": "ImagePullBackOff"},
    )
    assert reason(young) is None
    assert reason(terminating(held, NOON)) is None
    assert reason(running(INJECTED)) is None
    assert (
        reason(with_state(held, "vllm", restarts=1, waiting={"reason": "CrashLoopBackOff"})) is None
    )
    assert reason(scheduled(bare_pod())) is None


MOUNT = 'MountVolume.SetUp failed for volume "{}" : mount failed: exit status 32'
UNMOUNTED = (
    "Unable to attach or mount volumes: unmounted volumes=[{}], "
    "unattached volumes=[model kvtier-tier-nas kvtier-run]: timed out"
)


@pytest.mark.parametrize(
    ("message", "ours"),
    [
        (MOUNT.format("kvtier-tier-nas"), True),
        (MOUNT.format("pv-nas"), True),
        (MOUNT.format("pv-nas-of-another"), False),
        (MOUNT.format("model"), False),
        (UNMOUNTED.format("kvtier-tier-nas"), True),
        (UNMOUNTED.format("model"), False),
    ],
)
def test_a_failed_mount_of_an_injected_volume_is_the_reason(message: str, ours: bool) -> None:
    claims = {"chat-nas-0123": {"spec": {"volumeName": "pv-nas"}}}
    held = scheduled(injected_pod(volumes=[NAS, MODEL]))
    assert reason(held, event("FailedMount", message), claims=claims) is (
        Reason.VOLUME_NOT_MOUNTED if ours else None
    )


def test_an_old_failed_mount_is_ignored() -> None:
    old = event("FailedMount", MOUNT.format("kvtier-tier-nas"), age=400)
    assert reason(scheduled(INJECTED), old) is None


def test_a_failed_sandbox_is_the_reason_only_if_it_names_an_injected_part() -> None:
    failed = "Failed to create pod sandbox: {}: not allowed"
    for what, expected in (("kvtier-run", Reason.CONTAINER_NOT_STARTED), ("cni plugin", None)):
        assert (
            reason(scheduled(INJECTED), event("FailedCreatePodSandBox", failed.format(what)))
            is expected
        )


def test_a_pull_of_an_injected_image_that_exceeds_the_start_timeout_is_the_reason() -> None:
    pulling = 'Pulling image "{}"'
    ours, theirs = pulling.format("registry.example/payload:1"), pulling.format("vllm")
    assert reason(scheduled(INJECTED), event("Pulling", ours, 500)) is Reason.IMAGE_NOT_PULLED
    assert reason(scheduled(INJECTED), event("Pulling", theirs, 500)) is None
    done = event("Pulled", 'Successfully pulled image "registry.example/payload:1" in 2s', 490)
    assert reason(scheduled(INJECTED), event("Pulling", ours, 500), done) is None


@pytest.mark.parametrize(
    ("message", "phase", "ours"),
    [
        ('persistentvolumeclaim "chat-nas-0123" not found', None, True),
        ('persistentvolumeclaim "models" not found', None, False),
        (
            "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
            "Pending",
            True,
        ),
        (
            "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
            "Bound",
            False,
        ),
        (
            "0/3 nodes are available: 3 node(s) didn't find available persistent volumes to bind.",
            "Pending",
            True,
        ),
        ("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.", "Bound", False),
    ],
)
def test_an_unschedulable_pod_is_a_failure_if_an_injected_claim_is_the_cause(
    message: str, phase: str | None, ours: bool
) -> None:
    claims = {"chat-nas-0123": {"status": {"phase": phase}}} if phase else {}
    held = unschedulable(injected_pod(volumes=[NAS, MODEL]), message)
    assert reason(held, claims=claims) is (Reason.UNSCHEDULABLE if ours else None)


def test_a_volume_that_no_node_can_mount_is_the_reason_if_the_pod_has_no_other() -> None:
    message = "0/3 nodes are available: 3 node(s) had volume node affinity conflict."
    bound = {"chat-nas-0123": {"status": {"phase": "Bound"}}}
    assert reason(unschedulable(INJECTED, message), claims=bound) is Reason.UNSCHEDULABLE
    assert reason(unschedulable(injected_pod(volumes=[NAS, MODEL]), message), claims=bound) is None


def test_insufficient_resources_are_the_reason() -> None:
    held = unschedulable(INJECTED, "0/1 nodes are available: 1 Insufficient memory.")
    assert (
        reason(held, insufficient_resources="node a has room for it without tiers")
        is Reason.UNSCHEDULABLE
    )
    assert reason(held) is None


def entry(uid: str, until: float) -> SuspendedOwner:
    found = {
        "kind": "ReplicaSet",
        "name": f"name-of-{uid}",
        "uid": uid,
        "reason": "Refused",
        "until": at(until),
    }
    return SuspendedOwner.model_validate(found)


def image_failure() -> InjectionFailure:
    failure = failure_of(waiting("kvtier-tierd", "ImagePullBackOff"))
    if failure is None:
        raise AssertionError("a pod without its sidecar's image is not blocked")
    return failure


def test_the_owner_of_a_blocked_pod_is_suspended_by_uid_for_the_retry_time() -> None:
    (suspended,) = breaker.suspended_owners(
        policy(attach={"retrySeconds": 77}), [], [image_failure()], NOON
    )
    assert (suspended.kind, suspended.name, suspended.uid) == (
        "ReplicaSet",
        "chat-5d",
        "uid-of-chat-5d",
    )
    assert (suspended.reason, suspended.until) == ("ImageNotPulled", at(NOON + 77))


def test_a_suspension_lasts_until_the_owner_creates_the_next_pod() -> None:
    rejected = InjectionFailure(
        OwnerReference(kind="Job", name="j", uid="u"),
        Reason.REFUSED,
        "",
        retried_within_seconds=900,
    )
    (suspended,) = breaker.suspended_owners(policy(), [], [rejected], NOON)
    assert suspended.until == at(NOON + 900)


def test_a_suspension_expires_and_is_not_extended() -> None:
    current = [entry("uid-of-chat-5d", NOON + 50), entry("old", NOON - 1)]
    assert breaker.suspended_owners(policy(), current, [image_failure()], NOON) == current[:1]


def test_at_most_sixteen_owners_are_suspended() -> None:
    current = [entry(f"u{index}", NOON + 50) for index in range(16)]
    assert breaker.suspended_owners(policy(), current, [image_failure()], NOON) == current


def test_a_blocked_pod_without_owner_is_neither_suspended_nor_deleted() -> None:
    held = with_state(
        scheduled(injected_pod(owner="")), "kvtier-tierd", waiting={"reason": "ErrImagePull"}
    )
    failure = failure_of(held)
    assert failure is not None
    assert failure.owner is None
    assert breaker.suspended_owners(policy(), [], [failure], NOON) == []
    assert breaker.deletable_pods(policy(), [], [failure], NOON) == ([], None)


def test_a_blocked_pod_is_deleted_once_its_owners_suspension_has_settled() -> None:
    failure = image_failure()
    assert breaker.deletable_pods(policy(), [], [failure], NOON) == ([], breaker.SETTLE_SECONDS)
    just = [entry("uid-of-chat-5d", NOON + 600 - 1)]
    assert breaker.deletable_pods(policy(), just, [failure], NOON) == ([], breaker.SETTLE_SECONDS)
    settled = [entry("uid-of-chat-5d", NOON + 600 - 3)]
    assert breaker.deletable_pods(policy(), settled, [failure], NOON) == ([failure], None)


def test_a_blocked_pod_that_predates_a_policy_change_is_deleted_at_once() -> None:
    failure = image_failure()
    assert breaker.deletable_pods(policy(), [], [failure], NOON, changed_at=NOON - 5) == (
        [failure],
        None,
    )
