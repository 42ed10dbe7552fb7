"""Promotions: bringing the usable prefix of a request's keys into pinned slots, on the request's clock.

Each promotion ends exactly once: when everything it still hopes for has arrived or cannot come, when its clock is out,
or when it is cancelled. What arrived in one piece from the start stays pinned until a load or a cancellation names the
promotion, or ``LEASE_SECONDS`` later, so that a scheduler that forgot cannot keep slots for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvtier.store.contract import Outcome, PromotionEnded
from kvtier.store.engines import EngineState
from kvtier.store.lower import LowerTiers
from kvtier.store.memory import Entry, MemoryTable
from kvtier.store.reads import Read, Reads
from kvtier.store.selection import choose
from kvtier.store.shared import Shared
from kvtier.store.supply import Supply
from kvtier.store.timers import Timer
from kvtier.topology.models import Selection

LEASE_SECONDS = 60.0
MAX_PROMOTIONS = 1_024
"""Per engine, ended ones with a lease included. A scheduler lets 32 requests wait at a time."""
MAX_BUDGET_SECONDS = 600.0


class Promotion:
    """One promotion of one engine. ``entries[i]`` is pinned where not None; keys from ``limit`` on are given up;
    ``reads`` has what is still hoped for, by position."""

    __slots__ = (
        "_owner",
        "ended",
        "engine",
        "entries",
        "keys",
        "limit",
        "number",
        "reads",
        "started_at",
        "tiers",
        "timer",
    )

    def __init__(
        self, owner: Promotions, engine: EngineState, number: int, keys: list[bytes], entries: list[Entry | None]
    ) -> None:
        self._owner = owner
        self.engine = engine
        self.number = number
        self.keys = keys
        self.entries = entries
        self.tiers = [0] * len(entries)
        self.limit = len(entries)
        self.reads: dict[int, Read] = {}
        self.timer: Timer | None = None
        self.ended = False

    def arrived(self, position: int, entry: Entry, tier_index: int) -> None:
        """A read for this promotion has ended well."""
        self._owner.arrived(self, position, entry, tier_index)

    def lost(self, position: int, reason: str) -> None:
        """A read for this promotion has failed for good."""
        self._owner.lost(self, position, reason)


class Promotions:
    """All promotions. Owner's thread only."""

    def __init__(
        self, shared: Shared, table: MemoryTable, lowers: LowerTiers, reads: Reads, supply: Supply, selection: Selection
    ) -> None:
        self.selection = selection
        self.memory_weight = 100
        self._shared = shared
        self._table = table
        self._lowers = lowers
        self._reads = reads
        self._supply = supply

    def begin(self, engine: EngineState, number: int, keys: Sequence[tuple[int, bytes]], budget_seconds: float) -> None:
        """Starts a promotion; it may end before this returns."""
        shared = self._shared
        if number in engine.promotions:
            shared.violation("promotion_twice")
            return
        budget = min(budget_seconds, MAX_BUDGET_SECONDS) if budget_seconds > 0 else 0.0
        promotion, sources = self._plan(engine, number, keys, budget > 0)
        promotion.keys += [b""] * (len(keys) - len(promotion.keys))
        engine.promotions[number] = promotion
        shared.count("promotions")
        for position, source in enumerate(sources):
            if source and not self._want(promotion, position, keys[position][0]):
                self._give_up(promotion, position)
                promotion.limit = position
                break
        if promotion.reads:
            promotion.timer = shared.timers.at(shared.clock() + budget, partial(self._out_of_time, promotion))
        else:
            self._end(promotion, False)

    def _plan(
        self, engine: EngineState, number: int, keys: Sequence[tuple[int, bytes]], may_read: bool
    ) -> tuple[Promotion, list[int]]:
        """Finds where each key of the longest prefix would come from, and pins those in RAM; then cuts to what is worth
        it."""
        sources: list[int] = []
        names: list[bytes] = []
        entries: list[Entry | None] = []
        needed: dict[int, int] = {}
        stopped = ""
        if len(engine.promotions) >= MAX_PROMOTIONS:
            keys, stopped = (), "too_many_promotions"
        for group, block_hash in keys:
            key = engine.key(group, block_hash)
            if key is None:
                self._shared.violation("unknown_group")
                break
            entry = self._table.get(engine.namespace, key)
            if entry is not None:
                if entry.leaving:
                    self._supply.rescue(entry)
                self._table.pin(entry)
                source = 0
            else:
                found = self._source(engine, group, key, needed) if may_read else "no_time"
                if isinstance(found, str):
                    stopped = found
                    break
                source = found
            sources.append(source)
            names.append(key)
            entries.append(entry)
        if stopped:
            self._shared.count("promotions_cut", "", stopped)
        if sources:
            weights = [self.memory_weight] + [lower.settings.load_weight for lower in self._lowers.all]
            decision = choose(self.selection, sources, weights, [1] * len(sources))
            length = decision.chosen.keys if decision.chosen is not None else 0
            self._shared.count("selections", "", decision.reason)
            if length < len(sources):
                self._shared.count("promotions_cut", "", "selection")
                for entry in entries[length:]:
                    if entry is not None:
                        self._table.unpin(entry)
                del sources[length:], names[length:], entries[length:]
        return Promotion(self, engine, number, names, entries), sources

    def _source(self, engine: EngineState, group: int, key: bytes, needed: dict[int, int]) -> int | str:
        """Index of the tier that would bring a key that is not in RAM, or why none can."""
        if self._shared.fenced:
            return "fenced"
        if not engine.persistent:
            return "absent"
        read = self._reads.get(engine.namespace, key)
        if read is not None:
            return read.lower.index if self._reads.joinable(read, self._shared.clock()) else "read_past_its_estimate"
        lower = self._lowers.best_for(engine.namespace, key)
        if lower is None:
            return "absent"
        kind = engine.kinds[group]
        count = needed.get(kind.slot_bytes, 0) + 1
        if count > self._supply.spare(kind):
            return "no_slot"
        needed[kind.slot_bytes] = count
        return lower.index

    def _want(self, promotion: Promotion, position: int, group: int) -> bool:
        engine, key = promotion.engine, promotion.keys[position]
        read = self._reads.get(engine.namespace, key)
        if read is None:
            lower = self._lowers.best_for(engine.namespace, key)
            if lower is None:
                return False
            info = engine.info
            read = self._reads.add(
                engine.namespace, key, engine.kinds[group], info.shard_bytes[group], info.slot_bytes[group], lower
            )
        promotion.tiers[position] = read.lower.index
        promotion.reads[position] = read
        self._reads.wait(read, promotion, position)
        return True

    def arrived(self, promotion: Promotion, position: int, entry: Entry, tier_index: int) -> None:
        """A key is there."""
        if promotion.reads.pop(position, None) is None:
            return
        self._table.pin(entry)
        promotion.entries[position] = entry
        promotion.tiers[position] = tier_index
        if not promotion.reads:
            self._end(promotion, False)

    def lost(self, promotion: Promotion, position: int, reason: str) -> None:
        """A key cannot come: what follows it is of no use."""
        if promotion.reads.pop(position, None) is None:
            return
        self._shared.count("promotions_cut", "", reason)
        promotion.limit = min(promotion.limit, position)
        self._give_up(promotion, promotion.limit)
        if not promotion.reads:
            self._end(promotion, False)

    def _give_up(self, promotion: Promotion, start: int) -> None:
        """Lets go of everything from position ``start`` on. Later keys first, so that earlier ones are evicted
        later."""
        for position in [p for p in promotion.reads if p >= start]:
            self._reads.leave(promotion.reads.pop(position), promotion, position)
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
            outcome = Outcome.CANCELLED
        elif usable == len(promotion.keys) and usable:
            outcome = Outcome.WHOLE
        else:
            outcome = Outcome.PARTIAL if usable else Outcome.FAILED
        engine, number = promotion.engine, promotion.number
        self._shared.count("promotions_ended", "", outcome.value)
        self._shared.emit(PromotionEnded(engine.name, number, outcome, usable, tuple(promotion.tiers[:usable])))
        if usable:
            expire = partial(self._lease_ended, promotion)
            promotion.timer = self._shared.timers.at(self._shared.clock() + LEASE_SECONDS, expire)
        else:
            del engine.promotions[number]

    def _lease_ended(self, promotion: Promotion) -> None:
        promotion.timer = None
        self._shared.count("promotions_forgotten")
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
