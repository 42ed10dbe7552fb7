"""Which tiers a pod is given, and the structural document that says so. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from kvtier.config.models import HttpEndpoint, Structural
from kvtier_operator.api.conditions import SkipReason
from kvtier_operator.api.names import (
    HASH_ANNOTATION,
    POD_HTTP_PORT,
    POLICY_UID_ANNOTATION,
    STRUCTURAL_ANNOTATION,
)
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.selector import matches
from kvtier_operator.api.tiers import Tier
from kvtier_operator.injection.decision import AdmissionContext, PodObject, Skipped
from kvtier_operator.injection.existing_config import GROUP_LABEL
from kvtier_operator.injection.resources import containers
from kvtier_operator.render.documents import (
    POD_HTTP,
    content_hash,
    pod_placement,
    structural,
    structural_text,
)

NETWORK_SOURCES = frozenset({"nfs", "persistentVolumeClaim", "claimTemplate"})
"""Volumes that the kubelet may wait for, and the engine with it."""
HOST_PORTS = (20_000, 10_000)
"""First, and how many: on a node's own address tierd takes one of these."""
OTHER_PORTS = 64
"""How many ports after the usual one are looked at where the pod has it already."""


@dataclass(frozen=True, slots=True)
class Structure:
    """``text``: the annotation. ``tiers``: those of the policy that the pod gets. ``port``: of tierd's HTTP server."""

    text: str
    tiers: tuple[Tier, ...]
    port: int
    notes: tuple[str, ...] = ()


def structure(
    policy: KVTierPolicy, pod: PodObject, around: AdmissionContext
) -> Structure | Skipped:
    """The pod's structure. Pods of a LeaderWorkerSet group have the same, to the letter. Raises
    ``ConfigurationError`` for one that is too long for an annotation.
    """
    group = ((pod.get("metadata") or {}).get("labels") or {}).get(GROUP_LABEL)
    siblings = _living(policy, around.siblings, pod) if group else []
    if siblings:
        return _of_siblings(policy, siblings, str(group))
    tiers, notes = _reachable(policy, pod, around)
    port = _port(policy, pod)
    spec = policy.spec.model_copy(update={"tiers": list(tiers)})
    rendered = policy.model_copy(update={"spec": spec})
    placement = replace(pod_placement(rendered), http=HttpEndpoint(host=POD_HTTP.host, port=port))
    document = structural(rendered, placement)
    # The hash is the policy's, not that of what a tier was left out of: a pod is outdated when the policy has changed.
    document = document.model_copy(update={"content_hash": content_hash(policy.spec)})
    return Structure(structural_text(document), tuple(tiers), port, tuple(notes))


def _reachable(
    policy: KVTierPolicy, pod: PodObject, around: AdmissionContext
) -> tuple[list[Tier], list[str]]:
    """The tiers whose volumes can be expected to be mounted, and what is left out."""
    own_users = (pod.get("spec") or {}).get("hostUsers") is False
    kept: list[Tier] = []
    unready: list[str] = []
    unmapped: list[str] = []
    for tier in policy.spec.tiers:
        sources = tier.file_system.volume.sources if tier.file_system is not None else ()
        if own_users and "nfs" in sources:
            unmapped.append(tier.name)
        elif not around.storage_ready and NETWORK_SOURCES.intersection(sources):
            unready.append(tier.name)
        else:
            kept.append(tier)
    notes = []
    if unready:
        notes.append(
            "left out while the policy's StorageReady is False, so that no volume keeps the engine from starting: "
            f"{', '.join(unready)}. A pod that is made later has them again"
        )
    if unmapped:
        notes.append(
            f"left out, because NFS cannot be mounted into a pod with users of its own (hostUsers: false): {', '.join(unmapped)}"
        )
    return kept, notes


def _living(policy: KVTierPolicy, siblings: Sequence[PodObject], pod: PodObject) -> list[PodObject]:
    """Others of the group that run or will, and that the policy is about: a group may have pods that are no engines."""
    own = (pod.get("metadata") or {}).get("name")
    return [
        each
        for each in siblings
        if matches(policy.spec.pod_selector, (each.get("metadata") or {}).get("labels") or {})
        and not (each.get("metadata") or {}).get("deletionTimestamp")
        and (each.get("status") or {}).get("phase") not in ("Failed", "Succeeded")
        and (own is None or (each.get("metadata") or {}).get("name") != own)
    ]


def _of_siblings(
    policy: KVTierPolicy, siblings: Sequence[PodObject], group: str
) -> Structure | Skipped:
    texts = {_annotations(each).get(STRUCTURAL_ANNOTATION) for each in siblings}
    names = ", ".join(
        sorted(str((each.get("metadata") or {}).get("name")) for each in siblings)[:4]
    )
    if None in texts:
        return _mixed(
            f"of group {group}, {names} or others run without tiers; delete the group's leader to renew it"
        )
    if len(texts) > 1:
        return _mixed(
            f"pods of group {group} ({names}) differ; delete the group's leader to renew it"
        )
    first = _annotations(siblings[0])
    text = str(first[STRUCTURAL_ANNOTATION])
    same = first.get(POLICY_UID_ANNOTATION, "") == (policy.metadata.uid or "")
    if not same or first.get(HASH_ANNOTATION) != content_hash(policy.spec):
        return _mixed(
            f"pods of group {group} ({names}) have a structure that is no longer the policy's; delete the group's leader "
            "to renew it"
        )
    try:
        document = Structural.model_validate_json(text)
    except ValidationError:
        return _mixed(
            f"the structure of pods of group {group} ({names}) cannot be read; delete the group's leader"
        )
    given = {tier.name for tier in document.tiers}
    tiers = tuple(tier for tier in policy.spec.tiers if tier.name in given)
    notes = (
        (f"structure as in the other pods of group {group}",)
        if len(tiers) < len(policy.spec.tiers)
        else ()
    )
    return Structure(text, tiers, document.http.port, notes)


def _mixed(message: str) -> Skipped:
    return Skipped(SkipReason.MIXED_GROUP, message)


def _annotations(pod: Mapping[str, Any]) -> Mapping[str, str]:
    return (pod.get("metadata") or {}).get("annotations") or {}


def _port(policy: KVTierPolicy, pod: PodObject) -> int:
    spec = pod.get("spec") or {}
    taken = {
        int(port.get(kind) or 0)
        for each in containers(spec)
        for port in each.get("ports") or ()
        for kind in ("containerPort", "hostPort")
    }
    if spec.get("hostNetwork"):
        metadata = pod.get("metadata") or {}
        # The pods of a group have one structure, which is made before they can see each other's.
        name = (
            (metadata.get("labels") or {}).get(GROUP_LABEL)
            or metadata.get("name")
            or metadata.get("generateName")
        )
        digest = hashlib.sha256(
            f"{policy.namespace}/{name or ''}/{policy.metadata.uid}".encode()
        ).digest()
        first, count = HOST_PORTS
        start = int.from_bytes(digest[:4], "big") % count
        candidates = [first + (start + step) % count for step in range(OTHER_PORTS)]
    else:
        candidates = list(range(POD_HTTP_PORT, POD_HTTP_PORT + OTHER_PORTS))
    return next((port for port in candidates if port not in taken), candidates[0])
