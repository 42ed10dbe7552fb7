"""Reading pods and their owners as the API server sends them. Whatever is absent reads as empty."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kvtier_operator.api.names import (
    INJECTED_NAMES,
    RUN_VOLUME,
    STRUCTURAL_ANNOTATION,
    TIERD_CONTAINER,
)
from kvtier_operator.kube.resources import Object

GROUP_KEY_LABEL = "leaderworkerset.sigs.k8s.io/group-key"
SET_NAME_LABEL = "leaderworkerset.sigs.k8s.io/name"
MIRROR_ANNOTATION = "kubernetes.io/config.mirror"
ENDED_PHASES = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class Owner:
    """The controller owner of an object."""

    api_version: str
    kind: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def metadata(found: Object) -> Mapping[str, Any]:
    """``metadata``."""
    about: Mapping[str, Any] = found.get("metadata") or {}
    return about


def name(found: Object) -> str:
    """Its name."""
    return str(metadata(found).get("name") or "")


def uid(found: Object) -> str:
    """Its uid."""
    return str(metadata(found).get("uid") or "")


def namespace(found: Object) -> str:
    """Its namespace."""
    return str(metadata(found).get("namespace") or "")


def annotated(found: Object) -> Mapping[str, str]:
    """Its annotations."""
    return metadata(found).get("annotations") or {}


def labels(found: Object) -> Mapping[str, str]:
    """Its labels."""
    return metadata(found).get("labels") or {}


def spec(found: Object) -> Mapping[str, Any]:
    """``spec``."""
    described: Mapping[str, Any] = found.get("spec") or {}
    return described


def status(found: Object) -> Mapping[str, Any]:
    """``status``."""
    reported: Mapping[str, Any] = found.get("status") or {}
    return reported


def controller(found: Object) -> Owner | None:
    """The owner that made it, if one did."""
    for owner in metadata(found).get("ownerReferences") or ():
        if owner.get("controller"):
            return Owner(
                *(str(owner.get(key) or "") for key in ("apiVersion", "kind", "name", "uid"))
            )
    return None


def parse_time(text: Any) -> float | None:
    """Seconds since 1970 of a time as Kubernetes writes it; None where it is none."""
    if not isinstance(text, str) or not text:
        return None
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (parsed if parsed.tzinfo is not None else parsed.replace(tzinfo=UTC)).timestamp()


def format_time(seconds: float) -> str:
    """A time as Kubernetes writes it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(found: Object, kind: str) -> Mapping[str, Any]:
    """One condition of its status; empty where there is none."""
    for entry in status(found).get("conditions") or ():
        if entry.get("type") == kind:
            answer: Mapping[str, Any] = entry
            return answer
    return {}


def container_statuses(pod: Object) -> Iterator[Mapping[str, Any]]:
    """Of init containers, then of the others."""
    for group in ("initContainerStatuses", "containerStatuses"):
        yield from status(pod).get(group) or ()


def container_status(pod: Object, container: str) -> Mapping[str, Any]:
    """Of one container; empty where the kubelet has said nothing."""
    for entry in container_statuses(pod):
        if entry.get("name") == container:
            return entry
    return {}


def injected(pod: Object) -> bool:
    """Whether it was given tiers at its creation."""
    return STRUCTURAL_ANNOTATION in annotated(pod)


def ours(container: str) -> bool:
    """Whether a container or volume of that name was injected."""
    return container.startswith(INJECTED_NAMES)


def has_tierd(pod: Object) -> bool:
    """Whether a sidecar was injected (``daemon: Sidecar``)."""
    return any(
        each.get("name") == TIERD_CONTAINER for each in spec(pod).get("initContainers") or ()
    )


def has_daemon(pod: Object) -> bool:
    """Whether tierd runs in it, wherever: the volume that engines and tierd share is there. With a connector that is not
    KVTier's there is none, and nobody who could be asked.
    """
    return any(volume.get("name") == RUN_VOLUME for volume in spec(pod).get("volumes") or ())


def engine(pod: Object, said: str | None) -> str:
    """Name of the engine's container: the one that the policy says, else the one that was given a volume, else the first."""
    containers = [
        each for each in spec(pod).get("containers") or () if not ours(str(each.get("name")))
    ]
    names = [str(each.get("name")) for each in containers]
    if said in names and said is not None:
        return said
    for each in containers:
        if any(ours(str(mount.get("name"))) for mount in each.get("volumeMounts") or ()):
            return str(each.get("name"))
    return names[0] if names else ""


def ever_ran(entry: Mapping[str, Any]) -> bool:
    """Whether a container has run at any time, by its status."""
    state = entry.get("state") or {}
    return bool(
        "running" in state
        or "terminated" in state
        or entry.get("lastState")
        or (entry.get("restartCount") or 0) > 0
    )


def ended(pod: Object) -> bool:
    """Whether all its containers have ended for good."""
    return status(pod).get("phase") in ENDED_PHASES


def terminating(pod: Object) -> bool:
    """Whether its deletion was asked for."""
    return bool(metadata(pod).get("deletionTimestamp"))


def listed(names: Iterable[str], most: int = 3) -> str:
    """``a, b, c and 5 more``, in the order of the alphabet, so that the same set reads the same."""
    known = sorted(set(names))
    shown = ", ".join(known[:most])
    return f"{shown} and {len(known) - most} more" if len(known) > most else shown


def plural(number: int, word: str, verb: str = "") -> str:
    """``1 pod``, ``2 pods``; with a verb ``1 pod waits``, ``2 pods wait``."""
    if number == 1:
        third = {"have": "has"}.get(verb, f"{verb}s")
        return f"1 {word} {third}" if verb else f"1 {word}"
    return f"{number} {word}s {verb}" if verb else f"{number} {word}s"


def is_terminating(found: Object) -> bool:
    """Whether the object is being deleted: nothing is applied to such a one."""
    return bool(found["metadata"].get("deletionTimestamp"))
