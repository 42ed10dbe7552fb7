"""A real engine with a sidecar that starts late, loses its tierd and gets a new document."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.config.models import Daemon
from kvtier.harness.engine_process import ManagedProcess
from kvtier.harness.engine_requests import ReferenceEngine
from kvtier.harness.engine_testbed import CHUNK_TOKENS, EngineOptions, EngineTestbed
from kvtier.harness.tiny_model import prompt

CHUNKS = 6


@pytest.fixture
def case(model: Path, payload: Path, scratch: Path) -> Iterator[EngineTestbed]:
    case = EngineTestbed(
        scratch / "late-sidecar",
        model,
        payload,
        EngineOptions(daemon=Daemon.SIDECAR, file_bytes=None),
    )
    try:
        yield case
    finally:
        case.close()


def test_an_engine_starts_without_its_sidecar_and_attaches_once_it_runs(
    case: EngineTestbed, plain: ReferenceEngine
) -> None:
    tokens = prompt(CHUNKS * CHUNK_TOKENS + 5, 700)
    case.start()
    assert case.requests().run(tokens) == plain.tokens(tokens)
    # It starts no daemon of its own and does not even make the directory.
    assert not case.run_directory.exists()

    argv = [sys.executable, "-m", "kvtier.tierd.sidecar", "run", "--topology", str(case.topology)]
    argv += ["--run-directory", str(case.run_directory)]
    case.daemon = ManagedProcess(argv, case.environment(), case.directory / "tierd.log")
    case.wait_attached()
    case.empty_gpu_cache()
    assert case.requests().run(tokens) == plain.tokens(tokens)
    case.settle_stores()
    case.empty_gpu_cache()
    with case.loads("ram") as loads:
        assert case.requests().run(tokens) == plain.tokens(tokens)
    assert loads.tokens == CHUNKS * CHUNK_TOKENS

    # tierd says what the operator's status needs.
    case.wait_for(
        lambda: _tier(case)["hitTokens"] == CHUNKS * CHUNK_TOKENS, "hits are not reported"
    )
    status = case.status() or {}
    assert status["promptTokens"] >= len(tokens)
    scheduler = next(each for each in status["sessions"] if each["role"] == "scheduler")
    assert scheduler["engineVersion"].startswith("vllm ")

    # Another tierd under the same supervisor: the engine goes on, from the same pool.
    pool, supervisor = (case.run_directory / "pool").stat().st_ino, case.daemon.process.pid
    os.kill(int(json.loads((case.run_directory / "http.json").read_text())["pid"]), signal.SIGKILL)
    case.wait_for(lambda: (case.status() or {}).get("epoch", 0) > status["epoch"], "no other tierd")
    case.wait_attached()
    case.empty_gpu_cache()
    assert case.requests().run(tokens) == plain.tokens(tokens)
    assert (case.run_directory / "pool").stat().st_ino == pool
    assert case.daemon.process.pid == supervisor
    assert case.daemon.process.poll() is None


def _tier(case: EngineTestbed) -> dict[str, int]:
    return dict((case.status() or {"tiers": [{"hitTokens": -1}]})["tiers"][0])
