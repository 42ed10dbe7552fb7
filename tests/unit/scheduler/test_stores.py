"""Which chunks are stored, when, and how long their blocks stay referenced."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.scheduler.scheduler_testbed import (
    BLOCK,
    CHUNK,
    RAM,
    SLOT_BYTES,
    FakeRequest,
    SchedulerTestbed,
    chunks_of,
    topology,
)

from kvtier.engines.common.request_state import RequestState
from kvtier.engines.common.scheduler_stores import (
    PROGRESS_TIMEOUT_SECONDS,
    RECENTLY_COMMITTED_SECONDS,
)
from kvtier.tierd.wire import LiveSettings, Reserve, Usable


@pytest.fixture(params=[True, False], ids=["tables offered", "tables followed"])
def testbed(request: pytest.FixtureRequest) -> SchedulerTestbed:
    made = SchedulerTestbed(offers_tables=request.param)
    made.client.credit(32)
    return made


def _computed(
    testbed: SchedulerTestbed, tokens: int = 300, request_id: str = "r", seed: int = 0
) -> FakeRequest:
    """A request whose prompt was computed in one step and that waits for its next."""
    request = testbed.request(tokens, request_id, seed)
    assert testbed.ask(request) == 0
    testbed.run({request_id: tokens})
    request.append(1)
    return request


def _limit(testbed: SchedulerTestbed, tokens: int) -> None:
    live = topology().live.model_copy(update={"min_store_tokens": tokens})
    testbed.client.sink(LiveSettings(settings=live.model_dump_json(by_alias=True)))


def test_a_prompt_that_is_too_short_is_not_stored_and_counted(testbed: SchedulerTestbed) -> None:
    _limit(testbed, 301)
    request = _computed(testbed)
    assert testbed.build({"r": 1}).stores == []
    testbed.finish(request)
    assert testbed.build({}).stores == []
    assert testbed.scheduler.stores.dropped == {"short_prompt": 4}
    assert testbed.pool.referenced() == []
    longer = _computed(testbed, 301, "other", seed=1)
    assert len(testbed.build({"other": 1}).stores) == 4
    assert longer.num_prompt_tokens == 301


def test_a_limit_that_is_lowered_counts_for_requests_that_are_running(
    testbed: SchedulerTestbed,
) -> None:
    _limit(testbed, 10_000)
    _computed(testbed)
    assert testbed.build({"r": 1}).stores == []
    _limit(testbed, 300)
    assert chunks_of(testbed, testbed.build({"r": 1}).stores) == [0, 1, 2, 3]


def test_nothing_is_stored_before_its_step_was_executed(testbed: SchedulerTestbed) -> None:
    request = testbed.request(300)
    testbed.ask(request)
    assert testbed.build({"r": 300}).stores == []
    request.append(1)
    assert testbed.build({"r": 1}).stores == []


@pytest.mark.parametrize("later_step", [False, True], ids=["in the step", "one step later"])
def test_nothing_is_stored_of_steps_that_vllm_has_turned_back(
    testbed: SchedulerTestbed, later_step: bool
) -> None:
    # Another connector has loaded 128 tokens within the step, and failed for the second half.
    request = testbed.request(300)
    testbed.ask(request)
    testbed.build({"r": 300})
    first = testbed.step
    if later_step:
        # Async scheduling: the next step was built before the first one's output was known.
        request.append(1)
        testbed.build({"r": 1})
    request.num_computed_tokens = 64
    testbed.report(first, recomputes=True)
    if later_step:
        testbed.report()
    assert testbed.build({"r": 236}).stores == []
    testbed.report()
    assert chunks_of(testbed, testbed.build({"r": 1}).stores) == [0, 1, 2, 3]


def test_whole_chunks_are_stored_once_their_step_was_executed(testbed: SchedulerTestbed) -> None:
    request = _computed(testbed)
    stores = testbed.build({"r": 1}).stores
    assert chunks_of(testbed, stores) == [0, 1, 2, 3]
    assert [store.slot for store in stores] == [number * SLOT_BYTES for number in range(4)]
    assert {(store.epoch, store.run.first, len(store.run.blocks)) for store in stores} == {
        (1, 0, CHUNK // BLOCK)
    }
    (reserve,) = testbed.client.take(Reserve)
    assert [(b"\0" + item[2], item[3]) for item in reserve.items] == [
        (request.key(chunk), store.slot) for chunk, store in enumerate(stores)
    ]


def test_each_store_names_the_chunk_before_it(testbed: SchedulerTestbed) -> None:
    request = _computed(testbed)
    testbed.build({"r": 1})
    (reserve,) = testbed.client.take(Reserve)
    previous = [item[4] for item in reserve.items]
    assert previous == [b"", *(request.key(chunk)[1:] for chunk in range(3))]


def test_each_chunk_is_stored_once(testbed: SchedulerTestbed) -> None:
    _computed(testbed)
    testbed.run({"r": 1})
    assert testbed.build({"r": 1}).stores == []


def test_a_chunk_that_decoding_completes_is_stored_once_its_last_token_was_computed(
    testbed: SchedulerTestbed,
) -> None:
    request = _computed(testbed, 2 * CHUNK - 2)
    assert chunks_of(testbed, testbed.run({"r": 1}).stores) == [0]
    request.append(2)
    assert testbed.run({"r": 1}).stores == []
    request.append(3)
    assert chunks_of(testbed, testbed.run({"r": 1}).stores) == [1]


def test_the_last_sampled_token_is_not_stored_even_if_a_step_counted_it(
    testbed: SchedulerTestbed,
) -> None:
    """Speculative steps count tokens that may be rejected."""
    request = testbed.request(CHUNK - 2)
    testbed.ask(request)
    testbed.run({"r": CHUNK + 3})
    request.append(1, 2)
    request.num_computed_tokens = CHUNK - 1
    assert testbed.build({"r": 1}).stores == []
    request.append(3)
    assert chunks_of(testbed, testbed.build({"r": 1}).stores) == [0]


def test_prefill_in_pieces_is_stored_in_pieces(testbed: SchedulerTestbed) -> None:
    request = testbed.request(300)
    testbed.ask(request)
    testbed.run({"r": 100})
    assert chunks_of(testbed, testbed.run({"r": 100}).stores) == [0]
    assert chunks_of(testbed, testbed.run({"r": 100}).stores) == [1, 2]
    request.append(1)
    assert chunks_of(testbed, testbed.run({"r": 1}).stores) == [3]


def test_a_step_that_was_built_ahead_counts_only_when_it_is_reported(
    testbed: SchedulerTestbed,
) -> None:
    """Asynchronous scheduling builds the next step before the last one's output is there."""
    request = testbed.request(300)
    testbed.ask(request)
    testbed.build({"r": 128})
    assert testbed.build({"r": 128}).stores == []
    testbed.report(step=1)
    assert chunks_of(testbed, testbed.build({"r": 44}).stores) == [0, 1]
    testbed.report(step=2)
    request.append(1)
    assert chunks_of(testbed, testbed.build({"r": 1}).stores) == [2, 3]


