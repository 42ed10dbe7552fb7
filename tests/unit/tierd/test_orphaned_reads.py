"""Which slots threads of dead tierds may still read into."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.harness.tierd_testbed import environment
from kvtier.store.slot_table import SlotLocation
from kvtier.tierd.fencing import ReadLogFile, find_orphaned_reads

PLACES = [SlotLocation(number * 8192, 8192, 0, 10) for number in range(4)]
_DYING = """
import sys
from pathlib import Path
from kvtier.store.slot_table import SlotLocation
from kvtier.tierd.fencing import ReadLogFile
log = ReadLogFile(Path(sys.argv[1]), 7, 0o600)
for number in range(3):
    log.begin(SlotLocation(number * 8192, 8192, 0, 10))
log.end(8192)
print("noted", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has noted two reads and holds its lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", _DYING, str(tmp_path)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "noted\n"
    yield process
    process.kill()
    process.communicate()


def test_a_path_that_is_not_a_file_is_ignored_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "reads" / "sub").mkdir(parents=True)
    (tmp_path / "reads" / "link").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "reads" / "pipe")
    assert find_orphaned_reads(tmp_path) == []


def test_slots_of_reads_that_have_not_returned_are_kept_until_every_thread_is_gone(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    (hung,) = find_orphaned_reads(tmp_path)
    assert hung.places == (PLACES[0], PLACES[2])
    assert not hung.is_released()
    other.kill()
    other.wait()
    assert hung.is_released()
    assert find_orphaned_reads(tmp_path) == []
    assert list((tmp_path / "reads").iterdir()) == []


def test_a_process_does_not_read_its_own_file_as_orphaned(tmp_path: Path) -> None:
    log = ReadLogFile(tmp_path, 1, 0o600)
    log.begin(PLACES[0])
    assert find_orphaned_reads(tmp_path, log.path) == []
    assert log.path.exists()


def test_a_process_without_reads_leaves_no_file(tmp_path: Path) -> None:
    log = ReadLogFile(tmp_path, 1, 0o600)
    for place in PLACES:
        assert log.begin(place)
    for place in PLACES[:3]:
        log.end(place.offset)
    log.close()
    assert log.path.exists()
    log.end(PLACES[3].offset)
    log.close()
    assert not log.path.exists()


def test_positions_are_reused(tmp_path: Path) -> None:
    log = ReadLogFile(tmp_path, 1, 0o600)
    for _ in range(100):
        log.begin(PLACES[0])
        log.begin(PLACES[1])
        log.end(PLACES[0].offset)
        log.end(PLACES[1].offset)
    assert os.stat(log.path).st_size == 64
