"""A store whose time, I/O, tiers and pool memory are under the test's control."""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from tests.support.dict_tier import DictTier
from tests.support.manual_executor import ManualCall, ManualClock, ManualExecutor

from kvtier.config.models import (
    BreakerSettings,
    FileSystemTierDocument,
    HintSettings,
    Live,
    LiveTier,
    MemoryTierDocument,
    PolicyIdentity,
    Selection,
    Structural,
    TenantSettings,
    TierVolumeDocument,
    Topology,
)
from kvtier.store.context import StoreRuntime
from kvtier.store.generations import generation_bytes
from kvtier.store.recovery import PoolRecovery
from kvtier.store.slot_table import SlotLocation, SlotTable, TableIdentity
from kvtier.store.store import TierStore
from kvtier.store.types import (
    NO_OWNER,
    ChunkId,
    CreditsGranted,
    EngineInfo,
    KeysEvicting,
    Owner,
    PromotionEnded,
    PromotionOptions,
    StoreCounters,
    StoreEvent,
)
from kvtier.tiers.base import ALIGNMENT_BYTES, ObjectMeta, ObjectRef, OnChange, TierLimits, aligned
from kvtier.tiers.checksum import Blake3
from kvtier.tiers.volume_set import VolumeSet

PAGE = ALIGNMENT_BYTES
NO_VOLUMES: Mapping[str, tuple[str, ...]] = {}
NAMESPACE = "a" * 32
CHECKSUMS = Blake3()


def block_hash(number: int) -> bytes:
    """The block hash of chunk ``number``."""
    return hashlib.sha256(b"%d" % number).digest()


