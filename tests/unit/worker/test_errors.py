"""Whatever raises in the hooks of the worker side: each load and each store is reported once, what
is reported as loaded is there, and a store whose blocks were taken away is not delivered."""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support.injected_errors import CallInjector
from tests.unit.worker.worker_testbeds import (
    WorkerTestbed,
    block_bytes,
    load_job,
    make_worker_testbed,
    store_job,
    wait_until,
)

pytest.importorskip("vllm", reason="vllm is not installed: install the extra `engine`")
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvtier.engines.vllm import worker as worker_module
from kvtier.engines.vllm.connector import KVTierConnector
from kvtier.engines.vllm.metadata import StepMetadata, WorkerReport
from kvtier.tierd.wire import Deliver

A, B, C, D = (1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12), (13, 14, 15, 16)
WORKER_FILES = (
    "kvtier/engines/common/",
    "kvtier/engines/vllm/worker.py",
    "kvtier/transfer/",
)


@dataclass
class _Engine:
    """vLLM's model runner: the hooks of a step in their order, and what it got from them."""

    testbed: WorkerTestbed
    connector: KVTierConnector
    calls: CallInjector | None = None
    steps: itertools.count[int] = field(default_factory=lambda: itertools.count(1_000))
    recving: Counter[str] = field(default_factory=Counter)
    results: Counter[int] = field(default_factory=Counter)
    stores: Counter[int] = field(default_factory=Counter)
    invalid: set[int] = field(default_factory=set)
    loaded: dict[str, bool] = field(default_factory=dict)
    """By request: whether its blocks were filled when it was reported."""

    def step(self, **jobs: object) -> None:
        with self.calls.counting() if self.calls else nullcontext():
            self._step(StepMetadata(next(self.steps), **jobs))  # type: ignore[arg-type]

    def _step(self, metadata: StepMetadata) -> None:
        connector = self.connector
        connector.bind_connector_metadata(metadata)
        connector.handle_preemptions(metadata)
        connector.start_load_kv(None)
        connector.wait_for_save()
        results = connector.get_transfer_results(set())
        invalid = connector.get_block_ids_with_load_errors()
        connector.get_kv_connector_stats()
        report = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        self.recving.update(results.finished_recving)
        self.invalid |= invalid
        for request, blocks in (("request-7", A), ("request-8", C)):
            if request in results.finished_recving:
                self.loaded[request] = all(
                    block_bytes(self.testbed.layout, block) == self.expected for block in blocks
                )
        if isinstance(report, WorkerReport):
            self.results.update(each.load for each in report.loads if not each.follows)
            self.stores.update(report.stores_done)

    @property
    def expected(self) -> bytes:
        size = len(block_bytes(self.testbed.layout, 1))
        return bytes([7]) * size

    @property
    def done(self) -> bool:
        return {*self.recving} >= {"request-7", "request-8"} and {*self.stores} >= {3, 4}


def _engine(directory: Path, calls: CallInjector | None = None) -> _Engine:
    directory.mkdir()
    testbed = make_worker_testbed(directory)
    pool = testbed.pool()
    for slot in (1, 2):
        pool[testbed.slot(slot) : testbed.slot(slot + 1)] = 7
    transfer = SimpleNamespace(
        kv_connector="KVTierConnector", engine_id="e", kv_connector_extra_config={}
    )
    config = SimpleNamespace(
        kv_transfer_config=transfer, parallel_config=SimpleNamespace(rank=0), cache_config=None
    )
    connector = KVTierConnector(config, KVConnectorRole.WORKER, testbed.layout)  # type: ignore[arg-type]
    connector._worker = testbed.worker
    return _Engine(testbed, connector, calls)


def _scenario(engine: _Engine) -> None:
    """A load and a store whose copies run; then a reset takes the store's blocks, the weights may
    have changed, and another load and another store come."""
    testbed = engine.testbed
    testbed.engine.hold()
    engine.step(
        loads=[load_job(7, A, slots=testbed.slots(1))],
        stores=[store_job(3, testbed.slot(5), B)],
    )
    engine.step(
        voided_stores=(3,),
        loads=[load_job(8, C, slots=testbed.slots(2))],
        stores=[store_job(4, testbed.slot(6), D)],
    )
    testbed.engine.open = True
    testbed.engine.move()
    engine.step()
    engine.step(identity=1, report_weights=True)


