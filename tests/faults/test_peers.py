"""The comparison with other file tiers: it detects wrong bytes and crashes, removes what it
creates, and gives a reason for every skipped peer.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from kvtier.scorecard.peers import PEERS, Peer, PeerRow, compare
from kvtier.scorecard.runner import ScorecardOptions

STUB = """
    import os, sys
    from kvtier.scorecard.peer_protocol import expected, is_right, serve
    import numpy as np

    class Stub:
        version, setting = "1", "files without checksums"
        directory = None

        def __init__(self):
            self.answers = []

        def open(self, directory):
            self.directory = directory

        def store(self, call, number):
            (self.directory / str(number)).write_bytes(expected(number).tobytes())
            self.answers.append({"id": call, "outcome": "stored", "seconds": 0.0})

        def load(self, call, numbers):
            found = [(self.directory / str(number)).read_bytes() for number in numbers]
            if b"" in found:
                os._exit(7)
            bytes_of = {n: np.frombuffer(data, np.uint8) for n, data in zip(numbers, found)}
            wrong = sum(not is_right(n, data) for n, data in bytes_of.items())
            self.answers.append({"id": call, "outcome": "loaded", "hits": len(found),
                                 "wrong": wrong, "seconds": 0.0})

        def poll(self):
            answers, self.answers = self.answers, []
            return answers

    sys.exit(serve(Stub))
"""


def rows_of(tmp_path: Path, peers: tuple[Peer, ...], *faults: str) -> dict[str, PeerRow]:
    """Rows by fault. Skips where there is no FUSE."""
    work = tmp_path / "work"
    work.mkdir()
    rows = {
        row.fault: row for row in compare(ScorecardOptions(work, faults, seconds=1.0), peers=peers)
    }
    if any("cannot create a FUSE mount" in row.reason for row in rows.values()):
        pytest.skip(next(iter(rows.values())).reason)
    assert list(work.iterdir()) == []
    return rows


def test_a_peer_that_returns_wrong_bytes_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unverified_peer.py").write_text(textwrap.dedent(STUB))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    stub = (Peer("stub", "unverified_peer"),)
    rows = rows_of(
        tmp_path, stub, "latency-50ms", "EIO", "bit-flip-payload", "wrong-key", "zero-length"
    )
    assert {name: row.verdict for name, row in rows.items()} == {
        "latency-50ms": "pass",
        "EIO": "fail",
        "bit-flip-payload": "fail",
        "wrong-key": "fail",
        "zero-length": "fail",
    }
    for name in ("bit-flip-payload", "wrong-key"):
        assert rows[name].wrong_bytes
        assert rows[name].crashes == 0
    assert rows["EIO"].wrong_bytes == 0
    assert rows["EIO"].crashes
    assert "raised into its engine" in rows["EIO"].reason
    assert "OSError: [Errno 5]" in rows["EIO"].reason
    assert (rows["zero-length"].crashes, rows["zero-length"].recovery_seconds) == (1, None)
    assert "its process exited: status 7" in rows["zero-length"].reason
    assert rows["latency-50ms"].loaded > 0
    assert all(
        row.recovery_seconds is not None for name, row in rows.items() if name != "zero-length"
    )


def test_a_peer_that_does_not_start_is_skipped_with_a_reason(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, (Peer("missing", "no_such_package.peer"),), "EIO", "truncation")
    assert [row.verdict for row in rows.values()] == ["skipped", "skipped"]
    assert all("No module named 'no_such_package'" in row.reason for row in rows.values())


@pytest.mark.engine
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_real_peer_runs_through_the_faults(peer: Peer, tmp_path: Path) -> None:
    row = rows_of(tmp_path, (peer,), "flips-in-flight")["flips-in-flight"]
    if row.verdict == "skipped" and "ModuleNotFoundError" in row.reason:
        pytest.skip(row.reason)
    assert row.version
    # Neither has checksums in its files.
    assert row.verdict == "fail"
    assert row.wrong_bytes
    assert row.crashes == 0
    assert row.recovery_seconds is not None
