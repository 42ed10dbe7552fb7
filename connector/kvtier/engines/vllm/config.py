"""How vLLM's configuration maps to KVTier's: the engine's name, the planner and the log handlers.

The scheduler side and the worker side call the same functions, so they agree without a message.
KV cache groups are recognized by exact type: a subclass may lay out its KV in an unknown way.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from kvtier.planner import GroupKind, KVCacheGroup, Planner, UnsupportedGeometryError, check_served

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


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

    Raises ``UnsupportedGeometryError`` for models that KVTier does not serve.
    """
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = int(getattr(parallel, name, 1) or 1)
        if size != 1:
            raise UnsupportedGeometryError(f"{name}: Invalid value: {size}: must be 1")
    groups = [group_of(group) for group in kv_cache_config.kv_cache_groups]
    # Before vLLM resolves its block sizes, which raises for some groups.
    check_served(groups)
    return Planner.build(
        groups, chunk_tokens, hash_tokens(vllm_config, kv_cache_config), int(parallel.world_size)
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
    if type(spec) is specs.UniformTypeKVCacheSpecs:
        inner = list(spec.kv_cache_specs.values())
        kinds = {type(each) for each in inner}
        sizes = {each.block_size for each in inner}
        if len(kinds) != 1 or len(sizes) != 1:
            return KVCacheGroup(
                GroupKind.OTHER,
                int(spec.block_size),
                f"mixed: {sorted(kind.__name__ for kind in kinds)}",
            )
        spec = inner[0]
    name = type(spec).__name__
    block_tokens = int(getattr(spec, "block_size", 0) or 0)
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        return KVCacheGroup(GroupKind.OTHER, block_tokens, f"{name}, excluded from KV transfer")
    if getattr(spec, "prefix_replay_tokens", 0):
        return KVCacheGroup(GroupKind.OTHER, block_tokens, f"{name} with prefix replay")
    if type(spec) in (specs.FullAttentionSpec, specs.MLAAttentionSpec):
        return KVCacheGroup(GroupKind.FULL, block_tokens, name)
    if type(spec) is specs.SlidingWindowSpec:
        return KVCacheGroup(GroupKind.SLIDING, block_tokens, name, int(spec.sliding_window))
    if type(spec) is specs.MambaSpec:
        return KVCacheGroup(GroupKind.STATE, block_tokens, name)
    return KVCacheGroup(GroupKind.OTHER, block_tokens, name)


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
