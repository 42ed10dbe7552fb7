"""The state of one pod from its policy's point of view: attached, starting, skipped or failed, and
why. Pure.

A pod that does not answer is unreachable, never "not attached": only tierd knows which engines have
attached.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvtier_operator.api.conditions import Reason, SkipReason
from kvtier_operator.api.names import (
    HASH_ANNOTATION,
    MIRROR_ANNOTATION,
    POLICY_ANNOTATION,
    POLICY_UID_ANNOTATION,
    SKIPPED_ANNOTATION,
    STRUCTURAL_ANNOTATION,
    TIERD_CONTAINER,
)
from kvtier_operator.api.pods import ContainerStatus, Pod
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.settings import AttachMode
from kvtier_operator.controller import objects
from kvtier_operator.controller.pods.reports import LastReport, PodReport, bounded_text
from kvtier_operator.render.documents import live_name, structural_name

UNREACHABLE_FAILURES = 3
"""Failed polls after which a pod that never answered is unreachable. One that has answered gets one
fewer.
"""
CRASH_RESTARTS = 2
"""Restarts after which an engine's container that is not ready counts as crashing."""
CRASH_SECONDS = 600.0
"""An older crash does not count."""
FAILED_WAITING_REASONS = (
    "CrashLoopBackOff",
    "ErrImagePull",
    "ImagePullBackOff",
    "CreateContainerError",
    "RunContainerError",
)
MAX_ANNOTATION = 4096


class PodState(StrEnum):
    """What a pod counts as. ``NOT_POLLED``: it has not had the time to answer since this process,
    or the pod, started.
    """

    ATTACHED = "Attached"
    STARTING = "Starting"
    NOT_ATTACHED = "NotAttached"
    ENGINE_CRASHED = "EngineCrashed"
    TIERD_FAILED = "TierdFailed"
    UNREACHABLE = "Unreachable"
    SKIPPED = "Skipped"
    NOT_POLLED = "NotPolled"


@dataclass(frozen=True, slots=True)
class PodView:
    """A selected pod that is not terminating. ``reason`` and ``message``: why it is in this state.

    ``has_tiers``: it was injected, or mounts the policy's ConfigMaps. ``structural_hash``: of the
    structure that it runs with; empty if it has none. ``same_policy``: that structure comes from
    this policy, and not from another one or an earlier one of the same name. ``report``: its last
    answer, unless too many polls have failed since.
    """

    pod: Pod
    state: PodState
    reason: str
    message: str
    has_tiers: bool = False
    structural_hash: str = ""
    same_policy: bool = True
    report: PodReport | None = None

    @property
    def name(self) -> str:
        """Name of the pod."""
        return self.pod.metadata.name

    @property
    def uid(self) -> str:
        """Uid of the pod."""
        return self.pod.metadata.uid

    @property
    def node(self) -> str:
        """Name of its node; empty if it is not scheduled."""
        return self.pod.spec.node_name

    @property
    def cannot_report(self) -> bool:
        """Whether it cannot be polled, because its connector is not KVTier's."""
        return self.has_tiers and objects.is_injected(self.pod) and not objects.has_tierd(self.pod)


def view(
    policy: KVTierPolicy,
    pod: Pod,
    last: LastReport,
    now: float,
    injection_enabled: bool | None = None,
) -> PodView:
    """The state of one pod. ``injection_enabled``: whether the namespace has the label that makes
    the API server call the webhook; None: not known.
    """
    by_hand = policy.spec.attach.mode is AttachMode.CONFIG_MAP_ONLY and mounts_config_maps(
        policy, pod
    )
    if not objects.is_injected(pod) and not by_hand:
        return _skipped(policy, pod, injection_enabled)
    annotations = pod.metadata.annotations
    answers = last.report is not None and last.failures < UNREACHABLE_FAILURES - 1
    report = last.report if answers else None
    state, reason, message = _state(policy, pod, last, report, now)
    # tierd keeps the structure that it started with, even if the annotation is edited.
    structural_hash = (report.content_hash if report is not None else "") or annotations.get(
        HASH_ANNOTATION, ""
    )
    policy_uid = annotations.get(POLICY_UID_ANNOTATION)
    policy_name = annotations.get(POLICY_ANNOTATION)
    same = policy_uid in (None, "", policy.metadata.uid) and policy_name in (
        None,
        "",
        policy.metadata.name,
    )
    return PodView(pod, state, reason, message, True, structural_hash, same, report)


