"""A small KV cache and a pool, for the worker side without an engine.

``RankTestbed`` has the state machines of the transfer thread without threads. ``WorkerTestbed`` is
a complete worker side.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tests.support.held_copies import HeldCopyEngine
from tests.support.stub_tierd import FIRST_GENERATION, StubTierd

from kvtier.config.models import Daemon
from kvtier.engines.common.jobs import BlockRun, LoadJob, StoreJob
from kvtier.engines.common.worker_loads import WorkerLoads
from kvtier.engines.common.worker_state import (
    CompletionQueue,
    Completions,
    Counters,
    RankContext,
    RankShards,
    SlotGenerations,
)
from kvtier.engines.common.worker_stores import WorkerStores
from kvtier.engines.vllm.metadata import StepMetadata
from kvtier.engines.vllm.worker import KVTierConnectorWorker
from kvtier.planner import GroupKind, KVCacheGroup, Planner
from kvtier.tierd.wire import Message, Ready
from kvtier.tiers.base import ALIGNMENT_BYTES
from kvtier.transfer.codec import build_codec
from kvtier.transfer.host_pool import HostPool
from kvtier.transfer.synthetic_layouts import CacheGeometry, SyntheticCache, make_every_cache

CHUNK = 4
GEOMETRY = CacheGeometry(layers=2, blocks=40, block=16)


class Clock:
    """Time that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def load_job(
    number: int,
    *runs: tuple[int, ...],
    slots: tuple[int, ...] = (),
    first: int = 0,
    limit: float = 5.0,
    epoch: int = 1,
) -> LoadJob:
    """A load from slots in their first generation; only its first run may begin inside the
    chunk."""
    made = tuple(
        BlockRun(0, first if index == 0 else 0, blocks) for index, blocks in enumerate(runs)
    )
    generations = (FIRST_GENERATION,) * len(slots)
    return LoadJob(number, f"request-{number}", made, limit, epoch, slots, generations)


def opened(shards: tuple[tuple[int, int, bool], ...], slot_bytes: tuple[int, ...]) -> Ready:
    """tierd opens the namespace of an engine."""
    return Ready(namespace="n", slot_bytes=slot_bytes, persistent=True, shards=shards)


def store_job(number: int, slot: int, blocks: tuple[int, ...], epoch: int = 1) -> StoreJob:
    """A store of a whole chunk."""
    return StoreJob(number, slot, epoch, BlockRun(0, 0, blocks))


