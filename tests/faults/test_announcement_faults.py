"""The faults of announcements, with real processes, and on the file system that is asked for."""

from __future__ import annotations

import os
from pathlib import Path

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
