"""A policy's status from pods and what they said, without a cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.pods import HASH, NOON, policy, status_document

from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.status import Condition, PolicyStatus
from kvtier_operator.controller.pods.pod_view import PodView, view
from kvtier_operator.controller.pods.reports import NOTHING_SAID, LastReport, read
from kvtier_operator.controller.status.compute import StatusInputs, compute_status
from kvtier_operator.controller.status.conditions import ConditionUpdate, PlanFacts
from kvtier_operator.controller.status.pod_conditions import PodFacts
from kvtier_operator.kube.resources import Object

FINE = (
    ConditionUpdate("Accepted", "True", "Accepted", "The policy is accepted as written."),
    ConditionUpdate("StorageReady", "True", "NoClaims", "No tier needs a claim."),
)
Answer = Mapping[str, Any] | LastReport | None


def answered(document: Mapping[str, Any] | None = None) -> LastReport:
    """A pod that said this."""
    return LastReport(
        read(json.dumps(document if document is not None else status_document()).encode())
    )


def looked_at(
    pod: Object, said: Answer = None, of: KVTierPolicy | None = None, now: float = NOON, **more: Any
) -> PodView:
    """One pod as its policy sees it. ``said``: a document, what is known of it, or nothing."""
    known = (
        said if isinstance(said, LastReport) else NOTHING_SAID if said is None else answered(said)
    )
    return view(of or policy(), pod, known, now, **more)


def facts(**more: Any) -> PlanFacts:
    """A plan that found nothing amiss."""
    return PlanFacts(
        **{
            "structural_hash": HASH,
            "live_generation": 5,
            "accepted": True,
            "findings": FINE,
            **more,
        }
    )


def status(
    *pods: PodView,
    of: KVTierPolicy | None = None,
    previous: PolicyStatus | None = None,
    now: float = NOON,
    planned: PlanFacts | None = None,
    **found: Any,
) -> PolicyStatus:
    """The status that comes of these pods."""
    return compute_status(
        of or policy(), StatusInputs(planned or facts(), now, previous, PodFacts(pods, **found))
    )


def condition(found: PolicyStatus, kind: str) -> Condition:
    """One of its conditions."""
    return next(each for each in found.conditions or () if each.type == kind)


def verdict(found: PolicyStatus, kind: str) -> tuple[str, str]:
    """Status and reason of a condition."""
    chosen = condition(found, kind)
    return chosen.status, chosen.reason


def names(pods: Sequence[PodView]) -> list[str]:
    """Their names."""
    return [pod.name for pod in pods]
