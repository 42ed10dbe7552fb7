"""tierd and the workers of an ATOM engine, in one process and in steps that a test chooses.

``SimulatedTierd`` speaks the scheduler's side of the protocol. ``SimulatedRanks`` executes jobs
against the stand-in's KV, one chunk at a time and in any order, so that blocks that are given away
too early are overwritten while they are copied. Both record what must never happen in
``violations``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from kvtier.config.models import (
    FileSystemTierDocument,
    Live,
    LiveTier,
    MemoryTierDocument,
    PolicyIdentity,
    Selection,
    Structural,
    Topology,
)
from kvtier.engines.atom.metadata import AtomCancel, AtomLoad, AtomSave, AtomStepMetadata
from kvtier.engines.atom.scheduler import AtomLimits, AtomScheduler
from kvtier.engines.atom.types import KVConnectorOutput
from kvtier.engines.common.model_identity import EngineIdentity
from kvtier.engines.common.tierd_session import TierdSession
from kvtier.planner import GroupKind, KVCacheGroup, Planner
from kvtier.store.generations import pack_location
from kvtier.testing.atom_blocks import StandInBlocks
from kvtier.testing.atom_engine import Cells, cells_of
from kvtier.tierd.wire import (
    PROTOCOL,
    Cancel,
    Credits,
    Delta,
    EvictionAck,
    EvictionNotice,
    Heartbeat,
    Hello,
    Load,
    LoadReleased,
    Message,
    Promote,
    Promoted,
    Ready,
    Reserve,
    Welcome,
)

RAM, DISK = 1, 2
Shards = tuple[Cells, ...]
SLOT_BYTES = 4096


def topology(min_load_tokens: int, selection: Selection = Selection.COST) -> Topology:
    """Tiers ram and disk."""
    live = Live(
        selection=selection,
        min_load_tokens=min_load_tokens,
        tiers={"ram": LiveTier(), "disk": LiveTier(capacity_bytes=1 << 30)},
    )
    structural = Structural(
        policy=PolicyIdentity(namespace="test", name="test"),
        content_hash="test",
        engine_type="ATOM",
        run_directory="/dev/shm/kvtier-unit-test",
        tiers=[
            MemoryTierDocument(name="ram", capacity_bytes=1 << 30),
            FileSystemTierDocument(name="disk", path="/var/kv", sharing="Node"),
        ],
        live=live,
    )
    return Topology(structural=structural, live=live)


def offset(slot: int) -> int:
    """The place of a slot in the pool."""
    return slot * SLOT_BYTES


class SimulatedTierd:
    """The store, and the client that the scheduler's session talks to. Slots are numbers."""

    def __init__(
        self, ranks: int, slots: int, expected: Callable[[bytes], Sequence[Shards]]
    ) -> None:
        self.violations: list[str] = []
        self.epoch = 0
        self.attached = False
        self.stored = 0
        self.disk: dict[bytes, Shards] = {}
        self.ram: dict[bytes, int] = {}
        self.slots: dict[int, list[Cells | None]] = {s: [None] * ranks for s in range(slots)}
        self.loading: dict[int, list[bytes]] = {}
        self.generations: dict[int, int] = {}
        self.promotions: dict[int, tuple[bytes, ...]] = {}
        self._pinned_by_promotion: dict[int, tuple[bytes, ...]] = {}
        self._reserved: dict[int, tuple[bytes, int, set[int]]] = {}
        self._ranks = ranks
        self._expected = expected
        self._free: list[int] = list(range(slots))
        self._sequence = 0
        self._token = 0

    # The client.

    def connect(
        self,
        directory: object,
        hello: Callable[[], Hello],
        sink: Callable[[Message], None],
        on_lost: Callable[[str], None],
        heartbeat: Callable[[], Heartbeat],
    ) -> SimulatedTierd:
        self._sink, self._on_lost = sink, on_lost
        return self

    def start(self) -> None:
        """Nothing attaches by itself."""

    def close(self, timeout_seconds: float) -> None:
        """Nothing to do."""

    def send(self, message: Message) -> bool:
        if not self.attached:
            return False
        if isinstance(message, Reserve):
            for reservation, group, key, slot, _ in message.items:
                self._reserve(reservation, bytes([group]) + key, slot // SLOT_BYTES)
        elif isinstance(message, Load):
            self._load(message)
        elif isinstance(message, LoadReleased):
            self.loading.pop(message.load, None)
        elif isinstance(message, Promote):
            self.promotions[message.promotion] = tuple(
                bytes([group]) + key for group, key in message.keys
            )
        elif isinstance(message, Cancel):
            self.promotions.pop(message.promotion, None)
            self._pinned_by_promotion.pop(message.promotion, None)
        elif isinstance(message, EvictionAck):
            pass
        return True

    # What tierd does.

    def attach(self) -> None:
        """A session begins; RAM and its slots survive."""
        self.attached, self.epoch, self._sequence = True, self.epoch + 1, 0
        used = set(self.ram.values())
        self._free = [slot for slot in self.slots if slot not in used]
        self._sink(
            Welcome(
                protocol=PROTOCOL,
                epoch=self.epoch,
                session=self.epoch,
                pool_path="/pool",
                pool_bytes=1 << 20,
                tiers=("ram", "disk"),
                settings="",
            )
        )
        self._sink(Ready(namespace="a" * 32, slot_bytes=(1,), persistent=True))
        bits: dict[bytes, int] = dict.fromkeys(self.disk, DISK)
        for key in self.ram:
            bits[key] = bits.get(key, 0) | RAM
        self._delta(added=bits, snapshot=True)
        self._grant()

    def lose(self) -> None:
        """The session ends: reservations, promotions and announcements are void."""
        self.attached = False
        self._reserved.clear()
        self.promotions.clear()
        self._pinned_by_promotion.clear()
        self.loading.clear()
        self._on_lost("the test says so")

    def _grant(self) -> None:
        if self._free:
            self._sink(Credits(group=0, slots=tuple(map(offset, self._free))))
            self._free = []

    def _delta(
        self,
        added: dict[bytes, int] | None = None,
        removed: dict[bytes, int] | None = None,
        snapshot: bool = False,
    ) -> None:
        self._sequence += 1
        self._sink(
            Delta(
                sequence=self._sequence,
                added=tuple(
                    (key, bits, self._location(key)) for key, bits in (added or {}).items()
                ),
                removed=tuple((removed or {}).items()),
                snapshot=snapshot,
            )
        )

    def _location(self, key: bytes) -> int:
        slot = self.ram.get(key)
        return 0 if slot is None else pack_location(offset(slot), self.generations[slot])

    def _place(self, key: bytes, slot: int) -> None:
        """An object is complete in ``slot``: its generation rises."""
        self.ram[key] = slot
        self.generations[slot] = self.generations.get(slot, 0) + 2

    def _reserve(self, reservation: int, key: bytes, slot: int) -> None:
        if key in self.ram or key in self.disk:
            self.violations.append("a chunk that a tier holds is saved again")
        if any(key == other for other, _, _ in self._reserved.values()):
            self.violations.append("a chunk is saved twice at the same time")
        if slot in self.ram.values():
            self.violations.append("a slot in use is written")
        self._reserved[reservation] = (key, slot, set())

    def deliver(self, rank: int, reservation: int, shard: Cells) -> None:
        """A rank has copied its shard. The object exists once every rank has."""
        found = self._reserved.get(reservation)
        if found is None:
            return
        key, slot, ranks = found
        self.slots[slot][rank] = shard.copy()
        ranks.add(rank)
        if len(ranks) < self._ranks:
            return
        del self._reserved[reservation]
        shards = tuple(each for each in self.slots[slot] if each is not None)
        if not any(_same(shards, wanted) for wanted in self._expected(key)):
            self.violations.append("an object has bytes that are not those of its key")
        self._place(key, slot)
        self.disk[key] = shards
        self.stored += 1
        self._delta(added={key: RAM | DISK})

    def _load(self, message: Load) -> None:
        self._pinned_by_promotion.pop(message.promotion, None)
        keys: list[bytes] = []
        for group, key in message.keys:
            whole = bytes([group]) + key
            if whole not in self.ram:
                break
            keys.append(whole)
        self.loading[message.load] = keys

    def shard(self, rank: int, location: tuple[int, int]) -> Cells | None:
        """What is at a slot, if it is still what was there in that generation."""
        slot = location[0] // SLOT_BYTES
        if self.generations.get(slot) != location[1]:
            return None
        return self.slots[slot][rank]

    @property
    def pinned(self) -> set[bytes]:
        """Keys that must stay in RAM."""
        keys = {key for found in self.loading.values() for key in found}
        keys.update(key for pins in self._pinned_by_promotion.values() for key in pins)
        return keys

    def evict(self, random: Random, everything: bool = False) -> None:
        """Evicts some keys from RAM, after a notice. ``everything``: also from the disk."""
        pinned = self.pinned
        keys = [key for key in self.ram if key not in pinned and random.random() < 0.5]
        if not keys or not self.attached:
            return
        self._token += 1
        self._sink(EvictionNotice(token=self._token, keys=tuple(keys)))
        removed = dict.fromkeys(keys, RAM | (DISK if everything else 0))
        for key in keys:
            slot = self.ram.pop(key)
            self.generations[slot] += 2
            self._free.append(slot)
            if everything:
                self.disk.pop(key, None)
        self._delta(removed=removed)
        self._grant()

    def end_promotion(self, random: Random) -> None:
        """One promotion ends, whole or not."""
        if not self.promotions or not self.attached:
            return
        number = random.choice(list(self.promotions))
        keys = self.promotions.pop(number)
        usable = len(keys) if random.random() < 0.7 else random.randrange(len(keys) + 1)
        brought: list[bytes] = []
        for key in keys[:usable]:
            if key not in self.ram:
                slot = self._empty_slot()
                if key not in self.disk or slot is None:
                    break
                self.slots[slot] = list(self.disk[key])
                self._place(key, slot)
                self._delta(added={key: RAM})
            brought.append(key)
        self._pinned_by_promotion[number] = tuple(brought)
        outcome = "whole" if len(brought) == len(keys) else "partial" if brought else "failed"
        self._sink(
            Promoted(
                promotion=number,
                usable=len(brought),
                outcome=outcome,
                tiers=(1,) * len(brought),
                locations=tuple(map(self._location, brought)),
            )
        )

    def _empty_slot(self) -> int | None:
        """A slot that was not granted. Slots for promotions are beyond the granted ones."""
        slot = len(self.slots)
        self.slots[slot] = [None] * self._ranks
        return slot


def _same(shards: Shards, wanted: Shards) -> bool:
    return len(shards) == len(wanted) and all(
        np.array_equal(mine, other) for mine, other in zip(shards, wanted, strict=True)
    )


@dataclass(slots=True)
class _RankJob:
    job: Any
    rank: int
    copied: int = 0
    cancelled: bool = False


@dataclass(slots=True)
class RankFaults:
    """Probabilities: of progress per turn, of a load that fails, and of a second report; ``drains``
    is that of progress of a cancelled load, relative to others."""

    progress: float = 0.6
    load_fails: float = 0.0
    repeats: float = 0.0
    drains: float = 1.0


@dataclass(slots=True)
class SimulatedRanks:
    """The workers. ``caches[r]``: rank r's KV."""

    tierd: SimulatedTierd
    caches: Sequence[Cells]
    blocks: StandInBlocks
    random: Random
    faults: RankFaults = field(default_factory=RankFaults)
    loaded: int = 0
    failed: int = 0
    _jobs: list[_RankJob] = field(default_factory=list)
    _reports: dict[Any, list[bool]] = field(default_factory=dict)
    _past: list[tuple[Any, bool]] = field(default_factory=list)

    def start(self, metadata: Any) -> None:
        """Takes the jobs of a step."""
        if not isinstance(metadata, AtomStepMetadata):
            raise TypeError(f"not this connector's metadata: {metadata!r}")
        for each in metadata.requests:
            if isinstance(each, AtomCancel):
                for running in self._jobs:
                    if isinstance(running.job, AtomLoad) and running.job.job.load == each.load:
                        running.cancelled = True
                continue
            self._jobs += [_RankJob(each, rank) for rank in range(len(self.caches))]

    def finished(self) -> KVConnectorOutput:
        """Lets every job progress, and returns what has ended on all ranks."""
        for job in list(self._jobs):
            slower = self.faults.drains if job.cancelled else 1.0
            if self.random.random() < self.faults.progress * slower:
                self._advance(job)
        output = KVConnectorOutput()
        for operation, results in list(self._reports.items()):
            if len(results) == len(self.caches):
                del self._reports[operation]
                self._past.append((operation, all(results)))
                self._add(output, operation, all(results))
        if self._past and self.random.random() < self.faults.repeats:
            loading = {
                job.job.operation.req_id for job in self._jobs if isinstance(job.job, AtomLoad)
            }
            past = [each for each in self._past if each[0].req_id in loading] or self._past
            operation, succeeded = self.random.choice(past)
            self._add(output, operation, succeeded)
        return output

    def _add(self, output: KVConnectorOutput, operation: Any, succeeded: bool) -> None:
        if type(operation).__name__ == "SaveOperationId":
            output.finished_saving.add(operation)
        else:
            (output.finished_loading if succeeded else output.failed_loading).add(operation)

    @property
    def busy(self) -> bool:
        """Whether a job has not ended."""
        return bool(self._jobs or self._reports)

    def _end(self, job: _RankJob, succeeded: bool) -> None:
        self._jobs.remove(job)
        self._reports.setdefault(job.job.operation, []).append(succeeded)

    def _check_held(self, numbers: Sequence[int], what: str) -> None:
        if any(self.blocks.blocks[number].references < 1 for number in numbers):
            self.tierd.violations.append(f"{what} accesses a block that was given away")

    def _advance(self, job: _RankJob) -> None:
        cache = self.caches[job.rank]
        if isinstance(job.job, AtomSave):
            store = job.job.job
            self._check_held(store.run.blocks, "a save")
            if store.epoch == self.tierd.epoch and self.tierd.attached:
                shard = np.concatenate([cache[block] for block in store.run.blocks])
                self.tierd.deliver(job.rank, store.reservation, shard)
            self._end(job, True)
            return
        load = job.job.job
        location = (load.slots[job.copied], load.generations[job.copied])
        shard = self.tierd.shard(job.rank, location)
        lost = shard is None or load.epoch != self.tierd.epoch or not self.tierd.attached
        if job.cancelled or lost or self.random.random() < self.faults.load_fails:
            self._end_load(job, False)
            return
        run = load.runs[job.copied]
        self._check_held(run.blocks, "a load")
        size = cache.shape[1]
        for index, block in enumerate(run.blocks):
            first = (run.first + index) * size
            cache[block] = shard[first : first + size]
        job.copied += 1
        if job.copied == len(load.runs):
            self._end_load(job, True)

    def _end_load(self, job: _RankJob, succeeded: bool) -> None:
        self.loaded, self.failed = self.loaded + succeeded, self.failed + (not succeeded)
        self._end(job, succeeded)


class Clock:
    """Time that a test passes."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class TiersOptions:
    """``min_tokens``: of loads and saves."""

    block_tokens: int = 4
    chunk_tokens: int = 8
    ranks: int = 1
    slots: int = 64
    min_tokens: int = 8
    num_blocks: int = 64
    step_tokens: int = 64
    selection: Selection = Selection.WEIGHTED


class AtomTiers:
    """The scheduler side with its simulated tierd and ranks, for a stand-in with given blocks."""

    def __init__(self, options: TiersOptions, blocks: StandInBlocks, random: Random) -> None:
        self.options = options
        self.clock = Clock()
        self.prompts: dict[bytes, list[Shards]] = {}
        self.tierd = SimulatedTierd(
            options.ranks, options.slots, lambda key: self.prompts.get(key, [])
        )
        group = KVCacheGroup(GroupKind.FULL, options.block_tokens)
        self.planner = Planner.build(
            [group], options.chunk_tokens, options.chunk_tokens, options.ranks
        )
        session = TierdSession(
            topology(options.min_tokens, options.selection),
            self.planner,
            "engine/dp0",
            lambda: EngineIdentity("{}"),
            self.tierd.connect,
        )
        limits = AtomLimits(options.num_blocks, options.step_tokens)
        self.connector = AtomScheduler(session, self.planner, limits, self.clock)
        self.connector.start()
        self.caches: list[Cells] = [
            np.zeros((options.num_blocks, options.block_tokens), dtype=np.uint64)
            for _ in range(options.ranks)
        ]
        self.ranks = SimulatedRanks(self.tierd, self.caches, blocks, random)
        self.tierd.attach()

    def expect(self, tokens: Sequence[int], keys: Sequence[bytes]) -> None:
        """Registers the bytes that the chunks of a prompt have."""
        size = self.options.chunk_tokens
        cells = [np.array(cells_of(tokens, rank), np.uint64) for rank in range(self.options.ranks)]
        for index, key in enumerate(keys):
            shards = tuple(each[index * size : (index + 1) * size] for each in cells)
            self.prompts.setdefault(key, [shards])
