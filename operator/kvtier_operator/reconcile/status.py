"""From what is known of a policy and its pods to its status. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.status import PolicyStatus
from kvtier_operator.reconcile.conditions import stamped
from kvtier_operator.reconcile.facts import PlanFacts


@dataclass(frozen=True, slots=True)
class StatusInputs:
    """Everything a status is made of. ``now``: seconds since 1970."""

    facts: PlanFacts
    now: float
    previous: PolicyStatus | None = None


def compute_status(policy: KVTierPolicy, inputs: StatusInputs) -> PolicyStatus:
    """The whole status."""
    generation = policy.metadata.generation or 0
    before = inputs.previous.conditions if inputs.previous is not None else None
    return PolicyStatus.model_validate(
        {
            "observedGeneration": generation,
            "structuralHash": inputs.facts.structural_hash,
            "liveGeneration": inputs.facts.live_generation,
            "conditions": stamped(inputs.facts.findings, before, generation, inputs.now),
        }
    )
