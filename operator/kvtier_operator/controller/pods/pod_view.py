"""One pod as its policy sees it: attached, starting, left alone, or in trouble, and why. Pure.

A pod that does not answer is unreachable, never "not attached": what an engine did is known from tierd's sessions or not at
all.

Groups of pods that make up one engine (LeaderWorkerSet): all of a group get the same structure, or none. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvtier_operator.api.conditions import Reason, SkipReason
from kvtier_operator.api.names import (
    HASH_ANNOTATION,
    POLICY_ANNOTATION,
    POLICY_UID_ANNOTATION,
    SKIPPED_ANNOTATION,
    STRUCTURAL_ANNOTATION,
    TIERD_CONTAINER,
)
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.settings import AttachMode
from kvtier_operator.controller import objects
from kvtier_operator.controller.pods.reports import LastReport, Report, text
from kvtier_operator.kube.resources import Object
from kvtier_operator.render.documents import live_name, structural_name

PATIENCE = 3
"""Unanswered polls before a pod that never answered is called unreachable; one that did has one less."""
CRASHES = 2
"""Restarts of an engine's container that is not ready after which it is said to crash."""
CRASH_SECONDS = 600.0
"""A crash longer ago does not count."""
FAILED_WAITING = (
    "CrashLoopBackOff",
    "ErrImagePull",
    "ImagePullBackOff",
    "CreateContainerError",
    "RunContainerError",
)
MAX_ANNOTATION = 4096


class PodState(StrEnum):
    """What a pod is counted as. ``UNASKED``: it has not had time to answer since this process started or it did."""

    ATTACHED = "Attached"
    STARTING = "Starting"
    NOT_ATTACHED = "NotAttached"
    ENGINE_CRASHED = "EngineCrashed"
    TIERD_FAILED = "TierdFailed"
    UNREACHABLE = "Unreachable"
    SKIPPED = "Skipped"
    UNASKED = "Unasked"


@dataclass(frozen=True, slots=True)
class PodView:
    """A pod that is selected and lives. ``report``: its last answer, if it still counts. ``reason`` and ``message``: why it is
    in this state. ``structural_hash``: of the structure it was given; empty: none. ``same_policy``: that structure is of
    this policy and not of a predecessor of the same name, or another one.
    """

    pod: Object
    state: PodState
    reason: str
    message: str
    injected: bool = False
    structural_hash: str = ""
    same_policy: bool = True
    report: Report | None = None

    @property
    def name(self) -> str:
        """Its name."""
        return objects.name(self.pod)

    @property
    def uid(self) -> str:
        """Its uid."""
        return objects.uid(self.pod)

    @property
    def silent(self) -> bool:
        """Whether nobody in it can be asked: its connector is not KVTier's."""
        return self.injected and objects.injected(self.pod) and not objects.has_daemon(self.pod)

    @property
    def node(self) -> str:
        """Where it runs; empty: nowhere yet."""
        return str(objects.spec(self.pod).get("nodeName") or "")


def view(
    policy: KVTierPolicy,
    pod: Object,
    said: LastReport,
    now: float,
    namespace_asks: bool | None = None,
) -> PodView:
    """Looks at one pod. ``namespace_asks``: whether the namespace has the label without which the webhook is not asked;
    None: not known.
    """
    by_hand = policy.spec.attach.mode is AttachMode.CONFIG_MAP_ONLY and mounts_documents(
        policy, pod
    )
    if not objects.injected(pod) and not by_hand:
        return _left_alone(policy, pod, namespace_asks)
    notes = objects.annotated(pod)
    answers = said.report is not None and said.failures < PATIENCE - 1
    report = said.report if answers else None
    state, reason, message = _attached(policy, pod, said, report, now)
    # tierd keeps the structure that it began with, whatever becomes of the annotation.
    given = (report.content_hash if report is not None else "") or notes.get(HASH_ANNOTATION) or ""
    policy_uid, policy_name = notes.get(POLICY_UID_ANNOTATION), notes.get(POLICY_ANNOTATION)
    same = policy_uid in (None, "", policy.metadata.uid) and policy_name in (
        None,
        "",
        policy.metadata.name,
    )
    return PodView(pod, state, reason, message, True, given, same, report)