def test_chunks_in_a_tier_are_not_stored_again(testbed: SchedulerTestbed) -> None:
    request = testbed.request(300)
    testbed.hold([request.key(0), request.key(2)], 2)
    testbed.client.accepts = False  # no promotion
    assert testbed.ask(request) == 0
    testbed.client.accepts = True
    testbed.run({"r": 300})
    request.append(1)
    assert chunks_of(testbed, testbed.build({"r": 1}).stores) == [1, 3]


def test_loaded_chunks_are_not_stored_again(testbed: SchedulerTestbed) -> None:
    request = testbed.request(300)
    testbed.hold(request.keys(0, 2))
    testbed.admit(request, 0, testbed.ask(request) or 0)
    (job,) = testbed.build().loads
    testbed.report(loads=[testbed.result(job.load, 2)])
    testbed.run({"r": 300 - 2 * CHUNK})
    request.append(1)
    assert chunks_of(testbed, testbed.build({"r": 1}).stores) == [2, 3]


def test_chunks_in_gpu_memory_and_no_tier_are_stored(testbed: SchedulerTestbed) -> None:
    request = testbed.request(300)
    assert testbed.ask(request, 3 * CHUNK) == 0
    testbed.allocate(request, 3 * CHUNK)
    request.num_computed_tokens = 3 * CHUNK
    testbed.run({"r": 300 - 3 * CHUNK})
    request.append(1)
    assert chunks_of(testbed, testbed.build({"r": 1}).stores) == [0, 1, 2, 3]


