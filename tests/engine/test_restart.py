"""An engine that is killed: what the sidecar's RAM and the files hold serves the next one."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import leftover_pool

from kvtier.config.models import Daemon
from kvtier.harness.engine_requests import ReferenceEngine
from kvtier.harness.engine_testbed import CHUNK_TOKENS, EngineOptions, EngineTestbed
from kvtier.harness.tiny_model import prompt

CHUNKS = 9


@pytest.fixture(scope="module")
def case(model: Path, payload: Path, scratch: Path) -> Iterator[EngineTestbed]:
    case = EngineTestbed(scratch / "restart", model, payload, EngineOptions(daemon=Daemon.SIDECAR))
    try:
        yield case
    finally:
        case.close()


def test_objects_of_a_killed_engine_serve_the_next_one(
    case: EngineTestbed, plain: ReferenceEngine
) -> None:
    """One scenario in order, because each start of an engine takes long."""
    tokens = prompt(CHUNKS * CHUNK_TOKENS + 5, 600)
    interrupted = [prompt(15 * CHUNK_TOKENS, 601 + index) for index in range(3)]
    case.start_daemon()

    first = case.start()
    case.wait_attached()
    assert case.requests().run(tokens) == plain.tokens(tokens)
    case.settle_stores()
    # Killed while it computes and stores: some of these chunks exist, none may be half-written.
    for other in interrupted:
        case.requests().add(other)
    case.drive("step", count=2)
    first.kill()

    case.start()
    case.wait_attached()
    with case.loads("ram") as loads:
        assert case.requests().run(tokens) == plain.tokens(tokens)
    assert loads.tokens == CHUNKS * CHUNK_TOKENS
    assert case.requests().run_together(interrupted) == plain.together(interrupted)
    case.settle_stores()

    # A killed tierd leaves a pool. Its successor recovers the checksummed objects.
    case.restart_daemon(signal.SIGKILL)
    case.wait_attached()
    case.empty_gpu_cache()
    with case.loads("ram") as loads:
        assert case.requests().run(tokens) == plain.tokens(tokens)
    assert loads.tokens == CHUNKS * CHUNK_TOKENS
    case.settle_stores()
    case.wait_for(
        lambda: case.daemon_events("recovered_objects_verified") == CHUNKS, "not all are verified"
    )

    # Two bytes flip. One chunk is in a file as well and is read from there; the other is a miss.
    case.stop_daemon(signal.SIGKILL)
    in_file, nowhere = leftover_pool.records(case.run_directory)[3:5]
    for record in (in_file, nowhere):
        leftover_pool.flip(case.run_directory, record, 100)
    (file,) = (path for path in case.files() if nowhere.key.hex() in path.name)
    file.unlink()
    case.start_daemon()
    case.wait_attached()
    case.empty_gpu_cache()
    with case.loads() as loads:
        assert case.requests().run(tokens) == plain.tokens(tokens)
    assert loads.tokens < CHUNKS * CHUNK_TOKENS
    case.settle_stores()
    case.empty_gpu_cache()
    with case.loads() as loads:
        assert case.requests().run(tokens) == plain.tokens(tokens)
    assert loads.tokens == CHUNKS * CHUNK_TOKENS
    case.settle_stores()
    case.wait_for(
        lambda: case.daemon_events("recovered_objects_dropped", "corrupt") == 2,
        "not both are dropped",
    )

    # The pod is gone with its memory: files are all there is.
    assert case.engine is not None
    case.engine.kill()
    case.stop_daemon(signal.SIGKILL)
    shutil.rmtree(case.run_directory)
    case.start_daemon()
    case.start()
    case.wait_attached()
    with case.loads("disk") as loads:
        assert case.requests().run(tokens) == plain.tokens(tokens)
    assert loads.tokens == CHUNKS * CHUNK_TOKENS
    assert case.requests().run_together(interrupted) == plain.together(interrupted)
