"""Lookups over ZeroMQ: restarts of both ends, a server that hangs, and foreign senders."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from tests.unit.lookup.test_commits import A, B, Storage

from kvtier.lookup import client as client_module
from kvtier.lookup.client import LookupCallbacks, LookupClient, greeting
from kvtier.lookup.endpoint import LookupUnavailableError
from kvtier.lookup.index import CommitIndex
from kvtier.lookup.server import LookupServer
from kvtier.lookup.wire import (
    MAX_STORE,
    PROTOCOL,
    RANK,
    SCHEDULER,
    Ask,
    Declined,
    Greeting,
    Ping,
    Stored,
    Stranger,
    decode_from_server,
    encode,
)

ENGINE = "engine/dp0"
SECONDS = 60.0
"""How long a busy machine may take; nothing that works takes it."""


def wait(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.002)


class Host:
    """A server, and clients of two ranks and of the scheduler."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.storage = Storage()
        self.servers: list[LookupServer] = []
        self.clients: list[LookupClient] = []

    def serve(self) -> LookupServer:
        server = LookupServer(
            self.directory,
            greeting(RANK, ENGINE, 2),
            lambda: CommitIndex(2, self.storage, clock=time.monotonic),
        )
        server.start()
        self.servers.append(server)
        return server

    def attach(self, role: str = SCHEDULER, rank: int = 0) -> LookupClient:
        client = LookupClient(self.directory, greeting(role, ENGINE, 2, rank))
        client.start()
        self.clients.append(client)
        wait(lambda: client.attached)
        return client

    def stop(self) -> None:
        for each in (*self.clients, *self.servers):
            each.close(SECONDS)


@pytest.fixture
def host(run_directory: Path) -> Iterator[Host]:
    host = Host(run_directory)
    yield host
    host.stop()


def test_zeromq_lookup_the_host_answers_once_every_rank_has_stored(host: Host) -> None:
    host.serve()
    scheduler = host.attach()
    ranks = [host.attach(RANK, rank) for rank in range(2)]
    assert ranks[0].stored([(A, 5), (B, 5)])
    wait(lambda: host.servers[0].index is not None and host.servers[0].index.pending == 2)
    assert scheduler.ask([A, B], SECONDS) == (0, 0)
    assert ranks[1].stored([(A, 5)])
    wait(lambda: scheduler.ask([A, B], SECONDS) == (5, 0))
    assert ranks[1].lost([(A, 5)])
    wait(lambda: scheduler.ask([A, B], SECONDS) == (0, 0))


def test_a_server_that_is_started_again_answers_from_the_markers(host: Host) -> None:
    first = host.serve()
    scheduler, ranks = host.attach(), [host.attach(RANK, rank) for rank in range(2)]
    for rank in ranks:
        rank.stored([(A, 5)])
    wait(lambda: scheduler.ask([A], SECONDS) == (5,))
    instance = scheduler.instance
    assert first.close(SECONDS)
    wait(lambda: not any(each.attached for each in (scheduler, *ranks)))
    assert scheduler.ask([A], SECONDS) is None, "at once, without waiting for the deadline"
    assert not ranks[0].stored([(B, 6)])
    host.serve()
    wait(lambda: scheduler.attached and all(rank.attached for rank in ranks))
    assert scheduler.instance not in ("", instance)
    wait(lambda: scheduler.ask([A, B], SECONDS) == (5, 0))
    for rank in ranks:
        rank.stored([(B, 7)])
    wait(lambda: scheduler.ask([A, B], SECONDS) == (5, 7))


def test_a_client_that_is_started_again_goes_on(host: Host) -> None:
    host.serve()
    for _ in range(2):
        scheduler = host.attach()
        assert scheduler.ask([A], SECONDS) == (0,)
        scheduler.close(SECONDS)
        assert scheduler.ask([A], SECONDS) is None


def test_a_server_that_hangs_costs_one_deadline_and_then_nothing(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "FIRST_PAUSE_SECONDS", SECONDS)
    monkeypatch.setattr(client_module, "LAST_PAUSE_SECONDS", SECONDS)
    host.serve()
    scheduler = host.attach()
    blocked, go = threading.Event(), threading.Event()

    def hang(_key: bytes) -> int:
        blocked.set()
        go.wait(SECONDS)
        return 0

    host.storage.read = hang  # type: ignore[method-assign]
    assert scheduler.ask([A], 0.05) is None
    assert blocked.wait(SECONDS)
    began = time.monotonic()
    for _ in range(1000):
        assert scheduler.ask([A], SECONDS) is None
    assert time.monotonic() - began < SECONDS
    assert scheduler.counts["unanswered"] == 1
    go.set()


