"""Finds out whether an injected part prevents a pod from starting. Pure.

There are two kinds of evidence here: the scheduler found no node, or the kubelet cannot start the
containers. A cause that cannot be traced to an injected part is ignored: most pods that start
slowly have reasons of their own. Pods that the API server rejected are in ``rejections``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvtier_operator.api.conditions import Reason
from kvtier_operator.api.names import PAYLOAD_CONTAINER
from kvtier_operator.api.pods import ContainerStatus, OwnerReference, Pod
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.controller import objects
from kvtier_operator.controller.pods import pod_view
from kvtier_operator.controller.pods.reports import bounded_text
from kvtier_operator.kube.resources import Object

RECENT_SECONDS = 180.0
"""A failed mount is retried within about two minutes, so an older Event says nothing about the
current state.
"""
IMAGE_REASONS = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "RegistryUnavailable",
)
START_REASONS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
MOUNT_EVENTS = ("FailedMount", "FailedAttachVolume", "FailedMapVolume")
MAX_MESSAGE = 240
_INJECTED_PART = re.compile(
    r"(?<![A-Za-z0-9./-])kvtier-(?:(?:payload|tierd|run|topology|token|key|shm|no-account)(?![A-Za-z0-9-])|(?:tier|secret)-)"
)
"""Names of injected containers and volumes. A pod or a claim whose own name starts with ``kvtier-``
does not match.
"""


@dataclass(frozen=True, slots=True)
class InjectionFailure:
    """An injected part prevents a pod from starting.

    ``owner``: of the pod; None: nothing would replace it. ``pod``: the blocked pod; None: the API
    server rejected it, so it does not exist. ``is_certain``: no injected part is proven to be the
    cause if it is False. ``retried_within_seconds``: when the owner creates the next pod at the
    latest.
    """

    owner: OwnerReference | None
    reason: Reason
    message: str
    pod: Pod | None = None
    is_certain: bool = True
    retried_within_seconds: float = 0.0

    def predates(self, changed_at: float) -> bool:
        """Whether the pod was created before the policy changed: it says nothing about the current
        policy.
        """
        if self.pod is None:
            return False
        created = objects.parse_time(self.pod.metadata.creation_timestamp)
        return created is not None and created < changed_at - 1.0


@dataclass(frozen=True, slots=True)
class PodContext:
    """What is known about the surroundings of a blocked pod.

    ``get_claim``: a claim of its namespace by name. ``events``: about the pod.
    ``insufficient_resources``: the message of ``insufficient_resources.py``, or empty.
    """

    get_claim: Callable[[str], Object | None]
    events: Sequence[Object] = ()
    insufficient_resources: str = ""


def is_blocked(policy: KVTierPolicy, pod: Pod, now: float) -> bool:
    """Whether an injected pod exceeded ``attach.startTimeoutSeconds`` without its engine having
    run.
    """
    if not objects.is_injected(pod) or pod.is_terminating or pod.has_ended:
        return False
    if pod_view.engine_status(policy, pod).has_run:
        return False
    since = pod_view.waiting_since(policy, pod)
    return since is not None and now - since >= policy.spec.attach.start_timeout_seconds


def blocked_pod_failure(
    policy: KVTierPolicy, pod: Pod, context: PodContext, now: float
) -> InjectionFailure | None:
    """Why a blocked pod does not start, if an injected part is the cause."""
    found = (
        _scheduling_failure(pod, context)
        or _container_failure(policy, pod, now)
        or _event_failure(pod, context, now)
    )
    if found is None:
        return None
    reason, message = found
    return InjectionFailure(pod.controller, reason, f"pod {pod.metadata.name}: {message}", pod)


def event_time(event: Object) -> float:
    """When an Event last occurred, in seconds since 1970; 0 if it does not say."""
    series = event.get("series") or {}
    for value in (
        series.get("lastObservedTime"),
        event.get("lastTimestamp"),
        event.get("eventTime"),
    ):
        time = objects.parse_time(value)
        if time is not None:
            return time
    return objects.parse_time(objects.metadata(event).get("creationTimestamp")) or 0.0


def names_injected_part(message: str) -> bool:
    """Whether a message names an injected container or volume."""
    return _INJECTED_PART.search(message) is not None


def shortened(message: str) -> str:
    """One line of bounded length."""
    return bounded_text(message)[:MAX_MESSAGE]


def _scheduling_failure(pod: Pod, context: PodContext) -> tuple[Reason, str] | None:
    scheduled = pod.status.condition("PodScheduled")
    if scheduled is None or scheduled.status != "False" or scheduled.reason != "Unschedulable":
        return None
    message = scheduled.message
    names, claims = _injected_volumes(pod, context)
    named = _first_named(names, message)
    if named is not None:
        return Reason.UNSCHEDULABLE, f"no node fits because of {named}: {shortened(message)}"
    if "PersistentVolumeClaim" in message or "persistent volume" in message:
        unbound = sorted(
            claim
            for claim in claims
            if objects.status(context.get_claim(claim) or {}).get("phase") != "Bound"
        )
        if unbound:
            return Reason.UNSCHEDULABLE, f"no node fits because claim {unbound[0]} is not bound"
    if "volume node affinity" in message and claims and not _has_own_claims(pod):
        return Reason.UNSCHEDULABLE, f"no node can mount claim {min(claims)}"
    if context.insufficient_resources:
        return Reason.UNSCHEDULABLE, context.insufficient_resources
    return None


def _container_failure(policy: KVTierPolicy, pod: Pod, now: float) -> tuple[Reason, str] | None:
    image_volumes = [
        volume.image.reference
        for volume in pod.spec.volumes
        if objects.is_injected_name(volume.name)
        and volume.image is not None
        and volume.image.reference
    ]
    for status in pod.status.all_container_statuses:
        waiting = status.state.waiting
        reason = waiting.reason if waiting is not None else ""
        message = shortened(waiting.message) if waiting is not None else ""
        if not objects.is_injected_name(status.name):
            # The kubelet reports a failed pull of an image volume at the container that mounts it.
            image = next((image for image in image_volumes if image in message), None)
            if image is not None and reason in IMAGE_REASONS:
                text = f"the image volume {image} is in {reason}: {message}"
                return Reason.IMAGE_NOT_PULLED, text
            continue
        text = f"{status.name} is in {reason}" + (f": {message}" if message else "")
        if reason in IMAGE_REASONS:
            return Reason.IMAGE_NOT_PULLED, text
        if reason in START_REASONS:
            return Reason.CONTAINER_NOT_STARTED, text
        # A crashing sidecar does not block an engine whose image is being pulled. It does while the
        # engine waits for the initialization, which needs the sidecar to have started.
        if status.name != PAYLOAD_CONTAINER and not _is_initializing(policy, pod):
            continue
        problem = _exit_or_hang(policy, status, now)
        if problem:
            return Reason.CONTAINER_NOT_STARTED, problem
    return None


def _exit_or_hang(policy: KVTierPolicy, status: ContainerStatus, now: float) -> str:
    """How an injected container that must finish or start fails to; empty: it does not."""
    waiting, terminated = status.state.waiting, status.state.terminated
    ended = terminated or status.last_state.terminated
    crash_loop = waiting is not None and waiting.reason == "CrashLoopBackOff"
    if crash_loop or (ended is not None and ended.exit_code):
        code = ended.exit_code if ended is not None else "unknown"
        return f"{status.name} exits with code {code}"
    running = status.state.running
    started = objects.parse_time(running.started_at if running is not None else None)
    timeout = policy.spec.attach.start_timeout_seconds
    if status.name == PAYLOAD_CONTAINER and started is not None and now - started >= timeout:
        return f"{status.name} has not finished after {timeout} s"
    return ""


def _is_initializing(policy: KVTierPolicy, pod: Pod) -> bool:
    """Whether the engine waits for init containers, according to the kubelet."""
    waiting = pod_view.engine_status(policy, pod).state.waiting
    return waiting is not None and waiting.reason == "PodInitializing"


def _event_failure(pod: Pod, context: PodContext, now: float) -> tuple[Reason, str] | None:
    names, _ = _injected_volumes(pod, context)
    images = {
        each.image: each.name
        for each in pod.spec.init_containers
        if objects.is_injected_name(each.name)
    }
    pulling: str | None = None
    for event in sorted(context.events, key=event_time):
        reason, message = str(event.get("reason") or ""), str(event.get("message") or "")
        if reason in ("Pulling", "Pulled"):
            image = next((image for image in images if f'"{image}"' in message), None)
            if image is not None:
                pulling = image if reason == "Pulling" else None
        if now - event_time(event) > RECENT_SECONDS:
            continue
        # The rest of the message lists all volumes that are not attached yet, including those that
        # work.
        cause = message.split("unattached volumes", 1)[0]
        if reason in MOUNT_EVENTS:
            named = _first_named(names, cause)
            if named is not None:
                return Reason.VOLUME_NOT_MOUNTED, f"{named} cannot be mounted: {shortened(message)}"
        elif reason == "FailedCreatePodSandBox" and names_injected_part(cause):
            return Reason.CONTAINER_NOT_STARTED, shortened(message)
    if pulling is not None and not _any_injected_has_run(pod):
        text = f"the image of {images[pulling]}, {pulling}, is still being pulled"
        return Reason.IMAGE_NOT_PULLED, text
    return None


def _injected_volumes(pod: Pod, context: PodContext) -> tuple[set[str], set[str]]:
    """Names that messages use for injected volumes (volumes, claims, PersistentVolumes), and the
    claims among them.
    """
    names: set[str] = set()
    claims: set[str] = set()
    for volume in pod.spec.volumes:
        if not objects.is_injected_name(volume.name):
            continue
        names.add(volume.name)
        claim = ""
        if volume.ephemeral is not None:
            claim = f"{pod.metadata.name}-{volume.name}"
        elif volume.persistent_volume_claim is not None:
            claim = volume.persistent_volume_claim.claim_name
        if claim:
            claims.add(claim)
            names.add(claim)
            bound_to = objects.spec(context.get_claim(claim) or {}).get("volumeName")
            if bound_to:
                names.add(str(bound_to))
    return names, claims


def _first_named(names: Iterable[str], message: str) -> str | None:
    for name in sorted(names):
        if re.search(rf"(?<![A-Za-z0-9.-]){re.escape(name)}(?![A-Za-z0-9.-]*[A-Za-z0-9])", message):
            return name
    return None


def _has_own_claims(pod: Pod) -> bool:
    """Whether the pod mounts claims that were not injected."""
    return any(
        volume.persistent_volume_claim is not None or volume.ephemeral is not None
        for volume in pod.spec.volumes
        if not objects.is_injected_name(volume.name)
    )


def _any_injected_has_run(pod: Pod) -> bool:
    return any(
        status.has_run
        for status in pod.status.all_container_statuses
        if objects.is_injected_name(status.name)
    )
