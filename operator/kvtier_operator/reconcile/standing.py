"""The status of a policy as it stands and as it is written. Pure."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from kvtier_operator.api.policy import API_VERSION, KIND
from kvtier_operator.api.status import PolicyStatus
from kvtier_operator.reconcile.conditions import stamped
from kvtier_operator.reconcile.observe import Known
from kvtier_operator.reconcile.plan import Plan


def status_of(known: Known) -> PolicyStatus | None:
    """The status in force; one that cannot be read counts as none."""
    raw = known.raw.get("status")
    if not raw:
        return None
    try:
        return PolicyStatus.model_validate(raw)
    except ValidationError:
        return None


def plain_status(known: Known, planned: Plan, now: float) -> PolicyStatus:
    """Of a policy that cannot be read: what is wrong with it, and what was known of it before."""
    before = status_of(known)
    return (before or PolicyStatus()).model_copy(
        update={
            "observed_generation": known.generation,
            "conditions": stamped(planned.findings, before.conditions if before else None, known.generation, now),
        }
    )


def written(status: PolicyStatus) -> dict[str, Any]:
    """As the API server keeps it."""
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)


def status_body(known: Known, document: dict[str, Any]) -> dict[str, Any]:
    """What is applied to the status of exactly this policy: another of its name refuses the uid."""
    metadata = known.raw["metadata"]
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": metadata["name"], "namespace": metadata["namespace"], "uid": known.uid},
        "status": document,
    }
