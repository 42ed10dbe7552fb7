"""A whole tierd in this process, spoken to over its socket."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvtier.config.host_ports import HOST_POD_VARIABLE, host_ports
from kvtier.config.models import (
    BreakerSettings,
    Daemon,
    HttpEndpoint,
    LiveTier,
    LMCacheTierDocument,
    Topology,
)
from kvtier.config.writer import write
from kvtier.errors import KVTierError
from kvtier.harness.stub_engine import OBJECT_TOKENS, StubEngine
from kvtier.harness.stub_worker import StubEngineOptions, block_hash
from kvtier.harness.tierd_testbed import TierdOptions, TierdTestbed, wait_for
from kvtier.processes import own_identity
from kvtier.tierd import channel as outbox_module
from kvtier.tierd import daemon as daemon_module
from kvtier.tierd import host_pool
from kvtier.tierd.daemon import DaemonOptions, TierDaemon
from kvtier.tierd.run_directory import HTTP_NAME
from kvtier.tierd.sessions import SessionTimeouts
from kvtier.tierd.wire import (
    PROTOCOL,
    SOCKET_NAME,
    Bye,
    Credits,
    Deliver,
    Delta,
    Hello,
    Identify,
    LiveSettings,
    Message,
    Promote,
    Promoted,
    Ready,
    Reserve,
    Resync,
    SessionRefused,
    Welcome,
    decode_from_daemon,
    encode,
)

WAIT_SECONDS = 60.0
"""Only a failing test waits as long."""
NO_SILENCE_SECONDS = 600.0
"""Peers by hand send no heartbeats: a busy machine must not end their sessions."""


class Peer:
    """One session by hand."""

    def __init__(self, case: TierdTestbed, unread_messages: int = 1000, **hello: Any) -> None:
        """``unread_messages``: how many its socket takes that are not read."""
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 200)
        self.socket.setsockopt(zmq.RCVHWM, unread_messages)
        self.socket.connect(f"ipc://{case.run_directory / SOCKET_NAME}")
        me = own_identity()
        fields: dict[str, Any] = {
            "protocol": PROTOCOL,
            "engine": "e",
            "pid": me.pid,
            "process_start": me.start,
        }
        self.send(Hello(**(fields | {"pid_namespace": me.pid_namespace} | hello)))

    def send(self, message: Message) -> None:
        self.socket.send(encode(message))

    def receive(self, kind: type[Message], seconds: float = WAIT_SECONDS) -> Any:
        deadline = time.monotonic() + seconds
        while (remaining := deadline - time.monotonic()) > 0:
            if self.socket.poll(int(remaining * 1000) + 1):
                message = decode_from_daemon(self.socket.recv())
                if isinstance(message, kind):
                    return message
        raise TimeoutError(kind.__name__)

    def close(self) -> None:
        self.context.destroy(linger=0)


Start = Callable[..., TierDaemon]


@pytest.fixture(autouse=True)
def _no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    patient = functools.partial(SessionTimeouts, NO_SILENCE_SECONDS)
    monkeypatch.setattr(daemon_module, "SessionTimeouts", patient)


@pytest.fixture
def case(tmp_path: Path) -> Iterator[TierdTestbed]:
    found = TierdTestbed(tmp_path)
    yield found
    found.close()


@pytest.fixture
def start(case: TierdTestbed) -> Iterator[Start]:
    """Starts daemons in threads; they are stopped at the end."""
    running: list[tuple[TierDaemon, threading.Thread]] = []

    def begin(serves: bool = True, **options: Any) -> TierDaemon:
        daemon = TierDaemon(DaemonOptions(case.topology_directory, **options))
        thread = threading.Thread(target=daemon.run, daemon=True)
        thread.start()
        running.append((daemon, thread))
        if serves:
            wait_for(lambda: case.status().get("started"), "tierd serves")
        return daemon

    yield begin
    for daemon, thread in running:
        daemon.stop()
        daemon.stop()
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()


@pytest.fixture
def peers(case: TierdTestbed) -> Iterator[Callable[..., Peer]]:
    made: list[Peer] = []

    def make(**hello: Any) -> Peer:
        made.append(Peer(case, **hello))
        return made[-1]

    yield make
    for peer in made:
        peer.close()


def pair(peers: Callable[..., Peer], engine: str = "e") -> tuple[Peer, Peer]:
    scheduler = peers(role="scheduler", engine=engine, identity="{}")
    worker = peers(role="worker", engine=engine, codec="c", shard_bytes=(65_536,))
    return scheduler, worker


def store(scheduler: Peer, worker: Peer, slots: list[int], number: int) -> bytes:
    slot = slots.pop()
    scheduler.send(Reserve(items=((number, 0, block_hash(number), slot, b""),)))
    worker.send(Deliver(reservations=(number,)))
    return b"\0" + block_hash(number)


def test_a_stored_object_is_announced_and_a_reset_hides_it(
    start: Start, peers: Callable[..., Peer]
) -> None:
    start()
    scheduler, worker = pair(peers)
    ready = scheduler.receive(Ready)
    slots = list(scheduler.receive(Credits).slots)
    assert scheduler.receive(Delta) == Delta(sequence=1, snapshot=True)
    key = store(scheduler, worker, slots, 1)
    delta = scheduler.receive(Delta)
    assert (delta.sequence, [entry[:2] for entry in delta.added]) == (2, [(key, 1)])
    scheduler.send(Resync())
    again = scheduler.receive(Delta)
    assert again == Delta(sequence=3, added=delta.added, snapshot=True)
    for number, weights in enumerate((("other",), ready.weights), start=1):
        scheduler.send(Identify(number=number, weights=weights))
        again = scheduler.receive(Ready)
        assert (again.weights, again.identity) == (weights, number)
        assert again.persistent
        assert (again.namespace == ready.namespace) == (weights == ready.weights)
        delta = scheduler.receive(Delta)
        held = [entry[0] for entry in delta.added]
        assert (delta.snapshot, held) == (True, [key] if weights == ready.weights else [])
    scheduler.send(Identify(number=3, weights=(), ephemeral_reason="unknown"))
    again = scheduler.receive(Ready)
    assert again.namespace != ready.namespace
    assert not again.persistent
    empty = scheduler.receive(Delta)
    assert (empty.snapshot, empty.added) == (True, ())


def test_a_promotion_is_answered_also_where_the_engine_is_not_open(
    start: Start, peers: Callable[..., Peer]
) -> None:
    start()
    scheduler = peers(role="scheduler", identity="{}")
    scheduler.receive(Welcome)
    scheduler.send(Promote(promotion=4, keys=((0, block_hash(1)),), budget_seconds=1.0))
    assert scheduler.receive(Promoted) == Promoted(promotion=4, usable=0, outcome="failed")


def test_a_message_without_a_session_is_answered_with_bye(
    start: Start, peers: Callable[..., Peer]
) -> None:
    start()
    peer = peers(role="scheduler", protocol="0/0")
    assert isinstance(peer.receive(SessionRefused), SessionRefused)
    peer.send(Deliver(reservations=(1,)))
    assert "unknown session" in peer.receive(Bye).reason


def test_an_identity_that_is_not_json_is_rejected_and_other_sessions_continue(
    start: Start, peers: Callable[..., Peer]
) -> None:
    start()
    scheduler = peers(role="scheduler", engine="bad", identity="[")
    worker = peers(role="worker", engine="bad", codec="c", shard_bytes=(65_536,))
    assert "JSON" in worker.receive(SessionRefused).reason
    assert "JSON" in scheduler.receive(SessionRefused).reason
    pair(peers, "good")[0].receive(Ready)


@pytest.mark.parametrize("part", ["identity", "codec"])
def test_a_deeply_nested_identity_or_codec_does_not_affect_other_sessions(
    start: Start, peers: Callable[..., Peer], part: str
) -> None:
    start()
    nested = '{"a":' * 100_000 + "1" + "}" * 100_000
    scheduler = peers(role="scheduler", identity=nested if part == "identity" else "{}")
    peers(role="worker", codec=nested if part == "codec" else "{}", shard_bytes=(4096,))
    if part == "identity":
        assert "the identity" in scheduler.receive(SessionRefused).reason
    else:
        scheduler.receive(Ready)
    another, _ = pair(peers, "another")
    another.receive(Credits)


@pytest.mark.parametrize("error", [MemoryError("too much"), ValueError("strange")], ids=repr)
def test_every_client_is_sent_the_reason_why_there_is_no_pool(
    start: Start, peers: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(host_pool, "PoolFile", fails)
    daemon = start(serves=False)
    assert str(error) in peers(role="scheduler", identity="{}").receive(SessionRefused).reason
    wait_for(
        lambda: [each.type for each in daemon.snapshot.conditions] == ["PoolMissing"],
        "a condition says so",
    )


def test_objects_larger_than_the_pool_are_rejected_with_the_sizes(
    start: Start, peers: Callable[..., Peer]
) -> None:
    start()
    scheduler = peers(role="scheduler", identity="{}")
    peers(role="worker", codec="c", shard_bytes=(1 << 30,))
    assert str(1 << 30) in scheduler.receive(SessionRefused).reason


def test_an_unreadable_message_ends_only_its_session(
    case: TierdTestbed, start: Start, peers: Callable[..., Peer]
) -> None:
    start()
    first, _ = pair(peers, "first")
    second, _ = pair(peers, "second")
    first.receive(Ready)
    second.receive(Ready)
    first.socket.send(b"\xc1")
    wait_for(
        lambda: {s["engine"] for s in case.status()["sessions"]} == {"second"},
        "only the other engine is there",
    )


def test_a_client_that_does_not_read_loses_its_session_and_delays_no_other(
    case: TierdTestbed, start: Start, peers: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "QUEUE_MESSAGES", 50)
    monkeypatch.setattr(daemon_module, "SEND_QUEUE_MESSAGES", 1)
    start()
    deaf = peers(role="scheduler", engine="deaf", identity="{}", unread_messages=1)
    peers(role="worker", engine="deaf", codec="c", shard_bytes=(65_536,))
    wait_for(lambda: len(case.status()["sessions"]) == 2, "both sessions stand")
    keys = tuple((0, block_hash(number)) for number in range(64))
    deadline = time.monotonic() + WAIT_SECONDS
    for number in itertools.count():
        # Each is answered, and the answers are not read.
        try:
            deaf.socket.send(
                encode(Promote(promotion=number, keys=keys, budget_seconds=0.001)), zmq.NOBLOCK
            )
        except zmq.Again:
            time.sleep(0.01)  # tierd has not read them yet
        if number % 100 == 0 and not case.status()["sessions"]:
            break
        assert time.monotonic() < deadline, "the session that does not read is not detached"
    pair(peers, "other")[0].receive(Ready)


def test_live_values_are_pushed_to_attached_sessions(
    case: TierdTestbed, start: Start, peers: Callable[..., Peer]
) -> None:
    start()
    scheduler, _ = pair(peers)
    scheduler.receive(Ready)
    case.retune(case.live.model_copy(update={"generation": 5}))
    assert '"generation":5' in scheduler.receive(LiveSettings).settings


@pytest.mark.parametrize(
    ("daemon", "condition"), [(Daemon.ENGINE, "HttpNotServed"), (Daemon.SIDECAR, "HttpPortTaken")]
)
def test_a_port_in_use_is_a_condition_and_does_not_end_the_process(
    case: TierdTestbed, peers: Callable[..., Peer], daemon: Daemon, condition: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = HttpEndpoint(port=taken.getsockname()[1])
        structural = case.topology.structural.model_copy(
            update={"http": endpoint, "daemon": daemon}
        )
        write(case.topology_directory, Topology(structural=structural, live=case.live))
        served = TierDaemon(DaemonOptions(case.topology_directory))
        thread = threading.Thread(target=served.run, daemon=True)
        thread.start()
        wait_for((case.run_directory / SOCKET_NAME).exists, "tierd listens")
        pair(peers)[0].receive(Ready)
        wait_for(
            lambda: condition in [each.type for each in served.snapshot.conditions],
            "the condition is reported",
        )
        if daemon is Daemon.SIDECAR:
            # A pod of the host's network, or a port that the engine has: another port is served,
            # and http.json says which.
            assert case.status()["conditions"][0]["type"] == condition
        served.stop()
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_in_a_pod_on_the_nodes_network_the_first_free_port_of_the_pod_is_served(
    case: TierdTestbed, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    """Neighbours of the node may have the port; the answer names the pod."""
    with contextlib.ExitStack() as stack:
        uid, ports, neighbours = _free_host_ports()
        monkeypatch.setenv(HOST_POD_VARIABLE, uid)
        for listener in neighbours[taken:]:
            listener.close()
        for listener in neighbours[:taken]:
            stack.enter_context(listener)
        structural = case.topology.structural.model_copy(
            update={"http": HttpEndpoint(port=0), "daemon": Daemon.SIDECAR}
        )
        write(case.topology_directory, Topology(structural=structural, live=case.live))
        served = TierDaemon(DaemonOptions(case.topology_directory))
        thread = threading.Thread(target=served.run, daemon=True)
        thread.start()
        wait_for(lambda: case.status().get("started"), "tierd serves")
        assert case.status()["podUid"] == uid
        port = json.loads((case.run_directory / HTTP_NAME).read_text())["port"]
        assert port == ports[taken] if taken < len(ports) else port not in ports
        wait_for(
            lambda: (
                ("HttpPortTaken" in [each["type"] for each in case.status()["conditions"]])
                is (taken == len(ports))
            ),
            "the condition says whether no port was free",
        )
        served.stop()
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()


def _free_host_ports() -> tuple[str, tuple[int, ...], list[socket.socket]]:
    """A uid all of whose ports are free here, and listeners on them."""
    for number in range(100):
        ports, listeners = host_ports(f"uid-{number}"), list[socket.socket]()
        try:
            listeners.extend(socket.create_server(("127.0.0.1", port)) for port in ports)
        except OSError:
            for each in listeners:
                each.close()
            continue
        return f"uid-{number}", ports, listeners
    raise AssertionError("no port is free")


def test_a_tier_without_its_package_is_unknown_and_the_others_work(
    case: TierdTestbed, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> None:
        raise KVTierError("the package lmcache is not installed")

    monkeypatch.setattr("kvtier.tiers.lmcache.tier.require_lmcache", absent)
    tiers = [
        *case.topology.structural.tiers,
        LMCacheTierDocument(name="far", url="redis://nowhere"),
    ]
    live = case.live.model_copy(update={"tiers": {**case.live.tiers, "far": LiveTier()}})
    structural = case.topology.structural.model_copy(update={"tiers": tiers, "live": live})
    write(case.topology_directory, Topology(structural=structural, live=live))
    start()
    status = case.status()
    assert [(tier["name"], tier["state"]) for tier in status["tiers"]] == [
        ("ram", "Healthy"),
        ("far", "Unknown"),
    ]
    assert status["conditions"][0]["type"] == "TierNotServed"
    assert "tier far: the package lmcache is not installed" in status["conditions"][0]["message"]


def test_a_tier_that_opens_later_receives_the_texts_of_namespaces(
    tmp_path: Path,
) -> None:
    case = TierdTestbed(tmp_path / "case", TierdOptions(file_bytes=1 << 30))
    case.files.rmdir()
    case.files.write_text("a file, where the tier's directory has to be")
    case.retune(case.live.model_copy(update={"breaker": BreakerSettings(period_seconds=1)}))
    daemon = TierDaemon(DaemonOptions(case.topology_directory))
    thread = threading.Thread(target=daemon.run, daemon=True)
    thread.start()
    try:
        wait_for(lambda: case.status().get("started"), "tierd serves")
        scheduler, worker = (
            Peer(case, role="scheduler", identity="{}"),
            Peer(case, role="worker", codec="c", shard_bytes=(65_536,)),
        )
        namespace = scheduler.receive(Ready).namespace
        wait_for(
            lambda: case.counter("namespace_descriptions_failed"),
            "the description could not be written",
        )
        case.files.unlink()
        case.files.mkdir()
        wait_for(
            lambda: (case.files / namespace / "identity.json").exists(), "the description is there"
        )
        scheduler.close()
        worker.close()
    finally:
        daemon.stop()
        daemon.stop()
        thread.join(WAIT_SECONDS)
        case.close()


def test_a_second_tierd_in_the_same_directory_exits_at_once(
    case: TierdTestbed, start: Start
) -> None:
    start()
    assert TierDaemon(DaemonOptions(case.topology_directory)).run() == 3
    assert case.status()["started"]


def test_a_load_pins_until_the_scheduler_releases_it(
    case: TierdTestbed, start: Start, peers: Callable[..., Peer]
) -> None:
    from kvtier.store.generations import unpack_location
    from kvtier.tierd.wire import Load, LoadPinned, LoadReleased

    start()
    scheduler, worker = pair(peers)
    slots = list(scheduler.receive(Credits).slots)
    slot = slots[-1]
    scheduler.receive(Delta)
    store(scheduler, worker, slots, 1)
    delta = scheduler.receive(Delta)
    ((_, _, location),) = delta.added
    assert unpack_location(location)[0] == slot
    scheduler.send(Load(load=7, promotion=0, keys=((0, block_hash(1)), (0, block_hash(2)))))
    wait_for(lambda: case.pool("pinned") == 65_536, "it is pinned")
    assert worker.receive(LoadPinned) == LoadPinned(load=7, keys=1), "the workers are told"
    scheduler.send(LoadReleased(load=7))
    wait_for(lambda: case.pool("pinned") == 0, "it is unpinned")


def test_a_fake_engine_stores_and_loads_through_it(case: TierdTestbed, start: Start) -> None:
    start()
    engine = StubEngine(StubEngineOptions(run_directory=case.run_directory))
    engine.start()
    assert engine.wait("can_store", WAIT_SECONDS)
    assert engine.wait("usable", WAIT_SECONDS)
    assert engine.store(1)
    assert engine.wait_for(lambda: engine.holds(1), WAIT_SECONDS)
    assert engine.load([1, 2]) == 1
    engine.close()
    wait_for(lambda: not case.status()["sessions"], "both sessions end")
    assert case.counter("sessions_vanished") == 0


def test_status_says_how_many_prompt_tokens_came_from_a_tier(
    case: TierdTestbed, start: Start
) -> None:
    start()
    engine = case.engine()
    assert engine.wait("can_store", WAIT_SECONDS)
    assert engine.store(1)
    assert engine.wait_for(lambda: engine.holds(1), WAIT_SECONDS)
    assert engine.load([1]) == 1
    wait_for(lambda: case.status()["tiers"][0]["hitTokens"] == OBJECT_TOKENS, "the load is counted")
    wait_for(lambda: case.status()["promptTokens"] == 2 * OBJECT_TOKENS, "so is the store")
