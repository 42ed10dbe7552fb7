"""Sessions and the engines they form, without sockets."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from kvtier.errors import KVTierError
from kvtier.processes import Liveness, ProcessIdentity
from kvtier.store.types import StoreCounters
from kvtier.tierd.fencing import UNVERIFIABLE_TIMEOUT_SECONDS, SessionFiles, StartupFence
from kvtier.tierd.sessions import EngineSessions, Session, SessionDependencies, Sessions
from kvtier.tierd.wire import PROTOCOL, SESSION_TIMEOUT_SECONDS, Bye, Hello, Message, SessionRefused


def hello(
    role: str, engine: str = "e", rank: int = 0, pid: int = 10, drained: int = 0, **fields: object
) -> Hello:
    common: dict[str, object] = {
        "protocol": PROTOCOL,
        "role": role,
        "engine": engine,
        "rank": rank,
        "pid": pid,
        "pid_namespace": "here",
        "process_start": pid * 10,
        "drained_epoch": drained,
    }
    if role == "worker":
        common |= {"codec": "c", "shard_bytes": (5000, 100)}
    else:
        common |= {"identity": "{}"}
    return Hello(**(common | fields))  # type: ignore[arg-type]


@dataclass
class World:
    """Sessions with everything around them recorded."""

    directory: Path
    sent: list[tuple[bytes, Message]] = field(default_factory=list)
    calls: list[tuple[object, ...]] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)
    unseen: set[int] = field(default_factory=set)
    epoch: int = 10
    rejects: str = ""

    def __post_init__(self) -> None:
        self.now = 100.0
        self.files = SessionFiles(self.directory, 0o600)
        self.fence = StartupFence(self.files, self.now, self.liveness)
        self.counters = StoreCounters()
        self.sessions = Sessions(
            self,
            SessionDependencies(
                self.files,
                self.fence,
                lambda text, codecs: ("ab" * 16, text),
                self.next_epoch,
                self.liveness,
            ),
            self.counters,
        )

    def liveness(self, process: ProcessIdentity) -> Liveness:
        if process.pid in self.gone:
            return Liveness.GONE
        return Liveness.UNKNOWN if process.pid in self.unseen else Liveness.ALIVE

    def next_epoch(self) -> int:
        self.epoch += 1
        return self.epoch

    # The listener.

    def send(self, route: bytes, message: Message) -> None:
        self.sent.append((route, message))

    def welcome(self, session: Session) -> None:
        self.calls.append(("welcome", session.route, session.worker.epoch))

    def engine_opened(self, engine: EngineSessions) -> None:
        if self.rejects:
            raise KVTierError(self.rejects)
        self.calls.append(("opened", engine.name))

    def engine_closed(self, engine: EngineSessions, proven: bool) -> None:
        self.calls.append(("closed", engine.name, proven))

    def engine_confirmed_dead(self, name: str) -> None:
        self.calls.append(("proven", name))

    def session_removed(self, session: Session) -> None:
        pass

    # Shorter.

    def hello(self, route: bytes, message: Hello) -> None:
        self.sessions.hello(route, message, self.now)

    def pair(self, engine: str = "e", pid: int = 10, suffix: bytes = b"") -> None:
        self.hello(b"s" + suffix, hello("scheduler", engine, pid=pid))
        self.hello(b"w" + suffix, hello("worker", engine, pid=pid))

    def pass_time(self, seconds: float, *alive: bytes) -> None:
        self.now += seconds
        for route in alive:
            session = self.sessions.get(route)
            assert session is not None
            self.sessions.touch(session, self.now)
        self.sessions.check(self.now)

    def to(self, route: bytes) -> list[Message]:
        return [message for address, message in self.sent if address == route]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_an_engine_opens_when_scheduler_and_all_workers_are_there(world: World) -> None:
    world.hello(b"w0", hello("worker", rank=0, pid=11))
    world.hello(b"s", hello("scheduler", ranks=2, writer_ranks=(0, 1)))
    assert ("opened", "e#11") not in world.calls
    world.hello(b"w1", hello("worker", rank=1, pid=12))
    assert world.calls == [
        ("welcome", b"w0", 11),
        ("welcome", b"s", 11),
        ("welcome", b"w1", 11),
        ("opened", "e#11"),
    ]
    engine = next(world.sessions.engines())
    assert engine.info is not None
    assert engine.info.shard_bytes == ((5000, 5000), (100, 100))
    assert engine.info.slot_bytes == (16384, 8192)
    assert engine.info.writer_ranks == (0, 1)


def test_where_one_rank_writes_for_all_an_object_has_its_shard_alone(world: World) -> None:
    world.hello(b"s", hello("scheduler", ranks=2, writer_ranks=(0,)))
    world.hello(b"w0", hello("worker", rank=0, pid=11))
    world.hello(b"w1", hello("worker", rank=1, pid=12))
    engine = next(world.sessions.engines())
    assert engine.info is not None
    assert engine.info.shard_bytes == ((5000,), (100,))


def test_an_identity_that_does_not_hold_gets_a_namespace_of_its_own_each_time(world: World) -> None:
    found = []
    for name in ("a", "b"):
        world.hello(b"s" + name.encode(), hello("scheduler", name, ephemeral_reason="seed"))
        world.hello(b"w" + name.encode(), hello("worker", name))
        engine = next(each for each in world.sessions.engines() if each.engine == name)
        assert engine.info is not None
        assert not engine.info.persistent
        found.append(engine.info.namespace)
    assert len({"ab" * 16, *found}) == 3


@pytest.mark.parametrize(
    ("message", "word"),
    [
        (msgspec.structs.replace(hello("worker"), protocol="0/0"), PROTOCOL),
        (hello("spectator"), "spectator"),
        (hello("worker", engine=""), "named engine"),
        (hello("worker", rank=-1), "rank -1"),
        (hello("worker", rank=1_000), "rank 1000"),
        (hello("scheduler", writer_ranks=()), "writer ranks"),
        (hello("scheduler", ranks=1, writer_ranks=(0, 1)), "writer ranks"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(
    world: World, message: Hello, word: str
) -> None:
    world.hello(b"x", message)
    (answer,) = world.to(b"x")
    assert isinstance(answer, SessionRefused)
    assert word in answer.reason
    assert len(world.sessions) == 0


def test_members_that_contradict_each_other_are_all_refused(world: World) -> None:
    world.hello(b"s", hello("scheduler", ranks=2, writer_ranks=(0, 1)))
    world.hello(b"w0", hello("worker", rank=0, pid=11))
    world.hello(b"w1", hello("worker", rank=1, pid=12, shard_bytes=(5000,)))
    assert all(isinstance(world.to(route)[-1], SessionRefused) for route in (b"s", b"w0", b"w1"))
    assert len(world.sessions) == 0
    assert world.files.read() == []


def test_what_the_store_does_not_take_is_refused(world: World) -> None:
    world.rejects = "too large"
    world.pair()
    (answer,) = world.to(b"w")
    assert isinstance(answer, SessionRefused)
    assert "too large" in answer.reason


def test_an_engine_id_in_use_by_a_living_process_is_refused_to_another(world: World) -> None:
    world.pair()
    world.hello(b"x", hello("worker", pid=99))
    (answer,) = world.to(b"x")
    assert isinstance(answer, SessionRefused)
    assert "process 10" in answer.reason
    world.gone.add(10)
    world.hello(b"y", hello("worker", pid=99))
    assert world.to(b"y") == []
    assert ("closed", "e#11", True) in world.calls
    assert len(world.sessions) == 1


def test_byes_of_all_workers_prove_that_nothing_is_touched_any_more(world: World) -> None:
    world.pair()
    world.sessions.bye(b"w")
    assert world.calls[-1] == ("closed", "e#11", True)
    world.sessions.bye(b"s")
    assert len(world.sessions) == world.sessions.quarantined == 0
    assert world.sessions.last_left_cleanly
    assert world.files.read() == []


def test_a_scheduler_that_says_bye_first_does_not_hurry_its_workers(world: World) -> None:
    world.pair()
    world.sessions.bye(b"s")
    assert world.calls[-1] == ("opened", "e#11")
    assert world.to(b"w") == []
    world.sessions.bye(b"w")
    assert world.calls[-1] == ("closed", "e#11", True)


def test_silence_ends_the_engine_without_proof_and_tells_the_others(world: World) -> None:
    world.pair()
    world.pass_time(SESSION_TIMEOUT_SECONDS + 0.1, b"s")
    assert world.calls[-1] == ("closed", "e#11", False)
    assert isinstance(world.to(b"s")[-1], Bye)
    assert len(world.sessions) == 0
    assert world.sessions.quarantined == 1
    assert not world.sessions.last_left_cleanly
    assert len(world.files.read()) == 1


def test_a_process_that_is_gone_is_proof(world: World) -> None:
    world.pair()
    world.gone.add(10)
    world.pass_time(0.1)
    assert world.calls[-1] == ("closed", "e#11", True)
    assert world.sessions.quarantined == 0
    assert world.files.read() == []


def test_quarantine_ends_when_the_process_is_gone(world: World) -> None:
    world.pair()
    world.pass_time(SESSION_TIMEOUT_SECONDS + 0.1)
    world.pass_time(1e6)
    assert world.sessions.quarantined == 1
    world.gone.add(10)
    world.pass_time(0.5)
    assert world.calls[-1] == ("proven", "e#11")
    assert world.sessions.quarantined == 0


def test_quarantine_of_a_process_that_cannot_be_seen_ends_after_a_minute(world: World) -> None:
    world.unseen.add(10)
    world.pair()
    world.pass_time(SESSION_TIMEOUT_SECONDS + 0.1)
    world.pass_time(UNVERIFIABLE_TIMEOUT_SECONDS - 0.1)
    assert world.sessions.quarantined == 1
    world.pass_time(0.1)
    assert world.calls[-1] == ("proven", "e#11")


def test_a_worker_that_has_drained_attaches_again_and_ends_its_own_quarantine(world: World) -> None:
    world.pair()
    world.pass_time(SESSION_TIMEOUT_SECONDS + 0.1)
    world.hello(b"w2", hello("worker", drained=11))
    assert ("proven", "e#11") in world.calls
    world.hello(b"s2", hello("scheduler"))
    assert world.calls[-1] == ("opened", "e#12")


def test_a_worker_that_attaches_again_while_it_counts_as_attached_ends_the_old_engine_as_proven(
    world: World,
) -> None:
    world.pair()
    world.hello(b"w2", hello("worker", drained=11))
    assert ("closed", "e#11", True) in world.calls
    assert isinstance(world.to(b"s")[-1], Bye)
    world.hello(b"s2", hello("scheduler"))
    assert world.calls[-1] == ("opened", "e#12")


def test_a_worker_that_attaches_again_without_having_drained_stays_quarantined(
    world: World,
) -> None:
    world.pair()
    world.hello(b"w2", hello("worker", drained=10))
    assert ("closed", "e#11", False) in world.calls
    world.hello(b"s2", hello("scheduler"))
    assert world.sessions.quarantined == 1
    assert len(world.files.read()) == 2


def test_a_scheduler_that_attaches_again_opens_a_later_epoch_so_old_plans_name_nobody(
    world: World,
) -> None:
    world.pair()
    world.hello(b"s2", hello("scheduler"))
    assert ("closed", "e#11", False) in world.calls
    assert isinstance(world.to(b"w")[-1], Bye)
    world.hello(b"w2", hello("worker", drained=11))
    assert ("proven", "e#11") in world.calls
    assert ("welcome", b"w2", 12) in world.calls
    assert world.calls[-1] == ("opened", "e#12")


def test_a_bye_that_crossed_with_ours_still_counts_as_proof(world: World) -> None:
    world.pair()
    world.hello(b"s2", hello("scheduler"))
    world.sessions.bye(b"w")
    assert world.calls[-1] == ("proven", "e#11")
    assert world.sessions.quarantined == 0


def test_a_forming_engine_that_loses_a_member_leaves_nothing_behind(world: World) -> None:
    world.hello(b"w", hello("worker"))
    world.pass_time(SESSION_TIMEOUT_SECONDS + 0.1)
    assert not any(call[0] == "closed" for call in world.calls)
    assert world.sessions.quarantined == 0
    assert world.files.read() == []


def test_a_member_that_says_hello_again_before_the_engine_is_open_takes_its_own_place(
    world: World,
) -> None:
    world.hello(b"w", hello("worker"))
    world.hello(b"w2", hello("worker"))
    world.hello(b"s", hello("scheduler"))
    assert world.calls[-1] == ("opened", "e#11")
    assert [session.route for session in world.sessions.all()] == [b"w2", b"s"]
    assert len(world.files.read()) == 1


def test_after_a_bye_another_session_begins_a_fresh_engine(world: World) -> None:
    world.pair()
    world.sessions.bye(b"w")
    world.hello(b"w2", hello("worker"))
    assert isinstance(world.to(b"s")[-1], Bye)
    world.hello(b"s2", hello("scheduler"))
    assert world.calls[-1] == ("opened", "e#12")


def test_two_engines_do_not_touch_each_other(world: World) -> None:
    world.pair("a", 10, b"a")
    world.pair("b", 20, b"b")
    world.pass_time(SESSION_TIMEOUT_SECONDS + 0.1, b"sb", b"wb")
    assert [call for call in world.calls if call[0] == "closed"] == [("closed", "a#11", False)]
    assert {session.route for session in world.sessions.all()} == {b"sb", b"wb"}


def test_nobodys_silence_counts_while_this_process_slept(world: World) -> None:
    world.pair()
    world.now += 60
    world.sessions.reset_timeouts(world.now)
    world.sessions.check(world.now)
    assert len(world.sessions) == 2


def test_a_hello_of_a_drained_worker_opens_the_fence(tmp_path: Path) -> None:
    before = World(tmp_path)
    before.pair()
    world = World(tmp_path)
    assert world.fence.is_active
    world.hello(b"w", hello("worker", drained=10))
    assert world.fence.is_active
    world.hello(b"w2", hello("worker", drained=11))
    assert not world.fence.is_active
