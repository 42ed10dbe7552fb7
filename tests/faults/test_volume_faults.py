"""The scorecard's rows about one disk of several: they pass, and fail where the disks are one."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.scorecard import runner, volume_faults
from kvtier.scorecard.mount import unavailable
from kvtier.scorecard.runner import ScorecardOptions, ScorecardRow
from kvtier.scorecard.small_disks import DiskUnavailableError, mounted
from kvtier.scorecard.testbed import FaultTestbed

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())
SLACK_SECONDS = 20.0
"""How long a load waits on a machine that runs other tests as well is not judged here."""
PLACES = {"ext4": 96 << 20, "xfs": 320 << 20}


@contextmanager
def storage(kind: str) -> Iterator[Path]:
    """A directory on a file system of that kind."""
    if kind == "tmpfs":
        path = Path(tempfile.mkdtemp(prefix="kvtier-test-", dir="/dev/shm"))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
        return
    base = Path(tempfile.mkdtemp(prefix=f"kvtier-{kind}-"))
    try:
        with mounted(base, kind, PLACES[kind]) as disk:
            yield disk.path
    except DiskUnavailableError as error:
        pytest.skip(str(error))
    finally:
        shutil.rmtree(base, ignore_errors=True)


def row(directory: Path, name: str, fuse: bool = True) -> ScorecardRow:
    options = ScorecardOptions(
        directory, (name,), seconds=1.5, slack_seconds=SLACK_SECONDS, fuse=fuse
    )
    (found,) = runner.run_faults(options)
    return found


@pytest.mark.parametrize(
    ("name", "kind"),
    [("one-disk-EIO", "ext4"), ("one-disk-hangs", "xfs"), ("one-disk-full", "tmpfs")],
)
def test_a_row_passes(name: str, kind: str) -> None:
    with storage(kind) as directory:
        found = row(directory, name)
        assert not list(directory.glob("kvtier-faults-*"))
    assert (found.verdict, found.reason) == ("pass", "")
    assert found.loaded > 0


def test_a_row_passes_without_fuse(tmp_path: Path) -> None:
    found = row(tmp_path, "one-disk-hangs", fuse=False)
    assert (found.verdict, found.reason) == ("pass", "")
    assert found.means == volume_faults.WRAPPED_MEANS


def test_a_fault_of_both_volumes_fails_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_one_disk(
        home: Path, files: Path, below: Path, _: Path | None, volumes: tuple[Path, ...]
    ) -> FaultTestbed:
        both = (files / volume_faults.FAILING, files / volume_faults.WORKING)
        for each in both:
            each.mkdir()
        return FaultTestbed(home, files, below, volumes=both)

    def no_recovery(_: Any) -> float:
        return 0.0

    monkeypatch.setattr(volume_faults, "FaultTestbed", on_one_disk)
    monkeypatch.setattr(volume_faults, "SUSPEND_SECONDS", 8.0)
    monkeypatch.setattr(volume_faults, "STORED_SECONDS", 0.2)
    monkeypatch.setattr(FaultTestbed, "recover", no_recovery)
    found = row(tmp_path, "one-disk-EIO")
    assert found.verdict == "fail"
    assert "disk1 is BreakerOpen" in found.reason
    assert "new objects reached a file" in found.reason
