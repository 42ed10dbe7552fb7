"""What scheduler side and worker side must call alike without talking to each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def engine_name(vllm_config: VllmConfig) -> str:
    """Names one EngineCore and its workers towards tierd.

    vLLM draws ``engine_id`` at random where the user set none and hands the same configuration to all processes of an engine;
    the data-parallel rank tells engines apart that share one configuration.
    """
    transfer = vllm_config.kv_transfer_config
    engine = transfer.engine_id if transfer is not None else None
    parallel = vllm_config.parallel_config
    rank = getattr(parallel, "data_parallel_index", None)
    if rank is None:
        rank = getattr(parallel, "data_parallel_rank", 0)
    return f"{engine or 'engine'}/dp{rank or 0}"
