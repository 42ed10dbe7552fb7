"""What the parts of a reconcile hand to one another, as values.

The loop observes and plans; ``PlanFacts`` is what looking after the pods needs of that, and ``StatusResult`` what comes
back. Conditions travel as ``Finding`` (no times, no generation); ``conditions`` turns them into what is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvtier_operator.api.status import PolicyStatus
from kvtier_operator.cluster.contract import Object

Verdict = Literal["True", "False", "Unknown"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One condition as found in this reconcile: ``reason`` in one word, ``message`` one sentence for people."""

    type: str
    status: Verdict
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """What is known of a policy when its pods are looked after.

    ``findings``: Accepted and StorageReady. ``pods``: pods that the selector matches and this policy governs, in no
    order; ``conflicted``: pods that it matches too but an older policy governs, each with that policy's name.
    ``claims``: tier to claim, only of tiers whose claim the operator makes or expects. ``accepted`` is False where
    nothing was applied, and then new pods are left alone. ``live_generation``: of the live ConfigMap as it stands after
    this reconcile. ``token``: bearer token of the policy's pods, None while the Secret is missing.
    """

    structural_hash: str
    live_generation: int
    accepted: bool
    findings: tuple[Finding, ...] = ()
    pods: Sequence[Object] = ()
    conflicted: Sequence[tuple[Object, str]] = ()
    claims: dict[str, str] = field(default_factory=dict)
    token: str | None = None


@dataclass(frozen=True, slots=True)
class StatusResult:
    """What looking after the pods came to.

    ``status``: the whole status to be written (the loop compares it with the one in force, and writes on a difference).
    ``wake_seconds``: when the policy should be looked at again without any event; None: at the next resync.
    """

    status: PolicyStatus
    wake_seconds: float | None = None
