"""Validation of policies that are created or updated: errors that deny, and warnings. Pure.

The CRD's CEL rules reject what is wrong with one object alone. This module repeats those checks,
for API servers that did not apply them, and adds what CEL cannot see: the administrator's
allowedVolumes and the namespace's other policies. The API server has dropped or rejected fields
that the CustomResourceDefinition lacks. A field that is left and that this version does not know
belongs to a newer CustomResourceDefinition, which may have set it by default: it gives a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier_operator.api import allowlist
from kvtier_operator.api.policy import GROUP, KIND, KVTierPolicy
from kvtier_operator.api.selector import (
    SELECTS_EVERYTHING,
    LabelSelector,
    Operator,
    describe,
    matches,
    selects_everything,
)
from kvtier_operator.api.settings import AttachMode
from kvtier_operator.api.stored import read_stored
from kvtier_operator.api.unenforced import not_enforced, unknown_field
from kvtier_operator.api.validation import FieldError, InvalidDocumentError
from kvtier_operator.injection.sidecar import sub_path
from kvtier_operator.render import connectors
from kvtier_operator.settings import Settings
from kvtier_operator.webhook.review import AdmissionRequest
from kvtier_operator.webhook.transitions import transition_warnings


@dataclass(frozen=True, slots=True)
class AdmissionAllowed:
    """The policy may be stored. kubectl shows the warnings."""

    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AdmissionDenied:
    """The policy must not be stored; ``errors`` holds every reason."""

    errors: tuple[FieldError, ...]
    warnings: tuple[str, ...] = ()


def validate(
    request: AdmissionRequest,
    others: Sequence[KVTierPolicy],
    settings: Settings,
    namespace_labels: Mapping[str, str] | None = None,
) -> AdmissionAllowed | AdmissionDenied:
    """Validates the policy in the request.

    ``others`` are the policies of its namespace and may include the policy itself.
    ``namespace_labels`` is None if the namespace is not in the cache. Requests about anything else
    are allowed.
    """
    about_policy = (request.group, request.kind, request.sub_resource) == (GROUP, KIND, "")
    if not about_policy or request.operation not in ("CREATE", "UPDATE"):
        return AdmissionAllowed()
    document = _defaulted(request.object, request)
    if (request.object.get("metadata") or {}).get("deletionTimestamp"):
        return AdmissionAllowed()
    policy, errors, unknown = _parse(document, settings)
    tolerated: list[FieldError] = []
    if errors and request.old is not None:
        # Ratcheting validation: an unchanged value stays valid after the rules became stricter, so
        # that weights, labels and finalizers can still change. The policy's Accepted condition
        # reports the error.
        previous = set(_parse(_defaulted(request.old, request), settings)[1])
        unchanged = request.old.get("spec") == request.object.get("spec")
        tolerated = [error for error in errors if unchanged or error in previous]
    warnings = [error.message for error in tolerated]
    warnings += [unknown_field(path) for path in unknown]
    if policy is not None:
        warnings += not_enforced(policy, settings.rollout.enabled)
        warnings += _selector_warnings(policy)
        warnings += [gap.message for gap in connectors.unsupported_fields(policy)]
        name = policy.metadata.name
        siblings = [other for other in others if other.metadata.name != name]
        warnings += _namespace_warnings(policy, settings, namespace_labels)
        warnings += _conflict_warnings(policy, siblings, settings)
        if request.old is not None:
            previous_policy = _parse(_defaulted(request.old, request), settings)[0]
            if previous_policy is not None:
                warnings += transition_warnings(previous_policy, policy)
    remaining = tuple(error for error in errors if error not in tolerated)
    if remaining:
        return AdmissionDenied(remaining, tuple(warnings))
    return AdmissionAllowed(tuple(warnings))


def overlaps(left: LabelSelector, right: LabelSelector) -> bool:
    """Whether the simplest pod that one selector matches is matched by the other too.

    Selectors for different labels do not count as overlapping: almost any two could match some pod.
    """
    return matches(right, _example_labels(left)) or matches(left, _example_labels(right))


def _parse(
    document: Mapping[str, Any], settings: Settings
) -> tuple[KVTierPolicy | None, list[FieldError], tuple[str, ...]]:
    try:
        stored = read_stored(document)
    except InvalidDocumentError as error:
        return None, error.errors, ()
    return stored.policy, allowlist.not_allowed(stored.policy, settings), stored.unknown_fields


def _defaulted(document: Mapping[str, Any], request: AdmissionRequest) -> dict[str, Any]:
    """The document with the metadata that the API server sets later, and without status."""
    metadata = dict(document.get("metadata") or {})
    metadata.setdefault("namespace", request.namespace)
    if "name" not in metadata and metadata.get("generateName"):
        metadata["name"] = request.name or f"{metadata['generateName']}xxxxx"
    return {**document, "metadata": metadata, "status": None}


def _namespace_warnings(
    policy: KVTierPolicy, settings: Settings, namespace_labels: Mapping[str, str] | None
) -> Iterator[str]:
    namespace = policy.namespace
    if settings.watch_namespaces and namespace not in settings.watch_namespaces:
        watched = ", ".join(settings.watch_namespaces)
        yield (
            f'metadata.namespace: the operator does not watch namespace "{namespace}"; '
            f"it watches: {watched}"
        )
    selector = settings.webhook.namespace_selector
    unlabelled = namespace_labels is not None and not matches(selector, namespace_labels)
    if unlabelled and policy.spec.attach.mode is AttachMode.WEBHOOK:
        yield (
            f'metadata.namespace: pods in namespace "{namespace}" do not get tiers until the '
            f"namespace has the label {describe(selector)}"
        )


def _selector_warnings(policy: KVTierPolicy) -> Iterator[str]:
    if selects_everything(policy.spec.pod_selector):
        yield f"spec.podSelector: {SELECTS_EVERYTHING}"


def _conflict_warnings(
    policy: KVTierPolicy, others: Sequence[KVTierPolicy], settings: Settings
) -> Iterator[str]:
    volumes = dict(_shareable_volumes(policy, settings))
    seed = policy.spec.engine.hash_seed
    for other in sorted(others, key=lambda each: each.metadata.name):
        name = other.metadata.name
        if overlaps(policy.spec.pod_selector, other.spec.pod_selector):
            yield (
                f'spec.podSelector: policy "{name}" selects the same pods; the older policy '
                "governs a pod that both select"
            )
        others_volumes = dict(_shareable_volumes(other, settings))
        common = sorted(volumes.keys() & others_volumes.keys())
        if not common:
            continue
        yield (
            f'spec.tiers: policy "{name}" uses the same volume ({common[0]}); each policy enforces '
            "only its own capacity, so the volume must have room for both"
        )
        shared = [volume for volume in common if volumes[volume] and others_volumes[volume]]
        if shared and seed != other.spec.engine.hash_seed:
            yield (
                f"spec.engine.hashSeed: {seed} differs from {other.spec.engine.hash_seed} in "
                f'policy "{name}", which shares {shared[0]}: neither policy can reuse the objects '
                "of the other"
            )


def _example_labels(selector: LabelSelector) -> dict[str, str]:
    """The fewest labels of a pod that the selector matches."""
    labels = {
        requirement.key: (requirement.values or [""])[0]
        for requirement in selector.match_expressions or ()
        if requirement.operator in (Operator.IN, Operator.EXISTS)
    }
    return {**labels, **(selector.match_labels or {})}


def _shareable_volumes(policy: KVTierPolicy, settings: Settings) -> Iterator[tuple[str, bool]]:
    """Volumes that other policies may use too, and whether policies share one directory in them."""
    for tier in policy.spec.tiers:
        for each in tier.volumes:
            volume = each.volume
            same_directory = sub_path(policy, volume, settings.allowed_volumes) is None
            if volume.persistent_volume_claim is not None:
                yield f"claim {volume.persistent_volume_claim.claim_name}", same_directory
            elif volume.host_path is not None:
                yield f"hostPath {volume.host_path.path.rstrip('/')}", same_directory
            elif volume.nfs is not None:
                yield f"{volume.nfs.server}:{volume.nfs.path.rstrip('/')}", same_directory
