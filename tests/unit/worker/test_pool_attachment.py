"""Which range of the pool a rank maps, and when its copy engine gets it."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.stub_tierd import FIRST_GENERATION
from tests.unit.worker.worker_testbeds import make_rank_testbed

from kvtier.engines.common.pool_attachment import PoolAttachment
from kvtier.engines.common.worker_pool import HostPoolMapper, PoolReady
from kvtier.engines.common.worker_state import RankShards
from kvtier.errors import KVTierError
from kvtier.store.generations import generation_bytes
from kvtier.tierd.wire import GENERATIONS_NAME, PROTOCOL, WHOLE_POOL, Ready, Welcome
from kvtier.transfer.driver_calls import DriverHangsError
from kvtier.transfer.host_pool import HostPool

SLOTS = 12
Span = tuple[int, int]


class RecordingMapper(HostPoolMapper):
    """Records the ranges that it is asked to map."""

    asked: tuple[Span, ...] = ()

    def map(
        self, path: Path, nbytes: int, span: Span, on_ready: Callable[[PoolReady], None]
    ) -> None:
        self.asked += (span,)
        super().map(path, nbytes, span, on_ready)


class Rank:
    """One rank without a transfer thread: the test calls what that would call."""

    def __init__(self, directory: Path) -> None:
        testbed = make_rank_testbed()
        self.engine, self.slot_bytes = testbed.engine, testbed.slot_bytes
        self.engine.detach()
        self.size = SLOTS * self.slot_bytes
        self.half = self.size // 2
        self.path = directory / "pool"
        self.new_pool()
        self.shards = RankShards((self.slot_bytes,))
        self.context = replace(testbed.context, shards=self.shards)
        self.context.generations.words = None
        self.registered: list[Span] = []
        self.problem: KVTierError | None = None
        """What registering raises."""
        self.copies = threading.Lock()
        self.mapped: queue.SimpleQueue[PoolReady] = queue.SimpleQueue()
        self.calls: list[str] = []
        self.mapper = RecordingMapper(
            self.register, lambda pool, begins: None, expect=self.expected
        )
        self.attachment = PoolAttachment(
            self.context, self.copies, self.mapper, self.mapped.put, self.drain, self.attached
        )

    def new_pool(self, slots: int = SLOTS) -> None:
        """A tierd creates a pool."""
        self.path.unlink(missing_ok=True)
        size = slots * self.slot_bytes
        self.path.write_bytes(bytes(size))
        word = FIRST_GENERATION.to_bytes(4, sys.byteorder)
        self.path.with_name(GENERATIONS_NAME).write_bytes(word * (generation_bytes(size) // 4))

    def expected(self, pool_bytes: int) -> Span:
        """It will probably be the second half."""
        return pool_bytes // 2, pool_bytes

    def register(self, pool: HostPool, *_: object) -> tuple[HostPool, tuple[int, ...]]:
        self.registered.append(pool.span)
        if self.problem is not None:
            raise self.problem
        return pool, (0,)

    def drain(self) -> None:
        assert not self.copies.locked()
        self.calls.append("drain")

    def attached(self) -> None:
        assert self.copies.locked()
        self.calls.append("attached")

    def welcome(self, slots: int = SLOTS) -> Welcome:
        return Welcome(
            protocol=PROTOCOL,
            epoch=1,
            session=1,
            pool_path=str(self.path),
            pool_bytes=slots * self.slot_bytes,
            tiers=("ram",),
            settings="{}",
        )

    def name(self, span: Span) -> None:
        """tierd opens the namespace and names a range."""
        ready = Ready(
            namespace="n",
            slot_bytes=(2 * self.slot_bytes,),
            persistent=True,
            shards=((span[0], self.slot_bytes, True),),
            span=span,
        )
        assert self.shards.set(ready) == ""

    def result(self) -> PoolReady:
        """The next result of the mapper. Only a failing test reaches the deadline."""
        return self.mapped.get(timeout=30)

    @property
    def span(self) -> Span | None:
        """The range that the copy engine has."""
        return None if self.engine.pool is None else self.engine.pool.span


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    made.engine.detach()
    made.attachment.close()


def test_the_expected_range_is_chosen_until_tierd_names_one(rank: Rank) -> None:
    own, other = (rank.half, rank.size), (0, rank.half)
    assert rank.attachment.span(rank.size) == own
    rank.name(other)
    assert rank.attachment.span(rank.size) == other
    rank.name(WHOLE_POOL)
    assert rank.attachment.span(rank.size) == (0, rank.size)


def test_the_range_that_tierd_has_named_is_chosen_again_for_a_pool_of_that_size(rank: Rank) -> None:
    other = (0, rank.half)
    rank.name(other)
    assert rank.attachment.span(rank.size) == other
    # The session ends. Its ranges are forgotten with it.
    rank.shards.clear()
    assert rank.attachment.span(rank.size) == other
    assert rank.attachment.span(2 * rank.size) == (rank.size, 2 * rank.size)


def test_a_range_is_attached_once_it_is_mapped(rank: Rank) -> None:
    welcome = rank.welcome()
    rank.attachment.use(welcome)
    ready = rank.result()
    assert ready == PoolReady(rank.path, rank.size, (rank.half, rank.size))
    assert rank.span is None, "the mapper's thread attaches nothing"
    rank.attachment.on_pool(ready, welcome)
    assert rank.span == (rank.half, rank.size)
    words = rank.context.generations.words
    assert words is not None
    assert words[0] == FIRST_GENERATION
    assert rank.calls == ["attached"]
    assert len(rank.mapper.asked) == 1


def test_another_range_is_mapped_after_the_copies_have_ended(rank: Rank) -> None:
    welcome = rank.welcome()
    rank.attachment.use(welcome)
    rank.attachment.on_pool(rank.result(), welcome)
    rank.name((0, rank.half))
    rank.attachment.use(welcome)
    assert rank.calls == ["attached", "drain"]
    assert rank.span is None
    assert rank.context.generations.words is None
    rank.attachment.on_pool(rank.result(), welcome)
    assert rank.span == (0, rank.half)
    assert rank.registered == [(rank.half, rank.size), (0, rank.half)]


def test_the_range_that_is_mapped_is_used_by_the_next_session(rank: Rank) -> None:
    rank.attachment.use(rank.welcome())
    rank.attachment.on_pool(rank.result(), None)
    assert rank.span is None, "tierd was lost meanwhile"
    rank.attachment.use(rank.welcome())
    assert rank.span == (rank.half, rank.size)
    rank.attachment.use(rank.welcome())
    assert rank.calls == ["attached", "attached"], "nothing was drained"
    assert len(rank.registered) == 1


def test_another_file_at_the_same_path_is_mapped(rank: Rank) -> None:
    rank.attachment.use(rank.welcome())
    rank.attachment.on_pool(rank.result(), rank.welcome())
    before = rank.engine.pool
    rank.new_pool()
    rank.attachment.use(rank.welcome())
    rank.attachment.on_pool(rank.result(), rank.welcome())
    assert rank.span == (rank.half, rank.size)
    assert rank.engine.pool is not before


def test_the_result_for_a_range_that_is_not_wanted_any_more_leads_to_another_mapping(
    rank: Rank,
) -> None:
    welcome = rank.welcome()
    rank.attachment.use(welcome)
    ready = rank.result()
    rank.name((0, rank.half))
    rank.attachment.on_pool(ready, welcome)
    assert rank.span is None
    rank.attachment.on_pool(rank.result(), welcome)
    assert rank.span == (0, rank.half)


def test_a_range_that_cannot_be_mapped_is_not_tried_again_for_the_same_tierd(rank: Rank) -> None:
    rank.problem = KVTierError("cannot be registered")
    rank.attachment.use(rank.welcome())
    ready = rank.result()
    assert "cannot be registered" in ready.problem
    rank.attachment.on_pool(ready, rank.welcome())
    assert rank.context.counters.snapshot()["pool_failures"] == 1
    assert rank.mapper.asked == ((rank.half, rank.size),)


def test_a_failure_for_a_previous_tierd_does_not_keep_the_next_one_from_its_pool(
    rank: Rank,
) -> None:
    rank.problem = KVTierError("cannot be registered")
    rank.attachment.use(rank.welcome())
    ready = rank.result()
    rank.problem = None
    rank.new_pool(2 * SLOTS)
    rank.attachment.on_pool(ready, rank.welcome(2 * SLOTS))
    rank.attachment.on_pool(rank.result(), rank.welcome(2 * SLOTS))
    assert rank.span == (rank.size, 2 * rank.size)


def test_a_pool_is_usable_when_its_range_is_the_one_that_tierd_names(rank: Rank) -> None:
    welcome = rank.welcome()
    rank.attachment.use(welcome)
    ready = rank.result()
    rank.name((rank.half, rank.size))
    assert not rank.attachment.is_usable(rank.size), "nothing is attached"
    rank.attachment.on_pool(ready, welcome)
    assert rank.attachment.is_usable(rank.size)
    rank.name((0, rank.half))
    assert not rank.attachment.is_usable(rank.size)
    rank.shards.clear()
    assert not rank.attachment.is_usable(rank.size), "no layout is known"


def test_a_driver_that_hangs_is_a_reason_until_the_engine_restarts(rank: Rank) -> None:
    assert rank.attachment.hangs == ""
    rank.problem = DriverHangsError("the driver hangs")
    rank.attachment.use(rank.welcome())
    rank.attachment.on_pool(rank.result(), rank.welcome())
    assert rank.attachment.hangs == "the driver hangs"
    rank.attachment.use(rank.welcome())
    assert rank.mapped.empty(), "nothing is mapped, so that no result follows"
    assert rank.registered == [(rank.half, rank.size)]
