"""The status of a policy as it stands and as it is written. Pure."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from kvtier_operator.api.policy import API_VERSION, KIND
from kvtier_operator.api.status import PolicyStatus
from kvtier_operator.controller.children.observe import CachedPolicy
from kvtier_operator.controller.children.plan import Plan
from kvtier_operator.controller.status.conditions import stamped


def status_of(known: CachedPolicy) -> PolicyStatus | None:
    """The status in force; one that cannot be read counts as none."""
    raw = known.raw.get("status")
    if not raw:
        return None
    try:
        return PolicyStatus.model_validate(raw)
    except ValidationError:
        return None


def plain_status(known: CachedPolicy, planned: Plan, now: float) -> PolicyStatus:
    """Of a policy that cannot be read: what is wrong with it, and what was known of it before."""
    before = status_of(known)
    return (before or PolicyStatus()).model_copy(
        update={
            "observed_generation": known.generation,
            "conditions": stamped(
                planned.findings, before.conditions if before else None, known.generation, now
            ),
        }
    )


def written(status: PolicyStatus) -> dict[str, Any]:
    """As the API server keeps it."""
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)


def status_body(
    known: CachedPolicy, document: dict[str, Any], resource_version: str
) -> dict[str, Any]:
    """What is applied to the status of exactly this policy, as it was when it had that version.

    The uid alone is not enough: the API server does not look at it where a status is applied, and another policy of the
    same name would get this one's.
    """
    metadata = known.raw["metadata"]
    about = {"name": metadata["name"], "namespace": metadata["namespace"], "uid": known.uid}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {**about, "resourceVersion": resource_version} if resource_version else about,
        "status": document,
    }
