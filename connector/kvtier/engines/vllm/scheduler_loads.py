"""Loads on the scheduler side: how many tokens match, when a request waits, and how loads end.

``match`` checks these cases in order:

1. The request is skipped, one of its loads failed, or the replica is not usable: 0.
2. A promotion is pending: None (ask again) until it ends or its deadline passes.
3. The promotion has ended: the promoted prefix, if it is long enough.
4. The last match is still valid: the same again.
5. The best prefix needs a secondary tier, or unverified RAM, or it ends at a key that a tier may
   hold although the replica lacks it: request a promotion and return None. If too many requests
   wait, or the request's time is up, continue with what RAM holds.
6. Stores of the request are in flight: None, for a bounded time.
7. The prefix that is in RAM.

docs/datapath.md describes the protocol with tierd. The scheduler's thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from kvtier.config.models import Selection
from kvtier.engines.common.jobs import BlockRun, LoadJob, LoadResult
from kvtier.engines.common.request_state import CachedMatch, PendingPromotion, RequestState
from kvtier.engines.common.tierd_session import TierdSession
from kvtier.engines.vllm.cost_estimates import CopyEstimator, PrefillEstimator
from kvtier.engines.vllm.miss_lookups import MissLookups
from kvtier.planner import Planner
from kvtier.store.cost_model import Prefill
from kvtier.store.generations import unpack_location
from kvtier.store.selection import LOSS_SHARE, choose_prefix
from kvtier.store.types import MEMORY_BIT, RAM_BITS
from kvtier.tierd.wire import Cancel, Load, LoadReleased, Promote, Promoted

MAX_PENDING_PROMOTIONS = 32
"""Further requests match what is in RAM."""
PROMOTION_GRACE_SECONDS = 0.1
"""tierd ends a promotion within its budget; this much later the scheduler side gives up."""
LOAD_GRACE_SECONDS = 0.05
REPORT_GRACE_SECONDS = 1.0
"""A worker reports within this time after the limit of its load."""
MIN_LOAD_TIMEOUT_SECONDS = 1.0
"""The data of a load is in RAM, so a busy machine must not turn it into a failure."""
MIN_COPY_BYTES_PER_SECOND = 2 << 30
"""A load may take as long as copies at this rate, a fraction of what any GPU link delivers."""
MATCH_REFRESH_SECONDS = 0.05
"""How long a match is reused although keys were added."""
STORE_WAIT_SECONDS = 1.0
VERIFY_TIMEOUT_SECONDS = 5
"""The time limit where data in RAM only needs verification, which takes 0.1 s per gigabyte."""
PINNED_SECONDS = 30.0
"""A request that is not admitted releases its promoted slots after this time; tierd reclaims them
after 60 s."""


@dataclass(slots=True)
class ActiveLoad:
    """A load in flight.

    ``chunk_tokens[i]``: tokens that key i covers. ``source_tiers``: where the keys were before they
    were promoted; empty if nothing was. ``keys_loaded`` and ``failure`` come from the workers'
    reports. ``epoch``: of the session that was told of the load. ``expires_at``: when the workers
    have reported, unless something is wrong. A rank may report before its copies have ended, so
    there are two counts of ranks.
    """

    load_id: int
    state: RequestState
    first_chunk: int
    chunk_tokens: tuple[int, ...]
    source_tiers: tuple[int, ...]
    ranks_unreported: int
    ranks_copying: int
    keys_loaded: int
    epoch: int
    expires_at: float
    failure: str = ""
    seconds: float = 0.0
    copy_seconds: float = 0.0
    """Both are of the slowest rank."""

    def tier(self, index: int) -> int:
        """The tier that key ``index`` came from."""
        return self.source_tiers[index] if index < len(self.source_tiers) else 0


@dataclass(slots=True)
class LoadCounts:
    """Counts for vLLM's statistics since they were last collected."""

    offered_tokens: int = 0
    loaded_tokens: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    promotions: Counter[str] = field(default_factory=Counter)
    load_seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _LoadPrefix:
    """Chunks to promote, for a request whose first ``computed_tokens`` tokens are in GPU memory.
    ``look_up``: the replica does not have the last ones."""

    computed_tokens: int
    first_chunk: int
    keys: int
    look_up: bool = False


