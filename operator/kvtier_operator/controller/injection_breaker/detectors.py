"""The injection breaker: what keeps a pod from starting because of a part that was added to it. Pure.

Three places to look: creations that the API server refused (``FailedCreate`` Events of the owner), pods that find no node,
and pods whose engine has never run. Whatever cannot be traced to an injected part is not the breaker's: most pods that
start slowly do so for reasons of their own.

An owner whose pod was kept down is suspended: it stands in the policy's status with the uid that its next pods name as
their controller, so the webhook knows them by their ``ownerReferences`` alone. A Deployment's pods name its ReplicaSet; a
changed template is another ReplicaSet and is tried at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvtier_operator.api.conditions import Reason
from kvtier_operator.api.names import PAYLOAD_CONTAINER
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.status import SuspendedOwner
from kvtier_operator.controller import objects
from kvtier_operator.controller.objects import Owner
from kvtier_operator.controller.pods import pod_view
from kvtier_operator.controller.pods.reports import text
from kvtier_operator.kube.resources import Object

MAX_SUSPENDED = 16
SETTLE_SECONDS = 2.0
"""Between the suspension in the status and the deletion of the stuck pod: by then the webhook has seen it."""
RECENT_SECONDS = 180.0
"""A failed mount is tried again within about two minutes; an older Event tells of one that succeeded since."""
IMAGE_REASONS = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "RegistryUnavailable",
)
START_REASONS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
MOUNT_EVENTS = ("FailedMount", "FailedAttachVolume", "FailedMapVolume")
_PART = re.compile(
    r"(?<![A-Za-z0-9./-])kvtier-(?:(?:payload|tierd|run|topology|token|key|shm|no-account)(?![A-Za-z0-9-])|(?:tier|secret)-)"
)
"""Names that are injected. A pod or a claim whose own name begins with kvtier- is not among them."""


@dataclass(frozen=True, slots=True)
class InjectionFailure:
    """What was found. ``pod``: the pod that is kept down; None: it was refused, and is none. ``owner``: who made it, or
    would have; None: nobody will make another.
    """

    owner: Owner | None
    reason: Reason
    message: str
    pod: Object | None = None


@dataclass(frozen=True, slots=True)
class DetectionContext:
    """What is known around a pod that does not start. ``claim``: a claim of its namespace by name; ``events``: the pod's;
    ``crowded_out``: see ``scheduling``.
    """

    claim: Callable[[str], Object | None]
    events: Sequence[Object] = ()
    crowded_out: str = ""


def waits(policy: KVTierPolicy, pod: Object, now: float) -> bool:
    """Whether an injected pod has been without a running engine for too long."""
    if not objects.injected(pod) or objects.terminating(pod) or objects.ended(pod):
        return False
    if pod_view.engine_ran(policy, pod):
        return False
    since = pod_view.waiting_since(policy, pod)
    return since is not None and now - since >= policy.spec.attach.start_timeout_seconds


def kept_down(
    policy: KVTierPolicy, pod: Object, around: DetectionContext, now: float
) -> InjectionFailure | None:
    """Why a pod that ``waits`` does, if an injected part is the reason."""
    found = _unschedulable(pod, around) or _container(policy, pod, now) or _events(pod, around, now)
    if found is None:
        return None
    reason, message = found
    return InjectionFailure(
        objects.controller(pod), reason, f"pod {objects.name(pod)}: {message}", pod
    )


def refused(event: Object, numbers_are_ours: bool) -> InjectionFailure | None:
    """The refusal in a ``FailedCreate`` Event, if an injected part is the reason. ``numbers_are_ours``: whether a refusal
    by quota or LimitRange goes away without what is added (see ``refusals``).
    """
    message = str(event.get("message") or "")
    owner = refused_owner(event)
    if owner is not None and (
        names_a_part(message) or "is invalid:" in message or numbers_are_ours
    ):
        return InjectionFailure(
            owner, Reason.REFUSED, f"a pod of {owner} was refused: {shortened(message)}"
        )
    return None


def refused_owner(event: Object) -> Owner | None:
    """Whose pod was not created."""
    about = event.get("involvedObject") or {}
    owner = Owner(*(str(about.get(key) or "") for key in ("apiVersion", "kind", "name", "uid")))
    return owner if owner.uid else None


def names_a_part(message: str) -> bool:
    """Whether an injected container or volume is named."""
    return _PART.search(message) is not None


def shortened(message: str) -> str:
    """Of one line, and bounded."""
    return text(message)[:240]


def happened(event: Object) -> float:
    """When an Event was last seen, in seconds since 1970; 0 where it does not say."""
    series = event.get("series") or {}
    for written in (
        series.get("lastObservedTime"),
        event.get("lastTimestamp"),
        event.get("eventTime"),
    ):
        when = objects.parse_time(written)
        if when is not None:
            return when
    return objects.parse_time(objects.metadata(event).get("creationTimestamp")) or 0.0


def suspensions(
    policy: KVTierPolicy,
    in_force: Iterable[SuspendedOwner],
    troubles: Iterable[InjectionFailure],
    now: float,
) -> list[SuspendedOwner]:
    """Whose next pods are left alone: who is in force and not over, and who is in trouble. At most ``MAX_SUSPENDED``,
    those that are there first.
    """
    kept: dict[str, SuspendedOwner] = {}
    for entry in in_force:
        until = objects.parse_time(entry.until)
        if until is not None and until > now:
            kept.setdefault(entry.uid, entry)
    until_text = objects.format_time(now + policy.spec.attach.retry_seconds)
    for trouble in troubles:
        owner = trouble.owner
        if owner is None or owner.uid in kept or len(kept) >= MAX_SUSPENDED:
            continue
        found = {"kind": owner.kind, "name": owner.name, "uid": owner.uid}
        kept[owner.uid] = SuspendedOwner.model_validate(
            {**found, "reason": trouble.reason.value, "until": until_text}
        )
    return list(kept.values())


def deletable(
    policy: KVTierPolicy,
    in_force: Iterable[SuspendedOwner],
    troubles: Iterable[InjectionFailure],
    now: float,
    changed_at: float = 0.0,
) -> tuple[list[InjectionFailure], float | None]:
    """Stuck pods whose owner makes others that are left alone, or that get what the policy says since ``changed_at``; and
    in how many seconds to look again for those whose owner is not known to be suspended yet.
    """
    since = {
        entry.uid: (objects.parse_time(entry.until) or now) - policy.spec.attach.retry_seconds
        for entry in in_force
    }
    found: list[InjectionFailure] = []
    wake: float | None = None
    for trouble in troubles:
        if trouble.pod is None or trouble.owner is None:
            continue
        began = since.get(trouble.owner.uid)
        if older(trouble, changed_at) or (began is not None and now - began >= SETTLE_SECONDS):
            found.append(trouble)
        else:
            wake = SETTLE_SECONDS
    return found, wake


def older(trouble: InjectionFailure, changed_at: float) -> bool:
    """Whether the pod was given what the policy said before it changed: that says nothing about what it says since."""
    if trouble.pod is None:
        return False
    created = objects.parse_time(objects.metadata(trouble.pod).get("creationTimestamp"))
    return created is not None and created < changed_at - 1.0


def _injected_volumes(pod: Object, around: DetectionContext) -> tuple[set[str], set[str]]:
    """Names by which Events may call them (volumes, claims, PersistentVolumes), and the claims among them."""
    names: set[str] = set()
    claims: set[str] = set()
    for volume in objects.spec(pod).get("volumes") or ():
        if not objects.ours(str(volume.get("name"))):
            continue
        names.add(str(volume["name"]))
        claim = (volume.get("persistentVolumeClaim") or {}).get("claimName")
        if "ephemeral" in volume:
            claim = f"{objects.name(pod)}-{volume['name']}"
        if claim:
            claims.add(str(claim))
            bound = objects.spec(around.claim(str(claim)) or {}).get("volumeName")
            names |= {str(claim), *([str(bound)] if bound else [])}
    return names, claims


def _named(names: Iterable[str], message: str) -> str | None:
    for name in sorted(names):
        if re.search(rf"(?<![A-Za-z0-9.-]){re.escape(name)}(?![A-Za-z0-9.-]*[A-Za-z0-9])", message):
            return name
    return None


def _unschedulable(pod: Object, around: DetectionContext) -> tuple[Reason, str] | None:
    scheduled = objects.condition(pod, "PodScheduled")
    if scheduled.get("status") != "False" or scheduled.get("reason") != "Unschedulable":
        return None
    message = str(scheduled.get("message") or "")
    names, claims = _injected_volumes(pod, around)
    named = _named(names, message)
    if named is not None:
        return Reason.UNSCHEDULABLE, f"no node, because of {named}: {shortened(message)}"
    if "PersistentVolumeClaim" in message or "persistent volume" in message:
        pending = sorted(
            claim
            for claim in claims
            if objects.status(around.claim(claim) or {}).get("phase") != "Bound"
        )
        if pending:
            return Reason.UNSCHEDULABLE, f"no node, because the claim {pending[0]} is not bound"
    if "volume node affinity" in message and claims and not _own_claims(pod):
        return Reason.UNSCHEDULABLE, f"no node can mount the claim {min(claims)}"
    if around.crowded_out:
        return Reason.UNSCHEDULABLE, around.crowded_out
    return None


def _own_claims(pod: Object) -> bool:
    return any(
        "persistentVolumeClaim" in volume or "ephemeral" in volume
        for volume in objects.spec(pod).get("volumes") or ()
        if not objects.ours(str(volume.get("name")))
    )


def _container(policy: KVTierPolicy, pod: Object, now: float) -> tuple[Reason, str] | None:
    volumes = [
        str(volume["image"].get("reference"))
        for volume in objects.spec(pod).get("volumes") or ()
        if objects.ours(str(volume.get("name"))) and volume.get("image")
    ]
    for entry in objects.container_statuses(pod):
        container = str(entry.get("name"))
        state = entry.get("state") or {}
        waiting = state.get("waiting") or {}
        reason, message = (
            str(waiting.get("reason") or ""),
            shortened(str(waiting.get("message") or "")),
        )
        if not objects.ours(container):
            # An image volume is pulled for the container that mounts it.
            image = next((image for image in volumes if image in message), None)
            if image is not None and reason in IMAGE_REASONS:
                return (
                    Reason.IMAGE_NOT_PULLED,
                    f"the image volume {image} is in {reason}: {message}",
                )
            continue
        said = f"{container} is in {reason}" + (f": {message}" if message else "")
        if reason in IMAGE_REASONS:
            return Reason.IMAGE_NOT_PULLED, said
        if reason in START_REASONS:
            return Reason.CONTAINER_NOT_STARTED, said
        # Beside an engine whose image is being pulled, a sidecar that crashes keeps nobody from starting. One that ends
        # before the kubelet has seen it run does: then the engine still waits for the initialisation.
        if container != PAYLOAD_CONTAINER and not _initialising(policy, pod):
            continue
        ended = state.get("terminated") or (entry.get("lastState") or {}).get("terminated") or {}
        if reason == "CrashLoopBackOff" or ended.get("exitCode"):
            return (
                Reason.CONTAINER_NOT_STARTED,
                f"{container} ends with exit code {ended.get('exitCode')}",
            )
        began = objects.parse_time((state.get("running") or {}).get("startedAt"))
        if (
            container == PAYLOAD_CONTAINER
            and began is not None
            and now - began >= policy.spec.attach.start_timeout_seconds
        ):
            return Reason.CONTAINER_NOT_STARTED, f"{container} does not end"
    return None


def _initialising(policy: KVTierPolicy, pod: Object) -> bool:
    """Whether the engine waits for init containers, as its kubelet says."""
    entry = objects.container_status(pod, objects.engine(pod, policy.spec.engine.container_name))
    return ((entry.get("state") or {}).get("waiting") or {}).get("reason") == "PodInitializing"


def _events(pod: Object, around: DetectionContext, now: float) -> tuple[Reason, str] | None:
    names, _ = _injected_volumes(pod, around)
    images = {
        str(container.get("image")): str(container.get("name"))
        for container in objects.spec(pod).get("initContainers") or ()
        if objects.ours(str(container.get("name")))
    }
    pulling: str | None = None
    for event in sorted(around.events, key=happened):
        reason, message = str(event.get("reason") or ""), str(event.get("message") or "")
        if reason in ("Pulling", "Pulled"):
            image = next((image for image in images if f'"{image}"' in message), None)
            if image is not None:
                pulling = image if reason == "Pulling" else None
        if now - happened(event) > RECENT_SECONDS:
            continue
        # What follows lists every volume that is not attached yet, the innocent ones too.
        blamed = message.split("unattached volumes", 1)[0]
        if reason in MOUNT_EVENTS:
            named = _named(names, blamed)
            if named is not None:
                return Reason.VOLUME_NOT_MOUNTED, f"{named} cannot be mounted: {shortened(message)}"
        elif reason == "FailedCreatePodSandBox" and names_a_part(blamed):
            return Reason.CONTAINER_NOT_STARTED, shortened(message)
    if pulling is not None and not _anything_ran(pod):
        return (
            Reason.IMAGE_NOT_PULLED,
            f"the image of {images[pulling]}, {pulling}, is still being pulled",
        )
    return None


def _anything_ran(pod: Object) -> bool:
    return any(
        objects.ever_ran(entry)
        for entry in objects.container_statuses(pod)
        if objects.ours(str(entry.get("name")))
    )
