"""Child processes of the demo and of tests: they end when stopped, with all their children."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest
from tests.support.ports import reserved_port

from kvtier.harness.engine_process import ManagedProcess, http_request, parse_metrics

SLEEPER = """
import subprocess, time
child = subprocess.Popen(['sleep', '600'])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_samples_are_found_by_name_and_labels_and_summed_by_name() -> None:
    text = (
        '# HELP x y\nloaded_total{tier="ram"} 3.0\nloaded_total{tier="disk"} 4\nup 1\nbroken line\n'
    )
    values = parse_metrics(text)
    assert values['loaded_total{tier="ram"}'] == 3
    assert values["loaded_total"] == 7
    assert values["up"] == 1


def test_killing_a_process_kills_its_children(tmp_path: Path) -> None:
    child = ManagedProcess([sys.executable, "-c", SLEEPER], os.environ, tmp_path / "log")
    while not child.log_tail().strip():
        assert child.alive()
    grandchild = int(child.log_tail())
    child.kill()
    assert not child.alive()
    gone, _ = psutil.wait_procs(
        [psutil.Process(grandchild)] if psutil.pid_exists(grandchild) else [], timeout=30
    )
    assert (
        not psutil.pid_exists(grandchild)
        or gone
        or psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE
    )


def test_a_process_that_exits_is_not_alive(tmp_path: Path) -> None:
    child = ManagedProcess(
        [sys.executable, "-c", "print('bye'); raise SystemExit(3)"], os.environ, tmp_path / "log"
    )
    assert child.process.wait(60) == 3
    assert not child.alive()
    assert child.log_tail() == "bye"
    child.stop()


def test_a_rejected_connection_is_an_os_error() -> None:
    # No process listens, and none is given the port.
    with reserved_port() as port, pytest.raises(ConnectionError):
        http_request(port, "GET", "/", timeout_seconds=30)


SEMAPHORE = """
import multiprocessing, time
s = multiprocessing.get_context('spawn').Semaphore()
print('made', flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_stopped_process_leaves_no_semaphore(tmp_path: Path, end: str) -> None:
    before = set(os.listdir("/dev/shm"))
    child = ManagedProcess([sys.executable, "-c", SEMAPHORE], os.environ, tmp_path / "log")
    while "made" not in child.log_tail():
        assert child.alive()
    inode_names = {
        entry.name for entry in os.scandir("/dev/shm") if entry.name.startswith("sem.mp-")
    } - before
    assert inode_names
    getattr(child, end)()
    still = {entry.name for entry in os.scandir("/dev/shm")}
    # Other processes create semaphores too: at least one that existed with the child is gone.
    assert inode_names - still
