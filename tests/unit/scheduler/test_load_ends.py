"""How loads end, and what is remembered of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.python_calls import python_calls
from tests.unit.scheduler.scheduler_testbed import CHUNK, DISK, FakeRequest, SchedulerTestbed

from kvtier.engines.common.jobs import LoadJob
from kvtier.tierd.wire import LoadReleased, Promote


def _loading(
    testbed: SchedulerTestbed, chunks: int = 4, computed: int = 0
) -> tuple[FakeRequest, LoadJob]:
    request = testbed.request(chunks * CHUNK + 50)
    testbed.hold(request.keys(0, chunks))
    testbed.admit(request, computed, testbed.ask(request, computed) or 0)
    (job,) = testbed.build().loads
    return request, job


def test_tokens_count_as_loaded_when_the_load_is_complete(testbed: SchedulerTestbed) -> None:
    request = testbed.request(4 * CHUNK + 44)
    job = testbed.promoted_load(request, (0, 0, 1, 2), computed=32)
    counts = testbed.scheduler.loads.in_flight.counts
    assert counts.offered_tokens == 4 * CHUNK - 32
    assert not counts.loaded_tokens
    testbed.report(loads=[testbed.result(job.load, 4)])
    assert counts.loaded_tokens == {"ram": 2 * CHUNK - 32, "disk": CHUNK, "nfs": CHUNK}
    assert not counts.failures


def test_what_a_load_costs_a_chunk_on_the_thread_of_all_requests() -> None:
    """A prompt has hundreds of chunks, and no other request is served meanwhile."""
    testbed = SchedulerTestbed()

    def calls(chunks: int) -> tuple[int, int]:
        request = testbed.request(chunks * CHUNK + 50, f"of-{chunks}")
        testbed.hold(request.keys(0, chunks))
        matched = testbed.ask(request) or 0
        started = python_calls(lambda: testbed.admit(request, 0, matched))
        (job,) = testbed.build().loads
        assert len(job.slots) == chunks
        result = testbed.result(job.load, chunks)
        ended = python_calls(lambda: testbed.scheduler.loads.in_flight.on_load_done(result))
        assert testbed.scheduler.loads.in_flight.counts.loaded_tokens["ram"] >= chunks * CHUNK
        return started, ended

    few, many = calls(20), calls(220)
    assert (many[0] - few[0]) / 200 < 5, "calls for each chunk at the start"
    assert many[1] - few[1] < 20, "calls at the end of the load"


def test_a_load_is_released_when_the_copies_of_every_rank_have_ended() -> None:
    """A rank may report before. The request goes on then, and its slots stay pinned."""
    testbed = SchedulerTestbed(ranks=2)
    request, job = _loading(testbed)
    early = replace(testbed.result(job.load, 4), copying=True)
    testbed.report(loads=[early])
    assert not testbed.scheduler.loads.in_flight.counts.loaded_tokens, "one rank has not reported"
    testbed.report(loads=[early])
    assert testbed.scheduler.loads.in_flight.counts.loaded_tokens == {"ram": 4 * CHUNK}
    assert testbed.client.take(LoadReleased) == []
    assert testbed.scheduler.has_pending_work()
    testbed.run({"r": 50})
    request.append(1)
    testbed.finish(request)
    assert testbed.build().cancelled_loads == [], "for the engine the load is over"
    ended = replace(testbed.result(job.load, 4), follows=True)
    testbed.report(loads=[ended])
    assert testbed.client.take(LoadReleased) == []
    testbed.report(loads=[ended])
    assert testbed.client.take(LoadReleased) == [LoadReleased(load=job.load)]
    assert not testbed.scheduler.loads.in_flight.counts.failures
    assert testbed.scheduler.loads.in_flight.counts.loaded_tokens == {"ram": 4 * CHUNK}


def test_workers_hear_whether_a_step_computes_something(testbed: SchedulerTestbed) -> None:
    _loading(testbed)
    assert testbed.build().idle
    testbed.admit(testbed.request(50, "other"), 0, 0)
    assert not testbed.build({"other": 50}).idle


def test_a_request_whose_load_failed_matches_nothing_again(testbed: SchedulerTestbed) -> None:
    """vLLM asks again after a failed load. The same answer again would be an endless loop."""
    request, job = _loading(testbed)
    testbed.report(loads=[testbed.result(job.load, 0, reason="limit")])
    assert testbed.ask(request) == 0
    testbed.run({"r": 64})
    testbed.preempt(request)
    testbed.build(preempted=["r"])
    testbed.now += 100
    assert testbed.ask(request) == 0
    assert testbed.scheduler.loads.in_flight.counts.failures == {"limit": 1}


def test_a_partial_load_counts_its_tokens_and_a_failure(testbed: SchedulerTestbed) -> None:
    _, job = _loading(testbed)
    testbed.report(loads=[testbed.result(job.load, 3, reason="gone")])
    assert testbed.scheduler.loads.in_flight.counts.loaded_tokens == {"ram": 3 * CHUNK}
    assert testbed.scheduler.loads.in_flight.counts.failures == {"gone": 1}


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
def test_a_request_that_lost_one_chunk_to_an_eviction_is_offered_the_shorter_prefix(
    testbed: SchedulerTestbed, lost: int
) -> None:
    """Once more, when vLLM has preempted it: what the failed load has loaded, without the last
    chunk, because the same again could fail without end."""
    request = testbed.request(4 * CHUNK + 50)
    testbed.hold(request.keys(0, 4))
    offered = testbed.ask(request)
    assert offered == 4 * CHUNK
    testbed.client.leaving([request.key(lost)])
    testbed.admit(request, 0, offered)
    (job,) = testbed.build().loads
    assert len(job.slots) == lost, "what comes after the lost chunk is of no use without it"
    testbed.report(loads=[testbed.result(job.load, lost, reason="gone")])
    expected = max(0, lost - 1)
    for chunks in (expected, 0):
        testbed.run({"r": 64})
        testbed.preempt(request)
        testbed.build(preempted=["r"])
        testbed.now += 100
        assert testbed.ask(request) == chunks * CHUNK
        if not chunks:
            break
        testbed.admit(request, 0, chunks * CHUNK)
        (again,) = testbed.build().loads
        assert len(again.runs) == chunks
        testbed.report(loads=[testbed.result(again.load, 0, reason="gone")])
    assert testbed.scheduler.loads.in_flight.counts.failures == {"gone": 1 + bool(expected)}


def test_after_a_partial_load_one_shorter_prefix_is_offered(testbed: SchedulerTestbed) -> None:
    """A request that lost a chunk to an eviction, and later its blocks to a preemption."""
    request, job = _loading(testbed)
    testbed.report(loads=[testbed.result(job.load, 3, reason="gone")])
    for loaded, expected in ((3, 2 * CHUNK), (1, 0), (0, 0)):
        testbed.run({"r": 64})
        testbed.preempt(request)
        testbed.build(preempted=["r"])
        testbed.now += 100
        assert testbed.ask(request) == expected, loaded
        if expected:
            testbed.admit(request, 0, expected)
            (again,) = testbed.build().loads
            assert len(again.runs) == 2
            testbed.report(loads=[testbed.result(again.load, 1, reason="gone")])


def test_with_several_ranks_the_shortest_load_counts_once() -> None:
    testbed = SchedulerTestbed(ranks=2)
    _, job = _loading(testbed)
    testbed.report(loads=[testbed.result(job.load, 4)])
    assert not testbed.scheduler.loads.in_flight.counts.loaded_tokens
    testbed.build()
    testbed.report(loads=[testbed.result(job.load, 2, reason="limit")])
    assert testbed.scheduler.loads.in_flight.counts.loaded_tokens == {"ram": 2 * CHUNK}
    assert testbed.scheduler.loads.in_flight.counts.failures == {"limit": 1}


def test_aborting_a_request_cancels_its_load_and_the_report_is_still_handled(
    testbed: SchedulerTestbed,
) -> None:
    request, job = _loading(testbed)
    testbed.finish(request, "FINISHED_ABORTED")
    assert testbed.build().cancelled_loads == [job.load]
    assert testbed.build().cancelled_loads == []
    testbed.report(loads=[testbed.result(job.load, 1, reason="cancelled")])
    assert len(testbed.scheduler.loads.in_flight) == 0


def test_a_request_aborted_during_its_load_is_not_stored(testbed: SchedulerTestbed) -> None:
    testbed.client.credit(8)
    request, _ = _loading(testbed)
    testbed.client.delta(removed=dict.fromkeys(request.keys(0, 4), 1))
    testbed.finish(request, "FINISHED_ABORTED")
    assert testbed.build().stores == []


def test_unexpected_reports_are_counted_and_ignored(testbed: SchedulerTestbed) -> None:
    testbed.build()
    testbed.report(loads=[testbed.result(99, 1)], done={99: 1})
    assert testbed.scheduler.loads.in_flight.counts.failures == {"unknown_report": 1}
    assert testbed.scheduler.stores.dropped == {"unknown_report": 1}


def test_losing_tierd_does_not_end_loads_on_the_scheduler_side(testbed: SchedulerTestbed) -> None:
    request, job = _loading(testbed)
    testbed.client.lose()
    testbed.build()
    assert len(testbed.scheduler.loads.in_flight) == 1
    testbed.report(loads=[testbed.result(job.load, 0, reason="lost")])
    assert testbed.ask(request) == 0


def test_a_preempted_request_may_load_again(testbed: SchedulerTestbed) -> None:
    request, job = _loading(testbed)
    testbed.report(loads=[testbed.result(job.load, 4)])
    testbed.run({"r": 50})
    testbed.preempt(request)
    testbed.build(preempted=["r"])
    assert testbed.ask(request) == 4 * CHUNK


def test_a_preemption_restarts_the_time_limit(testbed: SchedulerTestbed) -> None:
    request = testbed.request(4 * CHUNK + 5)
    assert testbed.ask(request) == 0
    testbed.run({"r": 4 * CHUNK + 5})
    testbed.now += 60
    testbed.preempt(request)
    testbed.build(preempted=["r"])
    testbed.hold(request.keys(0, 4), DISK)
    assert testbed.ask(request) is None
    assert testbed.client.take(Promote)[0].budget_seconds == 4


def test_a_load_that_cannot_be_described_becomes_a_failing_job(
    testbed: SchedulerTestbed,
) -> None:
    request = testbed.request(300)
    testbed.hold(request.keys(0, 4))
    assert testbed.ask(request, 64) == 3 * CHUNK
    table = testbed.allocate(request, 256)
    testbed.scheduler.fail_load(request, (table,))  # type: ignore[arg-type]
    (job,) = testbed.build().loads
    assert [list(run.blocks) for run in job.runs] == [table[2:]]
    assert testbed.ask(request) == 0
