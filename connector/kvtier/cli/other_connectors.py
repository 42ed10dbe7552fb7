"""Policies for connectors other than KVTier's own, as `kvtier render` answers for their engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.render import connectors
from kvtier_operator.render.engine import attaching_variables
from kvtier_operator.render.topology import pod_placement


@dataclass(frozen=True, slots=True)
class OtherEngine:
    """What is rendered, and what a person should know about it."""

    rendered: connectors.Rendered
    hash_seed: str
    notes: tuple[str, ...]

    def variables(self, payload: str | None, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment that configures an engine whose command stays as it is."""
        return {
            connectors.TRANSFER_CONFIG_VARIABLE: self.rendered.transfer_config_text,
            **self.rendered.environment,
            **attaching_variables(self.hash_seed, payload, inherited),
        }


def engine(policy: KVTierPolicy) -> OtherEngine:
    """The configuration with paths as in pods. Raises ``ConfigurationError``."""
    ranks = policy.spec.engine.local_ranks
    rendered = connectors.render(policy, dict(pod_placement(policy).tier_paths), ranks or 1)
    notes = [refusal.message for refusal in connectors.gaps(policy)]
    if ranks is None:
        notes.append("spec.engine.localRanks is not set: sizes per rank are for one rank")
    return OtherEngine(rendered, policy.spec.engine.hash_seed, tuple(notes))
