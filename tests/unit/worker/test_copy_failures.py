"""What ``CopyFailures`` ends, gives up and allows again after an error, without a thread."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest
from tests.unit.worker.worker_testbeds import (
    RankTestbed,
    load_job,
    make_rank_testbed,
    opened,
    store_job,
)

from kvtier.engines.common import rearming
from kvtier.engines.common.rearming import CopyFailures, OpenCopies, RearmTimes
from kvtier.engines.common.worker_state import WorkerOutbox
from kvtier.engines.common.worker_stores import WorkerStores
from kvtier.tierd.wire import Deliver, Message

A, B = (1, 2, 3, 4), (5, 6, 7, 8)
BUG = ZeroDivisionError("a bug")


class _FullClient:
    """A tierd that is attached and takes no message."""

    attached = True

    def send(self, message: Message) -> bool:
        return False


@dataclass
class _Bench:
    """A rank with a load and a store whose copies run."""

    rank: RankTestbed = field(default_factory=make_rank_testbed)
    closing: bool = False
    dropped: list[str] = field(default_factory=list)
    slept: list[float] = field(default_factory=list)
    seen: list[tuple[int, str, bool]] = field(default_factory=list)
    """During each sleep: the epoch, the reason, and whether tierd's ranges are known."""

    def __post_init__(self) -> None:
        rank = self.rank
        self.lock = threading.Lock()
        self.outbox = WorkerOutbox(_FullClient(), rank.counters)  # type: ignore[arg-type]
        self.stores = WorkerStores(rank.context, self.outbox.send)
        copies = OpenCopies(rank.context, self.lock, rank.loads, self.stores, self.outbox)
        self.failures = CopyFailures(copies, self._drop, self._sleep)
        self.open(1)
        rank.engine.hold()
        rank.add(load_job(7, A, slots=rank.slots(1)))
        self.stores.add([store_job(3, rank.slot(5), B)], None, 1)
        rank.loads.advance()
        self.stores.advance()
        assert rank.engine.held == 2

    def open(self, epoch: int) -> None:
        """tierd is attached."""
        size = self.rank.slot_bytes
        assert self.rank.context.shards.set(opened(((0, size, True),), (size,))) == ""
        self.rank.completions.epoch = epoch

    def _drop(self, reason: str) -> None:
        assert not self.lock.locked(), "the client's own lock is taken meanwhile"
        self.dropped.append(reason)

    def _sleep(self, seconds: float) -> bool:
        assert not self.lock.locked(), "hooks take the lock meanwhile"
        self.slept.append(seconds)
        rank = self.rank
        self.seen.append((rank.completions.epoch, self.failures.reason, rank.context.shards.known))
        return self.closing

    def counts(self) -> dict[str, int]:
        return self.rank.counters.snapshot()


@pytest.fixture
def bench() -> _Bench:
    return _Bench()


def test_what_is_open_ends_as_failed_and_copies_are_possible_afterwards(bench: _Bench) -> None:
    bench.outbox.send(Deliver(reservations=(1,)))
    assert len(bench.outbox) == 1
    assert bench.failures.rearm(BUG)
    assert bench.slept == [10.0]
    assert bench.seen == [(0, "copies failed: a bug", False)], "no hook copies meanwhile"
    assert bench.dropped == ["copies failed: a bug"]
    assert bench.failures.error is None
    assert bench.failures.reason == ""
    taken = bench.rank.taken()
    assert [(each.load, each.keys_loaded, each.reason) for each in taken.loads] == [(7, 0, "off")]
    assert taken.invalid_blocks == set(A)
    assert taken.stores_done == {3: 1}
    assert bench.rank.engine.held == 0, "the report gives the blocks back to the engine"
    assert not len(bench.outbox), "what waited was for the session that was given up"
    counts = bench.counts()
    assert (counts["thread_failures"], counts["thread_rearms"]) == (1, 1)


def test_the_pauses_grow_and_after_the_last_one_it_stays_off(bench: _Bench) -> None:
    pauses = rearming.REARM_SECONDS
    assert pauses == (10.0, 60.0, 360.0)
    for number in range(len(pauses)):
        assert bench.failures.rearm(BUG)
        bench.open(number + 2)
    assert not bench.failures.rearm(BUG)
    assert bench.slept == list(pauses)
    assert bench.failures.reason == "copies failed: a bug"
    assert bench.rank.completions.epoch == 0
    counts = bench.counts()
    assert counts["thread_failures"] == len(bench.dropped) == len(pauses) + 1
    assert counts["thread_rearms"] == len(pauses)


def test_a_thread_that_closes_meanwhile_may_drain_and_is_not_counted_as_rearmed(
    bench: _Bench,
) -> None:
    bench.closing = True
    assert bench.failures.rearm(BUG)
    assert bench.failures.error is None, "draining must not raise it again"
    assert "thread_rearms" not in bench.counts()


def test_without_proof_that_copies_have_ended_nothing_is_copied_again(
    bench: _Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost() -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(bench.rank.engine, "_drain", lost)
    assert not bench.failures.rearm(BUG)
    assert bench.slept == []
    assert bench.failures.reason == "copies failed: a bug"
    assert not bench.rank.taken().loads, "their blocks may still be written"
    bench.failures.abandon()
    taken = bench.rank.taken()
    assert [each.reason for each in taken.loads] == ["off"], "the engine waits for it"
    assert taken.stores_done == {3: 1}
    assert bench.counts()["copy_errors"] == 2


def test_stores_are_reported_even_if_ending_the_loads_raises(
    bench: _Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(reason: str) -> None:
        raise ValueError(reason)

    monkeypatch.setattr(bench.rank.loads, "abandon", broken)
    with pytest.raises(ValueError, match="off"):
        bench.failures.abandon()
    assert bench.rank.taken().stores_done == {3: 1}


def test_an_error_outside_the_copies_turns_them_off_until_restart(bench: _Bench) -> None:
    bench.failures.stop(BUG)
    assert bench.failures.error is BUG
    assert (bench.rank.completions.epoch, bench.slept) == (0, [])
    assert bench.dropped == ["copies failed: a bug"]
    assert bench.counts() == {"thread_failures": 1}


def test_no_store_is_delivered_whose_copies_failed(bench: _Bench) -> None:
    sent: list[Message] = []
    bench.stores._send = sent.append
    assert bench.failures.rearm(BUG)
    bench.stores.advance()
    assert sent == []


def test_times_are_described_for_the_log() -> None:
    times = RearmTimes()
    described = [RearmTimes.describe(times.next()) for _ in range(5)]
    assert described == ["for 10 s", "for 60 s", "for 360 s", "until restart", "until restart"]
