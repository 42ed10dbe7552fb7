"""The hooks that vLLM calls: no hook blocks or raises, and every expected report is made."""

from __future__ import annotations

import logging
import random
import threading
from pathlib import Path

import pytest
from tests.support.held_copies import HeldCopyEngine
from tests.support.stub_tierd import StubTierd
from tests.unit.worker.worker_testbeds import (
    CHUNK,
    GEOMETRY,
    WorkerTestbed,
    block_bytes,
    load_job,
    make_worker_testbed,
    store_job,
    structural,
    vllm_config,
    wait_until,
)

from kvtier.engines.common.jobs import LoadJob, StoreJob
from kvtier.engines.vllm import worker as worker_module
from kvtier.engines.vllm.metadata import StepMetadata
from kvtier.engines.vllm.worker import KVTierConnectorWorker
from kvtier.planner import GroupKind, KVCacheGroup, Planner
from kvtier.tierd.wire import PROTOCOL, Deliver, SessionRefused
from kvtier.transfer import driver_calls
from kvtier.transfer.driver_calls import DriverCalls, wait_for_calls
from kvtier.transfer.host_pool import HostPool
from kvtier.transfer.synthetic_layouts import SyntheticCache, SyntheticGroup, make_every_cache

A, B, C = (1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)


def _worker(directory: Path, layout: SyntheticCache) -> KVTierConnectorWorker:
    groups = [KVCacheGroup(GroupKind.FULL, GEOMETRY.block) for _ in layout.kv_cache_groups]
    return KVTierConnectorWorker(
        vllm_config(),  # type: ignore[arg-type]
        layout,  # type: ignore[arg-type]
        structural(directory),  # type: ignore[arg-type]
        Planner.build(groups, CHUNK * GEOMETRY.block, GEOMETRY.block),
        client=StubTierd,
        copy_engine=HeldCopyEngine,
    )


def _step(
    worker: KVTierConnectorWorker, number: int, loads: list[LoadJob], stores: list[StoreJob]
) -> None:
    metadata = StepMetadata(number, loads, stores)
    worker.start_load_kv(metadata)
    worker.wait_for_save()


def test_a_stored_chunk_can_be_loaded_into_other_blocks(testbed: WorkerTestbed) -> None:
    stored = [block_bytes(testbed.layout, block) for block in A]
    testbed.start(stores=[store_job(3, testbed.slot(5), A)])
    assert testbed.tierd.wait(lambda tierd: bool(tierd.of(Deliver)))
    wait_until(lambda: testbed.step().stores_done == {3: 1})
    taken = testbed.step(loads=[load_job(7, C, slots=testbed.slots(5))])
    assert (taken.recving, taken.invalid_blocks) == ({"request-7"}, set()), (
        "the copy was submitted and seen done within the step"
    )
    assert [block_bytes(testbed.layout, block) for block in C] == stored


def test_the_hello_describes_the_worker(testbed: WorkerTestbed) -> None:
    (hello,) = testbed.tierd.hellos
    assert (hello.protocol, hello.role, hello.engine, hello.rank) == (
        PROTOCOL,
        "worker",
        "engine-a/dp0",
        0,
    )
    assert hello.shard_bytes == (testbed.slot_bytes,)
    assert '"block_tokens":16' in hello.codec
    assert all((hello.pid, hello.process_start, hello.pid_namespace))
    assert hello.drained_epoch == 0


def test_load_errors_are_reported_in_the_same_step_as_the_request(testbed: WorkerTestbed) -> None:
    testbed.start(loads=[load_job(7, A, limit=0.0)])

    def ended() -> bool:
        taken = testbed.step()
        assert bool(taken.loads) == bool(taken.recving) == bool(taken.invalid_blocks)
        return bool(taken.loads)

    wait_until(ended)


def test_stores_are_made_although_vllm_0_24_skips_wait_for_save_in_empty_steps(
    testbed: WorkerTestbed,
) -> None:
    metadata = StepMetadata(9, stores=[store_job(3, testbed.slot(1), A)])
    testbed.worker.start_load_kv(metadata)
    testbed.worker.get_finished(set())
    assert testbed.tierd.wait(lambda tierd: tierd.of(Deliver) == [Deliver(reservations=(3,))])


