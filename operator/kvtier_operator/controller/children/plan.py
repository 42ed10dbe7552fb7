"""From what is observed to what should exist. Pure: no call, no clock, no randomness.

Objects of a policy: the live ConfigMap; with ``attach.mode: ConfigMapOnly`` also the structural
one; a claim for each ``claimTemplate``; for each NFS export a PersistentVolume and a claim, if the
operator may create volumes. Each carries the policy's uid as a label. Each but a volume has the
policy as its owner, so the cluster deletes it with the policy. The token's Secret is not in a plan:
it is random, and is never read from a cache.

The spec of an existing claim or volume is never changed (it is immutable except for growth):
another volume has another name. Nothing is applied to an object that is being deleted; it is
recreated once it is gone.
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
from kvtier_operator.api.unenforced import not_enforced, unknown_field
from kvtier_operator.api.validation import FieldError, InvalidDocumentError
from kvtier_operator.controller import conditions
from kvtier_operator.controller.cached_policy import CachedPolicy, claims_of
from kvtier_operator.controller.children.observe import NAMESPACE_LABEL, UID_LABEL, Observed
from kvtier_operator.controller.conditions import ConditionUpdate
from kvtier_operator.controller.objects import is_terminating
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

MAX_GENERATION = (1 << 53) - 1
"""The largest live generation. JSON numbers are exact up to here; a larger one was not written by
the operator.
"""


@dataclass(frozen=True, slots=True)
class Desired:
    """An object to apply. ``existing``: the object as it is now, None if the cache has none."""

    kind: Kind
    body: dict[str, Any]
    existing: Object | None


@dataclass(frozen=True, slots=True)
class Deletion:
    """An object to delete, exactly as it was observed. ``reason``: for the log."""

    kind: Kind
    existing: Object
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """``apply`` in this order, then ``delete``. If ``accepted`` is False, nothing is applied and
    nothing is deleted.
    """

    accepted: bool
    conditions: tuple[ConditionUpdate, ...]
    apply: tuple[Desired, ...] = ()
    delete: tuple[Deletion, ...] = ()
    structural_hash: str = ""
    live_generation: int = 0
    claims: dict[str, str] = field(default_factory=dict)


def plan(observed: Observed, settings: Settings) -> Plan:
    """What to apply and delete for one policy, and its conditions."""
    cached = observed.cached
    previous = _status_number(cached, "liveGeneration")
    if cached.policy is None:
        return Plan(
            False,
            conditions.not_accepted(PolicyReason.INVALID, cached.errors),
            live_generation=previous,
        )
    policy = cached.policy
    structural_hash = content_hash(policy.spec)
    invalid = validation_errors(policy, settings)
    if invalid is not None:
        return Plan(
            False,
            conditions.not_accepted(*invalid),
            structural_hash=structural_hash,
            live_generation=previous,
            claims=claims_of(policy),
        )
    found_live = observed.config_maps.get(live_name(policy))
    generation, live_text = _live_document(policy, found_live, previous)
    bodies = _volumes(policy, settings)
    created_claims = frozenset(
        body["metadata"]["name"] for body in bodies if body["kind"] == CLAIMS.kind
    )
    bodies.append(_config_map(policy, live_name(policy), LIVE_FILE, live_text))
    if policy.spec.attach.mode is AttachMode.CONFIG_MAP_ONLY:
        text = _structural_text(
            policy, observed.config_maps.get(structural_name(policy)), generation
        )
        bodies.append(_config_map(policy, structural_name(policy), STRUCTURAL_FILE, text))
    desired = [_with_owner(body, cached) for body in bodies]
    claims = claims_of(policy)
    return Plan(
        accepted=True,
        conditions=(
            conditions.accepted(
                connectors.unsupported_fields(policy),
                [
                    *map(unknown_field, cached.unknown_fields),
                    *not_enforced(policy, settings.rollout.enabled),
                ],
            ),
            conditions.storage_ready(
                policy, claims, observed.claims, created_claims, observed.first_use_claims
            ),
        ),
        apply=tuple(_differing(desired, observed)),
        delete=tuple(_obsolete(desired, observed)),
        structural_hash=structural_hash,
        live_generation=generation,
        claims=claims,
    )


def validation_errors(
    policy: KVTierPolicy, settings: Settings
) -> tuple[PolicyReason, list[FieldError]] | None:
    """Why a policy with a valid document cannot be applied, or None."""
    not_allowed = allowlist.volume_errors(policy, settings.allowed_volumes)
    if not_allowed:
        return PolicyReason.VOLUME_NOT_ALLOWED, not_allowed
    out_of_bounds = allowlist.bound_errors(policy, settings.policy_bounds)
    if out_of_bounds:
        return PolicyReason.NOT_ALLOWED, out_of_bounds
    unsupported = connectors.policy_errors(policy)
    if unsupported:
        return PolicyReason.UNSUPPORTED, unsupported
    try:
        structural_text(structural(policy, pod_placement(policy)))
    except InvalidDocumentError as error:
        return PolicyReason.TOO_LARGE, error.errors
    return None


def _live_document(policy: KVTierPolicy, existing: Object | None, previous: int) -> tuple[int, str]:
    """Generation and text. Unchanged values keep their generation; changed ones get the next one,
    which was never used.
    """
    held = _document(existing, LIVE_FILE)
    generation = held.get("generation")
    valid = isinstance(generation, int) and 0 < generation <= MAX_GENERATION
    last = max(previous, generation if valid and isinstance(generation, int) else 0)
    text = document_text(live(policy, last))
    if valid and _without(json.loads(text), "generation") == _without(held, "generation"):
        return last, text
    return last + 1, document_text(live(policy, last + 1))


def _structural_text(policy: KVTierPolicy, existing: Object | None, generation: int) -> str:
    """The document for pods with ``attach.mode: ConfigMapOnly``. Its copy of the live values is not
    updated: a pod that mounts the file should see it change only when the structure does.
    """
    text = structural_text(structural(policy, pod_placement(policy), generation))
    held = _document(existing, STRUCTURAL_FILE)
    if (
        held
        and existing is not None
        and _without(held, "live") == _without(json.loads(text), "live")
    ):
        return str(existing["data"][STRUCTURAL_FILE])
    return text


def _document(config_map: Object | None, file: str) -> dict[str, Any]:
    """The JSON object in a ConfigMap; empty if there is none."""
    text = ((config_map or {}).get("data") or {}).get(file)
    try:
        document = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        # Anyone with the right to edit ConfigMaps may have changed it.
        return {}
    return document if isinstance(document, dict) else {}


def _without(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != key}


def _status_number(cached: CachedPolicy, name: str) -> int:
    value = (cached.raw.get("status") or {}).get(name)
    return value if isinstance(value, int) and 0 <= value <= MAX_GENERATION else 0


def _volumes(policy: KVTierPolicy, settings: Settings) -> list[dict[str, Any]]:
    """Claims and volumes that the operator creates, volumes first."""
    bodies = volumes.objects(policy)
    if settings.storage.create_volumes:
        return bodies
    exports = {
        tier.name
        for tier in policy.spec.tiers
        if any(each.volume.nfs is not None for each in tier.volumes)
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


def _with_owner(body: dict[str, Any], cached: CachedPolicy) -> dict[str, Any]:
    """Adds the labels and the owner reference that tie the object to this policy, and not to
    another of its name.
    """
    metadata = dict(body["metadata"])
    labels = {**metadata["labels"], UID_LABEL: cached.uid}
    if body["kind"] == VOLUMES.kind:
        labels[NAMESPACE_LABEL] = cached.raw["metadata"]["namespace"]
    else:
        metadata["ownerReferences"] = [owner_reference(cached)]
    return {**body, "metadata": {**metadata, "labels": labels}}


def owner_reference(cached: CachedPolicy) -> dict[str, Any]:
    """An owner reference to a policy. It does not block the policy's deletion."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": cached.raw["metadata"]["name"],
        "uid": cached.uid,
    }


