"""Reservations: how an engine's chunks become objects in RAM.

A reservation is (engine, number) and exclusive per key while it is open. It ends when every writer rank of that engine
has said that it is through with the slot, whatever else happens: with a commit if all delivered and nobody else has the
key, else the slot just becomes free.

Loads: announcing to workers where keys lie, and keeping the slots until every worker is through.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvtier.store.allocator import SlotAllocator
from kvtier.store.context import StoreContext
from kvtier.store.memory_tier import ResidentObjects
from kvtier.store.operations import EngineState, LoadRecord, Reservation
from kvtier.store.presence import PresenceIndex
from kvtier.store.promotion import Promotions
from kvtier.store.recovery import RecoveredObjects
from kvtier.store.secondary_tier import SecondaryTiers
from kvtier.store.slot_pool import SlotPool
from kvtier.store.state import Entry, Slot, SlotState
from kvtier.store.types import MEMORY_BIT, LoadAnnounced

MAX_EARLY = 4_096
"""Answers of workers that came before the scheduler's reservation (two senders, no order between them)."""


class Reservations:
    """Open reservations. Owner's thread only. ``on_commit`` gets every new object; ``on_seen`` those that were stored
    again."""

    def __init__(
        self,
        shared: StoreContext,
        pool: SlotPool,
        table: ResidentObjects,
        index: PresenceIndex,
        supply: SlotAllocator,
        kept: RecoveredObjects,
    ) -> None:
        self.on_commit: Callable[[Entry], None] | None = None
        self.on_seen: Callable[[Entry], None] | None = None
        self._shared = shared
        self._pool = pool
        self._table = table
        self._index = index
        self._supply = supply
        self._kept = kept
        self._pending: dict[tuple[str, bytes], Reservation] = {}
        self._early: OrderedDict[tuple[str, int], dict[int, bool]] = OrderedDict()

    def reserve(
        self, engine: EngineState, number: int, group: int, block_hash: bytes, offset: int
    ) -> None:
        """One chunk will be delivered into one of the engine's granted slots."""
        key = engine.key(group, block_hash)
        if key is None:
            self._shared.violation("unknown_group")
            return
        if number in engine.reservations:
            self._shared.violation("reservation_twice")
            return
        slot = engine.granted[group].pop(offset, None)
        if slot is None:
            self._shared.violation("slot_not_granted")
            return
        reservation = Reservation(
            number, engine, group, key, slot, self._doomed(engine.namespace, key)
        )
        engine.reservations[number] = reservation
        self._pool.move(slot, SlotState.RESERVED, engine.name)
        if not reservation.doomed:
            self._pending[engine.namespace, key] = reservation
        if self._early:
            for rank, delivered in self._early.pop((engine.name, number), {}).items():
                self.answer(engine, rank, number, delivered)

    def _doomed(self, namespace: str, key: bytes) -> bool:
        entry = self._table.get(namespace, key)
        if entry is not None:
            if entry.leaving:
                self._supply.rescue(entry)
            if entry.kept is not None and self._kept.replace(entry):
                # What an engine is about to deliver needs no proof.
                entry = None
        if entry is not None:
            self._table.hit(entry)
            if self.on_seen is not None:
                self.on_seen(entry)
            self._shared.count("stores_cancelled", "", "present")
            return True
        if (namespace, key) in self._pending:
            self._shared.count("stores_cancelled", "", "pending")
            return True
        return False

    def answer(self, engine: EngineState, rank: int, number: int, delivered: bool) -> None:
        """A rank is through with a reservation's slot: its shard is there, or it is not."""
        if rank not in engine.info.writer_ranks:
            self._shared.violation("not_a_writer")
            return
        reservation = engine.reservations.get(number)
        if reservation is None:
            self._keep_early(engine, rank, number, delivered)
            return
        if rank in reservation.answered:
            self._shared.violation("answered_twice")
            return
        reservation.answered.add(rank)
        if not delivered and not reservation.doomed:
            self._doom(reservation, "aborted")
        if len(reservation.answered) == len(engine.info.writer_ranks):
            del engine.reservations[number]
            self._finish(engine, reservation)

    def _keep_early(self, engine: EngineState, rank: int, number: int, delivered: bool) -> None:
        answers = self._early.setdefault((engine.name, number), {})
        if rank in answers:
            self._shared.violation("answered_twice")
            return
        answers[rank] = delivered
        if len(self._early) > MAX_EARLY:
            self._early.popitem(last=False)
            self._shared.count("early_answers_dropped")

    def _doom(self, reservation: Reservation, reason: str) -> None:
        reservation.doomed = True
        # Free for others at once: the next reservation of this key has a slot of its own.
        del self._pending[reservation.namespace, reservation.key]
        self._shared.count("stores_cancelled", "", reason)

    def _finish(self, engine: EngineState, reservation: Reservation) -> None:
        slot = reservation.slot
        if not reservation.doomed:
            del self._pending[reservation.namespace, reservation.key]
            if self._table.get(reservation.namespace, reservation.key) is None:
                self._commit(engine, reservation)
                return
            self._shared.count("stores_cancelled", "", "read_meanwhile")
        self._pool.release(slot)

    def _commit(self, engine: EngineState, reservation: Reservation) -> None:
        slot, namespace, key = reservation.slot, reservation.namespace, reservation.key
        shards = engine.info.shard_bytes[reservation.group]
        self._pool.move(slot, SlotState.COMMITTED)
        entry = Entry(namespace, key, slot, shards, reservation.persistent)
        self._table.add(entry)
        self._shared.count("stores_committed")
        self._index.change(namespace, key, MEMORY_BIT, True)
        if self.on_commit is not None:
            self.on_commit(entry)

    def doom_all(self, engine: EngineState) -> None:
        """None of the engine's open reservations will be committed (its weights changed)."""
        for reservation in engine.reservations.values():
            if not reservation.doomed:
                self._doom(reservation, "reset")

    def close(self, engine: EngineState) -> list[Slot]:
        """Forgets the engine's reservations; returns their slots, which its workers may still be writing."""
        for reservation in engine.reservations.values():
            if not reservation.doomed:
                self._doom(reservation, "engine_closed")
        slots = [reservation.slot for reservation in engine.reservations.values()]
        engine.reservations.clear()
        for answered in [key for key in self._early if key[0] == engine.name]:
            del self._early[answered]
        return slots


MAX_LOADS = 4_096
"""Per engine. Each request has one load at a time."""


class StoreLoads:
    """Announced loads. Owner's thread only. ``on_hit`` gets every object that is loaded."""

    def __init__(
        self,
        shared: StoreContext,
        table: ResidentObjects,
        index: PresenceIndex,
        lowers: SecondaryTiers,
        promotions: Promotions,
        supply: SlotAllocator,
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
            shared.count("loads_rejected", "", "too_many")
            shared.emit(LoadAnnounced(engine.name, number, tuple(ranks), (), ()))
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
        engine.loads[number] = LoadRecord(entries, set(ranks))
        shared.count("loads")
        tiers = tuple(sources.get(entry.key, 0) for entry in entries)
        shared.emit(
            LoadAnnounced(
                engine.name,
                number,
                tuple(ranks),
                tuple(entry.slot.offset for entry in entries),
                tiers,
            )
        )
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