def test_an_idle_engine_delivers_its_stores_and_reports_them_with_its_next_step(
    testbed: WorkerTestbed,
) -> None:
    testbed.engine.hold()
    testbed.start(stores=[store_job(3, testbed.slot(1), A), store_job(4, testbed.slot(2), B)])
    testbed.engine.move()
    assert testbed.tierd.wait(lambda tierd: bool(tierd.of(Deliver))), "no hook ran in between"
    testbed.engine.open = True

    def delivered() -> set[int]:
        return {n for each in testbed.tierd.of(Deliver) for n in each.reservations}  # type: ignore[attr-defined]

    assert testbed.tierd.wait(lambda _: delivered() == {3, 4})
    assert testbed.step().stores_done == {3: 1, 4: 1}


def test_stores_are_passed_on_once(testbed: WorkerTestbed) -> None:
    metadata = StepMetadata(9, stores=[store_job(3, testbed.slot(1), A)])
    testbed.worker.start_load_kv(metadata)
    testbed.worker.wait_for_save()
    testbed.worker.wait_for_save()
    testbed.worker.get_finished(set())
    assert testbed.tierd.wait(lambda tierd: bool(tierd.of(Deliver)))
    assert "duplicate_stores" not in testbed.worker.take_counts()


def test_transfer_results_name_failed_requests_only_for_several_groups(
    testbed: WorkerTestbed,
) -> None:
    testbed.worker.start_load_kv(StepMetadata(9, [load_job(7, A, limit=0.0)]))
    seen: list[object] = []

    def ended() -> bool:
        results = testbed.worker.get_transfer_results(set())
        if results.finished_recving:
            seen.append(
                (results.finished_recving, results.failed_recving, results.finished_sending)
            )
        return bool(seen)

    wait_until(ended)
    assert seen == [({"request-7"}, set(), set())]
    assert testbed.worker.get_block_ids_with_load_errors() == set(A)


def test_without_metadata_the_hooks_do_nothing(testbed: WorkerTestbed) -> None:
    testbed.worker.start_load_kv(object())
    testbed.worker.wait_for_save()
    assert testbed.worker.get_finished(set()) == (None, None)


def _until_ended(testbed: WorkerTestbed) -> tuple[set[str], dict[int, int]]:
    """Steps until a load and a store have ended; returns the requests and stores that have."""
    done: set[str] = set()
    stores: dict[int, int] = {}

    def ended() -> bool:
        taken = testbed.step()
        done.update(taken.recving)
        stores.update(taken.stores_done)
        return bool(done and stores)

    wait_until(ended)
    return done, stores


def test_before_tierd_answers_nothing_is_stored_and_loads_end_at_once(
    tmp_path: Path,
) -> None:
    testbed = make_worker_testbed(tmp_path, attach=False)
    testbed.start(loads=[load_job(7, A, limit=0.01)], stores=[store_job(3, 0, B)])
    done, stores = _until_ended(testbed)
    assert (testbed.epoch, done, stores) == (0, {"request-7"}, {3: 1})
    assert testbed.engine.submitted[2:] == [], "beyond the proof's own two nothing was copied"
    testbed.worker.shutdown()


def test_after_a_rejection_the_engine_serves_without_tiers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    testbed = make_worker_testbed(tmp_path, attach=False)
    testbed.tierd.say(SessionRefused(reason="version 9 here, version 8 there"))
    wait_until(lambda: "version 9 here" in caplog.text)
    testbed.step()
    assert testbed.epoch == 0
    testbed.worker.shutdown()


def test_a_pool_that_cannot_be_mapped_disables_tiers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    testbed = make_worker_testbed(tmp_path, attach=False)
    testbed.tierd.welcome(1, nbytes=1 << 40)
    wait_until(lambda: "cannot be used" in caplog.text)
    testbed.step()
    assert testbed.epoch == 0
    assert testbed.worker.take_counts()["pool_failures"] == 1
    testbed.worker.shutdown()


