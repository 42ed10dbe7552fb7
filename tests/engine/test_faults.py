"""A tier that fails, stalls or hangs, and a tierd that stops or dies: the tokens stay right."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
from tests.support.slow_copies import running_copies, set_copy_seconds, wait_copying

from kvtier.harness.engine_requests import ReferenceEngine
from kvtier.harness.engine_testbed import CHUNK_TOKENS, EngineTestbed
from kvtier.harness.tiny_model import prompt
from kvtier.tierd.wire import GENERATIONS_NAME
from kvtier.transfer.engine import Direction

CHUNKS = 8
ASKS_WITHOUT_WAITING = 12
"""More lookups than one retry needs, and far fewer than an endless repetition causes."""


def _stored(case: EngineTestbed, plain: ReferenceEngine, seed: int) -> list[int]:
    """A prompt whose chunks are in files, and neither in RAM nor in the GPU cache."""
    tokens = prompt(CHUNKS * CHUNK_TOKENS + 5, seed)
    before = len(case.files())
    assert case.requests().run(tokens) == plain.tokens(tokens)
    case.settle_stores()
    assert len(case.files()) == before + CHUNKS
    case.restart_daemon(signal.SIGKILL)
    case.wait_attached()
    case.empty_gpu_cache()
    return tokens


def test_a_tier_that_fails_every_read_is_a_miss(
    testbed: EngineTestbed, plain: ReferenceEngine
) -> None:
    tokens = _stored(testbed, plain, 300)
    testbed.set_faults(read={"fail": True})
    failures = testbed.tier_failures()
    requests = testbed.requests()
    with testbed.loads() as loads:
        assert requests.run(tokens) == plain.tokens(tokens)
    assert loads.tokens == 0
    testbed.wait_for(lambda: testbed.tier_failures() > failures, "no failed read was counted")


def test_a_tier_that_fails_after_some_reads_provides_the_prefix(
    testbed: EngineTestbed, plain: ReferenceEngine
) -> None:
    tokens = _stored(testbed, plain, 301)
    testbed.set_faults(read={"fail_after": 3})
    with testbed.loads("disk") as loads:
        assert testbed.requests().run(tokens) == plain.tokens(tokens)
    assert 0 < loads.tokens <= 3 * CHUNK_TOKENS


def test_a_read_that_never_ends_times_out(testbed: EngineTestbed, plain: ReferenceEngine) -> None:
    tokens = _stored(testbed, plain, 302)
    testbed.set_faults(read={"hang": True})
    with testbed.loads() as loads:
        assert testbed.requests().run(tokens) == plain.tokens(tokens)
    assert loads.tokens == 0


def test_a_request_that_waits_for_a_slow_tier_does_not_delay_others(
    testbed: EngineTestbed, plain: ReferenceEngine
) -> None:
    tokens = _stored(testbed, plain, 303)
    other = prompt(200, 304)
    testbed.set_faults(read={"hang": True})
    requests = testbed.requests()
    slow = requests.add(tokens)
    requests.engine.call("step", count=2)
    quick = requests.add(other)
    answer = requests.finish([quick])
    assert answer[quick]["tokens"] == plain.tokens(other)
    assert slow in requests.engine.call("state")["requests"]
    testbed.set_faults()
    assert requests.finish([slow])[slow]["tokens"] == plain.tokens(tokens)


def test_a_request_aborted_while_it_waits_leaves_nothing_behind(
    testbed: EngineTestbed, plain: ReferenceEngine
) -> None:
    tokens = _stored(testbed, plain, 305)
    testbed.set_faults(read={"delay_seconds": 3.0})
    requests = testbed.requests()
    name = requests.add(tokens)
    requests.engine.call("step", count=3)
    assert "WAITING" in requests.engine.call("state")["requests"][name]
    requests.abort(name)
    assert requests.engine.call("settle")
    assert requests.engine.call("state")["requests"] == {}
    testbed.set_faults()
    testbed.empty_gpu_cache()
    assert requests.run(tokens) == plain.tokens(tokens)


def test_a_load_from_ram_does_not_wait_for_a_daemon_that_hangs(
    testbed: EngineTestbed, plain: ReferenceEngine
) -> None:
    tokens = prompt(CHUNKS * CHUNK_TOKENS + 5, 309)
    requests = testbed.requests()
    assert requests.run(tokens) == plain.tokens(tokens)
    testbed.settle_stores()
    testbed.empty_gpu_cache()
    os.kill(testbed.daemon_pid(), signal.SIGSTOP)
    try:
        name = requests.add(tokens)
        with testbed.loads() as loads:
            answer = requests.finish([name])
    finally:
        os.kill(testbed.daemon_pid(), signal.SIGCONT)
    assert answer[name]["tokens"] == plain.tokens(tokens)
    assert loads.tokens == CHUNKS * CHUNK_TOKENS


@contextlib.contextmanager
def _reused_slots(testbed: EngineTestbed) -> Iterator[None]:
    """Every slot in use looks as if it had been reused since the engine was told of it."""
    words = np.memmap(testbed.run_directory / GENERATIONS_NAME, dtype=np.uint32, mode="r+")
    used = np.flatnonzero(words % 2 == 0)
    before = words[used].copy()
    words[used] += 1
    yield
    unchanged = words[used] == before + 1
    words[used[unchanged]] = before[unchanged]


def test_a_load_from_slots_that_were_reused_fails_and_is_not_repeated(
    testbed: EngineTestbed, plain: ReferenceEngine
) -> None:
    tokens = prompt(CHUNKS * CHUNK_TOKENS + 5, 310)
    requests = testbed.requests()
    assert requests.run(tokens) == plain.tokens(tokens)
    testbed.settle_stores()
    testbed.empty_gpu_cache()
    failures = testbed.load_failures()
    with _reused_slots(testbed), testbed.loads() as loads:
        name = requests.add(tokens)
        answer = requests.finish([name])
    assert answer[name]["tokens"] == plain.tokens(tokens)
    assert loads.tokens == 0
    assert testbed.load_failures() > failures
    assert requests.engine.call("lookup_counts")[name] <= ASKS_WITHOUT_WAITING


@pytest.fixture(params=[signal.SIGKILL, signal.SIGSTOP], ids=["SIGKILL", "SIGSTOP"])
def stop_signal(request: pytest.FixtureRequest, testbed: EngineTestbed) -> Iterator[signal.Signals]:
    """A signal for the daemon; afterwards it is replaced."""
    yield request.param
    testbed.restart_daemon(signal.SIGKILL)
    testbed.wait_attached()


def _lose_daemon_under_a_copy(case: EngineTestbed, stop_signal: signal.Signals) -> None:
    """A new tierd must not reuse a slot before the worker's copy has ended."""
    os.kill(case.daemon_pid(), stop_signal)
    if stop_signal is signal.SIGKILL:
        case.start_daemon()
        case.wait_for(
            lambda: (case.status() or {}).get("started", False), "the new daemon has no pool"
        )
        case.wait_snapshot()
        status = case.status()
        assert status is not None
        assert status["fenced"]
    else:
        case.wait_for(lambda: not case.drive("connector")["usable"], "the engine does not notice")
    assert sum(running_copies(case).values()) > 0
    set_copy_seconds(case, 0)