def mounts_config_maps(policy: KVTierPolicy, pod: Pod) -> bool:
    """Whether the pod mounts one of the policy's ConfigMaps."""
    names = {live_name(policy), structural_name(policy)}
    for volume in pod.spec.volumes:
        projected = volume.projected.sources if volume.projected is not None else ()
        sources = (volume.config_map, *(source.config_map for source in projected))
        if any(source is not None and source.name in names for source in sources):
            return True
    return False


def engine_status(policy: KVTierPolicy, pod: Pod) -> ContainerStatus:
    """The kubelet's status of the engine's container."""
    container = objects.engine_container(pod, policy.spec.engine.container_name)
    return pod.status.container(container) or objects.NO_STATUS


def waiting_since(policy: KVTierPolicy, pod: Pod) -> float | None:
    """Start (seconds since 1970) of the pod's current wait: for its engine to start, or, once the
    engine's container is ready, for the engine to attach. None while the engine initializes.
    """
    engine = engine_status(policy, pod)
    if engine.ready:
        ready = pod.status.condition("ContainersReady")
        running = engine.state.running
        times = (
            objects.parse_time(ready.last_transition_time if ready is not None else None),
            objects.parse_time(running.started_at if running is not None else None),
        )
        return max((time for time in times if time is not None), default=None)
    if engine.has_run:
        return None
    scheduled = pod.status.condition("PodScheduled")
    scheduled_at = None
    if scheduled is not None and scheduled.status == "True":
        scheduled_at = objects.parse_time(scheduled.last_transition_time)
    return scheduled_at or objects.parse_time(pod.metadata.creation_timestamp)


def mixed_groups(pods: Sequence[PodView]) -> list[str]:
    """One message for each group of pods that make up one engine (LeaderWorkerSet) and do not have
    the same structure.
    """
    groups: dict[str, list[PodView]] = {}
    for pod in pods:
        key = pod.pod.metadata.labels.get(objects.GROUP_KEY_LABEL)
        if key:
            groups.setdefault(key, []).append(pod)
    messages = []
    for members in groups.values():
        structures = {each.pod.metadata.annotations.get(STRUCTURAL_ANNOTATION) for each in members}
        if len(structures) > 1:
            names = objects.join_names(each.name for each in members)
            difference = (
                "some have tiers and some have none"
                if None in structures
                else "they have different structures"
            )
            messages.append(f"{names}: {difference}")
    return sorted(messages)


def _skipped(policy: KVTierPolicy, pod: Pod, injection_enabled: bool | None) -> PodView:
    """A pod without tiers: the reason is in the webhook's annotation, or follows from the pod."""
    annotation = pod.metadata.annotations.get(SKIPPED_ANNOTATION)
    if annotation is not None:
        return PodView(pod, PodState.SKIPPED, *_annotated_reason(annotation))
    owner = pod.controller
    if owner is not None and owner.kind == "DaemonSet":
        message = "pods of a DaemonSet are not supported"
        return PodView(pod, PodState.SKIPPED, SkipReason.UNSUPPORTED_OWNER.value, message)
    if MIRROR_ANNOTATION in pod.metadata.annotations:
        message = "static pods are not supported: the API server does not create them"
        return PodView(pod, PodState.SKIPPED, SkipReason.UNSUPPORTED_OWNER.value, message)
    created = objects.parse_time(pod.metadata.creation_timestamp)
    policy_created = objects.parse_time(policy.metadata.creation_timestamp)
    if policy.spec.attach.mode is AttachMode.CONFIG_MAP_ONLY:
        message = (
            "attach.mode is ConfigMapOnly, and the pod mounts neither ConfigMap "
            f"{live_name(policy)} nor {structural_name(policy)}"
        )
    elif injection_enabled is False:
        message = (
            f"the labels of namespace {pod.metadata.namespace} do not match the webhook's "
            "namespaceSelector (by default kvtier.io/inject=enabled), so the API server does not "
            "call the webhook; label the namespace and replace the pod"
        )
    elif created is not None and policy_created is not None and created <= policy_created:
        message = "the pod is older than the policy; replace it to attach it"
    else:
        message = (
            "when the pod was created, the webhook was not called, did not answer, "
            "or did not know the policy yet; replace the pod"
        )
    return PodView(pod, PodState.SKIPPED, Reason.MISSED.value, message)


def _annotated_reason(annotation: str) -> tuple[str, str]:
    """Reason and message of the webhook's annotation. Anyone who may edit pods can change it."""
    try:
        found = json.loads(annotation[:MAX_ANNOTATION])
    except (ValueError, RecursionError):
        found = {}
    found = found if isinstance(found, dict) else {}
    reason = bounded_text(found.get("reason"))
    known = reason in {each.value for each in SkipReason}
    message = bounded_text(found.get("message")) or "the webhook skipped it"
    return (reason if known else "Skipped"), message


