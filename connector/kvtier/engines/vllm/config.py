"""How vLLM's configuration maps to KVTier's: topology, engine name, planner and log handlers.

The scheduler side and the worker side call the same functions, so they agree without a message.
KV cache groups are recognized by exact type: a subclass may lay out its KV in an unknown way.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvtier.planner import GroupKind, KVCacheGroup, Planner, UnsupportedGeometryError, check_served

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

TOPOLOGY_VARIABLE = "KVTIER_TOPOLOGY"


def topology_directory(transfer: KVTransferConfig | None) -> str:
    """Returns the directory of the topology; empty if none is configured."""
    return configured_topology(transfer.kv_connector_extra_config if transfer is not None else {})


def configured_topology(extra_config: Mapping[str, Any]) -> str:
    """Returns the directory of the topology of a connector with this configuration."""
    return str(extra_config.get("topology") or os.environ.get(TOPOLOGY_VARIABLE, ""))


def engine_name(vllm_config: VllmConfig) -> str:
    """Returns the name of one EngineCore and its workers.

    vLLM generates ``engine_id`` unless the user sets it, and gives the same configuration to all
    processes of an engine. The data-parallel rank distinguishes engines that share a configuration.
    """
    transfer = vllm_config.kv_transfer_config
    engine = transfer.engine_id if transfer is not None else None
    parallel = vllm_config.parallel_config
    rank = getattr(parallel, "data_parallel_index", None)
    if rank is None:
        rank = getattr(parallel, "data_parallel_rank", 0)
    return f"{engine or 'engine'}/dp{rank or 0}"


def planner_for(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, chunk_tokens: int
) -> Planner:
    """Returns the planner of an engine.

    Raises ``UnsupportedGeometryError`` for models and engines that KVTier does not serve.
    """
    parallel = vllm_config.parallel_config
    check_one_node(parallel)
    check_prefix_caching(vllm_config.cache_config)
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = int(getattr(parallel, name, 1) or 1)
        if size != 1:
            raise UnsupportedGeometryError(f"{name}: Invalid value: {size}: must be 1")
    groups = [
        replace(group_of(group), replicated=is_replicated(group, vllm_config.model_config))
        for group in kv_cache_config.kv_cache_groups
    ]
    # Before vLLM resolves its block sizes, which raises for some groups.
    check_served(groups)
    planner = Planner.build(
        groups, chunk_tokens, hash_tokens(vllm_config, kv_cache_config), int(parallel.world_size)
    )
    # vLLM numbers ranks by pipeline stage, and within a stage by tensor-parallel rank.
    return planner.with_stages(int(getattr(parallel, "tensor_parallel_size", 1) or 1))


def check_one_node(parallel: Any) -> None:
    """Raises ``UnsupportedGeometryError`` if the ranks of one engine run on several nodes.

    All ranks of an engine map the same host pool, so tierd would wait for the others endlessly.
    Data-parallel engines are engines of their own, and each may run on another node.
    """
    nodes = int(getattr(parallel, "nnodes_within_dp", getattr(parallel, "nnodes", 1)) or 1)
    if nodes == 1:
        return
    ranks = int(parallel.world_size)
    raise UnsupportedGeometryError(
        f"nnodes: Invalid value: {nodes}: an engine's {ranks} ranks must run on one node; they run "
        f"on {nodes} nodes with {ranks // nodes} ranks each (tensor_parallel_size "
        f"{getattr(parallel, 'tensor_parallel_size', '?')}, pipeline_parallel_size "
        f"{getattr(parallel, 'pipeline_parallel_size', '?')})"
    )


def check_prefix_caching(cache: Any) -> None:
    """Raises ``UnsupportedGeometryError`` if vLLM does not reuse KV between requests itself.

    The user may have cleared the setting so that tenants cannot measure each other's prompts. vLLM
    clears it where KV is not a function of the prefix alone: non-causal attention, MLA on CPUs
    without AMX, pooling models without support, FlashInfer and Triton MLA in batch-invariant mode,
    instances that run only the multimodal encoder. KV from a tier would be as wrong.
    """
    if not getattr(cache, "enable_prefix_caching", True):
        raise UnsupportedGeometryError(
            "enable_prefix_caching: Invalid value: false: must be true: the user or vLLM disabled "
            "prefix caching for this engine, so KVTier does not reuse KV between requests either"
        )


def hash_tokens(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Returns how many tokens one entry of ``Request.block_hashes`` covers, as EngineCore does."""
    resolved = getattr(kv_cache_config, "hash_block_size", None)
    if resolved:
        return int(resolved)
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def group_of(group: Any) -> KVCacheGroup:
    """Returns the planner's description of a KV cache group."""
    from vllm.v1 import kv_cache_interface as specs

    spec = group.kv_cache_spec
    uniform = type(spec) is specs.UniformTypeKVCacheSpecs
    layers = list(spec.kv_cache_specs.values()) if uniform else [spec]
    excluded = getattr(group, "host_resident", False) or not getattr(
        group, "enable_kv_transfer", True
    )
    described = [_group_of_layers(each, excluded) for each in layers]
    # What one layer does not allow holds for the group.
    first = next((each for each in described if each.kind is GroupKind.OTHER), described[0])
    if first.kind is GroupKind.OTHER or all(
        replace(each, name=first.name) == first for each in described
    ):
        return first
    names = ", ".join(sorted({each.name for each in described}))
    return KVCacheGroup(GroupKind.OTHER, int(spec.block_size), f"mixed: {names}")


