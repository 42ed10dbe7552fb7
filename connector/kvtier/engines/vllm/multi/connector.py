"""``WeightedMultiConnector``: several vLLM KV connectors in one engine.

Every hook is passed to the children, or to the one that loads the request, behind a guard. What
vLLM's ``MultiConnector`` does differently: there the first child with a hit loads, a child that
answers "not yet" delays the request although another has its KV, the report of any child ends a
load, and an exception of one child ends the engine.

The hooks of vLLM 0.24 to 0.33 are here; those that only some releases have are marked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvtier.engines.vllm import connector as kvtier_connector
from kvtier.engines.vllm.config import use_vllm_log_handlers
from kvtier.engines.vllm.multi.child import ChildConnector
from kvtier.engines.vllm.multi.messages import (
    MultiHandshake,
    MultiKVEvents,
    MultiStepMetadata,
    MultiWorkerReport,
)
from kvtier.engines.vllm.multi.scheduler_side import MultiSchedulerSide, SchedulerGeometry
from kvtier.engines.vllm.multi.settings import (
    MultiSettings,
    check_engine,
    check_hybrid,
    resolve,
    resolve_extra,
)
from kvtier.engines.vllm.multi.statistics import MultiPromMetrics, MultiStats, stats_from_plain
from kvtier.engines.vllm.multi.worker_side import MultiWorkerSide
from kvtier.errors import ConfigurationError

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorHandshakeMetadata,
        KVConnectorTransferResults,
    )
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
WATCHES_WEIGHTS = kvtier_connector.__name__
"""Importing KVTier's connector, in the process that configures the engine, lets it see the weights
while they are loaded. The children are created only afterwards."""


class WeightedMultiConnector(KVConnectorBase_V1, SupportsHMA):
    """One per EngineCore (scheduler role) and one per rank (worker role)."""

    _clock = staticmethod(time.monotonic)

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        use_vllm_log_handlers()
        settings = resolve(vllm_config.kv_transfer_config)
        check_engine(vllm_config.kv_transfer_config)
        check_hybrid(settings, vllm_config, kv_cache_config)
        self._stats = MultiStats()
        self._children = self._create(settings, vllm_config, role, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        self._scheduler_side = MultiSchedulerSide(
            self._children if role is KVConnectorRole.SCHEDULER else (),
            _geometry(vllm_config, kv_cache_config),
            settings.max_wait_seconds,
            self._stats,
            self._clock,
        )
        self._worker_side = MultiWorkerSide(
            self._children if role is KVConnectorRole.WORKER else (),
            self._stats,
            self._clock,
            several_groups=len(groups) > 1,
            reports_failed=hasattr(base, "KVConnectorTransferResults"),
        )
        logger.info(
            "KVTier: %s of WeightedMultiConnector: %s",
            role.name.lower(),
            ", ".join(f"{child.name} with weight {child.spec.weight}" for child in self._children),
        )

    def _create(
        self,
        settings: MultiSettings,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> list[ChildConnector]:
        children = []
        for spec in settings.children:
            made, failure = None, None
            try:
                made = spec.connector_class(spec.vllm_config(vllm_config), role, kv_cache_config)
            except Exception as error:
                if spec.required:
                    raise
                failure = error
            child = ChildConnector(spec, made, self._clock)
            if failure is not None:
                child.note("__init__", failure)
            children.append(child)
        return children

    def _first(self, hook: str, *arguments: Any, **named: Any) -> None:
        """Calls a hook of every child while the engine starts. A child that raises is off."""
        for child in self._children:
            raised = child.raised
            child.start(hook, *arguments, **named)
            if child.raised != raised:
                child.turn_off(f"{hook} raised")

    def _each(self, hook: str, fallback: Any, *arguments: Any) -> list[Any]:
        """Calls a hook of every child; returns the answers in their order."""
        return [child.call(hook, fallback, *arguments) for child in self._children]

    # What vLLM asks the class before there is a connector.

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        answers = [
            child.connector_class.requires_piecewise_for_cudagraph(
                child.transfer.kv_connector_extra_config
            )
            for child in resolve_extra(extra_config).children
        ]
        return any(answers)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Raises ``ConfigurationError`` if children require different layouts."""
        layouts: dict[str, str] = {}
        for child in resolve(vllm_config.kv_transfer_config).children:
            layout = child.connector_class.get_required_kvcache_layout(
                child.vllm_config(vllm_config)
            )
            if layout is not None:
                layouts.setdefault(layout, child.name)
        if len(layouts) > 1:
            needed = ", ".join(f"{name} requires {layout}" for layout, name in layouts.items())
            raise ConfigurationError(
                "kv_connector_extra_config.connectors",
                sorted(layouts.values()),
                f"must require one layout of the KV cache: {needed}",
            )
        return next(iter(layouts), None)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """0.33: whether the engine may sleep. It may if every child supports that."""
        for child in resolve(kv_transfer_config).children:
            asked = getattr(child.connector_class, "supports_sleep_mode", None)
            if asked is not None and not asked(child.transfer):
                return False
        return True

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return stats_from_plain(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        try:
            settings = resolve(vllm_config.kv_transfer_config)
            return MultiPromMetrics(
                settings, vllm_config, metric_types, labelnames, per_engine_labelvalues
            )
        except Exception as error:
            logger.exception("KVTier: metrics could not be registered: %s", error)
            return None

    # Both sides.

    @property
    def requires_kv_delivery(self) -> bool:
        return any(child.flag("requires_kv_delivery") for child in self._children)

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """0.24: only if every child prefers it, because there is one KV cache."""
        living = [child for child in self._children if child.connector is not None]
        return bool(living) and all(child.flag("prefer_cross_layer_blocks") for child in living)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """0.32: only if every child does, because any may be the one that loads."""
        living = [child for child in self._children if child.connector is not None]
        return bool(living) and all(
            child.flag("supports_divergent_local_hybrid_hits") for child in living
        )

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        collected, self._stats = self._stats, MultiStats()
        self._scheduler_side.stats = self._worker_side.stats = self._stats
        for child in self._children:
            stats = child.call("get_kv_connector_stats", None)
            if stats is not None:
                collected.children[child.name] = stats
            for hook, amount in child.take_errors().items():
                collected.count("multi_errors", child.name, hook, amount)
        return None if collected.is_empty() else collected

    def shutdown(self) -> None:
        self._each("shutdown", None)

    # Worker side: the KV cache.

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """0.32: the memory of the KV cache. Raises ``ConfigurationError`` if several provide it."""
        found = {
            child.name: context
            for child in self._children
            if (context := child.start("get_mem_pool_context")) is not None
        }
        if len(found) > 1:
            raise ConfigurationError(
                "kv_connector_extra_config.connectors",
                sorted(found),
                "must have at most one connector that provides the memory of the KV cache",
            )
        return next(iter(found.values()), None)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._first("register_kv_caches", kv_caches)

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: Any) -> None:
        """0.24, in place of ``register_kv_caches`` where the layers share one tensor."""
        self._first("register_cross_layers_kv_cache", kv_cache, attn_backend)

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        self._first("set_host_xfer_buffer_ops", copy_operation)

    def unregister_kv_caches(self) -> None:
        """0.33: the memory of the KV cache is about to be released."""
        self._each("unregister_kv_caches", None)

    def restore_kv_caches(self) -> None:
        """0.33: the memory of the KV cache is there again."""
        self._each("restore_kv_caches", None)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        answers = [child.start("get_handshake_metadata") for child in self._children]
        if all(each is None for each in answers):
            return None
        return MultiHandshake(tuple(answers))

    # Worker side: steps.

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Older engines pass ids of requests; children with that signature get them here too."""
        self._worker_side.handle_preemptions(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, MultiStepMetadata):
            self._worker_side.bind(connector_metadata)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._worker_side.clear()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker_side.forward("start_load_kv", forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._worker_side.forward("wait_for_layer_load", layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._worker_side.forward("save_kv_layer", layer_name, kv_layer, attn_metadata, **kwargs)

    def finish_forward(self) -> None:
        """0.32: the model has read the KV of this step."""
        self._worker_side.forward("finish_forward")

    def wait_for_save(self) -> None:
        self._worker_side.forward("wait_for_save")

    def reset_capture_state(self) -> None:
        """0.32: CUDA graphs were captured."""
        self._each("reset_capture_state", None)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """0.24. What was sent is counted by the scheduler side, so none is reported here."""
        return None, self._worker_side.transfer_results(finished_req_ids).received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """0.32, in place of ``get_finished``."""
        found = self._worker_side.transfer_results(finished_req_ids)
        return base.KVConnectorTransferResults(
            finished_recving=found.received, failed_recving=found.failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker_side.take_invalid_blocks()

    def build_connector_worker_meta(self) -> MultiWorkerReport | None:
        return self._worker_side.report()

    def get_kv_connector_kv_cache_events(self) -> MultiKVEvents | None:
        answers = self._each("get_kv_connector_kv_cache_events", None)
        return None if all(each is None for each in answers) else MultiKVEvents(answers)

    # Scheduler side.

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """0.32, in place of ``bind_gpu_block_pool``."""
        self._kv_cache_manager = kv_cache_manager
        self._first("bind_kv_cache_manager", kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._first("bind_gpu_block_pool", gpu_block_pool)

    def get_finished_count(self) -> int | None:
        """None: every rank reports a load. Sends are counted by child on the scheduler side."""
        return None

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        self._hand_out("set_xfer_handshake_metadata", metadata)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self._hand_out("set_xfer_handshake_metadata_pp_aware", metadata)

    def _hand_out(self, hook: str, metadata: dict[Any, Any]) -> None:
        for index, child in enumerate(self._children):
            own = {
                rank: each.children[index]
                for rank, each in metadata.items()
                if isinstance(each, MultiHandshake) and each.children[index] is not None
            }
            if not own:
                continue
            raised = child.raised
            child.start(hook, own)
            if child.raised != raised:
                child.turn_off(f"{hook} raised")

    def on_new_request(self, request: Request) -> None:
        self._each("on_new_request", None, request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler_side.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler_side.update_state_after_alloc(request, blocks, num_external_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """0.32: the groups that the child of this request restores. The others are zeroed."""
        child = self._scheduler_side.loader(request)
        if child is None:
            return ()
        nothing: tuple[int, ...] = ()
        return child.read("get_loaded_kv_cache_group_ids", tuple, nothing, request)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[Any, int]:
        """0.32: where the tokens of the load that was just started come from."""
        child = self._scheduler_side.loader(request)
        nothing: dict[Any, int] = {}
        sources = nothing
        if child is not None and num_external_tokens:
            sources = child.read(
                "get_external_cache_hit_sources", dict, nothing, request, num_external_tokens
            )
        return sources or super().get_external_cache_hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduler_side.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler_side.update_connector_output(connector_output)

    def register_finished_partial_tail(
        self, request: Request, block_ids: Any, partial_tail_offloads: Any
    ) -> bool:
        """0.32: whether a child keeps the blocks of a request that is about to finish."""
        return self._scheduler_side.register_finished_partial_tail(
            request, block_ids, partial_tail_offloads
        )

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler_side.request_finished(request, block_ids)

    def take_events(self) -> Iterable[Any]:
        events: list[Any] = []
        for child in self._children:
            try:
                taken = () if child.connector is None else child.connector.take_events()
                events.extend(taken or ())
            except Exception as error:  # noqa: BLE001 - also while the events are generated
                child.note("take_events", error)
        return events

    def has_pending_block_frees(self) -> bool:
        """0.32: whether blocks become free without a preemption."""
        return any(self._each("has_pending_block_frees", False))

    def has_pending_push_work(self) -> bool:
        return any(self._each("has_pending_push_work", False))

    def reset_cache(self) -> bool | None:
        """Resets every child. One that fails loads nothing until a reset of it succeeds."""
        success = True
        for child in self._children:
            raised = child.raised
            done = child.call("reset_cache", None) is not False and child.raised == raised
            child.must_reset = not done
            success = success and done
        return success


def _geometry(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> SchedulerGeometry:
    groups, parallel = kv_cache_config.kv_cache_groups, vllm_config.parallel_config
    block_tokens = int(groups[0].kv_cache_spec.block_size) if groups else 1
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        # A block id stands for the blocks of all ranks that share a context.
        block_tokens *= int(getattr(parallel, name, 1) or 1)
    return SchedulerGeometry(block_tokens, len(groups), int(parallel.world_size))
