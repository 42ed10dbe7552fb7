"""The scorecard's rows about keys: they pass, and fail where no key is required."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier.scorecard import runner, sealed_faults
from kvtier.scorecard.runner import ScorecardOptions, ScorecardRow
from kvtier.scorecard.testbed import FaultTestbed

SLACK_SECONDS = 20.0
"""How long a load waits on a machine that runs other tests as well is not judged here."""


def row(tmp_path: Path, name: str) -> ScorecardRow:
    options = ScorecardOptions(tmp_path, (name,), seconds=2.0, slack_seconds=SLACK_SECONDS)
    (found,) = runner.run_faults(options)
    assert list(tmp_path.iterdir()) == []
    return found


@pytest.mark.parametrize("name", [fault.name for fault in sealed_faults.SEALED_FAULTS])
def test_a_row_passes(tmp_path: Path, name: str) -> None:
    found = row(tmp_path, name)
    assert (found.verdict, found.reason) == ("pass", "")
    assert found.loaded > 0


def test_planted_objects_fail_their_row_where_no_key_is_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unkeyed(*arguments: Any, isolation: object) -> FaultTestbed:
        return FaultTestbed(*arguments)

    monkeypatch.setattr(sealed_faults, "FaultTestbed", unkeyed)
    monkeypatch.setattr(sealed_faults, "FOLLOW_SECONDS", 1.0)
    monkeypatch.setattr(FaultTestbed, "recover", lambda _: 0.0)
    found = row(tmp_path, "planted-without-key")
    assert found.verdict == "fail"
    assert found.wrong_bytes > 0
    assert "no miss was counted as unkeyed" in found.reason
