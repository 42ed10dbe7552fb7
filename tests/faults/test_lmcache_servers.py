"""Faults of real servers behind an lmcache tier of a real tierd, as `kvtier faults` runs them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.lmcache_backends import require_lmcache, require_redis

from kvtier.scorecard import remote_faults, runner
from kvtier.scorecard.remote_faults import names


def check(tmp_path: Path, server: str) -> None:
    faults = tuple(names(server))
    assert len(faults) == len(names()) // 2
    # How long a load waits on a machine that runs other tests as well is not judged here.
    options = runner.ScorecardOptions(tmp_path, faults, seconds=2.0, slack_seconds=20.0)
    rows = list(runner.run_faults(options))
    assert tuple(row.fault for row in rows) == faults
    for row in rows:
        assert row.verdict == runner.PASS, row
        assert row.wrong_bytes == row.crashes == row.bytes_over_budget == 0
        assert row.loads > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_faults_of_redis_cost_misses_and_nothing_else(tmp_path: Path) -> None:
    require_lmcache()
    require_redis()
    check(tmp_path, "redis")


@pytest.mark.slow
def test_faults_of_an_lmcache_server_cost_misses_and_nothing_else(tmp_path: Path) -> None:
    require_lmcache()
    check(tmp_path, "lmcache")


def test_without_lmcache_its_faults_are_no_part_of_the_scorecard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtier.scorecard.remote_faults.installed", lambda: False)
    assert not [name for name in runner.names() if name.startswith(("redis", "lmcache"))]


def test_without_a_redis_server_its_rows_are_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_lmcache()
    monkeypatch.setattr("kvtier.harness.lmcache_servers.shutil.which", lambda _: None)
    (row,) = runner.run_faults(runner.ScorecardOptions(tmp_path, ("redis-lies",)))
    assert row.verdict == runner.SKIPPED
    assert row.reason == "neither redis-server nor valkey-server is installed"


def test_a_fault_of_lmcaches_process_waits_until_tierd_has_started_it_again() -> None:
    program = "import sys, time; time.sleep(60)"
    context: Any = SimpleNamespace(testbed=SimpleNamespace(pid=os.getpid()))
    started: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        command = [sys.executable, "-c", program, "kvtier.tiers.lmcache.child"]
        started.append(subprocess.Popen(command))

    timer = threading.Timer(0.5, start)
    timer.start()
    try:
        found = remote_faults._child(context)
        assert found == started[0].pid
    finally:
        timer.join()
        for process in started:
            process.kill()
            process.wait()


def test_without_lmcaches_process_the_fault_fails_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_faults, "CHILD_SECONDS", 0.0)
    context: Any = SimpleNamespace(testbed=SimpleNamespace(pid=os.getpid()))
    with pytest.raises(LookupError, match="no process that runs LMCache"):
        remote_faults._child(context)