def test_chunks_of_a_failed_load_are_stored_once_computed(testbed: SchedulerTestbed) -> None:
    request = testbed.request(300)
    testbed.hold(request.keys(0, 4))
    testbed.admit(request, 0, testbed.ask(request) or 0)
    (job,) = testbed.build().loads
    testbed.client.delta(removed=dict.fromkeys(request.keys(2, 2), RAM))
    testbed.report(loads=[testbed.result(job.load, 2, reason="gone")])
    request.num_computed_tokens = 2 * CHUNK
    testbed.run({"r": 300 - 2 * CHUNK})
    request.append(1)
    assert chunks_of(testbed, testbed.build({"r": 1}).stores) == [2, 3]


def test_two_requests_with_one_prefix_store_it_once(testbed: SchedulerTestbed) -> None:
    first, second = testbed.request(300, "a"), testbed.request(300, "b")
    for request in (first, second):
        testbed.ask(request)
    testbed.run({"a": 300, "b": 300})
    first.append(1)
    second.append(1)
    assert len(testbed.build({"a": 1, "b": 1}).stores) == 4


def test_blocks_are_referenced_from_planning_until_every_rank_is_done() -> None:
    testbed = SchedulerTestbed(ranks=2)
    testbed.client.credit(8)
    _computed(testbed, 150)
    stores = testbed.build({"r": 1}).stores
    blocks = sorted(block for store in stores for block in store.run.blocks)
    assert testbed.pool.referenced() == blocks
    testbed.report(done={store.reservation: 1 for store in stores})
    assert testbed.pool.referenced() == blocks
    testbed.report(done={store.reservation: 1 for store in stores})
    assert testbed.pool.referenced() == []


def test_the_end_of_a_chunk_is_freed_before_its_beginning(testbed: SchedulerTestbed) -> None:
    """vLLM evicts first what was freed first, and the end of a prefix is worth less."""
    _computed(testbed, 100)
    (store,) = testbed.build({"r": 1}).stores
    testbed.report(done={store.reservation: 1})
    assert testbed.pool.freed == list(reversed(store.run.blocks))


def test_a_finished_request_stores_the_rest_while_its_blocks_are_there(
    testbed: SchedulerTestbed,
) -> None:
    request = testbed.request(300)
    testbed.ask(request)
    testbed.build({"r": 300})
    request.append(1)
    table = list(testbed.tables["r"])
    testbed.finish(request)  # before the report of the step that brought the end, as vLLM does
    assert testbed.pool.referenced() == table[:8]
    testbed.report()
    assert testbed.scheduler.has_pending_work()
    stores = testbed.build().stores
    assert [store.run.blocks[0] for store in stores] == table[0:8:2]
    testbed.report(done={store.reservation: 1 for store in stores})
    assert not testbed.scheduler.has_pending_work()
    assert testbed.pool.referenced() == []


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_IGNORED"])
def test_only_executed_chunks_of_an_aborted_request_are_stored(
    testbed: SchedulerTestbed, status: str
) -> None:
    request = testbed.request(300)
    testbed.ask(request)
    testbed.build({"r": 150})
    testbed.build({"r": 150})
    testbed.report(step=1)
    table = list(testbed.tables["r"])
    testbed.finish(request, status)
    assert [store.run.blocks[0] for store in testbed.build().stores] == [table[0], table[2]]


def test_a_step_in_flight_does_not_count_as_executed(testbed: SchedulerTestbed) -> None:
    """The output of one step ends a request while the next step runs."""
    request = testbed.request(100)
    testbed.ask(request)
    testbed.build({"r": 100})
    request.append(*range(28))
    testbed.build({"r": 29})
    table = list(testbed.tables["r"])
    testbed.finish(request)
    assert [store.run.blocks[0] for store in testbed.build().stores] == table[:1]


