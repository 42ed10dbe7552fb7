"""One load from job and announcement to its one report: order, limits, cancellation, failures, parts of chunks."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.worker.worker_rigs import Bench, load_job

from kvtier.engines.vllm.worker_state import CompletionQueue
from kvtier.engines.vllm.worker_transfers import MAX_EARLY_ANNOUNCEMENTS, WorkerLoads
from kvtier.tierd.wire import LoadReady, LoadReleased
from kvtier.transfer.engine import Direction

A, B, C = (1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)


def _slots(bench: Bench, load: int, *numbers: int, tiers: tuple[int, ...] = ()) -> LoadReady:
    return LoadReady(load=load, slots=tuple(bench.slot(number) for number in numbers), tiers=tiers)


def test_a_load_fills_its_blocks_and_reports_once(bench: Bench) -> None:
    bench.fill_slot(1, 11)
    bench.fill_slot(2, 22)
    bench.loads.add([load_job(7, A, B)], None, bench.clock.now)
    bench.loads.on_announcement(_slots(bench, 7, 1, 2, tiers=(0, 1)))
    bench.clock.now += 0.25
    bench.run()
    assert set(bench.page_bytes(1) + bench.page_bytes(4)) == {11}
    assert set(bench.page_bytes(5) + bench.page_bytes(8)) == {22}
    taken = bench.taken()
    (result,) = taken.loads
    assert (result.load, result.keys_loaded, result.tiers, result.reason) == (7, 2, (0, 1), "")
    assert (result.seconds, result.copied_bytes) == (0.25, 2 * bench.slot_bytes)
    assert (taken.recving, taken.failed, taken.invalid_blocks) == ({"request-7"}, set(), set())
    assert bench.sent == [LoadReleased(load=7)]
    assert bench.taken().loads == []


def test_an_announcement_may_come_before_its_job(bench: Bench) -> None:
    bench.fill_slot(0, 5)
    bench.loads.on_announcement(_slots(bench, 7, 0))
    bench.loads.add([load_job(7, A)], None, bench.clock.now)
    bench.run()
    assert bench.taken().loads[0].keys_loaded == 1


def test_copies_wait_for_the_fence_of_their_step(bench: Bench) -> None:
    fence = object()
    bench.loads.add([load_job(7, A)], fence, bench.clock.now)
    bench.loads.on_announcement(_slots(bench, 7, 0))
    bench.run()
    assert [(direction, after) for direction, _, after in bench.engine.submitted] == [
        (Direction.TO_DEVICE, fence)
    ]


def test_a_load_that_begins_inside_a_chunk_copies_just_the_missing_blocks(bench: Bench) -> None:
    pool = bench.engine.pool
    assert pool is not None
    block_bytes = bench.slot_bytes // 4
    for index in range(4):
        begin = bench.slot(1) + index * block_bytes
        pool.memory[begin : begin + block_bytes] = 100 + index
    before = bench.page_bytes(4)
    bench.loads.add([load_job(7, (5, 6), B := (7, 8, 9, 10), first=2)], None, bench.clock.now)
    bench.loads.on_announcement(_slots(bench, 7, 1, 2))
    bench.run()
    assert [set(bench.page_bytes(block)) for block in (5, 6)] == [{102}, {103}]
    assert bench.page_bytes(4) == before
    assert bench.taken().loads[0].copied_bytes == 6 * block_bytes
    assert B


def test_keys_that_are_gone_are_missing_from_the_end(bench: Bench) -> None:
    bench.loads.add([load_job(7, A, B, C)], None, bench.clock.now)
    bench.loads.on_announcement(_slots(bench, 7, 1))
    bench.run()
    taken = bench.taken()
    assert (taken.loads[0].keys_loaded, taken.loads[0].reason) == (1, "gone")
    assert taken.invalid_blocks == set(B + C)
    assert taken.recving == {"request-7"}


def test_nothing_announced_until_the_limit_makes_all_blocks_invalid(bench: Bench) -> None:
    bench.loads.add([load_job(7, A, B, limit=2.0)], None, bench.clock.now)
    bench.clock.now += 1.99
    bench.run()
    assert bench.taken().loads == []
    assert bench.loads.next_deadline() == 102.0
    bench.clock.now += 0.01
    bench.run()
    taken = bench.taken()
    assert (taken.loads[0].keys_loaded, taken.loads[0].reason) == (0, "limit")
    assert taken.invalid_blocks == set(A + B)
    assert bench.sent == [], "tierd may not have pinned anything yet"


def test_slots_announced_after_the_end_are_given_back_at_once(bench: Bench) -> None:
    bench.loads.add([load_job(7, A, limit=0.0)], None, bench.clock.now)
    bench.run()
    bench.loads.on_announcement(_slots(bench, 7, 1))
    assert bench.sent == [LoadReleased(load=7)]
    assert bench.counters.snapshot()["late_slots"] == 1
    bench.run()
    assert bench.engine.submitted == []


def test_at_the_limit_nothing_more_is_submitted_and_what_is_submitted_is_drained_first(
    bench: Bench,
) -> None:
    bench.engine.hold()
    bench.loads.add([load_job(7, A, B, C, limit=2.0)], None, bench.clock.now)
    bench.loads.on_announcement(_slots(bench, 7, 1, 2, 3))
    bench.loads.advance(True)
    bench.loads.advance(True)
    assert bench.engine.held == 2
    bench.clock.now += 3
    bench.run()
    assert bench.engine.held == 2, "no third copy"
    assert bench.taken().loads == [], (
        "the device still writes into blocks that a report would give away"
    )
    bench.engine.move(1)
    bench.run()
    assert bench.taken().loads == []
    bench.engine.move(1)
    bench.run()
    taken = bench.taken()
    assert (taken.loads[0].keys_loaded, taken.loads[0].reason) == (2, "limit")
    assert taken.invalid_blocks == set(C)


def test_a_limit_that_passes_while_the_last_copy_runs_is_no_failure(bench: Bench) -> None:
    bench.engine.hold()
    bench.loads.add([load_job(7, A, limit=2.0)], None, bench.clock.now)
    bench.loads.on_announcement(_slots(bench, 7, 1))
    bench.run()
    bench.clock.now += 10
    assert bench.loads.next_deadline() is None
    bench.run()
    bench.engine.move()
    bench.run()
    assert bench.taken().loads[0].reason == ""


def test_a_cancelled_load_drains_and_reports(bench: Bench) -> None:
    bench.engine.hold()
    bench.loads.add([load_job(7, A, B)], None, bench.clock.now)
    bench.loads.on_announcement(_slots(bench, 7, 1, 2))
    bench.loads.advance(True)
    bench.loads.cancel([7, 7, 99])
    bench.run()
    assert bench.taken().loads == []
    bench.engine.move()
    bench.run()
    taken = bench.taken()
    assert (taken.loads[0].keys_loaded, taken.loads[0].reason) == (1, "cancelled")
    assert taken.recving == {"request-7"}
    assert bench.sent == [LoadReleased(load=7)]
    assert bench.counters.snapshot()["unknown_cancels"] == 1


def test_a_copy_that_fails_ends_the_load_before_it(bench: Bench) -> None:
    bench.loads.add([load_job(7, A, B, C)], None, bench.clock.now)
    bench.loads.on_announcement(_slots(bench, 7, 1, 2, 3))
    bench.loads.advance(True)
    bench.engine.hold()
    bench.engine.fail("device error")
    bench.loads.advance(True)
    bench.run()
    taken = bench.taken()
    assert (taken.loads[0].keys_loaded, taken.loads[0].reason) == (1, "copy")
    assert taken.invalid_blocks == set(B + C)
    assert bench.engine.drains == 1, "nothing is reported before the device is idle"


def test_an_address_outside_the_pool_ends_the_load_without_a_copy(bench: Bench) -> None:
    bench.loads.add([load_job(7, A, B)], None, bench.clock.now)
    bench.loads.on_announcement(LoadReady(load=7, slots=(bench.slot(1), 1 << 60)))
    bench.run()
    taken = bench.taken()
    assert taken.loads[0].keys_loaded == 1
    assert taken.loads[0].reason.startswith("address")
    assert taken.invalid_blocks == set(B)


def test_duplicate_jobs_and_announcements_are_swallowed_and_counted(bench: Bench) -> None:
    bench.engine.hold()
    bench.loads.add([load_job(7, A)], None, bench.clock.now)
    bench.loads.add([load_job(7, A)], None, bench.clock.now)
    bench.loads.on_announcement(_slots(bench, 7, 1))
    bench.loads.on_announcement(_slots(bench, 7, 2))
    bench.run()
    bench.engine.move()
    bench.run()
    assert len(bench.taken().loads) == 1
    assert bench.sent == [LoadReleased(load=7)]
    counted = bench.counters.snapshot()
    assert (counted["duplicate_loads"], counted["duplicate_slots"]) == (1, 1)


def test_a_second_load_of_a_waiting_request_is_never_a_second_report_for_it(bench: Bench) -> None:
    bench.loads.add(
        [load_job(7, A, request="r"), load_job(8, B, request="r")], None, bench.clock.now
    )
    bench.loads.on_announcement(_slots(bench, 7, 1))
    first = bench.taken()
    assert (first.loads[0].load, first.recving, first.invalid_blocks) == (8, set(), set(B))
    bench.run()
    assert bench.taken().recving == {"r"}


def test_a_request_may_load_again_after_its_first_load_has_ended(bench: Bench) -> None:
    for number in (7, 8):
        bench.loads.add([load_job(number, A, request="r")], None, bench.clock.now)
        bench.loads.on_announcement(_slots(bench, number, 1))
        bench.run()
        assert bench.taken().recving == {"r"}


def test_announcements_without_a_job_are_bounded_and_given_back(bench: Bench) -> None:
    for number in range(MAX_EARLY_ANNOUNCEMENTS + 2):
        bench.loads.on_announcement(_slots(bench, number, 1))
    assert bench.sent == [LoadReleased(load=0), LoadReleased(load=1)]
    assert bench.counters.snapshot()["stash_dropped"] == 2


def test_small_keys_share_a_submission(bench: Bench) -> None:
    loads = bench.new_loads(batch_bytes=2 * bench.slot_bytes)
    loads.add([load_job(7, A, B, C)], None, bench.clock.now)
    loads.on_announcement(_slots(bench, 7, 1, 2, 3))
    while loads.advance(True):
        pass
    assert [len(copies) for _, copies, _ in bench.engine.submitted] == [2, 1]
    assert bench.taken().loads[0].keys_loaded == 3


def test_without_a_pool_a_load_waits_until_its_limit(bench: Bench) -> None:
    bench.loads.add([load_job(7, A, limit=1.0)], None, bench.clock.now)
    bench.loads.on_announcement(_slots(bench, 7, 1))
    assert not bench.loads.advance(False)
    bench.clock.now += 1
    bench.loads.advance(False)
    assert bench.taken().loads[0].reason == "limit"
    assert bench.sent == [LoadReleased(load=7)]


def test_models_with_several_groups_report_the_request_and_no_blocks(bench: Bench) -> None:
    reports = CompletionQueue(single_group=False)
    context = replace(bench.context, completions=reports)
    loads = WorkerLoads(context, bench.sent.append)
    loads.add([load_job(7, A), load_job(8, B)], None, bench.clock.now)
    loads.on_announcement(_slots(bench, 7))
    loads.on_announcement(_slots(bench, 8, 1))
    while loads.advance(True):
        pass
    taken = reports.take()
    assert taken.invalid_blocks == set()
    assert taken.failed == {"request-7"}
    assert taken.recving == {"request-7", "request-8"}


def test_another_ranks_shard_begins_at_its_own_offset(bench: Bench) -> None:
    context = replace(bench.context, shard_offsets=(bench.slot_bytes,))
    loads = WorkerLoads(context, bench.sent.append)
    bench.fill_slot(3, 33)
    loads.add([load_job(7, A)], None, bench.clock.now)
    loads.on_announcement(_slots(bench, 7, 2))
    while loads.advance(True):
        pass
    assert set(bench.page_bytes(1)) == {33}
