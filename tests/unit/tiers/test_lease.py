"""Who lives, who is given up, and what that ends."""

import os
import subprocess
from pathlib import Path

import pytest

from kvtier.processes import process_tag
from kvtier.tiers.filesystem import record
from kvtier.tiers.filesystem.election import (
    LEASE_SECONDS,
    Watch,
    acquire,
    in_this_process,
    listdir_uncached,
    make_control,
    new_holder,
    read_ledger,
    remove_fenced,
    surely_gone,
    top_fence,
    vacant,
)
from kvtier.tiers.filesystem.layout import (
    LEDGER,
    Modes,
    grant_name,
    make_directory,
    seat_path,
    writers_path,
)

MODES = Modes(0o640, 0o750, None)


def watched(
    watch: Watch, value: object, start: float, seconds: float, step: float = 1.0
) -> float | None:
    """Shows the same value again and again; after how long it is given up, None if it is not."""
    now = start
    while now <= start + seconds:
        if watch.expired(value, now):
            return now - start
        now += step
    return None


def test_a_record_that_does_not_change_is_given_up_after_its_duration() -> None:
    assert watched(Watch(), 7, 1_000.0, 60) == LEASE_SECONDS


def test_a_record_that_changes_now_and_then_never_is() -> None:
    watch = Watch()
    for beat in range(20):
        assert watched(watch, beat, beat * (LEASE_SECONDS - 1), LEASE_SECONDS - 2) is None


def test_time_in_which_the_watcher_was_stopped_does_not_count() -> None:
    watch = Watch()
    assert not watch.expired(1, 0.0)
    assert not watch.expired(1, 1_000.0)
    assert not watch.expired(1, 2_000.0)
    assert watched(watch, 1, 2_001.0, 60) == LEASE_SECONDS - 4 - 1


