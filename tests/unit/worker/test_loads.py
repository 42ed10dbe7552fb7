"""One load: generations of its slots, deadlines, cancellation, failures, partial chunks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.worker.worker_testbeds import RankTestbed, load_job

from kvtier.engines.common.worker_loads import WorkerLoads
from kvtier.engines.common.worker_state import CompletionQueue
from kvtier.transfer.engine import CopyEngine, Direction

A, B, C = (1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)


def test_a_load_fills_its_blocks_and_reports_once(rank_testbed: RankTestbed) -> None:
    rank_testbed.fill_slot(1, 11)
    rank_testbed.fill_slot(2, 22)
    rank_testbed.add(load_job(7, A, B, slots=rank_testbed.slots(1, 2)))
    rank_testbed.clock.now += 0.25
    rank_testbed.run()
    assert set(rank_testbed.page_bytes(1) + rank_testbed.page_bytes(4)) == {11}
    assert set(rank_testbed.page_bytes(5) + rank_testbed.page_bytes(8)) == {22}
    taken = rank_testbed.taken()
    (result,) = taken.loads
    assert (result.load, result.keys_loaded, result.reason) == (7, 2, "")
    assert (result.seconds, result.copied_bytes) == (0.25, 2 * rank_testbed.slot_bytes)
    assert (taken.recving, taken.failed, taken.invalid_blocks) == ({"request-7"}, set(), set())
    assert rank_testbed.taken().loads == []


def test_copies_wait_for_the_fence_of_their_step(rank_testbed: RankTestbed) -> None:
    fence = object()
    rank_testbed.add(load_job(7, A, slots=rank_testbed.slots(0)), fence=fence)
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
    rank_testbed.add(load_job(7, (5, 6), (7, 8, 9, 10), slots=rank_testbed.slots(1, 2), first=2))
    rank_testbed.run()
    assert [set(rank_testbed.page_bytes(block)) for block in (5, 6)] == [{102}, {103}]
    assert rank_testbed.page_bytes(4) == before
    assert rank_testbed.taken().loads[0].copied_bytes == 6 * block_bytes


def test_keys_that_are_not_in_ram_any_more_are_missing_from_the_end(
    rank_testbed: RankTestbed,
) -> None:
    rank_testbed.add(load_job(7, A, B, C, slots=rank_testbed.slots(1)))
    rank_testbed.run()
    taken = rank_testbed.taken()
    assert (taken.loads[0].keys_loaded, taken.loads[0].reason) == (1, "gone")
    assert taken.invalid_blocks == set(B + C)
    assert taken.recving == {"request-7"}


# Generations.


def test_a_slot_that_was_reused_before_the_copy_is_not_copied(rank_testbed: RankTestbed) -> None:
    rank_testbed.fill_slot(1, 11)
    rank_testbed.reuse(2, 99)
    rank_testbed.add(load_job(7, A, B, C, slots=rank_testbed.slots(1, 2, 3)))
    rank_testbed.run()
    taken = rank_testbed.taken()
    assert (taken.loads[0].keys_loaded, taken.loads[0].reason) == (1, "gone")
    assert taken.invalid_blocks == set(B + C)
    copied = [copy.shard for _, copies, _ in rank_testbed.engine.submitted for copy in copies]
    assert copied == [rank_testbed.slot(1)]
    assert rank_testbed.counters.snapshot()["slots_reused"] == 1


@pytest.mark.parametrize("reused", [1, 2, 3])
def test_a_slot_that_is_reused_during_the_copy_fails_the_load_from_there_on(
    rank_testbed: RankTestbed, reused: int
) -> None:
    """The copy has read anything: only the word after the copy shows it."""
    rank_testbed.engine.hold()
    rank_testbed.add(load_job(7, A, B, C, slots=rank_testbed.slots(1, 2, 3)))
    rank_testbed.run()
    rank_testbed.reuse(reused, 99)
    rank_testbed.engine.move()
    rank_testbed.run()
    rank_testbed.engine.move()
    rank_testbed.run()
    rank_testbed.engine.move()
    rank_testbed.run()
    taken = rank_testbed.taken()
    assert (taken.loads[0].keys_loaded, taken.loads[0].reason) == (reused - 1, "gone")
    assert taken.invalid_blocks == set((A + B + C)[4 * (reused - 1) :])


def test_an_odd_generation_is_never_believed(rank_testbed: RankTestbed) -> None:
    """The slot may be written, even if the job names that very word."""
    rank_testbed.reuse(1, 99)
    odd = rank_testbed.words[rank_testbed.slot(1) // 4096]
    job = replace(load_job(7, A, slots=rank_testbed.slots(1)), generations=(odd,))
    rank_testbed.add(job)
    rank_testbed.run()
    assert rank_testbed.taken().loads[0].keys_loaded == 0
    assert rank_testbed.engine.submitted == []


@pytest.mark.parametrize(("attached", "reason"), [(2, "epoch"), (0, "lost")])
def test_slots_named_by_another_tierd_are_not_touched(
    rank_testbed: RankTestbed, attached: int, reason: str
) -> None:
    rank_testbed.add(load_job(7, A, slots=rank_testbed.slots(1), epoch=1), epoch=attached)
    rank_testbed.run()
    taken = rank_testbed.taken()
    assert (taken.loads[0].keys_loaded, taken.loads[0].reason) == (0, reason)
    assert taken.invalid_blocks == set(A)
    assert rank_testbed.engine.submitted == []


def test_without_generation_words_nothing_is_loaded(rank_testbed: RankTestbed) -> None:
    rank_testbed.generations.words = None
    rank_testbed.add(load_job(7, A, slots=rank_testbed.slots(1)))
    rank_testbed.run()
    assert rank_testbed.taken().loads[0].keys_loaded == 0
    assert rank_testbed.engine.submitted == []


# Ends.


def test_at_the_deadline_submitted_copies_drain_before_the_report(
    rank_testbed: RankTestbed,
) -> None:
    rank_testbed.engine.hold()
    rank_testbed.add(load_job(7, A, B, C, slots=rank_testbed.slots(1, 2, 3), limit=2.0))
    rank_testbed.loads.advance()
    rank_testbed.loads.advance()
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
    rank_testbed.add(load_job(7, A, slots=rank_testbed.slots(1), limit=2.0))
    rank_testbed.run()
    rank_testbed.clock.now += 10
    rank_testbed.run()
    rank_testbed.engine.move()
    rank_testbed.run()
    assert rank_testbed.taken().loads[0].reason == ""


def test_a_load_without_room_ends_at_its_deadline(rank_testbed: RankTestbed) -> None:
    rank_testbed.engine.limit(Direction.TO_DEVICE, rank_testbed.slot_bytes)
    rank_testbed.engine.hold()
    rank_testbed.add(
        load_job(7, A, slots=rank_testbed.slots(1)), load_job(8, B, slots=rank_testbed.slots(2))
    )
    rank_testbed.run()
    assert rank_testbed.engine.held == 1
    rank_testbed.clock.now += 10
    rank_testbed.run()
    assert [result.reason for result in rank_testbed.taken().loads] == ["limit"]
    rank_testbed.engine.move()
    rank_testbed.run()
    assert [result.reason for result in rank_testbed.taken().loads] == [""]


def test_a_later_load_does_not_overtake_one_that_waits_for_room(rank_testbed: RankTestbed) -> None:
    rank_testbed.engine.limit(Direction.TO_DEVICE, 2 * rank_testbed.slot_bytes)
    rank_testbed.engine.hold()
    loads = rank_testbed.new_loads(batch_bytes=2 * rank_testbed.slot_bytes)
    rank_testbed.loads = loads
    rank_testbed.add(
        load_job(6, (13,), slots=rank_testbed.slots(4)),
        load_job(7, A, B, slots=rank_testbed.slots(1, 2)),
        load_job(8, (14,), slots=rank_testbed.slots(3)),
    )
    rank_testbed.run()
    assert rank_testbed.engine.held == 1
    rank_testbed.engine.move()
    rank_testbed.run()
    assert [len(copies) for _, copies, _ in rank_testbed.engine.submitted] == [1, 2]


def test_a_cancelled_load_drains_and_reports(rank_testbed: RankTestbed) -> None:
    rank_testbed.engine.hold()
    rank_testbed.add(load_job(7, A, B, slots=rank_testbed.slots(1, 2)))
    rank_testbed.loads.advance()
    rank_testbed.loads.cancel([7, 7, 99])
    rank_testbed.run()
    assert rank_testbed.taken().loads == []
    rank_testbed.engine.move()
    rank_testbed.run()
    taken = rank_testbed.taken()
    assert (taken.loads[0].keys_loaded, taken.loads[0].reason) == (1, "cancelled")
    assert taken.recving == {"request-7"}
    assert rank_testbed.counters.snapshot()["unknown_cancels"] == 1


def test_a_copy_that_fails_ends_the_load_before_it(rank_testbed: RankTestbed) -> None:
    rank_testbed.add(load_job(7, A, B, C, slots=rank_testbed.slots(1, 2, 3)))
    rank_testbed.loads.advance()
    rank_testbed.engine.hold()
    rank_testbed.engine.fail("device error")
    rank_testbed.loads.advance()
    rank_testbed.run()
    taken = rank_testbed.taken()
    assert (taken.loads[0].keys_loaded, taken.loads[0].reason) == (1, "copy")
    assert taken.invalid_blocks == set(B + C)


def test_a_submission_that_fails_halfway_is_reported_after_its_running_part(
    rank_testbed: RankTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device may still write into the blocks."""
    engine = rank_testbed.engine
    start = type(engine)._start

    def half(self: CopyEngine, handle: object, copies: object, after: object) -> None:
        start(self, handle, copies, after)  # type: ignore[arg-type]
        raise RuntimeError("no memory for the rest")

    monkeypatch.setattr(type(engine), "_start", half)
    monkeypatch.setattr(type(engine), "_seal", lambda *_: True)
    engine.hold()
    rank_testbed.add(load_job(7, A, slots=rank_testbed.slots(1)))
    rank_testbed.run()
    assert rank_testbed.taken().loads == []
    engine.move()
    rank_testbed.run()
    taken = rank_testbed.taken()
    assert (taken.loads[0].keys_loaded, taken.loads[0].reason) == (0, "copy")
    assert engine.in_flight_bytes(Direction.TO_DEVICE) == 0


