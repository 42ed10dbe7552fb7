"""``TierStore``: the node's store of KV objects, between engines and tiers.

A state machine without threads and without I/O of its own. One owner (tierd's loop, a test, the
simulator) calls every method; each returns at once. Calls that may block run on the executor, and
``pump`` takes their results. The same calls in the same order at the same times give the same
events.

The owner calls ``pump`` after it has passed in messages, when the executor wakes it, and at
``next_wake``; then it takes the events. The parts, in the order in which they are built:

* ``slot_pool``: slots and their accounts. ``presence``: which tier has which key. ``memory_tier``:
  objects in RAM.
* ``secondary_tier``: state, breaker and maintenance of each secondary tier. ``engines``: open
  engines and quarantine.
* ``allocator``: credits, slots for reads, evictions. ``tier_reads``: reads. ``write_through``:
  checksums and writes.
* ``recovery``: objects of the previous tierd. ``selection`` and ``cost_model``: what to load.
* ``promotion``: promotions. ``transfers``: reservations and loads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtier.config.models import FileSystemTierDocument, Live, MemoryTierDocument, Topology
from kvtier.store.allocator import SlotAllocator
from kvtier.store.arc_policy import TriedArcPolicy
from kvtier.store.context import StoreContext, StoreRuntime
from kvtier.store.cost_model import PrefixCost
from kvtier.store.engines import EngineRegistry, check_engine_info
from kvtier.store.lifetimes import Lifetimes
from kvtier.store.lookups import LOOKUP_THREADS, TierLookups
from kvtier.store.memory_tier import LruPolicy, ResidentObjects
from kvtier.store.operations import EngineState
from kvtier.store.pool_layout import PoolLayout, pool_layout
from kvtier.store.prefetch import Prefetches
from kvtier.store.presence import PresenceIndex
from kvtier.store.promotion import ObjectSources, Promotions
from kvtier.store.queued_requests import AwaitedKeys, QueuedRequests
from kvtier.store.recovery import VERIFY_LANE, OrphanedReads, PoolRecovery, RecoveredObjects
from kvtier.store.secondary_tier import SecondaryTiers
from kvtier.store.selection import LoadPlanner
from kvtier.store.slot_pool import SlotPool, recorded_layout
from kvtier.store.state import Entry
from kvtier.store.tier_group import StoreTierState, TenantReport
from kvtier.store.tier_reads import TierReads
from kvtier.store.transfers import Reservations, StoreLoads
from kvtier.store.types import (
    MEMORY_BIT,
    NO_OPTIONS,
    NO_OWNER,
    RAM_BITS,
    Accounts,
    ChunkId,
    EngineInfo,
    Owner,
    PromotionOptions,
    StoreEvent,
)
from kvtier.store.write_through import HASH_LANE, Checksummer, WriteThrough
from kvtier.tenants import share_bytes
from kvtier.tiers.base import Tier


def executor_lanes(topology: Topology) -> dict[str, int]:
    """Threads per lane that the executor of a store of this topology needs."""
    found = {HASH_LANE: 2, VERIFY_LANE: 2}
    for tier in topology.structural.tiers:
        if isinstance(tier, MemoryTierDocument):
            continue
        volumes = tier.volumes if isinstance(tier, FileSystemTierDocument) else ()
        for each in [f"{tier.name}/{volume.name}" for volume in volumes] or [tier.name]:
            found[f"read:{each}"] = tier.read_threads
            found[f"write:{each}"] = tier.write_threads
            found[f"lookup:{each}"] = LOOKUP_THREADS
            found[f"check:{each}"] = found[f"maintain:{each}"] = 1
    return found


def _identify(entry: Entry) -> tuple[str, bytes]:
    return entry.namespace, entry.key


def _tenant(entry: Entry) -> bytes:
    return entry.account


def _previous(entry: Entry) -> tuple[str, bytes] | None:
    return (entry.namespace, entry.previous) if entry.previous else None


class TierStore:
    """The node's store of KV objects. The module describes who may call it, and when."""

    def __init__(
        self,
        pool_bytes: int,
        memory: memoryview | bytearray | None,
        tiers: Sequence[Tier],
        topology: Topology,
        runtime: StoreRuntime,
        recovery: PoolRecovery | None = None,
    ) -> None:
        """``memory``: the whole pool, writable; None if no bytes are needed. ``tiers``: the
        secondary tiers in the order of the topology, not open; the store opens them on their
        "maintain" lanes. ``recovery``: what the previous tierd left in the pool."""
        recovery = recovery or PoolRecovery()
        view = None if memory is None else memoryview(memory).cast("B")
        context = self._context = StoreContext(runtime, pool_bytes, view, recovery.slot_table)
        document = next(
            (t for t in topology.structural.tiers if isinstance(t, MemoryTierDocument)), None
        )
        self._memory_name = "memory" if document is None else document.name
        arc = document is not None and document.eviction_policy == "ARC"
        lanes, live = executor_lanes(topology), topology.live
        # Checksums may pin half of the pool, and writes to secondary tiers the other half: a hung
        # disk leaves room for loads.
        checksum_bytes, write_bytes = pool_bytes // 2, pool_bytes // 2 // max(1, len(tiers))

        table = recovery.slot_table
        pool = self._pool = SlotPool(pool_bytes, None if table is None else table.layout)
        index = self._index = PresenceIndex(context, tiers)
        policy: type[LruPolicy[Entry, tuple[str, bytes]]] = TriedArcPolicy if arc else LruPolicy
        awaited = AwaitedKeys()
        resident = self._resident = ResidentObjects(
            context,
            pool,
            index,
            lambda: policy(_identify, _previous, index.in_secondary_tier, _tenant),
            awaited.rank_of,
        )
        self._queued = QueuedRequests(context, resident, awaited)
        lifetimes = self._lifetimes = Lifetimes(context, resident, pool_bytes)
        self._tiers = SecondaryTiers(context, index, tiers, lanes, live)
        self._engines = EngineRegistry(context, pool, resident)
        self._allocator = SlotAllocator(context, pool, resident, index, self._engines)
        lifetimes.on_expired(self._allocator.expire)
        reads = TierReads(
            context, resident, self._tiers, self._allocator, lifetimes, recovery.read_log
        )
        self._writes = WriteThrough(context, resident, self._tiers, write_bytes)
        self._writes.on_passed(self._allocator.expire)
        self._checksummer = Checksummer(context, resident, self._writes, checksum_bytes)
        self._slot_table = recovery.slot_table
        self._orphans = OrphanedReads(context, pool, recovery.orphaned_reads)
        self._recovered = RecoveredObjects(context, pool, resident, lifetimes, self._writes)
        self._planner = LoadPlanner(context, self._tiers, self._memory_name, live)
        sources = ObjectSources(resident, self._recovered, self._tiers, reads, lifetimes)
        lookups = TierLookups(context, index, self._tiers)
        self._promotions = Promotions(context, sources, self._allocator, self._planner, lookups)
        self._prefetches = Prefetches(context, sources, self._allocator, self._queued, pool_bytes)
        self._reservations = Reservations(
            context, pool, index, sources, self._checksummer, self._allocator
        )
        self._loads = StoreLoads(
            context, index, sources, self._promotions, self._reservations, self._checksummer
        )
        self._pool_bytes = pool_bytes
        self._configure_tenants(live)
        if not recovery.fenced:
            self.unfence()

    # Recovery.

    def unfence(self) -> None:
        """Every worker of the pool's previous tierd has drained or exited: the pool may be
        used."""
        self._orphans.quarantine()
        if self._slot_table is not None:
            self._recovered.begin_restore(self._slot_table)
        self._restore_next()

    def _restore_next(self) -> None:
        self._recovered.restore_next()
        self._context.fenced = self._recovered.restoring
        self._checksummer.run()

    def release_orphaned_reads(self, name: str) -> None:
        """The last thread of this earlier tierd has ended: the slots that it was reading into are
        free."""
        self._orphans.release(name)

    # Engines.

    def open_engine(self, info: EngineInfo) -> None:
        """Opens an engine with all its workers. Raises ``ProtocolError`` if its description
        contradicts itself.

        An open engine of the same name is closed without proof; the new engine inherits nothing.
        If the pool holds nothing, it is laid out for this engine.
        """
        check_engine_info(info)
        if info.engine in self._engines.open:
            self._context.violation("engine_opened_twice")
            self.close_engine(info.engine, False)
        self._lay_out(self._layout_for(info))
        engine = self._engines.add(info)
        self._index.open(engine.namespace, engine.persistent)

    def _layout_for(self, info: EngineInfo) -> PoolLayout:
        """How a pool that holds nothing is laid out for an engine."""
        layout = pool_layout(self._pool_bytes, info.parts)
        whole = layout.part_bytes * layout.parts
        # What parts lose to their alignment may be all that a small pool has.
        return layout if max(info.slot_bytes) <= whole else pool_layout(self._pool_bytes)

    def _lay_out(self, layout: PoolLayout) -> None:
        table = self._slot_table
        if layout == self._pool.layout or not self._holds_nothing:
            return
        if table is None or table.lay_out(recorded_layout(layout)):
            self._pool.lay_out(layout)

    @property
    def _holds_nothing(self) -> bool:
        """Whether nothing uses a slot, waits for one, or has left something in one."""
        return (
            self._pool.is_unused
            and not self._engines.has_any
            and not self._allocator.has_requests
            and not self._orphans.expected
            and not self._recovered.restoring
            and (self._slot_table is None or not len(self._slot_table))
        )

    @property
    def layout(self) -> PoolLayout:
        """How the pool is laid out."""
        return self._pool.layout

    def is_scattered(self, engine: str) -> bool:
        """Whether the objects of this open engine have one shard in each part of the pool."""
        state = self._engines.open.get(engine)
        return state is not None and state.geometries[0].kind.pieces > 1

    def max_object_bytes(self, info: EngineInfo) -> int:
        """How large an object of this engine can be, if it opens now."""
        layout = self._layout_for(info) if self._holds_nothing else self._pool.layout
        return layout.part_bytes * (info.parts if info.parts == layout.parts else 1)

    def close_engine(self, engine: str, confirmed_dead: bool, expires: bool = True) -> None:
        """Closes an engine. ``confirmed_dead``: its processes have ended, or have drained every
        copy.

        Otherwise its slots are in quarantine until ``confirm_engine_dead``, or with ``expires`` for
        60 s.
        """
        state = self._engines.get(engine)
        if state is None:
            return
        self._end_requests(state)
        slots = self._reservations.close(state)
        entries = self._loads.close(state)
        self._engines.release_or_quarantine(state, slots, entries, confirmed_dead, expires)
        self._index.close(state.namespace)

    def _end_requests(self, state: EngineState) -> None:
        """No request of the engine waits for anything, running or queued."""
        for promotion in list(state.promotions.values()):
            self._promotions.release(promotion)
        self._prefetches.close(state)
        self._queued.close(state)

    def confirm_engine_dead(self, engine: str) -> None:
        """The processes of all closed engines of this name have ended: their quarantine ends."""
        self._engines.confirm_dead(engine)

    def reset_engine(self, engine: str, namespace: str, persistent: bool = False) -> None:
        """Handles a change of the engine's weights: later objects belong to ``namespace``, and stay
        in RAM unless it is ``persistent``.

        Open reservations end without a commit, promotions are cancelled, loads continue.
        """
        state = self._engines.get(engine)
        if state is None:
            return
        self._end_requests(state)
        self._reservations.cancel_all(state)
        self._index.close(state.namespace)
        state.namespace, state.persistent = namespace, persistent
        self._index.open(namespace, persistent)

    def configure(self, live: Live) -> None:
        """Applies live settings."""
        self._planner.configure(live)
        self._tiers.configure(live)
        self._configure_tenants(live)
        self._writes.configured()

    def _configure_tenants(self, live: Live) -> None:
        share = share_bytes(self._pool_bytes, live.tenants.max_percent)
        self._resident.accounts.set_limit(share)
        self._lifetimes.configure(live.hints.max_pinned_percent)

    def check_suspended(self, cause: str) -> None:
        """The cause for which tiers were suspended is gone: they are checked at once."""
        self._tiers.check_suspended(cause)

    # Stores.

    def reserve(
        self,
        engine: str,
        reservation: int,
        chunk: ChunkId,
        slot: int,
        owner: Owner = NO_OWNER,
    ) -> None:
        """Reserves ``slot``, which is granted to the engine, for one chunk of a request of
        ``owner``."""
        state = self._engines.get(engine)
        if state is not None:
            self._reservations.reserve(state, reservation, chunk, slot, owner)

    def deliver(self, engine: str, rank: int, reservation: int) -> None:
        """A rank's shard is in the slot. May precede the reservation itself."""
        state = self._engines.get(engine)
        if state is not None:
            self._reservations.acknowledge(state, rank, reservation, True)

    def abort(self, engine: str, rank: int, reservation: int) -> None:
        """A rank has not written all of its shard, and does not touch the slot any further."""
        state = self._engines.get(engine)
        if state is not None:
            self._reservations.acknowledge(state, rank, reservation, False)

    # Loads.

    def promote(
        self,
        engine: str,
        promotion: int,
        keys: Sequence[tuple[int, bytes]],
        budget_seconds: float,
        cost: PrefixCost | None = None,
        options: PromotionOptions = NO_OPTIONS,
    ) -> None:
        """Brings the usable prefix of ``keys`` that is worth it into pinned slots. Answered by one
        ``PromotionEnded``.

        ``budget_seconds``: the longest wait. ``cost``: needed by selection ``Cost``, which takes
        the longest prefix without it.
        """
        state = self._engines.get(engine)
        if state is not None:
            self._promotions.begin(state, promotion, keys, budget_seconds, cost, options)

    def prefetch(
        self,
        engine: str,
        prefetch: int,
        keys: Sequence[tuple[int, bytes]],
        owner: Owner = NO_OWNER,
        queued: int = 0,
    ) -> None:
        """A request with these keys waits in the engine's queue: brings its prefix into RAM, as far
        as that costs nothing else, until ``cancel``. Numbers are those of promotions. ``queued``:
        the number that ``queue`` has got for it. No answer."""
        state = self._engines.get(engine)
        if state is not None:
            self._prefetches.begin(state, prefetch, keys, owner, queued)

    def queue(self, engine: str, number: int, keys: Sequence[tuple[int, bytes]]) -> None:
        """A request waits in the engine's queue, behind those before: what precedes ``keys`` and
        the keys themselves, at most one of each group, is evicted when nothing else can be, until
        ``cancel`` or for ``QUEUED_SECONDS``."""
        state = self._engines.get(engine)
        if state is not None:
            self._queued.begin(state, number, keys)

    def cancel(self, engine: str, promotion: int) -> None:
        """Cancels a promotion, or releases what it has brought; or ends a prefetch; or a request
        leaves the queue."""
        state = self._engines.get(engine)
        if state is None:
            return
        found = state.promotions.get(promotion)
        if found is None and (
            self._prefetches.end(state, promotion) or self._queued.end(state, promotion)
        ):
            return
        if found is None:
            self._context.count("late_cancels")
        else:
            self._promotions.release(found)

    def load(
        self,
        engine: str,
        load: int,
        promotion: int,
        keys: Sequence[tuple[int, bytes]],
        owner: Owner = NO_OWNER,
    ) -> int:
        """The engine loads ``keys``: pins the prefix of them that is in RAM until ``release_load``.
        Returns its length.

        The engine does not wait for this. Its copies are protected by the generation words; the
        pins save loads that would fail.
        """
        state = self._engines.get(engine)
        return 0 if state is None else self._loads.begin(state, load, promotion, keys, owner)

    def keep(self, engine: str, keys: Sequence[tuple[int, bytes]], owner: Owner) -> None:
        """A request of ``owner`` uses ``keys``, which it need not load: they are retained or pinned
        as it asks, as far as they are in RAM, and are stored in its tiers as well."""
        state = self._engines.get(engine)
        if state is not None:
            self._loads.keep(state, keys, owner)

    def release_load(self, engine: str, load: int) -> None:
        """Every rank of the engine has ended this load."""
        state = self._engines.get(engine)
        if state is not None:
            self._loads.release(state, load)

    # Presence and evictions.

    def acknowledge_eviction(self, token: int) -> None:
        """Answers a ``KeysEvicting``: every scheduler of the namespace has dropped its keys."""
        self._allocator.acknowledge(token)

    def presence(self, namespace: str) -> Iterator[tuple[bytes, int, int]]:
        """The keys of an open namespace with their bits and, for those in RAM, the slot and its
        generation; without the RAM bits of keys that are being evicted.

        Take the events first: they precede this. The iteration may be spread over any time: each
        step tells the state of its moment. A key that changes meanwhile may be missing, so the
        events since the start are to be applied after the last step.
        """
        get = self._resident.get
        for key, held in self._index.entries(namespace):
            bits, location = held, 0
            entry = get(namespace, key) if bits & RAM_BITS else None
            if entry is not None and entry.evicting:
                bits &= ~RAM_BITS
            elif entry is not None and bits & MEMORY_BIT:
                location = entry.location
            if bits:
                yield key, bits, location

    @property
    def usable_bits(self) -> int:
        """Bits of RAM and of the tiers that may be used. Changes are announced by
        ``UsableTiersChanged``."""
        return self._tiers.usable_bits

    @property
    def asked_bits(self) -> int:
        """Bits of the usable tiers that may hold keys that the index lacks. Changes are announced
        as those of ``usable_bits``."""
        return self._tiers.asked_bits

    # The owner's loop.

    def pump(self) -> None:
        """Takes results of I/O and announcements of tiers, runs timers, hands out and evicts
        slots."""
        context = self._context
        context.io.collect()
        self._index.apply_changes()
        context.timers.run_due(context.clock())
        if self._recovered.restoring:
            self._restore_next()
        self._writes.run()
        if not context.fenced:
            self._prefetches.run()
            self._allocator.run()

    def next_wake(self) -> float | None:
        """When ``pump`` has something to do apart from I/O, in seconds of the store's clock; None:
        never."""
        allocating = self._allocator.busy and not self._context.fenced
        if self._index.busy or self._recovered.restoring or self._writes.busy or allocating:
            return self._context.clock()
        return self._context.timers.next_due()

    def take_events(self) -> list[StoreEvent]:
        """The events since the last call, in order."""
        return self._context.take_events()

    # Reports.

    def accounts(self) -> Accounts:
        """Bytes of the pool by use."""
        return self._pool.accounts()

    @property
    def pinned_bytes(self) -> int:
        """Bytes of objects that something uses."""
        return self._resident.pinned_bytes

    @property
    def pinned_by_requests(self) -> int:
        """Bytes of objects that requests have pinned."""
        return self._lifetimes.pinned_bytes

    def tenants(self) -> dict[bytes, int]:
        """Bytes in RAM of each tenant that has some."""
        return dict(self._resident.accounts.held)

    @property
    def objects(self) -> int:
        """Number of objects in RAM."""
        return len(self._resident)

    def pending_stores(self) -> int:
        """Objects that wait for a checksum, and writes that wait, in the backlog as well, or run. A
        shutdown waits for these while their number falls."""
        return len(self._checksummer) + len(self._writes)

    def tier_states(self) -> list[StoreTierState]:
        """The state of all tiers, the memory tier first."""
        accounts = self._pool.accounts()
        memory = StoreTierState(
            name=self._memory_name,
            state="Healthy",
            used_bytes=accounts.pool_bytes - accounts.free - accounts.unusable,
            capacity_bytes=accounts.pool_bytes,
            objects=len(self._resident),
            pending_store_bytes=self._checksummer.pending_bytes,
            tenants=TenantReport.of(self.tenants(), self._resident.accounts.limit_bytes),
        )
        return [memory] + [group.report() for group in self._tiers.groups]
