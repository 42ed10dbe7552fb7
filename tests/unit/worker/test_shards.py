"""A rank copies only within the range of a slot that tierd named for it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from tests.support.held_copies import HeldCopyEngine
from tests.unit.worker.worker_testbeds import (
    WorkerTestbed,
    block_bytes,
    opened,
    store_job,
    wait_until,
)

from kvtier.engines.common.jobs import BlockRun
from kvtier.engines.common.worker_state import (
    CompletionQueue,
    Counters,
    RankContext,
    RankShards,
    SlotGenerations,
)
from kvtier.tierd.shard_layout import slot_layouts
from kvtier.tierd.wire import Abort, Ready
from kvtier.transfer.codec import build_codec
from kvtier.transfer.engine import Direction
from kvtier.transfer.host_pool import HostPool
from kvtier.transfer.synthetic_layouts import CacheGeometry, make_every_cache

CHUNK = 4
A = (1, 2, 3, 4)
FILL = 0xA5


class _Rank:
    """One pipeline stage with its own number of layers."""

    def __init__(self, layers: int) -> None:
        geometry = CacheGeometry(layers=layers, blocks=40, block=16)
        self.layout = next(iter(make_every_cache(geometry)))
        codec = build_codec(self.layout.caches, self.layout, CHUNK * geometry.block)
        self.engine = HeldCopyEngine(self.layout.caches, codec)
        self.shards = RankShards(codec.shard_bytes)
        self.shard_bytes = codec.shard_bytes
        self.context = RankContext(
            self.engine,
            self.shards,
            CompletionQueue(True),
            Counters(),
            lambda: 0.0,
            SlotGenerations(),
        )

    def copy(self, slot: int, direction: Direction) -> None:
        copy = self.context.copy(BlockRun(0, 0, A), slot)
        assert self.engine.check(copy) == ""
        handle = self.engine.submit([copy], direction, None)
        assert self.engine.done(handle)

    def bytes(self) -> bytes:
        return b"".join(block_bytes(self.layout, block) for block in A)


@pytest.mark.parametrize("layers", [(1, 2), (2, 1), (31, 30)])
def test_stages_of_unequal_size_share_a_slot(layers: tuple[int, int]) -> None:
    ranks = [_Rank(count) for count in layers]
    (group,) = slot_layouts([rank.shard_bytes for rank in ranks], ())
    pool = HostPool(np.full(3 * group.slot_bytes, FILL, dtype=np.uint8))
    for rank, shard in zip(ranks, group.ranges, strict=True):
        rank.engine.attach(pool)
        told = ((shard.offset, shard.size_bytes, shard.writes),)
        assert rank.shards.set(opened(told, (group.slot_bytes,))) == ""
    contents = [rank.bytes() for rank in ranks]
    for rank in ranks:
        rank.copy(group.slot_bytes, Direction.TO_HOST)
    neighbours = pool.memory.reshape(3, group.slot_bytes)[[0, 2]]
    assert (neighbours == FILL).all()
    for rank in ranks:
        for tensor in rank.layout.caches.values():
            tensor.zero_()  # type: ignore[union-attr]
        rank.copy(group.slot_bytes, Direction.TO_DEVICE)
    assert [rank.bytes() for rank in ranks] == contents


def test_without_a_range_nothing_has_an_address() -> None:
    rank = _Rank(1)
    rank.engine.attach(HostPool(np.zeros(1 << 20, dtype=np.uint8)))
    assert rank.context.copy(BlockRun(0, 0, A), 0).shard < 0
    assert rank.engine.check(rank.context.copy(BlockRun(0, 0, A), 0))


@pytest.mark.parametrize(
    ("shards", "slot_bytes", "word"),
    [
        (((0, 5000, True),), (8192,), "one of each for 2 groups"),
        (((0, 5000, True), (0, 100, True)), (8192,), "one of each for 2 groups"),
        (((0, 5001, True), (0, 100, True)), (8192, 4096), "must be 5000 bytes"),
        (((0, 5000, True), (64, 100, True)), (8192, 4096), "a multiple of 4096"),
        (((4096, 5000, True), (0, 100, True)), (8192, 4096), "within a slot of 8192"),
        (((-4096, 5000, True), (0, 100, True)), (8192, 4096), "within a slot of 8192"),
    ],
)
def test_a_range_that_cannot_hold_the_shard_is_refused(
    shards: tuple[tuple[int, int, bool], ...], slot_bytes: tuple[int, ...], word: str
) -> None:
    rank = RankShards((5000, 100))
    assert rank.set(opened(((0, 5000, True), (0, 100, True)), (8192, 4096))) == ""
    assert word in rank.set(opened(shards, slot_bytes))
    assert not rank.known
    assert rank.offset(0) == -1
    assert not rank.writes(0)


def test_a_rank_that_refuses_its_range_reports_that_it_cannot_copy(
    testbed: WorkerTestbed,
) -> None:
    size = testbed.slot_bytes
    wrong = opened(((0, size + 4096, True),), (size + 4096,))
    testbed.tierd.say(wrong)
    wait_until(lambda: testbed.step() and testbed.epoch == 0)
    done = testbed.step(stores=[store_job(3, testbed.slot(1), A)]).stores_done
    wait_until(lambda: done.update(testbed.step().stores_done) or done == {3: 1})
    assert testbed.tierd.wait(lambda tierd: Abort(reservations=(3,)) in tierd.of(Abort))
    assert testbed.worker.take_counts()["shards_refused"] == 1
    right: Ready = msgspec.structs.replace(wrong, shards=((0, size, True),), slot_bytes=(size,))
    testbed.tierd.say(right)
    wait_until(lambda: testbed.step() and testbed.epoch == 1)
