"""Which chunks are stored, when, and how long their blocks stay referenced."""

from __future__ import annotations

import pytest
from tests.unit.scheduler.scheduler_rig import (
    BLOCK,
    CHUNK,
    RAM,
    SLOT_BYTES,
    FakeRequest,
    Rig,
    chunks_of,
)

from kvtier.engines.vllm.scheduler_stores import (
    PROGRESS_TIMEOUT_SECONDS,
    RECENTLY_COMMITTED_SECONDS,
)
from kvtier.tierd.wire import Reserve, Usable


@pytest.fixture(params=[True, False], ids=["tables offered", "tables followed"])
def rig(request: pytest.FixtureRequest) -> Rig:
    made = Rig(offers_tables=request.param)
    made.client.credit(32)
    return made


def _computed(rig: Rig, tokens: int = 300, request_id: str = "r", seed: int = 0) -> FakeRequest:
    """A request whose prompt was computed in one step and that waits for its next."""
    request = rig.request(tokens, request_id, seed)
    assert rig.ask(request) == 0
    rig.run({request_id: tokens})
    request.append(1)
    return request


def test_nothing_is_stored_before_its_step_was_executed(rig: Rig) -> None:
    request = rig.request(300)
    rig.ask(request)
    assert rig.build({"r": 300}).stores == []
    request.append(1)
    assert rig.build({"r": 1}).stores == []


