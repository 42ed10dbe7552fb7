"""TierStore against a model, for any interleaving of calls, I/O and time.

The model is an adversary within the contract. Engines write garbage into every slot that is theirs
until they are confirmed dead, hung reads write garbage into their slots until they return, and
workers of closed engines continue to read. Every announced slot must hold exactly the bytes of its
key.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.checked_order import check_order
from tests.unit.store.kept_objects import OWNERS, check_kept_objects
from tests.unit.store.store_fixture import (
    CHECKSUMS,
    PAGE,
    StoreFixture,
    WatchedTier,
    block_hash,
    live,
    object_bytes,
    object_meta,
    shard_content,
)

from kvtier.config.models import LiveTier, Selection, StorePolicy
from kvtier.errors import TierCorruptError, TierMissError, TierNoSpaceError, TierUnavailableError
from kvtier.store.cost_model import PrefixCost
from kvtier.store.executor import IoCall
from kvtier.store.generations import unpack_location
from kvtier.store.state import SlotState
from kvtier.store.types import (
    MEMORY_BIT,
    RAM_BITS,
    UNVERIFIED_BIT,
    ChunkId,
    CreditsGranted,
    EngineInfo,
    KeysEvicting,
    LoadExtended,
    Owner,
    PresenceChanged,
    PromotionArriving,
    PromotionEnded,
    PromotionOptions,
    PromotionOutcome,
    StoreEvent,
)
from kvtier.tiers.base import ObjectMeta, ObjectRef, aligned
from kvtier.tiers.pieces import views_of

pytestmark = pytest.mark.slow

CHUNKS = 12
SLOTS = 24
PREVIOUS = {1: 0, 2: 1, 3: 2, 4: 3, 5: 1, 6: 5, 8: 7, 10: 9, 11: 10}
"""The chunk before a chunk in its prompt."""


@dataclass(frozen=True, repr=False)
class Kind:
    """A geometry of engine; engines of one kind share a namespace."""

    namespace: str
    shards: tuple[tuple[int, ...], ...]
    writers: tuple[int, ...]
    persistent: bool

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(f"KINDS[{KINDS.index(self)}]")

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        return tuple(sum(map(aligned, group)) for group in self.shards)


KINDS = (
    Kind("a" * 32, ((64, 64),), (0, 1), True),
    Kind("b" * 32, ((100,), (9000,)), (0,), True),
    Kind("c" * 32, ((64, 64),), (0, 1), False),
)
NAMES = ("e0", "e1", "e2")
DISKS = ("d0", "d1", "d2")
PLACES = 4
"""Tiers and volumes that rules choose from; more than there are mean the last."""
FAILURES = {
    "ok": None,
    "unavailable": TierUnavailableError,
    "corrupt": TierCorruptError,
    "vanished": TierMissError,
    "full": TierNoSpaceError,
}


NOTHING_USABLE = (
    PromotionOutcome.ABSENT,
    PromotionOutcome.FAILED,
    PromotionOutcome.CANCELLED,
)


class CheckingTier(WatchedTier):
    """Refuses, as a failed test, to be given anything but the final bytes of the key with checksums
    over them. Other processes store in it without announcing it at once."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.unknown: set[ObjectRef] = set()

    @property
    def asks_on_miss(self) -> bool:
        return True

    def contains(self, ref: ObjectRef) -> bool:
        return ref not in self.unknown and super().contains(ref)

    def keys(self, namespace: str) -> Iterator[bytes]:
        known = list(super().keys(namespace))
        return iter([key for key in known if ObjectRef(namespace, key) not in self.unknown])

    def put_unannounced(self, namespace: str, key: bytes, shards: tuple[int, ...]) -> None:
        """Another process stores an object; its announcement is late."""
        ref = ObjectRef(namespace, key)
        if ref not in self.objects:
            self.unknown.add(ref)
            self.objects[ref] = (
                object_bytes(namespace, key, shards),
                object_meta(namespace, key, shards),
            )

    def learn(self) -> None:
        """The announcements of other processes arrive."""
        for ref in sorted(self.unknown, key=lambda ref: (ref.namespace, ref.key)):
            self._learn(ref)

    def _learn(self, ref: ObjectRef) -> None:
        if ref in self.unknown:
            self.unknown.discard(ref)
            if ref in self.objects:
                self._on_change(ref.namespace, ref.key, True)

    def probe(self, ref: ObjectRef) -> bool:
        self._act("probe")
        self._learn(ref)
        return super().probe(ref)

    def write(self, ref: ObjectRef, payload: memoryview, meta: ObjectMeta) -> None:
        offset = 0
        for rank, (size, checksum) in enumerate(zip(meta.shard_bytes, meta.checksums, strict=True)):
            data = payload[offset : offset + size]
            if (
                bytes(data) != shard_content(ref.namespace, ref.key, rank, size)
                or CHECKSUMS.digest(data) != checksum
            ):
                raise AssertionError(
                    "a lower tier was given bytes that are not the key's, or not sealed"
                )
            offset += aligned(size)
        self._learn(ref)
        super().write(ref, payload, meta)


@dataclass(repr=False)
class ModelEngine:
    """An engine as it sees itself. ``holds``: slots that it may write; ``reading``: loads that its
    ranks may read. ``part_bytes``: distance of its shards in a slot; 0: they are one range."""

    info: EngineInfo
    kind: Kind
    credits: list[list[int]]
    open: dict[int, tuple[int, int, bytes, set[int]]] = field(default_factory=dict)
    loads: dict[int, tuple[list[bytes], tuple[int, ...]]] = field(default_factory=dict)
    promotions: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)
    queued: list[int] = field(default_factory=list)
    gone_at: float | None = None
    part_bytes: int = 0

    def shard_offset(self, group: int, rank: int) -> int:
        """From the offset of a slot, as its rank was told."""
        if self.part_bytes:
            return rank * self.part_bytes
        return sum(map(aligned, self.kind.shards[group][:rank]))

    def ranges(self, group: int, slot: int) -> list[tuple[int, int]]:
        """(offset, size) of the bytes of a slot."""
        if not self.part_bytes:
            return [(slot, self.info.slot_bytes[group])]
        sizes = map(aligned, self.kind.shards[group])
        return [(slot + rank * self.part_bytes, size) for rank, size in enumerate(sizes)]

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.info.engine)

    def writable(self) -> list[tuple[int, int]]:
        """(offset, size) of every byte the engine may write at this moment."""
        found = [(g, slot) for g, slots in enumerate(self.credits) for slot in slots]
        ranks = len(self.kind.writers)
        found += [(g, slot) for g, slot, _, done in self.open.values() if len(done) < ranks]
        return [each for g, slot in found for each in self.ranges(g, slot)]