def mounts_documents(policy: KVTierPolicy, pod: Object) -> bool:
    """Whether a person wrote the policy's ConfigMaps into the pod."""
    names = {live_name(policy), structural_name(policy)}
    for volume in objects.spec(pod).get("volumes") or ():
        sources = [volume, *((volume.get("projected") or {}).get("sources") or ())]
        if any((source.get("configMap") or {}).get("name") in names for source in sources):
            return True
    return False


def _left_alone(policy: KVTierPolicy, pod: Object, namespace_asks: bool | None) -> PodView:
    skipped = _skipped(objects.annotated(pod).get(SKIPPED_ANNOTATION))
    if skipped is not None:
        return PodView(pod, PodState.SKIPPED, *skipped)
    owner = objects.controller(pod)
    if owner is not None and owner.kind == "DaemonSet":
        message = "pods of a DaemonSet are left alone"
        return PodView(pod, PodState.SKIPPED, SkipReason.UNSUPPORTED_OWNER.value, message)
    if objects.MIRROR_ANNOTATION in objects.annotated(pod):
        message = "static pods are left alone: they are not made by the API server"
        return PodView(pod, PodState.SKIPPED, SkipReason.UNSUPPORTED_OWNER.value, message)
    created = objects.parse_time(objects.metadata(pod).get("creationTimestamp"))
    since = objects.parse_time(policy.metadata.creation_timestamp)
    if policy.spec.attach.mode is AttachMode.CONFIG_MAP_ONLY:
        message = (
            f"attach.mode is ConfigMapOnly and the pod mounts neither {live_name(policy)} nor "
        )
        message += structural_name(policy)
    elif namespace_asks is False:
        message = f"the namespace {objects.namespace(pod)} is not labelled kvtier.io/inject=enabled, so the webhook is not "
        message += "asked; label it and replace the pod"
    elif created is not None and since is not None and created <= since:
        message = "the pod is older than the policy; replace it to attach it"
    else:
        message = "the webhook was not asked, did not answer, or did not know the policy when the pod was created; replace the pod"
    return PodView(pod, PodState.SKIPPED, Reason.MISSED.value, message)


def _skipped(annotation: str | None) -> tuple[str, str] | None:
    """Reason and message of the webhook's annotation, which whoever edits pods may have written."""
    if annotation is None:
        return None
    try:
        found = json.loads(annotation[:MAX_ANNOTATION])
    except (ValueError, RecursionError):
        found = {}
    found = found if isinstance(found, dict) else {}
    reason = text(found.get("reason"))
    known = reason in {each.value for each in SkipReason}
    return (reason if known else "Skipped"), text(
        found.get("message")
    ) or "the webhook left it alone"


def _attached(
    policy: KVTierPolicy, pod: Object, said: LastReport, report: Report | None, now: float
) -> tuple[PodState, str, str]:
    container = objects.engine(pod, policy.spec.engine.container_name)
    entry = objects.container_status(pod, container)
    if report is not None and report.attached:
        return (
            PodState.ATTACHED,
            Reason.ATTACHED.value,
            "the engine's scheduler and workers have attached",
        )
    crash = _crashes(entry, now)
    if crash:
        message = f"the engine's container {container} does not stay up: {crash}"
        return PodState.ENGINE_CRASHED, Reason.ENGINE_CRASHED.value, message
    if objects.injected(pod) and not objects.has_daemon(pod):
        if entry.get("ready"):
            return (
                PodState.ATTACHED,
                Reason.ATTACHED.value,
                "the engine runs with another connector, which cannot be asked",
            )
        return PodState.STARTING, Reason.STARTING.value, f"the container {container} is starting"
    tierd = _failed_tierd(pod)
    if tierd and objects.ever_ran(entry):
        message = f"{TIERD_CONTAINER} does not run ({tierd}); the engine serves without tiers"
        return PodState.TIERD_FAILED, Reason.TIERD_FAILED.value, message
    if report is None and said.failures and (entry.get("ready") or said.report is not None):
        if said.failures < (PATIENCE if said.report is None else PATIENCE - 1):
            return PodState.UNASKED, Reason.STARTING.value, "has not answered yet"
        return PodState.UNREACHABLE, Reason.UNREACHABLE.value, said.why
    if report is None:
        running = "running" in (entry.get("state") or {}) and objects.status(pod).get("podIP")
        if running and entry.get("ready") and not said.failures:
            return PodState.UNASKED, Reason.STARTING.value, "has not been asked yet"
        return PodState.STARTING, Reason.STARTING.value, f"the container {container} is starting"
    since = waiting_since(policy, pod) if entry.get("ready") else None
    if since is None or now - since < policy.spec.attach.start_timeout_seconds:
        return PodState.STARTING, Reason.STARTING.value, f"the container {container} is starting"
    return PodState.NOT_ATTACHED, Reason.NOT_ATTACHED.value, _not_attached(container, report)