def test_a_request_that_ends_without_blocks_stores_nothing(testbed: SchedulerTestbed) -> None:
    request = _computed(testbed)
    testbed.preempt(request)
    testbed.build(preempted=["r"])
    testbed.finish(request)
    assert testbed.build().stores == []
    assert testbed.pool.referenced() == []


def test_a_preempted_request_stores_only_recomputed_chunks(testbed: SchedulerTestbed) -> None:
    request = _computed(testbed, 200)
    testbed.preempt(request)
    testbed.build(preempted=["r"])
    assert testbed.ask(request) == 0
    assert testbed.build({"r": 10}, resumed=["r"]).stores == []
    testbed.report()
    assert testbed.build({"r": 10}).stores == []


def test_a_report_from_before_a_preemption_does_not_apply_to_new_blocks(
    testbed: SchedulerTestbed,
) -> None:
    request = testbed.request(200)
    testbed.ask(request)
    testbed.build({"r": 200})
    testbed.preempt(request)
    testbed.build(preempted=["r"])
    testbed.ask(request)
    testbed.build({"r": 10}, resumed=["r"])
    testbed.report(step=1)
    assert testbed.build({"r": 10}).stores == []


def test_a_request_preempted_and_resumed_within_one_step_starts_over(
    testbed: SchedulerTestbed,
) -> None:
    request = _computed(testbed, 200)
    testbed.preempt(request)
    assert testbed.ask(request) == 0
    assert testbed.build({"r": 10}, preempted=["r"], resumed=["r"]).stores == []
    testbed.report()
    assert testbed.build({"r": 10}).stores == []


def test_a_resumed_request_stores_only_missing_chunks(testbed: SchedulerTestbed) -> None:
    request = _computed(testbed, 200)
    stores = testbed.run({"r": 1}).stores
    assert chunks_of(testbed, stores) == [0, 1, 2]
    testbed.report(done={store.reservation: 1 for store in stores})
    testbed.hold(request.keys(0, 3))
    testbed.preempt(request)
    testbed.build(preempted=["r"])
    testbed.now += 1
    testbed.admit(request, 0, testbed.ask(request) or 0)
    (job,) = testbed.build().loads
    testbed.report(loads=[testbed.result(job.load, 3)])
    testbed._seen.discard("r")
    testbed.run({"r": request.num_tokens - request.num_computed_tokens})
    request.append(*range(2 * CHUNK))
    testbed.run({"r": request.num_tokens - request.num_computed_tokens})
    assert chunks_of(testbed, testbed.build({"r": 1}).stores) == [3, 4]


def test_a_preempted_request_waits_for_its_stores_before_it_loads(
    testbed: SchedulerTestbed,
) -> None:
    request = _computed(testbed, 300)
    stores = testbed.build({"r": 1}).stores
    testbed.preempt(request)
    testbed.build(preempted=["r"])
    testbed.hold(request.keys(0, 3))
    assert testbed.ask(request) is None
    testbed.report(done={store.reservation: 1 for store in stores})
    testbed.hold(request.keys(3, 1))
    assert testbed.ask(request) == 4 * CHUNK


def test_the_wait_for_stores_is_bounded(testbed: SchedulerTestbed) -> None:
    request = _computed(testbed, 300)
    testbed.build({"r": 1})
    testbed.preempt(request)
    testbed.build(preempted=["r"])
    testbed.hold(request.keys(0, 4))
    assert testbed.ask(request) is None
    testbed.now += 1.1
    assert testbed.ask(request) == 4 * CHUNK


def test_without_a_free_slot_a_store_waits_while_the_request_runs() -> None:
    testbed = SchedulerTestbed()
    testbed.client.credit(1)
    _computed(testbed)
    assert chunks_of(testbed, testbed.run({"r": 1}).stores) == [0]
    testbed.client.credit(1, first=1)
    assert chunks_of(testbed, testbed.run({"r": 1}).stores) == [1]