def _group_of_layers(spec: Any, excluded: bool) -> KVCacheGroup:
    """Returns the description of a group whose layers all have ``spec``."""
    from vllm.v1 import kv_cache_interface as specs

    name = type(spec).__name__
    block_tokens = int(getattr(spec, "block_size", 0) or 0)
    if excluded:
        return KVCacheGroup(GroupKind.OTHER, block_tokens, f"{name}, excluded from KV transfer")
    if getattr(spec, "non_causal", False):
        # vLLM clears enable_prefix_caching for such models, but in EngineCore only: a worker
        # process has a copy of the configuration.
        return KVCacheGroup(GroupKind.OTHER, block_tokens, f"{name}, non-causal")
    if getattr(spec, "prefix_replay_tokens", 0):
        return KVCacheGroup(GroupKind.OTHER, block_tokens, f"{name} with prefix replay")
    if not getattr(spec, "prefix_cacheable", True):
        return KVCacheGroup(GroupKind.OTHER, block_tokens, f"{name}, not cacheable")
    if type(spec) in (specs.FullAttentionSpec, specs.MLAAttentionSpec):
        return KVCacheGroup(GroupKind.FULL, block_tokens, name)
    if type(spec) is specs.SlidingWindowSpec:
        window = int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))
        return KVCacheGroup(GroupKind.SLIDING, block_tokens, name, window)
    if type(spec) is specs.ChunkedLocalAttentionSpec:
        return KVCacheGroup(GroupKind.CHUNKED, block_tokens, name, int(spec.attention_chunk_size))
    if type(spec) is specs.MambaSpec:
        return _state_group(spec, block_tokens)
    return KVCacheGroup(GroupKind.OTHER, block_tokens, name)


def _state_group(spec: Any, block_tokens: int) -> KVCacheGroup:
    """Returns the description of a group of linear states.

    Only in mode ``align`` does vLLM say which block has the state of which token. Speculative
    decoding moves blocks of such a group while they are in use.
    """
    name = f"{type(spec).__name__}, {getattr(spec.mamba_type, 'name', spec.mamba_type)}"
    if spec.mamba_cache_mode != "align":
        what = f"{name} in mode {spec.mamba_cache_mode!r}: set mamba_cache_mode to 'align'"
        return KVCacheGroup(GroupKind.OTHER, block_tokens, what)
    if spec.num_speculative_blocks:
        what = f"{name} with speculative decoding: disable that"
        return KVCacheGroup(GroupKind.OTHER, block_tokens, what)
    return KVCacheGroup(GroupKind.STATE, block_tokens, name)


def is_replicated(group: Any, model_config: Any) -> bool:
    """Returns whether all tensor-parallel ranks hold the same KV of this group.

    They do with multi-head latent attention: the latent vector has one head, which is not split.
    And with linear states for which vLLM says so.
    """
    from vllm.v1 import kv_cache_interface as specs

    spec = group.kv_cache_spec
    uniform = type(spec) is specs.UniformTypeKVCacheSpecs
    inner = list(spec.kv_cache_specs.values()) if uniform else [spec]
    if all(type(each) is specs.MambaSpec for each in inner):
        return all(getattr(each, "tp_replicated", False) for each in inner)
    if not getattr(model_config, "use_mla", False):
        return False
    return all(type(each) is specs.MLAAttentionSpec and each.num_kv_heads == 1 for each in inner)


def use_vllm_log_handlers() -> None:
    """Adds vLLM's log handlers and level to the ``kvtier`` logger. Idempotent.

    vLLM configures only its own logger. Does nothing if the ``kvtier`` or root logger is
    configured.
    """
    ours, theirs = logging.getLogger("kvtier"), logging.getLogger("vllm")
    if ours.handlers or logging.getLogger().handlers or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.getEffectiveLevel())
    ours.propagate = False
