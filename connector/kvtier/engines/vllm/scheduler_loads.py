"""Lookups and promotions on the scheduler side: how many tokens match, and when a request waits.

``match`` checks these cases in order:

1. The request is skipped, one of its loads failed, or the replica is not usable: 0.
2. A promotion is pending: None (ask again) until it ends or its deadline passes.
3. The promotion has ended, or the rest is expected to arrive while what has arrived is copied: the
   promoted prefix, if it is long enough.
4. The last match is still valid: the same again.
5. The best prefix needs a secondary tier, or unverified RAM, or it ends at a key that a tier may
   hold although the replica lacks it: request a promotion and return None. If too many requests
   wait, or the request's time is up, continue with what RAM holds.
6. Stores of the request are in flight: None, for a bounded time.
7. The prefix that is in RAM.

With one group of full attention, every beginning of a prefix is usable, and a load that fails
half-way has loaded something. With any other groups a prefix needs different objects than its
beginnings, so a promotion or load is of use as a whole or not at all.

docs/datapath.md describes the protocol with tierd. The scheduler's thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from kvtier.config.models import Selection
from kvtier.engines.common.held_chunks import HeldChunks
from kvtier.engines.common.request_state import CachedMatch, PendingPromotion, RequestState
from kvtier.engines.common.tierd_session import TierdSession
from kvtier.engines.vllm.cost_estimates import PrefillEstimator
from kvtier.engines.vllm.load_records import LoadPrefix
from kvtier.engines.vllm.loads_in_flight import LoadsInFlight
from kvtier.engines.vllm.miss_lookups import MissLookups
from kvtier.engines.vllm.scheduler_promotions import PromotionChoice
from kvtier.planner import Planner
from kvtier.store.cost_model import Prefill
from kvtier.store.selection import LOSS_SHARE
from kvtier.store.types import MEMORY_BIT
from kvtier.tierd.wire import Arriving, Cancel, Promote, Promoted

MAX_PENDING_PROMOTIONS = 32
"""Further requests match what is in RAM."""
PROMOTION_GRACE_SECONDS = 0.1
"""tierd ends a promotion within its budget; this much later the scheduler side gives up."""
MATCH_REFRESH_SECONDS = 0.05
"""How long a match is reused although keys were added."""
STORE_WAIT_SECONDS = 1.0
PINNED_SECONDS = 30.0
"""A request that is not admitted releases its promoted slots after this time; tierd reclaims them
after 60 s."""


class SchedulerLoads:
    """All loads of one engine. Load and promotion ids are unique for the life of the engine."""

    def __init__(
        self,
        planner: Planner,
        session: TierdSession,
        prefill: PrefillEstimator,
        clock: Callable[[], float],
    ) -> None:
        self.decision = ""
        """How the last lookup ended."""
        self._planner = planner
        self._hashes_per_chunk = planner.hashes_per_chunk
        self._session = session
        self._prefill = prefill
        self._lookups = MissLookups(planner, session, prefill)
        self._choice = PromotionChoice(planner, session, self._lookups)
        self._clock = clock
        self._ids = count(1)
        self.in_flight = LoadsInFlight(planner, session, self.new_id, clock)
        self._pending: dict[int, RequestState] = {}
        """Promotions that tierd has not answered."""

    @property
    def waiting(self) -> int:
        """How many requests wait for a secondary tier."""
        return len(self._pending)

    def new_id(self) -> int:
        """Returns an unused id, for a promotion or a prefetch."""
        return next(self._ids)

    # Lookup.

    def match(self, state: RequestState, computed_tokens: int) -> int | None:
        """Returns how many tokens beyond ``computed_tokens`` can be loaded; None: ask again.

        vLLM may call this in every step, so it does no I/O.
        """
        now = self._clock()
        session = self._session
        if state.load_failed or state.skip_reason or not session.replica_ready:
            self.cancel_promotion(state)
            self.decision = "not_ready" if session.replica_ready is False else "load_failed"
            return 0
        if state.lookup_started_at is None:
            state.lookup_started_at = now
        promotion = state.pending_promotion
        if promotion is not None and promotion.epoch != session.epoch:
            promotion = state.pending_promotion = None
        if promotion is not None:
            promoted = self._match_promotion(state, promotion, computed_tokens, now)
            if promoted != 0:
                return promoted
        match = state.cached_match
        if (
            match is not None
            and match.computed_tokens == computed_tokens
            and match.removals == session.replica.removals
            and match.epoch == session.epoch
            and (
                match.changes == session.replica_changes
                or now - match.matched_at < MATCH_REFRESH_SECONDS
            )
        ):
            return match.tokens
        if self._planner.starts_at_block(computed_tokens):
            tokens = self._match_replica(state, computed_tokens, now)
            if tokens is None:
                return None
        else:
            tokens, self.decision = 0, "not_held"
        state.cached_match = CachedMatch(
            computed_tokens,
            tokens,
            session.replica.removals,
            session.replica_changes,
            session.epoch,
            now,
        )
        return tokens

    def _match_promotion(
        self, state: RequestState, promotion: PendingPromotion, computed_tokens: int, now: float
    ) -> int | None:
        """Returns the promoted tokens; None while the request waits; 0 if the promotion is over."""
        if promotion.usable_keys is None:
            if now < promotion.deadline and not self._lookups.expired(promotion, now):
                return None
            self.in_flight.counts.promotions["out_of_time"] += 1
            self.cancel_promotion(state)
            return 0
        if promotion.end_tokens:
            whole = promotion.usable_keys == promotion.keys
            same = promotion.computed_tokens == computed_tokens
            end = promotion.end_tokens if whole and same else 0
        else:
            end = self._planner.tokens(promotion.first_chunk + promotion.usable_keys)
        tokens = end - computed_tokens
        if (
            tokens < max(1, self._session.live.min_load_tokens)
            or promotion.first_chunk != self._planner.chunks(computed_tokens)
            or end > self._planner.tokens(self._max_chunks(state, computed_tokens))
            or now - promotion.ended_at > PINNED_SECONDS
        ):
            self.cancel_promotion(state)
            return 0
        return tokens

    def _match_replica(self, state: RequestState, computed_tokens: int, now: float) -> int | None:
        planner = self._planner
        if not planner.prefix_only:
            return self._match_groups(state, computed_tokens, now)
        first, end = planner.chunks(computed_tokens), self._max_chunks(state, computed_tokens)
        held = HeldChunks(state, self._session.replica, self._hashes_per_chunk, end)
        stop = held.first_missing(0, first, end)
        bits = held.bits(0, first, stop).tolist()
        ram_chunks = held.only_bits(MEMORY_BIT).first_missing(0, first, stop) - first
        unknown = self._lookups.keys(
            computed_tokens, len(bits), max(0, end - first), state.tier_bits
        )
        if (ram_chunks < len(bits) or unknown) and self._promote(
            state, computed_tokens, bits, now, unknown
        ):
            return None
        ram_tokens = planner.tokens(first + ram_chunks) - computed_tokens if ram_chunks else 0
        return self._match_ram(state, computed_tokens, ram_tokens, now)

    def _max_chunks(self, state: RequestState, computed_tokens: int) -> int:
        """Up to which chunk of the request may be loaded."""
        hashed = len(state.hashes(self._hashes_per_chunk))
        end = min(hashed, self._planner.max_hit_chunks(state.request.num_tokens))
        most = state.hints.max_load_tokens
        if most is not None:
            end = min(end, self._planner.chunks(computed_tokens + most))
        return end if state.load_end is None else min(end, state.load_end)

    def _match_groups(self, state: RequestState, computed_tokens: int, now: float) -> int | None:
        """As ``_match_replica``, where a prefix is usable as a whole only."""
        planner, end = self._planner, self._max_chunks(state, computed_tokens)
        held = HeldChunks(state, self._session.replica, self._hashes_per_chunk, end)
        anywhere = planner.longest_prefix(computed_tokens, end, held)
        in_ram = 0
        if anywhere:
            in_ram = planner.longest_prefix(computed_tokens, anywhere, held.only_bits(MEMORY_BIT))
        if in_ram < anywhere and self._may_promote(state):
            prefix = self._choice.whole_prefix(computed_tokens, (in_ram, anywhere), held)
            if prefix is not None and self._request_promotion(state, prefix, now):
                return None
        ram_tokens = planner.tokens(in_ram) - computed_tokens if in_ram else 0
        return self._match_ram(state, computed_tokens, ram_tokens, now)

    def _match_ram(
        self, state: RequestState, computed_tokens: int, ram_tokens: int, now: float
    ) -> int | None:
        """The answer if ``ram_tokens`` tokens can be loaded from RAM."""
        live = self._session.live
        if ram_tokens < max(1, live.min_load_tokens):
            self.decision = "too_short" if ram_tokens else "not_held"
            if state.promotion_tried:
                self.decision = "not_in_time"
            return 0
        if live.selection is Selection.COST:
            prefill = self._prefill.estimate()
            if prefill is not None and not self.in_flight.copies.beats_recompute(
                ram_tokens,
                prefill.seconds(computed_tokens, computed_tokens + ram_tokens),
                now,
            ):
                self.in_flight.counts.promotions["ram_slower_than_recomputing"] += 1
                self.decision = "ram_slower_than_recomputing"
                return 0
        if state.stores_in_flight and not self._store_wait_expired(state, now):
            # It was preempted while it was being stored; the rest will be in RAM in a moment.
            return None
        self.decision = "load"
        return ram_tokens

    def _store_wait_expired(self, state: RequestState, now: float) -> bool:
        if state.store_wait_started_at is None:
            state.store_wait_started_at = now
        return now - state.store_wait_started_at > STORE_WAIT_SECONDS

    # Promotions.

    def _promote(
        self,
        state: RequestState,
        computed_tokens: int,
        bits: Sequence[int],
        now: float,
        unknown: int = 0,
    ) -> bool:
        """Requests a promotion of the best prefix; returns whether the request has to wait.

        ``bits[i]``: the tiers that hold the i-th chunk of the prefix. ``unknown``: how many keys
        after it tierd looks up.
        """
        if not self._may_promote(state):
            return False
        prefix = self._choice.best_prefix(state, computed_tokens, bits, unknown)
        return prefix is not None and self._request_promotion(state, prefix, now)

    def _may_promote(self, state: RequestState) -> bool:
        if state.promotion_tried:
            # Otherwise a tier that fails immediately gets a request in every step.
            return False
        if len(self._pending) >= MAX_PENDING_PROMOTIONS:
            self.in_flight.counts.promotions["too_many_waiting"] += 1
            return False
        return True

    def _request_promotion(self, state: RequestState, prefix: LoadPrefix, now: float) -> bool:
        """Asks tierd to promote ``prefix``; returns whether the request has to wait."""
        session = self._session
        timeout = prefix.timeout_seconds
        prefill = self._prefill.estimate() if session.live.selection is Selection.COST else None
        if prefill is not None:
            # tierd ends the promotion by then; this also holds if tierd does not answer.
            share = LOSS_SHARE if prefix.chunks else 1 + LOSS_SHARE
            stake = prefill.seconds(prefix.computed_tokens, prefix.end_tokens)
            timeout = min(timeout, share * stake)
        waited = now - state.lookup_started_at if state.lookup_started_at is not None else 0.0
        budget = timeout - waited
        if budget <= 0:
            return False
        if state.stores_in_flight and not self._store_wait_expired(state, now):
            return True
        promotion_id = next(self._ids)
        if not session.send(self._promote_message(promotion_id, state, prefix, budget, waited)):
            return False
        state.cached_match = None
        state.promotion_tried = True
        deadline = now + budget + PROMOTION_GRACE_SECONDS
        promotion = PendingPromotion(
            promotion_id,
            prefix.first_chunk,
            prefix.keys,
            deadline,
            session.epoch,
            computed_tokens=prefix.computed_tokens if prefix.chunks else 0,
            end_tokens=prefix.end_tokens if prefix.chunks else 0,
        )
        if prefix.lookup_key:
            promotion.lookup_deadline = now + prefix.lookup_seconds + PROMOTION_GRACE_SECONDS
            promotion.lookup_key = prefix.lookup_key
        state.pending_promotion = promotion
        self._pending[promotion_id] = state
        return True

    def _promote_message(
        self,
        promotion_id: int,
        state: RequestState,
        prefix: LoadPrefix,
        budget_seconds: float,
        waited_seconds: float,
    ) -> Promote:
        """Under selection ``Cost`` tierd decides, so it gets the cost of computing the prompt."""
        if prefix.chunks:
            keys = state.wire_keys_of_chunks(prefix.chunks)
        else:
            keys = state.wire_keys(prefix.first_chunk, prefix.keys)
        whole = bool(prefix.chunks)
        cost = self._session.live.selection is Selection.COST
        prefill = (self._prefill.estimate() if cost else None) or Prefill(0.0, 0.0)
        ends: tuple[int, ...] = ()
        if whole:
            # A part of the keys saves nothing, so it earns no time.
            start = prefix.computed_tokens
            ends = (*range(start + 1, start + prefix.keys), prefix.end_tokens)
        elif cost:
            first = prefix.first_chunk + 1
            ends = tuple(self._planner.tokens(chunk) for chunk in range(first, first + prefix.keys))
        return Promote(
            promotion=promotion_id,
            keys=keys,
            budget_seconds=budget_seconds,
            start_tokens=prefix.computed_tokens if ends else 0,
            ends=ends,
            alpha=prefill.alpha,
            beta=prefill.beta,
            waited_seconds=waited_seconds if cost else 0.0,
            whole=whole,
            look_up=prefix.look_up,
            owner=self._session.owner(state),
            copy_seconds=0.0
            if whole or not cost
            else self._planner.chunk_tokens
            * self.in_flight.copies.seconds_per_token(self._clock()),
        )

    def on_promoted(self, message: Promoted) -> None:
        """tierd ended a promotion."""
        if self.in_flight.on_promoted(message):
            return
        state = self._pending.pop(message.promotion, None)
        promotion = state.pending_promotion if state is not None else None
        if promotion is None or promotion.promotion_id != message.promotion:
            return  # It was cancelled before; tierd has got the Cancel.
        self.in_flight.counts.promotions[message.outcome] += 1
        promotion.usable_keys = min(message.usable, promotion.keys)
        promotion.arriving = False
        promotion.ended_at = self._clock()
        promotion.tiers = message.tiers
        promotion.locations = message.locations

    def on_arriving(self, message: Arriving) -> None:
        """Keys of a promotion have arrived, and the rest is expected within the copy of these."""
        if self.in_flight.on_arriving(message):
            return
        state = self._pending.get(message.promotion)
        promotion = state.pending_promotion if state is not None else None
        if (
            promotion is None
            or promotion.promotion_id != message.promotion
            or promotion.end_tokens
            or message.first != len(promotion.locations)
        ):
            return
        if not promotion.arriving:
            self.in_flight.counts.promotions["early"] += 1
        promotion.arriving = True
        promotion.usable_keys = min(message.predicted, promotion.keys)
        promotion.ended_at = self._clock()
        promotion.tiers += message.tiers
        promotion.locations += message.locations

    def cancel_promotion(self, state: RequestState) -> None:
        """Cancels the request's promotion, if any, and releases the slots that it pinned."""
        promotion, state.pending_promotion = state.pending_promotion, None
        if promotion is None:
            return
        self._pending.pop(promotion.promotion_id, None)
        if promotion.usable_keys != 0:
            self._session.send(Cancel(promotion=promotion.promotion_id))

    # Loads.

    def start(
        self, state: RequestState, tokens: int, block_tables: Sequence[Sequence[int]]
    ) -> None:
        """Starts a load of ``tokens`` tokens after the request's local hit.

        ``block_tables``: the request's whole block tables, by group.
        """
        promotion, state.pending_promotion = state.pending_promotion, None
        ends_at = 0.0
        if promotion is not None:
            self._pending.pop(promotion.promotion_id, None)
            ends_at = promotion.deadline - PROMOTION_GRACE_SECONDS
        self.in_flight.start(state, tokens, block_tables, promotion, ends_at)

    def on_request_finished(self, state: RequestState) -> None:
        """The request finished or was aborted."""
        self.cancel_promotion(state)
        if state.load_id:
            self.in_flight.cancel(state.load_id)

    def on_session_lost(self) -> None:
        """Handles the loss of tierd: ends all promotions. The workers end the loads in flight."""
        pending, self._pending = self._pending, {}
        self.in_flight.on_session_lost()
        for state in pending.values():
            state.pending_promotion = None
            self.in_flight.counts.promotions["lost"] += 1

    def reset(self) -> None:
        """Cancels every pending promotion."""
        for state in list(self._pending.values()):
            self.cancel_promotion(state)
