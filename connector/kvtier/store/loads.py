"""Loads: announcing to workers where keys lie, and keeping the slots until every worker is through."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.store.contract import LoadReady
from kvtier.store.engines import EngineState
from kvtier.store.lower import LowerTiers
from kvtier.store.memory import Entry, MemoryTable
from kvtier.store.presence import PresenceIndex
from kvtier.store.promotion import Promotions
from kvtier.store.shared import Shared
from kvtier.store.supply import Supply

MAX_LOADS = 4_096
"""Per engine. Each request has one load at a time."""


class Load:
    """One announced load: its pinned entries, and the ranks that may be reading them."""

    __slots__ = ("entries", "ranks")

    def __init__(self, entries: list[Entry], ranks: set[int]) -> None:
        self.entries = entries
        self.ranks = ranks


class Loads:
    """Announced loads. Owner's thread only. ``on_hit`` gets every object that is loaded."""

    def __init__(
        self,
        shared: Shared,
        table: MemoryTable,
        index: PresenceIndex,
        lowers: LowerTiers,
        promotions: Promotions,
        supply: Supply,
    ) -> None:
        self.on_hit: Callable[[Entry], None] | None = None
        self._shared = shared
        self._table = table
        self._index = index
        self._lowers = lowers
        self._promotions = promotions
        self._supply = supply

    def begin(
        self,
        engine: EngineState,
        number: int,
        promotion_number: int,
        keys: Sequence[tuple[int, bytes]],
        ranks: Sequence[int],
    ) -> None:
        """Pins the prefix of ``keys`` that is in RAM and announces its slots."""
        shared = self._shared
        if number in engine.loads or not ranks:
            shared.violation("load_twice" if ranks else "load_without_ranks")
            return
        if len(engine.loads) >= MAX_LOADS:
            shared.count("loads_refused", "", "too_many")
            shared.emit(LoadReady(engine.name, number, tuple(ranks), (), ()))
            return
        entries: list[Entry] = []
        for group, block_hash in keys:
            key = engine.key(group, block_hash)
            entry = self._table.get(engine.namespace, key) if key is not None else None
            if entry is None:
                shared.count("loads_cut", "", "gone" if key is not None else "unknown_group")
                break
            if entry.kept is not None:
                shared.count("loads_cut", "", "unverified")
                break
            if entry.leaving:
                self._supply.rescue(entry)
            self._table.pin(entry)
            self._table.hit(entry)
            entries.append(entry)
        promotion = engine.promotions.get(promotion_number)
        sources: dict[bytes, int] = {}
        if promotion is not None:
            sources = dict(zip(promotion.keys, promotion.tiers, strict=False))
            self._promotions.release(promotion)
        elif promotion_number:
            shared.count("loads_without_promotion")
        engine.loads[number] = Load(entries, set(ranks))
        shared.count("loads")
        tiers = tuple(sources.get(entry.key, 0) for entry in entries)
        shared.emit(LoadReady(engine.name, number, tuple(ranks), tuple(entry.slot.offset for entry in entries), tiers))
        self._note_hits(engine, entries)

    def _note_hits(self, engine: EngineState, entries: list[Entry]) -> None:
        for entry in entries:
            if engine.persistent:
                bits = self._index.bits(entry.namespace, entry.key)
                for lower in self._lowers.all:
                    if bits & lower.bit and lower.usable:
                        lower.tier.touch(entry.ref)
            if self.on_hit is not None:
                self.on_hit(entry)

    def loaded(self, engine: EngineState, rank: int, number: int) -> None:
        """No copy of this load runs on this rank any more."""
        load = engine.loads.get(number)
        if load is None or rank not in load.ranks:
            self._shared.violation("loaded_unknown" if load is None else "loaded_twice")
            return
        load.ranks.remove(rank)
        if not load.ranks:
            del engine.loads[number]
            # Last key first: what comes later in a prefix is of no use without what comes before, and shall go before
            # it.
            for entry in reversed(load.entries):
                self._table.unpin(entry)

    def close(self, engine: EngineState) -> list[Entry]:
        """Forgets the engine's loads; returns what they pinned, once per pin."""
        entries = [entry for load in engine.loads.values() for entry in load.entries]
        engine.loads.clear()
        return entries
