"""How loads end, and what is remembered of it."""

from __future__ import annotations

from tests.unit.scheduler.scheduler_rig import CHUNK, DISK, FakeRequest, Rig

from kvtier.engines.vllm.metadata import LoadJob
from kvtier.tierd.wire import Promote


def _loading(rig: Rig, chunks: int = 4, computed: int = 0) -> tuple[FakeRequest, LoadJob]:
    request = rig.request(chunks * CHUNK + 50)
    rig.hold(request.keys(0, chunks))
    rig.admit(request, computed, rig.ask(request, computed) or 0)
    (job,) = rig.build().loads
    return request, job


def test_tokens_count_as_loaded_when_the_load_is_complete(rig: Rig) -> None:
    _, job = _loading(rig, computed=32)
    counts = rig.scheduler.loads.counts
    assert counts.offered_tokens == 4 * CHUNK - 32
    assert not counts.loaded_tokens
    rig.report(loads=[rig.result(job.load, 4, tiers=(0, 0, 1, 2))])
    assert counts.loaded_tokens == {"ram": 2 * CHUNK - 32, "disk": CHUNK, "nfs": CHUNK}
    assert not counts.failures


def test_a_request_whose_load_failed_matches_nothing_again(rig: Rig) -> None:
    """vLLM asks again after a failed load. The same answer again would be an endless loop."""
    request, job = _loading(rig)
    rig.report(loads=[rig.result(job.load, 0, reason="limit")])
    assert rig.ask(request) == 0
    rig.run({"r": 64})
    rig.preempt(request)
    rig.build(preempted=["r"])
    rig.now += 100
    assert rig.ask(request) == 0
    assert rig.scheduler.loads.counts.failures == {"limit": 1}


def test_a_partial_load_counts_its_tokens_and_a_failure(rig: Rig) -> None:
    request, job = _loading(rig)
    rig.report(loads=[rig.result(job.load, 3, reason="gone")])
    assert rig.scheduler.loads.counts.loaded_tokens == {"ram": 3 * CHUNK}
    assert rig.scheduler.loads.counts.failures == {"gone": 1}
    assert rig.ask(request) == 0


def test_with_several_ranks_the_shortest_load_counts_once() -> None:
    rig = Rig(ranks=2)
    _, job = _loading(rig)
    rig.report(loads=[rig.result(job.load, 4)])
    assert not rig.scheduler.loads.counts.loaded_tokens
    rig.build()
    rig.report(loads=[rig.result(job.load, 2, reason="limit")])
    assert rig.scheduler.loads.counts.loaded_tokens == {"ram": 2 * CHUNK}
    assert rig.scheduler.loads.counts.failures == {"limit": 1}


def test_aborting_a_request_cancels_its_load_and_the_report_is_still_handled(
    rig: Rig,
) -> None:
    request, job = _loading(rig)
    rig.finish(request, "FINISHED_ABORTED")
    assert rig.build().cancelled_loads == [job.load]
    assert rig.build().cancelled_loads == []
    rig.report(loads=[rig.result(job.load, 1, reason="cancelled")])
    assert rig.scheduler.loads.in_flight == 0


def test_a_request_aborted_during_its_load_is_not_stored(rig: Rig) -> None:
    rig.client.credit(8)
    request, _ = _loading(rig)
    rig.client.delta(removed=dict.fromkeys(request.keys(0, 4), 1))
    rig.finish(request, "FINISHED_ABORTED")
    assert rig.build().stores == []


def test_unexpected_reports_are_counted_and_ignored(rig: Rig) -> None:
    rig.build()
    rig.report(loads=[rig.result(99, 1)], done={99: 1})
    assert rig.scheduler.loads.counts.failures == {"unknown_report": 1}
    assert rig.scheduler.stores.dropped == {"unknown_report": 1}


def test_losing_tierd_does_not_end_loads_on_the_scheduler_side(rig: Rig) -> None:
    request, job = _loading(rig)
    rig.client.lose()
    rig.build()
    assert rig.scheduler.loads.in_flight == 1
    rig.report(loads=[rig.result(job.load, 0, reason="lost")])
    assert rig.ask(request) == 0


def test_a_preempted_request_may_load_again(rig: Rig) -> None:
    request, job = _loading(rig)
    rig.report(loads=[rig.result(job.load, 4)])
    rig.run({"r": 50})
    rig.preempt(request)
    rig.build(preempted=["r"])
    assert rig.ask(request) == 4 * CHUNK


def test_a_preemption_restarts_the_time_limit(rig: Rig) -> None:
    request = rig.request(4 * CHUNK + 5)
    assert rig.ask(request) == 0
    rig.run({"r": 4 * CHUNK + 5})
    rig.now += 60
    rig.preempt(request)
    rig.build(preempted=["r"])
    rig.hold(request.keys(0, 4), DISK)
    assert rig.ask(request) is None
    assert rig.client.take(Promote)[0].budget_seconds == 4


def test_a_load_that_cannot_be_described_becomes_a_failing_job(
    rig: Rig,
) -> None:
    request = rig.request(300)
    rig.hold(request.keys(0, 4))
    assert rig.ask(request, 64) == 3 * CHUNK
    table = rig.allocate(request, 256)
    rig.scheduler.fail_load(request, (table,))  # type: ignore[arg-type]
    (job,) = rig.build().loads
    assert [list(run.blocks) for run in job.runs] == [table[2:]]
    assert rig.ask(request) == 0
