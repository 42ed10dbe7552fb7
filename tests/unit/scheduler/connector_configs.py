"""What vLLM hands to a connector, as far as the connector looks at it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.unit.scheduler.scheduler_testbed import BLOCK, topology
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvtier.config.models import Daemon


def full_spec(block: int = BLOCK) -> FullAttentionSpec:
    import torch

    return FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=32, dtype=torch.float32)


def cache_config(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer{number}"], spec) for number, spec in enumerate(specs)]
    caches = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups)
    if hasattr(caches, "hash_block_size"):
        caches.hash_block_size = BLOCK
    return caches


def connector_config(directory: Path, policy: str = "recompute", **parallel: Any) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            engine_id="e",
            is_kv_producer=True,
            kv_load_failure_policy=policy,
            kv_connector_extra_config={"topology": str(directory)},
        ),
        model_config=SimpleNamespace(use_mla=False),
        cache_config=SimpleNamespace(block_size=BLOCK),
        parallel_config=SimpleNamespace(
            **{
                "world_size": 1,
                "rank": 0,
                "data_parallel_index": 2,
                "decode_context_parallel_size": 1,
                "prefill_context_parallel_size": 1,
                **parallel,
            }
        ),
    )


def write_topology(directory: Path) -> None:
    """The topology directory of an engine whose tierd runs in another container."""
    structural = topology().structural.model_copy(
        update={"run_directory": str(directory / "run"), "daemon": Daemon.SIDECAR}
    )
    (directory / "structural.json").write_text(structural.model_dump_json(by_alias=True))


class Blocks:
    """KVCacheBlocks."""

    def __init__(self, table: list[int]) -> None:
        self.table = table

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (self.table,)


def empty_step() -> SimpleNamespace:
    """The scheduler's output of a step that computes nothing."""
    return SimpleNamespace(
        num_scheduled_tokens={},
        preempted_req_ids=(),
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda request_id: None),
    )