@pytest.mark.parametrize("what", ["layout", "groups", "chunk", "proof"])
def test_unsupported_caches_turn_kvtier_off_without_raising(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = next(iter(make_every_cache(GEOMETRY)))
    caches: dict[str, object] = dict(layout.caches)
    if what == "layout":
        caches[next(iter(caches))] = [1, 2]
    elif what == "groups":
        monkeypatch.setattr(worker_module, "reports_failed_requests", lambda: False)
        layout = SyntheticCache("two", layout.caches, layout.num_blocks, layout.kv_cache_groups * 2)
    elif what == "chunk":
        spec = type(layout.kv_cache_groups[0].kv_cache_spec)(0, 1)
        layout = SyntheticCache(
            "none", layout.caches, layout.num_blocks, (SyntheticGroup(tuple(layout.caches), spec),)
        )
    else:
        monkeypatch.setattr(HeldCopyEngine, "_start", lambda *_: None)
        monkeypatch.setattr(HeldCopyEngine, "_ready", lambda *_: True)
    worker = _worker(tmp_path, layout)
    worker.register_kv_caches(caches)
    assert worker.off_reason
    assert "serving without tiers" in caplog.text
    _step(worker, 1, [load_job(7, A, B)], [store_job(3, 0, C)])
    _, recving = worker.get_finished(set())
    assert recving == {"request-7"}
    report = worker.build_connector_worker_meta()
    assert (report.stores_done, report.attached_epoch, report.loads[0].reason) == ({3: 1}, 0, "off")
    worker.shutdown()


def test_a_bug_in_the_copies_turns_kvtier_off_and_reports_what_was_open(
    testbed: WorkerTestbed, caplog: pytest.LogCaptureFixture
) -> None:
    testbed.engine.hold()
    testbed.start(
        loads=[load_job(7, A, slots=testbed.slots(1))], stores=[store_job(3, testbed.slot(2), B)]
    )
    assert testbed.engine.held == 2

    def broken(handle: object) -> bool:
        raise ZeroDivisionError("a bug")

    testbed.engine.done = broken  # type: ignore[method-assign]
    _until_ended(testbed)
    assert "copies failed" in caplog.text
    assert testbed.engine.drains, "reported after the copies have ended"
    taken = testbed.step(loads=[load_job(8, C)], stores=[store_job(4, testbed.slot(3), C)])
    assert (taken.recving, taken.stores_done) == ({"request-8"}, {4: 1})
    assert testbed.epoch == 0


def test_messages_wait_while_the_client_has_no_room(testbed: WorkerTestbed) -> None:
    testbed.tierd.full = True
    testbed.start(stores=[store_job(3, testbed.slot(1), A)])
    wait_until(lambda: testbed.step().stores_done == {3: 1})
    assert testbed.tierd.of(Deliver) == []
    testbed.tierd.full = False
    assert testbed.tierd.wait(lambda tierd: tierd.of(Deliver) == [Deliver(reservations=(3,))])


def test_a_fence_that_fails_turns_kvtier_off_without_raising(
    testbed: WorkerTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> object:
        raise RuntimeError("device lost")

    monkeypatch.setattr(testbed.engine, "fence", broken)
    taken = testbed.step(loads=[load_job(7, A)], stores=[store_job(3, testbed.slot(1), B)])
    assert (taken.recving, taken.stores_done, testbed.epoch) == ({"request-7"}, {3: 1}, 0)
    assert "device lost" in testbed.worker.off_reason


def test_a_client_that_cannot_start_turns_kvtier_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: StubTierd) -> None:
        raise KeyError("no socket")

    monkeypatch.setattr(StubTierd, "start", broken)
    layout = next(iter(make_every_cache(GEOMETRY)))
    worker = _worker(tmp_path, layout)
    worker.register_kv_caches(layout.caches)
    assert "no socket" in worker.off_reason
    _step(worker, 1, [load_job(7, A)], [])
    assert worker.get_finished(set())[1] == {"request-7"}


def test_shutdown_drains_and_closes_the_client(tmp_path: Path) -> None:
    testbed = make_worker_testbed(tmp_path)
    testbed.engine.hold()
    testbed.start(stores=[store_job(3, testbed.slot(1), A)])
    wait_until(lambda: testbed.engine.held)
    testbed.worker.shutdown()
    assert testbed.engine.held == 0
    assert testbed.tierd.closed
    testbed.worker.shutdown()


def test_shutdown_is_bounded_and_does_not_detach_while_a_copy_may_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    release = threading.Event()
    testbed = make_worker_testbed(tmp_path)
    monkeypatch.setattr(worker_module, "SHUTDOWN_SECONDS", 0.1)
    monkeypatch.setattr(testbed.engine, "_drain", lambda: release.wait(30) and None)
    testbed.worker.shutdown()
    assert not testbed.tierd.closed
    release.set()


def test_counts_are_those_since_the_last_call(testbed: WorkerTestbed) -> None:
    testbed.worker.take_counts()
    testbed.start(loads=[load_job(7, A, limit=0.0)])
    wait_until(lambda: testbed.step().loads)
    assert testbed.worker.take_counts() == {"loads_failed": 1}
    assert testbed.worker.take_counts() == {}


@pytest.mark.parametrize("seed", range(6))
def test_every_load_and_store_is_reported_exactly_once(tmp_path: Path, seed: int) -> None:
    """Random jobs, reused slots, cancellations, delayed copies and losses of tierd."""
    dice = random.Random(seed)
    testbed = make_worker_testbed(tmp_path)
    owed: set[str] = set()
    stores: set[int] = set()
    epoch = number = 0
    seen_requests: list[str] = []
    seen_stores: list[int] = []
    results = []

    def collect(**jobs: object) -> None:
        taken = testbed.step(**jobs)  # type: ignore[arg-type]
        seen_requests.extend(taken.recving)
        seen_stores.extend(taken.stores_done)
        results.extend(taken.loads)

    epoch = 1
    for _ in range(60):
        event = dice.choice(
            ["load", "load", "store", "store", "cancel", "hold", "move", "lose", "reuse"]
        )
        if event == "load":
            number += 1
            owed.add(f"request-{number}")
            named = [testbed.slot(i) for i in range(dice.randint(0, 3))]
            job = load_job(
                number,
                A,
                B,
                slots=tuple(named),
                limit=dice.choice([0.0, 0.01, 0.2]),
                epoch=dice.choice([epoch, epoch, epoch - 1]),
            )
            collect(loads=[job])
        elif event == "reuse":
            testbed.reuse(dice.randint(0, 3))
        elif event == "cancel" and number:
            collect(cancelled=[dice.randint(1, number)])
        elif event == "store":
            number += 1
            stores.add(number)
            collect(
                stores=[
                    store_job(
                        number,
                        testbed.slot(dice.randint(4, 11)),
                        C,
                        dice.choice([epoch, epoch, epoch - 1]),
                    )
                ]
            )
        elif event == "hold":
            testbed.engine.hold()
        elif event == "move":
            testbed.engine.open = True
            testbed.engine.move()
        elif event == "lose" and testbed.tierd.attached:
            before = len(testbed.tierd.reattached)
            testbed.tierd.lose()
            assert testbed.tierd.wait(lambda tierd, n=before: len(tierd.reattached) > n)  # type: ignore[misc]
            epoch += 1
            testbed.tierd.welcome(epoch)
    testbed.engine.open = True

    def all_in() -> bool:
        testbed.engine.move()
        collect()
        return len(seen_requests) >= len(owed) and len(seen_stores) >= len(stores)

    wait_until(all_in)
    for _ in range(3):
        collect()
    assert sorted(seen_requests) == sorted(owed)
    assert sorted(seen_stores) == sorted(stores)
    assert len(results) == len(owed)
    testbed.worker.shutdown()


def test_an_engine_whose_driver_hangs_serves_without_tiers_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    release, calls = threading.Event(), DriverCalls(1, "test")

    def register(*_: object) -> tuple[HostPool, tuple[int, ...]]:
        wait_for_calls([calls.submit(release.wait)])
        raise AssertionError("the call has ended")

    monkeypatch.setattr(driver_calls, "STALL_SECONDS", 0.2)
    monkeypatch.setattr(worker_module, "register_pool", register)
    testbed = make_worker_testbed(tmp_path, attach=False)
    try:
        with caplog.at_level(logging.WARNING):
            testbed.tierd.welcome(1)
            wait_until(lambda: "driver hangs" in testbed.worker.off_reason)
            found = testbed.step(loads=[load_job(7, A, slots=testbed.slots(1))])
            wait_until(lambda: found.loads or found.loads.extend(testbed.step().loads))
            assert [(each.load, each.keys_loaded) for each in found.loads] == [(7, 0)]
            testbed.tierd.lose()
            assert testbed.tierd.wait(lambda tierd: tierd.reattached)
            testbed.tierd.welcome(2)
            for _ in range(3):
                testbed.step()
                assert testbed.epoch == 0
            wait_until(lambda: "the host pool cannot be used" in caplog.text)
        assert caplog.text.count("the device's driver hangs") == 1
        testbed.worker.shutdown()
        assert testbed.tierd.closed, "no copy runs"
    finally:
        release.set()
