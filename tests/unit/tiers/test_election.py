"""Leader election, leases, fencing and records."""

import os
import subprocess
from pathlib import Path

import pytest

from kvtier.processes import process_tag
from kvtier.tiers.filesystem import record
from kvtier.tiers.filesystem.election import (
    LEASE_SECONDS,
    LeaseWatch,
    acquire,
    current_term,
    fence_directory,
    in_this_process,
    is_dead,
    leadership_is_free,
    listdir_uncached,
    make_control_directory,
    new_holder,
    read_ledger,
)
from kvtier.tiers.filesystem.layout import (
    LEDGER,
    Modes,
    grant_name,
    make_directory,
    term_path,
    writers_path,
)

MODES = Modes(0o640, 0o750, None)


def watched(
    watch: LeaseWatch, value: object, start: float, seconds: float, step: float = 1.0
) -> float | None:
    """Shows the same value again and again; after how long it is given up, None if it is not."""
    now = start
    while now <= start + seconds:
        if watch.expired(value, now):
            return now - start
        now += step
    return None


def test_an_unchanged_record_expires_after_the_lease() -> None:
    assert watched(LeaseWatch(), 7, 1_000.0, 60) == LEASE_SECONDS


def test_a_changing_record_never_expires() -> None:
    watch = LeaseWatch()
    for beat in range(20):
        assert watched(watch, beat, beat * (LEASE_SECONDS - 1), LEASE_SECONDS - 2) is None


def test_time_while_the_watcher_was_stopped_does_not_count() -> None:
    watch = LeaseWatch()
    assert not watch.expired(1, 0.0)
    assert not watch.expired(1, 1_000.0)
    assert not watch.expired(1, 2_000.0)
    assert watched(watch, 1, 2_001.0, 60) == LEASE_SECONDS - 4 - 1


