"""Promotions: bringing the usable prefix of a request's keys into pinned slots, on the request's clock.

Each promotion ends exactly once: when everything it still hopes for has arrived or cannot come, when its clock is out,
or when it is cancelled. The selection says which part of the prefix is worth it, and whether to read it in stages; what
arrives in order moves the clock (clock.py). What arrived in one piece from the start stays pinned until a load or a cancellation names the
promotion, or ``LEASE_SECONDS`` later, so that a scheduler that forgot cannot keep slots for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

from kvtier.store.allocator import SlotAllocator
from kvtier.store.context import StoreContext
from kvtier.store.cost_model import Batch, PrefixCost
from kvtier.store.memory_tier import ResidentObjects
from kvtier.store.operations import EngineState, ProbeRead, Promotion, Read
from kvtier.store.recovery import RecoveredObjects
from kvtier.store.secondary_tier import SecondaryTier, SecondaryTiers
from kvtier.store.selection import LoadPlanner, usable_shape
from kvtier.store.state import Entry
from kvtier.store.tier_reads import TierReads
from kvtier.store.types import PromotionEnded, PromotionOutcome

LEASE_SECONDS = 60.0
MAX_PROMOTIONS = 1_024
"""Per engine, ended ones with a lease included. A scheduler lets 32 requests wait at a time."""
MAX_BUDGET_SECONDS = 600.0


class Promotions:
    """All promotions. Owner's thread only."""

    def __init__(
        self,
        shared: StoreContext,
        table: ResidentObjects,
        lowers: SecondaryTiers,
        reads: TierReads,
        supply: SlotAllocator,
        decider: LoadPlanner,
        kept: RecoveredObjects,
    ) -> None:
        self._decider = decider
        self._shared = shared
        self._table = table
        self._lowers = lowers
        self._reads = reads
        self._supply = supply
        self._kept = kept

    def begin(
        self,
        engine: EngineState,
        number: int,
        keys: Sequence[tuple[int, bytes]],
        budget_seconds: float,
        shape: PrefixCost | None = None,
    ) -> None:
        """Starts a promotion; it may end before this returns."""
        shared = self._shared
        if number in engine.promotions:
            shared.violation("promotion_twice")
            return
        if shape is not None and not usable_shape(shape, len(keys)):
            shared.violation("prompt_shape")
            shape = None
        budget = min(budget_seconds, MAX_BUDGET_SECONDS) if budget_seconds > 0 else 0.0
        promotion = self._plan(engine, number, keys, budget, shape)
        promotion.keys += [b""] * (len(keys) - len(promotion.keys))
        engine.promotions[number] = promotion
        shared.count("promotions")
        self._verify(promotion)
        promotion.advance()
        self._read_on(promotion)
        self._end_or_wait(promotion)

    def _plan(
        self,
        engine: EngineState,
        number: int,
        keys: Sequence[tuple[int, bytes]],
        budget_seconds: float,
        shape: PrefixCost | None,
    ) -> Promotion:
        """Finds where each key of the longest prefix would come from, and pins those in RAM; then cuts to what is worth
        it."""
        sources: list[int] = []
        sizes: list[int] = []
        names: list[bytes] = []
        entries: list[Entry | None] = []
        room: dict[int, int] = {}
        unproven: set[int] = set()
        stopped = ""
        if len(engine.promotions) >= MAX_PROMOTIONS:
            keys, stopped = (), "too_many_promotions"
        for group, block_hash in keys:
            key = engine.key(group, block_hash)
            if key is None:
                self._shared.violation("unknown_group")
                break
            entry = self._table.get(engine.namespace, key)
            size = 0
            if entry is not None:
                if entry.kept is not None and budget_seconds <= 0:
                    stopped = "no_time"
                    break
                if entry.leaving:
                    self._supply.rescue(entry)
                source = 0
                if entry.kept is None:
                    self._table.pin(entry)
                else:
                    unproven.add(len(sources))
                    entry = None
            else:
                found = self._source(engine, group, key, room) if budget_seconds > 0 else "no_time"
                if isinstance(found, str):
                    stopped = found
                    break
                source = found
                # What is being read already brings nothing more to read.
                size = (
                    0 if self._reads.get(engine.namespace, key) else engine.info.slot_bytes[group]
                )
            sources.append(source)
            sizes.append(size)
            names.append(key)
            entries.append(entry)
        if stopped:
            self._shared.count("promotions_cut", "", stopped)
        groups = [group for group, _ in keys[: len(sources)]]
        waited = shape.waited_seconds if shape is not None else 0.0
        decision, clock = self._decider.decide(
            sources, sizes, shape, budget_seconds + waited, unproven
        )
        chosen = decision.chosen
        length = chosen.keys if chosen is not None else 0
        for tier in decision.too_slow:
            self._try(engine, self._lowers.all[tier - 1], names, groups, sources)
        if length < len(sources):
            self._shared.count("promotions_cut", "", "selection")
            for entry in entries[length:]:
                if entry is not None:
                    self._table.unpin(entry)
            del sources[length:], names[length:], entries[length:]
        promotion = Promotion(self, engine, number, names, entries)
        promotion.groups, promotion.sources = groups, sources
        for position, source in enumerate(sources):
            if source:
                promotion.ahead.setdefault(source, deque()).append(position)
        if chosen is not None and chosen.parallel:
            promotion.parallel = chosen.parallel
        promotion.clock, promotion.ends = clock, shape.ends if shape is not None else ()
        promotion.started_at = self._shared.clock() - waited
        return promotion

    def _verify(self, promotion: Promotion) -> None:
        """Has verified what the last tierd left in RAM."""
        engine = promotion.engine
        for position, source in enumerate(promotion.sources):
            if source or promotion.entries[position] is not None:
                continue
            group, key = promotion.groups[position], promotion.keys[position]
            entry = self._table.get(engine.namespace, key)
            kind, shards = engine.kinds[group], engine.info.shard_bytes[group]
            if entry is None or not self._kept.want(entry, kind, shards, promotion, position):
                promotion.limit = position
                self._give_up(promotion, position)
                return
            promotion.checks.add(position)

    def _try(
        self,
        engine: EngineState,
        lower: SecondaryTier,
        names: list[bytes],
        groups: list[int],
        sources: list[int],
    ) -> None:
        """Measures a tier that was judged too slow: one round of what it would have been read, for nobody."""
        if not self._decider.trial_due(lower):
            return
        self._shared.count("tier_probe_reads", lower.name)
        trial, batch = ProbeRead(), lower.model.begin(self._shared.clock())
        positions = [position for position, source in enumerate(sources) if source == lower.index]
        for position in positions[: lower.read_threads]:
            group, key = groups[position], names[position]
            if self._supply.spare(engine.kinds[group]) <= lower.read_threads:
                return  # Slots are scarce: a measurement is not worth what it would evict.
            if self._reads.get(engine.namespace, key) is None:
                self._reads.wait(self._read(engine, key, group, lower, batch), trial, position)

    def _read_on(self, promotion: Promotion) -> None:
        """Begins as many reads as may be under way."""
        under_way: dict[int, int] = {}
        for position in promotion.reads:
            source = promotion.sources[position]
            under_way[source] = under_way.get(source, 0) + 1
        for source, ahead in promotion.ahead.items():
            running = under_way.get(source, 0)
            while ahead and running < promotion.parallel:
                position = ahead.popleft()
                if position >= promotion.limit:
                    ahead.clear()
                elif self._want(promotion, position):
                    running += position in promotion.reads
                else:
                    promotion.limit = position
                    self._give_up(promotion, position)
        promotion.advance()

    def _end_or_wait(self, promotion: Promotion) -> None:
        """Ends a promotion that has nothing to wait for, and sets the others' clocks."""
        if promotion.ended:
            return
        if not promotion.reads and not promotion.checks:
            self._end(promotion, False)
            return
        deadline = promotion.deadline()
        timer = promotion.timer
        if timer is None or timer.when < deadline:
            if timer is not None:
                timer.cancel()
            promotion.timer = self._shared.timers.at(
                deadline, partial(self._out_of_time, promotion)
            )

    def _source(
        self, engine: EngineState, group: int, key: bytes, room: dict[int, int]
    ) -> int | str:
        """Index of the tier that would bring a key that is not in RAM, or why none can. ``room``: by slot size, how many
        reads this promotion may still add."""
        if self._shared.fenced:
            return "fenced"
        if not engine.persistent:
            return "absent"
        read = self._reads.get(engine.namespace, key)
        if read is not None:
            return (
                read.lower.index
                if self._reads.joinable(read, self._shared.clock())
                else "read_past_its_estimate"
            )
        lower = self._lowers.best_for(engine.namespace, key)
        if lower is None:
            return "absent"
        kind = engine.kinds[group]
        if kind.slot_bytes not in room:
            room[kind.slot_bytes] = self._supply.spare(kind)
        if room[kind.slot_bytes] <= 0:
            return "no_slot"
        room[kind.slot_bytes] -= 1
        return lower.index

    def _want(self, promotion: Promotion, position: int) -> bool:
        """Has one key brought; False if nothing can bring it any more."""
        engine, key, group = promotion.engine, promotion.keys[position], promotion.groups[position]
        entry = self._table.get(engine.namespace, key)
        if entry is not None and entry.kept is None:
            # It has come otherwise since the promotion began.
            if entry.leaving:
                self._supply.rescue(entry)
            self._table.pin(entry)
            promotion.entries[position] = entry
            return True
        read = self._reads.get(engine.namespace, key)
        if read is None:
            lower = self._lowers.best_for(engine.namespace, key)
            if lower is None:
                return False
            batch = promotion.batches.get(lower.index)
            if batch is None:
                batch = lower.model.begin(self._shared.clock(), promotion.parallel)
                promotion.batches[lower.index] = batch
            read = self._read(engine, key, group, lower, batch)
        elif not self._reads.joinable(read, self._shared.clock()):
            # Somebody else's, which was in time when this promotion was planned.
            self._shared.count("promotions_cut", "", "read_past_its_estimate")
            return False
        promotion.tiers[position] = read.lower.index
        promotion.reads[position] = read
        self._reads.wait(read, promotion, position)
        return True

    def _read(
        self, engine: EngineState, key: bytes, group: int, lower: SecondaryTier, batch: Batch
    ) -> Read:
        info = engine.info
        shards, size = info.shard_bytes[group], info.slot_bytes[group]
        return self._reads.add(
            engine.namespace, key, engine.kinds[group], shards, size, lower, batch
        )

    def arrived(self, promotion: Promotion, position: int, entry: Entry, tier_index: int) -> None:
        """A key is there."""
        if promotion.reads.pop(position, None) is None and position not in promotion.checks:
            return
        promotion.checks.discard(position)
        self._table.pin(entry)
        promotion.entries[position] = entry
        promotion.tiers[position] = tier_index
        promotion.advance()
        self._read_on(promotion)
        self._end_or_wait(promotion)

    def lost(self, promotion: Promotion, position: int, reason: str) -> None:
        """A key cannot come: what follows it is of no use."""
        if promotion.reads.pop(position, None) is None and position not in promotion.checks:
            return
        if position in promotion.checks:
            promotion.checks.remove(position)
            if self._want(promotion, position):
                # A lower tier has it as well.
                promotion.advance()
                self._read_on(promotion)
                self._end_or_wait(promotion)
                return
        self._shared.count("promotions_cut", "", reason)
        promotion.limit = min(promotion.limit, position)
        self._give_up(promotion, promotion.limit)
        self._read_on(promotion)
        self._end_or_wait(promotion)

    def _give_up(self, promotion: Promotion, start: int) -> None:
        """Lets go of everything from position ``start`` on. Later keys first, so that earlier ones are evicted
        later."""
        for position in [p for p in promotion.reads if p >= start]:
            self._reads.leave(promotion.reads.pop(position), promotion, position)
        for position in [p for p in promotion.checks if p >= start]:
            promotion.checks.remove(position)
            self._kept.leave(
                promotion.engine.namespace, promotion.keys[position], promotion, position
            )
        for position in range(len(promotion.entries) - 1, start - 1, -1):
            entry = promotion.entries[position]
            if entry is not None:
                promotion.entries[position] = None
                self._table.unpin(entry)

    def _out_of_time(self, promotion: Promotion) -> None:
        promotion.timer = None
        self._shared.count("promotions_out_of_time")
        for read in list(promotion.reads.values()):
            self._reads.blame(read)
        if not promotion.ended:
            self._end(promotion, False)

    def _end(self, promotion: Promotion, cancelled: bool) -> None:
        promotion.ended = True
        if promotion.timer is not None:
            promotion.timer.cancel()
            promotion.timer = None
        usable = 0
        while not cancelled and usable < promotion.limit and promotion.entries[usable] is not None:
            usable += 1
        self._give_up(promotion, usable)
        if cancelled:
            outcome = PromotionOutcome.CANCELLED
        elif usable == len(promotion.keys) and usable:
            outcome = PromotionOutcome.WHOLE
        else:
            outcome = PromotionOutcome.PARTIAL if usable else PromotionOutcome.FAILED
        engine, number = promotion.engine, promotion.number
        self._shared.count("promotions_ended", "", outcome.value)
        self._shared.emit(
            PromotionEnded(engine.name, number, outcome, usable, tuple(promotion.tiers[:usable]))
        )
        if usable:
            expire = partial(self._lease_ended, promotion)
            promotion.timer = self._shared.timers.at(self._shared.clock() + LEASE_SECONDS, expire)
        else:
            del engine.promotions[number]

    def _lease_ended(self, promotion: Promotion) -> None:
        promotion.timer = None
        self._shared.count("promotion_leases_expired")
        self._drop(promotion)

    def _drop(self, promotion: Promotion) -> None:
        if promotion.timer is not None:
            promotion.timer.cancel()
            promotion.timer = None
        del promotion.engine.promotions[promotion.number]
        self._give_up(promotion, 0)

    def release(self, promotion: Promotion) -> None:
        """Its engine loads, cancels or closes: it ends now if it has not, and holds nothing any more."""
        if promotion.ended:
            self._drop(promotion)
        else:
            self._end(promotion, True)
