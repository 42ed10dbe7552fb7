"""A real engine beside a mount that never answers: it serves, and it ends without delay."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.harness.engine_process import DrivenEngine
from kvtier.harness.engine_requests import ReferenceEngine
from kvtier.harness.engine_testbed import CHUNK_TOKENS, EngineTestbed, start_reference_engine
from kvtier.harness.tiny_model import prompt
from kvtier.processes import ProcessIdentity, main_thread_exited, pid_namespace, process_start
from kvtier.scorecard.mount import FaultyMount, faulty_mount, unavailable

EXIT_SECONDS = 20.0
"""It takes two or three seconds, and what a busy machine adds. A call that hangs does not end."""
CHUNKS = 6


@pytest.fixture
def mount(scratch: Path) -> Iterator[FaultyMount]:
    if unavailable():
        pytest.skip(unavailable())
    try:
        with faulty_mount(scratch / "hung-fuse") as mount:
            yield mount
    except OSError as error:
        pytest.skip(f"no FUSE mount can be made here: {error}")


@pytest.fixture
def alone(model: Path, payload: Path, scratch: Path) -> Iterator[DrivenEngine]:
    """How long an engine without KVTier takes to end; the test counts only what exceeds it."""
    engine = start_reference_engine(model, payload, scratch / "alone.log")
    try:
        yield engine.wait_ready()
    finally:
        engine.kill()


@pytest.fixture
def case(model: Path, payload: Path, scratch: Path, mount: FaultyMount) -> Iterator[EngineTestbed]:
    case = EngineTestbed(scratch / "hung", model, payload)
    case.files_root = mount.path / "tier"
    case.files_root.mkdir()
    case.write_topology()
    try:
        yield case
    finally:
        mount.release()
        case.close()


def _exit_seconds(engine: DrivenEngine) -> float:
    assert engine.call("exit") == "bye"
    began = time.monotonic()
    engine.process.wait(120)
    return time.monotonic() - began


def test_an_engine_and_its_tierd_exit_in_time_with_a_hung_mount(
    case: EngineTestbed, mount: FaultyMount, plain: ReferenceEngine, alone: DrivenEngine
) -> None:
    stored, other = (prompt(CHUNKS * CHUNK_TOKENS + 5, 900 + index) for index in range(2))
    engine = case.start()
    case.wait_attached()
    assert case.requests().run(stored) == plain.tokens(stored)
    case.settle_stores()
    assert len(case.files()) == CHUNKS

    mount.hang("read", "write")
    # What is in RAM serves, and what is computed is stored there, while the writes below hang.
    case.empty_gpu_cache()
    with case.loads("ram") as loads:
        assert case.requests().run(stored) == plain.tokens(stored)
    assert loads.tokens == CHUNKS * CHUNK_TOKENS
    assert case.requests().run(other) == plain.tokens(other)
    case.wait_for(lambda: (case.status() or {}).get("pendingStores", 0) >= CHUNKS, "no write hangs")

    pid = case.daemon_pid()
    tierd = ProcessIdentity(pid, process_start(pid), pid_namespace())
    alone_seconds = _exit_seconds(alone)
    engine_seconds = _exit_seconds(engine)
    began = time.monotonic()
    while not main_thread_exited(tierd) and time.monotonic() - began < 60:
        time.sleep(0.02)
    tierd_seconds = time.monotonic() - began
    print(
        f"\nends after {engine_seconds:.2f} s, without KVTier after {alone_seconds:.2f} s; "
        f"tierd {tierd_seconds:.2f} s later"
    )
    assert engine_seconds - alone_seconds < EXIT_SECONDS
    assert tierd_seconds < EXIT_SECONDS
