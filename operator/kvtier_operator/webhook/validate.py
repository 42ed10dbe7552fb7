"""Deciding about a policy that is created or changed: what is refused, what a person is warned of. Pure.

The CRD refuses by CEL what one object shows to be wrong; this says it again for API servers that did not, and adds what
CEL cannot see: the administrator's allow-lists and the other policies of the namespace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier_operator.api import allowlist
from kvtier_operator.api.allowlist import AllowedVolume
from kvtier_operator.api.names import INJECT_LABEL
from kvtier_operator.api.policy import GROUP, KIND, KVTierPolicy
from kvtier_operator.api.selector import LabelSelector, Operator, matches
from kvtier_operator.api.settings import AttachMode
from kvtier_operator.api.validation import FieldError, InvalidDocumentError, validated
from kvtier_operator.injection.sidecar import sub_path
from kvtier_operator.settings import Settings
from kvtier_operator.webhook.review import Review


@dataclass(frozen=True, slots=True)
class Findings:
    """Any refusal refuses the whole; warnings are shown by kubectl and change nothing."""

    refusals: tuple[FieldError, ...] = ()
    warnings: tuple[str, ...] = ()


def examine(
    asked: Review,
    others: Sequence[KVTierPolicy],
    settings: Settings,
    namespace_labels: Mapping[str, str] | None = None,
) -> Findings:
    """What is wrong with the policy that is asked about, and what a person should know. ``others``: the policies of its
    namespace, itself among them or not. ``namespace_labels``: None where the namespace is not known.
    """
    allowed = settings.allowed_volumes
    if (
        (asked.group, asked.kind) != (GROUP, KIND)
        or asked.operation not in ("CREATE", "UPDATE")
        or asked.sub_resource
    ):
        return Findings()
    document = _complete(asked.object, asked)
    if (asked.object.get("metadata") or {}).get("deletionTimestamp"):
        return Findings()
    policy, found = _refusals(document, allowed)
    tolerated: list[FieldError] = []
    if found and asked.old is not None:
        # What was there before stays as it is until somebody touches it: a list that became stricter must keep nobody
        # from changing a weight, a label or a finalizer. The policy's Accepted condition says what is wrong.
        before = set(_refusals(_complete(asked.old, asked), allowed)[1])
        untouched = asked.old.get("spec") == asked.object.get("spec")
        tolerated = [refusal for refusal in found if untouched or refusal in before]
    refused = tuple(refusal for refusal in found if refusal not in tolerated)
    warnings = [refusal.message for refusal in tolerated]
    if policy is not None:
        name = policy.metadata.name
        warnings += _of_the_namespace(policy, settings, namespace_labels)
        warnings += _of_others(
            policy, [other for other in others if other.metadata.name != name], settings
        )
    return Findings(refused, tuple(warnings))


def _refusals(
    document: Mapping[str, Any], allowed: Sequence[AllowedVolume]
) -> tuple[KVTierPolicy | None, list[FieldError]]:
    try:
        policy = validated(KVTierPolicy, document)
    except InvalidDocumentError as error:
        return None, error.errors
    return policy, allowlist.volume_errors(policy, allowed)


def _complete(document: Mapping[str, Any], asked: Review) -> dict[str, Any]:
    """With what the API server fills in later; without what people do not write."""
    metadata = dict(document.get("metadata") or {})
    metadata.setdefault("namespace", asked.namespace)
    if "name" not in metadata and metadata.get("generateName"):
        metadata["name"] = asked.name or f"{metadata['generateName']}xxxxx"
    return {**document, "metadata": metadata, "status": None}


def _of_the_namespace(
    policy: KVTierPolicy, settings: Settings, namespace_labels: Mapping[str, str] | None
) -> Iterator[str]:
    namespace = policy.namespace
    if settings.watch_namespaces and namespace not in settings.watch_namespaces:
        yield f"metadata.namespace: the operator does not look at {namespace}, only at {', '.join(settings.watch_namespaces)}"
    unlabelled = namespace_labels is not None and namespace_labels.get(INJECT_LABEL) != "enabled"
    if unlabelled and policy.spec.attach.mode is AttachMode.WEBHOOK:
        yield f"metadata.namespace: no pod of {namespace} gets tiers until its administrator labels it {INJECT_LABEL}=enabled"


def _of_others(
    policy: KVTierPolicy, others: Sequence[KVTierPolicy], settings: Settings
) -> Iterator[str]:
    for other in sorted(others, key=lambda each: each.metadata.name):
        if overlaps(policy.spec.pod_selector, other.spec.pod_selector):
            yield (
                f"spec.podSelector: policy {other.metadata.name} selects the same pods; the older policy governs each"
            )
        mine, theirs = dict(_places(policy, settings)), dict(_places(other, settings))
        common = sorted(mine.keys() & theirs.keys())
        if not common:
            continue
        yield (
            f"spec.tiers: policy {other.metadata.name} stores in the same place ({common[0]}); each keeps to its own "
            "capacity, so the place has to hold both"
        )
        together = [place for place in common if mine[place] and theirs[place]]
        seeds = policy.spec.engine.hash_seed, other.spec.engine.hash_seed
        if together and seeds[0] != seeds[1]:
            yield (
                f"spec.engine.hashSeed: {seeds[0]} here and {seeds[1]} in policy {other.metadata.name}, which shares "
                f"{together[0]}: neither finds what the other stored"
            )


def overlaps(left: LabelSelector, right: LabelSelector) -> bool:
    """Whether a pod that one selects as plainly as can be is selected by the other too. Two selectors about different
    labels do not count: almost any two could meet in some pod.
    """
    return matches(right, _example(left)) or matches(left, _example(right))


def _example(selector: LabelSelector) -> dict[str, str]:
    """Labels of a pod that the selector selects, and no others."""
    labels = {
        requirement.key: (requirement.values or [""])[0]
        for requirement in selector.match_expressions or ()
        if requirement.operator in (Operator.IN, Operator.EXISTS)
    }
    return {**labels, **(selector.match_labels or {})}


def _places(policy: KVTierPolicy, settings: Settings) -> Iterator[tuple[str, bool]]:
    """Where the policy stores that others may store as well; and whether in the very same directory."""
    for tier in policy.spec.tiers:
        if tier.file_system is None:
            continue
        volume = tier.file_system.volume
        together = sub_path(policy, tier, settings.allowed_volumes) is None
        if volume.persistent_volume_claim is not None:
            yield f"claim {volume.persistent_volume_claim.claim_name}", together
        elif volume.host_path is not None:
            yield f"hostPath {volume.host_path.path.rstrip('/')}", together
        elif volume.nfs is not None:
            yield f"{volume.nfs.server}:{volume.nfs.path.rstrip('/')}", together
