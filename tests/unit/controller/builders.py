"""Builds pod views and statuses from pods and their reports, without a cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.support.pods import HASH, NOON, policy, status_document

from kvtier_operator.api.pods import decode_pod
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.status import Condition, PolicyStatus
from kvtier_operator.controller.conditions import ConditionUpdate, ReconcileInput
from kvtier_operator.controller.pods.pod_view import PodView, view
from kvtier_operator.controller.pods.reports import NO_REPORT, LastReport, parse_report
from kvtier_operator.controller.status.compute import StatusInputs, compute_status
from kvtier_operator.controller.status.pod_conditions import ObservedPods
from kvtier_operator.kube.resources import Object

FINE = (
    ConditionUpdate("Accepted", "True", "Accepted", "The policy is valid."),
    ConditionUpdate("StorageReady", "True", "NoClaims", "No tier needs a claim."),
)
Answer = Mapping[str, Any] | LastReport | None


def answered(document: Mapping[str, Any] | None = None) -> LastReport:
    """The result of polling a pod that answered with this document."""
    return LastReport(
        parse_report(json.dumps(document if document is not None else status_document()).encode())
    )


def view_of(
    pod: Object, last: Answer = None, of: KVTierPolicy | None = None, now: float = NOON, **more: Any
) -> PodView:
    """The view of one pod. ``last``: the document that it answered with, the result of polling it,
    or None.
    """
    result = last if isinstance(last, LastReport) else NO_REPORT if last is None else answered(last)
    return view(of or policy(), decode_pod(pod), result, now, **more)


def reconcile_input(**more: Any) -> ReconcileInput:
    """The input of a policy whose plan was applied."""
    return ReconcileInput(
        **{
            "structural_hash": HASH,
            "live_generation": 5,
            "accepted": True,
            "conditions": FINE,
            **more,
        }
    )


def status(
    *pods: PodView,
    of: KVTierPolicy | None = None,
    previous: PolicyStatus | None = None,
    now: float = NOON,
    plan: ReconcileInput | None = None,
    **observed: Any,
) -> PolicyStatus:
    """The status that follows from these pods."""
    return compute_status(
        of or policy(),
        StatusInputs(plan or reconcile_input(), ObservedPods(pods, **observed), previous, now),
    )


def condition(found: PolicyStatus, kind: str) -> Condition:
    """One of its conditions."""
    return next(each for each in found.conditions or () if each.type == kind)


def verdict(found: PolicyStatus, kind: str) -> tuple[str, str]:
    """Status and reason of a condition."""
    chosen = condition(found, kind)
    return chosen.status, chosen.reason
