"""The comparison with others' file back ends: it finds what they do, and says why it could not look."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.testing.faults import peers
from kvtier.testing.faults.scorecard import Options

RIGHT = ["right", "right", "right", "stored"]


def test_three_right_loads_and_a_store_pass() -> None:
    assert peers.judge(RIGHT, [], 0.1, 0.2, 10) == ("pass", "")


@pytest.mark.parametrize(
    ("answers", "errors", "longest", "recovery", "reason"),
    [
        (["right", "wrong", "wrong", "stored"], [], 0.1, 0.2, "2 of 3 loads gave other bytes"),
        (["right", "silent"], [], 10.0, 0.2, "not answered within 10 s"),
        (["right", "ended"], [], 0.1, None, "its process ended"),
        (["miss", "error", "miss", "stored"], ["error OSError: no"], 0.1, 0.2, "raised into its caller: OSError: no"),
        (RIGHT, [], 0.61, 0.2, "beyond a clock"),
        (RIGHT, [], 0.1, None, "does not store and load again"),
    ],
)
def test_each_thing_that_goes_wrong_fails_and_is_named(
    answers: list[str], errors: list[str], longest: float, recovery: float | None, reason: str
) -> None:
    verdict, reasons = peers.judge(answers, errors, longest, recovery, 10)
    assert verdict == "fail"
    assert reason in reasons


def test_a_peer_that_is_not_installed_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "version", lambda _: "")
    rows = list(peers.compare(Options(tmp_path, ("EIO",)), peers=("lmcache",)))
    assert [(row.verdict, row.reason) for row in rows] == [("skipped", "lmcache is not installed")]
    assert list(tmp_path.iterdir()) == []


def test_flipped_bits_and_errors_at_vllms_own_tier_are_seen(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    rows = {row.fault: row for row in peers.compare(Options(tmp_path, ("EIO", "flips-in-flight")), peers=("vllm",))}
    if rows["EIO"].verdict == "skipped":
        pytest.skip(rows["EIO"].reason)
    # Its files carry no checksum.
    assert rows["flips-in-flight"].wrong_bytes == 3 * peers.SIZE_BYTES
    assert rows["EIO"].wrong_bytes == 0
    assert all(row.recovery_seconds is not None for row in rows.values())
    assert list(tmp_path.iterdir()) == []