def test_whole_chunks_are_stored_once_their_step_was_executed(rig: Rig) -> None:
    request = _computed(rig)
    stores = rig.build({"r": 1}).stores
    assert chunks_of(rig, stores) == [0, 1, 2, 3]
    assert [store.slot for store in stores] == [number * SLOT_BYTES for number in range(4)]
    assert {(store.epoch, store.run.first, len(store.run.blocks)) for store in stores} == {
        (1, 0, CHUNK // BLOCK)
    }
    (reserve,) = rig.client.take(Reserve)
    assert [(b"\0" + item[2], item[3]) for item in reserve.items] == [
        (request.key(chunk), store.slot) for chunk, store in enumerate(stores)
    ]


def test_each_chunk_is_stored_once(rig: Rig) -> None:
    _computed(rig)
    rig.run({"r": 1})
    assert rig.build({"r": 1}).stores == []


def test_a_chunk_that_decoding_completes_is_stored_once_its_last_token_was_computed(
    rig: Rig,
) -> None:
    request = _computed(rig, 2 * CHUNK - 2)
    assert chunks_of(rig, rig.run({"r": 1}).stores) == [0]
    request.append(2)
    assert rig.run({"r": 1}).stores == []
    request.append(3)
    assert chunks_of(rig, rig.run({"r": 1}).stores) == [1]


def test_the_last_sampled_token_is_not_stored_even_if_a_step_counted_it(rig: Rig) -> None:
    """Speculative steps count tokens that may be rejected."""
    request = rig.request(CHUNK - 2)
    rig.ask(request)
    rig.run({"r": CHUNK + 3})
    request.append(1, 2)
    request.num_computed_tokens = CHUNK - 1
    assert rig.build({"r": 1}).stores == []
    request.append(3)
    assert chunks_of(rig, rig.build({"r": 1}).stores) == [0]


def test_prefill_in_pieces_is_stored_in_pieces(rig: Rig) -> None:
    request = rig.request(300)
    rig.ask(request)
    rig.run({"r": 100})
    assert chunks_of(rig, rig.run({"r": 100}).stores) == [0]
    assert chunks_of(rig, rig.run({"r": 100}).stores) == [1, 2]
    request.append(1)
    assert chunks_of(rig, rig.run({"r": 1}).stores) == [3]


def test_a_step_that_was_built_ahead_counts_only_when_it_is_reported(rig: Rig) -> None:
    """Asynchronous scheduling builds the next step before the last one's output is there."""
    request = rig.request(300)
    rig.ask(request)
    rig.build({"r": 128})
    assert rig.build({"r": 128}).stores == []
    rig.report(step=1)
    assert chunks_of(rig, rig.build({"r": 44}).stores) == [0, 1]
    rig.report(step=2)
    request.append(1)
    assert chunks_of(rig, rig.build({"r": 1}).stores) == [2, 3]


def test_what_a_tier_holds_is_not_stored_again(rig: Rig) -> None:
    request = rig.request(300)
    rig.hold([request.key(0), request.key(2)], 2)
    rig.client.accepts = False  # no promotion
    assert rig.ask(request) == 0
    rig.client.accepts = True
    rig.run({"r": 300})
    request.append(1)
    assert chunks_of(rig, rig.build({"r": 1}).stores) == [1, 3]


def test_what_was_loaded_is_not_stored_again(rig: Rig) -> None:
    request = rig.request(300)
    rig.hold(request.keys(0, 2))
    rig.admit(request, 0, rig.ask(request) or 0)
    (job,) = rig.build().loads
    rig.report(loads=[rig.result(job.load, 2)])
    rig.run({"r": 300 - 2 * CHUNK})
    request.append(1)
    assert chunks_of(rig, rig.build({"r": 1}).stores) == [2, 3]


def test_what_the_gpu_holds_and_no_tier_any_more_is_stored_from_there(rig: Rig) -> None:
    request = rig.request(300)
    assert rig.ask(request, 3 * CHUNK) == 0
    rig.allocate(request, 3 * CHUNK)
    request.num_computed_tokens = 3 * CHUNK
    rig.run({"r": 300 - 3 * CHUNK})
    request.append(1)
    assert chunks_of(rig, rig.build({"r": 1}).stores) == [0, 1, 2, 3]


def test_what_a_load_failed_to_bring_is_stored_once_it_was_computed(rig: Rig) -> None:
    request = rig.request(300)
    rig.hold(request.keys(0, 4))
    rig.admit(request, 0, rig.ask(request) or 0)
    (job,) = rig.build().loads
    rig.client.delta(removed=dict.fromkeys(request.keys(2, 2), RAM))
    rig.report(loads=[rig.result(job.load, 2, reason="gone")])
    request.num_computed_tokens = 2 * CHUNK
    rig.run({"r": 300 - 2 * CHUNK})
    request.append(1)
    assert chunks_of(rig, rig.build({"r": 1}).stores) == [2, 3]


def test_two_requests_with_one_prefix_store_it_once(rig: Rig) -> None:
    first, second = rig.request(300, "a"), rig.request(300, "b")
    for request in (first, second):
        rig.ask(request)
    rig.run({"a": 300, "b": 300})
    first.append(1)
    second.append(1)
    assert len(rig.build({"a": 1, "b": 1}).stores) == 4


def test_blocks_are_referenced_from_planning_until_every_rank_is_done() -> None:
    rig = Rig(ranks=2)
    rig.client.credit(8)
    _computed(rig, 150)
    stores = rig.build({"r": 1}).stores
    blocks = sorted(block for store in stores for block in store.run.blocks)
    assert rig.pool.referenced() == blocks
    rig.report(done={store.reservation: 1 for store in stores})
    assert rig.pool.referenced() == blocks
    rig.report(done={store.reservation: 1 for store in stores})
    assert rig.pool.referenced() == []


def test_the_end_of_a_chunk_is_freed_before_its_beginning(rig: Rig) -> None:
    """vLLM evicts first what was freed first, and the end of a prefix is worth less."""
    _computed(rig, 100)
    (store,) = rig.build({"r": 1}).stores
    rig.report(done={store.reservation: 1})
    assert rig.pool.freed == list(reversed(store.run.blocks))


def test_a_finished_request_stores_the_rest_while_its_blocks_are_there(rig: Rig) -> None:
    request = rig.request(300)
    rig.ask(request)
    rig.build({"r": 300})
    request.append(1)
    table = list(rig.tables["r"])
    rig.finish(request)  # before the report of the step that brought the end, as vLLM does
    assert rig.pool.referenced() == table[:8]
    rig.report()
    assert rig.scheduler.has_pending_work()
    stores = rig.build().stores
    assert [store.run.blocks[0] for store in stores] == table[0:8:2]
    rig.report(done={store.reservation: 1 for store in stores})
    assert not rig.scheduler.has_pending_work()
    assert rig.pool.referenced() == []


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_IGNORED"])
def test_of_an_aborted_request_only_what_was_reported_is_stored(rig: Rig, status: str) -> None:
    request = rig.request(300)
    rig.ask(request)
    rig.build({"r": 150})
    rig.build({"r": 150})
    rig.report(step=1)
    table = list(rig.tables["r"])
    rig.finish(request, status)
    assert [store.run.blocks[0] for store in rig.build().stores] == [table[0], table[2]]


def test_a_step_in_flight_is_not_taken_for_executed_when_a_request_ends(rig: Rig) -> None:
    """The output of one step ends a request while the next is running: what only the next one computes is not there."""
    request = rig.request(100)
    rig.ask(request)
    rig.build({"r": 100})
    request.append(*range(28))
    rig.build({"r": 29})
    table = list(rig.tables["r"])
    rig.finish(request)
    assert [store.run.blocks[0] for store in rig.build().stores] == table[:1]


def test_a_request_that_ends_without_blocks_stores_nothing(rig: Rig) -> None:
    request = _computed(rig)
    rig.preempt(request)
    rig.build(preempted=["r"])
    rig.finish(request)
    assert rig.build().stores == []
    assert rig.pool.referenced() == []


def test_a_preempted_request_does_not_store_what_it_has_not_computed_again(rig: Rig) -> None:
    request = _computed(rig, 200)
    rig.preempt(request)
    rig.build(preempted=["r"])
    assert rig.ask(request) == 0
    assert rig.build({"r": 10}, resumed=["r"]).stores == []
    rig.report()
    assert rig.build({"r": 10}).stores == []


def test_a_report_from_before_a_preemption_says_nothing_about_the_new_blocks(rig: Rig) -> None:
    request = rig.request(200)
    rig.ask(request)
    rig.build({"r": 200})
    rig.preempt(request)
    rig.build(preempted=["r"])
    rig.ask(request)
    rig.build({"r": 10}, resumed=["r"])
    rig.report(step=1)
    assert rig.build({"r": 10}).stores == []


def test_a_request_that_is_preempted_and_resumed_within_one_step_begins_anew(rig: Rig) -> None:
    request = _computed(rig, 200)
    rig.preempt(request)
    assert rig.ask(request) == 0
    assert rig.build({"r": 10}, preempted=["r"], resumed=["r"]).stores == []
    rig.report()
    assert rig.build({"r": 10}).stores == []


def test_a_resumed_request_stores_only_what_is_missing(rig: Rig) -> None:
    request = _computed(rig, 200)
    stores = rig.run({"r": 1}).stores
    assert chunks_of(rig, stores) == [0, 1, 2]
    rig.report(done={store.reservation: 1 for store in stores})
    rig.hold(request.keys(0, 3))
    rig.preempt(request)
    rig.build(preempted=["r"])
    rig.now += 1
    rig.admit(request, 0, rig.ask(request) or 0)
    (job,) = rig.build().loads
    rig.report(loads=[rig.result(job.load, 3)])
    rig._seen.discard("r")
    rig.run({"r": request.num_tokens - request.num_computed_tokens})
    request.append(*range(2 * CHUNK))
    rig.run({"r": request.num_tokens - request.num_computed_tokens})
    assert chunks_of(rig, rig.build({"r": 1}).stores) == [3, 4]


def test_a_preempted_request_waits_for_its_stores_before_it_loads(rig: Rig) -> None:
    request = _computed(rig, 300)
    stores = rig.build({"r": 1}).stores
    rig.preempt(request)
    rig.build(preempted=["r"])
    rig.hold(request.keys(0, 3))
    assert rig.ask(request) is None
    rig.report(done={store.reservation: 1 for store in stores})
    rig.hold(request.keys(3, 1))
    assert rig.ask(request) == 4 * CHUNK


def test_it_does_not_wait_for_stores_for_ever(rig: Rig) -> None:
    request = _computed(rig, 300)
    rig.build({"r": 1})
    rig.preempt(request)
    rig.build(preempted=["r"])
    rig.hold(request.keys(0, 4))
    assert rig.ask(request) is None
    rig.now += 1.1
    assert rig.ask(request) == 4 * CHUNK


def test_without_a_free_slot_a_store_waits_while_the_request_runs_and_is_dropped_at_its_end() -> (
    None
):
    rig = Rig()
    rig.client.credit(1)
    request = _computed(rig)
    assert chunks_of(rig, rig.run({"r": 1}).stores) == [0]
    rig.client.credit(1, first=1)
    assert chunks_of(rig, rig.run({"r": 1}).stores) == [1]
    rig.finish(request)
    assert rig.build().stores == []
    assert rig.scheduler.stores.dropped == {"no_credit": 2}


def test_no_more_than_a_bound_is_in_flight(rig: Rig) -> None:
    rig.scheduler.stores._max_in_flight_bytes = 2 * SLOT_BYTES
    _computed(rig)
    stores = rig.build({"r": 1}).stores
    assert chunks_of(rig, stores) == [0, 1]
    rig.report(done={store.reservation: 1 for store in stores})
    assert chunks_of(rig, rig.build({"r": 1}).stores) == [2, 3]


def test_a_key_that_was_just_delivered_is_not_stored_twice_before_tierd_says_so(rig: Rig) -> None:
    _computed(rig, 100)
    (store,) = rig.build({"r": 1}).stores
    rig.report(done={store.reservation: 1})
    _computed(rig, 100, "again")
    assert rig.build({"again": 1}).stores == []
    rig.now += RECENTLY_COMMITTED_SECONDS + 0.1
    _computed(rig, 100, "later")
    assert len(rig.build({"later": 1}).stores) == 1


def test_nothing_is_stored_while_a_worker_is_not_attached(rig: Rig) -> None:
    request = rig.request(300)
    rig.ask(request)
    rig.build({"r": 300})
    rig.report(epoch=0)
    request.append(1)
    assert rig.build({"r": 1}).stores == []
    rig.report()
    assert len(rig.build({"r": 1}).stores) == 4


def test_when_tierd_is_lost_its_slots_are_forgotten_and_blocks_stay_until_the_worker_reports(
    rig: Rig,
) -> None:
    _computed(rig)
    stores = rig.build({"r": 1}).stores
    rig.client.lose()
    rig.client.welcome(epoch=2)
    rig.client.ready()
    _computed(rig, 300, "other", seed=1)
    assert rig.build({"other": 1}).stores == []
    assert len(rig.pool.referenced()) == 8
    rig.report(done={store.reservation: 1 for store in stores})
    assert rig.pool.referenced() == []
    rig.client.credit(8)
    assert {store.epoch for store in rig.build({"other": 1}).stores} == {2}


def test_what_was_planned_when_tierd_was_lost_is_let_go(rig: Rig) -> None:
    request = _computed(rig)
    rig.finish(request)
    assert rig.pool.referenced()
    rig.client.lose()
    assert rig.build().stores == []
    assert rig.pool.referenced() == []
    assert rig.scheduler.stores.dropped == {"lost": 4}


def test_a_reservation_that_cannot_be_sent_is_no_store(rig: Rig) -> None:
    _computed(rig)
    rig.client.accepts = False
    assert rig.build({"r": 1}).stores == []
    assert rig.pool.referenced() == []


def test_without_vllms_block_pool_nothing_is_stored(rig: Rig) -> None:
    rig.scheduler.stores.pool = None
    request = _computed(rig)
    assert rig.build({"r": 1}).stores == []
    rig.finish(request)
    assert rig.scheduler.stores.dropped == {"no_block_pool": 4}


def test_an_idle_engine_steps_on_for_stores_but_not_for_ever(rig: Rig) -> None:
    request = _computed(rig)
    rig.finish(request)
    assert rig.scheduler.has_pending_work()
    rig.build()
    assert rig.scheduler.has_pending_work()
    rig.now += PROGRESS_TIMEOUT_SECONDS + 1
    assert not rig.scheduler.has_pending_work()


def test_a_null_block_is_not_stored(rig: Rig) -> None:
    _computed(rig)
    rig.tables["r"][2] = 0
    rig.scheduler._states["r"].block_ids[2:3] = [0]
    assert chunks_of(rig, rig.build({"r": 1}).stores) == [0, 2, 3]
    assert rig.scheduler.stores.dropped == {"blocks_gone": 1}


def test_what_lies_only_in_a_tier_that_is_given_up_is_stored_in_ram(rig: Rig) -> None:
    request = rig.request(300)
    rig.hold(request.keys(0, 4), 2)
    rig.client.sink(Usable(bits=RAM))
    _computed(rig)
    assert chunks_of(rig, rig.build({"r": 1}).stores) == [0, 1, 2, 3]


@pytest.mark.parametrize(("blocks", "chunks"), [(16, 2), (31, 3), (12, 1)])
def test_stores_in_flight_keep_at_most_a_quarter_of_the_cache_referenced(
    rig: Rig, blocks: int, chunks: int
) -> None:
    del rig.pool.blocks[blocks:]
    _computed(rig)
    stores = rig.build({"r": 1}).stores
    assert chunks_of(rig, stores) == list(range(chunks))
    assert len(rig.pool.referenced()) == chunks * CHUNK // BLOCK
    rig.report(done={store.reservation: 1 for store in stores})
    assert chunks_of(rig, rig.build({"r": 1}).stores) == list(range(chunks, min(2 * chunks, 4)))
