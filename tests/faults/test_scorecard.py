"""`kvtier faults` as a person runs it: a few faults of every means, short, and the document that it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.harness.tierd_testbed import environment
from kvtier.scorecard import runner

PROMISED = (
    "fault",
    "verdict",
    "reason",
    "means",
    "wrong_bytes",
    "crashes",
    "longest_wait_beyond_clock_seconds",
    "bytes_over_budget",
    "recovery_seconds",
)
CHOSEN = (
    "hang-60s",
    "ESTALE",
    "bit-flip-header",
    "wrong-namespace",
    "bad-live-configuration",
    "writers-2",
)


def faults(*arguments: str, seconds: float = 240) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvtier.cli.main", "faults", *arguments]
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=seconds, check=False
    )


def test_a_short_scorecard_passes(
    tmp_path: Path,
) -> None:
    wanted = [word for name in CHOSEN for word in ("--fault", name)]
    times = ["--seconds", "2", "--hang-seconds", "4", "--objects", "1000"]
    done = faults("--path", str(tmp_path), "--json", *times, *wanted)
    rows = {row["fault"]: row for row in json.loads(done.stdout)["faults"]}
    assert sorted(rows) == sorted(CHOSEN), done.stderr
    for row in rows.values():
        assert set(PROMISED) <= set(row)
        if row["verdict"] == "skipped":
            assert row["reason"]
            continue
        # How long a load waits on a machine that runs other tests as well is not judged here.
        assert (row["wrong_bytes"], row["crashes"], row["bytes_over_budget"]) == (0, 0, 0), row
        assert row["recovery_seconds"] is not None, row
    verdicts = {row["verdict"] for row in rows.values()}
    assert done.returncode == (1 if "fail" in verdicts else 3 if "skipped" in verdicts else 0)
    assert list(tmp_path.iterdir()) == []


def test_without_fuse_the_tier_is_wrapped_and_other_faults_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(19, "no such device")

    monkeypatch.setattr(runner, "FaultyMount", refuse)
    options = runner.ScorecardOptions(
        tmp_path,
        ("EIO", "hang-60s", "ENOSPC", "flips-in-flight"),
        seconds=2.0,
        hang_seconds=3.0,
        slack_seconds=20.0,
    )
    rows = {row.fault: row for row in runner.run_faults(options)}
    assert "no such device" in rows["flips-in-flight"].reason
    assert rows.pop("flips-in-flight").verdict == "skipped"
    for row in rows.values():
        assert (row.verdict, row.reason, row.means) == ("pass", "", "fault wrapper")
    assert rows["EIO"].loaded < rows["EIO"].loads
