"""Loads on the scheduler side of ATOM: what is loaded, and when a sequence is parked.

ATOM asks twice. Before it allocates blocks it asks whether the sequence may need a load, when the
hit of its own prefix cache is not known yet. After the allocation ``after_allocation`` decides:

* All that can be loaded is in RAM, and the local hit ends at a chunk boundary: park, and load.
* The local hit ends inside a chunk: compute up to the next boundary, then park and load.
* The rest needs a secondary tier: request a promotion of the prompt's end, compute its beginning
  in the meantime, and park once the promotion has ended and a boundary is reached. A sequence is
  never parked while a promotion is pending, so a slow tier cannot delay it.

Loading is not worthwhile below the minimum, and impossible once tokens were sampled: when ATOM
resumes a parked sequence it computes up to the end of the prompt only.

One load per sequence at a time. The scheduler's thread only.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from kvtier.config.models import Selection
from kvtier.engines.atom.head_split import Tail, first_step, split
from kvtier.engines.atom.loads_in_flight import AtomLoadsInFlight
from kvtier.engines.atom.prefill_times import ReadTimes
from kvtier.engines.atom.sequence_state import (
    ABORTED,
    Handoff,
    SequenceState,
    TailPromotion,
)
from kvtier.engines.common.jobs import BlockRun
from kvtier.engines.common.tierd_session import TierdSession
from kvtier.planner import Planner
from kvtier.store.cost_model import Prefill
from kvtier.store.selection import LOSS_SHARE, choose_prefix
from kvtier.store.types import MEMORY_BIT, RAM_BITS
from kvtier.tierd.wire import Cancel, Promote, Promoted

logger = logging.getLogger(__name__)
MAX_PENDING_PROMOTIONS = 32
VERIFY_TIMEOUT_SECONDS = 5.0
PROMOTION_GRACE_SECONDS = 0.1
PINNED_SECONDS = 30.0
"""Promoted slots of a sequence that does not reach its boundary are released after this time."""


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """``min_load_tokens``: None for the live setting. ``step_tokens``: of one prefill step."""

    min_load_tokens: int | None
    step_tokens: int


@dataclass(frozen=True, slots=True)
class Available:
    """A run of chunks that can be loaded.

    ``sources[i]``: index of the tier of chunk ``first + i``, 0 for RAM. ``ram``: how many at the
    beginning are in RAM and verified.
    """

    first: int
    sources: list[int]
    ram: int


class AtomLoads:
    """All loads of one engine. Ids are unique for the life of the engine."""

    def __init__(
        self,
        planner: Planner,
        session: TierdSession,
        prefill: Callable[[], Prefill | None],
        clock: Callable[[], float],
        limits: LoadLimits,
    ) -> None:
        self.counts: Counter[str] = Counter()
        """Decisions and ends of loads, by name."""
        self.reads = ReadTimes(clock)
        self._planner = planner
        self._session = session
        self._prefill = prefill
        self._clock = clock
        self._limits = limits
        self._ids = count(1)
        self.in_flight = AtomLoadsInFlight(planner, session, partial(next, self._ids), self.counts)
        self._pending: dict[int, SequenceState] = {}

    # Decisions.

    @property
    def min_load_tokens(self) -> int:
        """Tokens below which nothing is loaded."""
        fixed = self._limits.min_load_tokens
        return max(1, self._session.live.min_load_tokens if fixed is None else fixed)

    def blocked(self, state: SequenceState) -> bool:
        """Returns whether nothing may be loaded for the sequence."""
        seq = state.seq
        return (
            bool(state.skip_reason)
            or state.load_failed
            or state.load is not None
            or not self._session.replica_ready
            or int(seq.num_tokens) > int(seq.num_prompt_tokens)
            or state.aborted
            or state.status == ABORTED
        )

    def may_hit(self, state: SequenceState) -> int:
        """Returns how many tokens of the prompt tiers hold, in whichever place.

        ATOM's own prefix cache is not known yet, and may cover a beginning that no tier has.
        """
        if self.blocked(state):
            return 0
        replica = self._session.replica
        end = self._planner.chunks(state.request.num_tokens)
        keys = state.keys(self._planner.hashes_per_chunk)[:end]
        return self._planner.tokens(sum(1 for key in keys if replica.get(key)))

    def after_allocation(self, state: SequenceState) -> bool:
        """Decides once blocks are allocated; returns whether the sequence is to be parked."""
        if self.blocked(state):
            return False
        computed = state.computed_tokens_now
        first = -(-computed // self._planner.chunk_tokens)
        found = self._available(state, first)
        total = self._planner.tokens(len(found.sources))
        if total < self.min_load_tokens:
            self.counts["too_small" if total else "nothing_to_load"] += 1
            return False
        aligned = computed == self._planner.tokens(first)
        if found.ram == len(found.sources):
            if aligned:
                return self._start(state, first, found.ram)
            self.counts["unaligned"] += 1
            state.handoff = Handoff(
                self._planner.tokens(first), self._planner.tokens(first + found.ram)
            )
            return False
        loads_ram = aligned and self._planner.tokens(found.ram) >= self.min_load_tokens
        begin = found.ram if loads_ram else 0
        self._promote_tail(
            state,
            Available(first + begin, found.sources[begin:], 0),
            self._planner.tokens(first + begin) if loads_ram else computed,
        )
        return loads_ram and self._start(state, first, found.ram)

    def _available(self, state: SequenceState, first: int) -> Available:
        session, planner = self._session, self._planner
        get = session.replica.get
        end = planner.chunks(state.request.num_tokens)
        sources: list[int] = []
        ram = 0
        for key in state.keys(planner.hashes_per_chunk)[first:end]:
            bits = get(key)
            if not bits:
                break
            if bits & MEMORY_BIT and ram == len(sources):
                ram += 1
            sources.append(0 if bits & RAM_BITS else (bits & -bits).bit_length() - 1)
        if ram == len(sources):
            return Available(first, sources, ram)
        weights = [session.tier(tier).load_weight for tier in range(max(sources) + 1)]
        tokens = [planner.chunk_tokens] * len(sources)
        chosen = choose_prefix(session.live.selection, sources, weights, tokens).chosen
        keys = chosen.keys if chosen is not None else 0
        return Available(first, sources[:keys], min(ram, keys))

    def _promote_tail(self, state: SequenceState, found: Available, computed: int) -> None:
        """Requests the chunks of ``found`` that are worth it, after the head that is computed."""
        if state.tail_tried:
            return
        state.tail_tried = True
        if len(self._pending) >= MAX_PENDING_PROMOTIONS:
            self.counts["too_many_promotions"] += 1
            return
        skipped = self._head_chunks(found, computed)
        keys = len(found.sources) - (skipped or 0)
        if skipped is None or self._planner.tokens(keys) < self.min_load_tokens:
            self.counts["tail_not_worth_it"] += 1
            return
        first, now = found.first + skipped, self._clock()
        end = self._planner.tokens(first + keys)
        budget = self._budget_seconds(found.sources[skipped:], computed, end)
        number = next(self._ids)
        message = self._promote_message(number, state, (first, keys), budget, computed)
        if not self._session.send(message):
            return
        promotion = TailPromotion(
            number,
            first,
            keys,
            self._session.epoch,
            now,
            now + budget + PROMOTION_GRACE_SECONDS,
            tuple(found.sources[skipped:]),
        )
        state.handoff = Handoff(self._planner.tokens(first), end, promotion)
        self._pending[number] = state
        self.counts["tails_requested"] += 1

    def _head_chunks(self, found: Available, computed: int) -> int | None:
        prefill = self._prefill()
        seconds: list[float] = []
        for tier in found.sources:
            known = self.reads.seconds(tier) if tier else 0.0
            if known is None:
                break
            seconds.append(known)
        if prefill is None or len(seconds) < len(found.sources):
            # Nothing is measured yet. Computing goes on in any case, so trying costs nothing.
            return len(found.sources) // 2
        tail = Tail(computed, found.first, self._planner.chunk_tokens, seconds)
        return split(tail, prefill)

    def _budget_seconds(self, sources: Sequence[int], computed: int, end: int) -> float:
        budget: float = max(
            (self._session.tier(tier).load_timeout_seconds for tier in set(sources) if tier),
            default=VERIFY_TIMEOUT_SECONDS,
        )
        prefill = self._prefill()
        if prefill is not None and self._session.live.selection is Selection.COST:
            budget = min(budget, (1 + LOSS_SHARE) * prefill.seconds(computed, end))
        return budget

    def _promote_message(
        self,
        number: int,
        state: SequenceState,
        chunks: tuple[int, int],
        budget_seconds: float,
        computed: int,
    ) -> Promote:
        """Under selection ``Cost`` tierd compares with computing everything from ``computed`` on.

        The head is computed while the tail is read, so it is part of what waiting would cost.
        """
        first, keys = chunks
        wire = state.wire_keys(first, keys)
        if self._session.live.selection is not Selection.COST:
            return Promote(
                promotion=number,
                keys=wire,
                budget_seconds=budget_seconds,
                owner=self._session.owner(state),
            )
        prefill = self._prefill() or Prefill(0.0, 0.0)
        ends = tuple(self._planner.tokens(chunk + 1) for chunk in range(first, first + keys))
        return Promote(
            promotion=number,
            keys=wire,
            budget_seconds=budget_seconds,
            start_tokens=computed,
            ends=ends,
            alpha=prefill.alpha,
            beta=prefill.beta,
            owner=self._session.owner(state),
        )

    # Hand-over from computing to loading.

    def adjust_chunk(self, state: SequenceState, chunk: int) -> int:
        """Returns how many of the ``chunk`` tokens of the first step to compute.

        The step, or a later one of the same sequence, then ends at the boundary of its hand-off.
        """
        handoff = state.handoff
        computed = state.computed_tokens_now
        if handoff is None or handoff.boundary <= computed:
            return chunk
        step = self._limits.step_tokens // self._planner.chunk_tokens * self._planner.chunk_tokens
        wanted = first_step(computed, handoff.boundary, step) if step else chunk
        if wanted > chunk:
            # The step has less room than usual; keep to the chunk grid if that is possible.
            aligned = (computed + chunk) // self._planner.chunk_tokens * self._planner.chunk_tokens
            wanted = aligned - computed if aligned > computed else chunk
        return max(1, min(chunk, wanted))

    def should_park(self, state: SequenceState) -> bool:
        """Returns whether a running prefill is to be parked now, and starts its load."""
        handoff = state.handoff
        if handoff is None:
            return False
        computed = state.computed_tokens_now
        if self.blocked(state) or computed >= handoff.end or not state.seq.block_table:
            self.drop_handoff(state, "passed")
            return False
        if computed < handoff.boundary or computed % self._planner.chunk_tokens:
            return False
        first = self._planner.chunks(computed)
        end = self._planner.chunks(handoff.end)
        promotion = handoff.promotion
        if promotion is not None:
            if not self._promotion_ended(state, promotion):
                return False
            end = min(end, promotion.first_chunk + (promotion.usable_keys or 0))
        else:
            end = first + min(end - first, self._available(state, first).ram)
        if self._planner.tokens(end - first) < self.min_load_tokens:
            self.drop_handoff(state, "too_small_at_handoff")
            return False
        return self._start(state, first, end - first)

    def _promotion_ended(self, state: SequenceState, promotion: TailPromotion) -> bool:
        now = self._clock()
        if promotion.epoch != self._session.epoch:
            self.drop_handoff(state, "lost")
            return False
        if promotion.usable_keys is None:
            if now > promotion.deadline:
                self.drop_handoff(state, "out_of_time")
            return False
        if now - promotion.ended_at > PINNED_SECONDS:
            self.drop_handoff(state, "pinned_too_long")
            return False
        return True

    def drop_handoff(self, state: SequenceState, reason: str) -> None:
        """The sequence is computed as if no tier had anything; releases promoted slots."""
        handoff, state.handoff = state.handoff, None
        if handoff is None:
            return
        self.counts[reason] += 1
        if handoff.promotion is not None:
            self._pending.pop(handoff.promotion.promotion_id, None)
            if handoff.promotion.usable_keys is None and reason in ("passed", "out_of_time"):
                age = self._clock() - handoff.promotion.sent_at
                self.reads.observe(handoff.promotion.sources, age)
            self._session.send(Cancel(promotion=handoff.promotion.promotion_id))

    def on_promoted(self, message: Promoted) -> None:
        """tierd ended a promotion."""
        state = self._pending.pop(message.promotion, None)
        handoff = state.handoff if state is not None else None
        promotion = handoff.promotion if handoff is not None else None
        if promotion is None or promotion.promotion_id != message.promotion:
            return  # It was cancelled before; tierd has got the Cancel.
        self.counts[f"promotions_{message.outcome}"] += 1
        promotion.usable_keys = min(message.usable, promotion.keys)
        promotion.locations = message.locations
        promotion.ended_at = self._clock()
        if message.outcome == "whole":
            self.reads.observe(message.tiers, promotion.ended_at - promotion.sent_at)

    # Loads.

    def _start(self, state: SequenceState, first: int, chunks: int) -> bool:
        """Starts a load; returns False, and computing goes on, if tierd cannot be reached."""
        planner = self._planner
        handoff = state.handoff
        reached = handoff is not None and handoff.boundary <= planner.tokens(first)
        promotion = handoff.promotion if handoff is not None and reached else None
        locations = self._locations(state, promotion, first, chunks)
        chunks = len(locations)
        if planner.tokens(chunks) < self.min_load_tokens:
            self.drop_handoff(state, "gone")
            return False
        parts = planner.needed(planner.tokens(first), planner.tokens(first + chunks))
        table = state.seq.block_table
        if not parts or parts[-1].block + parts[-1].blocks > len(table):
            self.drop_handoff(state, "blocks_gone")
            return False
        runs = tuple(
            BlockRun(part.group, part.first, tuple(table[part.block : part.block + part.blocks]))
            for part in parts
        )
        promotion_id = promotion.promotion_id if promotion is not None else 0
        if not self.in_flight.start(state, first, runs, locations, promotion_id):
            self.drop_handoff(state, "lost")
            return False
        if reached:
            state.handoff = None
        return True

    def _locations(
        self, state: SequenceState, promotion: TailPromotion | None, first: int, count: int
    ) -> list[int]:
        """Returns where the chunks from ``first`` on are, up to the first one not in RAM."""
        if promotion is not None:
            skipped = first - promotion.first_chunk
            return list(promotion.locations[skipped : promotion.usable_keys])[:count]
        locations: list[int] = []
        location = self._session.replica.location
        for key in state.keys(self._planner.hashes_per_chunk)[first : first + count]:
            found = location(key)
            if not found:
                break
            locations.append(found)
        return locations

    def ended(self, operation: object, succeeded: bool) -> SequenceState | None:
        """Every rank has reported a load. Returns its sequence; None if it is unknown."""
        load = self.in_flight.ended(operation, succeeded)
        if load is None:
            return None
        if not succeeded:
            self.drop_handoff(load.state, "after_failure")
        return load.state

    def on_session_lost(self) -> None:
        """Ends all promotions. The workers end the loads in flight."""
        pending, self._pending = self._pending, {}
        for state in pending.values():
            self.drop_handoff(state, "lost")

    def forget(self, state: SequenceState) -> None:
        """The sequence ended, or lost its blocks: nothing of it is promoted from now on."""
        self.drop_handoff(state, "ended")
