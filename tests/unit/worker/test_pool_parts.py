"""A rank maps and registers only the range of the pool that tierd names."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.unit.worker.worker_testbeds import (
    CHUNK,
    GEOMETRY,
    WorkerTestbed,
    block_bytes,
    make_worker_testbed,
    store_job,
    wait_until,
)

from kvtier.engines.common.worker_state import RankShards
from kvtier.planner import GroupKind, KVCacheGroup, Planner
from kvtier.tierd.wire import WHOLE_POOL, Deliver, Ready
from kvtier.transfer.host_pool import HostPool, open_pool

A = (1, 2, 3, 4)


class Recorder:
    """Registrations of ranges of the pool: (begin, end), in order."""

    def __init__(self) -> None:
        self.registered: list[tuple[int, int]] = []
        self.held: list[tuple[int, int]] = []
        self.lock = threading.Lock()

    def register(self, pool: HostPool, *_: object) -> tuple[HostPool, tuple[int, ...]]:
        with self.lock:
            self.registered.append(pool.span)
            self.held.append(pool.span)
        return pool, (0,)

    def unregister(self, pool: HostPool, _: object) -> None:
        with self.lock:
            self.held.remove(pool.span)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setattr("kvtier.engines.vllm.worker.register_pool", found.register)
    monkeypatch.setattr("kvtier.engines.vllm.worker.unregister_pool", found.unregister)
    return found


@pytest.fixture
def rank(tmp_path: Path, recorder: Recorder) -> Iterator[WorkerTestbed]:
    """A rank that tierd has not welcomed. It expects to be the second of two."""
    testbed = make_worker_testbed(tmp_path, attach=False)
    groups = [KVCacheGroup(GroupKind.FULL, GEOMETRY.block)]
    testbed.worker._planner = Planner.build(groups, CHUNK * GEOMETRY.block, GEOMETRY.block, 2)
    testbed.worker._rank = 1
    yield testbed
    testbed.worker.shutdown()


def tell(testbed: WorkerTestbed, part: int) -> None:
    """tierd welcomes the rank and names one of two parts; -1: none."""
    tierd, size, half = testbed.tierd, testbed.slot_bytes, 6 * testbed.slot_bytes
    begin = part * half if part >= 0 else 0
    span = (begin, begin + half) if part >= 0 else WHOLE_POOL
    ready = Ready(
        namespace="n",
        slot_bytes=(2 * size,),
        persistent=True,
        shards=((begin, size, True),),
        span=span,
    )
    sink = tierd._sink
    tierd._sink = lambda message: sink(ready if isinstance(message, Ready) else message)
    tierd.welcome(1)
    tierd._sink = sink


@pytest.mark.parametrize("part", [1, 0, -1])
def test_a_rank_registers_its_range_alone(
    rank: WorkerTestbed, recorder: Recorder, part: int
) -> None:
    half = 6 * rank.slot_bytes
    own, whole = (half, 2 * half), (0, 2 * half)
    tell(rank, part)
    wait_until(lambda: rank.step() and rank.epoch == 1)
    named = {1: own, 0: (0, half), -1: whole}[part]
    # What it expected is right, or undone. A slow rank may be asked for the right one twice.
    assert list(dict.fromkeys(recorder.registered)) == ([own] if part == 1 else [own, named])
    assert recorder.held == [named]
    pool = rank.engine.pool
    assert pool is not None
    assert pool.span == named


@pytest.mark.parametrize("part", [0, 1])
def test_a_store_goes_to_the_part_and_nowhere_else(rank: WorkerTestbed, part: int) -> None:
    size, half = rank.slot_bytes, 6 * rank.slot_bytes
    tell(rank, part)
    wait_until(lambda: rank.step() and rank.epoch == 1)
    rank.engine.open = True
    rank.start(stores=[store_job(3, 2 * size, A)])
    wait_until(lambda: rank.step() and Deliver(reservations=(3,)) in rank.tierd.of(Deliver))
    where = part * half + 2 * size
    content = rank.tierd.pool.read_bytes()
    expected = b"".join(block_bytes(rank.layout, block) for block in A)
    assert expected in content[where : where + size] or len(expected) <= size
    assert any(content[where : where + size])
    assert not any(content[:where])
    assert not any(content[where + size :])


def test_a_slot_beyond_the_part_is_refused(rank: WorkerTestbed) -> None:
    tell(rank, 0)
    wait_until(lambda: rank.step() and rank.epoch == 1)
    rank.engine.open = True
    done = rank.step(stores=[store_job(3, 6 * rank.slot_bytes, A)]).stores_done
    wait_until(lambda: done.update(rank.step().stores_done) or done == {3: 1})
    assert rank.tierd.of(Deliver) == []
    assert not any(rank.tierd.pool.read_bytes())


@pytest.mark.parametrize("span", [(-4096, 0), (8192, 4096), (100, 8192), (0, 100)])
def test_a_range_that_is_none_is_refused(span: tuple[int, int]) -> None:
    shards = RankShards((100,))
    ready = Ready(
        namespace="n", slot_bytes=(4096,), persistent=True, shards=((0, 100, True),), span=span
    )
    assert "range of whole pages" in shards.set(ready)
    assert not shards.known


def test_a_shard_before_its_range_or_behind_its_slot_is_refused() -> None:
    shards = RankShards((100,))
    ready = Ready(
        namespace="n",
        slot_bytes=(8192,),
        persistent=True,
        shards=((1 << 20, 100, True),),
        span=(1 << 20, 2 << 20),
    )
    assert shards.set(ready) == ""
    assert shards.offset(0) == 0
    assert shards.span(8 << 20) == (1 << 20, 2 << 20)
    for offset in (0, (1 << 20) + 8192):
        wrong: Ready = msgspec.structs.replace(ready, shards=((offset, 100, True),))
        assert "within a slot" in shards.set(wrong)
        assert shards.span(8 << 20) == (0, 8 << 20)


def test_a_part_is_mapped_alone(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    path.write_bytes(bytes(range(4)) * 16384)
    pool = open_pool(path, 16384, 32768)
    assert pool.span == (32768, 49152)
    pool.memory[:] = 9
    content = path.read_bytes()
    assert content == bytes(range(4)) * 8192 + bytes([9]) * 16384 + bytes(range(4)) * 4096
    with pytest.raises(ValueError, match="must be at least"):
        open_pool(path, 65536, 4096)