def test_tierd_is_lost_while_a_request_loads(
    testbed: EngineTestbed, plain: ReferenceEngine, stop_signal: signal.Signals
) -> None:
    tokens = prompt(CHUNKS * CHUNK_TOKENS + 5, 320 + stop_signal)
    requests = testbed.requests()
    assert requests.run(tokens) == plain.tokens(tokens)
    testbed.settle_stores()
    testbed.empty_gpu_cache()
    failures = testbed.load_failures()
    set_copy_seconds(testbed, 3600)
    name = requests.add(tokens)
    with testbed.loads("ram") as loads:
        wait_copying(testbed, Direction.TO_DEVICE)
        _lose_daemon_under_a_copy(testbed, stop_signal)
        assert requests.finish([name])[name]["tokens"] == plain.tokens(tokens)
    # What was copied before the worker drained is whole. It counts either as loaded or as failed.
    assert loads.tokens == CHUNKS * CHUNK_TOKENS or testbed.load_failures() > failures


def test_tierd_is_lost_while_a_request_waits(
    testbed: EngineTestbed, plain: ReferenceEngine, stop_signal: signal.Signals
) -> None:
    tokens = _stored(testbed, plain, 340 + stop_signal)
    testbed.set_faults(read={"delay_seconds": 2.0})
    requests = testbed.requests()
    name = requests.add(tokens)
    requests.engine.call("step", count=3)
    os.kill(testbed.daemon_pid(), stop_signal)
    assert requests.finish([name])[name]["tokens"] == plain.tokens(tokens)


def test_tierd_is_lost_while_a_request_stores(
    testbed: EngineTestbed, plain: ReferenceEngine, stop_signal: signal.Signals
) -> None:
    prompts = [prompt(12 * CHUNK_TOKENS, 360 + 10 * stop_signal + index) for index in range(3)]
    requests = testbed.requests()
    set_copy_seconds(testbed, 3600)
    names = [requests.add(tokens, 30) for tokens in prompts]
    wait_copying(testbed, Direction.TO_HOST)
    _lose_daemon_under_a_copy(testbed, stop_signal)
    answers = requests.finish(names)
    assert [answers[name]["tokens"] for name in names] == plain.together(prompts, 30)
    testbed.restart_daemon(signal.SIGKILL)
    testbed.wait_attached()
    testbed.empty_gpu_cache()
    assert requests.run_together(prompts, 30) == plain.together(prompts, 30)


def test_after_ten_kills_of_tierd_the_engine_still_loads_and_leaks_nothing(
    testbed: EngineTestbed, plain: ReferenceEngine
) -> None:
    tokens = prompt(CHUNKS * CHUNK_TOKENS + 5, 390)
    requests = testbed.requests()
    for _ in range(10):
        testbed.empty_gpu_cache()
        assert requests.run(tokens) == plain.tokens(tokens)
        testbed.settle_stores()
        testbed.restart_daemon(signal.SIGKILL)
        testbed.wait_attached()
    testbed.empty_gpu_cache()
    with testbed.loads("disk") as loads:
        assert requests.run(tokens) == plain.tokens(tokens)
    assert loads.tokens == CHUNKS * CHUNK_TOKENS
    assert testbed.shared_memory_bytes() <= testbed.tuning.memory_bytes + (4 << 20)
    assert len(testbed.daemon_pids()) == 1
