"""The lock that proves that a process of another container is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.harness.tierd_testbed import environment, wait_for
from kvtier.processes import Liveness, ProcessIdentity, own_identity
from kvtier.tierd.liveness import PEERS_NAME, PeerLiveness, hold_peer_lock, is_lock_held

HOLDER = """
import os, subprocess, sys, time
from pathlib import Path
from kvtier.tierd import liveness
if "reserve" in sys.argv:
    liveness.reserve_descriptor()
fillers = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
name = liveness.hold_peer_lock(Path(sys.argv[1]))
if "fork" in sys.argv:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, b"x")  # it runs, and has closed what children close
        time.sleep(60)
        os._exit(0)
    os.read(reader, 1)
    print(child, flush=True)
elif "exec" in sys.argv:
    print(subprocess.Popen(["sleep", "60"]).pid, flush=True)
fds = os.listdir("/proc/self/fd")
number = next(n for n in fds if os.path.realpath(f"/proc/self/fd/{n}").endswith(name))
print(f"lock {name} {number} {fillers[0]}", flush=True)
time.sleep(60)
"""


class Holder:
    """A process that holds a lock. ``child``: of a process that it has started; 0: none."""

    def __init__(self, directory: Path, *how: str) -> None:
        command = [sys.executable, "-c", HOLDER, str(directory), *how]
        self.process = subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.child = 0
        while not (line := self.process.stdout.readline()).startswith("lock"):
            assert line
            self.child = int(line)
        _, self.name, number, filler = line.split()
        self.descriptor, self.filler = int(number), int(filler)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        if self.child:
            try:
                os.kill(self.child, signal.SIGKILL)
            except ProcessLookupError:
                pass
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def holders() -> Iterator[list[Holder]]:
    made: list[Holder] = []
    yield made
    for holder in made:
        holder.close()


def far(name: str) -> ProcessIdentity:
    """A process of another container."""
    return ProcessIdentity(7, 70, "elsewhere", name)


def test_a_lock_is_held_until_its_process_is_killed(tmp_path: Path, holders: list[Holder]) -> None:
    holder = Holder(tmp_path)
    holders.append(holder)
    assert is_lock_held(tmp_path / PEERS_NAME, holder.name) is True
    holder.kill()
    assert is_lock_held(tmp_path / PEERS_NAME, holder.name) is False


@pytest.mark.parametrize("how", ["fork", "exec"])
def test_children_that_outlive_their_parent_do_not_keep_its_lock(
    tmp_path: Path, holders: list[Holder], how: str
) -> None:
    holder = Holder(tmp_path, how)
    holders.append(holder)
    assert is_lock_held(tmp_path / PEERS_NAME, holder.name) is True
    holder.kill()
    os.kill(holder.child, 0)
    assert is_lock_held(tmp_path / PEERS_NAME, holder.name) is False


def test_a_child_that_exits_does_not_release_its_parents_lock(
    tmp_path: Path, holders: list[Holder]
) -> None:
    holder = Holder(tmp_path, "fork")
    holders.append(holder)
    os.kill(holder.child, signal.SIGKILL)
    wait_for(lambda: _state(holder.child) == "Z", "the child has ended")
    assert is_lock_held(tmp_path / PEERS_NAME, holder.name) is True


def test_the_lock_lies_below_what_is_opened_after_the_reservation(
    tmp_path: Path, holders: list[Holder]
) -> None:
    with_one, without = Holder(tmp_path, "reserve"), Holder(tmp_path)
    holders += [with_one, without]
    assert with_one.descriptor < with_one.filler
    assert without.descriptor > without.filler


def test_a_free_lock_is_proof_only_after_it_has_settled(
    tmp_path: Path, holders: list[Holder]
) -> None:
    holder = Holder(tmp_path)
    holders.append(holder)
    now = 100.0
    fates = PeerLiveness(tmp_path, lambda: now, settle_seconds=0.5)
    assert fates(far(holder.name)) is Liveness.ALIVE
    holder.kill()
    assert fates(far(holder.name)) is Liveness.ALIVE
    now += 0.4
    assert fates(far(holder.name)) is Liveness.ALIVE
    now += 0.1
    assert fates(far(holder.name)) is Liveness.GONE


def test_a_process_without_a_lock_is_unverifiable(tmp_path: Path, holders: list[Holder]) -> None:
    holder = Holder(tmp_path)
    holders.append(holder)
    (tmp_path / PEERS_NAME / holder.name).unlink()
    holder.kill()
    fates = PeerLiveness(tmp_path)
    assert [fates(far(name)) for name in (holder.name, "", "../pool", "0123")] == [
        Liveness.UNKNOWN
    ] * 4


def test_a_visible_process_is_checked_by_its_id(tmp_path: Path) -> None:
    me = own_identity()
    fates = PeerLiveness(tmp_path)
    assert fates(ProcessIdentity(me.pid, me.start, me.pid_namespace, "0123")) is Liveness.ALIVE
    assert (
        fates(ProcessIdentity(me.pid, me.start + 1, me.pid_namespace, hold_peer_lock(tmp_path)))
        is Liveness.GONE
    )


def test_a_process_has_one_lock_in_a_directory_and_takes_another_if_the_file_is_gone(
    tmp_path: Path,
) -> None:
    name = hold_peer_lock(tmp_path)
    assert hold_peer_lock(tmp_path) == name
    (tmp_path / PEERS_NAME / name).unlink()
    other = hold_peer_lock(tmp_path)
    assert other != name
    assert is_lock_held(tmp_path / PEERS_NAME, other) is True


def test_files_of_exited_processes_are_removed_once_no_process_waits_for_them(
    tmp_path: Path, holders: list[Holder]
) -> None:
    dead, waited_for, alive = Holder(tmp_path), Holder(tmp_path), Holder(tmp_path)
    holders += [dead, waited_for, alive]
    dead.kill()
    waited_for.kill()
    for holder in holders:
        os.utime(tmp_path / PEERS_NAME / holder.name, (1, 1))
    assert PeerLiveness(tmp_path).sweep({waited_for.name}) == 1
    assert {path.name for path in (tmp_path / PEERS_NAME).iterdir()} == {
        waited_for.name,
        alive.name,
    }


def test_every_user_can_test_a_lock_with_any_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        name = hold_peer_lock(tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / PEERS_NAME).stat().st_mode & 0o777 == 0o777
    assert (tmp_path / PEERS_NAME / name).stat().st_mode & 0o777 == 0o666


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
