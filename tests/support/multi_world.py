"""vLLM's own scheduler and aggregation of ranks with ``WeightedMultiConnector`` and scripted
children. No model runs: a step checks all KV that its kernels would read, and writes what they
would write.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from tests.support import scripted_connector
from tests.support.engine_configs import tiny_engine_config, tiny_request
from tests.support.scripted_connector import SCRIPTS, Script

from kvtier.engines.vllm.multi.connector import WeightedMultiConnector
from kvtier.engines.vllm.multi.statistics import MultiStats

BLOCK = 16
SCRIPTED = {
    "kv_connector": "ScriptedConnector",
    "kv_connector_module_path": "tests.support.scripted_connector",
}
MULTI = "kvtier.engines.vllm.multi.connector"
MAX_STEPS = 3_000


class WrongByteError(AssertionError):
    """The engine was about to read KV that is not its own."""


class Clock:
    """Seconds that pass only in steps."""

    now = 1_000.0

    def __call__(self) -> float:
        return self.now


def transfer_config(children: Iterable[dict[str, Any]], **extra: Any) -> Any:
    """The engine's KV transfer configuration."""
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector="WeightedMultiConnector",
        kv_connector_module_path=MULTI,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"connectors": list(children), **extra},
    )


def kv_cache_config(blocks: int, groups: Iterable[Any] | None = None) -> Any:
    """One group of full attention, or ``groups`` (specifications)."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    full = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([f"layer.{index}"], spec)
            for index, spec in enumerate(groups or [full])
        ],
        hash_block_size=BLOCK,
    )


def engine_config(directory: Path, transfer: Any, ranks: int = 1) -> Any:
    """A configuration of its own for one engine."""
    config = copy.copy(tiny_engine_config(directory, 2 * BLOCK))
    for name in ("cache_config", "scheduler_config", "parallel_config"):
        setattr(config, name, copy.copy(getattr(config, name)))
    config.cache_config.block_size = BLOCK
    config.parallel_config.world_size = ranks
    config.kv_transfer_config = transfer
    return config


@functools.lru_cache(maxsize=4096)
def token_states(tokens: tuple[int, ...]) -> torch.Tensor:
    """A number for each token, which depends on all tokens up to it."""
    found, state = [], 1
    for token in tokens:
        state = (state * 6364136223846793005 + token * 1442695040888963407 + 1) % (1 << 62)
        found.append(state)
    return torch.tensor(found)


@dataclass
class MultiWorld:
    """One engine. ``scripts``: its children, by name, with their other fields in ``fields``."""

    directory: Path
    scripts: dict[str, Script]
    random: Random
    fields: dict[str, dict[str, Any]] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    blocks: int = 60
    step_tokens: int = 128
    seqs: int = 4
    prefix_caching: bool = True
    requests: dict[str, Any] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    clock: Clock = field(default_factory=Clock)
    checked_tokens: int = 0
    recomputed: int = 0

    def __post_init__(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        SCRIPTS.update(self.scripts)
        scripted_connector.RANKS = self.ranks
        cache = kv_cache_config(self.blocks)
        config = engine_config(self.directory, self._transfer(0), self.ranks)
        config.cache_config.num_gpu_blocks = self.blocks
        config.cache_config.enable_prefix_caching = self.prefix_caching
        config.scheduler_config.max_num_batched_tokens = self.step_tokens
        config.scheduler_config.max_num_seqs = self.seqs
        self.tensors = [
            torch.zeros((self.blocks, BLOCK), dtype=torch.int64) for _ in range(self.ranks)
        ]
        WeightedMultiConnector._clock = staticmethod(self.clock)  # type: ignore[method-assign]
        self.scheduler = Scheduler(config, cache, StructuredOutputManager(config), BLOCK, BLOCK)
        self.multi: WeightedMultiConnector = self.scheduler.connector
        self.stats = MultiStats()
        taken = self.multi.get_kv_connector_stats

        def kept() -> Any:
            found = taken()
            if found is not None:
                self.stats.aggregate(copy.deepcopy(found))
            return found

        self.multi.get_kv_connector_stats = kept  # type: ignore[method-assign]
        self.workers: list[WeightedMultiConnector] = []
        for rank in range(self.ranks):
            own = engine_config(self.directory, self._transfer(rank), self.ranks)
            worker = KVConnectorFactory.create_connector(own, KVConnectorRole.WORKER, cache)
            worker.register_kv_caches({"layer": self.tensors[rank]})
            self.workers.append(worker)
        self.aggregator = KVOutputAggregator.from_connector(self.multi, self.ranks)

    def _transfer(self, rank: int) -> Any:
        children = [
            {
                **SCRIPTED,
                "name": name,
                "kv_connector_extra_config": {"script": name, "rank": rank},
                **self.fields.get(name, {}),
            }
            for name in self.scripts
        ]
        return transfer_config(children, **self.extra)

    # Requests.

    def add(self, name: str, tokens: list[int], new_tokens: int = 3) -> None:
        """A request arrives."""
        request = tiny_request(name, tokens, new_tokens, BLOCK)
        self.requests[name] = request
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        """A client disconnects."""
        from vllm.v1.request import RequestStatus

        if name not in self.finished:
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self.finished.add(name)

    # Steps.

    def step(self, seconds: float = 0.5) -> None:
        """One step of the engine. While something is loaded, time passes slowly: a child that has
        raised must have stopped writing when its load is given up."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        loading = any(worker._worker_side.pending_loads for worker in self.workers)
        self.clock.now += min(seconds, 0.5) if loading else seconds
        output = self.scheduler.schedule()
        read: dict[str, bool] = {}
        outputs = []
        for rank, worker in enumerate(self.workers):
            metadata = output.kv_connector_metadata
            worker.handle_preemptions(metadata)
            worker.bind_connector_metadata(metadata)
            if output.has_sync_kv_loads:
                worker.start_load_kv(None)
            wrong, sampled = self._compute(output, rank, worker)
            for name in wrong:
                read[name] = True
            if not output.has_sync_kv_loads:
                worker.start_load_kv(None)
            worker.wait_for_save()
            results = worker.get_transfer_results(output.finished_req_ids)
            found = KVConnectorOutput(
                finished_sending=results.finished_sending,
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
                invalid_block_ids=worker.get_block_ids_with_load_errors(),
                kv_connector_stats=worker.get_kv_connector_stats(),
                kv_cache_events=worker.get_kv_connector_kv_cache_events(),
                kv_connector_worker_meta=worker.build_connector_worker_meta(),
            )
            worker.clear_connector_metadata()
            names = list(output.num_scheduled_tokens)
            outputs.append(
                ModelRunnerOutput(
                    req_ids=names,
                    req_id_to_index={name: index for index, name in enumerate(names)},
                    sampled_token_ids=[sampled[name] for name in names],
                    kv_connector_output=found,
                )
            )
        result = self.aggregator.aggregate(outputs)
        invalid = result.kv_connector_output.invalid_block_ids
        for name in read:
            (table,) = self.scheduler.kv_cache_manager.get_block_ids(name)
            if invalid.isdisjoint(table):
                raise WrongByteError(f"{name} has read KV that is not its own")
            self.recomputed += 1
        self.scheduler.update_from_output(output, result)
        self.finished |= set(self.requests) - set(self.scheduler.requests)

    def _compute(
        self, output: Any, rank: int, worker: WeightedMultiConnector
    ) -> tuple[list[str], dict[str, list[int]]]:
        """Returns the requests that read wrong KV, and what is sampled."""
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled: dict[str, list[int]] = {}
        wrong = []
        worker.wait_for_layer_load("layer")
        tensor = self.tensors[rank]
        for name, count in output.num_scheduled_tokens.items():
            request, start = self.requests[name], computed[name]
            states = token_states(tuple(request.all_token_ids)) + rank
            (table,) = self.scheduler.kv_cache_manager.get_block_ids(name)
            slots = torch.tensor(table)[:, None] * BLOCK + torch.arange(BLOCK)
            flat, slots = tensor.view(-1), slots.view(-1)
            self.checked_tokens += start
            good = bool((flat[slots[:start]] == states[:start]).all())
            if not good:
                wrong.append(name)
            end = start + count
            flat[slots[start:end]] = states[start:end] if good else -3
            sampled[name] = [int(states[end - 1]) % 1000 + 5] if end >= request.num_tokens else []
        worker.save_kv_layer("layer", tensor, None)
        return wrong, sampled

    # The end.

    def drain(self) -> None:
        """Steps until nothing is left. Raises ``AssertionError`` if something stays."""
        for _ in range(MAX_STEPS):
            if not self.scheduler.requests:
                break
            self.step(seconds=20.0)
        for _ in range(3):
            self.step()
        left = {name: str(each.status) for name, each in self.scheduler.requests.items()}
        assert not left, f"requests were forgotten: {left}"
        pool = self.scheduler.kv_cache_manager.block_pool
        leaked = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        assert not leaked, f"{leaked} blocks leaked"
        assert not any(self.multi._scheduler_side.pending.values()), (
            self.multi._scheduler_side.pending
        )
        assert not any(worker._worker_side.pending_loads for worker in self.workers)
        for name, script in self.scripts.items():
            assert not script.wrong, f"{name}: {script.wrong}"

    def counts(self, metric: str) -> dict[str, dict[str, int]]:
        """A counter of the scheduler side, by child and label value."""
        return self.stats.own.get(metric, {})