def shard_content(namespace: str, key: bytes, rank: int, size: int) -> bytes:
    """The bytes of one shard of a key; different for each key and rank."""
    seed = hashlib.sha256(namespace.encode() + key + bytes((rank,))).digest()
    return (seed * (size // len(seed) + 1))[:size]


def object_bytes(namespace: str, key: bytes, shard_bytes: tuple[int, ...]) -> bytes:
    """A whole object, as in a slot."""
    parts = [
        shard_content(namespace, key, r, size).ljust(aligned(size), b"\0")
        for r, size in enumerate(shard_bytes)
    ]
    return b"".join(parts)


def object_meta(namespace: str, key: bytes, shard_bytes: tuple[int, ...]) -> ObjectMeta:
    """The checksums of a whole object."""
    digests = (
        CHECKSUMS.digest(memoryview(shard_content(namespace, key, r, size)))
        for r, size in enumerate(shard_bytes)
    )
    return ObjectMeta(shard_bytes, CHECKSUMS.kind, tuple(digests))


class WatchedTier(DictTier):
    """A tier in a dict. While ``fail`` is set, every operation raises what it returns."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.fail: Callable[[], Exception] | None = None
        self.limits: TierLimits | None = None
        self.calls: list[str] = []
        self.touched: list[ObjectRef] = []

    def _act(self, name: str) -> None:
        self.calls.append(name)
        if self.fail is not None:
            raise self.fail()

    def put(self, namespace: str, key: bytes, shard_bytes: tuple[int, ...]) -> None:
        """Adds an object, as another process would."""
        ref = ObjectRef(namespace, key)
        self.objects[ref] = (
            object_bytes(namespace, key, shard_bytes),
            object_meta(namespace, key, shard_bytes),
        )
        self._on_change(namespace, key, True)

    def drop(self, namespace: str, key: bytes) -> None:
        """Removes an object, as an eviction would."""
        self.delete(ObjectRef(namespace, key))

    def open(self, on_change: OnChange) -> None:
        self._act("open")
        super().open(on_change)

    def configure(self, limits: TierLimits) -> None:
        self.limits = limits
        super().configure(limits)

    def read(self, ref: ObjectRef, into: memoryview) -> ObjectMeta:
        self._act("read")
        # A read that fails may leave anything in the memory it was given.
        into[:] = b"?" * len(into)
        return super().read(ref, into)

    def write(self, ref: ObjectRef, payload: memoryview, meta: ObjectMeta) -> None:
        self._act("write")
        super().write(ref, payload, meta)

    def touch(self, ref: ObjectRef, previous: bytes = b"") -> None:
        self.touched.append(ref)

    def maintain(self) -> None:
        self._act("maintain")

    def check(self) -> None:
        self._act("check")


def live(
    selection: Selection = Selection.COST,
    threshold: int = 5,
    period: int = 60,
    shares: tuple[int, int] = (100, 20),
    **tiers: LiveTier,
) -> Live:
    """Live values for the memory tier and these tiers. ``shares``: percentages that one tenant may
    hold, and that requests may pin."""
    return Live(
        selection=selection,
        breaker=BreakerSettings(failure_threshold=threshold, period_seconds=period),
        tenants=TenantSettings(max_percent=shares[0]),
        hints=HintSettings(max_pinned_percent=shares[1]),
        tiers={"ram": LiveTier(), **tiers},
    )


def topology(
    values: Live,
    pool_bytes: int,
    names: tuple[str, ...],
    read_threads: int = 8,
    eviction_policy: Literal["LRU", "ARC"] = "LRU",
    volumes: Mapping[str, tuple[str, ...]] = NO_VOLUMES,
) -> Topology:
    """A topology with one memory tier and file tiers of these names. ``volumes``: by tier."""
    lower = [
        FileSystemTierDocument(
            name=n,
            path="" if n in volumes else "/x",
            volumes=tuple(TierVolumeDocument(name=v, path=f"/{v}") for v in volumes.get(n, ())),
            sharing="Pod",
            read_threads=read_threads,
        )
        for n in names
    ]
    structural = Structural(
        policy=PolicyIdentity(namespace="default", name="policy"),
        content_hash="0",
        run_directory="/run/kvtier",
        tiers=[
            MemoryTierDocument(
                name="ram", capacity_bytes=pool_bytes, eviction_policy=eviction_policy
            ),
            *lower,
        ],
        live=values,
    )
    return Topology(structural=structural, live=values)


@dataclass(frozen=True)
class PinnedLoad:
    """A load as the store knows it. ``slots``: where its pinned prefix is."""

    load: int
    slots: tuple[int, ...]


class ReadLogStub:
    """A ``ReadLog`` in memory."""

    def __init__(self) -> None:
        self.places: dict[int, SlotLocation] = {}
        self.full = False

    def begin(self, place: SlotLocation) -> bool:
        if not self.full:
            self.places[place.offset] = place
        return not self.full

    def end(self, offset: int) -> None:
        self.places.pop(offset, None)


class StoreFixture:
    """One store with open tiers, and shorthands for tests.

    Objects have one shard of one page unless an engine says otherwise. ``events`` collects all that
    the store emitted, ``stamps`` when.
    """

    def __init__(
        self,
        slots: int = 16,
        tiers: tuple[str, ...] = ("disk",),
        values: Live | None = None,
        fenced: bool = False,
        read_threads: int = 8,
        opened: bool = True,
        tier_type: type[WatchedTier] = WatchedTier,
        eviction_policy: Literal["LRU", "ARC"] = "LRU",
        volumes: Mapping[str, tuple[str, ...]] = NO_VOLUMES,
    ) -> None:
        self.pool = bytearray(slots * PAGE)
        self.generations = memoryview(bytearray(generation_bytes(len(self.pool))))
        self.clock = ManualClock()
        self.io = ManualExecutor()
        self.parts = {
            name: [tier_type(part) for part in volumes.get(name, (name,))] for name in tiers
        }
        self.tiers = [part for parts in self.parts.values() for part in parts]
        """The tiers, or their volumes."""
        self._volumes = volumes
        if values is None:
            values = live(**{name: LiveTier(capacity_bytes=1 << 30) for name in tiers})
        self._document = topology(
            values, len(self.pool), tiers, read_threads, eviction_policy, volumes
        )
        self._table_file = os.memfd_create("slots")
        weakref.finalize(self, os.close, self._table_file)
        self.orphaned_reads: dict[str, tuple[SlotLocation, ...]] = {}
        self.store = self._make_store(fenced)
        self.events: list[StoreEvent] = []
        self.stamps: list[float] = []
        self._numbers = 0
        self._used: dict[tuple[str, int], list[int]] = {}
        if opened:
            self.io.run_all("maintain:")
            self.pump()

    def _make_store(self, fenced: bool) -> TierStore:
        self.table = SlotTable(
            os.dup(self._table_file), TableIdentity(len(self.pool), 1, "topology")
        )
        weakref.finalize(self.table, os.close, self.table._descriptor)
        self.read_log = ReadLogStub()
        self.counters = StoreCounters()
        return TierStore(
            len(self.pool),
            self.pool,
            [
                VolumeSet(name, parts) if name in self._volumes else parts[0]
                for name, parts in self.parts.items()
            ],
            self._document,
            StoreRuntime(
                self.io, self.clock, CHECKSUMS, self.counters, self.generations, self.clock
            ),
            PoolRecovery(fenced, self.table, self.read_log, self.orphaned_reads),
        )

    def restart(self, fenced: bool = False, hung: str = "") -> None:
        """Replaces the store, as if its process were killed and restarted.

        Calls in progress end with it. With a name (``hung``), its threads hang in the kernel."""
        if hung and self.read_log.places:
            self.orphaned_reads[hung] = tuple(self.read_log.places.values())
        self.io = ManualExecutor()
        self.store = self._make_store(fenced)
        self.events.clear()
        self.stamps.clear()
        self._used.clear()
        self.io.run_all("maintain:")
        self.pump()

    def release_orphaned_reads(self, name: str) -> None:
        """Ends the last thread of an exited process."""
        del self.orphaned_reads[name]
        self.store.release_orphaned_reads(name)

    def flip(self, offset: int) -> None:
        """Flips one bit of the pool."""
        self.pool[offset] ^= 1

    def damage_table(self, position: int) -> None:
        """Flips one bit of the slot table."""
        data = os.pread(self._table_file, 1, position)
        if data:
            os.pwrite(self._table_file, bytes([data[0] ^ 1]), position)

    @property
    def tier(self) -> WatchedTier:
        return self.tiers[0]

    def engine(
        self,
        name: str = "e",
        namespace: str = NAMESPACE,
        shards: tuple[tuple[int, ...], ...] = ((PAGE,),),
        writers: tuple[int, ...] = (0,),
        persistent: bool = True,
    ) -> EngineInfo:
        """Opens an engine and grants its credits."""
        slot_bytes = tuple(sum(map(aligned, group)) for group in shards)
        ranks = (writers,) * len(shards)
        info = EngineInfo(name, namespace, slot_bytes, shards, ranks, persistent)
        self.store.open_engine(info)
        self.pump()
        return info

    def pump(self) -> list[StoreEvent]:
        """Pumps, and returns the events since the last time."""
        self.store.pump()
        events = self.store.take_events()
        self.events += events
        self.stamps += [self.clock.now] * len(events)
        return events

    def advance(self, seconds: float) -> list[StoreEvent]:
        """Advances the clock, and pumps at each ``next_wake``."""
        until = self.clock.now + seconds
        events = []
        while (wake := self.store.next_wake()) is not None and wake <= until:
            self.clock.now = max(self.clock.now, wake)
            events += self.pump()
        self.clock.now = until
        return events + self.pump()

    def settle(self, lanes: str = "") -> None:
        """Runs all I/O of these lanes until none is pending."""
        self.pump()
        while self.io.run_all(lanes):
            self.pump()

    def fill(self, chunks: int) -> None:
        """Stores chunks 0, 1, ..., and settles after each."""
        for chunk in range(chunks):
            self.put(chunk)
            self.settle()

    def credits(self, engine: str = "e", group: int = 0) -> list[int]:
        """Unused credits of the engine, from its own point of view."""
        granted = [
            slot
            for event in self.events
            if isinstance(event, CreditsGranted) and (event.engine, event.group) == (engine, group)
            for slot in event.slots
        ]
        for slot in self._used.get((engine, group), []):
            granted.remove(slot)
        return granted

    def number(self) -> int:
        """A fresh number for a reservation, load or promotion."""
        self._numbers += 1
        return self._numbers

    def reserve(
        self,
        chunk: int,
        engine: str = "e",
        group: int = 0,
        previous: int | None = None,
        owner: Owner = NO_OWNER,
    ) -> tuple[int, int]:
        """Reserves a chunk in the engine's next credit; returns reservation and slot.

        ``previous``: the chunk before it."""
        slot = self.credits(engine, group)[0]
        self._used.setdefault((engine, group), []).append(slot)
        number = self.number()
        before = b"" if previous is None else block_hash(previous)
        self.store.reserve(engine, number, ChunkId(group, block_hash(chunk), before), slot, owner)
        return number, slot

    def put(
        self,
        chunk: int,
        engine: str = "e",
        namespace: str = NAMESPACE,
        previous: int | None = None,
        owner: Owner = NO_OWNER,
    ) -> int:
        """Stores a chunk with one shard of one page, and returns its slot; credits are topped up
        afterwards."""
        number, slot = self.reserve(chunk, engine, previous=previous, owner=owner)
        key = b"\0" + block_hash(chunk)
        self.pool[slot : slot + PAGE] = shard_content(namespace, key, 0, PAGE)
        self.store.deliver(engine, 0, number)
        self.pump()
        return slot

    def put_prompt(self, *chunks: int, owner: Owner = NO_OWNER) -> None:
        """Stores the chunks of one prompt, runs all I/O and ends the evictions."""
        for previous, chunk in zip((None, *chunks), chunks, strict=False):
            self.put(chunk, previous=previous, owner=owner)
            self.settle()
            self.advance(0.11)

    def usable(self, *chunks: int) -> int:
        """How many chunks of a prompt are in RAM, up to the first one that is not."""
        return next((i for i, chunk in enumerate(chunks) if not self.bits(chunk) & 1), len(chunks))

    def promote(
        self, *chunks: int, budget: float = 5.0, engine: str = "e", owner: Owner = NO_OWNER
    ) -> int:
        """Starts a promotion of chunks; returns the promotion's number."""
        number = self.number()
        keys = [(0, block_hash(chunk)) for chunk in chunks]
        options = PromotionOptions(owner=owner)
        self.store.promote(engine, number, keys, budget, None, options)
        self.pump()
        return number

    def ends(self, promotion: int) -> list[PromotionEnded]:
        """The end events of a promotion so far."""
        return [
            e for e in self.events if isinstance(e, PromotionEnded) and e.promotion == promotion
        ]

    def load(self, *chunks: int, promotion: int = 0, engine: str = "e") -> PinnedLoad:
        """Loads chunks; returns what the store pinned."""
        number = self.number()
        keys = [(0, block_hash(chunk)) for chunk in chunks]
        pinned = self.store.load(engine, number, promotion, keys)
        self.pump()
        state = self.store._engines.get(engine)
        entries = [] if state is None else state.loads.get(number, [])
        assert len(entries) == pinned
        return PinnedLoad(number, tuple(entry.slot.offset for entry in entries))

    def word(self, offset: int) -> int:
        """The generation word of a slot, as an engine reads it."""
        return self.generations.cast("I")[offset // PAGE]

    def held(self, namespace: str) -> dict[bytes, int]:
        """Every key of a namespace with its bits, as schedulers are told."""
        return {key: bits for key, bits, _ in self.store.presence(namespace)}

    def put_in_tier(self, *chunks: int, tier: int = 0) -> None:
        """Puts chunks into a secondary tier."""
        for chunk in chunks:
            self.tiers[tier].put(NAMESPACE, b"\0" + block_hash(chunk), (PAGE,))
        self.pump()

    def calls(self, lane_prefix: str) -> list[ManualCall]:
        """Pending calls of these lanes."""
        return [call for call in self.io.pending if call.lane.startswith(lane_prefix)]

    def bits(self, chunk: int) -> int:
        return self.store._index.bits(NAMESPACE, b"\0" + block_hash(chunk))

    def counted(self, name: str, tier: str = "", reason: str | None = None) -> int:
        """A counter, summed over reasons if none is given."""
        values = self.counters.values.items()
        return sum(v for k, v in values if k[:2] == (name, tier) and reason in (None, k[2]))

    def eviction_notices(self) -> list[KeysEvicting]:
        return [e for e in self.events if isinstance(e, KeysEvicting)]

    def check_accounts(self) -> None:
        """Checks that the accounts add up to the pool."""
        accounts = self.store.accounts()
        parts = {
            name: getattr(accounts, name) for name in accounts.__slots__ if name != "pool_bytes"
        }
        assert min(parts.values()) >= 0, parts
        assert sum(parts.values()) == accounts.pool_bytes == len(self.pool), parts
