"""Stores: every job is reported once, none before the device has stopped reading, and tierd hears what became of it."""

from __future__ import annotations

from tests.unit.worker.worker_rigs import Bench, store_job

from kvtier.tierd.wire import Abort, Deliver
from kvtier.transfer.engine import Direction

A, B = (1, 2, 3, 4), (5, 6, 7, 8)


def test_a_store_copies_the_chunk_and_then_delivers_and_reports(bench: Bench) -> None:
    fence = object()
    bench.engine.hold()
    bench.stores.add([store_job(3, bench.slot(2), A)], fence, epoch=1)
    bench.run()
    assert bench.sent == []
    assert bench.taken().stores_done == {}, "the device still reads the blocks"
    bench.engine.move()
    bench.run()
    assert bench.sent == [Deliver(reservations=(3,))]
    assert bench.taken().stores_done == {3: 1}
    assert bench.engine.submitted[0][2] is fence
    pool = bench.engine.pool
    assert pool is not None
    stored = pool.memory[bench.slot(2) : bench.slot(3)].tobytes()
    assert stored == b"".join(bench.page_bytes(block) for block in A)


def test_stores_of_one_step_share_a_delivery(bench: Bench) -> None:
    bench.stores.add(
        [store_job(3, bench.slot(0), A), store_job(4, bench.slot(1), B)], None, epoch=1
    )
    bench.run()
    assert bench.sent == [Deliver(reservations=(3, 4))]


def test_stores_of_different_steps_wait_for_different_fences(bench: Bench) -> None:
    first, second = object(), object()
    bench.stores.add([store_job(3, bench.slot(0), A)], first, epoch=1)
    bench.stores.add([store_job(4, bench.slot(1), B)], second, epoch=1)
    bench.run()
    assert [after for _, _, after in bench.engine.submitted] == [first, second]


def test_a_slot_granted_by_another_tierd_is_not_touched(bench: Bench) -> None:
    bench.stores.add([store_job(3, bench.slot(0), A, epoch=1)], None, epoch=2)
    bench.stores.add([store_job(4, bench.slot(0), A, epoch=1)], None, epoch=0)
    bench.run()
    assert bench.engine.submitted == []
    assert bench.sent == [Abort(reservations=(3, 4))]
    assert bench.taken().stores_done == {3: 1, 4: 1}


def test_an_address_outside_the_pool_is_aborted(bench: Bench) -> None:
    bench.stores.add([store_job(3, 1 << 60, A), store_job(4, bench.slot(1), B)], None, epoch=1)
    bench.run()
    assert bench.sent == [Deliver(reservations=(4,)), Abort(reservations=(3,))]
    assert bench.taken().stores_done == {3: 1, 4: 1}


def test_a_copy_that_fails_is_aborted_and_reported(bench: Bench) -> None:
    bench.engine.hold()
    bench.stores.add([store_job(3, bench.slot(0), A)], None, epoch=1)
    bench.run()
    bench.engine.fail("device error")
    bench.run()
    assert bench.sent == [Abort(reservations=(3,))]
    assert bench.taken().stores_done == {3: 1}
    assert bench.engine.drains == 1


def test_the_same_reservation_twice_is_one_report(bench: Bench) -> None:
    bench.stores.add(
        [store_job(3, bench.slot(0), A), store_job(3, bench.slot(0), A)], None, epoch=1
    )
    bench.run()
    assert bench.taken().stores_done == {3: 1}
    assert bench.counters.snapshot()["duplicate_stores"] == 1


def test_no_more_is_in_flight_than_the_bound(bench: Bench) -> None:
    bench.engine._limit_bytes = 2 * bench.slot_bytes
    bench.engine.hold()
    bench.stores.add([store_job(n, bench.slot(n), A) for n in range(5)], None, epoch=1)
    bench.run()
    assert bench.engine.in_flight_bytes(Direction.TO_HOST) == 2 * bench.slot_bytes
    while bench.engine.held:
        bench.engine.move(1)
        bench.run()
    assert bench.taken().stores_done == dict.fromkeys(range(5), 1)


def test_what_is_dropped_is_reported_but_never_delivered(bench: Bench) -> None:
    bench.engine._limit_bytes = bench.slot_bytes
    bench.engine.hold()
    bench.stores.add(
        [store_job(3, bench.slot(0), A), store_job(4, bench.slot(1), B)], None, epoch=1
    )
    bench.run()
    bench.engine.synchronize()
    bench.stores.drop_all()
    bench.run()
    assert bench.taken().stores_done == {3: 1, 4: 1}
    assert bench.sent == []
