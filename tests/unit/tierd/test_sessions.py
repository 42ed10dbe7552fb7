"""Sessions and the engines they form, without sockets."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from kvtier.errors import KVTierError
from kvtier.processes import Liveness, ProcessIdentity
from kvtier.store.engines import check_engine_info
from kvtier.store.types import StoreCounters
from kvtier.tierd.fencing import UNVERIFIABLE_TIMEOUT_SECONDS, SessionFiles, StartupFence
from kvtier.tierd.sessions import (
    EngineSessions,
    Session,
    SessionDependencies,
    Sessions,
    ShardOffsets,
)
from kvtier.tierd.wire import PROTOCOL, SESSION_TIMEOUT_SECONDS, Bye, Hello, Message, SessionRefused
from kvtier.tiers.base import aligned


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
class SessionTestbed:
    """Sessions with everything around them recorded."""

    directory: Path
    sent: list[tuple[bytes, Message]] = field(default_factory=list)
    calls: list[tuple[object, ...]] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)
    unseen: set[int] = field(default_factory=set)
    epoch: int = 10
    rejects: str = ""
    derived_from: tuple[object, ...] = ()

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
                self.derive,
                self.next_epoch,
                self.liveness,
            ),
            self.counters,
        )

    def derive(
        self, text: str, codecs: tuple[str, ...], weights: tuple[str, ...], shards: ShardOffsets
    ) -> tuple[str, str]:
        self.derived_from = (codecs, weights, shards)
        return "ab" * 16, text

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
def testbed(tmp_path: Path) -> SessionTestbed:
    return SessionTestbed(tmp_path)


def test_an_engine_opens_when_scheduler_and_all_workers_are_there(testbed: SessionTestbed) -> None:
    testbed.hello(b"w0", hello("worker", rank=0, pid=11))
    testbed.hello(b"s", hello("scheduler", ranks=2))
    assert ("opened", "e#11") not in testbed.calls
    testbed.hello(b"w1", hello("worker", rank=1, pid=12))
    assert testbed.calls == [
        ("welcome", b"w0", 11),
        ("welcome", b"s", 11),
        ("welcome", b"w1", 11),
        ("opened", "e#11"),
    ]
    engine = next(testbed.sessions.engines())
    assert engine.info is not None
    assert engine.info.shard_bytes == ((5000, 5000), (100, 100))
    assert engine.info.slot_bytes == (16384, 8192)
    assert engine.info.writer_ranks == ((0, 1), (0, 1))


def test_an_object_written_by_one_rank_has_one_shard(
    testbed: SessionTestbed,
) -> None:
    testbed.hello(b"s", hello("scheduler", ranks=2, shard_writers=((0, 0), (0, 0))))
    testbed.hello(b"w0", hello("worker", rank=0, pid=11))
    testbed.hello(b"w1", hello("worker", rank=1, pid=12))
    engine = next(testbed.sessions.engines())
    assert engine.info is not None
    assert engine.info.shard_bytes == ((5000,), (100,))


@pytest.mark.parametrize("sizes", [(31_000, 30_000), (10_000, 20_000)])
def test_ranks_of_unequal_size_do_not_overlap(
    testbed: SessionTestbed, sizes: tuple[int, int]
) -> None:
    """As pipeline stages with different numbers of layers."""
    testbed.hello(b"s", hello("scheduler", ranks=2))
    for rank, size in enumerate(sizes):
        worker = hello("worker", rank=rank, pid=11 + rank, shard_bytes=(size,))
        testbed.hello(b"w%d" % rank, worker)
    (engine,) = testbed.sessions.engines()
    assert engine.info is not None
    end = 0
    for rank, size in enumerate(sizes):
        (shard,) = engine.shards[rank]
        assert (shard.offset, shard.size_bytes, shard.writes) == (end, size, True)
        end += aligned(size)
    assert engine.info.slot_bytes == (end,)
    assert testbed.derived_from[2] == (((0, sizes[0]),), ((aligned(sizes[0]), sizes[1]),))


def test_ranks_with_the_same_bytes_read_what_one_of_them_writes(testbed: SessionTestbed) -> None:
    """As with MLA under tensor parallelism in two pipeline stages; one group of two."""
    writers = ((0, 0, 2, 2), (0, 1, 2, 3))
    testbed.hello(b"s", hello("scheduler", ranks=4, shard_writers=writers))
    for rank in range(4):
        sizes = (5000 if rank < 2 else 9000, 100)
        worker = hello("worker", rank=rank, pid=11 + rank, shard_bytes=sizes)
        testbed.hello(b"w%d" % rank, worker)
    (engine,) = testbed.sessions.engines()
    assert engine.info is not None
    assert engine.info.writer_ranks == ((0, 2), (0, 1, 2, 3))
    assert engine.info.shard_bytes == ((5000, 9000), (100, 100, 100, 100))
    assert engine.info.slot_bytes == (8192 + 12288, 4 * 4096)
    assert [(each[0].offset, each[0].writes) for each in engine.shards] == [
        (0, True),
        (0, False),
        (8192, True),
        (8192, False),
    ]
    assert [each[1].offset for each in engine.shards] == [0, 4096, 8192, 12288]


def test_a_rank_without_bytes_of_a_group_is_no_writer_of_it(testbed: SessionTestbed) -> None:
    """As a pipeline stage that has no layer of the group."""
    testbed.hello(b"s", hello("scheduler", ranks=2))
    testbed.hello(b"w0", hello("worker", rank=0, pid=11, shard_bytes=(0, 100)))
    testbed.hello(b"w1", hello("worker", rank=1, pid=12, shard_bytes=(9000, 5000)))
    (engine,) = testbed.sessions.engines()
    assert engine.info is not None
    assert engine.info.writer_ranks == ((1,), (0, 1))
    assert engine.info.shard_bytes == ((9000,), (100, 5000))
    assert engine.info.slot_bytes == (12288, 4096 + 8192)
    check_engine_info(engine.info)
    assert [[(s.offset, s.size_bytes, s.writes) for s in rank] for rank in engine.shards] == [
        [(0, 0, False), (0, 100, True)],
        [(0, 9000, True), (4096, 5000, True)],
    ]
    assert testbed.derived_from[2] == (((0, 0), (0, 100)), ((0, 9000), (4096, 5000)))


def test_a_group_of_which_no_rank_has_bytes_is_refused(testbed: SessionTestbed) -> None:
    testbed.hello(b"s", hello("scheduler", ranks=2))
    for rank in range(2):
        testbed.hello(b"w%d" % rank, hello("worker", rank=rank, pid=11 + rank, shard_bytes=(9, 0)))
    answer = testbed.to(b"s")[-1]
    assert isinstance(answer, SessionRefused)
    assert "group 1: shards of [0, 0] bytes" in answer.reason
    assert "at least one must have bytes" in answer.reason


@pytest.mark.parametrize(
    ("writers", "workers", "word"),
    [
        (((0, 1),), {}, "shard writers of 1 groups"),
        (((0,), (0,)), {}, "one of 2 ranks for each rank"),
        (((0, 2), (0, 1)), {}, "one of 2 ranks for each rank"),
        (((1, 0), (0, 1)), {}, "rank 1 must write what rank 0 reads"),
        (((0, 0), (0, 0)), {"shard_bytes": (5001, 100)}, "must have shards of one size"),
        (((0, 0), (0, 0)), {"codec": "other"}, "must have the same layout"),
        ((), {"shard_bytes": (5000, -1)}, "between 0 and"),
        (((0, 1), (0, 0)), {"shard_bytes": (5000, 0)}, "must have shards of one size"),
        ((), {"shard_bytes": ()}, "equal and positive"),
    ],
)
def test_shards_that_do_not_cover_the_slot_once_are_refused_with_the_numbers(
    testbed: SessionTestbed,
    writers: tuple[tuple[int, ...], ...],
    workers: dict[str, object],
    word: str,
) -> None:
    testbed.hello(b"s", hello("scheduler", ranks=2, shard_writers=writers))
    testbed.hello(b"w0", hello("worker", rank=0, pid=11))
    testbed.hello(b"w1", hello("worker", rank=1, pid=12, **workers))
    for route in (b"s", b"w0", b"w1"):
        answer = testbed.to(route)[-1]
        assert isinstance(answer, SessionRefused)
        assert word in answer.reason
    assert len(testbed.sessions) == 0


def test_an_ephemeral_identity_gets_a_new_namespace_each_time(
    testbed: SessionTestbed,
) -> None:
    found = []
    for name in ("a", "b"):
        testbed.hello(b"s" + name.encode(), hello("scheduler", name, ephemeral_reason="seed"))
        testbed.hello(b"w" + name.encode(), hello("worker", name))
        engine = next(each for each in testbed.sessions.engines() if each.engine == name)
        assert engine.info is not None
        assert not engine.info.persistent
        found.append(engine.info.namespace)
    assert len({"ab" * 16, *found}) == 3


def test_the_namespace_is_derived_from_the_weights_of_every_rank(
    testbed: SessionTestbed,
) -> None:
    testbed.hello(b"s", hello("scheduler", ranks=2))
    for rank in (1, 0):
        worker = hello("worker", rank=rank, pid=20 + rank, weights=f"w{rank}")
        testbed.hello(b"w%d" % rank, worker)
    assert testbed.derived_from[:2] == (("c", "c"), ("w0", "w1"))
    (engine,) = testbed.sessions.engines()
    assert engine.info is not None
    assert engine.info.persistent


def test_one_rank_with_unknown_weights_makes_the_engine_ephemeral(testbed: SessionTestbed) -> None:
    testbed.hello(b"s", hello("scheduler", ranks=2))
    testbed.hello(b"w0", hello("worker", rank=0, pid=20, weights="w0"))
    testbed.hello(b"w1", hello("worker", rank=1, pid=21, ephemeral_reason="unknown weights"))
    (engine,) = testbed.sessions.engines()
    assert engine.info is not None
    assert not engine.info.persistent
    assert engine.info.namespace != "ab" * 16


@pytest.mark.parametrize(
    ("message", "word"),
    [
        (msgspec.structs.replace(hello("worker"), protocol="0/0"), PROTOCOL),
        (hello("spectator"), "spectator"),
        (hello("worker", engine=""), "named engine"),
        (hello("worker", rank=-1), "rank -1"),
        (hello("worker", rank=1_000), "rank 1000"),
        (hello("scheduler", ranks=0), "0 ranks"),
        (hello("scheduler", ranks=65), "65 ranks"),
    ],
)
def test_an_invalid_hello_is_rejected_with_the_reason(
    testbed: SessionTestbed, message: Hello, word: str
) -> None:
    testbed.hello(b"x", message)
    (answer,) = testbed.to(b"x")
    assert isinstance(answer, SessionRefused)
    assert word in answer.reason
    assert len(testbed.sessions) == 0


def test_members_with_contradicting_hellos_are_all_rejected(testbed: SessionTestbed) -> None:
    testbed.hello(b"s", hello("scheduler", ranks=2))
    testbed.hello(b"w0", hello("worker", rank=0, pid=11))
    testbed.hello(b"w1", hello("worker", rank=1, pid=12, shard_bytes=(5000,)))
    assert all(isinstance(testbed.to(route)[-1], SessionRefused) for route in (b"s", b"w0", b"w1"))
    assert len(testbed.sessions) == 0
    assert testbed.files.read() == []


def test_an_engine_that_the_store_rejects_is_rejected(testbed: SessionTestbed) -> None:
    testbed.rejects = "too large"
    testbed.pair()
    (answer,) = testbed.to(b"w")
    assert isinstance(answer, SessionRefused)
    assert "too large" in answer.reason


def test_an_engine_id_in_use_by_a_living_process_is_rejected(
    testbed: SessionTestbed,
) -> None:
    testbed.pair()
    testbed.hello(b"x", hello("worker", pid=99))
    (answer,) = testbed.to(b"x")
    assert isinstance(answer, SessionRefused)
    assert "process 10" in answer.reason
    testbed.gone.add(10)
    testbed.hello(b"y", hello("worker", pid=99))
    assert testbed.to(b"y") == []
    assert ("closed", "e#11", True) in testbed.calls
    assert len(testbed.sessions) == 1


def test_byes_of_all_workers_confirm_that_no_slot_is_accessed(
    testbed: SessionTestbed,
) -> None:
    testbed.pair()
    testbed.sessions.bye(b"w")
    assert testbed.calls[-1] == ("closed", "e#11", True)
    testbed.sessions.bye(b"s")
    assert len(testbed.sessions) == testbed.sessions.quarantined == 0
    assert testbed.sessions.last_left_cleanly
    assert testbed.files.read() == []


def test_a_bye_of_the_scheduler_does_not_end_its_workers_sessions(
    testbed: SessionTestbed,
) -> None:
    testbed.pair()
    testbed.sessions.bye(b"s")
    assert testbed.calls[-1] == ("opened", "e#11")
    assert testbed.to(b"w") == []
    testbed.sessions.bye(b"w")
    assert testbed.calls[-1] == ("closed", "e#11", True)


def test_silence_ends_the_engine_without_confirmation_and_notifies_the_others(
    testbed: SessionTestbed,
) -> None:
    testbed.pair()
    testbed.pass_time(SESSION_TIMEOUT_SECONDS + 0.1, b"s")
    assert testbed.calls[-1] == ("closed", "e#11", False)
    assert isinstance(testbed.to(b"s")[-1], Bye)
    assert len(testbed.sessions) == 0
    assert testbed.sessions.quarantined == 1
    assert not testbed.sessions.last_left_cleanly
    assert len(testbed.files.read()) == 1


def test_a_process_that_has_exited_is_confirmed(testbed: SessionTestbed) -> None:
    testbed.pair()
    testbed.gone.add(10)
    testbed.pass_time(0.1)
    assert testbed.calls[-1] == ("closed", "e#11", True)
    assert testbed.sessions.quarantined == 0
    assert testbed.files.read() == []


def test_quarantine_ends_when_the_process_is_gone(testbed: SessionTestbed) -> None:
    testbed.pair()
    testbed.pass_time(SESSION_TIMEOUT_SECONDS + 0.1)
    testbed.pass_time(1e6)
    assert testbed.sessions.quarantined == 1
    testbed.gone.add(10)
    testbed.pass_time(0.5)
    assert testbed.calls[-1] == ("proven", "e#11")
    assert testbed.sessions.quarantined == 0


def test_quarantine_of_a_process_that_cannot_be_seen_ends_after_a_minute(
    testbed: SessionTestbed,
) -> None:
    testbed.unseen.add(10)
    testbed.pair()
    testbed.pass_time(SESSION_TIMEOUT_SECONDS + 0.1)
    testbed.pass_time(UNVERIFIABLE_TIMEOUT_SECONDS - 0.1)
    assert testbed.sessions.quarantined == 1
    testbed.pass_time(0.1)
    assert testbed.calls[-1] == ("proven", "e#11")


def test_a_worker_that_has_drained_attaches_again_and_ends_its_own_quarantine(
    testbed: SessionTestbed,
) -> None:
    testbed.pair()
    testbed.pass_time(SESSION_TIMEOUT_SECONDS + 0.1)
    testbed.hello(b"w2", hello("worker", drained=11))
    assert ("proven", "e#11") in testbed.calls
    testbed.hello(b"s2", hello("scheduler"))
    assert testbed.calls[-1] == ("opened", "e#12")


def test_a_worker_that_attaches_again_while_it_counts_as_attached_ends_the_old_engine_as_confirmed(
    testbed: SessionTestbed,
) -> None:
    testbed.pair()
    testbed.hello(b"w2", hello("worker", drained=11))
    assert ("closed", "e#11", True) in testbed.calls
    assert isinstance(testbed.to(b"s")[-1], Bye)
    testbed.hello(b"s2", hello("scheduler"))
    assert testbed.calls[-1] == ("opened", "e#12")


def test_a_worker_that_attaches_again_without_having_drained_stays_quarantined(
    testbed: SessionTestbed,
) -> None:
    testbed.pair()
    testbed.hello(b"w2", hello("worker", drained=10))
    assert ("closed", "e#11", False) in testbed.calls
    testbed.hello(b"s2", hello("scheduler"))
    assert testbed.sessions.quarantined == 1
    assert len(testbed.files.read()) == 2


def test_a_scheduler_that_attaches_again_ends_the_engine_and_opens_a_later_epoch(
    testbed: SessionTestbed,
) -> None:
    testbed.pair()
    testbed.hello(b"s2", hello("scheduler"))
    assert ("closed", "e#11", False) in testbed.calls
    assert isinstance(testbed.to(b"w")[-1], Bye)
    testbed.hello(b"w2", hello("worker", drained=11))
    assert ("proven", "e#11") in testbed.calls
    assert ("welcome", b"w2", 12) in testbed.calls
    assert testbed.calls[-1] == ("opened", "e#12")


def test_a_bye_that_crosses_with_ours_still_confirms_the_end(testbed: SessionTestbed) -> None:
    testbed.pair()
    testbed.hello(b"s2", hello("scheduler"))
    testbed.sessions.bye(b"w")
    assert testbed.calls[-1] == ("proven", "e#11")
    assert testbed.sessions.quarantined == 0


def test_a_forming_engine_that_loses_a_member_leaves_nothing_behind(
    testbed: SessionTestbed,
) -> None:
    testbed.hello(b"w", hello("worker"))
    testbed.pass_time(SESSION_TIMEOUT_SECONDS + 0.1)
    assert not any(call[0] == "closed" for call in testbed.calls)
    assert testbed.sessions.quarantined == 0
    assert testbed.files.read() == []


def test_a_second_hello_of_a_member_before_the_engine_opens_replaces_the_first(
    testbed: SessionTestbed,
) -> None:
    testbed.hello(b"w", hello("worker"))
    testbed.hello(b"w2", hello("worker"))
    testbed.hello(b"s", hello("scheduler"))
    assert testbed.calls[-1] == ("opened", "e#11")
    assert [session.route for session in testbed.sessions.all()] == [b"w2", b"s"]
    assert len(testbed.files.read()) == 1


def test_after_a_bye_the_next_session_opens_a_new_engine(testbed: SessionTestbed) -> None:
    testbed.pair()
    testbed.sessions.bye(b"w")
    testbed.hello(b"w2", hello("worker"))
    assert isinstance(testbed.to(b"s")[-1], Bye)
    testbed.hello(b"s2", hello("scheduler"))
    assert testbed.calls[-1] == ("opened", "e#12")


def test_two_engines_do_not_affect_each_other(testbed: SessionTestbed) -> None:
    testbed.pair("a", 10, b"a")
    testbed.pair("b", 20, b"b")
    testbed.pass_time(SESSION_TIMEOUT_SECONDS + 0.1, b"sb", b"wb")
    assert [call for call in testbed.calls if call[0] == "closed"] == [("closed", "a#11", False)]
    assert {session.route for session in testbed.sessions.all()} == {b"sb", b"wb"}


def test_silence_does_not_count_while_this_process_was_suspended(testbed: SessionTestbed) -> None:
    testbed.pair()
    testbed.now += 60
    testbed.sessions.reset_timeouts(testbed.now)
    testbed.sessions.check(testbed.now)
    assert len(testbed.sessions) == 2


def test_a_hello_of_a_drained_worker_opens_the_fence(tmp_path: Path) -> None:
    before = SessionTestbed(tmp_path)
    before.pair()
    testbed = SessionTestbed(tmp_path)
    assert testbed.fence.is_active
    testbed.hello(b"w", hello("worker", drained=10))
    assert testbed.fence.is_active
    testbed.hello(b"w2", hello("worker", drained=11))
    assert not testbed.fence.is_active
