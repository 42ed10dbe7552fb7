"""Loads and stores of one rank while LMCache works, is slow, or hangs: each is reported once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from tests.support.cache_engine import wait

from kvtier.engines.common.jobs import BlockRun, LoadJob
from kvtier.engines.common.worker_state import CompletionQueue, Counters
from kvtier.engines.lmcache import jobs as jobs_module
from kvtier.engines.lmcache.jobs import STORE_SECONDS, CacheJobs, LoadRequest, StoreRequest
from kvtier.engines.lmcache.transfers import LoadTransfer, StoreTransfer

A, B, C = (b"\0" + letter * 32 for letter in (b"a", b"b", b"c"))


class Cache:
    """Answers once ``go`` is set. ``copies`` counts what has reached blocks."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.entered = threading.Semaphore(0)
        self.copies: Counter[str] = Counter()
        self.present = 10
        self.reason = ""
        self.closed = False

    def store(self, transfer: StoreTransfer) -> str:
        self.entered.release()
        self.go.wait(60)
        if not transfer.gate.run(lambda: self.copies.update(["store"])):
            return "out_of_time"
        return self.reason

    def load(self, transfer: LoadTransfer) -> None:
        self.entered.release()
        self.go.wait(60)
        for index in range(min(self.present, len(transfer.keys))):
            if not transfer.gate.run(lambda: self.copies.update(["load"])):
                transfer.failure = "out_of_time"
                return
            transfer.loaded = index + 1
        if transfer.loaded < len(transfer.keys):
            transfer.failure = "missing"
            transfer.missing.extend(range(transfer.loaded, len(transfer.keys)))

    def close(self) -> None:
        self.closed = True


class Reports:
    def __init__(self) -> None:
        self.said: list[tuple[str, tuple[tuple[bytes, int], ...]]] = []
        self.attached = True

    def stored(self, items: Sequence[tuple[bytes, int]]) -> bool:
        self.said.append(("stored", tuple(items)))
        return self.attached

    def lost(self, items: Sequence[tuple[bytes, int]]) -> bool:
        self.said.append(("lost", tuple(items)))
        return self.attached


class Case:
    def __init__(self) -> None:
        self.now = 100.0
        self.cache, self.reports, self.counters = Cache(), Reports(), Counters()
        self.completions = CompletionQueue(single_group=True)
        self.jobs = CacheJobs(
            self.cache, self.completions, self.reports, self.counters, lambda: self.now
        )
        self.jobs.start()
        self.loads: dict[int, str] = {}
        self.stores: Counter[int] = Counter()

    def load(self, number: int, *keys: bytes, seconds: float = 5.0) -> None:
        runs = tuple(BlockRun(0, 0, (2 * index, 2 * index + 1)) for index in range(len(keys)))
        job = LoadJob(number, f"r#{number}", runs, seconds)
        self.jobs.submit_loads([LoadRequest(job, keys, (7,) * len(keys))], None)

    def store(self, number: int, key: bytes) -> None:
        request = StoreRequest(number, key, 7, BlockRun(0, 0, (0, 1)))
        self.jobs.submit_stores([request], None)

    def poll(self) -> None:
        self.jobs.poll()
        taken = self.completions.take()
        for result in taken.loads:
            assert result.load not in self.loads, "reported twice"
            self.loads[result.load] = result.reason
        self.stores.update(taken.stores_done)

    def until(self, loads: int = 0, stores: int = 0) -> None:
        def ended() -> bool:
            self.poll()
            return len(self.loads) >= loads and sum(self.stores.values()) >= stores

        wait(ended)


@pytest.fixture
def case() -> Iterator[Case]:
    case = Case()
    yield case
    case.cache.go.set()
    case.jobs.close(60.0)


def test_jobs_end_and_ranks_say_what_they_hold_and_have_lost(case: Case) -> None:
    case.store(1, A)
    case.load(2, A, B)
    case.until(loads=1, stores=1)
    assert case.loads == {2: ""}
    assert case.reports.said == [("stored", ((A, 7),))]
    case.cache.present = 1
    case.load(3, A, B, C)
    case.until(loads=2)
    assert case.loads[3] == "missing"
    assert case.reports.said[-1] == ("lost", ((B, 7), (C, 7)))


def test_a_load_that_hangs_fails_in_time_and_touches_no_block_later(case: Case) -> None:
    case.cache.go.clear()
    case.load(1, A)
    assert case.cache.entered.acquire(timeout=60)
    case.load(2, A)
    case.poll()
    assert case.loads == {}
    case.now += 6
    case.until(loads=2)
    assert case.loads == {1: "timeout", 2: "timeout"}
    case.load(3, A)
    case.poll()
    assert case.loads[3] == "hung", "at once"
    case.cache.go.set()
    wait(lambda: case.jobs._load is None)
    assert case.cache.copies["load"] == 0
    case.load(4, A)
    case.until(loads=4)
    assert case.loads[4] == ""


def test_a_store_that_hangs_frees_its_blocks_in_time_and_is_never_committed(case: Case) -> None:
    case.cache.go.clear()
    case.store(1, A)
    assert case.cache.entered.acquire(timeout=60)
    case.now += STORE_SECONDS + 1
    case.until(stores=1)
    case.store(2, B)
    case.until(stores=2)
    assert case.counters.snapshot()["stores_hung"] == 1
    case.cache.go.set()
    wait(lambda: case.jobs._store is None)
    assert case.cache.copies["store"] == 0
    assert case.reports.said == []


def test_loads_go_on_while_stores_hang(case: Case) -> None:
    case.cache.go.clear()
    case.store(1, A)
    assert case.cache.entered.acquire(timeout=60)
    blocked, case.cache.go = case.cache.go, threading.Event()
    case.cache.go.set()
    case.load(2, A)
    case.until(loads=1)
    assert case.loads == {2: ""}
    blocked.set()


def test_a_cancelled_load_is_reported_and_the_next_one_runs(case: Case) -> None:
    case.cache.go.clear()
    case.load(1, A)
    assert case.cache.entered.acquire(timeout=60)
    case.load(2, A)
    case.jobs.cancel([1, 2, 99])
    case.until(loads=2)
    assert case.loads == {1: "cancelled", 2: "cancelled"}
    case.load(3, A)
    case.cache.go.set()
    case.until(loads=3)
    assert case.loads[3] == ""
    assert case.cache.copies["load"] == 1


def test_no_more_jobs_wait_than_the_limit(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "MAX_QUEUED", 2)
    case.cache.go.clear()
    case.load(0, A)
    assert case.cache.entered.acquire(timeout=60)
    for number in range(1, 5):
        case.load(number, A)
    case.poll()
    assert case.loads == {3: "queue_full", 4: "queue_full"}


def test_a_store_that_cannot_be_reported_is_not_counted_as_stored(case: Case) -> None:
    case.reports.attached = False
    case.store(1, A)
    case.until(stores=1)
    assert case.counters.snapshot() == {"stores_not_reported": 1}


def test_the_end_reports_every_job_though_lmcache_hangs(case: Case) -> None:
    case.cache.go.clear()
    case.load(1, A)
    case.store(2, A)
    for _ in range(2):
        assert case.cache.entered.acquire(timeout=60)
    case.load(3, A)
    assert not case.jobs.close(0.01), "a thread is left behind"
    assert not case.cache.closed
    case.load(4, A)
    case.until(loads=3, stores=1)
    assert set(case.loads.values()) == {"off"}
    case.cache.go.set()
    assert case.jobs.close(60.0)
    assert case.cache.copies == {}
