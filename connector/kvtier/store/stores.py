"""Reservations: how an engine's chunks become objects in RAM.

A reservation is (engine, number) and exclusive per key while it is open. It ends when every writer rank of that engine
has said that it is through with the slot, whatever else happens: with a commit if all delivered and nobody else has the
key, else the slot just becomes free.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from kvtier.store.engines import EngineState
from kvtier.store.kept import Kept
from kvtier.store.memory import Entry, MemoryTable
from kvtier.store.presence import MEMORY_BIT, PresenceIndex
from kvtier.store.shared import Shared
from kvtier.store.slots import Slot, SlotPool, SlotState
from kvtier.store.supply import Supply

MAX_EARLY = 4_096
"""Answers of workers that came before the scheduler's reservation (two senders, no order between them)."""


class Reservation:
    """One open reservation. ``answered``: ranks that are through with the slot; ``doomed``: it will not be
    committed."""

    __slots__ = ("answered", "doomed", "group", "key", "namespace", "number", "persistent", "slot")

    def __init__(self, number: int, engine: EngineState, group: int, key: bytes, slot: Slot, doomed: bool) -> None:
        self.number = number
        self.namespace = engine.namespace
        self.persistent = engine.persistent
        self.group = group
        self.key = key
        self.slot = slot
        self.doomed = doomed
        self.answered: set[int] = set()


class Stores:
    """Open reservations. Owner's thread only. ``on_commit`` gets every new object; ``on_seen`` those that were stored
    again."""

    def __init__(
        self,
        shared: Shared,
        pool: SlotPool,
        table: MemoryTable,
        index: PresenceIndex,
        supply: Supply,
        kept: Kept,
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

    def reserve(self, engine: EngineState, number: int, group: int, block_hash: bytes, offset: int) -> None:
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
        reservation = Reservation(number, engine, group, key, slot, self._doomed(engine.namespace, key))
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
            self._shared.count("stores_doomed", "", "present")
            return True
        if (namespace, key) in self._pending:
            self._shared.count("stores_doomed", "", "pending")
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
        self._shared.count("stores_doomed", "", reason)

    def _finish(self, engine: EngineState, reservation: Reservation) -> None:
        slot = reservation.slot
        if not reservation.doomed:
            del self._pending[reservation.namespace, reservation.key]
            if self._table.get(reservation.namespace, reservation.key) is None:
                self._commit(engine, reservation)
                return
            self._shared.count("stores_doomed", "", "read_meanwhile")
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
