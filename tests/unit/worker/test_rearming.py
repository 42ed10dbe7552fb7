"""After an unexpected error of a copy a rank copies again, after a while and a few times."""

from __future__ import annotations

import time

import pytest
from tests.unit.worker.worker_testbeds import (
    WorkerTestbed,
    block_bytes,
    load_job,
    store_job,
    wait_until,
)

from kvtier.engines.common import rearming
from kvtier.engines.common.worker_state import Completions
from kvtier.tierd.wire import Deliver

A, B, C = (1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)
SHORT = (0.01, 0.01, 0.01)


def _break(testbed: WorkerTestbed, error: Exception, calls: int = 1) -> None:
    """Makes the next ``calls`` questions for the end of a copy raise."""
    original, left = testbed.engine.done, [calls]

    def done(handle: object) -> bool:
        if left[0]:
            left[0] -= 1
            raise error
        return original(handle)  # type: ignore[arg-type]

    testbed.engine.done = done  # type: ignore[method-assign]


def _counts(testbed: WorkerTestbed) -> dict[str, int]:
    return testbed.worker._counters.snapshot()


def _fail_once(testbed: WorkerTestbed, number: int, epoch: int) -> Completions:
    """A load during which the copies fail; returns its report."""
    _break(testbed, ZeroDivisionError("a bug"))
    found = testbed.step(loads=[load_job(number, A, slots=testbed.slots(1), epoch=epoch)])
    reports = [found]

    def reported() -> bool:
        reports.append(testbed.step())
        return any(each.loads for each in reports)

    wait_until(reported)
    return next(each for each in reports if each.loads)


def test_a_rank_whose_copies_failed_attaches_again_and_copies(
    testbed: WorkerTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rearming, "REARM_SECONDS", SHORT)
    testbed.pool()[testbed.slot(1) : testbed.slot(2)] = 11
    testbed.engine.hold()
    testbed.start(stores=[store_job(3, testbed.slot(5), B)])
    wait_until(lambda: testbed.engine.held)
    report = _fail_once(testbed, 7, 1)
    assert report.recving == {"request-7"}
    assert report.invalid_blocks == set(A), "nothing of it counts as loaded"
    assert testbed.tierd.dropped == ["copies failed: a bug"], "tierd closes the engine at once"
    assert testbed.tierd.wait(lambda tierd: tierd.reattached == [1]), "what ran has ended"
    assert testbed.engine.held == 0
    assert testbed.tierd.of(Deliver) == []
    testbed.engine.open = True
    testbed.tierd.welcome(2)
    wait_until(lambda: testbed.step() and testbed.epoch == 2)
    assert testbed.tierd.hellos[-1].drained_epoch == 1
    again = testbed.step(loads=[load_job(8, C, slots=testbed.slots(1), epoch=2)])
    wait_until(lambda: again.loads or again.loads.extend(testbed.step().loads))
    assert again.loads[0].keys_loaded == 1
    assert set(block_bytes(testbed.layout, C[0])) == {11}
    counts = _counts(testbed)
    assert (counts["thread_failures"], counts["thread_rearms"]) == (1, 1)
    assert testbed.worker.off_reason == ""


def test_no_copy_is_taken_before_the_time_is_over_and_closing_does_not_wait_for_it(
    testbed: WorkerTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rearming.REARM_SECONDS[0] >= 10
    monkeypatch.setattr(rearming, "REARM_SECONDS", (600.0,) * 3)
    _fail_once(testbed, 7, 1)
    found = testbed.step(
        loads=[load_job(8, B, slots=testbed.slots(1))],
        stores=[store_job(4, testbed.slot(6), C)],
    )
    assert [(each.load, each.reason) for each in found.loads] == [(8, "off")]
    assert testbed.worker.off_reason == "copies failed: a bug"
    assert found.stores_done == {4: 1}
    assert testbed.tierd.reattached == []
    started = time.monotonic()
    testbed.worker.shutdown()
    assert time.monotonic() - started < rearming.REARM_SECONDS[0] / 2
    assert testbed.tierd.closed, "its copies have ended"


def test_a_rank_gives_up_after_a_few_errors(
    testbed: WorkerTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rearming, "REARM_SECONDS", SHORT)
    for number in range(len(SHORT) + 1):
        epoch = number + 1
        report = _fail_once(testbed, 7 + number, epoch)
        assert report.recving == {f"request-{7 + number}"}
        if number < len(SHORT):
            count = number + 1
            assert testbed.tierd.wait(lambda tierd, n=count: len(tierd.reattached) == n)
            testbed.tierd.welcome(epoch + 1)
            wait_until(lambda n=epoch + 1: testbed.step() and testbed.epoch == n)
    thread = testbed.worker._thread
    assert thread is not None
    assert thread._ended.wait(60)
    assert len(testbed.tierd.dropped) == len(SHORT) + 1
    assert len(testbed.tierd.reattached) == len(SHORT)
    counts = _counts(testbed)
    assert (counts["thread_failures"], counts["thread_rearms"]) == (len(SHORT) + 1, len(SHORT))
    found = testbed.step(loads=[load_job(99, B, slots=testbed.slots(1), epoch=4)])
    assert [each.reason for each in found.loads] == ["off"]
    assert testbed.worker.off_reason == "copies failed: a bug"


def test_a_rank_whose_device_cannot_be_synchronized_does_not_copy_again(
    testbed: WorkerTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rearming, "REARM_SECONDS", SHORT)

    def lost() -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(testbed.engine, "_drain", lost)
    report = _fail_once(testbed, 7, 1)
    assert report.invalid_blocks == set(A)
    thread = testbed.worker._thread
    assert thread is not None
    assert thread._ended.wait(60)
    assert testbed.tierd.reattached == [], "no copy is known to have ended"
    assert testbed.tierd.dropped == ["copies failed: a bug"]
    assert "thread_rearms" not in _counts(testbed)