def test_an_address_outside_the_pool_ends_the_load_without_a_copy(
    rank_testbed: RankTestbed,
) -> None:
    rank_testbed.add(load_job(7, A, B, slots=(rank_testbed.slot(1), 1 << 60)))
    rank_testbed.run()
    taken = rank_testbed.taken()
    assert taken.loads[0].keys_loaded == 1
    assert taken.loads[0].reason.startswith("address")
    assert taken.invalid_blocks == set(B)


def test_a_job_that_comes_twice_is_loaded_once(rank_testbed: RankTestbed) -> None:
    rank_testbed.engine.hold()
    job = load_job(7, A, slots=rank_testbed.slots(1))
    rank_testbed.add(job)
    rank_testbed.add(job)
    rank_testbed.run()
    rank_testbed.engine.move()
    rank_testbed.run()
    rank_testbed.add(job)
    rank_testbed.run()
    assert len(rank_testbed.taken().loads) == 1
    assert rank_testbed.counters.snapshot()["duplicate_loads"] == 2


def test_a_second_load_of_a_waiting_request_is_never_a_second_report_for_it(
    rank_testbed: RankTestbed,
) -> None:
    first_job = replace(load_job(7, A, slots=rank_testbed.slots(1)), request_id="r")
    rank_testbed.add(first_job, replace(load_job(8, B), request_id="r"))
    first = rank_testbed.taken()
    assert (first.loads[0].load, first.recving, first.invalid_blocks) == (8, set(), set(B))
    rank_testbed.run()
    assert rank_testbed.taken().recving == {"r"}


