"""One load: order of job and announcement, deadlines, cancellation, failures, partial chunks."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.worker.worker_testbeds import RankTestbed, load_job

from kvtier.engines.vllm.worker_state import CompletionQueue
from kvtier.engines.vllm.worker_transfers import MAX_EARLY_ANNOUNCEMENTS, WorkerLoads
from kvtier.tierd.wire import LoadReady, LoadReleased
from kvtier.transfer.engine import Direction

A, B, C = (1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)


def _slots(
    rank_testbed: RankTestbed, load: int, *numbers: int, tiers: tuple[int, ...] = ()
) -> LoadReady:
    return LoadReady(
        load=load, slots=tuple(rank_testbed.slot(number) for number in numbers), tiers=tiers
    )


def test_a_load_fills_its_blocks_and_reports_once(rank_testbed: RankTestbed) -> None:
    rank_testbed.fill_slot(1, 11)
    rank_testbed.fill_slot(2, 22)
    rank_testbed.loads.add([load_job(7, A, B)], None, rank_testbed.clock.now)
    rank_testbed.loads.on_announcement(_slots(rank_testbed, 7, 1, 2, tiers=(0, 1)))
    rank_testbed.clock.now += 0.25
    rank_testbed.run()
    assert set(rank_testbed.page_bytes(1) + rank_testbed.page_bytes(4)) == {11}
    assert set(rank_testbed.page_bytes(5) + rank_testbed.page_bytes(8)) == {22}
    taken = rank_testbed.taken()
    (result,) = taken.loads
    assert (result.load, result.keys_loaded, result.tiers, result.reason) == (7, 2, (0, 1), "")
    assert (result.seconds, result.copied_bytes) == (0.25, 2 * rank_testbed.slot_bytes)
    assert (taken.recving, taken.failed, taken.invalid_blocks) == ({"request-7"}, set(), set())
    assert rank_testbed.sent == [LoadReleased(load=7)]
    assert rank_testbed.taken().loads == []


def test_an_announcement_may_come_before_its_job(rank_testbed: RankTestbed) -> None:
    rank_testbed.fill_slot(0, 5)
    rank_testbed.loads.on_announcement(_slots(rank_testbed, 7, 0))
    rank_testbed.loads.add([load_job(7, A)], None, rank_testbed.clock.now)
    rank_testbed.run()
    assert rank_testbed.taken().loads[0].keys_loaded == 1


def test_copies_wait_for_the_fence_of_their_step(rank_testbed: RankTestbed) -> None:
    fence = object()
    rank_testbed.loads.add([load_job(7, A)], fence, rank_testbed.clock.now)
    rank_testbed.loads.on_announcement(_slots(rank_testbed, 7, 0))
    rank_testbed.run()
    assert [(direction, after) for direction, _, after in rank_testbed.engine.submitted] == [
        (Direction.TO_DEVICE, fence)
    ]


def test_a_load_that_starts_inside_a_chunk_copies_only_the_missing_blocks(
    rank_testbed: RankTestbed,
) -> None:
    pool = rank_testbed.engine.pool
    assert pool is not None
    block_bytes = rank_testbed.slot_bytes // 4
    for index in range(4):
        begin = rank_testbed.slot(1) + index * block_bytes
        pool.memory[begin : begin + block_bytes] = 100 + index
    before = rank_testbed.page_bytes(4)
    rank_testbed.loads.add(
        [load_job(7, (5, 6), B := (7, 8, 9, 10), first=2)], None, rank_testbed.clock.now
    )
    rank_testbed.loads.on_announcement(_slots(rank_testbed, 7, 1, 2))
    rank_testbed.run()
    assert [set(rank_testbed.page_bytes(block)) for block in (5, 6)] == [{102}, {103}]
    assert rank_testbed.page_bytes(4) == before
    assert rank_testbed.taken().loads[0].copied_bytes == 6 * block_bytes
    assert B


def test_evicted_keys_are_missing_from_the_end(rank_testbed: RankTestbed) -> None:
    rank_testbed.loads.add([load_job(7, A, B, C)], None, rank_testbed.clock.now)
    rank_testbed.loads.on_announcement(_slots(rank_testbed, 7, 1))
    rank_testbed.run()
    taken = rank_testbed.taken()
    assert (taken.loads[0].keys_loaded, taken.loads[0].reason) == (1, "gone")
    assert taken.invalid_blocks == set(B + C)
    assert taken.recving == {"request-7"}


def test_without_an_announcement_all_blocks_are_invalid_at_the_deadline(
    rank_testbed: RankTestbed,
) -> None:
    rank_testbed.loads.add([load_job(7, A, B, limit=2.0)], None, rank_testbed.clock.now)
    rank_testbed.clock.now += 1.99
    rank_testbed.run()
    assert rank_testbed.taken().loads == []
    assert rank_testbed.loads.next_deadline() == 102.0
    rank_testbed.clock.now += 0.01
    rank_testbed.run()
    taken = rank_testbed.taken()
    assert (taken.loads[0].keys_loaded, taken.loads[0].reason) == (0, "limit")
    assert taken.invalid_blocks == set(A + B)
    assert rank_testbed.sent == [], "tierd may not have pinned anything yet"


def test_slots_announced_after_the_end_are_released_at_once(rank_testbed: RankTestbed) -> None:
    rank_testbed.loads.add([load_job(7, A, limit=0.0)], None, rank_testbed.clock.now)
    rank_testbed.run()
    rank_testbed.loads.on_announcement(_slots(rank_testbed, 7, 1))
    assert rank_testbed.sent == [LoadReleased(load=7)]
    assert rank_testbed.counters.snapshot()["late_slots"] == 1
    rank_testbed.run()
    assert rank_testbed.engine.submitted == []


def test_at_the_deadline_submitted_copies_drain_before_the_report(
    rank_testbed: RankTestbed,
) -> None:
    rank_testbed.engine.hold()
    rank_testbed.loads.add([load_job(7, A, B, C, limit=2.0)], None, rank_testbed.clock.now)
    rank_testbed.loads.on_announcement(_slots(rank_testbed, 7, 1, 2, 3))
    rank_testbed.loads.advance(True)
    rank_testbed.loads.advance(True)
    assert rank_testbed.engine.held == 2
    rank_testbed.clock.now += 3
    rank_testbed.run()
    assert rank_testbed.engine.held == 2, "no third copy"
    assert rank_testbed.taken().loads == [], (
        "the device still writes into blocks that a report would give away"
    )
    rank_testbed.engine.move(1)
    rank_testbed.run()
    assert rank_testbed.taken().loads == []
    rank_testbed.engine.move(1)
    rank_testbed.run()
    taken = rank_testbed.taken()
    assert (taken.loads[0].keys_loaded, taken.loads[0].reason) == (2, "limit")
    assert taken.invalid_blocks == set(C)


def test_a_deadline_during_the_last_copy_is_no_failure(rank_testbed: RankTestbed) -> None:
    rank_testbed.engine.hold()
    rank_testbed.loads.add([load_job(7, A, limit=2.0)], None, rank_testbed.clock.now)
    rank_testbed.loads.on_announcement(_slots(rank_testbed, 7, 1))
    rank_testbed.run()
    rank_testbed.clock.now += 10
    assert rank_testbed.loads.next_deadline() is None
    rank_testbed.run()
    rank_testbed.engine.move()
    rank_testbed.run()
    assert rank_testbed.taken().loads[0].reason == ""


def test_a_cancelled_load_drains_and_reports(rank_testbed: RankTestbed) -> None:
    rank_testbed.engine.hold()
    rank_testbed.loads.add([load_job(7, A, B)], None, rank_testbed.clock.now)
    rank_testbed.loads.on_announcement(_slots(rank_testbed, 7, 1, 2))
    rank_testbed.loads.advance(True)
    rank_testbed.loads.cancel([7, 7, 99])
    rank_testbed.run()
    assert rank_testbed.taken().loads == []
    rank_testbed.engine.move()
    rank_testbed.run()
    taken = rank_testbed.taken()
    assert (taken.loads[0].keys_loaded, taken.loads[0].reason) == (1, "cancelled")
    assert taken.recving == {"request-7"}
    assert rank_testbed.sent == [LoadReleased(load=7)]
    assert rank_testbed.counters.snapshot()["unknown_cancels"] == 1


def test_a_copy_that_fails_ends_the_load_before_it(rank_testbed: RankTestbed) -> None:
    rank_testbed.loads.add([load_job(7, A, B, C)], None, rank_testbed.clock.now)
    rank_testbed.loads.on_announcement(_slots(rank_testbed, 7, 1, 2, 3))
    rank_testbed.loads.advance(True)
    rank_testbed.engine.hold()
    rank_testbed.engine.fail("device error")
    rank_testbed.loads.advance(True)
    rank_testbed.run()
    taken = rank_testbed.taken()
    assert (taken.loads[0].keys_loaded, taken.loads[0].reason) == (1, "copy")
    assert taken.invalid_blocks == set(B + C)
    assert rank_testbed.engine.drains == 1, "nothing is reported before the device is idle"


def test_an_address_outside_the_pool_ends_the_load_without_a_copy(
    rank_testbed: RankTestbed,
) -> None:
    rank_testbed.loads.add([load_job(7, A, B)], None, rank_testbed.clock.now)
    rank_testbed.loads.on_announcement(LoadReady(load=7, slots=(rank_testbed.slot(1), 1 << 60)))
    rank_testbed.run()
    taken = rank_testbed.taken()
    assert taken.loads[0].keys_loaded == 1
    assert taken.loads[0].reason.startswith("address")
    assert taken.invalid_blocks == set(B)


def test_duplicate_jobs_and_announcements_are_ignored_and_counted(
    rank_testbed: RankTestbed,
) -> None:
    rank_testbed.engine.hold()
    rank_testbed.loads.add([load_job(7, A)], None, rank_testbed.clock.now)
    rank_testbed.loads.add([load_job(7, A)], None, rank_testbed.clock.now)
    rank_testbed.loads.on_announcement(_slots(rank_testbed, 7, 1))
    rank_testbed.loads.on_announcement(_slots(rank_testbed, 7, 2))
    rank_testbed.run()
    rank_testbed.engine.move()
    rank_testbed.run()
    assert len(rank_testbed.taken().loads) == 1
    assert rank_testbed.sent == [LoadReleased(load=7)]
    counted = rank_testbed.counters.snapshot()
    assert (counted["duplicate_loads"], counted["duplicate_slots"]) == (1, 1)


def test_a_second_load_of_a_waiting_request_is_never_a_second_report_for_it(
    rank_testbed: RankTestbed,
) -> None:
    rank_testbed.loads.add(
        [load_job(7, A, request="r"), load_job(8, B, request="r")], None, rank_testbed.clock.now
    )
    rank_testbed.loads.on_announcement(_slots(rank_testbed, 7, 1))
    first = rank_testbed.taken()
    assert (first.loads[0].load, first.recving, first.invalid_blocks) == (8, set(), set(B))
    rank_testbed.run()
    assert rank_testbed.taken().recving == {"r"}


def test_a_request_may_load_again_after_its_first_load_has_ended(rank_testbed: RankTestbed) -> None:
    for number in (7, 8):
        rank_testbed.loads.add([load_job(number, A, request="r")], None, rank_testbed.clock.now)
        rank_testbed.loads.on_announcement(_slots(rank_testbed, number, 1))
        rank_testbed.run()
        assert rank_testbed.taken().recving == {"r"}


def test_announcements_without_a_job_are_bounded_and_released(rank_testbed: RankTestbed) -> None:
    for number in range(MAX_EARLY_ANNOUNCEMENTS + 2):
        rank_testbed.loads.on_announcement(_slots(rank_testbed, number, 1))
    assert rank_testbed.sent == [LoadReleased(load=0), LoadReleased(load=1)]
    assert rank_testbed.counters.snapshot()["stash_dropped"] == 2


def test_small_keys_share_a_submission(rank_testbed: RankTestbed) -> None:
    loads = rank_testbed.new_loads(batch_bytes=2 * rank_testbed.slot_bytes)
    loads.add([load_job(7, A, B, C)], None, rank_testbed.clock.now)
    loads.on_announcement(_slots(rank_testbed, 7, 1, 2, 3))
    while loads.advance(True):
        pass
    assert [len(copies) for _, copies, _ in rank_testbed.engine.submitted] == [2, 1]
    assert rank_testbed.taken().loads[0].keys_loaded == 3


def test_without_a_pool_a_load_waits_until_its_limit(rank_testbed: RankTestbed) -> None:
    rank_testbed.loads.add([load_job(7, A, limit=1.0)], None, rank_testbed.clock.now)
    rank_testbed.loads.on_announcement(_slots(rank_testbed, 7, 1))
    assert not rank_testbed.loads.advance(False)
    rank_testbed.clock.now += 1
    rank_testbed.loads.advance(False)
    assert rank_testbed.taken().loads[0].reason == "limit"
    assert rank_testbed.sent == [LoadReleased(load=7)]


def test_models_with_several_groups_report_the_request_and_no_blocks(
    rank_testbed: RankTestbed,
) -> None:
    reports = CompletionQueue(single_group=False)
    context = replace(rank_testbed.context, completions=reports)
    loads = WorkerLoads(context, rank_testbed.sent.append)
    loads.add([load_job(7, A), load_job(8, B)], None, rank_testbed.clock.now)
    loads.on_announcement(_slots(rank_testbed, 7))
    loads.on_announcement(_slots(rank_testbed, 8, 1))
    while loads.advance(True):
        pass
    taken = reports.take()
    assert taken.invalid_blocks == set()
    assert taken.failed == {"request-7"}
    assert taken.recving == {"request-7", "request-8"}


def test_each_ranks_shard_starts_at_its_own_offset(rank_testbed: RankTestbed) -> None:
    context = replace(rank_testbed.context, shards=rank_testbed.shards(rank_testbed.slot_bytes))
    loads = WorkerLoads(context, rank_testbed.sent.append)
    rank_testbed.fill_slot(3, 33)
    loads.add([load_job(7, A)], None, rank_testbed.clock.now)
    loads.on_announcement(_slots(rank_testbed, 7, 2))
    while loads.advance(True):
        pass
    assert set(rank_testbed.page_bytes(1)) == {33}
