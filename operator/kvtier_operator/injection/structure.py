"""Which tiers a pod gets, and the structural document that describes them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import ValidationError

from kvtier.config.models import HttpEndpoint, Structural
from kvtier_operator.api.conditions import SkipReason
from kvtier_operator.api.names import (
    HASH_ANNOTATION,
    POD_HTTP_PORT,
    POLICY_UID_ANNOTATION,
    STRUCTURAL_ANNOTATION,
)
from kvtier_operator.api.pods import Pod
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.selector import matches
from kvtier_operator.api.tiers import TierSpec
from kvtier_operator.injection.decision import AdmissionContext, Skipped
from kvtier_operator.injection.existing_config import GROUP_LABEL
from kvtier_operator.render.documents import (
    POD_HTTP,
    content_hash,
    pod_placement,
    structural,
    structural_text,
)

NETWORK_SOURCES = frozenset({"nfs", "persistentVolumeClaim", "claimTemplate"})
"""Volumes that the kubelet may wait for, and the engine with it."""
MAX_PORTS_TRIED = 64


@dataclass(frozen=True, slots=True)
class Structure:
    """``text``: the structural annotation. ``tiers``: the policy's tiers that the pod gets.
    ``port``: of tierd's HTTP server, to be declared in the pod; None in a pod with ``hostNetwork``,
    which declares none (``kvtier.config.host_ports``). ``notes``: for the pod's owner.
    """

    text: str
    tiers: tuple[TierSpec, ...]
    port: int | None
    notes: tuple[str, ...] = ()


def decide_structure(
    policy: KVTierPolicy, pod: Pod, context: AdmissionContext
) -> Structure | Skipped:
    """The pod's structure. All pods of a LeaderWorkerSet group have an identical one. Raises
    ``ConfigurationError`` if the document is too long for an annotation.
    """
    group = pod.metadata.labels.get(GROUP_LABEL)
    siblings = _active_siblings(policy, context.siblings, pod) if group else []
    if group and siblings:
        return _structure_of_siblings(policy, pod, siblings)
    tiers, notes = _mountable_tiers(policy, pod, context)
    port = None if pod.spec.host_network else _http_port(pod)
    spec = policy.spec.model_copy(update={"tiers": tiers})
    reduced = policy.model_copy(update={"spec": spec})
    placement = replace(
        pod_placement(reduced), http=HttpEndpoint(host=POD_HTTP.host, port=port or 0)
    )
    document = structural(reduced, placement)
    # The hash covers the whole policy, so that a pod without some tiers becomes outdated only if
    # the policy changes.
    document = document.model_copy(update={"content_hash": content_hash(policy.spec)})
    return Structure(structural_text(document), tuple(tiers), port, tuple(notes))


def _mountable_tiers(
    policy: KVTierPolicy, pod: Pod, context: AdmissionContext
) -> tuple[list[TierSpec], list[str]]:
    """The tiers whose volumes can be mounted, and notes about the others."""
    user_namespace = pod.spec.host_users is False
    tiers: list[TierSpec] = []
    not_ready: list[str] = []
    not_supported: list[str] = []
    for tier in policy.spec.tiers:
        sources = tier.file_system.sources if tier.file_system is not None else frozenset[str]()
        if user_namespace and "nfs" in sources:
            not_supported.append(tier.name)
        elif not context.storage_ready and NETWORK_SOURCES.intersection(sources):
            not_ready.append(tier.name)
        else:
            tiers.append(tier)
    notes = []
    if not_ready:
        notes.append(
            f"tiers {', '.join(not_ready)} are omitted while the policy's StorageReady is False, "
            "because their volumes could "
            "prevent the engine from starting; pods that are created later have them"
        )
    if not_supported:
        notes.append(
            f"tiers {', '.join(not_supported)} are omitted, because NFS cannot be mounted into a "
            "pod with a user namespace "
            "(hostUsers: false)"
        )
    return tiers, notes


def _active_siblings(policy: KVTierPolicy, siblings: Sequence[Pod], pod: Pod) -> list[Pod]:
    """Other pods of the group that the policy selects and that run or will run."""
    own_name = pod.metadata.name
    return [
        each
        for each in siblings
        if matches(policy.spec.pod_selector, each.metadata.labels)
        and not each.is_terminating
        and not each.has_ended
        and (not own_name or each.metadata.name != own_name)
    ]


def _structure_of_siblings(
    policy: KVTierPolicy, pod: Pod, siblings: Sequence[Pod]
) -> Structure | Skipped:
    group = pod.metadata.labels[GROUP_LABEL]
    texts = {each.metadata.annotations.get(STRUCTURAL_ANNOTATION) for each in siblings}
    names = ", ".join(sorted(each.metadata.name for each in siblings)[:4])
    restart = "delete the leader pod to recreate the group"
    if None in texts:
        return _mixed(f"pods of group {group} run without tiers ({names} or others); {restart}")
    if len(texts) > 1:
        return _mixed(f"pods of group {group} ({names}) have different structures; {restart}")
    annotations = siblings[0].metadata.annotations
    text = annotations[STRUCTURAL_ANNOTATION]
    same_policy = annotations.get(POLICY_UID_ANNOTATION, "") == (policy.metadata.uid or "")
    if not same_policy or annotations.get(HASH_ANNOTATION) != content_hash(policy.spec):
        return _mixed(
            f"pods of group {group} ({names}) have a structure that differs from the policy's; "
            f"{restart}"
        )
    try:
        document = Structural.model_validate_json(text)
    except ValidationError:
        return _mixed(f"the structure of the pods of group {group} ({names}) is invalid; {restart}")
    tier_names = {tier.name for tier in document.tiers}
    tiers = tuple(tier for tier in policy.spec.tiers if tier.name in tier_names)
    notes: tuple[str, ...] = ()
    if len(tiers) < len(policy.spec.tiers):
        notes = (f"the pod has the structure of the other pods of group {group}",)
    port = None if pod.spec.host_network else document.http.port
    return Structure(text, tiers, port, notes)


def _mixed(message: str) -> Skipped:
    return Skipped(SkipReason.MIXED_GROUP, message)


def _http_port(pod: Pod) -> int:
    """The first port from the default one on that no container of the pod has."""
    used = {
        number
        for container in pod.spec.all_containers
        for port in container.ports
        for number in (port.container_port, port.host_port)
    }
    candidates = range(POD_HTTP_PORT, POD_HTTP_PORT + MAX_PORTS_TRIED)
    return next((port for port in candidates if port not in used), candidates[0])
