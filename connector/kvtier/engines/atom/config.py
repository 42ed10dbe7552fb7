"""How ATOM's configuration maps to KVTier's: what is served, the planner, and the engine's name.

The scheduler side and the worker side call the same functions, so they agree without a message.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from kvtier.engines.atom.scheduler import AtomLimits
from kvtier.errors import ConfigurationError
from kvtier.planner import GroupKind, KVCacheGroup, Planner, UnsupportedGeometryError

logger = logging.getLogger(__name__)
MIN_LOAD_VARIABLE = "OFFLOAD_MIN_LOAD_TOKENS"
MIN_SAVE_VARIABLE = "OFFLOAD_MIN_SAVE_TOKENS"
"""The variables of ATOM's own offload connector. Without them the policy's ``minLoadTokens``
applies to both."""
ROLES = ("offload", "kv_both")
RUNNER_PACKAGE = "atom.model_engine."
"""Of the model runners whose weights stay what they were at the start."""
PREFILL_ALIGNMENT = 64
"""ATOM cuts prefill steps to a multiple of this, or of the block size if that is larger."""


def transfer_config(config: Any) -> Mapping[str, Any]:
    """Returns ATOM's ``kv_transfer_config``."""
    found = getattr(config, "kv_transfer_config", None)
    return found if isinstance(found, Mapping) else {}


def topology_directory(config: Any) -> str:
    """Returns the topology directory of the configuration. Raises ``ConfigurationError``."""
    directory = str(transfer_config(config).get("topology") or "").strip()
    directory = directory or os.environ.get("KVTIER_TOPOLOGY", "").strip()
    if not directory:
        raise ConfigurationError(
            "kv_transfer_config.topology", directory, "must be the path of a topology directory"
        )
    return directory


def check_served(config: Any) -> None:
    """Raises ``ConfigurationError`` or ``UnsupportedGeometryError`` with the reason."""
    role = str(transfer_config(config).get("kv_role", "offload"))
    if role not in ROLES:
        raise ConfigurationError(
            "kv_transfer_config.kv_role", role, f"must be one of {', '.join(ROLES)}"
        )
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        size = int(getattr(config, name, 1) or 1)
        if size != 1:
            raise UnsupportedGeometryError(f"{name}: Invalid value: {size}: must be 1")
    if getattr(config, "enable_rapidserve", False):
        raise UnsupportedGeometryError("enable_rapidserve: Invalid value: True: must be False")
    runner = str(getattr(config, "runner_qualname", "") or "")
    if runner and not runner.startswith(RUNNER_PACKAGE):
        # That of reinforcement learning replaces the weights and releases the KV cache, and tells
        # no connector.
        raise UnsupportedGeometryError(
            f"runner_qualname: Invalid value: {runner}: must be in {RUNNER_PACKAGE}*"
        )
    if getattr(config, "pool_entries", None):
        raise UnsupportedGeometryError("the model has state per request, which is not supported")


def planner_for(config: Any, chunk_tokens: int) -> Planner:
    """Returns the planner of an engine. Raises as ``check_served`` does."""
    check_served(config)
    block = int(config.kv_cache_block_size)
    group = KVCacheGroup(GroupKind.FULL, block, "ATOM paged KV")
    ranks = int(getattr(config, "tp_world_size", 0) or config.tensor_parallel_size)
    planner = Planner.build([group], chunk_tokens, block, ranks)
    # Keys come from token ids, one per chunk.
    return Planner.build([group], planner.chunk_tokens, planner.chunk_tokens, ranks)


def engine_name(config: Any) -> str:
    """Returns the name of one engine core and its workers."""
    engine = str(transfer_config(config).get("engine_id") or "engine")
    parallel = getattr(config, "parallel_config", None)
    return f"{engine}/dp{int(getattr(parallel, 'data_parallel_rank', 0) or 0)}"


def limits_of(config: Any) -> AtomLimits:
    """Returns the limits of the scheduler side."""
    budget = int(config.max_num_batched_tokens)
    threshold = int(getattr(config, "long_prefill_token_threshold", 0) or 0)
    step = min(budget, threshold) if threshold > 0 else budget
    if getattr(config, "enable_chunked_prefill", True):
        step -= step % max(int(config.kv_cache_block_size), PREFILL_ALIGNMENT)
    return AtomLimits(
        num_blocks=int(config.num_kvcache_blocks),
        step_tokens=step,
        min_load_tokens=_tokens(MIN_LOAD_VARIABLE),
        min_save_tokens=_tokens(MIN_SAVE_VARIABLE),
    )


def _tokens(variable: str) -> int | None:
    text = os.environ.get(variable, "").strip()
    if not text:
        return None
    try:
        return max(0, int(text))
    except ValueError:
        logger.warning("KVTier: %s: Invalid value: %r: must be a number", variable, text)
        return None
