"""Locks, leftovers and the epoch in the run directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtier.errors import ConfigurationError
from kvtier.tierd.run_directory import ALIVE_NAME, MAX_EPOCH, RunDirectory, remove_abandoned


def make(parent: Path, name: str = "kvtier-a", shared: bool = False) -> RunDirectory:
    return RunDirectory(parent / name, shared=shared)


def test_the_last_process_that_leaves_removes_the_directory(tmp_path: Path) -> None:
    first, second = make(tmp_path), make(tmp_path)
    first.join()
    second.join()
    (first.path / "pool").write_bytes(b"x" * 10)
    assert not first.leave()
    assert first.path.exists()
    assert second.leave()
    assert not first.path.exists()
    assert not second.leave()


def test_a_pods_volume_is_never_removed_and_belongs_to_both_containers(tmp_path: Path) -> None:
    directory = make(tmp_path, shared=True)
    directory.join()
    assert directory.path.joinpath(ALIVE_NAME).stat().st_mode & 0o777 == 0o666
    assert not directory.leave()
    assert directory.path.exists()


def test_one_tierd_runs_at_a_time_and_checks_do_not_disturb_each_other(tmp_path: Path) -> None:
    first, second = make(tmp_path), make(tmp_path)
    first.join()
    assert not second.is_daemon_running()
    lock = first.try_daemon_lock()
    assert lock is not None
    assert second.try_daemon_lock() is None
    assert second.is_daemon_running()
    before = second.last_heartbeat()
    first.heartbeat(lock)
    assert second.last_heartbeat() != before
    lock.close()
    assert not second.is_daemon_running()


def test_the_epoch_is_kept_and_a_broken_one_jumps_ahead(tmp_path: Path) -> None:
    directory = make(tmp_path)
    directory.join()
    assert directory.read_epoch() == 0
    directory.write_epoch(7)
    assert directory.read_epoch() == 7
    for broken in ("seven", "", "-3", "9" * 30, "9" * 5_000):
        (directory.path / "epoch").write_text(broken)
        assert 1_000_000 < directory.read_epoch() < MAX_EPOCH


def test_cleanup_removes_only_directories_without_a_living_process(tmp_path: Path) -> None:
    own, living, dead, foreign = (
        make(tmp_path, f"kvtier-{name}") for name in ("own", "living", "dead", "foreign")
    )
    for directory in (own, living, dead):
        directory.join()
    (dead.path / "pool").write_bytes(b"x")
    assert dead._alive is not None
    dead._alive.close()  # what the kernel does when a process is killed
    foreign.path.mkdir()
    (foreign.path / ALIVE_NAME).write_text("of another program")
    (tmp_path / "kvtier-file").write_text("")
    (tmp_path / "other").mkdir()
    assert remove_abandoned(own.path) == 1
    assert sorted(os.listdir(tmp_path)) == [
        "kvtier-file",
        "kvtier-foreign",
        "kvtier-living",
        "kvtier-own",
        "other",
    ]


def test_a_directory_with_an_explicit_name_cleans_up_nothing(tmp_path: Path) -> None:
    dead = make(tmp_path, "kvtier-dead")
    dead.join()
    assert dead._alive is not None
    dead._alive.close()
    assert remove_abandoned(tmp_path / "mine") == 0


def test_joining_recreates_a_removed_directory(tmp_path: Path) -> None:
    directory = make(tmp_path)
    directory.join()
    for name in os.listdir(directory.path):
        path = directory.path / name
        path.rmdir() if path.is_dir() else path.unlink()
    directory.path.rmdir()
    directory.rejoin()
    assert (directory.path / ALIVE_NAME).exists()
    assert directory.leave()


def test_a_path_that_is_too_long_for_a_socket_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="runDirectory"):
        RunDirectory(tmp_path / ("x" * 100))


def test_a_pods_directory_is_not_swept_while_its_tierd_is_being_restarted(tmp_path: Path) -> None:
    own = make(tmp_path, "kvtier-own")
    own.join()
    pod = RunDirectory(tmp_path / "kvtier-pod", shared=True)
    pod.join()
    pod.leave()
    assert remove_abandoned(own.path) == 0
    assert pod.path.exists()


def test_the_lock_of_a_living_tierd_is_never_set_aside(tmp_path: Path) -> None:
    first, second = make(tmp_path), make(tmp_path)
    first.join()
    lock = first.try_daemon_lock()
    assert lock is not None
    inode = os.stat(first.path / "tierd.lock").st_ino
    assert second.try_daemon_lock() is None
    # Not for nonsense in it either.
    for text in ("", "nonsense", "{}", '{"pid": 1, "processStart": 0, "pidNamespace": ""}'):
        (first.path / "tierd.lock").write_text(text)
        assert second.try_daemon_lock() is None
        assert second.is_daemon_running()
    assert os.stat(first.path / "tierd.lock").st_ino == inode
    lock.close()
    taken = second.try_daemon_lock()
    assert taken is not None
    taken.close()


def test_a_lock_kept_by_a_hung_thread_of_a_killed_tierd_is_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make(tmp_path), make(tmp_path)
    first.join()
    kept = first.try_daemon_lock()
    monkeypatch.setattr(
        "kvtier.tierd.run_directory.main_thread_exited", lambda holder: holder.pid == os.getpid()
    )
    assert not second.is_daemon_running()
    lock = second.try_daemon_lock()
    assert kept is not None
    assert lock is not None
    monkeypatch.undo()
    assert first.is_daemon_running()
    assert first.try_daemon_lock() is None
    kept.close()
    assert first.is_daemon_running()
    lock.close()


def test_a_directory_that_others_may_write_to_is_not_joined_unless_it_is_a_pods(
    tmp_path: Path,
) -> None:
    directory = make(tmp_path)
    directory.path.mkdir()
    directory.path.chmod(0o777)
    with pytest.raises(ConfigurationError, match="must be writable by this user only"):
        directory.join()
    assert not list(directory.path.iterdir())
    volume = make(tmp_path, shared=True)
    volume.join()
    volume.leave()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_not_joined_and_a_link_to_one_neither(
    tmp_path: Path,
) -> None:
    directory = make(tmp_path)
    directory.path.mkdir(mode=0o700)
    os.chown(directory.path, 65534, 65534)
    with pytest.raises(ConfigurationError, match="must be writable by this user only"):
        directory.join()
    link = make(tmp_path, "kvtier-link")
    link.path.symlink_to(tmp_path)
    with pytest.raises(ConfigurationError, match="must be writable by this user only"):
        link.join()
