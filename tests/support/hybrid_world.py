"""vLLM's own scheduler with KVTier's scheduler side and worker side, and KV whose bytes say which
prompt, group, layer and rank they belong to.

No model runs: ``World.step`` writes what the kernels of a step would write, after it has checked
everything that they would read. tierd is simulated: it holds real bytes in slots with generation
words, evicts, promotes from a second tier, and is lost and found again.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from tests.support.engine_configs import tiny_engine_config, tiny_request
from tests.support.held_copies import HeldCopyEngine
from tests.support.hybrid_tierd import SimulatedTierd
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

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
from kvtier.engines.common.model_identity import EngineIdentity
from kvtier.engines.common.tierd_session import TierdSession
from kvtier.engines.common.worker_loads import WorkerLoads
from kvtier.engines.common.worker_state import (
    CompletionQueue,
    Counters,
    RankContext,
    RankShards,
    SlotGenerations,
)
from kvtier.engines.common.worker_stores import WorkerStores
from kvtier.engines.vllm.config import group_of
from kvtier.engines.vllm.connector import KVTierConnector
from kvtier.engines.vllm.hook_guard import HookGuard
from kvtier.engines.vllm.metadata import StepMetadata, WorkerReport
from kvtier.engines.vllm.metrics import KVTierStats
from kvtier.engines.vllm.scheduler import KVTierConnectorScheduler
from kvtier.planner import GroupKind, Planner
from kvtier.tierd.shard_layout import SlotLayout, slot_layouts
from kvtier.tierd.wire import (
    Abort,
    Deliver,
    Message,
    Ready,
)
from kvtier.transfer.codec import build_codec
from kvtier.transfer.host_pool import HostPool

BLOCK, STATE_BLOCK, CHUNK = 32, 64, 64
RAM, DISK = 1, 2
LAYERS = 2
WIDTH = 1
"""Numbers of 8 bytes per token and layer."""
MAX_STEPS = 4_000


class WrongByteError(AssertionError):
    """The engine was about to read KV that is not its own."""


def _attention(kind: type[Any], block: int = BLOCK, **more: Any) -> Any:
    return kind(block_size=block, num_kv_heads=1, head_size=1, dtype=torch.float32, **more)


def _state() -> MambaSpec:
    return MambaSpec(
        block_size=STATE_BLOCK,
        shapes=((1,),),
        dtypes=(torch.int64,),
        mamba_cache_mode="align",
    )


LAYOUTS: dict[str, Callable[[], list[Any]]] = {
    "full": lambda: [_attention(FullAttentionSpec)],
    "window": lambda: [
        _attention(SlidingWindowSpec, sliding_window=48),
        _attention(FullAttentionSpec),
    ],
    "long window, other block": lambda: [
        _attention(FullAttentionSpec),
        _attention(SlidingWindowSpec, 16, sliding_window=150),
        _attention(FullAttentionSpec),
    ],
    "windows only": lambda: [
        _attention(SlidingWindowSpec, sliding_window=40),
        _attention(SlidingWindowSpec, sliding_window=100),
    ],
    "chunked local": lambda: [
        _attention(FullAttentionSpec),
        _attention(ChunkedLocalAttentionSpec, attention_chunk_size=128),
    ],
    "state": lambda: [_state(), _attention(FullAttentionSpec, STATE_BLOCK)],
    "states, window": lambda: [
        _attention(FullAttentionSpec, STATE_BLOCK),
        _state(),
        _state(),
        _attention(SlidingWindowSpec, STATE_BLOCK, sliding_window=70),
    ],
}
"""KV cache groups by name."""


def blocks_for(layout: str, tokens: int) -> int:
    """How many blocks a request of ``tokens`` tokens takes at most, the null block included."""
    return 1 + sum(-(-tokens // spec.block_size) + 1 for spec in LAYOUTS[layout]())


@dataclass(frozen=True)
class WorldOptions:
    """One engine. ``blocks``: of its KV cache. ``slots``: of tierd, for each group. ``missing``:
    pairs of a rank and a group of which it has no layers, as a pipeline stage."""

    layout: str
    directory: Path
    ranks: int = 1
    blocks: int = 120
    slots: int = 40
    step_tokens: int = 128
    seqs: int = 4
    selection: Selection = Selection.WEIGHTED
    missing: frozenset[tuple[int, int]] = frozenset()


@functools.cache
def token_states(tokens: tuple[int, ...]) -> tuple[int, ...]:
    """A number for each token, which depends on all tokens up to it."""
    found, state = [], 1
    for token in tokens:
        state = (state * 6364136223846793005 + token * 1442695040888963407 + 1) % (1 << 62)
        found.append(state)
    return tuple(found)


def _value(state: int, group: int, layer: int, rank: int) -> int:
    return state ^ (((group + 1) * 64 + layer * 8 + rank) << 8)


class Rank:
    """One rank: its KV, and KVTier's state machines of loads and stores."""

    def __init__(self, number: int, config: KVCacheConfig, planner: Planner, world: World) -> None:
        self.number, self.world = number, world
        self.caches: dict[str, torch.Tensor] = {}
        groups = []
        for index, group in enumerate(planner.groups):
            names = tuple(
                f"group.{index}.layer.{layer}" for layer in range(world.layers(number, index))
            )
            rows = 1 if group.kind is GroupKind.STATE else group.block_tokens
            for name in names:
                self.caches[name] = torch.zeros((config.num_blocks, rows, WIDTH), dtype=torch.int64)
            page = SimpleNamespace(block_size=group.block_tokens, page_size_bytes=rows * WIDTH * 8)
            groups.append(SimpleNamespace(layer_names=names, kv_cache_spec=page))
        cache: Any = SimpleNamespace(num_blocks=config.num_blocks, kv_cache_groups=groups)
        self.codec = build_codec(
            self.caches, cache, planner.chunk_tokens, object_blocks=planner.all_object_blocks
        )
        self.copies = HeldCopyEngine(self.caches, self.codec)
        self.completions = CompletionQueue(planner.prefix_only)
        self.generations = SlotGenerations()
        self.shards = RankShards(self.codec.shard_bytes)
        self.context = RankContext(
            self.copies,
            self.shards,
            self.completions,
            Counters(),
            world.clock,
            self.generations,
            max(0, planner.counted_group),
        )
        self.loads = WorkerLoads(self.context, 1)
        self.stores = WorkerStores(self.context, self.deliver, 1)
        self.loads.weights_known("w")
        self.epoch = 0

    def attach(self, tierd: SimulatedTierd, layouts: Sequence[SlotLayout]) -> None:
        """Maps the pool of a tierd."""
        ranges = tuple(
            (shard.offset, shard.size_bytes, shard.writes)
            for shard in (layout.ranges[self.number] for layout in layouts)
        )
        ready = Ready(
            namespace="a" * 32,
            slot_bytes=tuple(tierd.slot_bytes),
            persistent=True,
            shards=ranges,
        )
        assert self.shards.set(ready) == ""
        self.copies.attach(HostPool(tierd.pool))
        self.generations.words = tierd.words.toreadonly()
        self.epoch = self.completions.epoch = tierd.epoch

    def lose(self) -> None:
        """As the transfer thread after the loss of tierd: everything ends after its copies."""
        self.epoch = self.completions.epoch = 0
        self.loads.stop_all("lost")
        self.stores.drop_pending()
        self.copies.move()
        self.loads.advance()
        self.stores.advance()
        self.stores.drop_all()
        self.generations.words = None
        self.copies.detach()
        self.shards.clear()

    def deliver(self, message: Message) -> None:
        if self.epoch != self.world.tierd.epoch or not self.world.tierd.attached:
            return
        assert isinstance(message, Deliver | Abort)
        for reservation in message.reservations:
            delivered = isinstance(message, Deliver)
            self.world.outbox.append((self.number, reservation, delivered, self.epoch))

    def tensor(self, group: int, layer: int) -> torch.Tensor:
        return self.caches[f"group.{group}.layer.{layer}"]


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class World:
    """One engine with its tierd."""

    options: WorldOptions
    random: Random
    requests: dict[str, Any] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    outbox: list[tuple[int, int, bool, int]] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)
    """What the schedule has gone through, by name."""
    on_loads: Callable[[], None] | None = None
    """Called when the scheduler side has started a load, before the workers learn of it."""
    failures: Counter[str] = field(default_factory=Counter)
    """Loads that failed, by reason, as the engine's metrics count them."""
    checked_tokens: int = 0
    run_directory: str = "/dev/shm/kvtier-unit-test"
    engine_name: str = "engine/dp0"

    def __post_init__(self) -> None:
        self.clock = _Clock()
        specs = LAYOUTS[self.options.layout]()
        hash_tokens = min(spec.block_size for spec in specs)
        names = [
            [f"group.{index}.layer.{layer}" for layer in range(LAYERS)]
            for index in range(len(specs))
        ]
        config = KVCacheConfig(
            num_blocks=self.options.blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec(names[index], spec) for index, spec in enumerate(specs)
            ],
            hash_block_size=hash_tokens,
        )
        groups = [group_of(group) for group in config.kv_cache_groups]
        self.planner = Planner.build(groups, CHUNK, hash_tokens, self.options.ranks)
        self.ranks = [
            Rank(number, config, self.planner, self) for number in range(self.options.ranks)
        ]
        self.layouts = slot_layouts([rank.codec.shard_bytes for rank in self.ranks], ())
        self.tierd = SimulatedTierd(
            [layout.slot_bytes for layout in self.layouts],
            self.options.slots,
            [layout.writers for layout in self.layouts],
            self.random,
        )
        self.scheduler = self._scheduler(config, hash_tokens)
        self._note_failures()
        self.step_number = 0
        self.attach()

    def _scheduler(self, config: KVCacheConfig, hash_tokens: int) -> Any:
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        vllm_config = tiny_engine_config(self.options.directory, BLOCK)
        blocks = {group.block_tokens for group in self.planner.groups}
        block = max(blocks)
        states = any(group.kind is GroupKind.STATE for group in self.planner.groups)
        vllm_config.cache_config.block_size = block
        vllm_config.cache_config.num_gpu_blocks = config.num_blocks
        vllm_config.cache_config.mamba_cache_mode = "align" if states else "none"
        vllm_config.cache_config.mamba_block_size = STATE_BLOCK if states else None
        vllm_config.scheduler_config.max_num_batched_tokens = self.options.step_tokens
        vllm_config.scheduler_config.max_num_seqs = self.options.seqs
        vllm_config.kv_transfer_config = KVTransferConfig(
            kv_connector="KVTierConnector",
            kv_connector_module_path="kvtier.engines.vllm.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
        )
        live = Live(
            selection=self.options.selection,
            min_load_tokens=1,
            tiers={"ram": LiveTier(), "disk": LiveTier(capacity_bytes=1 << 30)},
        )
        structural = Structural(
            policy=PolicyIdentity(namespace="test", name="test"),
            content_hash="test",
            run_directory=self.run_directory,
            chunk_tokens=CHUNK,
            tiers=[
                MemoryTierDocument(name="ram", capacity_bytes=1 << 30),
                FileSystemTierDocument(name="disk", path="/var/kv", sharing="Node"),
            ],
            live=live,
        )
        session = TierdSession(
            Topology(structural=structural, live=live),
            self.planner,
            self.engine_name,
            lambda: EngineIdentity("{}"),
            self.tierd.connect,
        )
        self.kvtier = KVTierConnectorScheduler(session, self.planner, clock=self.clock)
        self.connector = _connector(vllm_config, config, self.kvtier)
        with mock.patch.object(KVConnectorFactory, "create_connector", return_value=self.connector):
            return Scheduler(
                vllm_config,
                config,
                StructuredOutputManager(vllm_config),
                block,
                hash_tokens,
            )

    def _note_failures(self) -> None:
        collect = self.kvtier.collect_stats

        def noting(stats: KVTierStats) -> None:
            failures = self.kvtier.loads.in_flight.counts.failures
            self.failures.update(failures)
            if len(self.planner.groups) > 1:
                self.happened["a load lost one group's object"] += failures["gone"]
            if len(self.ranks) > 1:
                self.happened["a load lost one rank's shard"] += failures["copy"]
            collect(stats)

        self.kvtier.collect_stats = noting  # type: ignore[method-assign]

    def layers(self, rank: int, group: int) -> int:
        """How many layers of a group a rank has."""
        return 0 if (rank, group) in self.options.missing else LAYERS

    # Requests.

    def add(self, name: str, tokens: list[int], new_tokens: int) -> None:
        """A request arrives."""
        request = tiny_request(name, tokens, new_tokens, self.planner.hash_tokens)
        self.requests[name] = request
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        """A client disconnects."""
        from vllm.v1.request import RequestStatus

        if name not in self.finished:
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self.finished.add(name)
            self.happened["a request was aborted"] += 1

    # tierd.

    def attach(self) -> None:
        """A new tierd is found."""
        for rank in self.ranks:
            rank.copies.detach()
        self.tierd.attach()
        for rank in self.ranks:
            rank.attach(self.tierd, self.layouts)

    def lose_tierd(self, keep_ram: bool) -> None:
        """tierd is killed. The workers drain before another one is used."""
        self.tierd.lose(keep_ram)
        self.outbox.clear()
        for rank in self.ranks:
            rank.lose()

    def deliver(self) -> None:
        """The workers' messages reach tierd."""
        outbox, self.outbox = self.outbox, []
        for rank, reservation, delivered, epoch in outbox:
            if epoch == self.tierd.epoch:
                self.tierd.acknowledge(rank, reservation, delivered)
        self.tierd.grant()

    # Steps.

    def step(self, move: float = 1.0) -> None:
        """One step of the engine. ``move``: the chance that a copy ends in it."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        self.clock.now += 0.01
        self.step_number += 1
        output = self.scheduler.schedule()
        metadata = output.kv_connector_metadata
        if metadata.loads and self.on_loads is not None:
            self.on_loads()
        for rank in self.ranks:
            rank.copies.open = False
            if metadata.voided_stores:
                rank.stores.void(metadata.voided_stores)
        self._zero(output)
        sampled = self._compute(output)
        report = None
        recving: list[set[str]] = []
        failed: set[str] = set()
        invalid: set[int] = set()
        for rank in self.ranks:
            found = self._transfer(rank, metadata, move)
            recving.append(found.recving)
            failed |= found.failed
            invalid |= found.invalid_blocks
            one = WorkerReport(
                step=metadata.step,
                loads=found.loads,
                stores_done=found.stores_done,
                attached_epoch=rank.epoch,
                identity=metadata.identity,
                weights=((rank.number, "w", ""),) if metadata.report_weights else (),
            )
            report = one if report is None else report.aggregate(one)
        names = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
            kv_connector_output=KVConnectorOutput(
                finished_recving=self._all_ranks(recving) or None,
                failed_recving=failed,
                invalid_block_ids=invalid,
                kv_connector_worker_meta=report,
            ),
        )
        self.scheduler.update_from_output(output, result)
        self.finished |= set(self.requests) - set(self.scheduler.requests)
        self.happened["a load failed"] += bool(failed or invalid)
        self.happened["a request was preempted"] = sum(
            request.num_preemptions for request in self.requests.values()
        )

    def _all_ranks(self, recving: list[set[str]]) -> set[str]:
        """Requests that every rank has reported, as vLLM's aggregator finds them."""
        done = set()
        for name in set().union(*recving):
            self._reports[name] = self._reports.get(name, 0) + sum(name in each for each in recving)
            if self._reports[name] == len(self.ranks):
                del self._reports[name]
                done.add(name)
        return done

    @functools.cached_property
    def _reports(self) -> dict[str, int]:
        return {}

    def _transfer(self, rank: Rank, metadata: StepMetadata, move: float) -> Any:
        rank.loads.cancel(metadata.cancelled_loads)
        if metadata.loads:
            rank.loads.add(metadata.loads, None, self.clock.now, rank.epoch)
        if metadata.stores:
            rank.stores.add(metadata.stores, None, rank.epoch)
        for _ in range(3):
            rank.loads.advance()
            rank.stores.advance()
            while rank.copies.held and self.random.random() < move:
                rank.copies.move(1)
        rank.loads.advance()
        rank.stores.advance()
        return rank.completions.take()

    def _zero(self, output: Any) -> None:
        for block in output.new_block_ids_to_zero or ():
            for rank in self.ranks:
                for tensor in rank.caches.values():
                    tensor[block] = 0

    def _compute(self, output: Any) -> dict[str, list[int]]:
        """Checks what the kernels of the step read, and writes what they write."""
        for source, target in self._block_copies(output):
            for rank in self.ranks:
                for tensor in rank.caches.values():
                    tensor[target] = tensor[source]
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled: dict[str, list[int]] = {}
        for name, count in output.num_scheduled_tokens.items():
            request, start = self.requests[name], computed[name]
            states = token_states(tuple(request.all_token_ids))
            tables = self.scheduler.kv_cache_manager.get_block_ids(name)
            self._check(name, states, tables, start)
            self._write(states, tables, start, start + count)
            ended = start + count >= request.num_tokens
            sampled[name] = [states[start + count - 1] % 1000 + 5] if ended else []
        return sampled

    @staticmethod
    def _block_copies(output: Any) -> Iterator[tuple[int, int]]:
        for pair in getattr(output, "kv_cache_block_copies", None) or ():
            source, target = pair[0], pair[1]
            if isinstance(source, KVCacheBlock):
                yield source.block_id, target.block_id
            else:
                yield int(source), int(target)

    def _check(
        self, name: str, states: tuple[int, ...], tables: tuple[list[int], ...], start: int
    ) -> None:
        """Raises ``WrongByteError`` if KV of the first ``start`` tokens is not what was computed
        for them, as far as the next token needs it."""
        if not start:
            return
        for index, group in enumerate(self.planner.groups):
            block = group.block_tokens
            if group.kind is GroupKind.STATE:
                first = start - 1
            elif group.kind is GroupKind.SLIDING:
                first = max(0, start - group.window_tokens + 1)
            elif group.kind is GroupKind.CHUNKED:
                first = start // group.window_tokens * group.window_tokens
            else:
                first = 0
            positions = range(first, start)
            if not positions:
                continue
            self.checked_tokens += len(positions)
            for rank in self.ranks:
                for layer in range(self.layers(rank.number, index)):
                    tensor = rank.tensor(index, layer)
                    rows = [
                        0 if group.kind is GroupKind.STATE else each % block for each in positions
                    ]
                    blocks = [tables[index][each // block] for each in positions]
                    found = tensor[blocks, rows, 0].tolist()
                    wanted = [_value(states[each], index, layer, rank.number) for each in positions]
                    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
                        if one != other:
                            raise WrongByteError(
                                f"{name}: group {index} ({group}), layer {layer}, rank "
                                f"{rank.number}: token {positions[number]} of {start} in block "
                                f"{blocks[number]}: {one}, must be {other}"
                            )

    def _write(
        self, states: tuple[int, ...], tables: tuple[list[int], ...], start: int, end: int
    ) -> None:
        for index, group in enumerate(self.planner.groups):
            block = group.block_tokens
            positions = range(end - 1, end) if group.kind is GroupKind.STATE else range(start, end)
            rows = [0 if group.kind is GroupKind.STATE else each % block for each in positions]
            blocks = [tables[index][each // block] for each in positions]
            for rank in self.ranks:
                for layer in range(self.layers(rank.number, index)):
                    values = [_value(states[each], index, layer, rank.number) for each in positions]
                    rank.tensor(index, layer)[blocks, rows, 0] = torch.tensor(values)

    # The end.

    def drain(self) -> None:
        """Steps until nothing is left. Raises ``AssertionError`` if something stays."""
        for _ in range(MAX_STEPS):
            busy = self.scheduler.has_unfinished_requests() or self.kvtier.stores.in_flight
            if not busy and not self.kvtier.loads.in_flight:
                break
            self.tierd.promote()
            self.deliver()
            self.step()
        for _ in range(30):
            self.clock.now += 1
            self.deliver()
            self.step()
        left = {name: str(each.status) for name, each in self.scheduler.requests.items()}
        assert not left, f"requests were forgotten: {left}"
        assert self.kvtier.stores.referenced_blocks == 0
        pool = self.scheduler.kv_cache_manager.block_pool
        leaked = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        assert not leaked, f"{leaked} blocks leaked"
        assert not self.kvtier.snapshot()["requests"]


def _connector(vllm_config: Any, config: KVCacheConfig, scheduler: Any) -> KVTierConnector:
    """KVTier's connector around a scheduler side, without the start of a tierd."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorRole,
    )

    made = KVTierConnector.__new__(KVTierConnector)
    KVConnectorBase_V1.__init__(made, vllm_config, KVConnectorRole.SCHEDULER, config)
    made._scheduler, made._worker, made._supervisor = scheduler, None, None
    made._guard = HookGuard(made._count_error, made._clock)
    made._guarded = made._guard.guarded
    made._reported_off = False
    made._stats, made._steps, made._counted_tokens = KVTierStats(), 0, 0
    scheduler.start()
    return made
