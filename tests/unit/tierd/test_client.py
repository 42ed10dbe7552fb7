"""The client against a real socket whose other end does what the test says."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
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

WAIT_SECONDS = 20.0


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


class Rig:
    """A client and what it said to its owner."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.said: queue.Queue[Message | str] = queue.Queue()
        self.heartbeat: Callable[[], Heartbeat] = Heartbeat
        self.client = TierdClient(
            directory,
            hello,
            self.said.put,
            self.said.put,
            lambda: self.heartbeat(),
            ClientOptions(**options),
        )
        self.client.start()

    def next(self) -> Message | str:
        return self.said.get(timeout=WAIT_SECONDS)


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("r")


@pytest.fixture
def daemon(directory: Path) -> Iterator[Daemon]:
    found = Daemon(directory)
    yield found
    found.close()


@pytest.fixture
def rig(directory: Path) -> Iterator[Rig]:
    found = Rig(directory)
    yield found
    found.client.close(5)


def test_it_attaches_and_hands_over_everything_but_beats_in_order(daemon: Daemon, rig: Rig) -> None:
    daemon.attach()
    daemon.send(Heartbeat())
    ready = Ready(namespace="n", slot_bytes=(1,), persistent=True)
    daemon.send(ready)
    assert rig.next() == welcome()
    assert rig.next() == ready
    assert (rig.client.attached, rig.client.epoch, rig.client.ready) == (True, 3, ready)


def test_nothing_can_be_sent_before_there_is_a_session(daemon: Daemon, rig: Rig) -> None:
    daemon.receive(Hello)
    assert not rig.client.send(Deliver(reservations=(1,)))
    assert not rig.client.attached


def test_messages_arrive_in_order_from_any_thread_and_beats_go_on_without_them(
    daemon: Daemon, rig: Rig
) -> None:
    daemon.attach()
    rig.next()
    for number in range(100):
        assert rig.client.send(Deliver(reservations=(number,)))
    assert [daemon.receive(Deliver).reservations[0] for _ in range(100)] == list(range(100))
    daemon.receive(Heartbeat)


def test_a_daemon_that_says_bye_is_lost_and_not_attached_to_again_before_the_owner_has_drained(
    daemon: Daemon, rig: Rig
) -> None:
    daemon.attach(3)
    rig.next()
    daemon.send(Bye(reason="because"))
    reason = rig.next()
    assert isinstance(reason, str)
    assert "because" in reason
    assert not rig.client.send(Heartbeat())
    with pytest.raises(TimeoutError):
        daemon.receive(Hello, 0.7)
    rig.client.reattach(3)
    assert daemon.attach(4).drained_epoch == 3
    assert rig.next() == welcome(4)


def test_a_word_that_it_has_drained_does_not_speak_for_the_next_loss(
    daemon: Daemon, rig: Rig
) -> None:
    daemon.attach(3)
    rig.next()
    rig.client.reattach(2)
    daemon.send(Bye())
    assert isinstance(rig.next(), str)
    with pytest.raises(TimeoutError):
        daemon.receive(Hello, 0.7)


def test_a_client_that_copies_nothing_may_attach_again_by_itself(
    daemon: Daemon, directory: Path
) -> None:
    rig = Rig(directory, auto_reattach=True)
    daemon.attach(3)
    rig.next()
    daemon.send(Bye())
    assert isinstance(rig.next(), str)
    daemon.attach(4)
    assert rig.next() == welcome(4)
    rig.client.close(5)


def test_a_closed_connection_is_noticed_at_once(directory: Path) -> None:
    first = Daemon(directory)
    rig = Rig(directory, session_timeout_seconds=1000)
    first.attach()
    rig.next()
    first.close()
    assert isinstance(rig.next(), str)
    rig.client.reattach(3)
    second = Daemon(directory)
    second.attach(4)
    assert rig.next() == welcome(4)
    rig.client.close(5)
    second.close()


def test_silence_loses_the_session_and_a_heartbeat_keeps_it(
    daemon: Daemon, directory: Path
) -> None:
    rig = Rig(directory, session_timeout_seconds=0.6)
    daemon.attach()
    rig.next()
    for _ in range(5):
        time.sleep(0.2)
        daemon.send(Heartbeat())
    assert rig.client.attached
    reason = rig.next()
    assert isinstance(reason, str)
    assert "no message" in reason
    assert rig.client.counters["lost"] == 1
    rig.client.close(5)


def test_a_daemon_that_is_still_allocating_keeps_it_waiting_with_words(
    daemon: Daemon, directory: Path
) -> None:
    rig = Rig(directory, session_timeout_seconds=0.6)
    daemon.receive(Hello)
    for _ in range(6):
        time.sleep(0.2)
        daemon.send(Heartbeat())
    daemon.send(welcome())
    assert rig.next() == welcome()
    rig.client.close(5)


def test_a_refusal_is_reported_once_and_tried_again_much_later(daemon: Daemon, rig: Rig) -> None:
    daemon.receive(Hello)
    daemon.send(SessionRefused(reason="other version"))
    assert rig.next() == SessionRefused(reason="other version")
    wait_for(lambda: rig.client.state is ClientState.REFUSED, "refused")
    assert rig.client.refusal == "other version"
    with pytest.raises(TimeoutError):
        daemon.receive(Hello, 1.0)