class SchedulerLoads:
    """All loads of one engine. Load and promotion ids are unique for the life of the engine."""

    def __init__(
        self,
        planner: Planner,
        session: TierdSession,
        prefill: PrefillEstimator,
        clock: Callable[[], float],
    ) -> None:
        self.counts = LoadCounts()
        self.loaded_tokens: Counter[int] = Counter()
        """By tier, since the engine started."""
        self._planner = planner
        self._hashes_per_chunk = planner.hashes_per_chunk
        self._session = session
        self._prefill = prefill
        self._lookups = MissLookups(planner, session, prefill)
        self._copies = CopyEstimator()
        self._clock = clock
        self._ids = count(1)
        self._pending: dict[int, RequestState] = {}
        """Promotions that tierd has not answered."""
        self._active: dict[int, ActiveLoad] = {}
        self._jobs: list[LoadJob] = []
        self._cancelled_loads: list[int] = []

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
            tokens = 0
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
            self.counts.promotions["out_of_time"] += 1
            self.cancel_promotion(state)
            return 0
        end = self._planner.tokens(promotion.first_chunk + promotion.usable_keys)
        tokens = end - computed_tokens
        if (
            tokens < max(1, self._session.live.min_load_tokens)
            or promotion.first_chunk != self._planner.chunks(computed_tokens)
            or now - promotion.ended_at > PINNED_SECONDS
        ):
            self.cancel_promotion(state)
            return 0
        return tokens

    def _match_replica(self, state: RequestState, computed_tokens: int, now: float) -> int | None:
        planner, live = self._planner, self._session.live
        first = planner.chunks(computed_tokens)
        keys = state.keys(self._hashes_per_chunk)
        end = min(len(keys), planner.chunks(state.request.num_tokens))
        if state.load_end is not None:
            end = min(end, state.load_end)
        replica = self._session.replica
        get_value, usable_bits = replica.get_value, replica.usable_bits
        bits: list[int] = []
        ram_chunks = 0
        for key in keys[first:end]:
            chunk_bits = get_value(key, 0) & usable_bits
            if not chunk_bits:
                break
            if chunk_bits & MEMORY_BIT and ram_chunks == len(bits):
                ram_chunks += 1
            bits.append(chunk_bits)
        unknown = self._lookups.keys(computed_tokens, len(bits), end - first)
        if (ram_chunks < len(bits) or unknown) and self._promote(
            state, computed_tokens, bits, now, unknown
        ):
            return None
        ram_tokens = planner.tokens(first + ram_chunks) - computed_tokens if ram_chunks else 0
        if ram_tokens < max(1, live.min_load_tokens):
            return 0
        if live.selection is Selection.COST:
            prefill = self._prefill.estimate()
            if prefill is not None and not self._copies.beats_recompute(
                ram_tokens,
                prefill.seconds(computed_tokens, computed_tokens + ram_tokens),
                now,
            ):
                self.counts.promotions["ram_slower_than_recomputing"] += 1
                return 0
        if state.stores_in_flight and not self._store_wait_expired(state, now):
            # It was preempted while it was being stored; the rest will be in RAM in a moment.
            return None
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
        if state.promotion_tried:
            # Otherwise a tier that fails immediately gets a request in every step.
            return False
        if len(self._pending) >= MAX_PENDING_PROMOTIONS:
            self.counts.promotions["too_many_waiting"] += 1
            return False
        planner, session = self._planner, self._session
        first = planner.chunks(computed_tokens)
        tiers = self._lookups.tiers(bits, unknown)
        keys = len(bits) + unknown
        if not unknown:
            sources = [0 if b & RAM_BITS else (b & -b).bit_length() - 1 for b in bits]
            weights = [session.tier(index).load_weight for index in range(max(sources) + 1)]
            tokens = [planner.chunk_tokens] * len(bits)
            tokens[0] -= computed_tokens - planner.tokens(first)
            chosen = choose_prefix(session.live.selection, sources, weights, tokens).chosen
            if chosen is None or chosen.tokens < max(1, session.live.min_load_tokens):
                return False
            if all(b & MEMORY_BIT for b in bits[: chosen.keys]):
                return False
            tiers, keys = chosen.tiers, chosen.keys
        timeout: float = max(
            (session.tier(tier).load_timeout_seconds for tier in tiers if tier),
            default=VERIFY_TIMEOUT_SECONDS,
        )
        prefill = self._prefill.estimate() if session.live.selection is Selection.COST else None
        if prefill is not None:
            # tierd ends the promotion by then; this also holds if tierd does not answer.
            end = planner.tokens(first + keys)
            timeout = min(timeout, (1 + LOSS_SHARE) * prefill.seconds(computed_tokens, end))
        waited = now - state.lookup_started_at if state.lookup_started_at is not None else 0.0
        budget = timeout - waited
        if budget <= 0:
            return False
        if state.stores_in_flight and not self._store_wait_expired(state, now):
            return True
        promotion_id = next(self._ids)
        prefix = _LoadPrefix(computed_tokens, first, keys, bool(unknown))
        if not session.send(self._promote_message(promotion_id, state, prefix, budget, waited)):
            return False
        state.cached_match = None
        state.promotion_tried = True
        deadline = now + budget + PROMOTION_GRACE_SECONDS
        promotion = PendingPromotion(promotion_id, first, keys, deadline, session.epoch)
        if unknown and all(b & MEMORY_BIT for b in bits):
            seconds = self._lookups.seconds(computed_tokens, len(bits), keys)
            promotion.lookup_deadline = now + seconds + PROMOTION_GRACE_SECONDS
            promotion.lookup_key = state.keys(self._hashes_per_chunk)[first + len(bits)]
        state.pending_promotion = promotion
        self._pending[promotion_id] = state
        return True

    def _promote_message(
        self,
        promotion_id: int,
        state: RequestState,
        prefix: _LoadPrefix,
        budget_seconds: float,
        waited_seconds: float,
    ) -> Promote:
        """Under selection ``Cost`` tierd decides, so it gets the cost of computing the prompt."""
        keys = state.wire_keys(prefix.first_chunk, prefix.keys)
        if self._session.live.selection is not Selection.COST:
            return Promote(
                promotion=promotion_id,
                keys=keys,
                budget_seconds=budget_seconds,
                look_up=prefix.look_up,
            )
        prefill = self._prefill.estimate() or Prefill(0.0, 0.0)
        first = prefix.first_chunk + 1
        ends = tuple(self._planner.tokens(chunk) for chunk in range(first, first + prefix.keys))
        return Promote(
            promotion=promotion_id,
            keys=keys,
            budget_seconds=budget_seconds,
            start_tokens=prefix.computed_tokens,
            ends=ends,
            alpha=prefill.alpha,
            beta=prefill.beta,
            waited_seconds=waited_seconds,
            look_up=prefix.look_up,
        )

    def on_promoted(self, message: Promoted) -> None:
        """tierd ended a promotion."""
        state = self._pending.pop(message.promotion, None)
        promotion = state.pending_promotion if state is not None else None
        if promotion is None or promotion.promotion_id != message.promotion:
            return  # It was cancelled before; tierd has got the Cancel.
        self.counts.promotions[message.outcome] += 1
        promotion.usable_keys = min(message.usable, promotion.keys)
        promotion.ended_at = self._clock()
        promotion.tiers = message.tiers
        promotion.locations = message.locations

    def cancel_promotion(self, state: RequestState) -> None:
        """Cancels the request's promotion, if any, and releases the slots that it pinned."""
        promotion, state.pending_promotion = state.pending_promotion, None
        if promotion is None:
            return
        self._pending.pop(promotion.promotion_id, None)
        if promotion.usable_keys != 0:
            self._session.send(Cancel(promotion=promotion.promotion_id))

    # Loads.

    def start(self, state: RequestState, tokens: int, block_ids: Sequence[int]) -> None:
        """Starts a load of ``tokens`` tokens after the request's local hit.

        ``block_ids``: the request's whole block table. vLLM waits for a report from now on, so a
        job is queued even if tierd cannot be reached.
        """
        now = self._clock()
        planner, session = self._planner, self._session
        parts = planner.needed(state.computed_tokens, state.computed_tokens + tokens)
        first = planner.chunks(state.computed_tokens)
        promotion, state.pending_promotion = state.pending_promotion, None
        load_id = next(self._ids)
        runs = tuple(
            BlockRun(
                each.group, each.first, tuple(block_ids[each.block : each.block + each.blocks])
            )
            for each in parts
        )
        timeout = MIN_LOAD_TIMEOUT_SECONDS
        if promotion is not None:
            self._pending.pop(promotion.promotion_id, None)
            promotion_ends_at = promotion.deadline - PROMOTION_GRACE_SECONDS
            timeout = max(timeout, promotion_ends_at + LOAD_GRACE_SECONDS - now)
        timeout += sum(session.slot_bytes) * len(parts) / MIN_COPY_BYTES_PER_SECOND
        locations = self._locations(state, promotion, first, len(parts))
        slots, generations = [], []
        for slot, generation in map(unpack_location, locations):
            slots.append(slot)
            generations.append(generation)
        self._jobs.append(
            LoadJob(
                load_id,
                state.request_id,
                runs,
                timeout,
                session.epoch,
                tuple(slots),
                tuple(generations),
            )
        )
        state.load_id = load_id
        state.cached_match = None
        block_tokens = planner.groups[0].block_tokens
        self._active[load_id] = ActiveLoad(
            load_id,
            state,
            first_chunk=first,
            chunk_tokens=tuple(part.blocks * block_tokens for part in parts),
            source_tiers=promotion.tiers if promotion is not None else (),
            ranks_unreported=planner.ranks,
            ranks_copying=planner.ranks,
            keys_loaded=len(parts),
            epoch=session.epoch,
            expires_at=now + timeout + REPORT_GRACE_SECONDS,
        )
        self.counts.offered_tokens += tokens
        message = Load(
            load=load_id,
            promotion=promotion.promotion_id if promotion is not None else 0,
            keys=state.wire_keys(first, len(parts)),
        )
        # The load does not depend on it: tierd is asked not to evict what is being copied.
        session.send(message)

    def _locations(
        self, state: RequestState, promotion: PendingPromotion | None, first: int, count: int
    ) -> list[int]:
        """Returns where the ``count`` keys from chunk ``first`` on are, up to the first one that is
        no longer in RAM."""
        if promotion is not None and promotion.first_chunk == first:
            promoted = promotion.locations[: promotion.usable_keys]
            return list(promoted[:count])
        locations: list[int] = []
        location = self._session.replica.location
        for key in state.keys(self._hashes_per_chunk)[first : first + count]:
            found = location(key)
            if not found:
                break
            locations.append(found)
        return locations

    def start_failing(self, state: RequestState, block_ids: Sequence[int]) -> None:
        """Queues a job that cannot succeed, after ``start`` raised: vLLM waits for a report."""
        if any(job.request_id == state.request_id for job in self._jobs):
            return
        first_block = state.computed_tokens // self._planner.groups[0].block_tokens
        run = BlockRun(0, 0, tuple(block_ids[first_block:]))
        self._jobs.append(
            LoadJob(next(self._ids), state.request_id, (run,), MIN_LOAD_TIMEOUT_SECONDS)
        )
        state.load_failed = True

    def take_jobs(self) -> tuple[list[LoadJob], list[int]]:
        """Returns the jobs and the cancelled load ids for the next step."""
        jobs, self._jobs = self._jobs, []
        cancelled, self._cancelled_loads = self._cancelled_loads, []
        return jobs, cancelled

    def take_pinned(self) -> tuple[int, ...]:
        """Returns the loads of which tierd has pinned every key since the last call."""
        pinned = []
        while self._session.pinned_loads:
            number, keys = self._session.pinned_loads.popleft()
            load = self._active.get(number)
            if load is not None and keys == len(load.chunk_tokens):
                pinned.append(number)
        return tuple(pinned)

    def on_load_done(self, result: LoadResult) -> None:
        """Takes one rank's report of a load, or of the end of its copies."""
        load = self._active.get(result.load)
        if load is None:
            self.counts.failures["unknown_report"] += 1
            return
        if result.follows:
            if result.reason:
                self.counts.failures["unpinned"] += 1
        else:
            load.ranks_unreported -= 1
            load.keys_loaded = min(load.keys_loaded, result.keys_loaded)
            load.seconds = max(load.seconds, result.seconds)
            load.failure = load.failure or result.reason
            if load.ranks_unreported == 0:
                self._on_reported(load)
        if result.copying:
            return
        load.ranks_copying -= 1
        load.copy_seconds = max(load.copy_seconds, result.copy_seconds)
        if load.ranks_copying > 0:
            return
        del self._active[result.load]
        if load.epoch == self._session.epoch:
            self._session.send(LoadReleased(load=result.load))
        if load.keys_loaded == len(load.chunk_tokens):
            self._copies.observe(sum(load.chunk_tokens), load.copy_seconds, self._clock())

    def _on_reported(self, load: ActiveLoad) -> None:
        """Every rank has reported, so vLLM resumes the request."""
        state = load.state
        if state.load_id == load.load_id:
            state.load_id = 0
        for index, tokens in enumerate(load.chunk_tokens[: load.keys_loaded]):
            tier = load.tier(index)
            self.counts.loaded_tokens[self._session.tier_name(tier)] += tokens
            self.loaded_tokens[tier] += tokens
        self.counts.load_seconds.append(load.seconds)
        if load.keys_loaded < len(load.chunk_tokens):
            loaded_end = load.first_chunk + load.keys_loaded
            state.load_failed = state.load_end is not None or load.keys_loaded < 2
            state.load_end = loaded_end - 1
            state.frontier.move_back(loaded_end)
            self.counts.failures[load.failure.split(":")[0] or "partial"] += 1

    def on_request_finished(self, state: RequestState) -> None:
        """The request finished or was aborted."""
        self.cancel_promotion(state)
        if state.load_id:
            self._cancelled_loads.append(state.load_id)

    def on_session_lost(self) -> None:
        """Handles the loss of tierd: ends all promotions. The workers end the loads in flight."""
        pending, self._pending = self._pending, {}
        for state in pending.values():
            state.pending_promotion = None
            self.counts.promotions["lost"] += 1

    def reset(self) -> None:
        """Cancels every pending promotion."""
        for state in list(self._pending.values()):
            self.cancel_promotion(state)

    def token_sources(self, state: RequestState) -> dict[int, int]:
        """Returns the tokens of a request's load in flight, by the tier where they were found."""
        load = self._active.get(state.load_id)
        sources: Counter[int] = Counter()
        if load is not None:
            for index, tokens in enumerate(load.chunk_tokens):
                sources[load.tier(index)] += tokens
        return dict(sources)

    def has_pending_work(self) -> bool:
        """Returns whether an engine without requests should keep stepping, so that loads end."""
        now = self._clock()
        return bool(self._jobs or self._cancelled_loads) or any(
            now < load.expires_at for load in self._active.values()
        )

    @property
    def in_flight(self) -> int:
        """Loads that some rank has not reported."""
        return len(self._active)
