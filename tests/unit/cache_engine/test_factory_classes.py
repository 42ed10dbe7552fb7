"""The two classes of the CacheEngine path, made from ATOM's configuration as its factory does."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.cache_engine import config_file, wait
from tests.support.cache_engine_bench import BLOCK, BLOCKS, CHUNK, SECONDS, RealRanks, is_live
from tests.support.memory_cache import MemoryCache, Storage

from kvtier.engines.atom import cache_engine_config, cache_engine_worker, lookup_connection
from kvtier.engines.atom.connector import KVTierCacheEngineConnector, KVTierCacheEngineScheduler
from kvtier.testing.atom_blocks import StandInBlocks
from kvtier.testing.atom_engine import StandInEngine, expected_output
from kvtier.testing.atom_scheduler import SchedulerOptions, StandInScheduler
from kvtier.testing.atom_sequence import StandInSequence

PROMPT = list(range(41))


def test_an_engine_that_is_configured_for_it_loads_through_the_cache_engine_path(
    tmp_path: Path, run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(1)

    def open_cache(_file: Path, _name: str, _ranks: int, rank: int, copier: Any, chunk: int) -> Any:
        return MemoryCache(storage, rank, copier, chunk)

    monkeypatch.setattr(lookup_connection, "PARTIAL_FRESH_SECONDS", 0.0)
    monkeypatch.setattr(cache_engine_config, "require_lmcache", lambda: None)
    monkeypatch.setattr(cache_engine_worker, "_opener", lambda: open_cache)
    for name in ("OFFLOAD_MIN_LOAD_TOKENS", "OFFLOAD_MIN_SAVE_TOKENS"):
        monkeypatch.setenv(name, str(CHUNK))
    config = SimpleNamespace(
        model="model",
        max_model_len=4096,
        kv_cache_dtype="auto",
        kv_transfer_config={
            "kv_connector": "kvtier-lmcache",
            "kv_role": "offload",
            "engine_id": "e",
            "lmcache_config": str(config_file(tmp_path, {})),
            "run_directory": str(run_directory),
            "lookup_seconds": 1.0,
        },
        tensor_parallel_size=1,
        kv_cache_block_size=BLOCK,
        num_kvcache_blocks=BLOCKS,
        max_num_batched_tokens=64,
    )
    worker, connector = KVTierCacheEngineConnector(config), KVTierCacheEngineScheduler(config)
    assert (worker.off_reason, connector.off_reason) == ("no KV cache is registered", "")
    cache = np.zeros((BLOCKS, BLOCK), dtype=np.uint64)
    tensor = torch.from_numpy(cache.view(np.int64))
    worker.register_kv_caches({0: SimpleNamespace(k_cache=tensor)}, num_blocks=BLOCKS)
    assert worker.off_reason == ""
    inner: Any = worker._worker
    scheduler_side: Any = connector._scheduler
    wait(lambda: inner.ready and is_live(scheduler_side._connection))
    blocks, scheduled = StandInBlocks(BLOCKS, BLOCK), SchedulerOptions(alignment=BLOCK)
    stand_in: Any = connector
    ranks: Any = RealRanks([worker])  # type: ignore[list-item]
    engine = StandInEngine(StandInScheduler(blocks, scheduled, stand_in), ranks, [cache])
    for number in range(2):
        seq = StandInSequence(number, list(PROMPT), BLOCK, 3)
        engine.scheduler.add(seq)
        deadline = time.monotonic() + SECONDS
        while not engine.idle:
            engine.step()
            assert time.monotonic() < deadline
        assert seq.output == expected_output(PROMPT, 3)
        wait(lambda: len(storage.markers) == 5)
        blocks.clear_index()
        cache[:] = 0
    statistics = connector.get_statistics()
    assert statistics.get("loaded_tokens") == 40, (statistics, inner.counts())
    assert statistics["errors"] == 0
    assert blocks.free == BLOCKS
    connector.shutdown()
    worker.shutdown()
    assert inner.off_reason == "shut down"