class Driver:
    """Applies operations given as plain values to one store, so that a sequence can be repeated on
    a second one."""

    def __init__(self, fenced: bool, eviction_policy: Literal["LRU", "ARC"], volumes: int) -> None:
        """``volumes``: of the tier "disk"; with one it is a single directory."""
        tiers = ("disk", "nfs")
        disks = {"disk": DISKS[:volumes]} if volumes > 1 else {}
        values = live(threshold=3, **{name: LiveTier(capacity_bytes=1 << 30) for name in tiers})
        self.fixture = StoreFixture(
            SLOTS,
            tiers,
            values,
            fenced,
            read_threads=3,
            tier_type=CheckingTier,
            eviction_policy=eviction_policy,
            volumes=disks,
        )
        check_order(self.fixture.store)
        self.measure_tiers()
        self.log: list[tuple[float, StoreEvent]] = []
        self.snapshot: dict[bytes, int] = {}
        self.part_bytes = 0
        """As the engine that opened last was told."""
        self.orphans: dict[str, list[memoryview]] = {}
        """Memory that threads of dead processes may still write into, by process."""

    def measure_tiers(self) -> None:
        """A few reads have been measured, so that the end of further ones is predicted."""
        for secondary in self.fixture.store._tiers.all:
            for _ in range(4):
                batch = secondary.model.begin(0.0)
                secondary.model.submitted(batch, PAGE)
                secondary.model.ended(batch, 0.001, PAGE, True)

    def apply(self, operation: tuple[Any, ...]) -> list[tuple[float, StoreEvent]]:
        """Applies one operation and returns its events with their times."""
        name, *arguments = operation
        before = len(self.fixture.events)
        getattr(self, name)(*arguments)
        self.fixture.pump()
        events = list(zip(self.fixture.stamps[before:], self.fixture.events[before:], strict=True))
        self.log += events
        return events

    def call(self, method: str, *arguments: Any) -> None:
        getattr(self.fixture.store, method)(*arguments)

    def open_engine(self, info: EngineInfo) -> None:
        store = self.fixture.store
        store.open_engine(info)
        self.part_bytes = store.layout.part_bytes if store.is_scattered(info.engine) else 0
        self.snapshot = self.fixture.held(info.namespace)

    def write(self, offset: int, data: bytes) -> None:
        self.fixture.pool[offset : offset + len(data)] = data

    def run_io(self, number: int) -> None:
        pending = self.fixture.io.pending
        if pending:
            call = pending[number % len(pending)]
            self.fixture.io.run(call)
            error = call.error
            if isinstance(error, AssertionError):
                raise error

    def run_lane(self, lane: str) -> None:
        for call in self.fixture.calls(lane):
            self.fixture.io.run(call)
            if isinstance(call.error, AssertionError):
                raise call.error

    def hang(self, number: int) -> None:
        waiting = [call for call in self.fixture.io.pending if not call.started]
        if waiting:
            self.fixture.io.hold(waiting[number % len(waiting)])

    def scribble(self, number: int) -> None:
        """A read in progress writes garbage into its slot."""
        memories = self.hung_reads()
        if memories:
            memory = memories[number % len(memories)]
            memory[:] = bytes([number % 251]) * len(memory)

    def hung_reads(self) -> list[memoryview]:
        """The memory of reads in progress."""
        found = []
        for call in self.fixture.io.pending:
            if call.started and call.lane.startswith("read:") and isinstance(call.call, IoCall):
                work = call.call.work
                if isinstance(work, partial) and call.call.started_at is not None:
                    found += views_of(work.args[-1])
        return found

    def tier_mode(self, tier: int, mode: str) -> None:
        failure = FAILURES[mode]
        self.place(tier).fail = None if failure is None else partial(failure, mode)

    def place(self, number: int) -> WatchedTier:
        """A tier, or a volume of one."""
        return self.fixture.tiers[min(number, len(self.fixture.tiers) - 1)]

    def tier_put(self, tier: int, namespace: str, key: bytes, shards: tuple[int, ...]) -> None:
        self.place(tier).put(namespace, key, shards)

    def tier_put_unannounced(
        self, tier: int, namespace: str, key: bytes, shards: tuple[int, ...]
    ) -> None:
        found = self.place(tier)
        if isinstance(found, CheckingTier):
            found.put_unannounced(namespace, key, shards)
        else:
            found.put(namespace, key, shards)

    def tier_learn(self, tier: int) -> None:
        found = self.place(tier)
        if isinstance(found, CheckingTier):
            found.learn()

    def tier_flip(self, tier: int, number: int) -> None:
        """One byte of one stored object flips."""
        objects = self.place(tier).objects
        if objects:
            ref = list(objects)[number % len(objects)]
            data, meta = objects[ref]
            position = number % meta.shard_bytes[0]
            flipped = bytes([data[position] ^ 1])
            objects[ref] = (data[:position] + flipped + data[position + 1 :], meta)

    def tier_drop(self, tier: int, number: int) -> None:
        objects = list(self.place(tier).objects)
        if objects:
            ref = objects[number % len(objects)]
            self.place(tier).drop(ref.namespace, ref.key)

    def configure(
        self,
        weights: tuple[int, int],
        policy: StorePolicy,
        selection: Selection,
        writes: tuple[int, int | None],
        shares: tuple[int, int] = (100, 20),
    ) -> None:
        pending, rate = writes
        tiers = {
            name: LiveTier(
                capacity_bytes=1 << 30,
                load_weight=weight,
                store_policy=policy,
                max_pending_store_bytes=pending,
                max_write_bytes_per_second=rate,
            )
            for name, weight in zip(("disk", "nfs"), weights, strict=True)
        }
        self.fixture.store.configure(live(selection, 3, shares=shares, **tiers))

    def advance(self, seconds: float) -> None:
        self.fixture.advance(seconds)

    def restart(self, pool_flip: int, table_flip: int, hung: str) -> None:
        fixture = self.fixture
        if hung and fixture.read_log.places:
            # Calls that have not started never start.
            self.orphans[hung] = self.hung_reads()
        sealed = [
            entry
            for entry in fixture.store._resident.entries()
            if entry.meta is not None or entry.unverified is not None
        ]
        if pool_flip and sealed:
            entry = sealed[pool_flip % len(sealed)]
            fixture.flip(entry.slot.offset + pool_flip % 64)
        if table_flip:
            fixture.damage_table(table_flip)
        fixture.restart(fenced=True, hung=hung)
        check_order(fixture.store)
        self.measure_tiers()

    def release_orphaned_reads(self, name: str) -> None:
        del self.orphans[name]
        self.fixture.release_orphaned_reads(name)

    def scribble_orphan(self, name: str, number: int) -> None:
        for memory in self.orphans[name]:
            memory[:] = bytes([number % 251]) * len(memory)


