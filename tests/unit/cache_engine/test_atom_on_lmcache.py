"""ATOM's stand-in on the CacheEngine path: two ranks with LMCache's real engine each.

Every request of these tests has the tokens of an engine without a cache, and leaves no block.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.cache_engine import config_file, lmcache_in_process
from tests.support.cache_engine_bench import LOAD_SECONDS, CacheEngineBench, read_options
from tests.support.lmcache_backends import require_lmcache

from kvtier.engines.common import scheduler_stores
from kvtier.engines.lmcache.transfers import LoadTransfer, StoreTransfer

PROMPT = list(range(41))
"""Five chunks and a token."""
Make = Callable[..., CacheEngineBench]


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    path = tmp_path / "remote"
    path.mkdir()
    return path


@pytest.fixture
def make(tmp_path: Path, run_directory: Path, remote: Path) -> Iterator[Make]:
    """Starts engines, one after the other, with the same directory as LMCache's back end."""
    require_lmcache()
    made: list[CacheEngineBench] = []
    config = config_file(tmp_path, {"local_cpu": False, "remote_url": f"fs://localhost:0{remote}"})

    def start(**options: Any) -> CacheEngineBench:
        bench = CacheEngineBench(read_options(config, run_directory, **options))
        made.append(bench)
        bench.wait_ready()
        return bench

    with lmcache_in_process():
        yield start
        for bench in made:
            bench.close()


def stored(bench: CacheEngineBench) -> None:
    bench.serve(PROMPT)
    bench.wait_committed(PROMPT[:40])
    bench.forget_gpu()


def test_tokens_are_identical_with_loads_through_lmcache_and_after_a_restart(make: Make) -> None:
    bench = make()
    stored(bench)
    bench.serve(PROMPT)
    assert bench.count("loaded_tokens") == 40
    assert bench.count("loads_failed") == 0
    bench.forget_gpu()
    longer = [*PROMPT, *range(100, 120)]
    bench.serve(longer)
    assert bench.count("loaded_tokens") == 80, "what was stored is loaded, what follows computed"
    bench.wait_committed(longer[:56])
    bench.close()
    again = make()
    again.serve(longer)
    assert again.count("loaded_tokens") == 56
    assert sum(worker.counts().get("stores_whole", 0) for worker in again.workers) == 0


def test_a_shard_that_one_rank_has_lost_is_computed_and_stored_again(
    make: Make, remote: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_stores, "RECENTLY_COMMITTED_SECONDS", 0.0)
    bench = make()
    stored(bench)
    for path in remote.glob("*@2@1@*.data"):
        path.unlink()
    bench.serve(PROMPT)
    assert bench.count("loads_failed") == 1, "the other chunks are known to be lost as well"
    bench.wait_committed(PROMPT[:40], serving=PROMPT)
    bench.forget_gpu()
    bench.serve(PROMPT)
    assert bench.count("loads_whole") == 1
    assert bench.count("loads_failed") == 1
    assert bench.count("loaded_tokens") == 40


def test_a_shard_that_the_back_end_has_changed_is_computed(make: Make, remote: Path) -> None:
    bench = make()
    stored(bench)
    for path in remote.glob("*@2@0@*.data"):
        content = bytearray(path.read_bytes())
        if len(content) < 8192:
            continue  # a commit marker
        content[4096 + 30] ^= 1
        path.write_bytes(content)
    bench.serve(PROMPT)
    assert bench.count("loads_failed") == 1
    assert bench.workers[0].counts()["loads_damaged"] == 1


def test_what_one_rank_could_not_store_is_never_offered(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    jobs = bench.workers[1]._jobs
    assert jobs is not None

    def refuse(transfer: StoreTransfer) -> str:
        transfer.gate.close()
        return "no_room"

    monkeypatch.setattr(jobs._cache, "store", refuse)
    bench.serve(PROMPT)
    bench.forget_gpu()
    bench.serve(PROMPT)
    assert bench.count("loads") == 0
    server = bench.workers[0]._server
    assert server is not None
    index = server.index
    assert index is not None
    bench.wait(lambda: index.pending == 5)  # a rank's reports come after the request has ended
    assert len(index) == 0


def test_without_the_lookup_server_prompts_are_computed_and_it_comes_back(make: Make) -> None:
    bench = make()
    stored(bench)
    server = bench.workers[0]._server
    assert server is not None
    assert server.close(60.0)
    bench.wait(lambda: not bench.connection.client.attached)
    bench.serve(PROMPT)
    assert bench.count("loads") == 0
    bench.forget_gpu()
    server._stop = threading.Event()
    server.start()
    bench.wait_ready()
    bench.serve(PROMPT)
    assert bench.count("loaded_tokens") == 40


def test_an_lmcache_that_hangs_costs_its_deadline_and_then_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(load_seconds=0.2)
    stored(bench)
    jobs, go = bench.workers[1]._jobs, threading.Event()
    assert jobs is not None
    load = jobs._cache.load

    def hang(transfer: LoadTransfer) -> None:
        go.wait(60)
        load(transfer)

    monkeypatch.setattr(jobs._cache, "load", hang)
    for _ in range(3):
        bench.serve(PROMPT)
        bench.forget_gpu()
    assert bench.workers[1].counts()["loads_timeout"] == 1
    assert bench.workers[1].counts()["loads_hung"] == 2
    assert bench.count("pauses") == 1
    loads = bench.count("loads")
    bench.serve(PROMPT)
    assert bench.count("loads") == loads, "paused"
    bench.forget_gpu()
    before = [cache.copy() for cache in bench.caches]
    bench.connector._load_seconds = LOAD_SECONDS
    go.set()
    bench.wait(lambda: jobs._load is None)
    assert all((cache == old).all() for cache, old in zip(bench.caches, before, strict=True))
    bench.wait(lambda: not bench.connection.paused)
    bench.serve(PROMPT)
    assert bench.count("loads_whole") == 1


def test_jobs_that_come_before_lmcache_is_open_are_reported(
    tmp_path: Path, run_directory: Path
) -> None:
    require_lmcache()
    config = config_file(tmp_path, {})
    go = threading.Event()

    def slow(*_arguments: Any) -> Any:
        go.wait(60)
        raise RuntimeError("LMCache says no")

    bench = CacheEngineBench(read_options(config, run_directory), open_cache=slow)
    bench.serve(PROMPT)
    go.set()
    bench.wait(lambda: all("LMCache says no" in worker.off_reason for worker in bench.workers))
    bench.serve(PROMPT)
    assert bench.count("loads") == 0
    bench.close()