def test_a_process_is_known_to_be_gone_only_where_it_can_be_asked() -> None:
    mine = new_holder()
    assert in_this_process(mine)
    assert not surely_gone(mine)
    child = subprocess.Popen(["sleep", "60"])
    started = int(Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    boot, space, _ = process_tag().split("-")
    name = f"{boot}-{space}-{child.pid}-{started}-00000000"
    assert not surely_gone(name)
    assert surely_gone(
        f"{boot}-{space}-{child.pid}-{started + 1}-00000000"
    )  # the number was given to another process
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert surely_gone(name)  # not even reaped yet
    child.wait()
    assert surely_gone(name)
    assert not surely_gone(f"{boot}-12345-{child.pid}-{started}-00000000")
    other = "0" * 8 if boot != "0" * 8 else "1" * 8
    assert not surely_gone(f"{other}-{space}-{child.pid}-{started}-00000000")
    assert not surely_gone("no holder at all")


def test_after_the_fence_nothing_can_be_made_or_renamed_out(tmp_path: Path) -> None:
    directory = tmp_path / "writer"
    directory.mkdir()
    (directory / "t-1").write_bytes(b"half")
    assert remove_fenced(directory)
    with pytest.raises(FileNotFoundError):
        os.rename(directory / "t-1", tmp_path / "object")
    with pytest.raises(FileNotFoundError):
        (directory / "t-2").write_bytes(b"more")
    assert remove_fenced(directory)


def test_looking_anew_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    # Of one that was killed while it looked.
    (tmp_path / ".eye-0123456789ab").touch()
    assert listdir_uncached(tmp_path) == ["x"]
    assert os.listdir(tmp_path) == ["x"]


def test_a_record_that_is_half_written_is_none_and_a_shorter_one_replaces_a_longer(
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
def test_what_stands_in_the_place_of_a_record_is_none(tmp_path: Path, kind: str) -> None:
    make_control(tmp_path, MODES)
    acquire(tmp_path, 0, "a", MODES)
    path = seat_path(tmp_path, 1) / LEDGER
    path.unlink()
    in_place(path, kind, tmp_path / "elsewhere")
    assert read_ledger(tmp_path, 1) is None
    second = acquire(tmp_path, 1, "b", MODES)
    assert second is not None
    assert second.base_bytes is None
    assert not seat_path(tmp_path, 1).exists()
    assert read_ledger(tmp_path, 2) is not None


def in_place(path: Path, kind: str, elsewhere: Path) -> None:
    """Puts something at ``path`` that nobody of ours makes."""
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
def test_the_fence_removes_what_is_no_directory_of_ours_and_nothing_that_it_points_to(
    tmp_path: Path, kind: str
) -> None:
    path, elsewhere = tmp_path / "holder", tmp_path / "elsewhere"
    in_place(path, kind, elsewhere)
    assert remove_fenced(path)
    assert not os.path.lexists(path)
    holder = tmp_path / "holder"
    holder.mkdir()
    in_place(holder / "inside", kind, tmp_path / "elsewhere too" if kind == "link" else elsewhere)
    assert remove_fenced(holder)
    assert not holder.exists()
    if kind == "link":
        assert (elsewhere / "precious").exists()
        assert (tmp_path / "elsewhere too" / "precious").exists()


def test_one_of_those_who_claim_gets_the_office_and_numbers_never_come_back(tmp_path: Path) -> None:
    make_control(tmp_path, MODES)
    first = acquire(tmp_path, 0, "a", MODES)
    assert first is not None
    assert first.fence == 1
    assert first.base_bytes is None
    assert acquire(tmp_path, 0, "b", MODES) is None
    second = acquire(tmp_path, 1, "b", MODES)
    assert second is not None
    assert not seat_path(tmp_path, 1).exists()
    # One who had decided to take number 1 before all this, and was stopped.
    assert acquire(tmp_path, 0, "c", MODES) is None
    assert top_fence(tmp_path, fresh=True) == 2


def test_a_deposed_janitor_can_neither_announce_nor_offer(tmp_path: Path) -> None:
    make_control(tmp_path, MODES)
    acquire(tmp_path, 0, "a", MODES)
    acquire(tmp_path, 1, "b", MODES)
    with pytest.raises(FileNotFoundError):
        record.rewrite(seat_path(tmp_path, 1) / LEDGER, {"base": 0})
    with pytest.raises(FileNotFoundError):
        (seat_path(tmp_path, 1) / "offer-w.1").touch()


def test_a_successor_inherits_the_books_and_every_grant(tmp_path: Path) -> None:
    make_control(tmp_path, MODES)
    acquire(tmp_path, 0, "a", MODES)
    record.rewrite(seat_path(tmp_path, 1) / LEDGER, {"base": 12_345})
    (seat_path(tmp_path, 1) / "offer-w.3").touch()
    make_directory(writers_path(tmp_path) / "w", MODES)
    (writers_path(tmp_path) / "w" / grant_name(2, 777)).touch()
    inherited = acquire(tmp_path, 1, "b", MODES)
    assert inherited is not None
    assert inherited.base_bytes == 12_345
    assert inherited.grants == {"w": {2: 777}}


def test_an_office_is_vacant_when_released_or_its_holder_is_gone_and_not_before(
    tmp_path: Path,
) -> None:
    make_control(tmp_path, MODES)
    assert vacant(None, 0, Watch(), 0.0, supersede=False)
    acquire(tmp_path, 0, new_holder(), MODES)
    ledger = read_ledger(tmp_path, 1)
    assert ledger is not None
    assert not vacant(ledger, 1, Watch(), 0.0, supersede=False)
    assert vacant(ledger, 1, Watch(), 0.0, supersede=True)
    assert vacant(ledger | {"released": True}, 1, Watch(), 0.0, supersede=False)
    boot, space, _ = process_tag().split("-")
    assert vacant(
        ledger | {"holder": f"{boot}-{space}-4194305-1-00000000"}, 1, Watch(), 0.0, supersede=False
    )
    watch = Watch()
    elsewhere = ledger | {"holder": f"{boot}-12345-1-1-00000000"}
    answers = [vacant(elsewhere, 1, watch, float(now), supersede=False) for now in range(12)]
    assert answers == [False] * 10 + [True] * 2
