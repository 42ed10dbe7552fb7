"""The hooks that vLLM calls: nothing blocks, nothing raises, every id that is owed a report gets one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.support.held_copies import HeldCopyEngine
from tests.support.stub_tierd import StubTierd
from tests.unit.worker.worker_rigs import (
    GEOMETRY,
    Rig,
    block_bytes,
    load_job,
    make_rig,
    store_job,
    structural,
    vllm_config,
    wait_until,
)

from kvtier.engines.vllm import worker as worker_module
from kvtier.engines.vllm import worker_thread
from kvtier.engines.vllm.metadata import LoadJob, StepMetadata, StoreJob
from kvtier.engines.vllm.worker import KVTierConnectorWorker
from kvtier.tierd.wire import PROTOCOL, Deliver, LoadReleased, SessionRefused
from kvtier.transfer.synthetic_layouts import SyntheticCache, SyntheticGroup, make_every_cache

A, B, C = (1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)


def _worker(directory: Path, layout: SyntheticCache) -> KVTierConnectorWorker:
    return KVTierConnectorWorker(
        vllm_config(),  # type: ignore[arg-type]
        layout,  # type: ignore[arg-type]
        structural(directory),  # type: ignore[arg-type]
        64,
        client=StubTierd,
        copy_engine=HeldCopyEngine,
    )


def _step(
    worker: KVTierConnectorWorker, number: int, loads: list[LoadJob], stores: list[StoreJob]
) -> None:
    metadata = StepMetadata(number, loads, stores)
    worker.start_load_kv(metadata)
    worker.wait_for_save()


def test_a_stored_chunk_can_be_loaded_into_other_blocks(rig: Rig) -> None:
    stored = [block_bytes(rig.layout, block) for block in A]
    rig.step(stores=[store_job(3, rig.slot(5), A)])
    assert rig.tierd.wait(lambda tierd: bool(tierd.of(Deliver)))
    wait_until(lambda: rig.step().stores_done == {3: 1})
    rig.step(loads=[load_job(7, C)])
    rig.tierd.slots(7, rig.slot(5), tiers=(2,))
    taken = None

    def ended() -> bool:
        nonlocal taken
        taken = rig.step()
        return bool(taken.loads)

    wait_until(ended)
    assert taken is not None
    assert (taken.recving, taken.invalid_blocks, taken.loads[0].tiers) == (
        {"request-7"},
        set(),
        (2,),
    )
    assert [block_bytes(rig.layout, block) for block in C] == stored
    assert rig.tierd.wait(lambda tierd: LoadReleased(load=7) in tierd.sent)


def test_hello_carries_what_tierd_must_know(rig: Rig) -> None:
    (hello,) = rig.tierd.hellos
    assert (hello.protocol, hello.role, hello.engine, hello.rank) == (
        PROTOCOL,
        "worker",
        "engine-a/dp0",
        0,
    )
    assert hello.shard_bytes == (rig.slot_bytes,)
    assert '"block_tokens":16' in hello.codec
    assert all((hello.pid, hello.process_start, hello.pid_namespace))
    assert hello.drained_epoch == 0


def test_load_errors_are_reported_in_the_same_step_as_the_request(rig: Rig) -> None:
    rig.step(loads=[load_job(7, A, limit=0.0)])

    def ended() -> bool:
        taken = rig.step()
        assert bool(taken.loads) == bool(taken.recving) == bool(taken.invalid_blocks)
        return bool(taken.loads)

    wait_until(ended)


def test_0_24_leaves_wait_for_save_out_of_empty_steps_and_the_stores_are_made_all_the_same(
    rig: Rig,
) -> None:
    metadata = StepMetadata(9, stores=[store_job(3, rig.slot(1), A)])
    rig.worker.start_load_kv(metadata)
    rig.worker.get_finished(set())
    assert rig.tierd.wait(lambda tierd: tierd.of(Deliver) == [Deliver(reservations=(3,))])


def test_stores_are_handed_on_once_however_often_they_are_asked_for(rig: Rig) -> None:
    metadata = StepMetadata(9, stores=[store_job(3, rig.slot(1), A)])
    rig.worker.start_load_kv(metadata)
    rig.worker.wait_for_save()
    rig.worker.wait_for_save()
    rig.worker.get_finished(set())
    assert rig.tierd.wait(lambda tierd: bool(tierd.of(Deliver)))
    assert "duplicate_stores" not in rig.worker.take_counts()


def test_transfer_results_name_failed_requests_only_for_several_groups(rig: Rig) -> None:
    rig.step(loads=[load_job(7, A, limit=0.0)])
    seen: list[object] = []

    def ended() -> bool:
        results = rig.worker.get_transfer_results(set())
        if results.finished_recving:
            seen.append(
                (results.finished_recving, results.failed_recving, results.finished_sending)
            )
        return bool(seen)

    wait_until(ended)
    assert seen == [({"request-7"}, set(), set())]
    assert rig.worker.get_block_ids_with_load_errors() == set(A)


def test_without_metadata_the_hooks_do_nothing(rig: Rig) -> None:
    rig.worker.start_load_kv(object())
    rig.worker.wait_for_save()
    assert rig.worker.get_finished(set()) == (None, None)


def test_before_tierd_answers_nothing_is_stored_and_loads_end_at_their_limit(
    tmp_path: Path,
) -> None:
    rig = make_rig(tmp_path, attach=False)
    rig.step(loads=[load_job(7, A, limit=0.01)], stores=[store_job(3, 0, B)])
    done: set[str] = set()
    stores: dict[int, int] = {}

    def ended() -> bool:
        taken = rig.step()
        done.update(taken.recving)
        stores.update(taken.stores_done)
        return bool(done and stores)

    wait_until(ended)
    assert (rig.epoch, done, stores) == (0, {"request-7"}, {3: 1})
    assert rig.engine.submitted[2:] == [], "beyond the proof's own two nothing was copied"
    rig.worker.shutdown()


def test_a_refusal_leaves_the_engine_without_tiers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(tmp_path, attach=False)
    rig.tierd.say(SessionRefused(reason="version 9 here, version 8 there"))
    wait_until(lambda: "version 9 here" in caplog.text)
    rig.step()
    assert rig.epoch == 0
    rig.worker.shutdown()


def test_a_pool_that_cannot_be_mapped_leaves_the_engine_without_tiers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(tmp_path, attach=False)
    rig.tierd.welcome(1, nbytes=1 << 40)
    wait_until(lambda: "cannot be used" in caplog.text)
    rig.step()
    assert rig.epoch == 0
    assert rig.worker.take_counts()["pool_failures"] == 1
    rig.worker.shutdown()


@pytest.mark.parametrize("what", ["layout", "groups", "chunk", "proof"])
def test_whatever_cannot_be_served_turns_kvtier_off_and_never_raises(
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


def test_a_full_queue_refuses_at_once_instead_of_blocking(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_thread, "MAX_QUEUED", 0)
    taken = rig.step(loads=[load_job(7, A)], stores=[store_job(3, rig.slot(1), B)])
    assert (taken.recving, taken.invalid_blocks, taken.stores_done) == (
        {"request-7"},
        set(A),
        {3: 1},
    )
    assert taken.loads[0].reason == "queue"


def test_a_failure_of_the_transfer_thread_turns_kvtier_off_and_reports_what_was_open(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.engine.hold()
    rig.step(loads=[load_job(7, A)], stores=[store_job(3, rig.slot(2), B)])
    rig.tierd.slots(7, rig.slot(1))
    wait_until(lambda: rig.engine.held == 2)

    def broken() -> None:
        raise ZeroDivisionError("a bug")

    rig.engine.synchronize = broken  # type: ignore[method-assign]
    rig.engine.fail("device error")
    done: set[str] = set()
    stores: dict[int, int] = {}

    def ended() -> bool:
        taken = rig.step()
        done.update(taken.recving)
        stores.update(taken.stores_done)
        return bool(done and stores)

    wait_until(ended)
    assert "transfer thread failed" in caplog.text
    taken = rig.step(loads=[load_job(8, C)], stores=[store_job(4, rig.slot(3), C)])
    assert (taken.recving, taken.stores_done) == ({"request-8"}, {4: 1})
    assert rig.epoch == 0


def test_words_for_which_the_client_has_no_room_are_sent_later(rig: Rig) -> None:
    rig.tierd.full = True
    rig.step(stores=[store_job(3, rig.slot(1), A)])
    wait_until(lambda: rig.step().stores_done == {3: 1})
    assert rig.tierd.of(Deliver) == []
    rig.tierd.full = False
    assert rig.tierd.wait(lambda tierd: tierd.of(Deliver) == [Deliver(reservations=(3,))])


def test_a_device_that_cannot_be_marked_turns_kvtier_off_and_never_raises(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> object:
        raise RuntimeError("device lost")

    monkeypatch.setattr(rig.engine, "fence", broken)
    taken = rig.step(loads=[load_job(7, A)], stores=[store_job(3, rig.slot(1), B)])
    assert (taken.recving, taken.stores_done, rig.epoch) == ({"request-7"}, {3: 1}, 0)
    assert "device lost" in rig.worker.off_reason


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


def test_shutdown_drains_and_says_goodbye(tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    rig.engine.hold()
    rig.step(stores=[store_job(3, rig.slot(1), A)])
    wait_until(lambda: rig.engine.held)
    rig.worker.shutdown()
    assert rig.engine.held == 0
    assert rig.tierd.closed
    rig.worker.shutdown()


def test_shutdown_is_bounded_and_says_no_goodbye_while_a_copy_may_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    release = threading.Event()
    rig = make_rig(tmp_path)
    monkeypatch.setattr(worker_module, "SHUTDOWN_SECONDS", 0.1)
    monkeypatch.setattr(rig.engine, "_drain", lambda: release.wait(30) and None)
    rig.worker.shutdown()
    assert not rig.tierd.closed
    release.set()


def test_counts_are_those_since_the_last_call(rig: Rig) -> None:
    rig.worker.take_counts()
    rig.step(loads=[load_job(7, A, limit=0.0)])
    wait_until(lambda: rig.step().loads)
    assert rig.worker.take_counts() == {"loads_failed": 1}
    assert rig.worker.take_counts() == {}


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_every_load_and_store_is_reported_exactly_once(
    tmp_path: Path, seed: int
) -> None:
    """Random jobs, announcements (early, late, short, missing, doubled), cancellations, held copies and losses of
    tierd.
    """
    dice = random.Random(seed)
    rig = make_rig(tmp_path)
    owed: set[str] = set()
    stores: set[int] = set()
    epoch = number = 0
    seen_requests: list[str] = []
    seen_stores: list[int] = []
    results = []

    def collect(**jobs: object) -> None:
        taken = rig.step(**jobs)  # type: ignore[arg-type]
        seen_requests.extend(taken.recving)
        seen_stores.extend(taken.stores_done)
        results.extend(taken.loads)

    epoch = 1
    for _ in range(60):
        event = dice.choice(
            ["load", "load", "store", "store", "slots", "cancel", "hold", "move", "lose", "early"]
        )
        if event == "load":
            number += 1
            owed.add(f"request-{number}")
            collect(loads=[load_job(number, A, B, limit=dice.choice([0.0, 0.01, 0.2]))])
        elif event == "early":
            rig.tierd.slots(number + 1, rig.slot(1), rig.slot(2))
        elif event == "slots" and number:
            rig.tierd.slots(
                dice.randint(1, number), *[rig.slot(i) for i in range(dice.randint(0, 3))]
            )
        elif event == "cancel" and number:
            collect(cancelled=[dice.randint(1, number)])
        elif event == "store":
            number += 1
            stores.add(number)
            collect(
                stores=[
                    store_job(
                        number,
                        rig.slot(dice.randint(4, 11)),
                        C,
                        dice.choice([epoch, epoch, epoch - 1]),
                    )
                ]
            )
        elif event == "hold":
            rig.engine.hold()
        elif event == "move":
            rig.engine.open = True
            rig.engine.move()
        elif event == "lose" and rig.tierd.attached:
            before = len(rig.tierd.reattached)
            rig.tierd.lose()
            assert rig.tierd.wait(lambda tierd, n=before: len(tierd.reattached) > n)  # type: ignore[misc]
            epoch += 1
            rig.tierd.welcome(epoch)
    rig.engine.open = True

    def all_in() -> bool:
        rig.engine.move()
        collect()
        return len(seen_requests) >= len(owed) and len(seen_stores) >= len(stores)

    wait_until(all_in)
    for _ in range(3):
        collect()
    assert sorted(seen_requests) == sorted(owed)
    assert sorted(seen_stores) == sorted(stores)
    assert len(results) == len(owed)
    rig.worker.shutdown()
