"""The choice of the prefix that a request asks tierd to promote.

With one group of full attention any beginning of the prefix is usable, so tierd may promote a part
of what it is asked for. With any other groups a prefix is promoted as a whole or not at all. The
scheduler's thread only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from kvtier.config.models import Selection
from kvtier.engines.common.held_chunks import HeldChunks
from kvtier.engines.common.request_state import RequestState
from kvtier.engines.common.tierd_session import TierdSession
from kvtier.engines.vllm.load_records import LoadPrefix, source_tier, source_tier_bits
from kvtier.engines.vllm.miss_lookups import MissLookups
from kvtier.planner import Planner
from kvtier.presence_table import Words
from kvtier.store.selection import choose_prefix
from kvtier.store.types import MEMORY_BIT

VERIFY_TIMEOUT_SECONDS = 5
"""The time limit where data in RAM only needs verification, which takes 0.1 s per gigabyte."""


class PromotionChoice:
    """Chooses what one engine's requests ask tierd to promote, by the policy's ``selection``."""

    def __init__(self, planner: Planner, session: TierdSession, lookups: MissLookups) -> None:
        self._planner = planner
        self._session = session
        self._lookups = lookups

    def best_prefix(
        self, state: RequestState, computed_tokens: int, bits: Sequence[int], unknown: int
    ) -> LoadPrefix | None:
        """Returns the best prefix where every beginning of it is usable; None: none is worth it.

        ``bits[i]``: the tiers that hold the i-th chunk of the prefix. ``unknown``: how many keys
        after it tierd looks up.
        """
        planner, session = self._planner, self._session
        first = planner.chunks(computed_tokens)
        tiers: Iterable[int] = self._lookups.tiers(bits, unknown)
        keys = len(bits) + unknown
        if not unknown:
            tier_of = {each: source_tier(each) for each in set(bits)}
            sources = [tier_of[each] for each in bits]
            weights = [session.tier(index).load_weight for index in range(max(sources) + 1)]
            tokens = [planner.chunk_tokens] * len(bits)
            tokens[0] -= computed_tokens - planner.tokens(first)
            chosen = choose_prefix(session.live.selection, sources, weights, tokens).chosen
            if chosen is None or chosen.tokens < max(1, session.live.min_load_tokens):
                return None
            if all(b & MEMORY_BIT for b in set(bits[: chosen.keys])):
                return None
            tiers, keys = chosen.tiers, chosen.keys
        prefix = LoadPrefix(
            computed_tokens,
            first,
            keys,
            planner.tokens(first + keys),
            self._tier_timeout(tiers),
            look_up=bool(unknown),
        )
        if unknown and all(b & MEMORY_BIT for b in set(bits)):
            prefix = replace(
                prefix,
                lookup_seconds=self._lookups.seconds(computed_tokens, len(bits), keys),
                lookup_key=state.keys(planner.hashes_per_chunk)[first + len(bits)],
            )
        return prefix

    def whole_prefix(
        self, computed_tokens: int, ends: tuple[int, int], held: HeldChunks
    ) -> LoadPrefix | None:
        """Returns the best prefix where one is usable as a whole only; None: none is worth it.

        ``ends``: chunks of the longest prefix that is in RAM, and of the longest one.
        """
        planner, session = self._planner, self._session
        in_ram, end = ends
        if session.live.selection is Selection.WEIGHTED:
            end = self._best_weighted_end(computed_tokens, ends, held)
        end_tokens = planner.tokens(end)
        if end <= in_ram:
            return None
        chunks = tuple(planner.needed_chunks(computed_tokens, end_tokens))
        keys = sum(stop - begin for _, begin, stop in chunks)
        least = max(1, session.live.min_load_tokens, keys)
        if not keys or end_tokens - computed_tokens < least:
            return None
        tiers = {source_tier(bits) for each in chunks for bits in held.distinct_bits(*each)}
        first, timeout = planner.chunks(computed_tokens), self._tier_timeout(tiers)
        return LoadPrefix(computed_tokens, first, keys, end_tokens, timeout, chunks)

    def _best_weighted_end(
        self, computed_tokens: int, ends: tuple[int, int], held: HeldChunks
    ) -> int:
        """Chunks of the prefix with the most tokens x weight of the slowest tier that it needs; of
        two equal ones the one in faster tiers."""
        planner, session = self._planner, self._session
        in_ram, anywhere = ends
        tiers = range(session.replica.usable_bits.bit_length())
        weights = {tier: session.tier(tier).load_weight for tier in tiers}
        if len(set(weights.values())) == 1:
            return anywhere
        best, best_score = 0, 0
        if in_ram:
            best = in_ram
            best_score = (planner.tokens(in_ram) - computed_tokens) * weights[0]
        for weight in sorted(set(weights.values()), reverse=True):
            allowed = sum(1 << tier for tier in weights if weights[tier] >= weight)
            found = planner.longest_prefix(
                computed_tokens, anywhere, held.only(partial(_from_tiers, allowed))
            )
            score = (planner.tokens(found) - computed_tokens) * weight if found else 0
            if score > best_score:
                best, best_score = found, score
        return best

    def _tier_timeout(self, tiers: Iterable[int]) -> float:
        return max(
            (self._session.tier(tier).load_timeout_seconds for tier in tiers if tier),
            default=VERIFY_TIMEOUT_SECONDS,
        )


def _from_tiers(allowed: int, bits: Words) -> Words:
    """Not 0 for objects that are taken from one of the ``allowed`` tiers, which have a bit each."""
    return source_tier_bits(bits) & allowed
