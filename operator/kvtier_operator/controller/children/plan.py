"""Whether an object says what it should, so that only what differs is written. Pure.

From what is observed to what should be. Pure: no call, no clock, no randomness.

What belongs to a policy: the live ConfigMap; with ``attach.mode: ConfigMapOnly`` also the structural one; a claim for
each ``claimTemplate``; for each NFS export a volume and a claim, where the operator may make volumes. Each has the
policy's uid as a label and, but for volumes, the policy as its owner, so that the cluster itself removes it with the
policy. The token's Secret is not in a plan: it is random, and never read from a cache.

The specification of a claim or a volume that exists is never changed (it is immutable but for growth); another volume
has another name. Nothing is applied to an object that is being deleted: it is made anew once it is gone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtier.config.loader import LIVE_FILE, STRUCTURAL_FILE
from kvtier.config.writer import document_text
from kvtier_operator.api import allowlist
from kvtier_operator.api.conditions import PolicyReason
from kvtier_operator.api.policy import API_VERSION, KIND, KVTierPolicy
from kvtier_operator.api.settings import AttachMode
from kvtier_operator.api.validation import FieldError, InvalidDocumentError
from kvtier_operator.controller.children.observe import (
    NAMESPACE_LABEL,
    UID_LABEL,
    CachedPolicy,
    Observed,
    claims_of,
)
from kvtier_operator.controller.objects import is_terminating
from kvtier_operator.controller.status import conditions
from kvtier_operator.controller.status.conditions import ConditionUpdate
from kvtier_operator.kube.resources import CLAIMS, CONFIG_MAPS, VOLUMES, Kind, Object
from kvtier_operator.render import connectors, volumes
from kvtier_operator.render.documents import (
    content_hash,
    live,
    live_name,
    pod_placement,
    structural,
    structural_name,
    structural_text,
)
from kvtier_operator.settings import Settings


def differs(desired: Any, found: Any) -> bool:
    """Whether ``found`` lacks anything of ``desired``. What others added (keys, owners) is theirs and no difference."""
    if isinstance(desired, Mapping):
        if not isinstance(found, Mapping):
            return True
        return any(
            _owners_missing(value, found.get(key))
            if key == "ownerReferences"
            else differs(value, found.get(key))
            for key, value in desired.items()
        )
    return bool(desired != found)


def _owners_missing(desired: list[Object], found: Any) -> bool:
    present = {owner.get("uid") for owner in found or ()}
    return any(owner["uid"] not in present for owner in desired)


MAX_GENERATION = (1 << 53) - 1
"""A generation beyond it was not counted; the count goes on from the status. JSON numbers are exact up to here."""


@dataclass(frozen=True, slots=True)
class Desired:
    """An object that differs from what it should be. ``found``: as it is now, None where the cache has none."""

    kind: Kind
    body: dict[str, Any]
    found: Object | None


@dataclass(frozen=True, slots=True)
class Deletion:
    """An object that should not be, exactly as it was seen; ``why`` in words, for the log."""

    kind: Kind
    found: Object
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """``apply`` in this order, then ``delete``. ``accepted`` False: nothing of it is followed, and nothing deleted."""

    accepted: bool
    findings: tuple[ConditionUpdate, ...]
    apply: tuple[Desired, ...] = ()
    delete: tuple[Deletion, ...] = ()
    structural_hash: str = ""
    live_generation: int = 0
    claims: dict[str, str] = field(default_factory=dict)


def plan(observed: Observed, settings: Settings) -> Plan:
    """What to do about one policy."""
    known = observed.known
    previous = _status_number(known, "liveGeneration")
    if known.policy is None:
        return Plan(
            False,
            conditions.not_accepted(PolicyReason.INVALID, known.refusals),
            live_generation=previous,
        )
    policy = known.policy
    structural_hash = content_hash(policy.spec)
    refused = refusals(policy, settings)
    if refused is not None:
        return Plan(
            False,
            conditions.not_accepted(*refused),
            structural_hash=structural_hash,
            live_generation=previous,
            claims=claims_of(policy),
        )
    found_live = observed.config_maps.get(live_name(policy))
    generation, live_text = _live_document(policy, found_live, previous)
    bodies = _volumes(policy, settings)
    made = frozenset(body["metadata"]["name"] for body in bodies if body["kind"] == CLAIMS.kind)
    bodies.append(_config_map(policy, live_name(policy), LIVE_FILE, live_text))
    if policy.spec.attach.mode is AttachMode.CONFIG_MAP_ONLY:
        text = _structural_text(
            policy, observed.config_maps.get(structural_name(policy)), generation
        )
        bodies.append(_config_map(policy, structural_name(policy), STRUCTURAL_FILE, text))
    desired = [_owned(body, known) for body in bodies]
    claims = claims_of(policy)
    return Plan(
        accepted=True,
        findings=(
            conditions.accepted(connectors.unsupported_fields(policy)),
            conditions.storage(policy, claims, dict(observed.claims), made),
        ),
        apply=tuple(_differing(desired, observed)),
        delete=tuple(_superfluous(desired, observed)),
        structural_hash=structural_hash,
        live_generation=generation,
        claims=claims,
    )


def refusals(
    policy: KVTierPolicy, settings: Settings
) -> tuple[PolicyReason, list[FieldError]] | None:
    """Why a policy that can be read is not followed, or None."""
    outside = allowlist.volume_errors(policy, settings.allowed_volumes)
    if outside:
        return PolicyReason.VOLUME_NOT_ALLOWED, outside
    impossible = connectors.policy_errors(policy)
    if impossible:
        return PolicyReason.UNSUPPORTED, impossible
    try:
        structural_text(structural(policy, pod_placement(policy)))
    except InvalidDocumentError as error:
        return PolicyReason.TOO_LARGE, error.errors
    return None


def _live_document(policy: KVTierPolicy, found: Object | None, previous: int) -> tuple[int, str]:
    """Generation and text. The same values keep their generation; others get the next one after all that were given."""
    held = _document(found, LIVE_FILE)
    generation = held.get("generation")
    counted = isinstance(generation, int) and 0 < generation <= MAX_GENERATION
    last = max(previous, generation if counted and isinstance(generation, int) else 0)
    text = document_text(live(policy, last))
    if counted and _without(json.loads(text), "generation") == _without(held, "generation"):
        return last, text
    return last + 1, document_text(live(policy, last + 1))


def _structural_text(policy: KVTierPolicy, found: Object | None, generation: int) -> str:
    """The document for pods that people write. Its copy of the live values is of when it was written: a pod that mounts
    the file should see it change only when the structure does.
    """
    text = structural_text(structural(policy, pod_placement(policy), generation))
    held = _document(found, STRUCTURAL_FILE)
    if held and found is not None and _without(held, "live") == _without(json.loads(text), "live"):
        return str(found["data"][STRUCTURAL_FILE])
    return text


def _document(found: Object | None, file: str) -> dict[str, Any]:
    """A JSON object of a ConfigMap; empty where there is none."""
    text = ((found or {}).get("data") or {}).get(file)
    try:
        document = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        # Whoever may edit ConfigMaps can have written it.
        return {}
    return document if isinstance(document, dict) else {}


def _without(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != key}


def _status_number(known: CachedPolicy, name: str) -> int:
    value = (known.raw.get("status") or {}).get(name)
    return value if isinstance(value, int) and 0 <= value <= MAX_GENERATION else 0


def _volumes(policy: KVTierPolicy, settings: Settings) -> list[dict[str, Any]]:
    """Claims and volumes that the operator makes, volumes first."""
    bodies = volumes.objects(policy)
    if settings.storage.create_volumes:
        return bodies
    exports = {
        tier.name
        for tier in policy.spec.tiers
        if tier.file_system and tier.file_system.volume.nfs is not None
    }
    return [
        body
        for body in bodies
        if body["kind"] != VOLUMES.kind
        and body["metadata"]["labels"].get(volumes.TIER_LABEL) not in exports
    ]


def _config_map(policy: KVTierPolicy, name: str, file: str, text: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": policy.namespace, "labels": volumes.labels(policy)}
    return {
        "apiVersion": "v1",
        "kind": CONFIG_MAPS.kind,
        "metadata": metadata,
        "data": {file: text},
    }


def _owned(body: dict[str, Any], known: CachedPolicy) -> dict[str, Any]:
    """With the labels and the owner by which it is known to belong to this policy and no other of its name."""
    metadata = dict(body["metadata"])
    labels = {**metadata["labels"], UID_LABEL: known.uid}
    if body["kind"] == VOLUMES.kind:
        labels[NAMESPACE_LABEL] = known.raw["metadata"]["namespace"]
    else:
        metadata["ownerReferences"] = [owner_reference(known)]
    return {**body, "metadata": {**metadata, "labels": labels}}


def owner_reference(known: CachedPolicy) -> dict[str, Any]:
    """Of a policy, for what goes with it. It blocks no deletion."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": known.raw["metadata"]["name"],
        "uid": known.uid,
    }


