"""A tier that fails, stalls or hangs, and a tierd that stops or dies: the tokens stay right."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
from tests.support.slow_copies import running_copies, set_copy_seconds, wait_copying

from kvtier.harness.engine_testbed import (
    CHUNK_TOKENS,
    SNAPSHOT_SECONDS,
    EngineTestbed,
    ReferenceEngine,
)
from kvtier.harness.tiny_model import prompt
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
    faultless: EngineTestbed, plain: ReferenceEngine
) -> None:
    tokens = _stored(faultless, plain, 300)
    faultless.set_faults(read={"fail": True})
    failures = faultless.tier_failures()
    requests = faultless.requests()
    with faultless.loads() as loads:
        assert requests.run(tokens) == plain.tokens(tokens)
    assert loads.tokens == 0
    faultless.wait_for(lambda: faultless.tier_failures() > failures, "no failed read was counted")


def test_a_tier_that_fails_after_some_reads_provides_the_prefix(
    faultless: EngineTestbed, plain: ReferenceEngine
) -> None:
    tokens = _stored(faultless, plain, 301)
    faultless.set_faults(read={"fail_after": 3})
    with faultless.loads("disk") as loads:
        assert faultless.requests().run(tokens) == plain.tokens(tokens)
    assert 0 < loads.tokens <= 3 * CHUNK_TOKENS


def test_a_read_that_never_ends_times_out(faultless: EngineTestbed, plain: ReferenceEngine) -> None:
    tokens = _stored(faultless, plain, 302)
    faultless.set_faults(read={"hang": True})
    with faultless.loads() as loads:
        assert faultless.requests().run(tokens) == plain.tokens(tokens)
    assert loads.tokens == 0


def test_a_request_that_waits_for_a_slow_tier_does_not_delay_others(
    faultless: EngineTestbed, plain: ReferenceEngine
) -> None:
    tokens = _stored(faultless, plain, 303)
    other = prompt(200, 304)
    faultless.set_faults(read={"hang": True})
    requests = faultless.requests()
    slow = requests.add(tokens)
    requests.engine.call("step", count=2)
    quick = requests.add(other)
    answer = requests.finish([quick])
    assert answer[quick]["tokens"] == plain.tokens(other)
    assert slow in requests.engine.call("state")["requests"]
    assert requests.finish([slow])[slow]["tokens"] == plain.tokens(tokens)


def test_a_request_aborted_while_it_waits_leaves_nothing_behind(
    faultless: EngineTestbed, plain: ReferenceEngine
) -> None:
    tokens = _stored(faultless, plain, 305)
    faultless.set_faults(read={"delay_seconds": 1.0})
    requests = faultless.requests()
    name = requests.add(tokens)
    requests.engine.call("step", count=3)
    assert "WAITING" in requests.engine.call("state")["requests"][name]
    requests.abort(name)
    assert requests.engine.call("settle")
    assert requests.engine.call("state")["requests"] == {}
    faultless.set_faults()
    faultless.empty_gpu_cache()
    assert requests.run(tokens) == plain.tokens(tokens)


def test_a_load_that_failed_is_not_repeated(
    faultless: EngineTestbed, plain: ReferenceEngine
) -> None:
    """The daemon stops after the hit was promised: the slots are never announced."""
    tokens = prompt(CHUNKS * CHUNK_TOKENS + 5, 310)
    requests = faultless.requests()
    assert requests.run(tokens) == plain.tokens(tokens)
    faultless.settle_stores()
    faultless.empty_gpu_cache()
    failures = faultless.load_failures()
    os.kill(faultless.daemon_pid(), signal.SIGSTOP)
    try:
        name = requests.add(tokens)
        with faultless.loads() as loads:
            answer = requests.finish([name])
    finally:
        os.kill(faultless.daemon_pid(), signal.SIGCONT)
    assert answer[name]["tokens"] == plain.tokens(tokens)
    assert loads.tokens == 0
    assert faultless.load_failures() > failures
    assert requests.engine.call("lookup_counts")[name] <= ASKS_WITHOUT_WAITING


@pytest.fixture(params=[signal.SIGKILL, signal.SIGSTOP], ids=["SIGKILL", "SIGSTOP"])
def blow(request: pytest.FixtureRequest, faultless: EngineTestbed) -> Iterator[signal.Signals]:
    """A signal for the daemon; afterwards it is replaced."""
    yield request.param
    faultless.restart_daemon(signal.SIGKILL)
    faultless.wait_attached()


def _lose_daemon_under_a_copy(case: EngineTestbed, blow: signal.Signals) -> None:
    """A new tierd must not reuse a slot before the worker's copy has ended."""
    os.kill(case.daemon_pid(), blow)
    if blow is signal.SIGKILL:
        case.start_daemon()
        case.wait_for(
            lambda: (case.status() or {}).get("started", False), "the new daemon has no pool"
        )
        time.sleep(SNAPSHOT_SECONDS)
        status = case.status()
        assert status is not None
        assert status["fenced"]
    else:
        case.wait_for(lambda: not case.drive("connector")["usable"], "the engine does not notice")
    assert sum(running_copies(case).values()) > 0
    set_copy_seconds(case, 0)


