"""What GitOps tools compute about an object, by the algorithms that they publish. Pure.

``three_way_prediction`` is the client-side difference of Argo CD's gitops-engine for custom
resources: the three-way JSON merge patch of apimachinery (``jsonmergepatch``), applied to the live
object. ``readiness`` is kstatus, which Flux and Helm 4 wait with.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
SERVER_METADATA = (
    "creationTimestamp",
    "generation",
    "managedFields",
    "resourceVersion",
    "selfLink",
    "uid",
)
"""Metadata that a comparison of two versions of an object leaves out."""


def three_way_prediction(file: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    """What the live object would be after a client-side apply of ``file``."""
    last = json.loads(live["metadata"]["annotations"][LAST_APPLIED])
    patch = _merged(_removals(last, file), _additions(live, file))
    found: dict[str, Any] = _patched(live, patch)
    return found


def comparable(document: Mapping[str, Any]) -> dict[str, Any]:
    """An object without status, the server's metadata and kubectl's annotation."""
    found = copy.deepcopy(dict(document))
    found.pop("status", None)
    metadata = found["metadata"]
    for key in SERVER_METADATA:
        metadata.pop(key, None)
    annotations = metadata.get("annotations") or {}
    annotations.pop(LAST_APPLIED, None)
    if not annotations:
        metadata.pop("annotations", None)
    return found


def readiness(document: Mapping[str, Any]) -> str:
    """``Current``, ``InProgress``, ``Failed`` or ``Terminating``, as kstatus says for kinds that it
    does not know.
    """
    metadata, status = document["metadata"], document.get("status") or {}
    if metadata.get("deletionTimestamp"):
        return "Terminating"
    observed = status.get("observedGeneration")
    if observed is not None and observed != metadata.get("generation"):
        return "InProgress"
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    if conditions.get("Reconciling", {}).get("status") == "True":
        return "InProgress"
    if conditions.get("Stalled", {}).get("status") == "True":
        return "Failed"
    ready = conditions.get("Ready")
    if ready is not None and ready["status"] != "True":
        return "InProgress"
    return "Current"


def _removals(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the merge patch from ``before`` to ``after`` that removes fields."""
    patch: dict[str, Any] = {}
    for key, value in before.items():
        if key not in after:
            patch[key] = None
        elif isinstance(value, Mapping) and isinstance(after[key], Mapping):
            below = _removals(value, after[key])
            if below:
                patch[key] = below
    return patch


def _additions(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the merge patch from ``before`` to ``after`` that adds and changes fields. A list
    is one value.
    """
    patch: dict[str, Any] = {}
    for key, value in after.items():
        current = before.get(key)
        if isinstance(value, Mapping) and isinstance(current, Mapping):
            below = _additions(current, value)
            if below:
                patch[key] = below
        elif key not in before or value != current:
            patch[key] = value
    return patch


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(first)
    for key, value in second.items():
        current = found.get(key)
        both = isinstance(value, Mapping) and isinstance(current, Mapping)
        found[key] = _merged(current, value) if both and current is not None else value
    return found


def _patched(target: Any, patch: Any) -> Any:
    """A JSON merge patch (RFC 7386), applied."""
    if not isinstance(patch, Mapping):
        return copy.deepcopy(patch)
    found = copy.deepcopy(dict(target)) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = _patched(found.get(key), value)
    return found