def _delivered(testbed: WorkerTestbed) -> set[int]:
    return {
        number
        for message in testbed.tierd.of(Deliver)
        for number in message.reservations  # type: ignore[attr-defined]
    }


def _check(engine: _Engine, where: object) -> None:
    def ended() -> bool:
        engine.step()
        return engine.done

    wait_until(ended)
    for _ in range(3):
        engine.step()
    assert engine.recving == {"request-7": 1, "request-8": 1}, where
    assert engine.results == {7: 1, 8: 1}, where
    assert engine.stores == {3: 1, 4: 1}, where
    for request, blocks in (("request-7", A), ("request-8", C)):
        assert engine.loaded[request] or engine.invalid >= set(blocks), where
    assert 3 not in _delivered(engine.testbed), where
    engine.testbed.worker.shutdown()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_in_any_call_of_the_hooks_loses_no_report(tmp_path: Path) -> None:
    calls = CallInjector(*WORKER_FILES)
    counting = _engine(tmp_path / "0", calls)
    _scenario(counting)
    calls.raise_at(None)
    _check(counting, "no error")
    assert counting.invalid == set()
    assert len(calls.found) > 50, "the injector found the worker side"
    for place, number in calls.found.items():
        engine = _engine(tmp_path / str(number), calls)
        calls.raise_at(number)
        _scenario(engine)
        calls.raise_at(None)
        _check(engine, place)
        counts = engine.testbed.worker._counters.snapshot()
        counted = ("step_errors", "thread_failures", "off")
        found = engine.connector._guard.errors or any(counts.get(each) for each in counted)
        assert found or not calls.raised, f"not counted: {calls.raised}"


def test_the_jobs_of_a_step_that_could_not_be_taken_are_reported_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug before any job is entered, in each step."""
    engine = _engine(tmp_path / "case")

    def broken(metadata: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(engine.testbed.worker, "start_load_kv", broken)
    engine.step(
        loads=[load_job(7, A, slots=engine.testbed.slots(1)), load_job(8, C)],
        stores=[store_job(3, engine.testbed.slot(5), B), store_job(4, engine.testbed.slot(6), D)],
    )
    monkeypatch.undo()
    _check_failed(engine)
    assert engine.testbed.worker._counters.snapshot()["lost_jobs"] == 2


def _check_failed(engine: _Engine) -> None:
    engine.step()
    assert engine.recving == {"request-7": 1, "request-8": 1}
    assert engine.invalid >= {*A, *C}
    engine.testbed.worker.shutdown()


def test_a_fingerprint_that_cannot_be_started_is_not_that_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else objects of other weights would be loaded."""
    testbed = make_worker_testbed(tmp_path)
    testbed.worker._weights = worker_module.weights.WeightsFingerprint("before")

    def broken(config: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(worker_module.weights, "begin", broken)
    testbed.worker.begin_step(metadata := StepMetadata(5, identity=1, report_weights=True))
    testbed.worker.start_load_kv(metadata)
    testbed.worker.get_finished(set())
    report = testbed.worker.build_connector_worker_meta()
    assert (report.identity, report.weights) == (1, ((0, "", "ZeroDivisionError: a bug"),))
    testbed.worker.shutdown()


def test_unexpected_errors_of_a_step_are_counted_and_each_kind_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = worker_module.KVTierConnectorWorker.__new__(worker_module.KVTierConnectorWorker)
    worker._counters, worker._logged_kinds = worker_module.Counters(), set()

    def fail(error: Exception) -> None:
        raise error

    errors = [RuntimeError("a"), RuntimeError("b"), KeyError("c"), RuntimeError("d")]
    errors += [
        type(f"Kind{number}", (Exception,), {})()
        for number in range(worker_module.MAX_LOGGED_KINDS)
    ]
    for error in errors:
        worker._guarded(partial(fail, error))
    assert worker._counters.snapshot()["step_errors"] == len(errors)
    logged = [record for record in caplog.records if "unexpected" in record.message]
    assert len(logged) == worker_module.MAX_LOGGED_KINDS
    assert ["RuntimeError" in each.message for each in logged[:2]] == [True, False]