_KINDS = {kind.kind: kind for kind in (CONFIG_MAPS, CLAIMS, VOLUMES)}


def _differing(desired: list[dict[str, Any]], observed: Observed) -> list[Desired]:
    existing = _existing(observed)
    needed = []
    for body in desired:
        kind = _KINDS[body["kind"]]
        found = existing.get((kind, body["metadata"]["name"]))
        if found is not None and is_terminating(found):
            continue
        adapted = adapt(body, found)
        if found is None or differs(adapted, found):
            needed.append(Desired(kind, adapted, found))
    return needed


def adapt(body: dict[str, Any], found: Object | None) -> dict[str, Any]:
    """A claim or volume that exists keeps its specification: applied are the values that stand there."""
    if found is None or "spec" not in body:
        return body
    present = found.get("spec") or {}
    return {**body, "spec": {key: present[key] for key in body["spec"] if key in present}}


def _existing(observed: Observed) -> dict[tuple[Kind, str], Object]:
    return {
        **{(CONFIG_MAPS, name): each for name, each in observed.config_maps.items()},
        **{(CLAIMS, name): each for name, each in observed.claims.items()},
        **{(VOLUMES, each["metadata"]["name"]): each for each in observed.volumes},
    }


def _superfluous(desired: list[dict[str, Any]], observed: Observed) -> list[Deletion]:
    """What was made for this very policy and is not wanted any more. A claim stays while a pod mounts it, a volume
    while its claim is there; data stay in any case.
    """
    wanted = {(_KINDS[body["kind"]], body["metadata"]["name"]) for body in desired}
    uid = observed.known.uid
    found: list[Deletion] = []
    for (kind, name), each in _existing(observed).items():
        if (each["metadata"].get("labels") or {}).get(UID_LABEL) != uid or is_terminating(each):
            continue
        if kind is VOLUMES:
            phase = (each.get("status") or {}).get("phase")
            claim = (each["spec"].get("claimRef") or {}).get("name", "")
            if phase in ("Released", "Failed"):
                # Also of a claim that is wanted: a claim made anew under the same name would wait for it for ever.
                found.append(Deletion(kind, each, f"it is {phase}; the data stay"))
            elif (kind, name) not in wanted and claim not in observed.claims:
                found.append(
                    Deletion(kind, each, "no tier names this export any more; the data stay")
                )
        elif (kind, name) in wanted:
            continue
        elif kind is CLAIMS:
            if name not in observed.mounted_claims:
                found.append(Deletion(kind, each, "no tier needs it any more and no pod mounts it"))
        else:
            found.append(Deletion(kind, each, "the policy does not need it any more"))
    return found
