"""Random schedules of the ATOM stand-in on the CacheEngine path, with real lookups over ZeroMQ.

Shards are lost and damaged on one rank, stores fail, sequences are aborted, and rank 0's server is
started again. Every token is that of an engine without a cache, no block is lost, and every
sequence ends. Times are real, so what happens when differs between runs.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.support.cache_engine import config_file
from tests.support.cache_engine_bench import (
    BLOCK,
    BLOCKS,
    CHUNK,
    SECONDS,
    CacheEngineBench,
    read_options,
)
from tests.support.memory_cache import MemoryCache, Storage

from kvtier.engines.atom import cache_engine_config
from kvtier.testing.atom_engine import expected_output
from kvtier.testing.atom_sequence import StandInSequence

SEEDS = 6


def run_schedule(seed: int, bench: CacheEngineBench, storage: Storage) -> Counter[str]:
    """Runs one schedule to its end. Raises ``AssertionError``."""
    random, seen = Random(seed), Counter[str]()
    sequences: list[StandInSequence] = []
    aborted: set[int] = set()
    scheduler = bench.engine.scheduler
    for number in range(14):
        family, length = random.randrange(2), random.randrange(9, 72)
        tokens = [family * 1_000 + position for position in range(length)]
        seq = StandInSequence(number, tokens, BLOCK, random.choice((1, 3, 9)))
        sequences.append(seq)
        scheduler.add(seq)
        for _ in range(random.randrange(4, 40)):
            bench.engine.step()
            time.sleep(0.001)
            chance = random.random()
            if chance < 0.06:
                seen[storage.disturb(random)] += 1
            elif chance < 0.07:
                victim = random.choice(sequences)
                if victim not in bench.engine.finished:
                    scheduler.abort(victim)
                    aborted.add(victim.id)
            elif chance < 0.10:
                bench.blocks.clear_index()
            elif chance < 0.105:
                restart_server(bench)
                seen["restarts"] += 1
    deadline = time.monotonic() + SECONDS
    while not bench.engine.idle:
        bench.engine.step()
        time.sleep(0.0005)
        if time.monotonic() > deadline:
            raise AssertionError(f"seed {seed}: not ended: {bench.describe()}")
    for seq in sequences:
        prompt = seq.token_ids[: seq.num_prompt_tokens]
        if seq.output != expected_output(prompt, len(seq.output)):
            raise AssertionError(f"seed {seed}: sequence {seq.id} has wrong tokens")
        if seq not in bench.engine.finished:
            raise AssertionError(f"seed {seed}: sequence {seq.id} has not ended")
    if bench.blocks.free != BLOCKS:
        raise AssertionError(f"seed {seed}: {BLOCKS - bench.blocks.free} blocks leaked")
    seen["aborted"] += len(aborted)
    return seen


def restart_server(bench: CacheEngineBench) -> None:
    """Rank 0 answers again, without what it remembered."""
    server = bench.workers[0]._server
    assert server is not None
    assert server.close(SECONDS)
    server._stop = threading.Event()
    server._clients.clear()
    server.start()


def test_random_schedules_keep_tokens_blocks_and_sequences(
    tmp_path: Path, run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_engine_config, "require_lmcache", lambda: None)
    options = read_options(config_file(tmp_path, {}), run_directory)
    assert options.file.chunk_tokens == CHUNK
    storage, seen = Storage(2), Counter[str]()

    def open_cache(
        _file: Path, _namespace: str, _ranks: int, rank: int, copier: Any, chunk: int
    ) -> MemoryCache:
        cache = MemoryCache(storage, rank, copier, chunk)
        cache.store_fails = 0.1
        return cache

    for seed in range(SEEDS):
        bench = CacheEngineBench(options, open_cache=open_cache)
        try:
            bench.wait_ready()
            seen.update(run_schedule(seed, bench, storage))
            for worker in bench.workers:
                seen.update(worker.counts())
            seen.update(bench.connector.get_statistics())
        finally:
            bench.close()
    # Otherwise the schedules would say little.
    for name in ("loads_whole", "stores_whole", "lost", "damaged", "aborted", "restarts"):
        assert seen[name] > 0, (name, dict(seen))
    assert seen["loads_failed"] > 0, dict(seen)
