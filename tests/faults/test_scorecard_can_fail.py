"""Each row of the scorecard fails for the right reason if its promise is broken on purpose."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from kvtier.scorecard import runner, writers
from kvtier.scorecard.catalog import Fault, FaultContext
from kvtier.scorecard.runner import ScorecardOptions
from kvtier.scorecard.testbed import (
    BUDGET_SECONDS,
    CAPACITY_BYTES,
    KEYS,
    FaultTestbed,
    Measurements,
)
from kvtier.tiers.filesystem.layout import WORKING_PREFIX, writers_path

SLACK_SECONDS = 20.0
"""Where nothing is planted, the machine may be as slow as it likes."""


def nothing(context: FaultContext, measurements: Measurements) -> None:
    context.testbed.stream(context.seconds, measurements)


def wrong_bytes_in_ram(context: FaultContext, measurements: Measurements) -> None:
    """The daemon serves wrong bytes from RAM, behind every verification."""
    pool = context.testbed.tierd.run_directory / "pool"
    with pool.open("r+b") as file:
        file.write(b"\xa5" * pool.stat().st_size)
    # Otherwise every chunk would be read from a file before its wrong copy in RAM is loaded.
    for number in [number for number in range(KEYS) if context.testbed.in_ram(number)]:
        context.testbed.engine.load([number], BUDGET_SECONDS)
    context.testbed.stream(context.seconds, measurements)


def too_much_in_the_directory(context: FaultContext, measurements: Measurements) -> None:
    ballast = context.testbed.below / "ballast"
    with ballast.open("wb") as file:
        file.truncate(CAPACITY_BYTES)
    context.testbed.stream(context.seconds, measurements)
    ballast.unlink()


def a_daemon_that_ends(context: FaultContext, measurements: Measurements) -> None:
    os.kill(context.testbed.pid, signal.SIGKILL)
    context.testbed.stream(context.seconds, measurements)


RECOVER = FaultTestbed.recover


def recover_soon(testbed: FaultTestbed, seconds: float = 15.0) -> float | None:
    return RECOVER(testbed, min(seconds, 15.0))


PLANTED = {
    "nothing": nothing,
    "wrong-bytes": wrong_bytes_in_ram,
    "over-budget": too_much_in_the_directory,
    "crash": a_daemon_that_ends,
}


def test_a_leftover_partial_file_fails_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object) -> writers.WritersResult:
        working = writers_path(tmp_path) / "a writer" / f"{WORKING_PREFIX}0011"
        working.parent.mkdir(parents=True)
        working.touch()
        return writers.WritersResult(temporaries=len(writers.temporaries(tmp_path)))

    monkeypatch.setattr(writers, "run", ended)
    row = runner.many_writers(2, tmp_path, ScorecardOptions(tmp_path))
    assert row.verdict == runner.FAIL
    assert row.reason == "1 temporary files were left behind"


def test_each_planted_failure_fails_its_row_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        runner, "FAULTS", tuple(Fault(name, "planted", play) for name, play in PLANTED.items())
    )
    monkeypatch.setattr("kvtier.scorecard.testbed.FaultTestbed.recover", recover_soon)
    options = ScorecardOptions(tmp_path, tuple(PLANTED), seconds=3.0, slack_seconds=SLACK_SECONDS)
    rows = {row.fault: row for row in runner.run_faults(options)}
    assert (rows["nothing"].verdict, rows["nothing"].reason) == ("pass", "")
    assert rows["nothing"].loaded > 0
    assert rows["wrong-bytes"].wrong_bytes
    assert "wrong bytes" in rows["wrong-bytes"].reason
    assert rows["over-budget"].bytes_over_budget
    assert "exceeded its capacity" in rows["over-budget"].reason
    assert rows["crash"].crashes
    assert "the daemon exited" in rows["crash"].reason
    assert "did not recover" in rows["crash"].reason
    assert [name for name, row in rows.items() if row.verdict != "fail"] == ["nothing"]
    assert not runner.passed(rows.values())
    assert list(tmp_path.iterdir()) == []


def test_a_load_that_waits_too_long_fails_its_row() -> None:
    measurements = Measurements(
        loads=9, loaded=9, recovery_seconds=0.1, longest_wait=BUDGET_SECONDS + 0.11
    )
    row = runner.judge("slow", "planted", measurements)
    assert row.verdict == "fail"
    assert "beyond its deadline" in row.reason
    measurements.longest_wait = BUDGET_SECONDS + 0.09
    assert runner.judge("slow", "planted", measurements).verdict == "pass"


def test_a_load_that_waits_with_an_open_breaker_fails_its_row() -> None:
    measurements = Measurements(
        loads=9, recovery_seconds=0.1, longest_wait=0.3, longest_wait_breaker_open=0.3
    )
    assert "open breaker" in runner.judge("open", "planted", measurements).reason
