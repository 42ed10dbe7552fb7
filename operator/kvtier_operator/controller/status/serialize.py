"""Status serialization: from a policy document to its status, and back to what is applied. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from kvtier_operator.api.policy import API_VERSION, KIND
from kvtier_operator.api.status import Condition, PolicyStatus
from kvtier_operator.api.stored import read_status
from kvtier_operator.controller.cached_policy import CachedPolicy
from kvtier_operator.controller.conditions import ConditionUpdate, ready
from kvtier_operator.controller.objects import format_time

CONDITION_ORDER = (
    "Ready",
    "Accepted",
    "StorageReady",
    "Attached",
    "UpToDate",
    "Tuned",
    "EnginesCompatible",
    "TiersHealthy",
)
"""Order of the conditions in a status."""
MAX_MESSAGE = 1024
_UNDECLARED = re.compile(r"\.status((?:\.\w+|\[[^\]]*\])+): field not declared in schema")
"""What the API server says about a field of a server-side apply that the definition lacks."""


def parse_status(cached: CachedPolicy) -> PolicyStatus | None:
    """The readable parts of the status in force; None if there is none."""
    return read_status(cached.raw.get("status"))


def invalid_policy_status(
    cached: CachedPolicy, conditions: Iterable[ConditionUpdate], now: float
) -> PolicyStatus:
    """The status of a policy whose document is invalid: ``conditions`` say why, the rest stays as
    it is in force.
    """
    previous = parse_status(cached)
    return (previous or PolicyStatus()).model_copy(
        update={
            "observed_generation": cached.generation,
            "conditions": to_conditions(
                conditions, previous.conditions if previous else None, cached.generation, now
            ),
        }
    )


def to_conditions(
    updates: Iterable[ConditionUpdate],
    previous: Sequence[Condition] | None,
    generation: int,
    now: float,
) -> list[Condition]:
    """Conditions as the API defines them; adds ``Ready`` if it is missing. ``now``: seconds since
    1970.

    A condition whose status does not change keeps its transition time, so equal input gives equal
    conditions.
    """
    found = {update.type: update for update in updates}
    if "Ready" not in found:
        found["Ready"] = ready(found.values())
    before = {condition.type: condition for condition in previous or ()}
    names = [name for name in CONDITION_ORDER if name in found]
    names += sorted(set(found) - set(CONDITION_ORDER))
    conditions = []
    for name in names:
        update, old = found[name], before.get(name)
        unchanged = old is not None and old.status == update.status
        message = update.message
        if len(message) > MAX_MESSAGE:
            message = message[: MAX_MESSAGE - 1] + "…"
        conditions.append(
            Condition.model_validate(
                {
                    "type": name,
                    "status": update.status,
                    "reason": update.reason,
                    "message": message,
                    "observedGeneration": generation,
                    "lastTransitionTime": old.last_transition_time
                    if unchanged and old is not None
                    else format_time(now),
                }
            )
        )
    return conditions


def to_dict(status: PolicyStatus) -> dict[str, Any]:
    """The status as the API server stores it."""
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)


def without_undeclared(document: dict[str, Any], message: str) -> dict[str, Any] | None:
    """A status without the fields that the API server's answer to an apply names as undeclared:
    the CustomResourceDefinition is of an earlier release. None if the answer names none.
    """
    paths = [re.sub(r"\[[^\]]*\]", "", path) for path in _UNDECLARED.findall(message)]
    found: Any = document
    for path in paths:
        found = _without(found, path.split(".")[1:])
    return found if paths and found != document else None


def _without(value: Any, path: list[str]) -> Any:
    """``value`` without the field at a path; lists on the way stand for each of their items."""
    if isinstance(value, list):
        return [_without(item, path) for item in value]
    if not isinstance(value, dict) or path[0] not in value:
        return value
    if len(path) == 1:
        return {key: item for key, item in value.items() if key != path[0]}
    return {**value, path[0]: _without(value[path[0]], path[1:])}


def apply_body(
    cached: CachedPolicy, status: dict[str, Any], resource_version: str
) -> dict[str, Any]:
    """The body of a status apply that succeeds only if the policy still has that version.

    The uid alone does not suffice: the API server ignores it in an apply to the status, and would
    write the status to another policy of the same name.
    """
    source = cached.raw["metadata"]
    metadata = {"name": source["name"], "namespace": source["namespace"], "uid": cached.uid}
    if resource_version:
        metadata["resourceVersion"] = resource_version
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": status}
