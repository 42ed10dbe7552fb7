"""tierd dies, or asks to drain, while copies run. The slot of a late copy belongs to somebody else by then."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.held_copies import HeldCopyEngine, UndrainedCopyEngine
from tests.unit.worker.worker_rigs import (
    Rig,
    block_bytes,
    load_job,
    make_rig,
    store_job,
    wait_until,
)

from kvtier.engines.vllm.worker_state import Completions
from kvtier.tierd.wire import Deliver

A, B, C = (1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)


def _collect(rig: Rig, loads: int = 0, stores: int = 0) -> Completions:
    """Steps until that many reports have come, and a few more: nothing may come twice."""
    total = Completions()

    def step() -> bool:
        taken = rig.step()
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


def test_tierd_lost_during_a_load_drains_it_and_fails_the_rest(rig: Rig) -> None:
    rig.pool()[rig.slot(1) : rig.slot(2)] = 11
    rig.engine.hold()
    rig.step(loads=[load_job(7, A, B, C), load_job(8, (13, 14))])
    rig.tierd.slots(7, rig.slot(1), rig.slot(2))
    wait_until(lambda: rig.engine.held)
    rig.tierd.lose()
    total = _collect(rig, loads=2)
    first, second = sorted(total.loads, key=lambda result: result.load)
    assert first.reason == second.reason == "lost"
    assert first.keys_loaded in (1, 2)
    assert second.keys_loaded == 0
    assert set(block_bytes(rig.layout, 1)) == {11}, "what is reported as loaded is there"
    assert total.invalid_blocks >= set(C) | {13, 14}
    assert total.recving == {"request-7", "request-8"}
    assert rig.tierd.wait(lambda tierd: tierd.reattached == [1])
    assert rig.epoch == 0


def test_a_store_in_flight_when_tierd_is_lost_is_drained_reported_and_not_delivered(
    rig: Rig,
) -> None:
    rig.engine.hold()
    rig.step(stores=[store_job(3, rig.slot(1), A), store_job(4, rig.slot(2), B)])
    wait_until(lambda: rig.engine.held)
    rig.tierd.lose()
    assert _collect(rig, stores=2).stores_done == {3: 1, 4: 1}
    assert rig.tierd.of(Deliver) == []
    assert rig.tierd.wait(lambda tierd: tierd.reattached == [1])
    assert rig.engine.held == 0


def test_after_a_loss_the_worker_attaches_to_the_next_tierd_with_what_it_drained(rig: Rig) -> None:
    rig.tierd.lose()
    assert rig.tierd.wait(lambda tierd: tierd.reattached == [1])
    rig.tierd.welcome(2)
    wait_until(lambda: rig.step() and rig.epoch == 2)
    assert rig.tierd.hellos[-1].drained_epoch == 1
    rig.step(stores=[store_job(3, rig.slot(1), A, epoch=1), store_job(4, rig.slot(2), B, epoch=2)])
    _collect(rig, stores=2)
    assert [message.reservations for message in rig.tierd.of(Deliver)] == [(4,)]  # type: ignore[attr-defined]


def test_a_pool_that_the_next_tierd_made_anew_is_mapped_anew(rig: Rig) -> None:
    rig.tierd.lose()
    assert rig.tierd.wait(lambda tierd: tierd.reattached == [1])
    fresh = rig.directory / "fresh"
    fresh.write_bytes(bytes(12 * rig.slot_bytes))
    fresh.rename(rig.directory / "pool")
    rig.tierd.welcome(2)
    wait_until(lambda: rig.step() and rig.epoch == 2)
    rig.step(stores=[store_job(3, rig.slot(1), A, epoch=2)])
    _collect(rig, stores=1)
    assert rig.pool()[rig.slot(1) : rig.slot(2)].any(), "the bytes are in the new file"


def test_a_tierd_lost_before_its_pool_is_mapped_leaves_a_mapping_for_the_next_one(
    tmp_path: Path,
) -> None:
    rig = make_rig(tmp_path, attach=False)
    try:
        rig.tierd.welcome(1)
        rig.tierd.lose()
        assert rig.tierd.wait(lambda tierd: tierd.reattached == [1])
        rig.tierd.welcome(2)
        wait_until(lambda: rig.step() and rig.epoch == 2)
        rig.step(stores=[store_job(3, rig.slot(1), A, epoch=2)])
        _collect(rig, stores=1)
        assert rig.tierd.wait(lambda tierd: bool(tierd.of(Deliver)))
    finally:
        rig.worker.shutdown()


def test_announcements_of_a_lost_tierd_are_forgotten(rig: Rig) -> None:
    rig.tierd.slots(7, rig.slot(1))
    rig.tierd.lose()
    assert rig.tierd.wait(lambda tierd: tierd.reattached == [1])
    rig.tierd.welcome(2)
    wait_until(lambda: rig.step() and rig.epoch == 2)
    rig.step(loads=[load_job(7, A, limit=0.05)])
    total = _collect(rig, loads=1)
    assert (total.loads[0].keys_loaded, total.loads[0].reason) == (0, "limit")


@pytest.mark.parametrize(
    ("engine", "intact"), [(HeldCopyEngine, True), (UndrainedCopyEngine, False)]
)
def test_without_draining_a_late_store_overwrites_what_the_next_tierd_put_there(
    tmp_path: Path, engine: type[HeldCopyEngine], intact: bool
) -> None:
    """The control shows that the rule is needed: the same run with a worker that only claims to have drained."""
    rig = make_rig(tmp_path, engine)
    try:
        rig.engine.hold()
        rig.step(stores=[store_job(3, rig.slot(1), A)])
        wait_until(lambda: rig.engine.held)

        def next_tierd(drained_epoch: int) -> None:
            rig.pool()[rig.slot(1) : rig.slot(2)] = 77

        rig.tierd.on_reattach = next_tierd
        rig.tierd.lose()
        assert rig.tierd.wait(lambda tierd: tierd.reattached == [1])
        rig.engine.move()
        assert bool((rig.pool()[rig.slot(1) : rig.slot(2)] == 77).all()) is intact
    finally:
        rig.worker.shutdown()


@pytest.mark.parametrize(
    ("engine", "intact"), [(HeldCopyEngine, True), (UndrainedCopyEngine, False)]
)
def test_without_draining_a_late_load_fills_blocks_with_what_the_slot_holds_by_then(
    tmp_path: Path, engine: type[HeldCopyEngine], intact: bool
) -> None:
    rig = make_rig(tmp_path, engine)
    try:
        rig.pool()[rig.slot(1) : rig.slot(2)] = 11
        rig.engine.hold()
        rig.step(loads=[load_job(7, A)])
        rig.tierd.slots(7, rig.slot(1))
        wait_until(lambda: rig.engine.held)

        def next_tierd(drained_epoch: int) -> None:
            rig.pool()[rig.slot(1) : rig.slot(2)] = 77

        rig.tierd.on_reattach = next_tierd
        rig.tierd.lose()
        assert rig.tierd.wait(lambda tierd: tierd.reattached == [1])
        rig.engine.move()
        total = _collect(rig, loads=1)
        assert total.loads[0].keys_loaded == 1
        assert (set(block_bytes(rig.layout, 1)) == {11}) is intact
    finally:
        rig.worker.shutdown()