class StoreMachine(RuleBasedStateMachine):
    """The model and its rules. See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.driver: Driver
        self.operations: list[tuple[Any, ...]] = []
        self.engines: dict[str, ModelEngine] = {}
        self.vanished_engines: list[ModelEngine] = []
        self.replicas: dict[str, dict[bytes, int]] = {}
        self.tokens: list[int] = []
        self.deadlines: dict[tuple[str, int], float] = {}
        self.ended: set[tuple[str, int]] = set()
        self.lookups: set[tuple[str, int]] = set()
        self.arriving: dict[tuple[str, int], list[int]] = {}
        """Locations that were named before the end of a promotion."""
        self.numbers = 0
        self.fenced = self.began_fenced = False
        self.eviction_policy: Literal["LRU", "ARC"] = "LRU"
        self.volumes = 1

    # Machinery.

    def do(self, *operation: Any) -> None:
        self.operations.append(operation)
        for at, event in self.driver.apply(operation):
            self.see(at, event)

    @property
    def now(self) -> float:
        return self.driver.fixture.clock.now

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def chunk_id(self, group: int, chunk: int) -> ChunkId:
        """A chunk of a few prompts that share beginnings: 0-1-2-3-4, 0-1-5-6, 7-8, 9-10-11."""
        before = PREVIOUS.get(chunk)
        return ChunkId(group, block_hash(chunk), b"" if before is None else block_hash(before))

    def in_use(self) -> list[tuple[int, int, str]]:
        """Ranges that an engine or a read may be writing, independent of the store's view."""
        found = [
            (o, n, f"{e.info.engine} writes")
            for e in [*self.engines.values(), *self.vanished_engines]
            for o, n in e.writable()
        ]
        base = memoryview(self.driver.fixture.pool)
        memories = [
            *self.driver.hung_reads(),
            *(m for orphan in self.driver.orphans.values() for m in orphan),
        ]
        return found + [(_offset(base, memory), len(memory), "hung read") for memory in memories]

    def see(self, at: float, event: StoreEvent) -> None:
        if isinstance(event, CreditsGranted):
            assert not self.fenced, "granted while fenced"
            engine = self.engines[event.engine]
            for slot in event.slots:
                for offset, size in engine.ranges(event.group, slot):
                    self.assert_unused(offset, size, "granted")
                    assert not self.being_read(offset, size), "granted while a worker may read it"
                engine.credits[event.group].append(slot)
        elif isinstance(event, PresenceChanged):
            replica = self.replicas[event.namespace]
            bits = replica.get(event.key, 0)
            replica[event.key] = bits | event.bits if event.present else bits & ~event.bits
        elif isinstance(event, KeysEvicting):
            assert not self.fenced, "evicted while fenced"
            for key in event.keys:
                self.replicas[event.namespace][key] &= ~RAM_BITS
            self.tokens.append(event.token)
        elif isinstance(event, PromotionArriving):
            name = (event.engine, event.promotion)
            assert name not in self.ended, "something arrives after the end"
            named = self.arriving.setdefault(name, [])
            assert event.first == len(named)
            named += event.locations
            assert 0 < len(named) <= event.predicted
            if event.engine in self.engines:
                engine = self.engines[event.engine]
                keys = [bytes((g,)) + h for g, h in engine.promotions[event.promotion]]
                slots = tuple(unpack_location(location)[0] for location in named)
                self.check_bytes(engine, keys, slots)
        elif isinstance(event, LoadExtended):
            engine = self.engines[event.engine]
            entries = self.driver.fixture.store._engines.open[event.engine].loads[event.load]
            assert len(entries) == event.keys >= len(engine.loads[event.load][0])
            keys = [entry.key for entry in entries]
            assert keys[: len(engine.loads[event.load][0])] == engine.loads[event.load][0]
            engine.loads[event.load] = (keys, tuple(entry.slot.offset for entry in entries))
            self.check_load(engine, event.load)
        elif isinstance(event, PromotionEnded):
            name = (event.engine, event.promotion)
            named = self.arriving.pop(name, [])
            if event.outcome is not PromotionOutcome.CANCELLED:
                assert list(event.locations[: len(named)]) == named, "named, but not there"
            assert name not in self.ended, "a promotion ended twice"
            self.ended.add(name)
            assert at <= self.deadlines.pop(name) + 0.1, "a promotion ended too late"
            engine = self.engines.get(event.engine)
            if engine is not None:
                keys = engine.promotions[event.promotion]
                whole = event.outcome is PromotionOutcome.WHOLE
                if name in self.lookups:
                    # What is not found is not part of the promotion.
                    assert not whole or event.usable > 0
                else:
                    assert whole == (event.usable == len(keys) > 0)
                assert (event.outcome in NOTHING_USABLE) == (event.usable == 0)
                assert len(event.tiers) == len(event.locations) == event.usable
                for location in event.locations:
                    offset, generation = unpack_location(location)
                    assert self.driver.fixture.word(offset) == generation, "pinned, yet reused"

    def check_load(self, engine: ModelEngine, load: int) -> None:
        """Checks that pinned slots hold their keys' bytes, and that nothing writes there."""
        self.check_bytes(engine, *engine.loads[load])

    def check_bytes(self, engine: ModelEngine, keys: list[bytes], slots: tuple[int, ...]) -> None:
        for key, slot in zip(keys, slots, strict=False):
            shards = engine.kind.shards[key[0]]
            for offset, size in engine.ranges(key[0], slot):
                self.assert_unused(offset, size, "pinned")
            for rank, length in enumerate(shards):
                offset = slot + engine.shard_offset(key[0], rank)
                content = bytes(self.driver.fixture.pool[offset : offset + length])
                assert content == shard_content(engine.kind.namespace, key, rank, length), (
                    "a load has wrong bytes"
                )

    def assert_unused(self, offset: int, size: int, what: str) -> None:
        for other, other_size, reason in self.in_use():
            assert offset + size <= other or other + other_size <= offset, f"{what}, but {reason}"

    def being_read(self, offset: int, size: int) -> bool:
        for engine in [*self.engines.values(), *self.vanished_engines]:
            for keys, slots in engine.loads.values():
                for key, slot in zip(keys, slots, strict=False):
                    for start, length in engine.ranges(key[0], slot):
                        if offset < start + length and start < offset + size:
                            return True
        return False

    # Rules.

    @initialize(
        fenced=st.sampled_from((False, False, False, True)),
        kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=len(NAMES)),
        held=st.tuples(st.integers(0, CHUNKS), st.integers(0, CHUNKS)),
        eviction_policy=st.sampled_from(("LRU", "ARC")),
        volumes=st.sampled_from((1, 2, 3)),
        parts=st.booleans(),
    )
    def begin(
        self,
        fenced: bool,
        kinds: list[Kind],
        held: tuple[int, int],
        eviction_policy: Literal["LRU", "ARC"],
        volumes: int,
        parts: bool,
    ) -> None:
        """Opens some engines; the tiers hold a few prefixes. ``parts``: engines with two ranks can
        have one part of the pool for each."""
        self.parts = parts
        self.fenced = self.began_fenced = fenced
        self.eviction_policy, self.volumes = eviction_policy, volumes
        self.driver = Driver(fenced, eviction_policy, volumes)
        for tier, chunks in enumerate(held):
            for kind in KINDS[:2]:
                for chunk in range(chunks):
                    for group, shards in enumerate(kind.shards):
                        key = bytes((group,)) + block_hash(chunk)
                        self.do("tier_put", tier, kind.namespace, key, shards)
        for name, kind in zip(NAMES, kinds, strict=False):
            self.open_engine(name, kind)

    @precondition(lambda self: self.fenced)
    @rule()
    def unfence(self) -> None:
        self.fenced = False
        self.vanished_engines.clear()
        self.do("call", "unfence")

    @rule(
        pool_flip=st.sampled_from((0, 0, *range(1, 50))),
        table_flip=st.sampled_from((0, 0, 0, 0, 10, *range(4096, 6000, 77))),
        sealed=st.booleans(),
        resumed=st.booleans(),
        hangs=st.booleans(),
    )
    def restart(
        self, pool_flip: int, table_flip: int, sealed: bool, resumed: bool, hangs: bool
    ) -> None:
        """tierd is killed, and another one takes over; a bit of the pool and one of its table may
        have flipped meanwhile.

        Workers go on writing and reading until they have drained, and that is when the new one's
        fence opens. With ``hangs`` the old one's reads go on as well, for as long as the kernel
        keeps them.
        """
        if sealed:
            self.do("run_lane", "hash")
        engines = list(self.engines.values())
        for engine in engines:
            self.vanished_engines.append(engine)
        for vanished in self.vanished_engines:
            vanished.gone_at = None
        self.engines.clear()
        self.replicas.clear()
        self.tokens.clear()
        self.deadlines.clear()
        self.fenced = True
        self.do("restart", pool_flip, table_flip, f"life {self.number()}" if hangs else "")
        if resumed:
            self.unfence()
            for engine in engines:
                self.open_engine(engine.info.engine, engine.kind)
            for engine in list(self.engines.values()):
                kept = sorted(
                    key
                    for key, bits in self.replicas[engine.kind.namespace].items()
                    if bits & UNVERIFIED_BIT
                )
                self.promote_keys(engine, kept[:5], 3.0)
            self.do("run_lane", "verify")

    @precondition(lambda self: self.driver.orphans)
    @rule(number=st.integers(0, 1000), over=st.booleans())
    def a_hung_thread_returns(self, number: int, over: bool) -> None:
        name = next(iter(self.driver.orphans))
        self.do("scribble_orphan", name, number)
        if over:
            self.do("release_orphaned_reads", name)

    @rule(name=st.sampled_from(NAMES), kind=st.sampled_from(KINDS))
    def open_engine(self, name: str, kind: Kind) -> None:
        if name in self.engines:
            return
        ranks = (kind.writers,) * len(kind.shards)
        info = EngineInfo(
            name,
            kind.namespace,
            kind.slot_bytes,
            kind.shards,
            ranks,
            kind.persistent,
            len(kind.writers) if self.parts else 1,
        )
        self.engines[name] = ModelEngine(info, kind, [[] for _ in kind.shards])
        self.operations.append(("open_engine", info))
        events = self.driver.apply(self.operations[-1])
        self.engines[name].part_bytes = self.driver.part_bytes
        # Older replicas of the namespace equal the snapshot: a check for free.
        assert (
            self.replicas.get(kind.namespace, self.driver.snapshot).items()
            >= self.driver.snapshot.items()
        )
        self.replicas[kind.namespace] = self.driver.snapshot
        for at, event in events:
            self.see(at, event)

    @rule(name=st.sampled_from(NAMES), proven=st.booleans())
    def close_engine(self, name: str, proven: bool) -> None:
        engine = self.engines.pop(name, None)
        if engine is None:
            return
        if not proven:
            engine.gone_at = self.now
            self.vanished_engines.append(engine)
        self.do("call", "close_engine", name, proven)
        if not any(other.kind is engine.kind for other in self.engines.values()):
            del self.replicas[engine.kind.namespace]

    @rule(name=st.sampled_from(NAMES))
    def confirm_dead(self, name: str) -> None:
        self.vanished_engines = [
            vanished for vanished in self.vanished_engines if vanished.info.engine != name
        ]
        self.do("call", "confirm_engine_dead", name)

    @precondition(lambda self: self.engines)
    @rule(
        data=st.data(),
        chunks=st.lists(st.integers(0, CHUNKS - 1), min_size=1, max_size=4, unique=True),
        worker_first=st.booleans(),
        owner=st.sampled_from(OWNERS),
    )
    def reserve(
        self, data: st.DataObject, chunks: list[int], worker_first: bool, owner: Owner
    ) -> None:
        """Chunks are reserved in granted slots; the worker's word may come before the
        scheduler's."""
        engine = data.draw(st.sampled_from(list(self.engines.values())))
        group = data.draw(st.integers(0, len(engine.kind.shards) - 1))
        for chunk in chunks:
            if not engine.credits[group]:
                return
            slot = engine.credits[group].pop(0)
            number = self.number()
            engine.open[number] = (group, slot, bytes((group,)) + block_hash(chunk), set())
            if worker_first:
                self.answer_rank(engine, number, engine.kind.writers[0], True)
            name, chunk_id = engine.info.engine, self.chunk_id(group, chunk)
            self.do("call", "reserve", name, number, chunk_id, slot, owner)
            if len(engine.open[number][3]) == len(engine.kind.writers):
                del engine.open[number]

    @precondition(lambda self: self.engines)
    @rule(
        data=st.data(),
        start=st.sampled_from((0, 0, 4, 8)),
        chunks=st.integers(1, 5),
        owners=st.lists(st.sampled_from(OWNERS), min_size=1, max_size=3),
    )
    def store_prefix(
        self, data: st.DataObject, start: int, chunks: int, owners: list[Owner]
    ) -> None:
        """A prefix is stored as far as credits go, without anything going wrong. Requests of
        several tenants may share it."""
        engine = data.draw(st.sampled_from(list(self.engines.values())))
        for number, chunk in enumerate(range(start, start + chunks)):
            self.store_chunk(engine, chunk, owners[number % len(owners)])

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), rounds=st.integers(1, 20), owner=st.sampled_from(OWNERS))
    def churn(self, data: st.DataObject, rounds: int, owner: Owner) -> None:
        """Further chunks evict objects that are not pinned."""
        engine = data.draw(st.sampled_from(list(self.engines.values())))
        for _ in range(rounds):
            self.store_chunk(engine, 1000 + self.number(), owner)
            self.do("run_lane", "hash")
            self.do("advance", 0.11)

    def store_chunk(self, engine: ModelEngine, chunk: int, owner: Owner) -> None:
        for group in range(len(engine.kind.shards)):
            if engine.credits[group]:
                slot, number = engine.credits[group].pop(0), self.number()
                engine.open[number] = (group, slot, bytes((group,)) + block_hash(chunk), set())
                name, chunk_id = engine.info.engine, self.chunk_id(group, chunk)
                self.do("call", "reserve", name, number, chunk_id, slot, owner)
                for rank in engine.kind.writers:
                    self.answer_rank(engine, number, rank, True)
                del engine.open[number]

    @precondition(lambda self: any(engine.open for engine in self.engines.values()))
    @rule(data=st.data(), delivered=st.sampled_from((True, True, True, False)))
    def answer(self, data: st.DataObject, delivered: bool) -> None:
        engine = data.draw(st.sampled_from([e for e in self.engines.values() if e.open]))
        number = data.draw(st.sampled_from(list(engine.open)))
        rank = data.draw(
            st.sampled_from([r for r in engine.kind.writers if r not in engine.open[number][3]])
        )
        self.answer_rank(engine, number, rank, delivered)
        if len(engine.open[number][3]) == len(engine.kind.writers):
            del engine.open[number]

    def answer_rank(self, engine: ModelEngine, number: int, rank: int, delivered: bool) -> None:
        """One rank writes its shard and says so, or says that it will not. By then it is through
        with the slot."""
        group, slot, key, answered = engine.open[number]
        shards = engine.kind.shards[group]
        if delivered:
            offset = slot + engine.shard_offset(group, rank)
            self.do("write", offset, shard_content(engine.kind.namespace, key, rank, shards[rank]))
        answered.add(rank)
        self.do("call", "deliver" if delivered else "abort", engine.info.engine, rank, number)

    @rule(number=st.integers(0, 1000))
    def scribble_own(self, number: int) -> None:
        """An engine writes garbage into a slot of its own: a credit, or one it is through with on
        no rank yet."""
        found = []
        for engine in [*self.engines.values(), *self.vanished_engines]:
            for group, slots in enumerate(engine.credits):
                found += [each for slot in slots for each in engine.ranges(group, slot)]
            for group, slot, _, answered in engine.open.values():
                if not answered or engine.gone_at is not None:
                    found += engine.ranges(group, slot)
        if found:
            slot, size = found[number % len(found)]
            self.do("write", slot, hashlib.sha256(b"garbage%d" % number).digest() * (size // 32))

    @rule(number=st.integers(0, 1000))
    def scribble_read(self, number: int) -> None:
        self.do("scribble", number)

    @precondition(lambda self: self.engines)
    @rule(
        data=st.data(),
        start=st.sampled_from((0, 0, 0, 5)),
        length=st.integers(0, 6),
        budget=st.sampled_from((0.0, 0.05, 0.5, 3.0, 20.0)),
    )
    def promote(self, data: st.DataObject, start: int, length: int, budget: float) -> None:
        engine = data.draw(st.sampled_from(list(self.engines.values())))
        groups = len(engine.kind.shards)
        keys = [(i % groups, block_hash(start + i // groups)) for i in range(length)]
        number = self.number()
        engine.promotions[number] = keys
        self.deadlines[engine.info.engine, number] = self.now + budget
        options = PromotionOptions(data.draw(st.booleans()), data.draw(st.sampled_from(OWNERS)))
        if options.look_up:
            self.lookups.add((engine.info.engine, number))
        cost = None
        if data.draw(st.booleans()):
            ends = tuple(range(256, 256 * (length + 1), 256))
            cost = PrefixCost(0, ends, copy_seconds=data.draw(st.sampled_from((0.0, 1e-6, 1e3))))
        self.do("call", "promote", engine.info.engine, number, keys, budget, cost, options)

    @precondition(lambda self: self.engines)
    @rule(
        data=st.data(),
        start=st.sampled_from((0, 0, 4)),
        length=st.integers(1, 6),
        owner=st.sampled_from([owner for owner in OWNERS if owner.keeps]),
    )
    def keep(self, data: st.DataObject, start: int, length: int, owner: Owner) -> None:
        engine = data.draw(st.sampled_from(list(self.engines.values())))
        keys = [(0, block_hash(chunk)) for chunk in range(start, start + length)]
        self.do("call", "keep", engine.info.engine, keys, owner)

    @precondition(lambda self: any(engine.promotions for engine in self.engines.values()))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        engine = data.draw(st.sampled_from([e for e in self.engines.values() if e.promotions]))
        number = data.draw(st.sampled_from(list(engine.promotions)))
        self.do("call", "cancel", engine.info.engine, number)

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), start=st.sampled_from((0, 0, 0, 5)), length=st.integers(0, 6))
    def load(self, data: st.DataObject, start: int, length: int) -> None:
        engine = data.draw(st.sampled_from(list(self.engines.values())))
        promotion = data.draw(st.sampled_from([0, *engine.promotions])) if engine.promotions else 0
        groups = len(engine.kind.shards)
        keys = [(i % groups, block_hash(start + i // groups)) for i in range(length)]
        if promotion:
            keys = engine.promotions[promotion]
        self.begin_load(engine, promotion, keys)

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), chunks=st.lists(st.integers(0, CHUNKS - 1), max_size=2))
    def queue_request(self, data: st.DataObject, chunks: list[int]) -> None:
        engine = data.draw(st.sampled_from(list(self.engines.values())))
        known = data.draw(st.sampled_from([0, *engine.queued]))
        number = known or self.number()
        engine.queued.append(number)
        groups = len(engine.kind.shards)
        keys = [(i % groups, block_hash(chunk)) for i, chunk in enumerate(chunks)]
        self.do("call", "queue", engine.info.engine, number, keys)
        if data.draw(st.booleans()):
            more = [(i % groups, block_hash(i // groups)) for i in range(4)]
            prefetch = self.number()
            engine.queued.append(prefetch)
            self.do("call", "prefetch", engine.info.engine, prefetch, more, OWNERS[0], number)

    @precondition(lambda self: any(engine.queued for engine in self.engines.values()))
    @rule(data=st.data())
    def request_leaves_the_queue(self, data: st.DataObject) -> None:
        engine = data.draw(st.sampled_from([e for e in self.engines.values() if e.queued]))
        number = data.draw(st.sampled_from(engine.queued))
        engine.queued = [each for each in engine.queued if each != number]
        self.do("call", "cancel", engine.info.engine, number)

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def load_what_is_there(self, data: st.DataObject) -> None:
        engine = data.draw(st.sampled_from(list(self.engines.values())))
        held = sorted(key for key, bits in self.replicas[engine.kind.namespace].items() if bits & 1)
        if held:
            keys = data.draw(st.lists(st.sampled_from(held), min_size=1, max_size=4, unique=True))
            self.begin_load(engine, 0, [(key[0], key[1:]) for key in keys])

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), budget=st.sampled_from((0.0, 0.5, 3.0)), verified=st.booleans())
    def promote_what_was_kept(self, data: st.DataObject, budget: float, verified: bool) -> None:
        engine = data.draw(st.sampled_from(list(self.engines.values())))
        kept = sorted(
            key
            for key, bits in self.replicas[engine.kind.namespace].items()
            if bits & UNVERIFIED_BIT
        )
        if kept:
            self.promote_keys(
                engine, data.draw(st.lists(st.sampled_from(kept), min_size=1, max_size=4)), budget
            )
            if verified:
                self.do("run_lane", "verify")

    def promote_keys(self, engine: ModelEngine, keys: list[bytes], budget: float) -> None:
        number = self.number()
        engine.promotions[number] = [(key[0], key[1:]) for key in keys]
        self.deadlines[engine.info.engine, number] = self.now + budget
        self.do("call", "promote", engine.info.engine, number, engine.promotions[number], budget)

    def begin_load(
        self, engine: ModelEngine, promotion: int, keys: list[tuple[int, bytes]]
    ) -> None:
        number = self.number()
        owner = OWNERS[number % len(OWNERS)]
        self.do("call", "load", engine.info.engine, number, promotion, keys, owner)
        state = self.driver.fixture.store._engines.get(engine.info.engine)
        entries = state.loads.get(number, []) if state is not None else []
        named = [bytes((g,)) + h for g, h in keys]
        assert [entry.key for entry in entries] == named[: len(entries)]
        assert not any(0 < entry.expires_at <= self.now for entry in entries), "loads the expired"
        slots = tuple(entry.slot.offset for entry in entries)
        engine.loads[number] = (named[: len(slots)], slots)
        self.check_load(engine, number)

    @precondition(lambda self: any(engine.loads for engine in self.engines.values()))
    @rule(data=st.data())
    def loaded(self, data: st.DataObject) -> None:
        engine = data.draw(st.sampled_from([e for e in self.engines.values() if e.loads]))
        number = data.draw(st.sampled_from(list(engine.loads)))
        self.check_load(engine, number)
        del engine.loads[number]
        self.do("call", "release_load", engine.info.engine, number)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def left(self, data: st.DataObject) -> None:
        self.do("call", "acknowledge_eviction", data.draw(st.sampled_from(self.tokens)))

    @rule(number=st.integers(0, 1000))
    def run_io(self, number: int) -> None:
        self.do("run_io", number)

    @rule(lane=st.sampled_from(("read:", "write:", "hash", "verify", "check:", "maintain:", "")))
    def run_lane(self, lane: str) -> None:
        self.do("run_lane", lane)

    @rule(number=st.integers(0, 1000))
    def hang(self, number: int) -> None:
        self.do("hang", number)

    @rule(tier=st.integers(0, PLACES - 1), mode=st.sampled_from(("ok", "ok", "ok", *FAILURES)))
    def tier_mode(self, tier: int, mode: str) -> None:
        self.do("tier_mode", tier, mode)

    @rule(
        tier=st.integers(0, PLACES - 1),
        kind=st.sampled_from(KINDS[:2]),
        chunk=st.integers(0, CHUNKS - 1),
        group=st.integers(0, 1),
        announced=st.booleans(),
    )
    def stored_elsewhere(
        self, tier: int, kind: Kind, chunk: int, group: int, announced: bool
    ) -> None:
        group %= len(kind.shards)
        self.do(
            "tier_put" if announced else "tier_put_unannounced",
            tier,
            kind.namespace,
            bytes((group,)) + block_hash(chunk),
            kind.shards[group],
        )

    @rule(tier=st.integers(0, 1))
    def announcements_arrive(self, tier: int) -> None:
        self.do("tier_learn", tier)

    @rule(tier=st.integers(0, PLACES - 1), number=st.integers(0, 1000))
    def flip(self, tier: int, number: int) -> None:
        self.do("tier_flip", tier, number)

    @rule(tier=st.integers(0, PLACES - 1), number=st.integers(0, 1000))
    def tier_evicts(self, tier: int, number: int) -> None:
        self.do("tier_drop", tier, number)

    @rule(
        weights=st.tuples(st.integers(1, 200), st.integers(1, 200)),
        policy=st.sampled_from(StorePolicy),
        selection=st.sampled_from(Selection),
        pending=st.sampled_from((0, 3 * PAGE, 1 << 30)),
        rate=st.sampled_from((None, None, 2 * PAGE)),
        shares=st.tuples(st.sampled_from((100, 50, 20, 5)), st.sampled_from((80, 50, 20, 0))),
    )
    def configure(
        self,
        weights: tuple[int, int],
        policy: StorePolicy,
        selection: Selection,
        pending: int,
        rate: int | None,
        shares: tuple[int, int],
    ) -> None:
        self.do("configure", weights, policy, selection, (pending, rate), shares)

    @rule(seconds=st.sampled_from((0.001, 0.04, 0.11, 0.7, 4.0, 31.0, 61.0)))
    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        # A vanished engine stops writing once its exit is confirmed. From then on the store may
        # reuse its slots.
        self.vanished_engines = [
            engine
            for engine in self.vanished_engines
            if engine.gone_at is None or until < engine.gone_at + 60.0
        ]
        self.do("advance", seconds)

    @rule(
        what=st.sampled_from(("deliver", "loaded", "cancel", "left", "reserve", "engine", "load")),
        name=st.sampled_from(NAMES),
        slot=st.integers(0, SLOTS - 1),
    )
    def violate(self, what: str, name: str, slot: int) -> None:
        """A client that violates the protocol has no effect on others."""
        number = self.number()
        if what == "deliver":
            self.do("call", "deliver", name, 7, number)
        elif what == "loaded":
            self.do("call", "release_load", name, number)
        elif what == "cancel":
            self.do("call", "cancel", name, number)
        elif what == "left":
            self.do("call", "acknowledge_eviction", number + 1_000_000)
        elif what == "engine":
            self.do("call", "deliver", "unknown", 0, number)
        elif what == "load" and name in self.engines:
            self.do("call", "load", name, number, 0, [(9, block_hash(0))])
            self.do("call", "release_load", name, number)
        elif (
            what == "reserve"
            and name in self.engines
            and not any(slot * PAGE in credits for credits in self.engines[name].credits)
        ):
            self.do("call", "reserve", name, number, ChunkId(0, block_hash(0)), slot * PAGE)

    # What always holds.

    @invariant()
    def accounts_add_up(self) -> None:
        fixture = self.driver.fixture
        fixture.check_accounts()
        accounts = fixture.store.accounts()
        sizes = dict.fromkeys(SlotState, 0)
        ranges = []
        for slot in fixture.store._pool.slots():
            size = slot.segment.kind.slot_bytes
            sizes[slot.state] += size
            row, step = slot.segment.kind.row_bytes, slot.segment.kind.part_bytes
            pieces = range(slot.segment.kind.pieces)
            ranges += [(slot.offset + piece * step, row) for piece in pieces]
            assert (slot.entry is not None) == (
                slot.state in (SlotState.COMMITTED, SlotState.EVICTING)
            )
        for state in (s for s in SlotState if s is not SlotState.FREE):
            assert sizes[state] == getattr(accounts, state.name.lower()), state
        noted = {
            e.slot.offset
            for e in fixture.store._resident.entries()
            if e.persistent and (e.meta or e.unverified)
        }
        assert self.fenced or set(fixture.table._numbers) == noted, (
            "the slot table is not what is sealed"
        )
        ranges.sort()
        assert all(a + size <= b for (a, size), (b, _) in pairwise(ranges)), "slots overlap"

    @invariant()
    def tenants_pins_and_expired_objects_are_within_bounds(self) -> None:
        check_kept_objects(self.driver.fixture.store, self.now)

    @invariant()
    def the_order_knows_what_queued_requests_wait_for(self) -> None:
        store = self.driver.fixture.store
        awaited: dict[tuple[str, bytes], int] = {}
        for request in store._queued._requests.values():
            for key in request.keys.values():
                name = request.namespace, key
                awaited[name] = min(awaited.get(name, request.rank), request.rank)
        keys = store._queued._awaited
        assert {name: keys.rank_of(*name) for name in keys._ranks} == awaited
        for order in store._resident._orders.values():
            known = order._awaited  # type: ignore[attr-defined]
            for entry in order._parked:  # type: ignore[attr-defined]
                name = entry.namespace, entry.key
                assert known.get(entry, 0) == awaited.get(name, 0), name

    @invariant()
    def no_write_overlaps_a_slot_that_a_worker_may_read(self) -> None:
        for offset, size, reason in self.in_use():
            assert not self.being_read(offset, size), reason

    @invariant()
    def no_promotion_is_overdue(self) -> None:
        assert all(self.now <= deadline + 0.1 for deadline in self.deadlines.values())

    @invariant()
    def replicas_know_what_the_store_holds(self) -> None:
        store = self.driver.fixture.store
        if len(store._index.changes):
            return
        for namespace, replica in self.replicas.items():
            held = self.driver.fixture.held(namespace)
            self.check_locations(namespace)
            for key in held.keys() | replica.keys():
                assert replica.get(key, 0) == held.get(key, 0), (
                    namespace[0],
                    key[:3],
                    replica.get(key),
                    held.get(key),
                )
                entry = store._resident.get(namespace, key)
                ram = entry.bit if entry is not None and not entry.evicting else 0
                assert held.get(key, 0) & RAM_BITS == ram

    def check_locations(self, namespace: str) -> None:
        """What schedulers are told is in RAM has its generation, and no process may write there."""
        for key, bits, location in self.driver.fixture.store.presence(namespace):
            assert bool(location) == bool(bits & MEMORY_BIT)
            if location:
                offset, generation = unpack_location(location)
                assert self.driver.fixture.word(offset) == generation, (namespace[0], key[:3])
        for offset, _, reason in self.in_use():
            assert self.driver.fixture.word(offset) & 1, f"even, but {reason}"

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.wind_down()
        again = Driver(self.began_fenced, self.eviction_policy, self.volumes)
        for operation in self.operations:
            again.apply(operation)
        assert again.log == self.driver.log, "the same inputs gave different events"

    def longest_run_without_credits(self) -> int:
        """Bytes in one piece that no engine was given, of each part of the pool alike."""
        rows = self.driver.fixture.store.layout.part_bytes // PAGE
        pages = [True] * rows
        for offset, size, _ in self.in_use():
            for page in range(offset // PAGE, (offset + size) // PAGE):
                pages[page % rows] = False
        return max(len(run) for run in "".join(".x"[free] for free in pages).split(".")) * PAGE

    def wind_down(self) -> None:
        """Ends every operation, then checks that nothing is pinned."""
        for tier in range(PLACES):
            self.do("tier_mode", tier, "ok")
        self.do("configure", (1, 1), StorePolicy.ALL, Selection.COST, (1 << 30, None))
        if self.fenced:
            self.unfence()
        for engine in list(self.engines.values()):
            for number in list(engine.loads):
                self.check_load(engine, number)
                del engine.loads[number]
                self.do("call", "release_load", engine.info.engine, number)
            for number, (_, _, _, answered) in list(engine.open.items()):
                del engine.open[number]
                for rank in engine.kind.writers:
                    if rank not in answered:
                        self.do("call", "abort", engine.info.engine, rank, number)
        self.vanished_engines = []
        for name in list(self.driver.orphans):
            self.do("release_orphaned_reads", name)
        for name in NAMES:
            self.do("call", "confirm_engine_dead", name)
        for _ in range(60):
            self.do("run_lane", "")
            self.do("advance", 5.0)
        fixture = self.driver.fixture
        self.check_files_hold_what_ram_holds()
        assert not self.deadlines, "a promotion never ended"
        assert fixture.store.pending_stores() == 0
        assert fixture.store.pinned_bytes == 0
        accounts = fixture.store.accounts()
        assert (
            accounts.reading == accounts.reserved == accounts.quarantined == accounts.evicting == 0
        )
        for engine in self.engines.values():
            for group, credits in enumerate(engine.credits):
                state = fixture.store._engines.open[engine.info.engine]
                kind = state.geometries[group].kind
                if not credits and not kind.segments:
                    room = self.longest_run_without_credits()
                    assert room < kind.row_bytes, f"{engine.info.engine} starves in an idle store"
        for name in list(self.engines):
            self.close_engine(name, True)
        assert len(fixture.store._queued) == 0
        accounts = fixture.store.accounts()
        assert accounts.granted == 0
        assert (
            accounts.free + accounts.committed + accounts.evicting + accounts.unusable
            == accounts.pool_bytes
        )

    def check_files_hold_what_ram_holds(self) -> None:
        """In an idle store whose tiers work, files hold what RAM holds: no backlog and no failed
        volume keeps anything from them. (What was read from one tier is not written to another one
        before its next use. What a request limits to RAM is written nowhere.)"""
        store = self.driver.fixture.store
        for entry in store._resident.entries():
            if not entry.persistent or entry.meta is None:
                continue
            if entry.tiers and not any(entry.tiers & each.bit for each in store._tiers.groups):
                continue
            holders = [
                group.holder(entry.namespace, entry.key, self.now)
                for group in store._tiers.groups
                if group.tier.contains(entry.ref)
            ]
            assert any(holders), "no usable tier or volume holds what RAM holds"


def _offset(base: memoryview, part: memoryview) -> int:
    """Where ``part`` begins in ``base``."""

    def address(view: memoryview) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))

    return address(part) - address(base)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
