"""``TierStore``: everything there is between an engine's chunks and the tiers.

A plain library and a state machine. Every method is called by one owner (tierd's loop, a test, the simulator), returns
at once and does no I/O; what may block goes through the executor, and its results are taken in by ``pump``. The same
calls in the same order at the same times give the same events.

The owner calls ``pump`` after it has passed in messages, when the executor wakes it, and at ``next_wake``; and then
takes the events. The parts, each in its own file: slots (room and accounts), memory (objects in RAM), presence (who
holds what), engines (who is there, and quarantine), stores, promotion and reads, loads, sealing and writes, lower
(state of the lower tiers), supply (credits and evictions).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

from kvtier.config.models import FileSystemTierDocument, Live, MemoryTierDocument, Topology
from kvtier.store.allocator import SlotAllocator
from kvtier.store.context import StoreContext
from kvtier.store.cost_model import PrefixCost
from kvtier.store.engines import EngineRegistry
from kvtier.store.memory_tier import ArcPolicy, LruPolicy, ResidentObjects
from kvtier.store.operations import EngineState
from kvtier.store.presence import PresenceIndex
from kvtier.store.promotion import Promotions
from kvtier.store.recovery import LANE as VERIFY_LANE
from kvtier.store.recovery import RecoveredObjects
from kvtier.store.secondary_tier import SecondaryTier, SecondaryTiers, TierSnapshot
from kvtier.store.selection import LoadPlanner
from kvtier.store.slot_pool import SlotPool
from kvtier.store.slot_table import ReadLog, SlotLocation, SlotRecord, SlotTable
from kvtier.store.state import Entry
from kvtier.store.tier_reads import OrphanedReads, TierReads
from kvtier.store.transfers import Reservations, StoreLoads
from kvtier.store.types import (
    RAM_BITS,
    Accounts,
    Clock,
    EngineInfo,
    IoExecutor,
    StoreCounters,
    StoreEvent,
)
from kvtier.store.write_through import Checksummer, WriteThrough
from kvtier.tiers.base import Tier
from kvtier.tiers.checksum import Checksum, preferred

DEFAULT_THREADS = 8
RESTORED_PER_PUMP = 16_384
"""Objects of the last tierd that are taken over at a time: a tenth of a second."""


def executor_lanes(topology: Topology) -> dict[str, int]:
    """Threads per lane of the executor that a store of this topology needs."""
    found = {"hash": 2, VERIFY_LANE: 2}
    for tier in topology.structural.tiers:
        if isinstance(tier, MemoryTierDocument):
            continue
        found[f"read:{tier.name}"] = found[f"write:{tier.name}"] = DEFAULT_THREADS
        if isinstance(tier, FileSystemTierDocument):
            found[f"read:{tier.name}"], found[f"write:{tier.name}"] = (
                tier.read_threads,
                tier.write_threads,
            )
        found[f"check:{tier.name}"] = found[f"maintain:{tier.name}"] = 1
    return found


def _name_of(entry: Entry) -> Hashable:
    return entry.ref


class TierStore:
    """See the module's text.

    ``memory``: the whole pool, writable, or None where no bytes are needed. ``tiers``: the lower ones in the document's
    order, not opened: the store opens them on their "maintain" lanes. ``fenced``: begin without touching a slot, until
    ``unfence``. ``slot_table``: where sealed objects are noted for the next tierd; what it has recovered is taken over.
    ``read_log``: where the slots that are read into are noted. ``hung``: by name of a dead tierd, slots that a thread of it may still read
    into; they are nobody's until ``release_orphaned_reads``.
    """

    def __init__(
        self,
        pool_bytes: int,
        memory: memoryview | bytearray | None,
        tiers: Sequence[Tier],
        topology: Topology,
        io: IoExecutor,
        clock: Clock,
        checksums: Checksum | None = None,
        epoch: int = 1,
        fenced: bool = False,
        slot_table: SlotTable | None = None,
        read_log: ReadLog | None = None,
        orphaned_reads: Mapping[str, Sequence[SlotLocation]] | None = None,
    ) -> None:
        self.epoch = epoch
        self.counters = StoreCounters()
        view = None if memory is None else memoryview(memory).cast("B")
        self._shared = StoreContext(
            view, io, clock, checksums or preferred(), self.counters, fenced, slot_table
        )
        shared = self._shared
        memory_tier = next(
            (t for t in topology.structural.tiers if isinstance(t, MemoryTierDocument)), None
        )
        self._memory_name = "memory" if memory_tier is None else memory_tier.name
        self._pool = SlotPool(pool_bytes)
        arc = memory_tier is not None and memory_tier.eviction_policy == "ARC"
        self._table = ResidentObjects((lambda: ArcPolicy(_name_of)) if arc else LruPolicy[Entry])
        self._index = PresenceIndex(shared, tiers)
        threads = executor_lanes(topology)
        read_threads = [threads.get(f"read:{tier.name}", DEFAULT_THREADS) for tier in tiers]
        self._lowers = SecondaryTiers(shared, self._index, tiers, read_threads, topology.live)
        self._engines = EngineRegistry(shared, self._pool, self._table)
        self._supply = SlotAllocator(shared, self._pool, self._table, self._index, self._engines)
        self._reads = TierReads(
            shared, self._pool, self._table, self._index, self._lowers, self._supply
        )
        self._decider = LoadPlanner(shared, self._lowers, topology.live.selection)
        self._kept = RecoveredObjects(shared, self._pool, self._table, self._index, self._supply)
        self._slot_table = slot_table
        self._left: list[SlotRecord] = []
        self._reads.log = read_log
        self._hung = OrphanedReads(shared, self._pool, orphaned_reads or {})
        self._promotions = Promotions(
            shared, self._table, self._lowers, self._reads, self._supply, self._decider, self._kept
        )
        self._loads = StoreLoads(
            shared, self._table, self._index, self._lowers, self._promotions, self._supply
        )
        self._stores = Reservations(
            shared, self._pool, self._table, self._index, self._supply, self._kept
        )
        # Half of the pool may be pinned by sealing, and half by writes to lower tiers: a hung disk must leave room for
        # loads.
        self._sealer = Checksummer(shared, self._table, pool_bytes // 2)
        self._writes = WriteThrough(
            shared, self._table, self._lowers, pool_bytes // 2 // max(1, len(tiers))
        )
        self._connect()
        self._apply(topology.live)
        if not fenced:
            self._take_over()

    def _connect(self) -> None:
        self._supply.begin = self._reads.begin
        self._lowers.on_open = self._tier_closed
        self._lowers.on_usable = self._tier_usable
        self._stores.on_commit = self._committed
        self._stores.on_seen = self._wanted
        self._loads.on_hit = self._wanted
        self._sealer.on_sealed = self._writes.consider
        self._kept.on_verified = self._writes.consider

    def _take_over(self) -> None:
        self._hung.place()
        table = self._slot_table
        if table is not None:
            for reason, number in table.rejected.items():
                self._shared.count("recovered_objects_rejected", "", reason, number)
            table.rejected.clear()
            self._left, table.recovered = table.recovered, []
        self._restore()

    def _restore(self) -> None:
        """Takes over the next objects. No slot is handed out before all are where they were."""
        self._kept.restore(self._left[:RESTORED_PER_PUMP])
        self._left = self._left[RESTORED_PER_PUMP:]
        self._shared.fenced = bool(self._left)
        if not self._left:
            self._sealer.run()

    def _tier_closed(self, lower: SecondaryTier) -> None:
        self._reads.tier_closed(lower)
        self._writes.tier_closed(lower)

    def _tier_usable(self) -> None:
        # What was sealed while a tier was scanning its directory, or given up, would otherwise reach it only when it is
        # stored again.
        for entry in list(self._table.entries()):
            if entry.meta is not None and not entry.leaving:
                self._writes.consider(entry)

    def _committed(self, entry: Entry) -> None:
        self._reads.committed(entry)
        if entry.persistent:
            self._sealer.add(entry)

    def _wanted(self, entry: Entry) -> None:
        if entry.meta is not None:
            self._writes.consider(entry)
        elif entry.persistent:
            self._sealer.add(entry)

    # Engines.

    def open_engine(self, info: EngineInfo) -> None:
        """An engine with all its workers is there. Raises ``ProtocolError`` if its description contradicts itself.

        One of the same name that was open is closed without proof: a new engine inherits nothing.
        """
        if info.engine in self._engines.open:
            self._shared.violation("engine_opened_twice")
            self.close_engine(info.engine, False)
        engine = self._engines.add(info)
        self._index.open(engine.namespace, engine.persistent)

    def close_engine(self, engine: str, proven: bool, expires: bool = True) -> None:
        """An engine is not there any more; ``proven``: nor are its processes, or they have drained every copy.

        ``expires``: without proof its slots come back after 60 s all the same; False where the owner can see that the
        processes live, and says ``confirm_engine_dead`` in the end.
        """
        state = self._engine(engine)
        if state is None:
            return
        for promotion in list(state.promotions.values()):
            self._promotions.release(promotion)
        slots = self._stores.close(state)
        entries = self._loads.close(state)
        self._engines.let_go(state, slots, entries, proven, expires)
        self._index.close(state.namespace)

    def confirm_engine_dead(self, engine: str) -> None:
        """The processes of engines that were closed under this name are gone: their quarantine ends."""
        self._engines.proven_gone(engine)

    def reset_engine(self, engine: str, namespace: str) -> None:
        """The engine's weights changed: what it delivers from now on belongs to another namespace, and is kept in RAM
        only.

        Reservations that are open end without a commit; promotions are cancelled; loads go on.
        """
        state = self._engine(engine)
        if state is None:
            return
        for promotion in list(state.promotions.values()):
            self._promotions.release(promotion)
        self._stores.doom_all(state)
        self._index.close(state.namespace)
        state.namespace, state.persistent = namespace, False
        self._index.open(namespace, False)

    def _engine(self, name: str) -> EngineState | None:
        engine = self._engines.open.get(name)
        if engine is None:
            self._shared.violation("unknown_engine")
        return engine

    def unfence(self) -> None:
        """Every worker of the pool's last tierd has drained, or is gone."""
        self._take_over()

    def release_orphaned_reads(self, name: str) -> None:
        """No thread of this dead tierd lives any more."""
        self._hung.over(name)

    def configure(self, live: Live) -> None:
        """Takes over live settings at once."""
        self._decider.selection = live.selection
        self._apply(live)
        self._lowers.configure(live)

    def _apply(self, live: Live) -> None:
        self._decider.min_load_tokens = live.min_load_tokens
        memory = live.tiers.get(self._memory_name)
        if memory is not None:
            self._decider.memory_weight = memory.load_weight

    # Stores.

    def reserve(
        self, engine: str, reservation: int, group: int, block_hash: bytes, slot: int
    ) -> None:
        """One chunk will be delivered into ``slot``, granted to the engine before."""
        state = self._engine(engine)
        if state is not None:
            self._stores.reserve(state, reservation, group, block_hash, slot)

    def deliver(self, engine: str, rank: int, reservation: int) -> None:
        """A rank's shard is in its slot. May come before the reservation itself."""
        state = self._engine(engine)
        if state is not None:
            self._stores.answer(state, rank, reservation, True)

    def abort(self, engine: str, rank: int, reservation: int) -> None:
        """A rank has not (wholly) written its shard and will not touch the slot any more."""
        state = self._engine(engine)
        if state is not None:
            self._stores.answer(state, rank, reservation, False)

    # Loads.

    def promote(
        self,
        engine: str,
        promotion: int,
        keys: Sequence[tuple[int, bytes]],
        budget_seconds: float,
        shape: PrefixCost | None = None,
    ) -> None:
        """Brings the usable prefix of ``keys`` that is worth it into pinned slots; answered by exactly one
        ``PromotionEnded``. ``budget_seconds``: the longest wait from now on. ``shape``: needed by selection ``Cost``, which
        takes the longest prefix without it."""
        state = self._engine(engine)
        if state is not None:
            self._promotions.begin(state, promotion, keys, budget_seconds, shape)

    def cancel(self, engine: str, promotion: int) -> None:
        """Nobody waits for this promotion, or will load what it brought."""
        state = self._engine(engine)
        if state is None:
            return
        found = state.promotions.get(promotion)
        if found is None:
            self._shared.count("late_cancels")
        else:
            self._promotions.release(found)

    def load(
        self,
        engine: str,
        load: int,
        promotion: int,
        keys: Sequence[tuple[int, bytes]],
        ranks: Sequence[int],
    ) -> None:
        """Pins the prefix of ``keys`` that is in RAM until every rank has said ``loaded``; answered by one
        ``LoadReady``."""
        state = self._engine(engine)
        if state is not None:
            self._loads.begin(state, load, promotion, keys, ranks)

    def release_load(self, engine: str, rank: int, load: int) -> None:
        """No copy of this load runs on this rank any more."""
        state = self._engine(engine)
        if state is not None:
            self._loads.loaded(state, rank, load)

    # Presence and evictions.

    def acknowledge_eviction(self, token: int) -> None:
        """Answer to ``KeysLeaving``: every scheduler of the namespace knows."""
        self._supply.left(token)

    def presence(self, namespace: str) -> Iterable[tuple[bytes, int]]:
        """All keys of an open namespace with their bits; what is announced as leaving RAM is not there any more.

        Take the events before: they tell what led here.
        """
        leaving = self._supply.leaving_keys(namespace)
        held = self._index.snapshot(namespace)
        return (
            [(key, bits & ~RAM_BITS if key in leaving else bits) for key, bits in held]
            if leaving
            else held
        )

    @property
    def usable_bits(self) -> int:
        """Of RAM and the tiers that may be used at this moment; later changes are ``UsableTiersChanged``."""
        return self._lowers.usable_bits

    def bits(self, namespace: str, key: bytes) -> int:
        """Which tiers hold the key."""
        return self._index.bits(namespace, key)

    def on_tier_change(self, namespace: str, key: bytes, tier_index: int, present: bool) -> None:
        """A tier's announcement. Any thread. The tiers the store opened call this by themselves."""
        self._index.changes.put(namespace, key, tier_index, present)

    # The owner's loop.

    def pump(self) -> None:
        """Takes in finished I/O and announcements, ends what is out of time, hands out and evicts slots."""
        shared = self._shared
        shared.io.collect()
        self._index.apply_changes()
        shared.timers.run_due(shared.clock())
        if self._left:
            self._restore()
        if not shared.fenced:
            self._supply.run()

    def next_wake(self) -> float | None:
        """The time of the store's clock at which ``pump`` has something to do at the latest, I/O aside; None: never."""
        if self._index.busy or self._left:
            return self._shared.clock()
        return self._shared.timers.next_due()

    def take_events(self) -> list[StoreEvent]:
        """What happened since the last call, in order."""
        events, self._shared.events = self._shared.events, []
        return events

    # Reports.

    def accounts(self) -> Accounts:
        """Bytes of the pool by use."""
        return self._pool.accounts()

    @property
    def pinned_bytes(self) -> int:
        """Committed bytes that somebody holds."""
        return self._table.pinned_bytes

    @property
    def objects(self) -> int:
        """Objects in RAM."""
        return len(self._table)

    def pending_stores(self) -> int:
        """Objects that wait for a checksum, and writes to lower tiers that wait or run: what a shutdown may wait
        for."""
        return len(self._sealer) + len(self._writes)

    def tier_reports(self) -> list[TierSnapshot]:
        """All tiers as they are reported, the memory tier first."""
        accounts = self._pool.accounts()
        used = accounts.pool_bytes - accounts.free - accounts.unusable
        memory = TierSnapshot(
            self._memory_name,
            "Healthy",
            used,
            accounts.pool_bytes,
            len(self._table),
            self._sealer.pending_bytes,
            "",
            "",
            0.0,
            0,
        )
        return [memory] + [self._lowers.state(lower) for lower in self._lowers.all]
