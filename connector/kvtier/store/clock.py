"""How long a request may wait for tiers (DATAPATH 2)."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.store.estimates import Prefill

LOSS_SHARE = 0.5
"""Share of the time to recompute that waiting may cost."""


@dataclass(frozen=True, slots=True)
class RequestClock:
    """The limit of one request. ``limit_seconds``: its tiers' ``loadTimeoutSeconds``, which nothing extends.

    With ``prefill``, no more than half of the time is lost that computing tokens ``start_tokens`` to ``end_tokens`` would
    take: those that wait for a tier, or for something a tier has to bring before. What has arrived in order is not lost, so
    it gives the time back that computing it would have taken. Whatever a tier does, the request's first token comes within
    1.5 x recomputing; and a steady tier that is faster than recomputing by little is not cut off half-way, where it would
    cost more than either of recomputing and loading.
    """

    limit_seconds: float
    start_tokens: int = 0
    end_tokens: int = 0
    prefill: Prefill | None = None

    def seconds(self, arrived_tokens: int) -> float:
        """How long the request may wait, counted from its first question, once this much of its prompt is there in order."""
        if self.prefill is None:
            return self.limit_seconds
        stake = self.prefill.seconds(self.start_tokens, self.end_tokens)
        gained = self.prefill.seconds(self.start_tokens, max(arrived_tokens, self.start_tokens))
        return min(self.limit_seconds, LOSS_SHARE * stake + gained)