def test_tierd_is_lost_while_a_request_loads(
    faultless: EngineTestbed, plain: ReferenceEngine, blow: signal.Signals
) -> None:
    tokens = prompt(CHUNKS * CHUNK_TOKENS + 5, 320 + blow)
    requests = faultless.requests()
    assert requests.run(tokens) == plain.tokens(tokens)
    faultless.settle_stores()
    faultless.empty_gpu_cache()
    failures = faultless.load_failures()
    set_copy_seconds(faultless, 3600)
    name = requests.add(tokens)
    with faultless.loads("ram") as loads:
        wait_copying(faultless, Direction.TO_DEVICE)
        _lose_daemon_under_a_copy(faultless, blow)
        assert requests.finish([name])[name]["tokens"] == plain.tokens(tokens)
    # What was copied before the worker drained is whole. It counts either as loaded or as failed.
    assert loads.tokens == CHUNKS * CHUNK_TOKENS or faultless.load_failures() > failures


def test_tierd_is_lost_while_a_request_waits(
    faultless: EngineTestbed, plain: ReferenceEngine, blow: signal.Signals
) -> None:
    tokens = _stored(faultless, plain, 340 + blow)
    faultless.set_faults(read={"delay_seconds": 2.0})
    requests = faultless.requests()
    name = requests.add(tokens)
    requests.engine.call("step", count=3)
    os.kill(faultless.daemon_pid(), blow)
    assert requests.finish([name])[name]["tokens"] == plain.tokens(tokens)


def test_tierd_is_lost_while_a_request_stores(
    faultless: EngineTestbed, plain: ReferenceEngine, blow: signal.Signals
) -> None:
    prompts = [prompt(12 * CHUNK_TOKENS, 360 + 10 * blow + index) for index in range(3)]
    requests = faultless.requests()
    set_copy_seconds(faultless, 3600)
    names = [requests.add(tokens, 30) for tokens in prompts]
    wait_copying(faultless, Direction.TO_HOST)
    _lose_daemon_under_a_copy(faultless, blow)
    answers = requests.finish(names)
    assert [answers[name]["tokens"] for name in names] == plain.together(prompts, 30)
    faultless.restart_daemon(signal.SIGKILL)
    faultless.wait_attached()
    faultless.empty_gpu_cache()
    assert requests.run_together(prompts, 30) == plain.together(prompts, 30)


def test_after_ten_kills_of_tierd_the_engine_still_loads_and_leaks_nothing(
    faultless: EngineTestbed, plain: ReferenceEngine
) -> None:
    tokens = prompt(CHUNKS * CHUNK_TOKENS + 5, 390)
    requests = faultless.requests()
    for _ in range(10):
        faultless.empty_gpu_cache()
        assert requests.run(tokens) == plain.tokens(tokens)
        faultless.settle_stores()
        faultless.restart_daemon(signal.SIGKILL)
        faultless.wait_attached()
    faultless.empty_gpu_cache()
    with faultless.loads("disk") as loads:
        assert requests.run(tokens) == plain.tokens(tokens)
    assert loads.tokens == CHUNKS * CHUNK_TOKENS
    assert faultless.shared_memory_bytes() <= faultless.tuning.memory_bytes + (4 << 20)
    assert len(faultless.daemon_pids()) == 1
