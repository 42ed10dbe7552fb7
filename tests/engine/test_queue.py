"""A request that waits in vLLM's queue finds its prefix in RAM when its turn comes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.config.models import Daemon
from kvtier.harness.engine_requests import ReferenceEngine
from kvtier.harness.engine_testbed import CHUNK_TOKENS, EngineOptions, EngineTestbed
from kvtier.harness.tiny_model import prompt

CHUNKS = 9


@pytest.fixture(scope="module")
def case(model: Path, payload: Path, scratch: Path) -> Iterator[EngineTestbed]:
    options = EngineOptions(daemon=Daemon.SIDECAR, persistence="Process")
    case = EngineTestbed(scratch / "queue", model, payload, options)
    try:
        yield case
    finally:
        case.close()


def test_a_queued_request_is_loaded_from_ram(case: EngineTestbed, plain: ReferenceEngine) -> None:
    """One scenario in order, because each start of an engine takes long."""
    queued, running = prompt(CHUNKS * CHUNK_TOKENS + 5, 900), prompt(2 * CHUNK_TOKENS, 901)
    case.start_daemon()
    case.start(max_num_seqs=1)
    case.wait_attached()
    assert case.requests().run(queued) == plain.tokens(queued)
    case.settle_stores()
    # The next tierd has nothing in RAM.
    case.restart_daemon(signal.SIGKILL)
    case.wait_attached()
    case.empty_gpu_cache()

    first = case.requests().add(running, 200)
    case.step_until(first, "RUNNING")
    second = case.requests().add(queued)
    case.drive("step")
    case.wait_for(
        lambda: case.daemon_events("tier_reads") >= CHUNKS, "the prefix was not prefetched"
    )
    assert case.drive("state")["requests"][second].endswith("WAITING")
    with case.loads("ram") as loads:
        answers = case.requests().finish([first, second])
    assert answers[second]["tokens"] == plain.tokens(queued)
    assert loads.tokens == CHUNKS * CHUNK_TOKENS

    # A request that is aborted in the queue ends its prefetch.
    case.empty_gpu_cache()
    first = case.requests().add(running, 200)
    case.step_until(first, "RUNNING")
    third = case.requests().add(queued)
    case.drive("step")
    case.requests().abort(third)
    case.requests().finish([first])
    assert case.requests().run(queued) == plain.tokens(queued)
