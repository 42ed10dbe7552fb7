"""A scorecard that cannot fail says nothing: each promise is broken on purpose, and the row fails for that reason. A row without any fault passes."""

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

SLACK_SECONDS = 2.0
"""Where nothing is planted, the machine may be as slow as it likes."""


def nothing(scene: FaultContext, measured: Measurements) -> None:
    scene.stage.stream(scene.seconds, measured)


def wrong_bytes_in_ram(scene: FaultContext, measured: Measurements) -> None:
    """What the daemon believes to be sealed is something else: a lie that comes after verification."""
    pool = scene.stage.case.run_directory / "pool"
    with pool.open("r+b") as file:
        file.write(b"\xa5" * pool.stat().st_size)
    # One after another all chunks would be read from files: each takes the place of one in RAM whose turn has not come.
    for number in [number for number in range(KEYS) if scene.stage.in_ram(number)]:
        scene.stage.engine.load([number], BUDGET_SECONDS)
    scene.stage.stream(scene.seconds, measured)


def too_much_in_the_directory(scene: FaultContext, measured: Measurements) -> None:
    ballast = scene.stage.below / "ballast"
    with ballast.open("wb") as file:
        file.truncate(CAPACITY_BYTES)
    scene.stage.stream(scene.seconds, measured)
    ballast.unlink()


def a_daemon_that_ends(scene: FaultContext, measured: Measurements) -> None:
    os.kill(scene.stage.pid, signal.SIGKILL)
    scene.stage.stream(scene.seconds, measured)


RECOVER = FaultTestbed.recover


def recover_soon(stage: FaultTestbed, seconds: float = 15.0) -> float | None:
    return RECOVER(stage, min(seconds, 15.0))


PLANTED = {
    "nothing": nothing,
    "wrong-bytes": wrong_bytes_in_ram,
    "over-budget": too_much_in_the_directory,
    "crash": a_daemon_that_ends,
}


def test_a_leftover_partial_file_fails_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object) -> writers.Found:
        working = writers_path(tmp_path) / "of somebody" / f"{WORKING_PREFIX}0011"
        working.parent.mkdir(parents=True)
        working.touch()
        return writers.Found(temporaries=len(writers.temporaries(tmp_path)))

    monkeypatch.setattr(writers, "run", ended)
    row = runner.many_writers(2, tmp_path, ScorecardOptions(tmp_path))
    assert row.verdict == runner.FAIL
    assert row.reason == "1 temporaries stay behind"


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
    assert "came back wrong" in rows["wrong-bytes"].reason
    assert rows["over-budget"].bytes_over_budget
    assert "above the capacity" in rows["over-budget"].reason
    assert rows["crash"].crashes
    assert "the daemon ended" in rows["crash"].reason
    assert "did not work again" in rows["crash"].reason
    assert [name for name, row in rows.items() if row.verdict != "fail"] == ["nothing"]
    assert not runner.passed(rows.values())
    assert list(tmp_path.iterdir()) == []


def test_a_load_that_waits_too_long_fails_its_row() -> None:
    measured = Measurements(
        loads=9, loaded=9, recovery_seconds=0.1, longest_wait=BUDGET_SECONDS + 0.11
    )
    row = runner.judge("slow", "planted", measured)
    assert row.verdict == "fail"
    assert "beyond its clock" in row.reason
    measured.longest_wait = BUDGET_SECONDS + 0.09
    assert runner.judge("slow", "planted", measured).verdict == "pass"


def test_a_load_that_waits_with_an_open_breaker_fails_its_row() -> None:
    measured = Measurements(
        loads=9, recovery_seconds=0.1, longest_wait=0.3, longest_wait_breaker_open=0.3
    )
    assert "open breaker" in runner.judge("open", "planted", measured).reason
