"""The faults of announcements, with real processes, and on the file system that is asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli.faults import on_file_systems
from kvtier.cli.inputs import OptionError
from kvtier.scorecard import announcement_faults, runner
from kvtier.scorecard.file_systems import KINDS, NFS_VARIABLE
from kvtier.scorecard.runner import ScorecardOptions, ScorecardRow

SLACK_SECONDS = 20.0
"""The machine may be busy. What is slow by fault is longer."""


def run(options: ScorecardOptions) -> list[ScorecardRow]:
    return list(runner.run_faults(options))


def test_damaged_logs_cost_misses_and_are_counted(tmp_path: Path) -> None:
    options = ScorecardOptions(
        tmp_path, ("announcements-corrupt",), seconds=1.5, slack_seconds=SLACK_SECONDS
    )
    (row,) = run(options)
    assert row.verdict == "pass", row
    assert row.wrong_bytes == 0
    assert row.loaded > 0
    assert any("losses counted" in note for note in row.notes), row


def test_a_fault_runs_on_each_file_system_and_says_which_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(NFS_VARIABLE, raising=False)
    options = ScorecardOptions(
        tmp_path, ("announcements-lost",), seconds=1.0, file_systems=("tmpfs", "nfs")
    )
    on_tmpfs, on_nfs = run(options)
    assert (on_tmpfs.file_system, on_nfs.file_system) == ("tmpfs", "nfs")
    assert on_tmpfs.verdict == "pass" or (os.geteuid() and "needs root" in on_tmpfs.reason)
    assert (on_nfs.verdict, NFS_VARIABLE in on_nfs.reason) == ("skipped", True)
    monkeypatch.setenv(NFS_VARIABLE, str(tmp_path))
    (on_nfs,) = run(
        ScorecardOptions(tmp_path, ("announcements-lost",), seconds=1.0, file_systems=("nfs",))
    )
    assert on_nfs.reason == f"{NFS_VARIABLE}: {tmp_path} is not on an NFS mount"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "pace"), [("readers-32", 10.0), ("announcements-lost", 1.0)])
def test_waits_on_an_emulated_machine_are_bounded_and_many_readers_run_at_its_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, pace: float
) -> None:
    started: list[tuple[int, float]] = []
    waits: list[float] = []

    class Nodes(announcement_faults.AnnouncedNodes):
        def __init__(self, *arguments: Any) -> None:
            self.capacity_bytes = 1 << 30
            started.append((arguments[2] + arguments[3], arguments[4]))

        def wait(self, seconds: float, _condition: object) -> bool:
            waits.append(seconds)
            return len(waits) == 1

        def stop_storing(self) -> None:
            pass

        def end(self) -> tuple[dict[int, Any], str]:
            return {}, ""

    monkeypatch.setattr(announcement_faults, "AnnouncedNodes", Nodes)
    (row,) = run(ScorecardOptions(tmp_path, (name,), seconds=0.0, slack_seconds=9.0, patience=10.0))
    assert (row.verdict, row.reason) == ("fail", "stores and loads did not recover")
    assert [found for _, found in started] == [pace]
    assert started[0][0] >= 4
    assert len(waits) == 2
    assert max(waits) <= announcement_faults.MAX_WAIT_SECONDS <= 600


def test_kinds_are_checked(tmp_path: Path) -> None:
    options = ScorecardOptions(tmp_path)
    assert on_file_systems(options, ()).file_systems == ()
    assert on_file_systems(options, ("xfs", "all")).file_systems == ("xfs", "ext4", "tmpfs", "nfs")
    assert set(KINDS) == {"ext4", "xfs", "tmpfs", "nfs"}
    with pytest.raises(OptionError, match="must be one of: ext4, xfs, tmpfs, nfs, all"):
        on_file_systems(options, ("ntfs",))


def test_a_wrong_byte_fails_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = announcement_faults.Measurements(wrong=1, recovery_seconds=1.0)
    monkeypatch.setattr(announcement_faults, "run", lambda *_: found)
    (row,) = run(ScorecardOptions(tmp_path, ("readers-32",), slack_seconds=SLACK_SECONDS))
    assert (row.verdict, row.reason) == ("fail", "1 loads returned wrong bytes")
