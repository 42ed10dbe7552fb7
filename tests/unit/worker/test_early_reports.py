"""Loads that are reported while their last copies run, and what makes that safe."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.worker.worker_testbeds import RankTestbed, load_job

A, B, C = (1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)
MANY_BYTES = 1 << 30


def _pinned_load(testbed: RankTestbed) -> None:
    """Its copies are submitted and do not end before ``move``."""
    testbed.engine.can_order = True
    testbed.engine.hold()
    testbed.add(load_job(7, A, B, slots=testbed.slots(1, 2)))
    testbed.run()
    testbed.loads.pin([7])


def test_a_pinned_load_is_reported_while_its_last_copies_run(rank_testbed: RankTestbed) -> None:
    _pinned_load(rank_testbed)
    rank_testbed.loads.report_early(MANY_BYTES)
    rank_testbed.loads.report_early(MANY_BYTES)
    taken = rank_testbed.taken()
    assert taken.recving == {"request-7"}
    assert [(each.keys_loaded, each.copying, each.follows) for each in taken.loads] == [
        (2, True, False)
    ]
    rank_testbed.loads.order_kernels()
    assert len(rank_testbed.engine.ordered) == 1, "kernels of the next step wait for the copies"
    rank_testbed.engine.move()
    rank_testbed.run()
    rank_testbed.loads.order_kernels()
    assert len(rank_testbed.engine.ordered) == 1
    taken = rank_testbed.taken()
    assert (taken.recving, taken.invalid_blocks) == (set(), set()), "vLLM has had its report"
    assert [(each.keys_loaded, each.copying, each.follows) for each in taken.loads] == [
        (2, False, True)
    ]


@pytest.mark.parametrize(
    "obstacle", ["not pinned", "much left", "slot reused", "stopped", "weights", "no order"]
)
def test_a_load_is_not_reported_early_without_every_condition(
    rank_testbed: RankTestbed, obstacle: str
) -> None:
    loads, engine = rank_testbed.loads, rank_testbed.engine
    engine.can_order = obstacle != "no order"
    engine.hold()
    job = load_job(7, A, B, slots=rank_testbed.slots(1, 2))
    if obstacle == "weights":
        loads.weights_may_have_changed()
        loads.add([job], None, rank_testbed.clock.now, 1, assumed_weights="some")
    else:
        rank_testbed.add(job)
    rank_testbed.run()
    if obstacle != "not pinned":
        loads.pin([7])
    if obstacle == "stopped":
        loads.cancel([7])
    if obstacle == "slot reused":
        rank_testbed.reuse(2, 99)
    loads.report_early(1 if obstacle == "much left" else MANY_BYTES)
    assert rank_testbed.taken().loads == []


@pytest.mark.parametrize("event", ["lost", "cancelled", "identity"])
def test_a_load_that_was_reported_runs_to_its_end(rank_testbed: RankTestbed, event: str) -> None:
    _pinned_load(rank_testbed)
    rank_testbed.loads.report_early(MANY_BYTES)
    if event == "cancelled":
        rank_testbed.loads.cancel([7])
    elif event == "identity":
        rank_testbed.loads.weights_may_have_changed()
    else:
        rank_testbed.loads.stop_all(event)
    rank_testbed.engine.move()
    rank_testbed.run()
    first, second = rank_testbed.taken().loads
    assert (first.keys_loaded, second.keys_loaded, second.reason) == (2, 2, "")


def test_the_request_of_a_reported_load_may_load_again(rank_testbed: RankTestbed) -> None:
    _pinned_load(rank_testbed)
    rank_testbed.loads.report_early(MANY_BYTES)
    rank_testbed.taken()
    again = replace(load_job(8, C, slots=rank_testbed.slots(3)), request_id="request-7")
    rank_testbed.add(again)
    rank_testbed.run()
    rank_testbed.engine.move()
    rank_testbed.run()
    taken = rank_testbed.taken()
    assert taken.recving == {"request-7"}
    assert {each.load: each.keys_loaded for each in taken.loads} == {7: 2, 8: 1}
