"""Conditions: from what was found in this reconcile to what is written. Pure.

``Ready`` sums up whether pods of the policy have working tiers. What only says that a newer state has not reached every
pod (``UpToDate``, ``Tuned``) does not make a policy unready.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from kvtier_operator.api.status import Condition
from kvtier_operator.reconcile.facts import Finding

ORDER = ("Ready", "Accepted", "StorageReady", "Attached", "UpToDate", "Tuned", "EnginesCompatible", "TiersHealthy")
"""As they are listed in a status."""
DECIDE_READY = ("Accepted", "StorageReady", "EnginesCompatible", "Attached", "TiersHealthy")
"""In the order in which they speak for Ready: what must be repaired first comes first."""
MAX_MESSAGE = 1024
READY_MESSAGE = "The policy is in force."


def ready(findings: Iterable[Finding]) -> Finding:
    """The summary: the first that is False, else the first that is Unknown, else True."""
    by_type = {finding.type: finding for finding in findings}
    relevant = [by_type[name] for name in DECIDE_READY if name in by_type]
    for verdict in ("False", "Unknown"):
        for finding in relevant:
            if finding.status == verdict:
                return Finding("Ready", verdict, finding.reason, f"{finding.type}: {finding.message}")
    return Finding("Ready", "True", "InForce", READY_MESSAGE)


def stamped(
    findings: Iterable[Finding], previous: Sequence[Condition] | None, generation: int, now: float
) -> list[Condition]:
    """Conditions to write, ``Ready`` included where it is not among them. ``now``: seconds since 1970.

    A condition whose status stays keeps its transition time, so that the same findings give the same conditions.
    """
    found = {finding.type: finding for finding in findings}
    if "Ready" not in found:
        found["Ready"] = ready(found.values())
    before = {condition.type: condition for condition in previous or ()}
    names = [name for name in ORDER if name in found] + sorted(set(found) - set(ORDER))
    moment = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    conditions = []
    for name in names:
        finding, old = found[name], before.get(name)
        kept = old is not None and old.status == finding.status
        message = finding.message
        conditions.append(
            Condition.model_validate(
                {
                    "type": name,
                    "status": finding.status,
                    "reason": finding.reason,
                    "message": message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…",
                    "observedGeneration": generation,
                    "lastTransitionTime": old.last_transition_time if kept and old is not None else moment,
                }
            )
        )
    return conditions
