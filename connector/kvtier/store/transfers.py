"""Transfers between an engine's workers and the pool: reservations (stores) and loads.

A reservation is exclusive per key while it is open. It ends when every writer rank of its engine
has delivered or aborted: with a commit if all delivered and the key is not resident, else the slot
is free again.

A load pins the objects that it reads until the engine's scheduler has released it. Only the store's
thread uses this module.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

from kvtier.store.admission import SeenKeys
from kvtier.store.allocator import SlotAllocator
from kvtier.store.context import StoreContext
from kvtier.store.operations import EngineState, Reservation
from kvtier.store.presence import PresenceIndex
from kvtier.store.promotion import ObjectSources, Promotions
from kvtier.store.slot_pool import SlotPool
from kvtier.store.state import Entry, Slot, SlotState
from kvtier.store.types import NO_OWNER, ChunkId, LoadExtended, Owner, wider
from kvtier.store.write_through import Checksummer

MAX_EARLY = 4_096
"""Acknowledgements of workers that precede the scheduler's reservation. The two connections are not
ordered."""
MAX_LOADS = 4_096
"""Per engine. Each request has one load at a time."""


def _widen(entry: Entry, owner: Owner) -> bool:
    """A request uses the object: it may be stored in that request's tiers as well. Returns whether
    that is new."""
    before = entry.tiers
    entry.tiers = wider(before, owner.tiers)
    return entry.tiers != before


class Reservations:
    """Open reservations."""

    def __init__(
        self,
        context: StoreContext,
        pool: SlotPool,
        index: PresenceIndex,
        sources: ObjectSources,
        checksummer: Checksummer,
        allocator: SlotAllocator,
    ) -> None:
        self._context = context
        self._pool = pool
        self._resident = sources.resident
        self._accounts = sources.resident.accounts
        self._lifetimes = sources.lifetimes
        self._allocator = allocator
        self._index = index
        self._recovered = sources.recovered
        self._reads = sources.reads
        self._checksummer = checksummer
        self._open: dict[tuple[str, bytes], Reservation] = {}
        self._seen = SeenKeys()
        self._early: OrderedDict[tuple[str, int], dict[int, bool]] = OrderedDict()

    def reserve(
        self,
        engine: EngineState,
        number: int,
        chunk: ChunkId,
        offset: int,
        owner: Owner = NO_OWNER,
    ) -> None:
        """Reserves one of the engine's granted slots for a chunk. A chunk that is resident, already
        being stored, of no use because the one before it is in no tier, or for which its tenant has
        no room is cancelled: the ranks still acknowledge, and the slot is free afterwards."""
        group = chunk.group
        key = engine.key(group, chunk.block_hash)
        if key is None:
            self._context.violation("unknown_group")
            return
        if number in engine.reservations:
            self._context.violation("reservation_twice")
            return
        slot = engine.granted[group].pop(offset, None)
        if slot is None:
            self._context.violation("slot_not_granted")
            return
        reservation = Reservation(number, engine, group, key, slot)
        reservation.previous = engine.previous(group, chunk.previous)
        reservation.owner, reservation.tiers = owner, owner.tiers
        reservation.cancelled = self._is_superfluous(
            engine.namespace, key, reservation.previous, owner
        ) or not self._has_tenant_room(reservation)
        engine.reservations[number] = reservation
        self._pool.move(slot, SlotState.RESERVED, engine.name)
        if not reservation.cancelled:
            self._open[engine.namespace, key] = reservation
        if self._early:
            for rank, delivered in self._early.pop((engine.name, number), {}).items():
                self.acknowledge(engine, rank, number, delivered)

    def _has_tenant_room(self, reservation: Reservation) -> bool:
        """Makes room within the share of the object's tenant."""
        tenant = self._accounts.account_of(reservation.owner.tenant)
        if not tenant:
            return True
        size = reservation.slot.segment.kind.slot_bytes
        previous = reservation.namespace, reservation.previous
        if not self._allocator.make_tenant_room(tenant, size, previous):
            self._context.count("stores_cancelled", "", "tenant_quota")
            return False
        reservation.account = tenant
        self._accounts.add(tenant, size)
        return True

    def _return_tenant_bytes(self, reservation: Reservation) -> None:
        self._accounts.remove(reservation.account, reservation.slot.segment.kind.slot_bytes)

    def _is_superfluous(self, namespace: str, key: bytes, previous: bytes, owner: Owner) -> bool:
        entry = self._resident.get(namespace, key)
        if entry is not None:
            if entry.evicting:
                self._resident.cancel_eviction(entry)
            if entry.unverified is not None and self._recovered.replace(entry):
                # The engine's own object needs no verification.
                entry = None
        if entry is not None:
            self._resident.learn_previous(entry, previous)
            self._resident.hit(entry)
            self._lifetimes.stored_again(entry, owner)
            _widen(entry, owner)
            self._checksummer.persist(entry)
            self._context.count("stores_cancelled", "", "present")
            return True
        pending = self._open.get((namespace, key))
        if pending is not None:
            pending.tiers = wider(pending.tiers, owner.tiers)
            self._context.count("stores_cancelled", "", "pending")
            return True
        if previous and not self._is_reachable(namespace, previous):
            # All room belongs to the beginning of this prompt and to more recent ones. The object
            # would be of no use, and would evict some that are.
            self._context.count("stores_cancelled", "", "no_predecessor")
            return True
        return False

    def _is_reachable(self, namespace: str, key: bytes) -> bool:
        """Whether a tier holds the key, and keeps it, or an engine is storing it."""
        if (namespace, key) in self._open or self._index.in_secondary_tier((namespace, key)):
            return True
        entry = self._resident.get(namespace, key)
        return entry is not None and not entry.evicting

    def acknowledge(self, engine: EngineState, rank: int, number: int, delivered: bool) -> None:
        """A rank has delivered its shard, or aborted, and does not touch the slot after that."""
        reservation = engine.reservations.get(number)
        by_group = engine.info.writer_ranks
        writers = by_group[reservation.group] if reservation is not None else sum(by_group, ())
        if rank not in writers:
            self._context.violation("not_a_writer")
            return
        if reservation is None:
            self._hold_early(engine, rank, number, delivered)
            return
        if rank in reservation.acknowledged:
            self._context.violation("acknowledged_twice")
            return
        reservation.acknowledged.add(rank)
        if not delivered and not reservation.cancelled:
            self._cancel(reservation, "aborted")
        if len(reservation.acknowledged) == len(writers):
            del engine.reservations[number]
            self._finish(engine, reservation)

    def _hold_early(self, engine: EngineState, rank: int, number: int, delivered: bool) -> None:
        by_rank = self._early.setdefault((engine.name, number), {})
        if rank in by_rank:
            self._context.violation("acknowledged_twice")
            return
        by_rank[rank] = delivered
        if len(self._early) > MAX_EARLY:
            self._early.popitem(last=False)
            self._context.count("early_acks_dropped")

    def _cancel(self, reservation: Reservation, reason: str) -> None:
        reservation.cancelled = True
        # The key can be reserved again at once, in another slot.
        del self._open[reservation.namespace, reservation.key]
        self._return_tenant_bytes(reservation)
        self._context.count("stores_cancelled", "", reason)

    def _finish(self, engine: EngineState, reservation: Reservation) -> None:
        if not reservation.cancelled:
            del self._open[reservation.namespace, reservation.key]
            self._return_tenant_bytes(reservation)
            entry = self._resident.get(reservation.namespace, reservation.key)
            if entry is None:
                self._commit(engine, reservation)
                return
            if _widen(entry, Owner(tiers=reservation.tiers)):
                self._checksummer.persist(entry)
            self._context.count("stores_cancelled", "", "read_meanwhile")
        self._pool.release(reservation.slot)

    def _commit(self, engine: EngineState, reservation: Reservation) -> None:
        shards = engine.info.shard_bytes[reservation.group]
        entry = Entry(
            reservation.namespace, reservation.key, reservation.slot, shards, reservation.persistent
        )
        entry.previous = reservation.previous
        entry.tenant, entry.account = reservation.owner.tenant, reservation.account
        entry.tiers = reservation.tiers
        if entry.persistent and self._seen.note(entry.namespace, entry.key):
            # It occurs again, after it has left RAM.
            entry.uses = 2
        self._context.count("stores_committed")
        self._resident.commit(entry)
        self._lifetimes.stored(entry, reservation.owner)
        self._reads.deliver(entry)
        self._checksummer.persist(entry)

    def widen(self, namespace: str, key: bytes, owner: Owner) -> None:
        """A request uses an object that is being stored."""
        reservation = self._open.get((namespace, key))
        if reservation is not None:
            reservation.tiers = wider(reservation.tiers, owner.tiers)

    def cancel_all(self, engine: EngineState) -> None:
        """Cancels the engine's open reservations, because its weights have changed."""
        for reservation in engine.reservations.values():
            if not reservation.cancelled:
                self._cancel(reservation, "reset")

    def close(self, engine: EngineState) -> list[Slot]:
        """Forgets the engine's reservations; returns their slots, which its workers may still be
        writing."""
        for reservation in engine.reservations.values():
            if not reservation.cancelled:
                self._cancel(reservation, "engine_closed")
        slots = [reservation.slot for reservation in engine.reservations.values()]
        engine.reservations.clear()
        for early in [name for name in self._early if name[0] == engine.name]:
            del self._early[early]
        return slots


