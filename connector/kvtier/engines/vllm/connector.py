"""KVTier as a vLLM connector. Thin: each hook goes to the scheduler side or to the worker side, behind a guard.

vLLM ends the engine for an exception in any hook. So none leaves: it is logged with its place once, counted, and turns KVTier off for
this engine, while everything that vLLM is still owed (one report per load, the release of referenced blocks) goes on.

Both supported versions (0.24, 0.32) call the same hooks with the same meaning; what only one of them has is marked.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvtier.config.loader import load_for_engine
from kvtier.config.models import Topology
from kvtier.engines.vllm import config
from kvtier.engines.vllm.config import engine_name, planner_for
from kvtier.engines.vllm.identity import IdentityBuilder
from kvtier.engines.vllm.metadata import StepMetadata, WorkerReport
from kvtier.engines.vllm.metrics import KVTierPromMetrics, KVTierStats
from kvtier.engines.vllm.plugin import TOPOLOGY_VARIABLE
from kvtier.engines.vllm.scheduler import SchedulerSide
from kvtier.engines.vllm.worker import WorkerSide
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
"""For a tierd of its own to end, which takes a tenth of that; beside a hung mount it takes longer, and ends without the engine."""
T = TypeVar("T")


class KVTierConnector(KVConnectorBase_V1, SupportsHMA):
    """One per EngineCore (scheduler role) and one per rank (worker role)."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._supervisor: Supervisor | None = None
        self._off = ""
        self._stats = KVTierStats()
        self._steps = 0
        self._chunk_tokens = 0
        self._reports_stores = False
        try:
            config.use_vllm_log_handlers()
            self._begin(vllm_config, role, kv_cache_config)
        except KVTierError as error:
            self._off = str(error)
            self._stats.add("off", 1, type(error).__name__)
            logger.warning("KVTier: this engine serves without tiers: %s", self._off)
        except Exception as error:  # a cache never stops an engine
            self._off = f"{type(error).__name__}: {error}"
            self._stats.add("off", 1, type(error).__name__)
            logger.exception("KVTier: this engine serves without tiers")

    def _begin(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        transfer = vllm_config.kv_transfer_config
        extra = transfer.kv_connector_extra_config if transfer is not None else {}
        directory = str(extra.get("topology") or os.environ.get(TOPOLOGY_VARIABLE, ""))
        if not directory:
            raise ConfigurationError(
                "kv_connector_extra_config.topology", directory, "the topology directory"
            )
        policy = getattr(transfer, "kv_load_failure_policy", "recompute")
        if policy != "recompute":
            raise ConfigurationError(
                "kv_load_failure_policy",
                policy,
                "'recompute'; with anything else a lost object would end its request",
            )
        topology = load_for_engine(Path(directory))
        planner = planner_for(vllm_config, kv_cache_config, topology.structural.chunk_tokens)
        engine = engine_name(vllm_config)
        self._chunk_tokens = planner.chunk_tokens
        if role is KVConnectorRole.WORKER:
            self._worker = WorkerSide(
                vllm_config,
                kv_cache_config,
                topology,
                engine=engine,
                chunk_tokens=planner.chunk_tokens,
            )
            self._reports_stores = int(getattr(vllm_config.parallel_config, "rank", 0)) == 0
            return
        identity = IdentityBuilder(vllm_config, planner, topology.structural)
        side = SchedulerSide(topology, planner, engine, identity)
        self._supervise(Path(directory), topology)
        side.start()
        self._scheduler = side
        logger.info(
            "KVTier: engine %s, chunks of %d tokens, tiers %s",
            engine,
            planner.chunk_tokens,
            ", ".join(tier.name for tier in topology.structural.tiers),
        )

    def _supervise(self, directory: Path, topology: Topology) -> None:
        self._supervisor = Supervisor(directory, topology)
        self._supervisor.ensure()

    def _guarded(self, hook: str, call: Callable[[], T], otherwise: T) -> T:
        """What ``call`` returns, or ``otherwise`` if it raises: the one place where vLLM is kept from seeing an exception."""
        try:
            return call()
        except Exception as error:
            self._stats.add("errors", 1, hook)
            if not self._off:
                self._off = f"{hook}: {type(error).__name__}: {error}"
                logger.exception(
                    "KVTier: unexpected error in %s; this engine goes on without tiers", hook
                )
            return otherwise

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache is no delivery: a request that is preempted while something of it is stored loses nothing."""
        return False

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        worker = self._worker
        if worker is not None:
            self._guarded("register_kv_caches", lambda: worker.register_kv_caches(kv_caches), None)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        worker = self._worker
        if worker is not None:
            self._guarded(
                "handle_preemptions", lambda: worker.handle_preemptions(kv_connector_metadata), None
            )

    def start_load_kv(self, forward_context: object, **kwargs: Any) -> None:
        worker, metadata = self._worker, self._connector_metadata
        if worker is not None and metadata is not None:
            self._guarded("start_load_kv", lambda: worker.start_load_kv(metadata), None)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: no layer waits."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: Any
    ) -> None:
        """Stores read whole chunks after the step."""

    def wait_for_save(self) -> None:
        worker = self._worker
        if worker is not None:
            self._guarded("wait_for_save", worker.wait_for_save, None)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        worker = self._worker
        if worker is None:
            return None, None
        nothing: tuple[set[str] | None, set[str] | None] = (None, None)
        return self._guarded("get_finished", lambda: worker.get_finished(finished_req_ids), nothing)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """0.32, in place of ``get_finished``."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

        worker, nothing = self._worker, KVConnectorTransferResults()
        if worker is None:
            return nothing
        return self._guarded(
            "get_transfer_results", lambda: worker.get_transfer_results(finished_req_ids), nothing
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        worker = self._worker
        if worker is None:
            return set()
        return self._guarded(
            "get_block_ids_with_load_errors", worker.get_block_ids_with_load_errors, set()
        )

    def build_connector_worker_meta(self) -> WorkerReport | None:
        worker = self._worker
        if worker is None:
            return None
        return self._guarded(
            "build_connector_worker_meta", worker.build_connector_worker_meta, None
        )

    # Scheduler side.

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        if self._scheduler is not None:
            self._scheduler.bind(gpu_block_pool)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        side = self._scheduler
        nothing: tuple[int | None, bool] = (0, False)
        if side is None or self._off:
            return nothing
        return self._guarded(
            "get_num_new_matched_tokens",
            lambda: side.matched_tokens(request, num_computed_tokens),
            nothing,
        )

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        side = self._scheduler
        if side is None or (self._off and num_external_tokens <= 0):
            return
        begun = self._guarded(
            "update_state_after_alloc",
            lambda: side.allocated(request, blocks.get_block_ids(), num_external_tokens),
            False,
        )
        if not begun and num_external_tokens > 0:
            self._guarded(
                "update_state_after_alloc",
                lambda: side.fail_load(request, blocks.get_block_ids()),
                None,
            )

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[Any, int]:
        """0.32: where the tokens of the load that was just begun come from."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        side = self._scheduler
        if not num_external_tokens:
            return {}
        none: dict[int, int] = {}
        sources: dict[Any, int] = {}
        if side is not None:
            found = self._guarded(
                "get_external_cache_hit_sources", lambda: side.load_sources(request), none
            )
            for tier, tokens in found.items():
                source = CacheHitSource.HOST if tier == 0 else CacheHitSource.DISK
                sources[source] = sources.get(source, 0) + tokens
        if sum(sources.values()) != num_external_tokens:
            return {CacheHitSource.EXTERNAL_UNSPECIFIED: num_external_tokens}
        return sources

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._steps += 1
        side = self._scheduler
        step: StepMetadata | None = None
        if side is not None:
            if not self._off:
                step = self._guarded(
                    "build_connector_meta", lambda: side.build_step(scheduler_output), None
                )
            if step is None:
                step = self._guarded("build_connector_meta", side.rest_step, None)
        return step if step is not None else StepMetadata(step=self._steps)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        side = self._scheduler
        if side is not None:
            report = connector_output.kv_connector_worker_meta
            self._guarded("update_connector_output", lambda: side.output(report), None)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Never delays the blocks' release: what a store still reads, KVTier references itself."""
        side = self._scheduler
        if side is not None:
            store = not self._off
            self._guarded(
                "request_finished", lambda: side.finished(request, block_ids, store), None
            )
        return False, None

    def has_pending_push_work(self) -> bool:
        side = self._scheduler
        return side is not None and self._guarded("has_pending_push_work", lambda: side.busy, False)

    def take_events(self) -> Iterable[Any]:
        return ()

    def reset_cache(self) -> bool | None:
        side = self._scheduler
        # If it breaks down KVTier is off, and nothing will be offered any more: that is a reset as well.
        return True if side is None else self._guarded("reset_cache", side.reset, True)

    # Both sides.

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        self._guarded("get_kv_connector_stats", self._take_counts, None)
        if self._stats.is_empty():
            return None
        taken, self._stats = self._stats, KVTierStats()
        return taken

    def _take_counts(self) -> None:
        if self._scheduler is not None:
            self._scheduler.take_counts(self._stats)
        if self._worker is not None:
            self._take_worker_counts(self._worker)

    def _take_worker_counts(self, worker: WorkerSide) -> None:
        counters = worker.take_stats().counters
        for name, amount in counters.items():
            if name in ("loaded_bytes", "stored_bytes"):
                self._stats.add(name, amount)
            elif name == "stores_delivered" and self._reports_stores:
                self._stats.add("stored_chunks", amount)
                self._stats.add("stored_tokens", amount * self._chunk_tokens)
            elif name not in ("stores_delivered", "loads_whole"):
                self._stats.add("worker_events", amount, name)

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
            return KVTierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        except Exception as error:
            logger.exception("KVTier: its metrics cannot be registered: %s", error)
            return None

    def shutdown(self) -> None:
        worker, side, supervisor = self._worker, self._scheduler, self._supervisor
        if worker is not None:
            self._guarded("shutdown", worker.shutdown, None)
        if side is not None:
            self._guarded("shutdown", side.close, None)
        if supervisor is not None:
            self._supervisor = None
            self._guarded("shutdown", lambda: supervisor.stop(SUPERVISOR_SECONDS), None)
