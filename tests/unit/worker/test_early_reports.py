"""Loads that are reported while their last copies run, and what makes that safe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.unit.worker.worker_testbeds import RankTestbed, WorkerTestbed, load_job

from kvtier.engines.common import worker_loads
from kvtier.engines.vllm import worker as worker_module
from kvtier.tierd.wire import LoadPinned

A, B, C = (1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)
MANY_BYTES = 1 << 30


def _pinned_load(testbed: RankTestbed) -> None:
    """Its copies are submitted and do not end before ``move``."""
    testbed.engine.can_order = True
    testbed.engine.hold()
    testbed.add(load_job(7, A, B, slots=testbed.slots(1, 2)))
    testbed.run()
    testbed.loads.pin(7, 2)


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
    "obstacle",
    [
        "not pinned",
        "one key pinned",
        "pins forgotten",
        "much left",
        "slot reused",
        "stopped",
        "weights",
        "no order",
    ],
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
        loads.pin(7, 1 if obstacle == "one key pinned" else 2)
    if obstacle == "pins forgotten":
        loads.forget_pins()
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


class Sleeps:
    """The waits of the engine's thread, which take no time."""

    def __init__(self, during: Callable[[], None]) -> None:
        self.count = 0
        self._during = during
        self._thread = threading.current_thread()
        self._now = 0.0

    def sleep(self, seconds: float) -> None:
        assert threading.current_thread() is self._thread
        self.count += 1
        self._now += seconds
        self._during()

    def monotonic(self) -> float:
        return self._now if threading.current_thread() is self._thread else time.monotonic()


def _held(testbed: WorkerTestbed) -> None:
    testbed.engine.can_order = True
    testbed.engine.hold()


@pytest.mark.parametrize("answer", ["before the job", "while the step waits"])
def test_a_load_of_an_idle_engine_is_reported_in_the_step_that_submits_it(
    testbed: WorkerTestbed, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    """Each further step costs a millisecond or two, and more with several ranks."""
    _held(testbed)
    pinned = LoadPinned(load=7, keys=1)
    sleeps = Sleeps(lambda: testbed.tierd.say(pinned) if sleeps.count == 3 else None)
    monkeypatch.setattr(worker_module, "time", sleeps)
    if answer == "before the job":
        testbed.tierd.say(pinned)
    taken = testbed.step(loads=[load_job(7, A, slots=testbed.slots(1))], idle=True)
    assert taken.recving == {"request-7"}
    assert [(each.keys_loaded, each.copying) for each in taken.loads] == [(1, True)]
    assert sleeps.count == (0 if answer == "before the job" else 3)
    testbed.engine.move()
    assert [each.follows for each in testbed.step(idle=True).loads] == [True]


def test_a_step_without_tokens_waits_for_a_limited_time(
    testbed: WorkerTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    _held(testbed)
    sleeps = Sleeps(lambda: None)
    monkeypatch.setattr(worker_module, "time", sleeps)
    job = load_job(7, A, slots=testbed.slots(1))
    assert testbed.step(loads=[job], idle=True).loads == []
    waited = sleeps.count
    limit = round(worker_module.IDLE_WAIT_SECONDS / worker_module.IDLE_POLL_SECONDS) + 1
    assert 0 < waited <= limit
    testbed.engine.move()
    assert testbed.step(idle=True).recving == {"request-7"}
    assert sleeps.count == waited, "there is nothing to wait for"


@pytest.mark.parametrize("case", ["tokens", "much left", "another report", "no order"])
def test_a_step_does_not_wait_if_others_would_be_delayed_or_nothing_gained(
    testbed: WorkerTestbed, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    sleeps = Sleeps(lambda: None)
    monkeypatch.setattr(worker_module, "time", sleeps)
    testbed.engine.can_order = case != "no order"
    loads = [load_job(8, B, slots=testbed.slots(2))]
    if case == "another report":
        loads.insert(0, load_job(7, A))
    if case == "much left":
        monkeypatch.setattr(worker_module, "EARLY_BYTES", 1)
    testbed.engine.hold()
    taken = testbed.step(loads=loads, idle=case != "tokens")
    assert sleeps.count == 0
    assert [each.load for each in taken.loads] == ([7] if case == "another report" else [])


def test_a_load_of_an_idle_engine_waits_for_the_fingerprint_within_its_step(
    rank_testbed: RankTestbed,
) -> None:
    loads = rank_testbed.loads
    rank_testbed.engine.can_order = True
    rank_testbed.engine.hold()
    loads.weights_may_have_changed()
    job = load_job(7, A, slots=rank_testbed.slots(1))
    loads.pin(7, 1)
    loads.add([job], None, rank_testbed.clock.now, 1, assumed_weights="some")
    rank_testbed.run()
    assert loads.awaits_word(MANY_BYTES)
    assert not loads.awaits_word(0), "much is left to copy"
    rank_testbed.engine.move()
    rank_testbed.run()
    assert loads.awaits_word(0), "all is copied"
    loads.weights_known("some")
    assert not loads.awaits_word(MANY_BYTES)
    rank_testbed.run()
    assert rank_testbed.taken().recving == {"request-7"}


def test_pins_of_loads_that_never_come_are_forgotten(
    rank_testbed: RankTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_loads, "MAX_EARLY_PINS", 2)
    rank_testbed.engine.can_order = True
    rank_testbed.engine.hold()
    for number in (7, 8, 9):
        rank_testbed.loads.pin(number, 1)
    for number, blocks in ((7, A), (8, B), (9, C)):
        rank_testbed.add(load_job(number, blocks, slots=rank_testbed.slots(number - 6)))
    rank_testbed.run()
    rank_testbed.loads.report_early(MANY_BYTES)
    assert [each.load for each in rank_testbed.taken().loads] == [8, 9]


def test_pins_end_with_the_session(testbed: WorkerTestbed) -> None:
    """A new tierd, or a new session, has pinned nothing for loads of before."""
    _held(testbed)
    testbed.tierd.say(LoadPinned(load=7, keys=1))
    testbed.tierd.lose()
    assert testbed.tierd.wait(lambda tierd: bool(tierd.reattached))
    testbed.tierd.welcome(2)
    deadline = time.monotonic() + 60
    while testbed.epoch != 2 and time.monotonic() < deadline:
        testbed.step()
    taken = testbed.step(loads=[load_job(7, A, slots=testbed.slots(1), epoch=2)], idle=True)
    assert (testbed.epoch, taken.loads) == (2, [])
    testbed.engine.move()
    assert testbed.step(idle=True).recving == {"request-7"}
