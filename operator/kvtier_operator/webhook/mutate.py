"""Deciding about a pod: what is asked of the caches, and the patch that comes of it.

Two halves, because caches may only be read on the event loop's thread and rendering must not hold it up: ``question``
reads, ``answer`` renders and may run on any thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvtier_operator.api.names import MIRROR_ANNOTATION, SKIPPED_ANNOTATION, STRUCTURAL_ANNOTATION
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.settings import AttachMode
from kvtier_operator.injection.decision import AdmissionContext, Decision, Injected, PodObject
from kvtier_operator.settings import Settings
from kvtier_operator.webhook.jsonpatch import Operation, between
from kvtier_operator.webhook.lister import WebhookLister
from kvtier_operator.webhook.review import Review

Attach = Callable[[KVTierPolicy, PodObject, AdmissionContext, Settings], Decision]


@dataclass(frozen=True, slots=True)
class MutationRequest:
    """A pod, the policy that governs it, and what is known around it."""

    policy: KVTierPolicy
    pod: PodObject
    around: AdmissionContext


@dataclass(frozen=True, slots=True)
class MutationResult:
    """What becomes of a pod. ``result``: Attached, Skipped or Unchanged; ``reason`` and ``message``: why, if skipped."""

    result: str
    patch: tuple[Operation, ...] = ()
    policy: str = ""
    reason: str = ""
    message: str = ""
    notes: tuple[str, ...] = ()


def question(
    review: Review, knowledge: WebhookLister, settings: Settings
) -> MutationRequest | None:
    """What is to be decided; None where nothing is: another object, another operation, a pod that no policy governs."""
    if (review.group, review.kind, review.operation, review.sub_resource) != (
        "",
        "Pod",
        "CREATE",
        "",
    ):
        return None
    namespace = review.namespace or str(
        (review.object.get("metadata") or {}).get("namespace") or ""
    )
    if settings.watch_namespaces and namespace not in settings.watch_namespaces:
        return None
    if _never_touched(review.object):
        return None
    metadata = review.object.get("metadata") or {}
    policy = knowledge.governing(namespace, metadata.get("labels") or {})
    if policy is None or policy.spec.attach.mode is AttachMode.CONFIG_MAP_ONLY:
        return None
    return MutationRequest(
        policy, review.object, knowledge.surroundings(policy, namespace, review.object)
    )


def answer(asked: MutationRequest, settings: Settings, decide: Attach) -> MutationResult:
    """The decision, as a patch of the pod as it came."""
    pod = asked.pod
    policy = asked.policy.metadata.name
    # Asked again after another webhook, or with an annotation copied from another pod: what was found then is not
    # what is found now.
    decision = decide(
        asked.policy, _without_annotation(pod, SKIPPED_ANNOTATION), asked.around, settings
    )
    if isinstance(decision, Injected):
        return MutationResult(
            "Attached", tuple(between(pod, decision.pod)), policy, notes=decision.notes
        )
    found = {"policy": policy, "reason": decision.reason.value, "message": decision.message}
    marked = _with_annotation(pod, SKIPPED_ANNOTATION, json.dumps(found, ensure_ascii=False))
    return MutationResult(
        "Skipped", tuple(between(pod, marked)), policy, decision.reason.value, decision.message
    )


def _never_touched(pod: PodObject) -> bool:
    """The API server's match conditions say the same; a webhook configuration that somebody wrote may lack them."""
    metadata = pod.get("metadata") or {}
    annotations = metadata.get("annotations") or {}
    if MIRROR_ANNOTATION in annotations or STRUCTURAL_ANNOTATION in annotations:
        return True
    return any(owner.get("kind") == "DaemonSet" for owner in metadata.get("ownerReferences") or ())


def _without_annotation(pod: PodObject, name: str) -> PodObject:
    annotations: Mapping[str, str] = (pod.get("metadata") or {}).get("annotations") or {}
    if name not in annotations:
        return pod
    rest = {key: value for key, value in annotations.items() if key != name}
    metadata = {key: value for key, value in pod["metadata"].items() if key != "annotations"}
    return {**pod, "metadata": {**metadata, **({"annotations": rest} if rest else {})}}


def _with_annotation(pod: PodObject, name: str, value: str) -> dict[str, Any]:
    metadata = pod.get("metadata") or {}
    return {
        **pod,
        "metadata": {
            **metadata,
            "annotations": {**(metadata.get("annotations") or {}), name: value},
        },
    }
