"""KVTier as a vLLM KV connector. Every hook goes to the scheduler side or the worker side.

vLLM ends the engine if a hook raises. So every hook runs behind a guard (``hook_guard``), which
turns KVTier off for a while. What vLLM still waits for goes on: one report per load, and the
release of referenced blocks.

The supported versions (0.24 and 0.32) call the same hooks with the same meaning; hooks that only
one of them has are marked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvtier.config.loader import load_for_engine
from kvtier.engines.common.lora import AdapterDigests, AdapterFiles
from kvtier.engines.common.tierd_session import TierdSession
from kvtier.engines.vllm import early_pool, early_start, engine_signals, weights
from kvtier.engines.vllm.config import (
    configured_topology,
    engine_name,
    planner_for,
    topology_directory,
    use_vllm_log_handlers,
)
from kvtier.engines.vllm.counters import WITHOUT_TIERS, off_reason
from kvtier.engines.vllm.hook_guard import HookGuard
from kvtier.engines.vllm.identity import IdentityBuilder
from kvtier.engines.vllm.identity_fields import adapter_settings
from kvtier.engines.vllm.kv_events import events_for
from kvtier.engines.vllm.metadata import StepMetadata, WorkerReport
from kvtier.engines.vllm.metrics import (
    KVTierPromMetrics,
    KVTierStats,
    add_worker_counts,
    tier_names,
)
from kvtier.engines.vllm.scheduler import KVTierConnectorScheduler
from kvtier.engines.vllm.worker import KVTierConnectorWorker
from kvtier.errors import ConfigurationError, KVTierError
from kvtier.tierd.supervisor import Supervisor

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

SUPERVISOR_SECONDS = 1.5
"""How long shutdown waits for a tierd that this engine started. It usually ends in a tenth of that;
beside a hung mount it takes longer, and ends without the engine."""
T = TypeVar("T")


def _watch_engine() -> None:
    """Lets KVTier see the weights while they are loaded, and start tierd before.

    vLLM imports this module when it configures an engine, in the process from which the engine's
    own is forked. Where it is spawned, the plugin does this (``KVTIER_TOPOLOGY``).
    """
    try:
        weights.install(on_model=early_pool.begin)
    except Exception as error:  # the worker side reports that the weights are unknown
        logger.exception("KVTier: cannot watch the loading of weights: %s", error)
    try:
        early_start.start_with_core()
    except Exception as error:  # noqa: BLE001 - the connector starts tierd itself
        logger.warning("KVTier: tierd is not started early: %s", error)


_watch_engine()


class KVTierConnector(KVConnectorBase_V1, SupportsHMA):
    """One per EngineCore (scheduler role) and one per rank (worker role)."""

    _clock = staticmethod(time.monotonic)

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: KVTierConnectorScheduler | None = None
        self._worker: KVTierConnectorWorker | None = None
        self._supervisor: Supervisor | None = None
        self._guard = HookGuard(self._count_error, lambda: self._clock())
        self._guarded = self._guard.guarded
        self._reported_off = False
        self._invalid_blocks: set[int] = set()
        """Blocks that the loads of this step did not fill."""
        self._stats = KVTierStats()
        self._steps = 0
        self._counted_tokens = 0
        """Tokens of a stored chunk; 0 on all ranks but the first: each stores its shard of it."""
        try:
            use_vllm_log_handlers()
            self._start(vllm_config, role, kv_cache_config)
        except KVTierError as error:
            self._guard.off_reason = str(error)
            self._stats.add("off", 1, off_reason(error))
            logger.warning("KVTier: serving without tiers: %s", self._guard.off_reason)
        except Exception as error:  # a cache never stops an engine
            self._guard.off_reason = f"{type(error).__name__}: {error}"
            self._stats.add("off", 1, off_reason(error))
            logger.exception("KVTier: serving without tiers after an unexpected error")
        if self._guard.off_reason:
            early_pool.abandon()
        if self._guard.off_reason and role is KVConnectorRole.SCHEDULER:
            early_start.abandon(topology_directory(vllm_config.kv_transfer_config))

    def _start(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        transfer = vllm_config.kv_transfer_config
        directory = topology_directory(transfer)
        if not directory:
            raise ConfigurationError(
                "kv_connector_extra_config.topology",
                directory,
                "must be the path of a topology directory",
            )
        policy = getattr(transfer, "kv_load_failure_policy", "recompute")
        if policy != "recompute":
            raise ConfigurationError(
                "kv_load_failure_policy",
                policy,
                "must be 'recompute': with other policies a lost object fails its request",
            )
        topology = load_for_engine(Path(directory))
        planner = planner_for(vllm_config, kv_cache_config, topology.structural.chunk_tokens)
        if role is KVConnectorRole.WORKER:
            self._worker = KVTierConnectorWorker(
                vllm_config, kv_cache_config, topology.structural, planner
            )
            first = int(getattr(vllm_config.parallel_config, "rank", 0)) == 0
            self._counted_tokens = planner.chunk_tokens if first else 0
            return
        engine = engine_name(vllm_config)
        identity = IdentityBuilder(vllm_config, planner, topology.structural)
        session = TierdSession(topology, planner, engine, identity)
        adapters = AdapterDigests(AdapterFiles(adapter_settings(vllm_config)))
        scheduler = KVTierConnectorScheduler(session, planner, adapters=adapters)
        scheduler.events = events_for(vllm_config, kv_cache_config, topology, planner, session)
        self._supervisor = early_start.take(directory, topology)
        self._supervisor.ensure()
        engine_signals.listen(scheduler)
        scheduler.start()
        self._scheduler = scheduler
        logger.info(
            "KVTier: configured engine %s with chunks of %d tokens and tiers %s",
            engine,
            planner.chunk_tokens,
            ", ".join(tier.name for tier in topology.structural.tiers),
        )

    def _count_error(self, hook: str) -> None:
        self._stats.add("errors", 1, hook)

    @property
    def requires_kv_delivery(self) -> bool:
        """Returns False: a request that is preempted during a store loses nothing."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Returns False. vLLM asks when it configures an engine, so tierd can start early."""
        directory = configured_topology(extra_config)
        if directory:
            early_start.note_attached(directory, not envs.VLLM_ENABLE_V1_MULTIPROCESSING)
        return False

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        worker = self._worker
        if worker is not None:
            self._guarded("register_kv_caches", None, worker.register_kv_caches, kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Voids stores whose blocks a reset of the prefix cache took from them.

        Otherwise no block is reused while a copy still accesses it: the scheduler side references
        the blocks that a store reads, and a request that waits for its load cannot be preempted.
        """
        self._begin_step(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Before each step's kernels. vLLM 0.24 calls ``handle_preemptions`` in some steps only."""
        super().bind_connector_metadata(connector_metadata)
        self._begin_step(connector_metadata)

    def _begin_step(self, metadata: KVConnectorMetadata) -> None:
        worker = self._worker
        if worker is not None:
            self._guarded("begin_step", None, worker.begin_step, metadata)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: object) -> bool:
        """0.33: whether the engine may sleep."""
        return True

    def unregister_kv_caches(self) -> None:
        """0.33: the memory of the KV cache is about to be released."""
        if self._worker is not None:
            self._guarded("unregister_kv_caches", None, self._worker.suspend_copies)

    def restore_kv_caches(self) -> None:
        """0.33: the memory of the KV cache is there again."""
        if self._worker is not None:
            self._guarded("restore_kv_caches", None, self._worker.resume_copies)

    def start_load_kv(self, forward_context: object, **kwargs: Any) -> None:
        worker, metadata = self._worker, self._connector_metadata
        if worker is None or metadata is None:
            return
        errors = self._guard.errors
        self._guarded("start_load_kv", None, worker.start_load_kv, metadata)
        if self._guard.errors > errors:
            self._guarded("start_load_kv", None, worker.enter_jobs, metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: no layer waits."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: Any
    ) -> None:
        """Stores copy whole chunks after the step."""

    def wait_for_save(self) -> None:
        worker = self._worker
        if worker is not None:
            self._guarded("wait_for_save", None, worker.wait_for_save)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        worker = self._worker
        nothing: tuple[set[str] | None, set[str] | None] = (None, None)
        if worker is None:
            return nothing
        return self._results("get_finished", nothing, worker.get_finished, finished_req_ids)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """0.32, in place of ``get_finished``."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

        worker, nothing = self._worker, KVConnectorTransferResults()
        if worker is None:
            return nothing
        call = worker.get_transfer_results
        return self._results("get_transfer_results", nothing, call, finished_req_ids)

    def _results(self, hook: str, nothing: T, call: Callable[[set[str]], T], ids: set[str]) -> T:
        results = self._guarded(hook, None, self._take_results, call, ids)
        if results is not None:
            return results
        self._invalid_blocks = set()
        if self._worker is not None:
            self._guarded(hook, None, self._worker.withhold_reports)
        return nothing

    def _take_results(self, call: Callable[[set[str]], T], finished_req_ids: set[str]) -> T:
        """Takes the requests whose load has ended together with the blocks that were not filled:
        vLLM must not get one without the other."""
        self._invalid_blocks = set()
        results = call(finished_req_ids)
        if self._worker is not None:
            self._invalid_blocks = self._worker.get_block_ids_with_load_errors()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._invalid_blocks

    def build_connector_worker_meta(self) -> WorkerReport | None:
        worker = self._worker
        nothing: WorkerReport | None = None
        if worker is None:
            return nothing
        return self._guarded(
            "build_connector_worker_meta", nothing, worker.build_connector_worker_meta
        )

    # Scheduler side.

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        if self._scheduler is not None:
            self._guarded(
                "bind_gpu_block_pool", None, self._scheduler.bind_gpu_block_pool, gpu_block_pool
            )

    def on_new_request(self, request: Request) -> None:
        # vLLM 0.24 does not call this, and nothing is prefetched.
        scheduler = self._scheduler
        if scheduler is not None and not self._guard.off_reason:
            self._guarded("on_new_request", None, scheduler.on_new_request, request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        scheduler = self._scheduler
        nothing: tuple[int | None, bool] = (0, False)
        if scheduler is None or self._guard.off_reason:
            return nothing
        return self._guarded(
            "get_num_new_matched_tokens",
            nothing,
            scheduler.get_num_new_matched_tokens,
            request,
            num_computed_tokens,
        )

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        hook = "update_state_after_alloc"
        scheduler = self._scheduler
        if scheduler is None or (self._guard.off_reason and num_external_tokens <= 0):
            return
        block_ids = blocks.get_block_ids()
        started = self._guarded(
            hook,
            False,
            scheduler.update_state_after_alloc,
            request,
            block_ids,
            num_external_tokens,
        )
        if not started and num_external_tokens > 0:
            self._guarded(hook, None, scheduler.fail_load, request, block_ids)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[Any, int]:
        """0.32: where the tokens of the load that was just started come from."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        scheduler = self._scheduler
        if not num_external_tokens:
            return {}
        sources: dict[Any, int] = {}
        if scheduler is not None:
            nothing: dict[int, int] = {}
            by_tier = self._guarded(
                "get_external_cache_hit_sources",
                nothing,
                scheduler.get_external_token_sources,
                request,
            )
            for tier, tokens in by_tier.items():
                source = CacheHitSource.HOST if tier == 0 else CacheHitSource.DISK
                sources[source] = sources.get(source, 0) + tokens
        if sum(sources.values()) != num_external_tokens:
            return {CacheHitSource.EXTERNAL_UNSPECIFIED: num_external_tokens}
        return sources

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        hook = "build_connector_meta"
        self._steps += 1
        scheduler = self._scheduler
        metadata: StepMetadata | None = None
        if scheduler is not None:
            if self._guard.rearm(scheduler.start_over):
                self._stats.add("rearms", 1)
            if not self._guard.off_reason:
                metadata = self._guarded(
                    hook, None, scheduler.build_connector_meta, scheduler_output
                )
            if metadata is None:
                metadata = self._guarded(hook, None, scheduler.build_load_meta)
        return metadata if metadata is not None else StepMetadata(step=self._steps)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._scheduler is not None:
            self._guarded(
                "update_connector_output",
                None,
                self._scheduler.update_connector_output,
                connector_output.kv_connector_worker_meta,
                recomputes=bool(getattr(connector_output, "invalid_block_ids", None)),
            )

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Never delays the release of blocks: KVTier references those that a store still reads."""
        if self._scheduler is not None:
            self._guarded(
                "request_finished",
                None,
                self._scheduler.request_finished,
                request,
                block_ids,
                store=not self._guard.off_reason,
            )
        return False, None

    def has_pending_push_work(self) -> bool:
        scheduler = self._scheduler
        return scheduler is not None and self._guarded(
            "has_pending_push_work", False, scheduler.has_pending_work
        )

    def take_events(self) -> Iterable[Any]:
        scheduler = self._scheduler
        if scheduler is None or scheduler.events is None:
            return ()
        nothing: list[object] = []
        return self._guarded("take_events", nothing, scheduler.take_events)

    def reset_cache(self) -> bool | None:
        scheduler = self._scheduler
        # An exception turns KVTier off, after which nothing matches: that is a reset as well.
        return (
            True if scheduler is None else self._guarded("reset_cache", True, scheduler.reset_cache)
        )

    # Both sides.

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        self._guarded("get_kv_connector_stats", None, self._collect_stats)
        off = self._guarded("get_kv_connector_stats", self._reported_off, self._is_off)
        self._stats.add(WITHOUT_TIERS[0], off - self._reported_off)
        self._reported_off = off
        if self._stats.is_empty():
            return None
        collected, self._stats = self._stats, KVTierStats()
        return collected

    def _is_off(self) -> bool:
        """Whether this process loads and stores nothing. A rank continues after an error."""
        if self._worker is not None:
            return bool(self._worker.off_reason)
        return self._scheduler is None or bool(self._guard.off_reason)

    def _collect_stats(self) -> None:
        if self._scheduler is not None:
            self._scheduler.collect_stats(self._stats)
            self._scheduler.report_gauges(self._stats)
        if self._worker is not None:
            add_worker_counts(self._stats, self._worker.take_counts(), self._counted_tokens)

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return KVTierStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        try:
            return KVTierPromMetrics(
                vllm_config,
                metric_types,
                labelnames,
                per_engine_labelvalues,
                tier_names(vllm_config.kv_transfer_config),
            )
        except Exception as error:
            logger.exception("KVTier: metrics could not be registered: %s", error)
            return None

    def shutdown(self) -> None:
        if self._worker is not None:
            self._guarded("shutdown", None, self._worker.shutdown)
        if self._scheduler is not None:
            self._guarded("shutdown", None, self._scheduler.shutdown)
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            self._guarded("shutdown", None, supervisor.stop, SUPERVISOR_SECONDS)