class StoreLoads:
    """Loads of the engines, as far as the store knows them."""

    def __init__(
        self,
        context: StoreContext,
        index: PresenceIndex,
        sources: ObjectSources,
        promotions: Promotions,
        reservations: Reservations,
        checksummer: Checksummer,
    ) -> None:
        self._context = context
        self._resident = sources.resident
        self._lifetimes = sources.lifetimes
        self._index = index
        self._tiers = sources.tiers
        self._promotions = promotions
        self._reservations = reservations
        self._checksummer = checksummer

    def begin(
        self,
        engine: EngineState,
        number: int,
        promotion_number: int,
        keys: Sequence[tuple[int, bytes]],
        owner: Owner = NO_OWNER,
    ) -> int:
        """Pins the prefix of ``keys`` that is in RAM; returns its length."""
        context, resident = self._context, self._resident
        if number in engine.loads:
            context.violation("load_twice")
            return 0
        promotion = engine.promotions.get(promotion_number)
        if len(engine.loads) >= MAX_LOADS:
            context.count("loads_rejected", "", "too_many")
            if promotion is not None:
                self._promotions.release(promotion)
            return 0
        entries: list[Entry] = []
        previous: dict[int, bytes] = {}
        for group, block_hash in keys:
            key = engine.key(group, block_hash)
            entry = resident.get(engine.namespace, key) if key is not None else None
            if entry is None:
                context.count("loads_cut", "", "gone" if key is not None else "unknown_group")
                break
            if entry.unverified is not None:
                context.count("loads_cut", "", "unverified")
                break
            if resident.is_expired(entry):
                context.count("loads_cut", "", "expired")
                break
            if entry.evicting:
                resident.cancel_eviction(entry)
            if owner.keeps:
                self._lifetimes.used(entry, owner)
            _widen(entry, owner)
            resident.learn_previous(entry, previous.get(group, b""))
            previous[group] = entry.key
            resident.pin(entry)
            resident.hit(entry)
            entries.append(entry)
        engine.loads[number] = entries
        if promotion is not None and not promotion.ended and promotion.announced:
            promotion.load = number
            promotion.on_end = partial(self._extend, engine, number, list(keys), owner)
        elif promotion is not None:
            self._promotions.release(promotion)
        elif promotion_number:
            context.count("loads_without_promotion")
        context.count("loads")
        self._note_use(engine, entries)
        return len(entries)

    def _extend(
        self,
        engine: EngineState,
        number: int,
        keys: Sequence[tuple[int, bytes]],
        owner: Owner,
        arrived: Sequence[Entry],
    ) -> None:
        """The promotion of a load that has started has ended: pins what has arrived since then."""
        entries = engine.loads.get(number)
        if entries is None:
            return
        new: list[Entry] = []
        for entry, (group, block_hash) in list(zip(arrived, keys, strict=False))[len(entries) :]:
            if entry.key != engine.key(group, block_hash):
                break
            _widen(entry, owner)
            self._resident.pin(entry)
            self._resident.hit(entry)
            new.append(entry)
        entries += new
        self._note_use(engine, new)
        self._context.emit(LoadExtended(engine.name, number, len(entries)))

    def _note_use(self, engine: EngineState, entries: list[Entry]) -> None:
        """Tells the tiers that hold the objects, and brings the objects to those that do not."""
        usable = [secondary for secondary in self._tiers.all if secondary.usable]
        if usable and engine.persistent:
            # Last key first, for tiers that do not keep prefixes together: the beginning of the
            # prefix is their most recently used.
            for entry in reversed(entries):
                bits = self._index.bits(entry.namespace, entry.key)
                for secondary in usable:
                    if bits & secondary.bit:
                        secondary.tier.touch(entry.ref, entry.previous)
        # First key first: what is written before an interruption is of use.
        for entry in entries:
            self._checksummer.persist(entry)

    def keep(self, engine: EngineState, keys: Sequence[tuple[int, bytes]], owner: Owner) -> None:
        """A request uses these objects, as far as they are in RAM or on the way there, without
        loading them."""
        for group, block_hash in keys:
            key = engine.key(group, block_hash)
            if key is None:
                self._context.violation("unknown_group")
                return
            entry = self._resident.get(engine.namespace, key)
            if entry is None:
                self._reservations.widen(engine.namespace, key, owner)
            elif not entry.evicting and not self._resident.is_expired(entry):
                self._lifetimes.used(entry, owner)
                if _widen(entry, owner):
                    self._checksummer.persist(entry)

    def release(self, engine: EngineState, number: int) -> None:
        """No rank has a copy of this load in progress, and none starts one."""
        entries = engine.loads.pop(number, None)
        if entries is None:
            self._context.violation("unknown_load")
            return
        for promotion in list(engine.promotions.values()):
            if promotion.load == number:
                self._promotions.release(promotion)
        for entry in entries:
            self._resident.unpin(entry)

    def close(self, engine: EngineState) -> list[Entry]:
        """Forgets the engine's loads; returns the entries they pinned, once per pin."""
        entries = [entry for pinned in engine.loads.values() for entry in pinned]
        engine.loads.clear()
        return entries