_KINDS = {kind.kind: kind for kind in (CONFIG_MAPS, CLAIMS, VOLUMES)}


def _differing(desired: list[dict[str, Any]], observed: Observed) -> list[Desired]:
    existing = _existing(observed)
    needed = []
    for body in desired:
        kind = _KINDS[body["kind"]]
        current = existing.get((kind, body["metadata"]["name"]))
        if current is not None and is_terminating(current):
            continue
        body = with_current_spec(body, current)
        if current is None or differs(body, current):
            needed.append(Desired(kind, body, current))
    return needed


def differs(desired: Any, existing: Any) -> bool:
    """Whether ``existing`` lacks anything of ``desired``. Keys and owners that others added do not
    count.
    """
    if isinstance(desired, Mapping):
        if not isinstance(existing, Mapping):
            return True
        return any(
            _lacks_owner(value, existing.get(key))
            if key == "ownerReferences"
            else differs(value, existing.get(key))
            for key, value in desired.items()
        )
    return bool(desired != existing)


def _lacks_owner(desired: list[Object], existing: Any) -> bool:
    present = {owner.get("uid") for owner in existing or ()}
    return any(owner["uid"] not in present for owner in desired)


def with_current_spec(body: dict[str, Any], existing: Object | None) -> dict[str, Any]:
    """An existing claim or volume keeps its spec: the current values are applied."""
    if existing is None or "spec" not in body:
        return body
    present = existing.get("spec") or {}
    return {**body, "spec": {key: present[key] for key in body["spec"] if key in present}}


def _existing(observed: Observed) -> dict[tuple[Kind, str], Object]:
    return {
        **{(CONFIG_MAPS, name): each for name, each in observed.config_maps.items()},
        **{(CLAIMS, name): each for name, each in observed.claims.items()},
        **{(VOLUMES, each["metadata"]["name"]): each for each in observed.volumes},
    }


def _obsolete(desired: list[dict[str, Any]], observed: Observed) -> list[Deletion]:
    """Objects of this policy that it no longer needs. A claim stays while a pod mounts it, a volume
    while its claim exists. The data is kept in any case.
    """
    needed = {(_KINDS[body["kind"]], body["metadata"]["name"]) for body in desired}
    uid = observed.cached.uid
    obsolete: list[Deletion] = []
    for (kind, name), each in _existing(observed).items():
        if (each["metadata"].get("labels") or {}).get(UID_LABEL) != uid or is_terminating(each):
            continue
        if kind is VOLUMES:
            phase = (each.get("status") or {}).get("phase")
            claim = (each["spec"].get("claimRef") or {}).get("name", "")
            if phase in ("Released", "Failed"):
                # Also if its claim is needed: a recreated claim of the same name could never bind
                # to this volume.
                obsolete.append(Deletion(kind, each, f"it is {phase}; the data is kept"))
            elif (kind, name) not in needed and claim not in observed.claims:
                obsolete.append(Deletion(kind, each, "no tier uses this export; the data is kept"))
        elif (kind, name) in needed:
            continue
        elif kind is CLAIMS:
            if name not in observed.mounted_claims:
                obsolete.append(Deletion(kind, each, "no tier needs it and no pod mounts it"))
        else:
            obsolete.append(Deletion(kind, each, "the policy does not need it"))
    return obsolete
