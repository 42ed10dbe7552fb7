"""The worker side when the weights may have changed, and while the engine sleeps."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.unit.worker.worker_testbeds import (
    RankTestbed,
    WorkerTestbed,
    load_job,
    store_job,
    wait_until,
)

from kvtier.engines.common.worker_loads import IDENTITY_CHANGED
from kvtier.engines.vllm import weights
from kvtier.engines.vllm.metadata import StepMetadata
from kvtier.tierd.wire import Abort, Deliver

A, B = (1, 2, 3, 4), (5, 6, 7, 8)


def test_a_voided_store_is_not_delivered(rank_testbed: RankTestbed) -> None:
    """Its blocks are given back, so a kernel may write them while the copy reads."""
    rank_testbed.engine.hold()
    jobs = [store_job(3, rank_testbed.slot(0), A), store_job(4, rank_testbed.slot(1), B)]
    rank_testbed.stores.add(jobs, None, epoch=1)
    rank_testbed.run()
    rank_testbed.stores.void((3,))
    assert rank_testbed.sent == [], "the copy still writes into the slot"
    rank_testbed.engine.move()
    rank_testbed.run()
    assert rank_testbed.sent == [Deliver(reservations=(4,)), Abort(reservations=(3,))]
    assert rank_testbed.taken().stores_done == {3: 1, 4: 1}
    assert rank_testbed.counters.snapshot()["stores_voided"] == 1


def test_a_voided_store_that_is_not_submitted_is_never_copied(rank_testbed: RankTestbed) -> None:
    rank_testbed.stores.add([store_job(3, rank_testbed.slot(0), A)], None, epoch=1)
    rank_testbed.stores.void(None)
    rank_testbed.run()
    assert rank_testbed.engine.submitted == []
    assert rank_testbed.sent == [Abort(reservations=(3,))]


def test_of_a_load_from_before_a_change_nothing_is_used(rank_testbed: RankTestbed) -> None:
    rank_testbed.engine.hold()
    rank_testbed.add(load_job(7, A, B, slots=rank_testbed.slots(0, 1)))
    rank_testbed.run()
    rank_testbed.loads.stop_all("limit")
    rank_testbed.loads.stop_all(IDENTITY_CHANGED)
    rank_testbed.engine.move()
    rank_testbed.run()
    taken = rank_testbed.taken()
    assert [(each.keys_loaded, each.reason) for each in taken.loads] == [(0, "identity")]
    assert taken.invalid_blocks == {*A, *B}


@pytest.mark.parametrize(("found", "keys"), [("same", 2), ("other", 0), ("", 0)])
def test_a_load_for_assumed_weights_ends_when_those_are_known(
    rank_testbed: RankTestbed, found: str, keys: int
) -> None:
    loads = rank_testbed.loads
    loads.weights_may_have_changed()
    job = load_job(7, A, B, slots=rank_testbed.slots(0, 1))
    loads.add([job], None, rank_testbed.clock.now, 1, assumed_weights="same")
    rank_testbed.run()
    assert len(loads) == 1
    assert rank_testbed.taken().loads == [], "nothing is used before the weights are known"
    loads.weights_known(found)
    rank_testbed.run()
    (end,) = rank_testbed.taken().loads
    assert (end.keys_loaded, end.reason) == (keys, "" if keys else "identity")
    loads.add([replace(job, load=8)], None, rank_testbed.clock.now, 1, assumed_weights="same")
    rank_testbed.run()
    assert rank_testbed.taken().loads[0].keys_loaded == keys, "known weights are compared at once"


@pytest.mark.parametrize("stop", ["lost", "limit", "abandon"])
def test_a_load_that_must_end_does_not_wait_for_the_fingerprint(
    rank_testbed: RankTestbed, stop: str
) -> None:
    loads = rank_testbed.loads
    loads.weights_may_have_changed()
    job = load_job(7, A, B, slots=rank_testbed.slots(0, 1))
    loads.add([job], None, rank_testbed.clock.now, 1, assumed_weights="same")
    rank_testbed.run()
    if stop == "abandon":
        loads.abandon("off")
    else:
        loads.stop_all(stop)
    rank_testbed.run()
    (end,) = rank_testbed.taken().loads
    assert (end.keys_loaded, end.reason) == (0, "identity")


class _Pending(weights.PendingFingerprint):
    """A fingerprint that the device computes until ``ready`` is set."""

    ready = False

    @property
    def done(self) -> bool:
        return self.ready


def test_loads_of_a_step_are_submitted_before_the_fingerprint_is_known(
    testbed: WorkerTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending = _Pending(weights.WeightsFingerprint("same"))
    before = len(testbed.engine.submitted)
    submitted: list[int] = []

    def begin(config: object) -> weights.PendingFingerprint:
        submitted.append(len(testbed.engine.submitted) - before)
        return pending

    monkeypatch.setattr(weights, "begin", begin)
    step = StepMetadata(
        step=2,
        identity=1,
        report_weights=True,
        loads=[load_job(7, A, B, slots=testbed.slots(0, 1))],
        assumed_weights=("same",),
    )
    worker = testbed.worker
    worker.begin_step(step)
    worker.start_load_kv(step)
    assert submitted == [1], "copies are submitted first, the fingerprint is started once"
    for _ in range(3):
        assert worker.get_finished(set()) == (None, None)
        assert worker.build_connector_worker_meta().weights == ()
    pending.ready = True
    assert worker.get_finished(set()) == (None, {step.loads[0].request_id})
    report = worker.build_connector_worker_meta()
    assert (report.identity, report.weights) == (1, ((0, "same", ""),))


def test_the_fingerprint_is_taken_once_per_number_before_the_kernels(
    testbed: WorkerTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[object] = []

    def begin(config: object) -> weights.PendingFingerprint:
        taken.append(config)
        return weights.PendingFingerprint(weights.WeightsFingerprint(f"f{len(taken)}"))

    monkeypatch.setattr(weights, "begin", begin)
    worker = testbed.worker
    worker.begin_step(StepMetadata(step=1, identity=0))
    assert taken == []
    step = StepMetadata(step=2, identity=1, report_weights=True)
    worker.begin_step(step)
    worker.begin_step(step)
    worker.begin_step(StepMetadata(step=3, identity=1))
    assert len(taken) == 1
    worker.start_load_kv(step)
    worker.get_finished(set())
    report = worker.build_connector_worker_meta()
    assert (report.identity, report.weights) == (1, ((0, "f1", ""),))
    assert worker._hello().weights == "f1", "a new session starts with the weights of now"


def test_a_step_with_another_number_voids_stores(
    testbed: WorkerTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        weights,
        "begin",
        lambda config: weights.PendingFingerprint(weights.WeightsFingerprint("f")),
    )
    testbed.engine.hold()
    testbed.step(stores=[store_job(3, testbed.slot(0), A)])
    testbed.worker.begin_step(StepMetadata(step=9, identity=1))
    testbed.engine.move()
    assert testbed.tierd.wait(lambda tierd: tierd.of(Abort) == [Abort(reservations=(3,))])
    assert testbed.tierd.of(Deliver) == []


def test_no_copy_runs_while_the_memory_of_the_kv_cache_is_gone(testbed: WorkerTestbed) -> None:
    testbed.step(stores=[store_job(3, testbed.slot(0), A)])
    testbed.worker.suspend_copies()
    submitted = len(testbed.engine.submitted)
    asleep = testbed.step(
        loads=[load_job(7, A, slots=(testbed.slot(0),))], stores=[store_job(4, testbed.slot(1), B)]
    )
    wait_until(lambda: asleep.stores_done.update(testbed.step().stores_done) or testbed.epoch == 0)
    assert len(testbed.engine.submitted) == submitted
    testbed.worker.resume_copies()
    wait_until(lambda: testbed.step() and testbed.epoch == 1)
    testbed.step(stores=[store_job(5, testbed.slot(1), B)])
    assert testbed.tierd.wait(
        lambda tierd: any(5 in each.reservations for each in tierd.of(Deliver))  # type: ignore[attr-defined]
    )


def test_sleep_and_wake_up_of_the_worker_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    worker = SimpleNamespace(
        sleep=lambda level: calls.append(f"sleep {level}"),
        wake_up=lambda tags=None: calls.append(f"wake {tags}"),
    )
    monkeypatch.setattr(weights, "_worker_of", lambda config: worker)
    weights.watch_sleep(None, lambda: calls.append("drained"), lambda: calls.append("resumed"))  # type: ignore[arg-type]
    worker.sleep(1)
    worker.wake_up(tags=["weights"])
    worker.wake_up(tags=["kv_cache"])
    assert calls == ["drained", "sleep 1", "wake ['weights']", "wake ['kv_cache']", "resumed"]


def test_a_release_of_the_memory_of_the_kv_cache_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM 0.32 releases it without sleep (``release_kv_cache_memory``)."""
    calls: list[str] = []
    worker = SimpleNamespace(
        sleep=lambda level: None,
        wake_up=lambda tags=None: calls.append("wake"),
        discard=lambda tags: calls.append(f"discard {tags}"),
    )
    monkeypatch.setattr(weights, "_worker_of", lambda config: worker)
    weights.watch_sleep(None, lambda: calls.append("drained"), lambda: calls.append("resumed"))  # type: ignore[arg-type]
    worker.discard(("weights",))
    worker.discard(("kv_cache",))
    worker.wake_up()
    assert calls == ["discard ('weights',)", "drained", "discard ('kv_cache',)", "wake", "resumed"]


def test_vllm_releases_memory_of_its_workers_by_no_other_method() -> None:
    """A method that a release adds must end copies as well."""
    from vllm.v1.worker.gpu_worker import Worker

    released = {
        name
        for name, each in vars(Worker).items()
        if inspect.isfunction(each)
        and re.search(r"sleep_mode_backend\.(?!resume)", inspect.getsource(each))
    }
    assert released == {"sleep", "discard"}
