"""Reading Kubernetes objects: untyped ones as the cache holds them, and decoded pods. An absent
field reads as empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from kvtier_operator.api.names import (
    INJECTED_NAMES,
    RUN_VOLUME,
    STRUCTURAL_ANNOTATION,
    TIERD_CONTAINER,
)
from kvtier_operator.api.pods import ContainerStatus, OwnerReference, Pod
from kvtier_operator.kube.resources import Object

GROUP_KEY_LABEL = "leaderworkerset.sigs.k8s.io/group-key"
SET_NAME_LABEL = "leaderworkerset.sigs.k8s.io/name"
NO_STATUS = ContainerStatus()


def metadata(found: Object) -> Mapping[str, Any]:
    """``metadata``."""
    value: Mapping[str, Any] = found.get("metadata") or {}
    return value


def name(found: Object) -> str:
    """``metadata.name``."""
    return str(metadata(found).get("name") or "")


def uid(found: Object) -> str:
    """``metadata.uid``."""
    return str(metadata(found).get("uid") or "")


def labels(found: Object) -> Mapping[str, str]:
    """``metadata.labels``."""
    return metadata(found).get("labels") or {}


def spec(found: Object) -> Mapping[str, Any]:
    """``spec``."""
    value: Mapping[str, Any] = found.get("spec") or {}
    return value


def status(found: Object) -> Mapping[str, Any]:
    """``status``."""
    value: Mapping[str, Any] = found.get("status") or {}
    return value


def is_terminating(found: Object) -> bool:
    """Whether the object is being deleted."""
    return bool(metadata(found).get("deletionTimestamp"))


def controller_owner(found: Object) -> OwnerReference | None:
    """The owner that manages the object, or None."""
    for owner in metadata(found).get("ownerReferences") or ():
        if owner.get("controller"):
            return owner_reference(owner)
    return None


def owner_reference(reference: Mapping[str, Any]) -> OwnerReference:
    """An owner from ``ownerReferences`` or ``involvedObject``."""
    return OwnerReference(
        api_version=str(reference.get("apiVersion") or ""),
        kind=str(reference.get("kind") or ""),
        name=str(reference.get("name") or ""),
        uid=str(reference.get("uid") or ""),
        controller=True,
    )


def owner_text(owner: OwnerReference) -> str:
    """Kind and name, for messages."""
    return f"{owner.kind} {owner.name}"


def parse_time(value: object) -> float | None:
    """Seconds since 1970 of a Kubernetes timestamp; None if it is not one."""
    if not isinstance(value, str) or not value:
        return None
    try:
        parsed = datetime.fromisoformat(value)
    except ValueError:
        return None
    return (parsed if parsed.tzinfo is not None else parsed.replace(tzinfo=UTC)).timestamp()


def format_time(seconds: float) -> str:
    """A Kubernetes timestamp, from seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def is_injected(pod: Pod) -> bool:
    """Whether the webhook added tiers to the pod when it was created."""
    return STRUCTURAL_ANNOTATION in pod.metadata.annotations


def is_injected_name(container_or_volume: str) -> bool:
    """Whether the webhook added the container or volume of that name."""
    return container_or_volume.startswith(INJECTED_NAMES)


def has_tierd_sidecar(pod: Pod) -> bool:
    """Whether a tierd sidecar was injected (``daemon: Sidecar``)."""
    return any(each.name == TIERD_CONTAINER for each in pod.spec.init_containers)


def has_tierd(pod: Pod) -> bool:
    """Whether tierd runs in the pod, as a sidecar or in the engine's container: both share a volume
    with the engine. Pods with another connector have none, and cannot be polled.
    """
    return any(volume.name == RUN_VOLUME for volume in pod.spec.volumes)


def engine_container(pod: Pod, configured: str | None) -> str:
    """Name of the engine's container: the one that the policy configures, else the one with an
    injected volume, else the first.
    """
    containers = [each for each in pod.spec.containers if not is_injected_name(each.name)]
    names = [each.name for each in containers]
    if configured is not None and configured in names:
        return configured
    for each in containers:
        if any(is_injected_name(mount.name) for mount in each.volume_mounts):
            return each.name
    return names[0] if names else ""


def join_names(names: Iterable[str], most: int = 3) -> str:
    """``a, b, c and 5 more``. Sorted, so that the same set gives the same text."""
    ordered = sorted(set(names))
    text = ", ".join(ordered[:most])
    return f"{text} and {len(ordered) - most} more" if len(ordered) > most else text


def plural(number: int, word: str, verb: str = "") -> str:
    """``1 pod``, ``2 pods``; with a verb ``1 pod waits``, ``2 pods wait``."""
    if number == 1:
        third = {"have": "has"}.get(verb, f"{verb}s")
        return f"1 {word} {third}" if verb else f"1 {word}"
    return f"{number} {word}s {verb}" if verb else f"{number} {word}s"
