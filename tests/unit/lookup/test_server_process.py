"""The process that answers is killed, or stopped and continued, while a client is attached."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.lookup.test_client_and_server import ENGINE, wait
from tests.unit.lookup.test_commits import A

from kvtier.lookup.client import LookupClient, greeting
from kvtier.lookup.wire import RANK, SCHEDULER

PROGRAM = """
import sys, time
from pathlib import Path
from kvtier.lookup.client import greeting
from kvtier.lookup.index import CommitIndex
from kvtier.lookup.server import LookupServer

class Markers:
    def __init__(self, directory): self.directory = directory
    def path(self, key): return self.directory / key.hex()
    def write(self, key, store): return bool(self.path(key).write_text(str(store)))
    def read(self, key): return int(self.path(key).read_text()) if self.path(key).exists() else 0
    def remove(self, key): self.path(key).unlink(missing_ok=True)
    def holds(self, key): return True

run, markers, engine = Path(sys.argv[1]), Markers(Path(sys.argv[2])), sys.argv[3]
server = LookupServer(run, greeting("rank", engine, 1), lambda: CommitIndex(1, markers))
server.start()
print("serving", flush=True)
time.sleep(600)
"""


class ServerProcess:
    """A server in a process of its own, whose markers are files."""

    def __init__(self, directory: Path) -> None:
        self.run, self.markers = directory / "run", directory / "markers"
        self.markers.mkdir()
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [sys.executable, "-c", PROGRAM, str(self.run), str(self.markers), ENGINE]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "serving\n"

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()


@pytest.fixture
def no_silence() -> None:
    """A server that is stopped is silent."""


@pytest.fixture
def server(run_directory: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(run_directory)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def clients(server: ServerProcess) -> Iterator[tuple[LookupClient, LookupClient]]:
    """The scheduler's and the one rank's."""
    found = (
        LookupClient(server.run, greeting(SCHEDULER, ENGINE, 1)),
        LookupClient(server.run, greeting(RANK, ENGINE, 1)),
    )
    for each in found:
        each.start()
    wait(lambda: all(each.attached for each in found))
    yield found
    for each in found:
        each.close(30.0)


def test_a_server_that_is_killed_is_replaced_and_answers_from_the_markers(
    server: ServerProcess, clients: tuple[LookupClient, LookupClient]
) -> None:
    scheduler, rank = clients
    assert rank.stored([(A, 5)])
    wait(lambda: scheduler.ask([A], 30.0) == (5,))
    instance = scheduler.instance
    server.kill()
    wait(lambda: not scheduler.attached and not rank.attached)
    assert scheduler.ask([A], 30.0) is None
    server.start()
    wait(lambda: scheduler.attached and rank.attached)
    assert scheduler.instance != instance
    wait(lambda: scheduler.ask([A], 30.0) == (5,))


def test_a_server_that_is_stopped_costs_its_deadline_and_comes_back(
    server: ServerProcess, clients: tuple[LookupClient, LookupClient]
) -> None:
    scheduler, _ = clients
    wait(lambda: scheduler.ask([A], 30.0) == (0,))
    server.signal(signal.SIGSTOP)
    assert scheduler.ask([A], 0.05) is None
    assert scheduler.counts["unanswered"] == 1
    wait(lambda: not scheduler.attached)
    began = time.monotonic()
    assert scheduler.ask([A], 300.0) is None, "at once"
    assert time.monotonic() - began < 60
    server.signal(signal.SIGCONT)
    wait(lambda: scheduler.ask([A], 30.0) == (0,))
