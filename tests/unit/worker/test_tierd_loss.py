"""tierd is lost while copies run; a late copy would reach a slot that holds another object."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.held_copies import HeldCopyEngine, UndrainedCopyEngine
from tests.unit.worker.worker_testbeds import (
    WorkerTestbed,
    block_bytes,
    load_job,
    make_worker_testbed,
    store_job,
    wait_until,
)

from kvtier.engines.common.worker_state import Completions
from kvtier.tierd.wire import Deliver

A, B, C = (1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)


def _collect(testbed: WorkerTestbed, loads: int = 0, stores: int = 0) -> Completions:
    """Steps until that many reports have come, and a few more: nothing may come twice."""
    total = Completions()

    def step() -> bool:
        taken = testbed.step()
        assert not taken.recving & total.recving
        assert not set(taken.stores_done) & set(total.stores_done)
        total.loads.extend(taken.loads)
        total.recving.update(taken.recving)
        total.invalid_blocks.update(taken.invalid_blocks)
        total.stores_done.update(taken.stores_done)
        return len(total.loads) >= loads and len(total.stores_done) >= stores

    wait_until(step)
    for _ in range(5):
        step()
    assert (len(total.loads), len(total.stores_done)) == (loads, stores)
    return total


def test_tierd_lost_during_a_load_drains_it_and_fails_the_rest(testbed: WorkerTestbed) -> None:
    testbed.pool()[testbed.slot(1) : testbed.slot(2)] = 11
    testbed.engine.hold()
    testbed.start(
        loads=[
            load_job(7, A, B, C, slots=testbed.slots(1, 2)),
            load_job(8, (13, 14, 15, 16), slots=testbed.slots(3)),
        ]
    )
    wait_until(lambda: testbed.engine.held)
    testbed.tierd.lose()
    total = _collect(testbed, loads=2)
    first, second = sorted(total.loads, key=lambda result: result.load)
    assert first.reason == "lost"
    assert second.reason == ("" if second.keys_loaded else "lost")
    assert first.keys_loaded in (1, 2)
    assert second.keys_loaded in (0, 1)
    assert set(block_bytes(testbed.layout, 1)) == {11}, "what is reported as loaded is there"
    assert total.invalid_blocks >= set(C)
    assert total.recving == {"request-7", "request-8"}
    assert testbed.tierd.wait(lambda tierd: tierd.reattached == [1])
    assert testbed.epoch == 0


def test_a_store_in_flight_when_tierd_is_lost_is_drained_reported_and_not_delivered(
    testbed: WorkerTestbed,
) -> None:
    testbed.engine.hold()
    testbed.start(stores=[store_job(3, testbed.slot(1), A), store_job(4, testbed.slot(2), B)])
    wait_until(lambda: testbed.engine.held)
    testbed.tierd.lose()
    assert _collect(testbed, stores=2).stores_done == {3: 1, 4: 1}
    assert testbed.tierd.of(Deliver) == []
    assert testbed.tierd.wait(lambda tierd: tierd.reattached == [1])
    assert testbed.engine.held == 0


def test_after_a_loss_the_worker_attaches_to_the_next_tierd_with_what_it_drained(
    testbed: WorkerTestbed,
) -> None:
    testbed.tierd.lose()
    assert testbed.tierd.wait(lambda tierd: tierd.reattached == [1])
    testbed.tierd.welcome(2)
    wait_until(lambda: testbed.step() and testbed.epoch == 2)
    assert testbed.tierd.hellos[-1].drained_epoch == 1
    testbed.start(
        stores=[
            store_job(3, testbed.slot(1), A, epoch=1),
            store_job(4, testbed.slot(2), B, epoch=2),
        ]
    )
    _collect(testbed, stores=2)
    assert [message.reservations for message in testbed.tierd.of(Deliver)] == [(4,)]  # type: ignore[attr-defined]


def test_a_new_pool_file_is_mapped_again(testbed: WorkerTestbed) -> None:
    testbed.tierd.lose()
    assert testbed.tierd.wait(lambda tierd: tierd.reattached == [1])
    fresh = testbed.directory / "fresh"
    fresh.write_bytes(bytes(12 * testbed.slot_bytes))
    fresh.rename(testbed.directory / "pool")
    testbed.tierd.welcome(2)
    wait_until(lambda: testbed.step() and testbed.epoch == 2)
    testbed.start(stores=[store_job(3, testbed.slot(1), A, epoch=2)])
    _collect(testbed, stores=1)
    assert testbed.pool()[testbed.slot(1) : testbed.slot(2)].any(), "the bytes are in the new file"


def test_a_tierd_lost_before_its_pool_is_mapped_leaves_a_mapping_for_the_next_one(
    tmp_path: Path,
) -> None:
    testbed = make_worker_testbed(tmp_path, attach=False)
    try:
        testbed.tierd.welcome(1)
        testbed.tierd.lose()
        assert testbed.tierd.wait(lambda tierd: tierd.reattached == [1])
        testbed.tierd.welcome(2)
        wait_until(lambda: testbed.step() and testbed.epoch == 2)
        testbed.start(stores=[store_job(3, testbed.slot(1), A, epoch=2)])
        _collect(testbed, stores=1)
        assert testbed.tierd.wait(lambda tierd: bool(tierd.of(Deliver)))
    finally:
        testbed.worker.shutdown()


def test_slots_that_a_lost_tierd_named_are_not_read(testbed: WorkerTestbed) -> None:
    testbed.tierd.lose()
    assert testbed.tierd.wait(lambda tierd: tierd.reattached == [1])
    testbed.tierd.welcome(2)
    wait_until(lambda: testbed.step() and testbed.epoch == 2)
    before = len(testbed.engine.submitted)
    testbed.start(loads=[load_job(7, A, slots=testbed.slots(1), epoch=1)])
    total = _collect(testbed, loads=1)
    assert (total.loads[0].keys_loaded, total.loads[0].reason) == (0, "epoch")
    assert len(testbed.engine.submitted) == before


@pytest.mark.parametrize(
    ("engine", "intact"), [(HeldCopyEngine, True), (UndrainedCopyEngine, False)]
)
def test_without_draining_a_late_store_overwrites_what_the_next_tierd_put_there(
    tmp_path: Path, engine: type[HeldCopyEngine], intact: bool
) -> None:
    """The control: without draining, the same run shows that the rule is needed."""
    testbed = make_worker_testbed(tmp_path, engine)
    try:
        testbed.engine.hold()
        testbed.start(stores=[store_job(3, testbed.slot(1), A)])
        wait_until(lambda: testbed.engine.held)

        def next_tierd(drained_epoch: int) -> None:
            testbed.pool()[testbed.slot(1) : testbed.slot(2)] = 77

        testbed.tierd.on_reattach = next_tierd
        testbed.tierd.lose()
        assert testbed.tierd.wait(lambda tierd: tierd.reattached == [1])
        testbed.engine.move()
        assert bool((testbed.pool()[testbed.slot(1) : testbed.slot(2)] == 77).all()) is intact
    finally:
        testbed.worker.shutdown()


@pytest.mark.parametrize(
    ("engine", "intact"), [(HeldCopyEngine, True), (UndrainedCopyEngine, False)]
)
def test_without_draining_a_late_load_fills_blocks_with_what_the_slot_holds_by_then(
    tmp_path: Path, engine: type[HeldCopyEngine], intact: bool
) -> None:
    testbed = make_worker_testbed(tmp_path, engine)
    try:
        testbed.pool()[testbed.slot(1) : testbed.slot(2)] = 11
        testbed.engine.hold()
        testbed.start(loads=[load_job(7, A, slots=testbed.slots(1))])
        wait_until(lambda: testbed.engine.held)

        def next_tierd(drained_epoch: int) -> None:
            testbed.pool()[testbed.slot(1) : testbed.slot(2)] = 77

        testbed.tierd.on_reattach = next_tierd
        testbed.tierd.lose()
        assert testbed.tierd.wait(lambda tierd: tierd.reattached == [1])
        testbed.engine.move()
        total = _collect(testbed, loads=1)
        assert total.loads[0].keys_loaded == 1
        assert (set(block_bytes(testbed.layout, 1)) == {11}) is intact
    finally:
        testbed.worker.shutdown()
