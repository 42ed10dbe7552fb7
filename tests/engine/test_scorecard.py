"""The scorecard's part that runs a real vLLM: tokens are equal, and misses are not delayed."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.harness.engine_process import EngineProcessError
from kvtier.scorecard import engine_faults
from kvtier.scorecard.runner import ScorecardOptions

FAULTS = ("hang", "wrong-key", "tierd-SIGKILL")


def test_a_real_engine_passes_with_a_hang_foreign_bytes_and_a_killed_tierd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # How fast this machine is, is not for a test to say; `kvtier faults --engine` judges it.
    monkeypatch.setattr(engine_faults, "DELAY_SECONDS", 30.0)
    rows = {
        row.fault: row
        for row in engine_faults.run_engine_faults(ScorecardOptions(tmp_path, FAULTS))
    }
    assert list(rows) == [f"engine-{name}" for name in FAULTS]
    for row in rows.values():
        if row.verdict == "skipped":
            assert "FUSE" in row.reason
            continue
        assert (row.verdict, row.reason) == ("pass", "")
        assert (row.wrong_bytes, row.crashes) == (0, 0)
    assert not list(tmp_path.iterdir())


def test_the_rows_are_those_of_the_selected_faults(tmp_path: Path) -> None:
    assert engine_faults.names(ScorecardOptions(tmp_path, ("hang", "writers-2"))) == ["engine-hang"]
    assert "engine-engine-and-worker-SIGKILL" in engine_faults.names(ScorecardOptions(tmp_path))


def test_an_engine_with_another_connector_than_the_shipped_one_is_refused(tmp_path: Path) -> None:
    name = "kvtier.engines.vllm.connector.KVTierConnector"
    file = str(tmp_path / "kvtier/engines/vllm/connector.py")
    engine_faults.check_shipped({"class": name, "file": file}, tmp_path)
    for other in (
        {},
        {"class": "kvtier.engines.vllm.connector.Other", "file": file},
        {"class": name, "file": "/elsewhere/kvtier/engines/vllm/connector.py"},
    ):
        with pytest.raises(EngineProcessError, match="must be"):
            engine_faults.check_shipped(other, tmp_path)