@dataclass
class RankTestbed:
    """One rank's copies without its threads."""

    layout: SyntheticCache
    engine: HeldCopyEngine
    slot_bytes: int
    completions: CompletionQueue = field(default_factory=lambda: CompletionQueue(single_group=True))
    counters: Counters = field(default_factory=Counters)
    clock: Clock = field(default_factory=Clock)
    sent: list[Message] = field(default_factory=list)
    generations: SlotGenerations = field(default_factory=SlotGenerations)

    def __post_init__(self) -> None:
        pages = 12 * self.slot_bytes // ALIGNMENT_BYTES
        self.words = memoryview(bytearray(4 * pages)).cast("I")
        for page in range(pages):
            self.words[page] = FIRST_GENERATION
        self.generations.words = self.words.toreadonly()
        self.context = RankContext(
            self.engine,
            self.shards(0),
            self.completions,
            self.counters,
            self.clock,
            self.generations,
        )
        self.loads = self.new_loads()
        self.stores = WorkerStores(self.context, self.sent.append)

    def shards(self, offset: int, writes: bool = True) -> RankShards:
        """The rank's shard begins at ``offset`` of a slot, and ends with it."""
        shards = RankShards((self.slot_bytes,))
        ready = opened(((offset, self.slot_bytes, writes),), (offset + self.slot_bytes,))
        assert shards.set(ready) == ""
        return shards

    def new_loads(self, batch_bytes: int = 1) -> WorkerLoads:
        """``batch_bytes`` 1: one key per submission."""
        return WorkerLoads(self.context, batch_bytes)

    def slot(self, number: int) -> int:
        return number * self.slot_bytes

    def slots(self, *numbers: int) -> tuple[int, ...]:
        return tuple(map(self.slot, numbers))

    def reuse(self, number: int, value: int) -> None:
        """tierd evicts what is in a slot, and another engine writes there."""
        self.words[self.slot(number) // ALIGNMENT_BYTES] += 1
        self.fill_slot(number, value)

    def add(self, *jobs: LoadJob, fence: object | None = None, epoch: int = 1) -> None:
        """Jobs of one step."""
        self.loads.add(jobs, fence, self.clock.now, epoch)

    def run(self) -> None:
        """Until nothing more happens."""
        while self.loads.advance() | self.stores.advance():
            pass

    def page_bytes(self, block: int) -> bytes:
        return block_bytes(self.layout, block)

    def fill_slot(self, number: int, value: int) -> None:
        pool = self.engine.pool
        assert pool is not None
        pool.memory[self.slot(number) : self.slot(number) + self.slot_bytes] = value

    def taken(self) -> Completions:
        return self.completions.take()


def block_bytes(layout: SyntheticCache, block: int) -> bytes:
    """All layers of one block, in object order (the layout is blocks-first and dense)."""
    return b"".join(
        tensor[block].contiguous().view(torch.uint8).numpy().tobytes()
        for tensor in layout.caches.values()
    )


def make_rank_testbed() -> RankTestbed:
    """A fresh one, with a pool of 12 slots."""
    layout = next(iter(make_every_cache(GEOMETRY)))
    codec = build_codec(layout.caches, layout, CHUNK * GEOMETRY.block)
    engine = HeldCopyEngine(layout.caches, codec)
    slot_bytes = codec.shard_bytes[0]
    engine.attach(HostPool(np.zeros(12 * slot_bytes, dtype=np.uint8)))
    return RankTestbed(layout, engine, slot_bytes)


@dataclass
class WorkerTestbed:
    """A whole worker side: real transfer thread, real pool file, a stub tierd."""

    layout: SyntheticCache
    worker: KVTierConnectorWorker
    directory: Path
    tierd: StubTierd
    engine: HeldCopyEngine
    slot_bytes: int
    step_number: int = 0

    epoch: int = 0
    _reported: Completions = field(default_factory=Completions)

    def start(
        self, loads: list[LoadJob] | None = None, stores: list[StoreJob] | None = None
    ) -> None:
        """One engine step with jobs. What it reports already is reported with the next ``step``."""
        self._reported = self.step(loads, stores)

    def step(
        self,
        loads: list[LoadJob] | None = None,
        stores: list[StoreJob] | None = None,
        cancelled: list[int] | None = None,
        idle: bool = False,
    ) -> Completions:
        """One engine step; returns what it reported, with the worker's report folded in."""
        self.step_number += 1
        metadata = StepMetadata(
            self.step_number,
            loads or [],
            stores or [],
            idle=idle,
            cancelled_loads=cancelled or [],
        )
        self.worker.start_load_kv(metadata)
        self.worker.wait_for_save()
        _, recving = self.worker.get_finished(set())
        invalid = self.worker.get_block_ids_with_load_errors()
        report = self.worker.build_connector_worker_meta()
        assert report.step == self.step_number
        self.epoch = report.attached_epoch
        earlier, self._reported = self._reported, Completions()
        return Completions(
            earlier.loads + report.loads,
            earlier.recving | (recving or set()),
            set(),
            earlier.invalid_blocks | invalid,
            earlier.stores_done | report.stores_done,
        )

    def reuse(self, number: int) -> None:
        """tierd evicts what is in a slot."""
        words = np.memmap(self.directory / "generations", dtype=np.uint32, mode="r+")
        words[self.slot(number) // ALIGNMENT_BYTES] += 1

    def pool(self) -> np.memmap:  # type: ignore[type-arg]
        return np.memmap(self.directory / "pool", dtype=np.uint8, mode="r+")

    def slot(self, number: int) -> int:
        return number * self.slot_bytes

    def slots(self, *numbers: int) -> tuple[int, ...]:
        return tuple(map(self.slot, numbers))


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Polls ``condition()``. Only a failing test reaches the deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.002)


class _Namespace:
    def __init__(self, **values: object) -> None:
        self.__dict__.update(values)


def vllm_config() -> object:
    """The parts of vLLM's configuration that a worker reads."""
    return _Namespace(
        parallel_config=_Namespace(rank=0),
        cache_config=_Namespace(),
        compilation_config=_Namespace(static_forward_context={}),
        kv_transfer_config=_Namespace(engine_id="engine-a"),
    )


def structural(directory: Path) -> object:
    """The parts of the structural document that a worker reads."""
    return _Namespace(run_directory=str(directory), daemon=Daemon.SIDECAR)


def planner(layout: SyntheticCache, chunk_tokens: int) -> Planner:
    """Of an engine with full attention in every group of ``layout``."""
    sizes = [group.kv_cache_spec.block_size for group in layout.kv_cache_groups]
    groups = [KVCacheGroup(GroupKind.FULL, size) for size in sizes]
    return Planner.build(groups, chunk_tokens, min(sizes))


def make_worker_testbed(
    directory: Path, engine_type: type[HeldCopyEngine] = HeldCopyEngine, attach: bool = True
) -> WorkerTestbed:
    layout = next(iter(make_every_cache(GEOMETRY)))
    made: list[HeldCopyEngine] = []
    clients: list[StubTierd] = []

    def engine(kv_caches: object, codec: object) -> HeldCopyEngine:
        made.append(engine_type(kv_caches, codec))  # type: ignore[arg-type]
        return made[-1]

    def client(*arguments: object) -> StubTierd:
        clients.append(StubTierd(*arguments))  # type: ignore[arg-type]
        return clients[-1]

    worker = KVTierConnectorWorker(
        vllm_config(),  # type: ignore[arg-type]
        layout,  # type: ignore[arg-type]
        structural(directory),  # type: ignore[arg-type]
        planner(layout, CHUNK * GEOMETRY.block),
        client=client,  # type: ignore[arg-type]
        copy_engine=engine,  # type: ignore[arg-type]
    )
    worker.register_kv_caches(layout.caches)
    assert worker.off_reason == ""
    assert worker.codec is not None
    testbed = WorkerTestbed(
        layout, worker, directory, clients[0], made[0], worker.codec.shard_bytes[0]
    )
    (directory / "pool").write_bytes(bytes(12 * testbed.slot_bytes))
    if attach:
        testbed.tierd.welcome(1)
        wait_until(lambda: testbed.step() and testbed.epoch == 1)
    return testbed
