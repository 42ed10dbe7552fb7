"""When a request asks tierd to look up keys that the replica lacks.

A tier that other processes write to may hold an object that this tierd does not know of yet. tierd
looks it up within ``lookupTimeoutMilliseconds``, and within a small share of the time that
computing the missing tokens takes. Where that is too short for any lookup, none is requested. The
scheduler's thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.config.models import Selection
from kvtier.engines.common.request_state import PendingPromotion
from kvtier.engines.common.tierd_session import TierdSession
from kvtier.engines.vllm.cost_estimates import PrefillEstimator
from kvtier.planner import Planner
from kvtier.store.selection import LOOKUP_SHARE
from kvtier.store.types import RAM_BITS

MIN_LOOKUP_SECONDS = 0.001
"""A shorter time suffices for no file system in a network."""


class MissLookups:
    """The lookups of one engine's requests. Chunks are counted from the end of a request's local
    hit of ``computed_tokens``; ``known`` of them are in the replica, and the request has ``total``.
    """

    def __init__(self, planner: Planner, session: TierdSession, prefill: PrefillEstimator) -> None:
        self._planner = planner
        self._session = session
        self._prefill = prefill

    def keys(self, computed_tokens: int, known: int, total: int, tier_bits: int = -1) -> int:
        """Returns how many keys after the known ones are worth a lookup.

        ``tier_bits``: the tiers that the request may use. tierd looks into all of its tiers.
        """
        asked = self._session.replica.asked_bits
        if known >= total or not asked or asked & ~tier_bits:
            return 0
        end = self._planner.tokens(self._planner.chunks(computed_tokens) + total)
        if end - computed_tokens < max(1, self._session.live.min_load_tokens):
            return 0
        if self.seconds(computed_tokens, known, total) < MIN_LOOKUP_SECONDS:
            return 0
        return total - known

    def seconds(self, computed_tokens: int, known: int, total: int) -> float:
        """Returns how long tierd may look up the keys after the known ones."""
        session, planner = self._session, self._planner
        limit: float = max(
            (
                session.tier(index).lookup_timeout_milliseconds / 1e3
                for index in self.tiers((), total - known)
            ),
            default=0.0,
        )
        prefill = self._prefill.estimate() if session.live.selection is Selection.COST else None
        if prefill is not None:
            first = planner.chunks(computed_tokens)
            start = max(computed_tokens, planner.tokens(first + known))
            missing = prefill.seconds(start, planner.tokens(first + total))
            limit = min(limit, LOOKUP_SHARE * missing)
        return limit

    def tiers(self, bits: Sequence[int], unknown: int) -> tuple[int, ...]:
        """Returns the secondary tiers that keys with these bits, or unknown ones, may come from."""
        found = self._session.replica.asked_bits if unknown else 0
        for held in set(bits):
            found |= 0 if held & RAM_BITS else held & -held
        return tuple(index for index in range(1, found.bit_length()) if found >> index & 1)

    def expired(self, promotion: PendingPromotion, now: float) -> bool:
        """Returns whether a request waits for nothing but a lookup, whose time has passed."""
        if not promotion.lookup_deadline or now < promotion.lookup_deadline:
            return False
        if self._session.replica.get(promotion.lookup_key):
            # It was found, and is being read.
            promotion.lookup_deadline = 0.0
            return False
        return True
