"""The client against a real socket whose other end does what the test says."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvtier.harness.tierd_testbed import environment, wait_for
from kvtier.tierd import client as module
from kvtier.tierd.client import ClientOptions, ClientState, TierdClient
from kvtier.tierd.wire import (
    PROTOCOL,
    SOCKET_NAME,
    Bye,
    Deliver,
    FromEngine,
    Heartbeat,
    Hello,
    Message,
    Ready,
    SessionRefused,
    Welcome,
    decode_from_engine,
    encode,
)

WAIT_SECONDS = 60.0
"""Only a failing test waits as long."""
NO_SILENCE_SECONDS = 600.0
"""The other end sends no heartbeats: a busy machine must not end the session."""


def hello(drained: int = 0) -> Hello:
    return Hello(
        protocol=PROTOCOL,
        role="worker",
        engine="e",
        pid=1,
        pid_namespace="n",
        process_start=1,
        drained_epoch=drained,
    )


def welcome(epoch: int = 3, protocol: str = PROTOCOL) -> Welcome:
    return Welcome(
        protocol=protocol,
        epoch=epoch,
        session=1,
        pool_path="/p",
        pool_bytes=1,
        tiers=("ram",),
        settings="{}",
    )


class Daemon:
    """The other end. ``peer`` is the process that spoke last."""

    def __init__(self, directory: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(f"ipc://{directory / SOCKET_NAME}")
        self.peer = b""

    def receive(self, kind: type[Message], seconds: float = WAIT_SECONDS) -> Any:
        """The next message of a kind; others are skipped."""
        deadline = time.monotonic() + seconds
        while (remaining := deadline - time.monotonic()) > 0:
            if not self.socket.poll(int(remaining * 1000) + 1):
                break
            self.peer, data = self.socket.recv_multipart()
            message: FromEngine = decode_from_engine(data)
            if isinstance(message, kind):
                return message
        raise TimeoutError(kind.__name__)

    def send(self, message: Message) -> None:
        self.socket.send_multipart((self.peer, encode(message)))

    def attach(self, epoch: int = 3) -> Hello:
        found: Hello = self.receive(Hello)
        self.send(welcome(epoch))
        return found

    def close(self) -> None:
        self.context.destroy(linger=0)


class ClientTestbed:
    """A client, and what it delivered to its owner."""

    def __init__(self, directory: Path, start: bool = True, **options: Any) -> None:
        self.received: queue.Queue[Message | str] = queue.Queue()
        self.heartbeat: Callable[[], Heartbeat] = Heartbeat
        self.client = TierdClient(
            directory,
            hello,
            self.received.put,
            self.received.put,
            lambda: self.heartbeat(),
            ClientOptions(**{"session_timeout_seconds": NO_SILENCE_SECONDS} | options),
        )
        self.now: float | None = None
        """Time that the test moves; None: real time."""
        self.client._clock = lambda: time.monotonic() if self.now is None else self.now
        if start:
            self.client.start()

    def next(self) -> Message | str:
        return self.received.get(timeout=WAIT_SECONDS)


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("r")


@pytest.fixture
def daemon(directory: Path) -> Iterator[Daemon]:
    found = Daemon(directory)
    yield found
    found.close()


@pytest.fixture
def testbed(directory: Path) -> Iterator[ClientTestbed]:
    found = ClientTestbed(directory)
    yield found
    found.client.close(WAIT_SECONDS)


def test_the_client_attaches_and_delivers_all_but_heartbeats_in_order(
    daemon: Daemon, testbed: ClientTestbed
) -> None:
    daemon.attach()
    daemon.send(Heartbeat())
    ready = Ready(namespace="n", slot_bytes=(1,), persistent=True)
    daemon.send(ready)
    assert testbed.next() == welcome()
    assert testbed.next() == ready
    assert (testbed.client.attached, testbed.client.epoch, testbed.client.ready) == (True, 3, ready)


def test_nothing_can_be_sent_before_there_is_a_session(
    daemon: Daemon, testbed: ClientTestbed
) -> None:
    daemon.receive(Hello)
    assert not testbed.client.send(Deliver(reservations=(1,)))
    assert not testbed.client.attached


@pytest.mark.parametrize("attached", [True, False])
def test_a_session_that_the_owner_gives_up_is_lost_and_begins_again_once_it_has_drained(
    daemon: Daemon, testbed: ClientTestbed, attached: bool
) -> None:
    if attached:
        daemon.attach()
        assert testbed.next() == welcome()
    else:
        daemon.receive(Hello)
    testbed.client.drop("copies failed")
    assert testbed.next() == "copies failed"
    assert testbed.client.state is ClientState.WAITING
    assert not testbed.client.send(Deliver(reservations=(1,)))
    with pytest.raises(TimeoutError):
        daemon.receive(Hello, 0.5)
    testbed.client.reattach(3)
    assert daemon.attach(4).drained_epoch == 3
    assert testbed.next() == welcome(4)
    assert testbed.client.counters["lost"] == 1


def test_messages_arrive_in_order_from_any_thread_and_heartbeats_continue(
    daemon: Daemon, testbed: ClientTestbed
) -> None:
    daemon.attach()
    testbed.next()
    for number in range(100):
        assert testbed.client.send(Deliver(reservations=(number,)))
    assert [daemon.receive(Deliver).reservations[0] for _ in range(100)] == list(range(100))
    daemon.receive(Heartbeat)


def test_after_a_bye_the_client_attaches_again_only_once_the_owner_has_drained(
    daemon: Daemon, testbed: ClientTestbed
) -> None:
    daemon.attach(3)
    testbed.next()
    daemon.send(Bye(reason="because"))
    reason = testbed.next()
    assert isinstance(reason, str)
    assert "because" in reason
    assert not testbed.client.send(Heartbeat())
    with pytest.raises(TimeoutError):
        daemon.receive(Hello, 0.7)
    testbed.client.reattach(3)
    assert daemon.attach(4).drained_epoch == 3
    assert testbed.next() == welcome(4)


def test_a_drain_report_does_not_count_for_the_next_loss(
    daemon: Daemon, testbed: ClientTestbed
) -> None:
    daemon.attach(3)
    testbed.next()
    testbed.client.reattach(2)
    daemon.send(Bye())
    assert isinstance(testbed.next(), str)
    with pytest.raises(TimeoutError):
        daemon.receive(Hello, 0.7)


def test_a_client_that_copies_nothing_may_attach_again_by_itself(
    daemon: Daemon, directory: Path
) -> None:
    testbed = ClientTestbed(directory, auto_reattach=True)
    daemon.attach(3)
    testbed.next()
    daemon.send(Bye())
    assert isinstance(testbed.next(), str)
    daemon.attach(4)
    assert testbed.next() == welcome(4)
    testbed.client.close(WAIT_SECONDS)


def test_a_closed_connection_is_noticed_at_once(directory: Path) -> None:
    first = Daemon(directory)
    testbed = ClientTestbed(directory, session_timeout_seconds=1000)
    first.attach()
    testbed.next()
    first.close()
    assert isinstance(testbed.next(), str)
    testbed.client.reattach(3)
    second = Daemon(directory)
    second.attach(4)
    assert testbed.next() == welcome(4)
    testbed.client.close(WAIT_SECONDS)
    second.close()


SILENCE_SECONDS = 3.0


def make_frozen(directory: Path) -> ClientTestbed:
    """A client whose time the test moves."""
    testbed = ClientTestbed(directory, start=False, session_timeout_seconds=SILENCE_SECONDS)
    testbed.now = 1_000.0
    testbed.client.start()
    return testbed


def heartbeat_later(daemon: Daemon, testbed: ClientTestbed) -> None:
    """A heartbeat arrives after most of the time that a session may be silent."""
    assert testbed.now is not None
    testbed.now += SILENCE_SECONDS - 1
    daemon.send(Heartbeat())
    wait_for(lambda: testbed.client._last_received_at == testbed.now, "the heartbeat has arrived")


def test_silence_loses_the_session_and_a_heartbeat_keeps_it(
    daemon: Daemon, directory: Path
) -> None:
    testbed = make_frozen(directory)
    daemon.attach()
    testbed.next()
    for _ in range(5):
        heartbeat_later(daemon, testbed)
    assert testbed.client.attached
    testbed.now = (testbed.now or 0.0) + SILENCE_SECONDS + 1
    reason = testbed.next()
    assert isinstance(reason, str)
    assert "no message" in reason
    assert testbed.client.counters["lost"] == 1
    testbed.client.close(WAIT_SECONDS)


def test_heartbeats_of_a_tierd_that_is_still_allocating_keep_the_client_waiting(
    daemon: Daemon, directory: Path
) -> None:
    testbed = make_frozen(directory)
    daemon.receive(Hello)
    for _ in range(6):
        heartbeat_later(daemon, testbed)
    daemon.send(welcome())
    assert testbed.next() == welcome()
    testbed.client.close(WAIT_SECONDS)


def test_a_rejection_is_reported_once_and_retried_much_later(
    daemon: Daemon, testbed: ClientTestbed
) -> None:
    daemon.receive(Hello)
    daemon.send(SessionRefused(reason="other version"))
    assert testbed.next() == SessionRefused(reason="other version")
    wait_for(lambda: testbed.client.state is ClientState.REFUSED, "refused")
    assert testbed.client.refusal == "other version"
    with pytest.raises(TimeoutError):
        daemon.receive(Hello, 1.0)


def test_a_rejected_client_retries_after_its_delay(daemon: Daemon, directory: Path) -> None:
    testbed = ClientTestbed(directory, refused_retry_seconds=0.3)
    daemon.receive(Hello)
    daemon.send(SessionRefused(reason="not yet"))
    daemon.attach()
    assert testbed.next() == SessionRefused(reason="not yet")
    assert testbed.next() == welcome()
    assert testbed.client.refusal == ""
    testbed.client.close(WAIT_SECONDS)


def test_the_client_rejects_a_welcome_of_a_different_version(
    daemon: Daemon, testbed: ClientTestbed
) -> None:
    daemon.receive(Hello)
    daemon.send(welcome(protocol="9.9.9/1"))
    refused = testbed.next()
    assert isinstance(refused, SessionRefused)
    assert "9.9.9/1" in refused.reason
    assert PROTOCOL in refused.reason


def test_an_unreadable_message_is_a_rejection(daemon: Daemon, testbed: ClientTestbed) -> None:
    daemon.receive(Hello)
    daemon.socket.send_multipart((daemon.peer, b"\xc1 nonsense"))
    assert isinstance(testbed.next(), SessionRefused)
    assert testbed.client.counters["undecodable"] == 1


def test_a_full_queue_ends_the_session_and_never_blocks(
    daemon: Daemon, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUEUE_MESSAGES", 100)
    testbed = ClientTestbed(directory, session_timeout_seconds=1000)
    daemon.attach()
    testbed.next()
    big = Deliver(reservations=tuple(range(100_000)))
    begin = time.monotonic()
    while testbed.client.send(big):
        assert time.monotonic() - begin < WAIT_SECONDS
    reason = testbed.next()
    assert isinstance(reason, str)
    assert testbed.client.counters["queue_full"] == 1
    testbed.client.close(WAIT_SECONDS)


def test_closing_sends_a_bye_after_the_queued_messages(
    daemon: Daemon, testbed: ClientTestbed
) -> None:
    daemon.attach()
    testbed.next()
    for number in range(20):
        testbed.client.send(Deliver(reservations=(number,)))
    testbed.client.close(WAIT_SECONDS)
    assert [daemon.receive(Deliver).reservations[0] for _ in range(20)] == list(range(20))
    daemon.receive(Bye)
    assert testbed.client.state is ClientState.CLOSED
    assert not testbed.client.send(Heartbeat())
    testbed.client.close(WAIT_SECONDS)


def test_closing_ends_in_time_without_a_tierd(testbed: ClientTestbed) -> None:
    begin = time.monotonic()
    testbed.client.close(WAIT_SECONDS)
    assert time.monotonic() - begin < WAIT_SECONDS / 2
    assert testbed.client.state is ClientState.CLOSED


def test_an_exception_in_the_owners_sink_does_not_stop_heartbeats(
    daemon: Daemon, directory: Path
) -> None:
    def sink(_: Message) -> None:
        raise ValueError("a bug")

    client = TierdClient(directory, hello, sink, lambda _: None)
    client.start()
    daemon.attach()
    daemon.receive(Heartbeat)
    assert client.counters["callback_failed"] == 1
    client.close(WAIT_SECONDS)


def test_a_heartbeat_that_cannot_be_made_does_not_end_the_session(
    daemon: Daemon, testbed: ClientTestbed
) -> None:
    daemon.attach()
    testbed.next()

    def broken() -> Heartbeat:
        raise RuntimeError("no numbers")

    testbed.heartbeat = broken
    # One or two that could be made may be on their way.
    wait_for(lambda: testbed.client.counters["callback_failed"] >= 2, "heartbeats cannot be made")
    for _ in range(4):
        daemon.receive(Heartbeat)
    assert testbed.client.attached


def test_the_client_sends_nothing_in_a_directory_that_others_may_write_to(
    daemon: Daemon, directory: Path
) -> None:
    directory.chmod(0o777)
    testbed = ClientTestbed(directory, require_private=True)
    try:
        wait_for(lambda: testbed.client.counters["foreign"] >= 2, "it looks again")
        assert not daemon.socket.poll(0)
        directory.chmod(0o700)
        daemon.attach()
        assert testbed.next() == welcome()
    finally:
        testbed.client.close(WAIT_SECONDS)


def test_a_report_of_a_forked_child_does_not_count_for_its_parent(
    daemon: Daemon, testbed: ClientTestbed
) -> None:
    daemon.attach()
    testbed.next()
    pid = os.fork()
    if pid == 0:
        os._exit(1 if testbed.client.send(Heartbeat()) else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert testbed.client.attached


def test_a_process_that_forgets_to_close_still_exits(daemon: Daemon, directory: Path) -> None:
    program = (
        "import sys\n"
        "from kvtier.tierd.client import TierdClient\n"
        "from kvtier.tierd.wire import Hello\n"
        "client = TierdClient(sys.argv[1], lambda: Hello(protocol='x', role='worker', engine='e',"
        " pid=1,"
        " pid_namespace='n', process_start=1), print, print)\n"
        "client.start()\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(directory)]
    with subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE) as process:
        daemon.receive(Hello)
        process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0


def test_its_thread_is_a_daemon_thread(testbed: ClientTestbed) -> None:
    thread = testbed.client._thread
    assert thread is not None
    assert thread.name == "kvtier-client"
    assert thread.is_alive()
    assert thread.daemon