def test_a_request_may_load_again_after_its_first_load_has_ended(rank_testbed: RankTestbed) -> None:
    for number in (7, 8):
        job = load_job(number, A, slots=rank_testbed.slots(1))
        rank_testbed.add(replace(job, request_id="r"))
        rank_testbed.run()
        assert rank_testbed.taken().recving == {"r"}


def test_small_keys_share_a_submission(rank_testbed: RankTestbed) -> None:
    rank_testbed.loads = rank_testbed.new_loads(batch_bytes=2 * rank_testbed.slot_bytes)
    rank_testbed.add(load_job(7, A, B, C, slots=rank_testbed.slots(1, 2, 3)))
    rank_testbed.run()
    assert [len(copies) for _, copies, _ in rank_testbed.engine.submitted] == [2, 1]
    assert rank_testbed.taken().loads[0].keys_loaded == 3


def test_models_with_several_groups_report_the_request_and_no_blocks(
    rank_testbed: RankTestbed,
) -> None:
    reports = CompletionQueue(single_group=False)
    rank_testbed.loads = WorkerLoads(replace(rank_testbed.context, completions=reports))
    rank_testbed.add(load_job(7, A), load_job(8, B, slots=rank_testbed.slots(1)))
    rank_testbed.run()
    taken = reports.take()
    assert taken.invalid_blocks == set()
    assert taken.failed == {"request-7"}
    assert taken.recving == {"request-7", "request-8"}


def test_each_ranks_shard_starts_at_its_own_offset(rank_testbed: RankTestbed) -> None:
    context = replace(rank_testbed.context, shards=rank_testbed.shards(rank_testbed.slot_bytes))
    rank_testbed.loads = WorkerLoads(context)
    rank_testbed.fill_slot(3, 33)
    rank_testbed.add(load_job(7, A, slots=rank_testbed.slots(2)))
    rank_testbed.run()
    assert set(rank_testbed.page_bytes(1)) == {33}


def test_loads_whose_end_raises_are_reported_as_failed(
    rank_testbed: RankTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank_testbed.engine.hold()
    rank_testbed.add(load_job(7, A, slots=rank_testbed.slots(0)))
    rank_testbed.add(load_job(8, B, slots=rank_testbed.slots(1)))
    rank_testbed.run()
    monkeypatch.setattr(rank_testbed.generations, "unchanged", lambda *_: 1 // 0)
    rank_testbed.loads.abandon("off")
    taken = rank_testbed.taken()
    assert {result.load: result.reason for result in taken.loads} == {7: "error", 8: "error"}
    assert taken.recving == {"request-7", "request-8"}
    assert taken.invalid_blocks == {*A, *B}
    assert len(rank_testbed.loads) == 0
    assert rank_testbed.counters.snapshot()["step_errors"] == 2