def test_an_answer_may_come_later_without_anyone_waiting(host: Host) -> None:
    host.serve()
    host.storage.markers[A] = 8
    seen: list[tuple[tuple[bytes, ...], tuple[int, ...]]] = []
    client = LookupClient(
        host.directory,
        greeting(SCHEDULER, ENGINE, 2),
        LookupCallbacks(on_answer=lambda keys, stores: seen.append((keys, stores))),
    )
    host.clients.append(client)
    client.start()
    assert not client.ask_later([A], 1.0), "not attached yet"
    wait(lambda: client.attached)
    assert client.ask_later([A, B], SECONDS)
    wait(lambda: seen)
    assert seen == [((A, B), (8, 0))]


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (Greeting(protocol="0", role=RANK, engine=ENGINE, ranks=2), "version"),
        (Greeting(protocol=PROTOCOL, role=RANK, engine="other", ranks=2), "engine"),
        (Greeting(protocol=PROTOCOL, role=RANK, engine=ENGINE, ranks=3), "ranks"),
        (Greeting(protocol=PROTOCOL, role=RANK, engine=ENGINE, ranks=2, rank=2), "rank"),
        (Greeting(protocol=PROTOCOL, role="other", engine=ENGINE, ranks=2), "role"),
        (greeting(RANK, ENGINE, 2, 0, "another"), "model"),
    ],
)
def test_a_sender_that_does_not_belong_to_the_engine_is_declined(
    host: Host, sent: Greeting, reason: str
) -> None:
    host.serve()
    (answer,) = exchange(host.directory, [encode(sent)])
    assert isinstance(answer, Declined)
    assert reason in answer.reason


def test_messages_that_mean_nothing_are_counted_and_the_server_goes_on(host: Host) -> None:
    server = host.serve()
    hello = encode(greeting(SCHEDULER, ENGINE, 2))
    ping = encode(Ping())
    answers = exchange(host.directory, [b"\xff\xff", ping, hello], 2)
    assert isinstance(answers[0], Stranger)
    # The scheduler cannot store, and no number is beyond the range.
    report = [encode(Stored(items=((A, 5), (A, MAX_STORE + 1), (b"", 1))))]
    question = encode(Ask(request=1, keys=(b"x" * 65,), seconds=1e9))
    exchange(host.directory, [hello, *report, question], 2)
    assert server.counts["undecodable"] >= 1
    assert server.counts["invalid"] >= 3
    rank = host.attach(RANK, 1)
    assert rank.attached
    assert server.index is not None
    assert server.index.pending == 0


def exchange(directory: Path, frames: list[bytes], answers: int = 1) -> list[object]:
    """Sends frames as they are, and returns what the server says."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, int(SECONDS * 1000))
    (path,) = directory.glob("*.lookup")
    socket.connect(f"ipc://{path}")
    try:
        for frame in frames:
            socket.send(frame)
        return [decode_from_server(socket.recv()) for _ in range(answers)]
    finally:
        socket.close(0)
        context.term()


def test_one_process_answers_per_host(host: Host) -> None:
    host.serve()
    with pytest.raises(LookupUnavailableError, match="another process answers"):
        host.serve()
    assert host.attach().ask([A], SECONDS) == (0,)


def test_a_directory_that_others_may_write_to_is_not_used(run_directory: Path) -> None:
    shared = run_directory / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    host = Host(shared)
    with pytest.raises(LookupUnavailableError, match="other users"):
        host.serve()
    client = LookupClient(shared, greeting(SCHEDULER, ENGINE, 2))
    client.start()
    wait(lambda: client.counts["not_connected"])
    assert client.ask([A], SECONDS) is None
    client.close(SECONDS)


def test_a_path_that_is_too_long_is_named(tmp_path: Path) -> None:
    with pytest.raises(LookupUnavailableError, match="107 bytes"):
        LookupClient(tmp_path / ("x" * 120), greeting(SCHEDULER, ENGINE, 2))
