"""What vLLM's own offloading is made from, without an engine. Imports vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BLOCK_TOKENS = 16


def offloading_config(
    extra: Mapping[str, Any], engine: str, block_bytes: int, dtype: str = "float32"
) -> Any:
    """As vLLM's connector makes it for a dense model with one group and one rank. ``extra``: its ``kv_connector_extra_config``."""
    from vllm.v1.kv_offload import config as native

    return native.OffloadingConfig(
        groups=(
            native.OffloadingGroupConfig(
                tokens_per_block=BLOCK_TOKENS, layer_names=("a", "b"), group_id=0
            ),
        ),
        worker_kv_bytes_per_block=block_bytes,
        enable_kv_cache_events=False,
        extra_config=dict(extra),
        engine_id=engine,
        model=native.OffloadingModelConfig(name="tiny", dtype=dtype),
        cache=native.OffloadingCacheConfig(
            tokens_per_hash=BLOCK_TOKENS, blocks_per_chunk=extra["block_size"] // BLOCK_TOKENS
        ),
        parallel=native.OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
    )