def test_a_process_is_dead_only_if_it_is_visible_from_here() -> None:
    mine = new_holder()
    assert in_this_process(mine)
    assert not is_dead(mine)
    child = subprocess.Popen(["sleep", "60"])
    started = int(Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    boot, space, _ = process_tag().split("-")
    name = f"{boot}-{space}-{child.pid}-{started}-00000000"
    assert not is_dead(name)
    assert is_dead(
        f"{boot}-{space}-{child.pid}-{started + 1}-00000000"
    )  # the number was given to another process
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_dead(name)  # not even reaped yet
    child.wait()
    assert is_dead(name)
    assert not is_dead(f"{boot}-12345-{child.pid}-{started}-00000000")
    other = "0" * 8 if boot != "0" * 8 else "1" * 8
    assert not is_dead(f"{other}-{space}-{child.pid}-{started}-00000000")
    assert not is_dead("no holder at all")


def test_nothing_can_be_created_or_renamed_in_a_fenced_directory(tmp_path: Path) -> None:
    directory = tmp_path / "writer"
    directory.mkdir()
    (directory / "t-1").write_bytes(b"half")
    assert fence_directory(directory)
    with pytest.raises(FileNotFoundError):
        os.rename(directory / "t-1", tmp_path / "object")
    with pytest.raises(FileNotFoundError):
        (directory / "t-2").write_bytes(b"more")
    assert fence_directory(directory)


def test_uncached_listing_leaves_no_files(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    # Of one that was killed while it looked.
    (tmp_path / ".eye-0123456789ab").touch()
    assert listdir_uncached(tmp_path) == ["x"]
    assert os.listdir(tmp_path) == ["x"]


def test_a_partial_record_is_absent_and_a_shorter_record_replaces_a_longer(
    tmp_path: Path,
) -> None:
    path = tmp_path / "record"
    record.create(path, {"text": "x" * 5_000}, Modes(0o600, 0o700, None))
    record.rewrite(path, {"text": "y"})
    assert record.read(path) == {"text": "y"}
    with path.open("r+b") as file:
        file.seek(50)
        file.write(b"!")
    assert record.read(path) is None
    path.write_bytes(b"")
    assert record.read(path) is None
    with pytest.raises(FileNotFoundError):
        record.rewrite(tmp_path / "gone", {})


@pytest.mark.parametrize("kind", ["directory", "link", "pipe"])
def test_anything_else_in_place_of_a_ledger_counts_as_absent(tmp_path: Path, kind: str) -> None:
    make_control_directory(tmp_path, MODES)
    acquire(tmp_path, 0, "a", MODES)
    path = term_path(tmp_path, 1) / LEDGER
    path.unlink()
    in_place(path, kind, tmp_path / "elsewhere")
    assert read_ledger(tmp_path, 1) is None
    second = acquire(tmp_path, 1, "b", MODES)
    assert second is not None
    assert second.base_bytes is None
    assert not term_path(tmp_path, 1).exists()
    assert read_ledger(tmp_path, 2) is not None


def in_place(path: Path, kind: str, elsewhere: Path) -> None:
    """Puts something at ``path`` that KVTier does not create."""
    if kind == "directory":
        (path / "below").mkdir(parents=True)
    elif kind == "link":
        elsewhere.mkdir()
        (elsewhere / "precious").touch()
        path.symlink_to(elsewhere)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.touch()


@pytest.mark.parametrize("kind", ["file", "link", "pipe", "directory"])
def test_fencing_removes_foreign_files_but_not_link_targets(tmp_path: Path, kind: str) -> None:
    path, elsewhere = tmp_path / "holder", tmp_path / "elsewhere"
    in_place(path, kind, elsewhere)
    assert fence_directory(path)
    assert not os.path.lexists(path)
    holder = tmp_path / "holder"
    holder.mkdir()
    in_place(holder / "inside", kind, tmp_path / "elsewhere too" if kind == "link" else elsewhere)
    assert fence_directory(holder)
    assert not holder.exists()
    if kind == "link":
        assert (elsewhere / "precious").exists()
        assert (tmp_path / "elsewhere too" / "precious").exists()


def test_one_candidate_acquires_a_term_and_no_term_is_used_twice(tmp_path: Path) -> None:
    make_control_directory(tmp_path, MODES)
    first = acquire(tmp_path, 0, "a", MODES)
    assert first is not None
    assert first.term == 1
    assert first.base_bytes is None
    assert acquire(tmp_path, 0, "b", MODES) is None
    second = acquire(tmp_path, 1, "b", MODES)
    assert second is not None
    assert not term_path(tmp_path, 1).exists()
    # One who had decided to take number 1 before all this, and was stopped.
    assert acquire(tmp_path, 0, "c", MODES) is None
    assert current_term(tmp_path, uncached=True) == 2


def test_a_former_leader_can_neither_write_its_ledger_nor_offer_grants(tmp_path: Path) -> None:
    make_control_directory(tmp_path, MODES)
    acquire(tmp_path, 0, "a", MODES)
    acquire(tmp_path, 1, "b", MODES)
    with pytest.raises(FileNotFoundError):
        record.rewrite(term_path(tmp_path, 1) / LEDGER, {"base": 0})
    with pytest.raises(FileNotFoundError):
        (term_path(tmp_path, 1) / "offer-w.1").touch()


def test_a_successor_inherits_the_base_and_every_grant(tmp_path: Path) -> None:
    make_control_directory(tmp_path, MODES)
    acquire(tmp_path, 0, "a", MODES)
    record.rewrite(term_path(tmp_path, 1) / LEDGER, {"base": 12_345})
    (term_path(tmp_path, 1) / "offer-w.3").touch()
    make_directory(writers_path(tmp_path) / "w", MODES)
    (writers_path(tmp_path) / "w" / grant_name(2, 777)).touch()
    inherited = acquire(tmp_path, 1, "b", MODES)
    assert inherited is not None
    assert inherited.base_bytes == 12_345
    assert inherited.grants == {"w": {2: 777}}


def test_leadership_is_free_when_released_or_the_leader_has_exited(
    tmp_path: Path,
) -> None:
    make_control_directory(tmp_path, MODES)
    assert leadership_is_free(None, 0, LeaseWatch(), 0.0, supersede=False)
    acquire(tmp_path, 0, new_holder(), MODES)
    ledger = read_ledger(tmp_path, 1)
    assert ledger is not None
    assert not leadership_is_free(ledger, 1, LeaseWatch(), 0.0, supersede=False)
    assert leadership_is_free(ledger, 1, LeaseWatch(), 0.0, supersede=True)
    assert leadership_is_free(ledger | {"released": True}, 1, LeaseWatch(), 0.0, supersede=False)
    boot, space, _ = process_tag().split("-")
    assert leadership_is_free(
        ledger | {"holder": f"{boot}-{space}-4194305-1-00000000"},
        1,
        LeaseWatch(),
        0.0,
        supersede=False,
    )
    watch = LeaseWatch()
    elsewhere = ledger | {"holder": f"{boot}-12345-1-1-00000000"}
    answers = [
        leadership_is_free(elsewhere, 1, watch, float(now), supersede=False) for now in range(12)
    ]
    assert answers == [False] * 10 + [True] * 2
