"""What users of ATOM's offload connector know, one test each: when it loads, saves and wakes."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from tests.support.atom_schedules import BLOCK, Bench
from tests.support.atom_tiers import RankFaults, TiersOptions

from kvtier.engines.atom.scheduler import AtomScheduler
from kvtier.engines.atom.types import KVConnectorOutput, LoadOperationId
from kvtier.testing.atom_scheduler import SchedulerOptions
from kvtier.testing.atom_sequence import StandInSequence, Status

CHUNK = 8
PROMPT = list(range(41))
"""Five chunks and a token."""


def stored(bench: Bench, tokens: list[int] | None = None) -> None:
    """A first request has stored its prompt; the cache in GPU memory is lost afterwards."""
    seq = bench.add(tokens or PROMPT, number=900)
    bench.run()
    bench.check(seq)
    bench.forget_gpu()
    bench.tiers.clock.now += 10


def count(bench: Bench, name: str) -> int:
    return bench.tiers.connector.get_statistics().get(name, 0)


def step_until(bench: Bench, seq: StandInSequence, status: Status) -> None:
    for _ in range(50):
        if seq.status is status:
            return
        bench.engine.step()
    raise AssertionError(f"{seq.status}: {bench.describe()}")


def test_a_prompt_that_is_in_ram_is_loaded_and_its_rest_computed() -> None:
    bench = Bench.make()
    stored(bench)
    seq = bench.add(PROMPT, max_tokens=3)
    bench.engine.step()
    assert seq.status is Status.WAITING_FOR_REMOTE_KVS
    assert (seq.offload_load_start_tokens, seq.offload_loaded_tokens) == (0, 40)
    bench.run()
    assert count(bench, "loaded_tokens") == 40
    bench.check(seq)
    bench.check_end()


def test_scheme_a_the_decision_is_made_after_the_allocation_on_the_real_local_hit() -> None:
    bench = Bench.make()
    seq = bench.add(PROMPT, number=1)
    bench.run()
    # Everything is in RAM and in GPU memory: the lookup says yes, the decision no.
    again = bench.add(PROMPT, number=2)
    assert bench.tiers.connector.get_num_new_matched_tokens(again)[1]
    bench.run()
    assert count(bench, "loads") == 0
    assert count(bench, "nothing_to_load") == 1
    bench.check(seq, again)


def test_a_part_that_is_in_gpu_memory_is_not_loaded_over() -> None:
    bench = Bench.make()
    stored(bench)
    bench.add(PROMPT[:17], number=1)
    bench.run()
    table_of_first = set(bench.blocks._index.values())
    seq = bench.add(PROMPT, number=2)
    bench.engine.step()
    bench.engine.step()
    assert seq.offload_load_start_tokens in (16, None)
    bench.run()
    assert count(bench, "loaded_tokens") == 16 + 24, "the first load, and what follows 16 tokens"
    assert table_of_first
    bench.check(seq)


def test_unaligned_hand_off_the_head_is_computed_up_to_the_next_boundary_then_loaded() -> None:
    bench = Bench.make()
    stored(bench)
    # Three blocks of four tokens in GPU memory: the hit ends inside the second chunk of eight.
    bench.tiers.connector.loads._limits = replace(
        bench.tiers.connector.loads._limits, min_load_tokens=1_000
    )
    bench.add(PROMPT[:14], number=1)
    bench.run()
    bench.tiers.connector.loads._limits = replace(
        bench.tiers.connector.loads._limits, min_load_tokens=8
    )
    seq = bench.add(PROMPT, number=2)
    bench.engine.step()
    assert seq.status is Status.RUNNING
    assert seq.num_cached_tokens == 16, "one short step"
    bench.engine.step()
    assert seq.status is Status.WAITING_FOR_REMOTE_KVS
    assert (seq.offload_load_start_tokens, seq.offload_loaded_tokens) == (16, 40)
    bench.run()
    assert count(bench, "unaligned") == 1
    assert count(bench, "loaded_tokens") == 24
    bench.check(seq)
    bench.check_end()


@pytest.mark.parametrize(("tokens", "loads"), [(24, 0), (25, 1), (41, 1)])
def test_minimum_load_a_shorter_hit_is_computed(tokens: int, loads: int) -> None:
    bench = Bench.make(options=TiersOptions(min_tokens=24))
    stored(bench)
    seq = bench.add(PROMPT[:tokens])
    bench.run()
    assert count(bench, "loads") == loads
    bench.check(seq)


@pytest.mark.parametrize(("tokens", "objects"), [(23, 0), (24, 3)])
def test_minimum_save_a_shorter_prompt_is_not_saved(tokens: int, objects: int) -> None:
    bench = Bench.make(options=TiersOptions(min_tokens=24))
    bench.add(PROMPT[:tokens])
    bench.run()
    assert bench.tiers.tierd.stored == objects


def test_completion_sets_carry_the_plain_ids_that_the_engine_compares() -> None:
    bench = Bench.make()
    stored(bench)
    seq = bench.add(PROMPT, number=7)
    bench.engine.step()
    operation = LoadOperationId(7, next(iter(bench.tiers.connector.loads.in_flight._active)))
    output = bench.tiers.connector.process_completions(
        KVConnectorOutput(finished_loading={operation})
    )
    assert output.finished_loading == {7}
    assert type(next(iter(output.finished_loading))) is int
    assert output.failed_loading == set()
    assert output.finished_sending == set()
    assert seq.status is Status.WAITING_FOR_REMOTE_KVS


def test_a_late_completion_of_an_earlier_generation_is_swallowed() -> None:
    bench = Bench.make()
    stored(bench)
    first = bench.add(PROMPT, number=7)
    bench.tiers.ranks.faults = RankFaults(progress=0.0)
    bench.engine.step()
    earlier = LoadOperationId(7, max(bench.tiers.connector.loads.in_flight._active))
    bench.tiers.ranks.faults = RankFaults(progress=1.0)
    bench.run()
    bench.check(first)
    bench.forget_gpu()
    bench.tiers.ranks.faults = RankFaults(progress=0.0)
    successor = bench.add(PROMPT, number=7)
    bench.engine.step()
    assert successor.status is Status.WAITING_FOR_REMOTE_KVS
    for late in (
        KVConnectorOutput(finished_loading={earlier}),
        KVConnectorOutput(failed_loading={earlier}),
        KVConnectorOutput(finished_loading={7}),
    ):
        bench.engine.scheduler.update_from_completions(late)
        bench.engine.step()
        assert successor.status is Status.WAITING_FOR_REMOTE_KVS
    bench.tiers.ranks.faults = RankFaults(progress=1.0)
    bench.run()
    assert count(bench, "late_report") == 2
    assert count(bench, "unidentified_report") == 1
    bench.check(successor)
    bench.check_end()


def test_a_successor_with_the_id_of_an_aborted_sequence_gets_its_own_completion() -> None:
    bench = Bench.make()
    stored(bench)
    bench.tiers.ranks.faults = RankFaults(progress=0.0)
    aborted = bench.add(PROMPT, number=7)
    bench.engine.step()
    bench.engine.scheduler.abort(aborted)
    bench.engine.step()
    assert aborted.awaits_aborted_load
    successor = bench.add(PROMPT, max_tokens=20, number=7)
    bench.engine.step()
    old, new = sorted(bench.tiers.connector.loads.in_flight._active)
    # The successor's load ends first. Its end must not release the blocks of the other.
    held = KVConnectorOutput(finished_loading={LoadOperationId(7, new)})
    bench.engine.scheduler.update_from_completions(held)
    bench.engine.step()
    assert aborted.awaits_aborted_load
    assert aborted.block_table
    assert successor.status is Status.WAITING_FOR_REMOTE_KVS
    both = KVConnectorOutput(failed_loading={LoadOperationId(7, old)})
    bench.engine.scheduler.update_from_completions(both)
    assert not aborted.block_table
    bench.engine.scheduler.update_from_completions(KVConnectorOutput())
    bench.engine.step()
    assert successor.status is Status.RUNNING


def test_authority_under_tensor_parallelism_an_object_exists_once_every_rank_has_saved() -> None:
    bench = Bench.make(options=TiersOptions(ranks=2))
    bench.tiers.ranks.faults = RankFaults(progress=0.0)
    bench.add(PROMPT, max_tokens=1)
    for _ in range(6):
        bench.engine.step()
    jobs = list(bench.tiers.ranks._jobs)
    for job in [each for each in jobs if each.rank == 0]:
        bench.tiers.ranks._advance(job)
    assert bench.tiers.tierd.stored == 0
    assert not bench.tiers.tierd.ram
    probe = bench.add(PROMPT, number=55)
    assert bench.tiers.connector.get_num_new_matched_tokens(probe) == (0, False)
    for job in [each for each in jobs if each.rank == 1]:
        bench.tiers.ranks._advance(job)
    assert bench.tiers.tierd.stored == 5
    assert bench.tiers.connector.get_num_new_matched_tokens(probe) == (40, True)


def test_under_tensor_parallelism_a_load_that_fails_on_one_rank_has_failed() -> None:
    bench = Bench.make(options=TiersOptions(ranks=2))
    stored(bench)
    seq = bench.add(PROMPT)
    bench.engine.step()
    job = next(each for each in bench.tiers.ranks._jobs if each.rank == 1)
    job.cancelled = True
    bench.run()
    assert count(bench, "loads_failed") == 1
    assert count(bench, "loads_whole") == 0
    bench.check(seq)
    bench.check_end()


def test_a_lookup_is_answered_in_the_scheduler_without_a_message() -> None:
    bench = Bench.make()
    stored(bench)
    sent: list[object] = []
    bench.tiers.tierd.send = lambda message: sent.append(message) is None  # type: ignore[method-assign]
    seq = StandInSequence(1, PROMPT, BLOCK, 1)
    assert bench.tiers.connector.get_num_new_matched_tokens(seq) == (40, True)
    assert sent == []


def test_frontier_what_a_failed_load_did_not_bring_is_computed_and_saved_again() -> None:
    bench = Bench.make()
    stored(bench)
    assert bench.tiers.tierd.stored == 5
    bench.tiers.ranks.faults = RankFaults(progress=0.0)
    seq = bench.add(PROMPT)
    bench.engine.step()
    assert seq.status is Status.WAITING_FOR_REMOTE_KVS
    # The objects are lost after they were announced.
    bench.tiers.tierd.loading.clear()
    bench.tiers.tierd.evict(_Always(), everything=True)
    bench.tiers.ranks.faults = RankFaults(progress=1.0)
    bench.run()
    assert count(bench, "loads_failed") == 1
    assert bench.tiers.tierd.stored == 10, "all five chunks were saved again"
    bench.check(seq)
    bench.check_end()


def test_what_a_tier_holds_is_not_saved_again() -> None:
    bench = Bench.make()
    stored(bench)
    longer = [*PROMPT, *range(100, 120)]
    bench.add(longer)
    bench.run()
    assert bench.tiers.tierd.stored == 5 + (61 // CHUNK - 5)
    bench.check_end()


def test_blocks_of_a_sequence_that_ended_are_kept_until_its_saves_have_ended() -> None:
    bench = Bench.make()
    bench.tiers.ranks.faults = RankFaults(progress=0.0)
    seq = bench.add(PROMPT, max_tokens=1)
    step_until(bench, seq, Status.FINISHED)
    for _ in range(3):
        bench.engine.step()
    assert seq.block_table
    assert bench.engine.scheduler.deferred_free_blocks
    assert not bench.engine.idle
    bench.tiers.ranks.faults = RankFaults(progress=1.0)
    bench.run()
    assert not seq.block_table
    assert bench.tiers.tierd.stored == 5
    bench.check_end()


def test_blocks_are_freed_although_tierd_was_lost_before_a_planned_save_left() -> None:
    bench = Bench.make()
    bench.tiers.ranks.faults = RankFaults(progress=0.0)
    seq = bench.add(PROMPT[:9], max_tokens=1)
    bench.engine.step()
    assert seq.status is Status.FINISHED
    assert seq.block_table, "its save is planned"
    bench.tiers.tierd.lose()
    bench.run()
    assert not seq.block_table
    bench.check_end()


def test_a_sequence_that_was_preempted_after_sampling_is_computed_not_loaded() -> None:
    bench = Bench.make(
        options=TiersOptions(num_blocks=24), scheduling=SchedulerOptions(alignment=BLOCK)
    )
    first = bench.add(PROMPT, max_tokens=30, number=1)
    second = bench.add([500 + token for token in PROMPT], max_tokens=30, number=2)
    bench.run()
    assert bench.engine.scheduler.preemptions > 0
    bench.check(first, second)
    bench.check_end()


def test_a_loaded_waiter_goes_before_a_sequence_that_does_not_fit() -> None:
    bench = Bench.make(options=TiersOptions(num_blocks=24))
    stored(bench)
    parked = bench.add(PROMPT, number=1)
    bench.tiers.ranks.faults = RankFaults(progress=0.0)
    bench.engine.step()
    large = bench.add([700 + token for token in range(80)], number=2)
    bench.engine.scheduler.waiting.rotate(1)
    bench.engine.step()
    assert large.status is Status.WAITING, "it does not fit beside the parked one"
    bench.tiers.ranks.faults = RankFaults(progress=1.0)
    bench.run()
    bench.check(parked, large)
    bench.check_end()


def test_an_aborted_waiter_behind_a_sequence_that_does_not_fit_ends_the_standstill() -> None:
    bench = Bench.make(options=TiersOptions(num_blocks=24))
    stored(bench)
    parked = bench.add(PROMPT, max_tokens=50, number=1)
    bench.engine.step()
    large = bench.add([700 + token for token in range(80)], number=2)
    bench.engine.scheduler.waiting.rotate(1)
    bench.engine.scheduler.abort(parked)
    bench.run()
    assert count(bench, "standstills_ended") == 1
    assert parked.leave_reason == "aborted"
    assert len(parked.output) < 50
    bench.check(large)
    bench.check_end()


def test_an_aborted_load_is_cancelled_and_its_blocks_are_freed_when_it_has_drained() -> None:
    bench = Bench.make()
    stored(bench)
    bench.tiers.ranks.faults = RankFaults(progress=0.0)
    seq = bench.add(PROMPT, number=3)
    bench.engine.step()
    bench.engine.scheduler.abort(seq)
    bench.engine.step()
    bench.engine.step()
    assert seq.block_table
    assert seq.awaits_aborted_load
    assert all(job.cancelled for job in bench.tiers.ranks._jobs)
    bench.tiers.ranks.faults = RankFaults(progress=1.0)
    bench.run()
    assert not seq.block_table
    assert not bench.tiers.tierd.loading
    bench.check_end()


def test_the_end_of_an_earlier_load_is_not_taken_for_that_of_an_aborted_one() -> None:
    bench = Bench.make()
    stored(bench)
    seq = bench.add(PROMPT, number=3)
    seq.offload_loaded = True  # left from before a preemption
    bench.tiers.ranks.faults = RankFaults(progress=0.0)
    bench.engine.step()
    bench.engine.scheduler.abort(seq)
    bench.engine.step()
    assert seq.awaits_aborted_load
    assert seq.block_table
    bench.tiers.ranks.faults = RankFaults(progress=1.0)
    bench.run()
    bench.check_end()


def test_a_tail_in_a_slow_tier_is_loaded_once_it_has_arrived() -> None:
    bench = Bench.make(scheduling=SchedulerOptions(max_batched_tokens=8, alignment=BLOCK))
    stored(bench, list(range(65)))
    bench.tiers.tierd.evict(_Always())
    assert not bench.tiers.tierd.ram
    seq = bench.add(list(range(65)))
    bench.engine.step()
    (keys,) = bench.tiers.tierd.promotions.values()
    assert len(keys) == 4, "half, as nothing is measured yet"
    assert seq.status is Status.RUNNING
    for _ in range(3):
        bench.engine.step()
    assert seq.num_cached_tokens == 32
    bench.tiers.tierd.end_promotion(_Always())
    bench.engine.step()
    assert seq.status is Status.WAITING_FOR_REMOTE_KVS
    assert seq.offload_load_start_tokens == 32
    bench.run()
    assert count(bench, "loaded_tokens") == 32
    bench.check(seq)
    bench.check_end()


def test_a_slow_tier_that_never_answers_delays_nothing() -> None:
    bench = Bench.make(scheduling=SchedulerOptions(max_batched_tokens=8, alignment=BLOCK))
    stored(bench, list(range(65)))
    bench.tiers.tierd.evict(_Always())
    before = bench.engine.steps
    seq = bench.add(list(range(65)), max_tokens=1)
    bench.run(seq)
    assert bench.engine.steps - before == 9, "nine steps of eight tokens"
    bench.run()
    bench.check(seq)
    bench.check_end()


def test_multimodal_and_recurrent_sequences_are_left_alone() -> None:
    bench = Bench.make()
    stored(bench)
    for name, value in (("multimodal_data", {}), ("has_per_req_cache", True)):
        seq = StandInSequence(60, PROMPT, BLOCK, 1)
        setattr(seq, name, value)
        assert bench.tiers.connector.get_num_new_matched_tokens(seq) == (0, False)
        bench.engine.scheduler.add(seq)
        bench.run()
    assert bench.tiers.tierd.stored == 5
    assert count(bench, "loads") == 0


def test_nothing_is_loaded_or_saved_once_kvtier_is_off_and_what_runs_ends() -> None:
    bench = Bench.make()
    stored(bench)
    bench.tiers.ranks.faults = RankFaults(progress=0.0)
    seq = bench.add(PROMPT)
    bench.engine.step()
    bench.tiers.connector.turn_off()
    bench.tiers.ranks.faults = RankFaults(progress=1.0)
    other = bench.add([900 + token for token in PROMPT])
    bench.run()
    assert count(bench, "loads_whole") == 1
    assert bench.tiers.tierd.stored == 5
    bench.check(seq, other)
    bench.check_end()


def test_the_names_that_the_engine_looks_for_are_there() -> None:
    for name in (
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
        "request_finished",
        "should_defer_free",
        "should_park_for_load_after_alloc",
        "adjust_prefill_chunk_after_alloc",
        "should_park_partial_prefill_for_load",
        "process_completions",
        "has_pending_work",
        "get_statistics",
    ):
        assert callable(getattr(AtomScheduler, name))


class _Always(Random):
    """A random number generator that always says yes."""

    def random(self) -> float:
        return 0.0


def test_a_sequence_that_is_aborted_while_it_is_waked_leaves_no_report_behind() -> None:
    bench = Bench.make(options=TiersOptions(num_blocks=24))
    stored(bench)
    parked = bench.add(PROMPT, max_tokens=50, number=1)
    step_until(bench, parked, Status.RUNNING)
    connector, scheduler = bench.tiers.connector, bench.engine.scheduler
    # As ATOM leaves it when a loaded sequence finds no room in a step.
    scheduler.running.remove(parked)
    parked.status = Status.WAITING
    scheduler.waiting.append(parked)
    for _ in range(2):
        connector.build_connector_meta()
    assert parked.status is Status.WAITING_FOR_REMOTE_KVS
    scheduler.abort(parked)
    assert connector.process_completions(KVConnectorOutput()).finished_loading == set()