def _not_attached(container: str, report: Report) -> str:
    if report.sessions_refused:
        return "tierd refused the engine's sessions; its log says why (another version, most often)"
    if not report.started:
        return "tierd has no host pool yet: " + (
            report.conditions[0][1] if report.conditions else "its log says why"
        )
    if report.schedulers + report.workers + report.unready == 0:
        return (
            f"tierd serves and {container} is ready, but no engine process has attached: the plugin was not loaded, "
            "or this vLLM version is not supported; the engine's log has lines that name kvtier"
        )
    return "not all of the engine's processes have attached; the engine's log has lines that name kvtier"


def _crashes(entry: Mapping[str, Any], now: float) -> str:
    """How an engine's container ends, if it does so again and again."""
    if entry.get("ready") or (entry.get("restartCount") or 0) < CRASHES:
        return ""
    state = entry.get("state") or {}
    last = state.get("terminated") or (entry.get("lastState") or {}).get("terminated") or {}
    waiting = (state.get("waiting") or {}).get("reason")
    finished = objects.parse_time(last.get("finishedAt"))
    if waiting != "CrashLoopBackOff" and (finished is None or now - finished > CRASH_SECONDS):
        return ""
    code = last.get("exitCode")
    why = text(last.get("reason"))
    return f"it ends with exit code {code}" + (f" ({why})" if why and why != "Error" else "")


def _failed_tierd(pod: Object) -> str:
    if not objects.has_tierd(pod):
        return ""
    entry = objects.container_status(pod, TIERD_CONTAINER)
    state = entry.get("state") or {}
    waiting = text((state.get("waiting") or {}).get("reason"))
    if waiting in FAILED_WAITING:
        return waiting
    ended = state.get("terminated")
    if ended is not None and (entry.get("restartCount") or 0) > 0:
        return f"ended with exit code {ended.get('exitCode')}"
    return ""


def engine_ran(policy: KVTierPolicy, pod: Object) -> bool:
    """Whether the engine's container has run at any time."""
    container = objects.engine(pod, policy.spec.engine.container_name)
    return objects.ever_ran(objects.container_status(pod, container))


def waiting_since(policy: KVTierPolicy, pod: Object) -> float | None:
    """Since when (seconds since 1970) something is due of a pod: that its engine starts, or, once its container is ready,
    that it attaches. None while the engine initialises.
    """
    container = objects.engine(pod, policy.spec.engine.container_name)
    entry = objects.container_status(pod, container)
    if entry.get("ready"):
        since = objects.parse_time(
            objects.condition(pod, "ContainersReady").get("lastTransitionTime")
        )
        started = objects.parse_time(
            ((entry.get("state") or {}).get("running") or {}).get("startedAt")
        )
        return max((when for when in (since, started) if when is not None), default=None)
    if objects.ever_ran(entry):
        return None
    scheduled = objects.condition(pod, "PodScheduled")
    created = objects.parse_time(objects.metadata(pod).get("creationTimestamp"))
    return (
        objects.parse_time(scheduled.get("lastTransitionTime"))
        if scheduled.get("status") == "True"
        else None
    ) or created


def mixed_groups(pods: Sequence[PodView]) -> list[str]:
    """One pod of each group whose pods differ, and in what, as words."""
    groups: dict[str, list[PodView]] = {}
    for pod in pods:
        key = objects.labels(pod.pod).get(objects.GROUP_KEY_LABEL)
        if key:
            groups.setdefault(key, []).append(pod)
    found = []
    for members in groups.values():
        structures = {objects.annotated(each.pod).get(STRUCTURAL_ANNOTATION) for each in members}
        if len(structures) > 1:
            names = objects.listed(each.name for each in members)
            what = (
                "some have tiers and some have none"
                if None in structures
                else "they have different structures"
            )
            found.append(f"{names}: {what}")
    return sorted(found)
