"""Stores: each job is reported once, after the device has stopped reading, and to tierd."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.worker.worker_testbeds import RankTestbed, store_job

from kvtier.engines.common.worker_stores import WorkerStores
from kvtier.tierd.wire import Abort, Deliver
from kvtier.transfer.engine import Direction

A, B = (1, 2, 3, 4), (5, 6, 7, 8)


def test_a_store_copies_the_chunk_and_then_delivers_and_reports(rank_testbed: RankTestbed) -> None:
    fence = object()
    rank_testbed.engine.hold()
    rank_testbed.stores.add([store_job(3, rank_testbed.slot(2), A)], fence, epoch=1)
    rank_testbed.run()
    assert rank_testbed.sent == []
    assert rank_testbed.taken().stores_done == {}, "the device still reads the blocks"
    rank_testbed.engine.move()
    rank_testbed.run()
    assert rank_testbed.sent == [Deliver(reservations=(3,))]
    assert rank_testbed.taken().stores_done == {3: 1}
    assert rank_testbed.engine.submitted[0][2] is fence
    pool = rank_testbed.engine.pool
    assert pool is not None
    stored = pool.memory[rank_testbed.slot(2) : rank_testbed.slot(3)].tobytes()
    assert stored == b"".join(rank_testbed.page_bytes(block) for block in A)


def test_stores_of_one_step_share_a_delivery(rank_testbed: RankTestbed) -> None:
    rank_testbed.stores.add(
        [store_job(3, rank_testbed.slot(0), A), store_job(4, rank_testbed.slot(1), B)],
        None,
        epoch=1,
    )
    rank_testbed.run()
    assert rank_testbed.sent == [Deliver(reservations=(3, 4))]


def test_stores_of_different_steps_wait_for_different_fences(rank_testbed: RankTestbed) -> None:
    first, second = object(), object()
    rank_testbed.stores.add([store_job(3, rank_testbed.slot(0), A)], first, epoch=1)
    rank_testbed.stores.add([store_job(4, rank_testbed.slot(1), B)], second, epoch=1)
    rank_testbed.run()
    assert [after for _, _, after in rank_testbed.engine.submitted] == [first, second]


def test_a_slot_granted_by_another_tierd_is_not_touched(rank_testbed: RankTestbed) -> None:
    rank_testbed.stores.add([store_job(3, rank_testbed.slot(0), A, epoch=1)], None, epoch=2)
    rank_testbed.stores.add([store_job(4, rank_testbed.slot(0), A, epoch=1)], None, epoch=0)
    rank_testbed.run()
    assert rank_testbed.engine.submitted == []
    assert rank_testbed.sent == [Abort(reservations=(3, 4))]
    assert rank_testbed.taken().stores_done == {3: 1, 4: 1}


def test_an_address_outside_the_pool_is_aborted(rank_testbed: RankTestbed) -> None:
    rank_testbed.stores.add(
        [store_job(3, 1 << 60, A), store_job(4, rank_testbed.slot(1), B)], None, epoch=1
    )
    rank_testbed.run()
    assert rank_testbed.sent == [Deliver(reservations=(4,)), Abort(reservations=(3,))]
    assert rank_testbed.taken().stores_done == {3: 1, 4: 1}


def test_a_copy_that_fails_is_aborted_and_reported(rank_testbed: RankTestbed) -> None:
    rank_testbed.engine.hold()
    rank_testbed.stores.add([store_job(3, rank_testbed.slot(0), A)], None, epoch=1)
    rank_testbed.run()
    rank_testbed.engine.fail("device error")
    rank_testbed.run()
    assert rank_testbed.sent == [Abort(reservations=(3,))]
    assert rank_testbed.taken().stores_done == {3: 1}


def test_the_same_reservation_twice_is_one_report(rank_testbed: RankTestbed) -> None:
    rank_testbed.stores.add(
        [store_job(3, rank_testbed.slot(0), A), store_job(3, rank_testbed.slot(0), A)],
        None,
        epoch=1,
    )
    rank_testbed.run()
    assert rank_testbed.taken().stores_done == {3: 1}
    assert rank_testbed.counters.snapshot()["duplicate_stores"] == 1


def test_no_more_is_in_flight_than_the_bound(rank_testbed: RankTestbed) -> None:
    rank_testbed.engine.limit(Direction.TO_HOST, 2 * rank_testbed.slot_bytes)
    rank_testbed.engine.hold()
    rank_testbed.stores.add(
        [store_job(n, rank_testbed.slot(n), A) for n in range(5)], None, epoch=1
    )
    rank_testbed.run()
    assert rank_testbed.engine.in_flight_bytes(Direction.TO_HOST) == 2 * rank_testbed.slot_bytes
    while rank_testbed.engine.held:
        rank_testbed.engine.move(1)
        rank_testbed.run()
    assert rank_testbed.taken().stores_done == dict.fromkeys(range(5), 1)


def test_dropped_stores_are_reported_but_not_delivered(rank_testbed: RankTestbed) -> None:
    rank_testbed.engine.limit(Direction.TO_HOST, rank_testbed.slot_bytes)
    rank_testbed.engine.hold()
    rank_testbed.stores.add(
        [store_job(3, rank_testbed.slot(0), A), store_job(4, rank_testbed.slot(1), B)],
        None,
        epoch=1,
    )
    rank_testbed.run()
    rank_testbed.engine.synchronize()
    rank_testbed.stores.drop_all()
    rank_testbed.run()
    assert rank_testbed.taken().stores_done == {3: 1, 4: 1}
    assert rank_testbed.sent == []


def test_a_rank_whose_bytes_another_rank_writes_stores_nothing(rank_testbed: RankTestbed) -> None:
    """As with MLA under tensor parallelism. vLLM still waits for every rank's report."""
    context = replace(rank_testbed.context, shards=rank_testbed.shards(0, writes=False))
    stores = WorkerStores(context, rank_testbed.sent.append)
    stores.add([store_job(3, rank_testbed.slot(2), A)], None, epoch=1)
    stores.advance()
    assert rank_testbed.engine.submitted == []
    assert rank_testbed.sent == []
    assert rank_testbed.taken().stores_done == {3: 1}
    # Rank 0 counts the chunks, also where its stage has no layer of the counted group.
    assert rank_testbed.context.counters.snapshot()["stores_delivered"] == 1