def test_a_refused_client_tries_again_after_its_time(daemon: Daemon, directory: Path) -> None:
    rig = Rig(directory, refused_retry_seconds=0.3)
    daemon.receive(Hello)
    daemon.send(SessionRefused(reason="not yet"))
    daemon.attach()
    assert rig.next() == SessionRefused(reason="not yet")
    assert rig.next() == welcome()
    assert rig.client.refusal == ""
    rig.client.close(5)


def test_a_welcome_of_another_version_is_refused_by_the_client(daemon: Daemon, rig: Rig) -> None:
    daemon.receive(Hello)
    daemon.send(welcome(protocol="9.9.9/1"))
    refused = rig.next()
    assert isinstance(refused, SessionRefused)
    assert "9.9.9/1" in refused.reason
    assert PROTOCOL in refused.reason


def test_what_cannot_be_read_is_a_refusal(daemon: Daemon, rig: Rig) -> None:
    daemon.receive(Hello)
    daemon.socket.send_multipart((daemon.peer, b"\xc1 nonsense"))
    assert isinstance(rig.next(), SessionRefused)
    assert rig.client.counters["undecodable"] == 1


def test_a_full_queue_is_a_loss_and_never_a_wait(
    daemon: Daemon, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUEUE_MESSAGES", 100)
    rig = Rig(directory, session_timeout_seconds=1000)
    daemon.attach()
    rig.next()
    big = Deliver(reservations=tuple(range(100_000)))
    begin = time.monotonic()
    while rig.client.send(big):
        assert time.monotonic() - begin < WAIT_SECONDS
    reason = rig.next()
    assert isinstance(reason, str)
    assert rig.client.counters["queue_full"] == 1
    rig.client.close(5)


def test_closing_says_bye_after_what_was_queued(daemon: Daemon, rig: Rig) -> None:
    daemon.attach()
    rig.next()
    for number in range(20):
        rig.client.send(Deliver(reservations=(number,)))
    rig.client.close(5)
    assert [daemon.receive(Deliver).reservations[0] for _ in range(20)] == list(range(20))
    daemon.receive(Bye)
    assert rig.client.state is ClientState.CLOSED
    assert not rig.client.send(Heartbeat())
    rig.client.close(5)


def test_closing_ends_in_time_without_a_daemon(rig: Rig) -> None:
    begin = time.monotonic()
    rig.client.close(5)
    assert time.monotonic() - begin < 4
    assert rig.client.state is ClientState.CLOSED


def test_a_bug_in_the_owners_sink_does_not_stop_the_beats(daemon: Daemon, directory: Path) -> None:
    def sink(_: Message) -> None:
        raise ValueError("a bug")

    client = TierdClient(directory, hello, sink, lambda _: None)
    client.start()
    daemon.attach()
    daemon.receive(Heartbeat)
    assert client.counters["callback_failed"] == 1
    client.close(5)


def test_a_heartbeat_that_cannot_be_made_does_not_end_the_session(daemon: Daemon, rig: Rig) -> None:
    daemon.attach()
    rig.next()

    def broken() -> Heartbeat:
        raise RuntimeError("no numbers")

    rig.heartbeat = broken
    daemon.receive(Heartbeat)
    daemon.receive(Heartbeat)
    assert rig.client.attached
    assert rig.client.counters["callback_failed"] >= 2


def test_nothing_is_said_in_a_directory_that_others_may_write_to(
    daemon: Daemon, directory: Path
) -> None:
    directory.chmod(0o777)
    rig = Rig(directory, require_private=True)
    try:
        wait_for(lambda: rig.client.counters["foreign"] >= 2, "it looks again")
        assert not daemon.socket.poll(0)
        directory.chmod(0o700)
        daemon.attach()
        assert rig.next() == welcome()
    finally:
        rig.client.close(5)


def test_a_forked_child_cannot_speak_for_its_parent(daemon: Daemon, rig: Rig) -> None:
    daemon.attach()
    rig.next()
    pid = os.fork()
    if pid == 0:
        os._exit(1 if rig.client.send(Heartbeat()) else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert rig.client.attached


def test_a_process_that_forgets_to_close_still_exits(daemon: Daemon, directory: Path) -> None:
    program = (
        "import sys, time\n"
        "from kvtier.tierd.client import TierdClient\n"
        "from kvtier.tierd.wire import Hello\n"
        "client = TierdClient(sys.argv[1], lambda: Hello(protocol='x', role='worker', engine='e',"
        " pid=1,"
        " pid_namespace='n', process_start=1), print, print)\n"
        "client.start()\n"
        "time.sleep(0.3)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(directory)], env=environment())
    daemon.receive(Hello)
    assert process.wait(WAIT_SECONDS) == 0


def test_its_thread_is_a_daemon_thread(rig: Rig) -> None:
    (thread,) = [
        thread
        for thread in threading.enumerate()
        if thread.name == "kvtier-client" and thread.is_alive()
    ]
    assert thread.daemon