def _walks(testbed: SchedulerTestbed, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests whose chunks are looked at, while the list is filled."""
    walked: list[str] = []
    stores = testbed.scheduler.stores
    original = stores.plan

    def plan(state: RequestState, *arguments: Any, **named: Any) -> None:
        walked.append(state.request_id)
        original(state, *arguments, **named)

    monkeypatch.setattr(stores, "plan", plan)
    return walked


def test_while_no_slot_is_free_a_step_does_not_look_at_every_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    testbed = SchedulerTestbed()
    names = [f"r{number}" for number in range(5)]
    for seed, name in enumerate(names):
        _computed(testbed, 300, name, seed)
    scheduled = dict.fromkeys(names, 1)
    walked = _walks(testbed, monkeypatch)
    assert testbed.run(scheduled).stores == []
    assert walked == []
    testbed.client.credit(1)
    assert len(testbed.run(scheduled).stores) == 1
    assert walked == names[:1], "the slot is gone after the first"
    testbed.client.credit(64)
    assert len(testbed.run(scheduled).stores) == 5 * 4 - 1
    assert walked[1:] == names


def test_neither_does_it_while_too_much_is_in_flight_or_prompts_are_too_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    testbed = SchedulerTestbed()
    testbed.client.credit(64)
    testbed.pool.blocks = testbed.pool.blocks[: 4 * (CHUNK // BLOCK) * 3]
    names = ["a", "b", "c"]
    for seed, name in enumerate(names):
        _computed(testbed, 150, name, seed)
    walked = _walks(testbed, monkeypatch)
    stored = testbed.run(dict.fromkeys(names, 1)).stores
    assert len(stored) == 3, "a quarter of the KV cache"
    del walked[:]
    assert testbed.run(dict.fromkeys(names, 1)).stores == []
    assert walked == []
    testbed.report(done={store.reservation: 1 for store in stored})
    assert len(testbed.run(dict.fromkeys(names, 1)).stores) == 3
    _limit(testbed, 1_000)
    _computed(testbed, 150, "short", 7)
    del walked[:]
    testbed.run({"short": 1})
    assert walked == []


def test_chunks_of_a_finished_request_wait_for_slots_with_their_blocks_referenced() -> None:
    testbed = SchedulerTestbed()
    request = _computed(testbed)
    table = list(testbed.tables["r"])
    testbed.finish(request)
    assert testbed.build().stores == []
    assert testbed.scheduler.has_pending_work(), "an idle engine keeps stepping"
    assert set(table[: 4 * CHUNK // BLOCK]) <= set(testbed.pool.referenced())
    testbed.client.credit(4)
    stored = testbed.build().stores
    assert [store.run.blocks[0] for store in stored] == [
        table[chunk * CHUNK // BLOCK] for chunk in range(4)
    ]
    testbed.report(done={store.reservation: 1 for store in stored})
    assert testbed.pool.referenced() == []
    assert testbed.scheduler.stores.dropped == {}


def test_chunks_of_a_finished_request_are_dropped_and_counted_if_no_slot_comes() -> None:
    testbed = SchedulerTestbed()
    request = _computed(testbed)
    testbed.finish(request)
    for _ in range(4):
        testbed.build()
    assert testbed.scheduler.stores.in_flight == 4, "steps of an idle engine take no time"
    testbed.now += 0.2
    testbed.build()
    assert testbed.scheduler.stores.dropped == {"no_credit": 4}
    assert testbed.pool.referenced() == []
    assert not testbed.scheduler.has_pending_work()


@pytest.mark.parametrize("end", ["lost", "reset"])
def test_held_chunks_end_with_their_session_or_weights(end: str) -> None:
    testbed = SchedulerTestbed()
    request = _computed(testbed)
    testbed.finish(request)
    if end == "lost":
        testbed.client.lose()
        testbed.build()
    else:
        testbed.scheduler.reset_cache()
    assert testbed.scheduler.stores.dropped == {end: 4}
    assert testbed.pool.referenced() == []


def test_a_recently_committed_key_is_not_stored_twice(testbed: SchedulerTestbed) -> None:
    _computed(testbed, 100)
    (store,) = testbed.build({"r": 1}).stores
    testbed.report(done={store.reservation: 1})
    _computed(testbed, 100, "again")
    assert testbed.build({"again": 1}).stores == []
    testbed.now += RECENTLY_COMMITTED_SECONDS + 0.1
    _computed(testbed, 100, "later")
    assert len(testbed.build({"later": 1}).stores) == 1


def test_nothing_is_stored_while_a_worker_is_not_attached(testbed: SchedulerTestbed) -> None:
    request = testbed.request(300)
    testbed.ask(request)
    testbed.build({"r": 300})
    testbed.report(epoch=0)
    request.append(1)
    assert testbed.build({"r": 1}).stores == []
    testbed.report()
    assert len(testbed.build({"r": 1}).stores) == 4


def test_after_tierd_is_lost_blocks_stay_referenced_until_the_worker_reports(
    testbed: SchedulerTestbed,
) -> None:
    _computed(testbed)
    stores = testbed.build({"r": 1}).stores
    testbed.client.lose()
    testbed.client.welcome(epoch=2)
    testbed.client.ready()
    _computed(testbed, 300, "other", seed=1)
    assert testbed.build({"other": 1}).stores == []
    assert len(testbed.pool.referenced()) == 8
    testbed.report(done={store.reservation: 1 for store in stores})
    assert testbed.pool.referenced() == []
    testbed.client.credit(8)
    assert {store.epoch for store in testbed.build({"other": 1}).stores} == {2}


def test_planned_stores_are_dropped_when_tierd_is_lost(testbed: SchedulerTestbed) -> None:
    request = _computed(testbed)
    testbed.finish(request)
    assert testbed.pool.referenced()
    testbed.client.lose()
    assert testbed.build().stores == []
    assert testbed.pool.referenced() == []
    assert testbed.scheduler.stores.dropped == {"lost": 4}


def test_a_store_whose_reservation_cannot_be_sent_is_dropped(testbed: SchedulerTestbed) -> None:
    _computed(testbed)
    testbed.client.accepts = False
    assert testbed.build({"r": 1}).stores == []
    assert testbed.pool.referenced() == []


def test_without_vllms_block_pool_nothing_is_stored(testbed: SchedulerTestbed) -> None:
    testbed.scheduler.stores.blocks.pool = None
    request = _computed(testbed)
    assert testbed.build({"r": 1}).stores == []
    testbed.finish(request)
    assert testbed.scheduler.stores.dropped == {"no_block_pool": 4}


def test_an_idle_engine_steps_for_stores_for_a_bounded_time(testbed: SchedulerTestbed) -> None:
    request = _computed(testbed)
    testbed.finish(request)
    assert testbed.scheduler.has_pending_work()
    testbed.build()
    assert testbed.scheduler.has_pending_work()
    testbed.now += PROGRESS_TIMEOUT_SECONDS + 1
    assert not testbed.scheduler.has_pending_work()


def test_a_null_block_is_not_stored(testbed: SchedulerTestbed) -> None:
    _computed(testbed)
    testbed.tables["r"][2] = 0
    if not testbed.offers_tables:
        testbed.scheduler._states["r"].block_ids[0][2] = 0
    assert chunks_of(testbed, testbed.build({"r": 1}).stores) == [0, 2, 3]
    assert testbed.scheduler.stores.dropped == {"blocks_gone": 1}


def test_chunks_in_an_unusable_tier_only_are_stored(testbed: SchedulerTestbed) -> None:
    request = testbed.request(300)
    testbed.hold(request.keys(0, 4), 2)
    testbed.client.sink(Usable(bits=RAM))
    _computed(testbed)
    assert chunks_of(testbed, testbed.build({"r": 1}).stores) == [0, 1, 2, 3]


@pytest.mark.parametrize(("blocks", "chunks"), [(16, 2), (31, 3), (12, 1)])
def test_stores_reference_at_most_a_quarter_of_the_cache(
    testbed: SchedulerTestbed, blocks: int, chunks: int
) -> None:
    del testbed.pool.blocks[blocks:]
    _computed(testbed)
    stores = testbed.build({"r": 1}).stores
    assert chunks_of(testbed, stores) == list(range(chunks))
    assert len(testbed.pool.referenced()) == chunks * CHUNK // BLOCK
    testbed.report(done={store.reservation: 1 for store in stores})
    assert chunks_of(testbed, testbed.build({"r": 1}).stores) == list(
        range(chunks, min(2 * chunks, 4))
    )
