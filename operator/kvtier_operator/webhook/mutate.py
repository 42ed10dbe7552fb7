"""Mutation of pods: from an admission request to a JSON patch.

The work has two parts, because the caches belong to the event loop's thread and rendering must not
block it: ``mutation_request`` reads the caches; ``mutate`` renders and may run on any thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvtier_operator.api.names import MIRROR_ANNOTATION, SKIPPED_ANNOTATION, STRUCTURAL_ANNOTATION
from kvtier_operator.api.pods import PodMetadata, decode, decode_pod
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.settings import AttachMode
from kvtier_operator.injection.decision import AdmissionContext, Decision, Injected, PodObject
from kvtier_operator.settings import Settings
from kvtier_operator.webhook.jsonpatch import Operation, diff
from kvtier_operator.webhook.lister import WebhookLister
from kvtier_operator.webhook.review import AdmissionRequest

Decide = Callable[[KVTierPolicy, PodObject, AdmissionContext, Settings], Decision]
POD_CREATION = ("", "Pod", "CREATE", "")


@dataclass(frozen=True, slots=True)
class MutationRequest:
    """A pod, the policy that governs it, and the cluster state that the decision depends on."""

    policy: KVTierPolicy
    pod: PodObject
    context: AdmissionContext


@dataclass(frozen=True, slots=True)
class MutationResult:
    """``result`` is Attached or Skipped; a skipped pod has a ``reason`` and a ``message``."""

    result: str
    patch: tuple[Operation, ...] = ()
    policy: str = ""
    reason: str = ""
    message: str = ""
    notes: tuple[str, ...] = ()


def mutation_request(
    request: AdmissionRequest, lister: WebhookLister, settings: Settings
) -> MutationRequest | None:
    """Collects the input of ``mutate``.

    Returns None if the pod stays unchanged without a decision: another object or operation, a
    namespace that is not watched, or a pod that no policy governs. Raises
    ``InvalidObjectError``.
    """
    if (request.group, request.kind, request.operation, request.sub_resource) != POD_CREATION:
        return None
    metadata = decode(request.object.get("metadata") or {}, PodMetadata)
    namespace = request.namespace or metadata.namespace
    if settings.watch_namespaces and namespace not in settings.watch_namespaces:
        return None
    if _is_excluded(metadata):
        return None
    policy = lister.governing(namespace, metadata.labels)
    if policy is None or policy.spec.attach.mode is AttachMode.CONFIG_MAP_ONLY:
        return None
    context = lister.admission_context(policy, namespace, decode_pod(request.object))
    return MutationRequest(policy, request.object, context)


def mutate(request: MutationRequest, settings: Settings, decide: Decide) -> MutationResult:
    """Decides about the pod and renders the decision as a patch of the pod in the request."""
    pod, policy = request.pod, request.policy.metadata.name
    # A reinvocation, or an annotation copied from another pod, carries the result of an earlier
    # decision.
    undecided = _without_annotation(pod, SKIPPED_ANNOTATION)
    decision = decide(request.policy, undecided, request.context, settings)
    if isinstance(decision, Injected):
        patch = tuple(diff(pod, decision.pod))
        return MutationResult("Attached", patch, policy, notes=decision.notes)
    reason, message = decision.reason.value, decision.message
    annotation = {"policy": policy, "reason": reason, "message": message}
    text = json.dumps(annotation, ensure_ascii=False)
    patch = tuple(diff(pod, _with_annotation(pod, SKIPPED_ANNOTATION, text)))
    return MutationResult("Skipped", patch, policy, reason, message)


def _is_excluded(metadata: PodMetadata) -> bool:
    """Repeats the match conditions of the webhook configuration, which may have been edited."""
    if MIRROR_ANNOTATION in metadata.annotations or STRUCTURAL_ANNOTATION in metadata.annotations:
        return True
    return any(owner.kind == "DaemonSet" for owner in metadata.owner_references)


def _without_annotation(pod: PodObject, name: str) -> PodObject:
    annotations: Mapping[str, str] = (pod.get("metadata") or {}).get("annotations") or {}
    if name not in annotations:
        return pod
    rest = {key: value for key, value in annotations.items() if key != name}
    metadata = {key: value for key, value in pod["metadata"].items() if key != "annotations"}
    return {**pod, "metadata": {**metadata, **({"annotations": rest} if rest else {})}}


def _with_annotation(pod: PodObject, name: str, value: str) -> dict[str, Any]:
    metadata = pod.get("metadata") or {}
    annotations = {**(metadata.get("annotations") or {}), name: value}
    return {**pod, "metadata": {**metadata, "annotations": annotations}}
