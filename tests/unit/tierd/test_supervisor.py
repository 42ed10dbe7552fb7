"""Starting a daemon and starting it again, with programs that are quick to start in its place."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvtier.config.models import Daemon
from kvtier.errors import ConfigurationError
from kvtier.harness.tierd_testbed import TierdOptions, TierdTestbed, wait_for
from kvtier.tierd.supervisor import Supervisor
from kvtier.tierd.watchdog import DEFAULT_TIMING, WatchdogTiming

STOP_SECONDS = 60.0
"""Only a failing test waits as long."""
LIVES = """
import fcntl, os, sys, time
directory = sys.argv[1]
alive = os.open(directory + "/alive", os.O_RDWR)
fcntl.flock(alive, fcntl.LOCK_SH)
lock = os.open(directory + "/tierd.lock", os.O_RDWR | os.O_CREAT)
while True:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
    except OSError:
        time.sleep(0.01)
for _ in range(int(sys.argv[2])):
    os.utime(lock)
    time.sleep(0.05)
if sys.argv[3] == "hang":
    time.sleep(600)
"""


@pytest.fixture
def case(tmp_path: Path) -> Iterator[TierdTestbed]:
    found = TierdTestbed(tmp_path, TierdOptions(daemon=Daemon.ENGINE))
    yield found
    found.close()


def make(
    case: TierdTestbed, beats: int = 10_000, then: str = "end", unresponsive: float = 30.0
) -> Supervisor:
    command = [sys.executable, "-S", "-c", LIVES, str(case.run_directory), str(beats), then]
    return Supervisor(
        case.topology_directory,
        case.topology,
        command=command,
        timing=WatchdogTiming(poll=0.02, first_backoff=0.05, unresponsive=unresponsive),
    )


def kill_and_stop(supervisor: Supervisor) -> None:
    child = supervisor._watchdog.process
    if child is not None:
        child.kill()
        child.wait(60)
    supervisor.stop(STOP_SECONDS)


def test_any_number_of_supervisors_start_one_tierd(case: TierdTestbed) -> None:
    first, second = make(case), make(case)
    first.ensure()
    second.ensure()
    wait_for(
        lambda: first._run_directory.is_daemon_running() and not first._launcher.holds_spawn_lock,
        "the daemon lives",
    )
    assert first.child
    assert not second.child
    second.stop(STOP_SECONDS)
    kill_and_stop(first)
    wait_for(lambda: not case.run_directory.exists(), "the last one removes the directory")


def test_no_tierd_is_started_in_a_directory_that_others_may_write_to(case: TierdTestbed) -> None:
    case.run_directory.mkdir(parents=True, exist_ok=True)
    case.run_directory.chmod(0o777)
    supervisor = make(case)
    with pytest.raises(ConfigurationError, match="runDirectory"):
        supervisor.ensure()
    supervisor.stop(STOP_SECONDS)
    assert not supervisor.child
    assert not list(case.run_directory.iterdir())


def test_tierd_survives_a_kill_of_its_starter_and_all_descendants(
    case: TierdTestbed,
) -> None:
    supervisor = make(case)
    supervisor.ensure()
    wait_for(supervisor._run_directory.is_daemon_running, "the daemon lives")
    assert supervisor.child not in {
        child.pid for child in psutil.Process().children(recursive=True)
    }
    kill_and_stop(supervisor)


def test_a_tierd_that_exits_is_restarted_with_back_off(case: TierdTestbed) -> None:
    supervisor = make(case, beats=1)
    supervisor.ensure()
    wait_for(lambda: supervisor.counters["spawned"] >= 3, "it is started again and again")
    assert supervisor._watchdog._backoff_seconds > 0.15
    kill_and_stop(supervisor)


def test_another_supervisor_takes_over_when_the_starter_exits(case: TierdTestbed) -> None:
    first, second = make(case), make(case)
    first.ensure()
    second.ensure()
    wait_for(
        lambda: first._run_directory.is_daemon_running() and not first._launcher.holds_spawn_lock,
        "the daemon lives",
    )
    first._stop.set()
    assert first._thread is not None
    first._thread.join(STOP_SECONDS)
    child = first._watchdog.process
    assert child is not None
    child.kill()
    child.wait(60)
    wait_for(lambda: second.child, "the other one starts a daemon")
    first.stop(STOP_SECONDS)
    kill_and_stop(second)


def test_a_tierd_that_hangs_is_killed_by_its_starter(case: TierdTestbed) -> None:
    supervisor = make(case, beats=5, then="hang", unresponsive=0.5)
    supervisor.ensure()
    first = supervisor.child
    wait_for(lambda: supervisor.counters["killed_unresponsive"] >= 1, "it is killed")
    wait_for(lambda: supervisor.child not in (0, first), "another one is started")
    kill_and_stop(supervisor)


def test_a_missing_program_is_retried_and_does_no_harm(case: TierdTestbed) -> None:
    supervisor = Supervisor(
        case.topology_directory,
        case.topology,
        command=["/does/not/exist"],
        timing=WatchdogTiming(poll=0.02, first_backoff=0.05),
    )
    supervisor.ensure()
    wait_for(lambda: supervisor.counters["spawn_failed"] >= 2, "it is tried again")
    supervisor.stop(STOP_SECONDS)
    assert not case.run_directory.exists()


def test_a_run_directory_that_cannot_be_created_is_retried_with_back_off(
    case: TierdTestbed,
) -> None:
    case.run_directory.write_text("in the way")
    now = 0.0
    supervisor = Supervisor(
        case.topology_directory, case.topology, command=["/bin/true"], clock=lambda: now
    )
    for _ in range(5):
        supervisor._watchdog.step()
    assert supervisor.counters["spawn_failed"] == 1
    now = DEFAULT_TIMING.last_backoff
    supervisor._watchdog.step()
    assert supervisor.counters["spawn_failed"] == 2
    case.run_directory.unlink()


def test_beside_a_sidecar_nothing_is_started_or_made(tmp_path: Path) -> None:
    case = TierdTestbed(tmp_path, TierdOptions(daemon=Daemon.SIDECAR))
    supervisor = make(case)
    supervisor.ensure()
    supervisor.stop(STOP_SECONDS)
    assert supervisor.counters["spawned"] == 0
    assert not case.run_directory.exists()