def _state(
    policy: KVTierPolicy, pod: Pod, last: LastReport, report: PodReport | None, now: float
) -> tuple[PodState, str, str]:
    """State, reason and message of a pod with tiers."""
    container = objects.engine_container(pod, policy.spec.engine.container_name)
    engine = pod.status.container(container) or objects.NO_STATUS
    starting = f"container {container} is starting"
    if report is not None and report.attached:
        message = "the engine's scheduler and workers have attached"
        return PodState.ATTACHED, Reason.ATTACHED.value, message
    crash = _crash(engine, now)
    if crash:
        message = f"the engine's container {container} keeps crashing: {crash}"
        return PodState.ENGINE_CRASHED, Reason.ENGINE_CRASHED.value, message
    if objects.is_injected(pod) and not objects.has_tierd(pod):
        if engine.ready:
            message = "the engine runs with another connector, which does not report"
            return PodState.ATTACHED, Reason.ATTACHED.value, message
        return PodState.STARTING, Reason.STARTING.value, starting
    tierd_failure = _tierd_failure(pod)
    if tierd_failure and engine.has_run:
        message = (
            f"{TIERD_CONTAINER} is not running ({tierd_failure}); the engine serves without tiers"
        )
        return PodState.TIERD_FAILED, Reason.TIERD_FAILED.value, message
    if report is None and last.failures and (engine.ready or last.report is not None):
        never_answered = last.report is None
        if last.failures < (UNREACHABLE_FAILURES if never_answered else UNREACHABLE_FAILURES - 1):
            return PodState.NOT_POLLED, Reason.STARTING.value, "it has not answered yet"
        return PodState.UNREACHABLE, Reason.UNREACHABLE.value, last.error
    if report is None:
        running = engine.state.running is not None and pod.status.pod_ip
        if running and engine.ready and not last.failures:
            return PodState.NOT_POLLED, Reason.STARTING.value, "it has not been polled yet"
        return PodState.STARTING, Reason.STARTING.value, starting
    since = waiting_since(policy, pod) if engine.ready else None
    if since is None or now - since < policy.spec.attach.start_timeout_seconds:
        return PodState.STARTING, Reason.STARTING.value, starting
    message = _not_attached_message(container, report)
    return PodState.NOT_ATTACHED, Reason.NOT_ATTACHED.value, message


def _not_attached_message(container: str, report: PodReport) -> str:
    if report.sessions_refused:
        return (
            "tierd rejected the engine's sessions, most often because of a version mismatch; "
            "see tierd's log"
        )
    if not report.started:
        cause = report.conditions[0][1] if report.conditions else "see its log"
        return f"tierd has no host pool yet: {cause}"
    if report.schedulers + report.workers + report.unready == 0:
        return (
            f"tierd is running and {container} is ready, but no engine process has attached: "
            "the plugin was not loaded, or this vLLM version is not supported; "
            "search the engine's log for kvtier"
        )
    return "some of the engine's processes have not attached; search the engine's log for kvtier"


def _crash(engine: ContainerStatus, now: float) -> str:
    """How the engine's container ends, if it crashes repeatedly; else empty."""
    if engine.ready or engine.restart_count < CRASH_RESTARTS:
        return ""
    last = engine.state.terminated or engine.last_state.terminated
    waiting = engine.state.waiting.reason if engine.state.waiting is not None else ""
    finished = objects.parse_time(last.finished_at) if last is not None else None
    if waiting != "CrashLoopBackOff" and (finished is None or now - finished > CRASH_SECONDS):
        return ""
    if last is None:
        return "its exit code is not known"
    why = bounded_text(last.reason)
    suffix = f" ({why})" if why and why != "Error" else ""
    return f"it exits with code {last.exit_code}{suffix}"


def _tierd_failure(pod: Pod) -> str:
    """Why the tierd sidecar is not running; empty if it is, or if it is about to."""
    if not objects.has_tierd_sidecar(pod):
        return ""
    status = pod.status.container(TIERD_CONTAINER) or objects.NO_STATUS
    waiting = bounded_text(status.state.waiting.reason) if status.state.waiting is not None else ""
    if waiting in FAILED_WAITING_REASONS:
        return waiting
    terminated = status.state.terminated
    if terminated is not None and status.restart_count > 0:
        return f"exited with code {terminated.exit_code}"
    return ""
