"""Waiting for lower tiers, before any GPU block is taken."""

from __future__ import annotations

import pytest
from tests.unit.scheduler.scheduler_testbed import (
    CHUNK,
    DISK,
    NFS,
    RAM,
    SLOT_BYTES,
    FakeRequest,
    SchedulerTestbed,
    topology,
)

from kvtier.engines.vllm.loads_in_flight import MIN_COPY_BYTES_PER_SECOND
from kvtier.engines.vllm.scheduler_loads import MAX_PENDING_PROMOTIONS, PINNED_SECONDS
from kvtier.engines.vllm.scheduler_promotions import VERIFY_TIMEOUT_SECONDS
from kvtier.store.types import UNVERIFIED_BIT
from kvtier.tierd.wire import Cancel, Load, Promote, Usable


def _waiting(
    testbed: SchedulerTestbed, chunks: int = 4, bits: int = DISK
) -> tuple[FakeRequest, Promote]:
    request = testbed.request(chunks * CHUNK + 5)
    testbed.hold(request.keys(0, chunks), bits)
    assert testbed.ask(request) is None
    (promote,) = testbed.client.take(Promote)
    return request, promote


def test_keys_in_a_secondary_tier_are_promoted_while_the_request_waits(
    testbed: SchedulerTestbed,
) -> None:
    request, promote = _waiting(testbed)
    assert [b"\0" + block_hash for _, block_hash in promote.keys] == request.keys(0, 4)
    assert promote.budget_seconds == 4
    assert testbed.ask(request) is None
    assert testbed.client.sent == []


def test_the_budget_is_the_largest_timeout_of_the_tiers_in_the_prefix(
    testbed: SchedulerTestbed,
) -> None:
    request = testbed.request(4 * CHUNK + 5)
    testbed.hold(request.keys(0, 1), RAM)
    testbed.hold(request.keys(1, 2), DISK)
    testbed.hold(request.keys(3, 1), NFS)
    assert testbed.ask(request) is None
    assert testbed.client.take(Promote)[0].budget_seconds == 9


def test_a_key_in_several_tiers_comes_from_the_first(testbed: SchedulerTestbed) -> None:
    _, promote = _waiting(testbed, bits=DISK | NFS)
    assert promote.budget_seconds == 4


def test_promoted_keys_match_and_are_loaded_under_the_promotion(testbed: SchedulerTestbed) -> None:
    request, promote = _waiting(testbed)
    testbed.client.promoted(promote.promotion, 4)
    assert testbed.ask(request) == 4 * CHUNK
    assert testbed.ask(request) == 4 * CHUNK
    testbed.admit(request, 0, 4 * CHUNK)
    (load,) = testbed.client.take(Load)
    assert load.promotion == promote.promotion
    assert len(load.keys) == 4
    assert testbed.client.take(Cancel) == []


def test_a_partial_promotion_is_used(testbed: SchedulerTestbed) -> None:
    request, promote = _waiting(testbed)
    testbed.client.promoted(promote.promotion, 2, "partial")
    assert testbed.ask(request) == 2 * CHUNK


def test_a_failed_promotion_is_not_retried_by_the_request(testbed: SchedulerTestbed) -> None:
    """A tier that fails at once would be asked in every step."""
    request, promote = _waiting(testbed)
    testbed.client.promoted(promote.promotion, 0, "failed")
    assert testbed.ask(request) == 0
    testbed.now += 1
    assert testbed.ask(request) == 0
    assert testbed.client.take(Promote) == []


def test_a_promotion_below_the_minimum_is_cancelled() -> None:
    testbed = SchedulerTestbed(topology(min_load_tokens=3 * CHUNK))
    request, promote = _waiting(testbed)
    testbed.client.promoted(promote.promotion, 2, "partial")
    assert testbed.ask(request) == 0
    assert [cancel.promotion for cancel in testbed.client.take(Cancel)] == [promote.promotion]


def test_a_promotion_times_out_if_tierd_does_not_answer(testbed: SchedulerTestbed) -> None:
    request, promote = _waiting(testbed)
    testbed.now += 4.05
    assert testbed.ask(request) is None
    testbed.now += 0.1
    assert testbed.ask(request) == 0
    assert [cancel.promotion for cancel in testbed.client.take(Cancel)] == [promote.promotion]
    assert testbed.scheduler.loads.in_flight.counts.promotions["out_of_time"] == 1


def test_after_the_timeout_ram_is_used(testbed: SchedulerTestbed) -> None:
    request = testbed.request(4 * CHUNK + 5)
    testbed.hold(request.keys(0, 2), RAM)
    testbed.hold(request.keys(2, 2), DISK)
    assert testbed.ask(request) is None
    testbed.now += 4.2
    assert testbed.ask(request) == 2 * CHUNK


def test_a_late_answer_to_a_cancelled_promotion_is_ignored(testbed: SchedulerTestbed) -> None:
    request, promote = _waiting(testbed)
    testbed.now += 4.2
    assert testbed.ask(request) == 0
    testbed.client.promoted(promote.promotion, 4)
    assert testbed.ask(request) == 0


def test_losing_tierd_ends_every_pending_promotion(testbed: SchedulerTestbed) -> None:
    request, promote = _waiting(testbed)
    testbed.client.lose()
    assert testbed.ask(request) == 0
    testbed.client.welcome(epoch=2)
    testbed.client.ready()
    testbed.client.promoted(promote.promotion, 4)
    assert testbed.ask(request) == 0


def test_promotions_of_a_lost_tierd_do_not_match(testbed: SchedulerTestbed) -> None:
    request, promote = _waiting(testbed)
    testbed.client.promoted(promote.promotion, 4)
    assert testbed.ask(request) == 4 * CHUNK
    testbed.client.lose()
    testbed.client.welcome(epoch=2)
    testbed.client.ready()
    assert testbed.ask(request) == 0


def test_the_number_of_pending_promotions_is_bounded(testbed: SchedulerTestbed) -> None:
    for number in range(MAX_PENDING_PROMOTIONS):
        request = testbed.request(200, f"r{number}", seed=number)
        testbed.hold(request.keys(0, 3), DISK)
        assert testbed.ask(request) is None
    nothing = testbed.request(200, "nothing", seed=500)
    testbed.hold(nothing.keys(0, 3), DISK)
    assert testbed.ask(nothing) == 0
    something = testbed.request(200, "something", seed=501)
    testbed.hold(something.keys(0, 1), RAM)
    testbed.hold(something.keys(1, 2), DISK)
    assert testbed.ask(something) == CHUNK
    assert testbed.scheduler.loads.in_flight.counts.promotions["too_many_waiting"] == 2


def test_aborting_a_request_cancels_its_promotion(testbed: SchedulerTestbed) -> None:
    request, promote = _waiting(testbed)
    testbed.finish(request, "FINISHED_ABORTED")
    assert [cancel.promotion for cancel in testbed.client.take(Cancel)] == [promote.promotion]
    testbed.client.promoted(promote.promotion, 0, "cancelled")
    assert testbed.build().cancelled_loads == []


def test_a_request_that_is_not_admitted_releases_its_slots(testbed: SchedulerTestbed) -> None:
    request, promote = _waiting(testbed)
    testbed.client.promoted(promote.promotion, 4)
    testbed.client.delta(added=dict.fromkeys(request.keys(0, 4), RAM))
    assert testbed.ask(request) == 4 * CHUNK
    testbed.now += PINNED_SECONDS + 1
    assert testbed.ask(request) == 4 * CHUNK
    assert [cancel.promotion for cancel in testbed.client.take(Cancel)] == [promote.promotion]


@pytest.mark.parametrize("computed", [CHUNK, 2 * CHUNK])
def test_a_promotion_is_cancelled_if_the_local_hit_grew(
    testbed: SchedulerTestbed, computed: int
) -> None:
    request, promote = _waiting(testbed)
    testbed.client.promoted(promote.promotion, 4)
    testbed.client.delta(added=dict.fromkeys(request.keys(0, 4), RAM))
    assert testbed.ask(request, computed) == 4 * CHUNK - computed
    assert [cancel.promotion for cancel in testbed.client.take(Cancel)] == [promote.promotion]
    testbed.admit(request, computed, 4 * CHUNK - computed)
    assert testbed.client.take(Load)[0].promotion == 0


def test_a_promoted_load_gets_the_rest_of_the_time_limit(testbed: SchedulerTestbed) -> None:
    request, promote = _waiting(testbed)
    testbed.now += 1
    testbed.client.promoted(promote.promotion, 4)
    testbed.admit(request, 0, testbed.ask(request) or 0)
    (job,) = testbed.build().loads
    assert job.timeout_seconds == pytest.approx(3.05 + 4 * SLOT_BYTES / MIN_COPY_BYTES_PER_SECOND)


def test_the_sources_of_promoted_tokens_are_known_when_the_load_starts(
    testbed: SchedulerTestbed,
) -> None:
    request, promote = _waiting(testbed)
    testbed.client.promoted(promote.promotion, 4, tiers=(0, 0, 1, 2))
    testbed.admit(request, 0, testbed.ask(request) or 0)
    assert testbed.scheduler.get_external_token_sources(request) == {
        0: 2 * CHUNK,
        1: CHUNK,
        2: CHUNK,
    }  # type: ignore[arg-type]


def test_unverified_objects_in_ram_are_promoted(
    testbed: SchedulerTestbed,
) -> None:
    request = testbed.request(4 * CHUNK + 5)
    testbed.hold(request.keys(0, 2), RAM)
    testbed.hold(request.keys(2, 1), UNVERIFIED_BIT)
    testbed.hold(request.keys(3, 1), UNVERIFIED_BIT | DISK)
    assert testbed.ask(request) is None
    (promote,) = testbed.client.take(Promote)
    assert len(promote.keys) == 4
    assert promote.budget_seconds == VERIFY_TIMEOUT_SECONDS
    testbed.client.promoted(promote.promotion, 4, tiers=(0, 0, 0, 0))
    assert testbed.ask(request) == 4 * CHUNK


def test_unverified_objects_do_not_count_as_ram(
    testbed: SchedulerTestbed,
) -> None:
    request = testbed.request(4 * CHUNK + 5)
    testbed.hold(request.keys(0, 2), RAM)
    testbed.hold(request.keys(2, 2), UNVERIFIED_BIT)
    assert testbed.ask(request) is None
    (promote,) = testbed.client.take(Promote)
    testbed.client.promoted(promote.promotion, 0, "failed")
    assert testbed.ask(request) == 2 * CHUNK


def test_hits_in_an_unusable_tier_only_do_not_match(
    testbed: SchedulerTestbed,
) -> None:
    request = testbed.request(4 * CHUNK + 5)
    testbed.hold(request.keys(0, 4), DISK)
    testbed.client.sink(Usable(bits=RAM | NFS))
    assert testbed.ask(request) == 0
    assert testbed.client.sent == []
    # Also one that would have been asked for in the next step.
    assert testbed.ask(request) == 0
    testbed.client.sink(Usable(bits=RAM | DISK | NFS))
    later = testbed.request(4 * CHUNK + 5, "later")
    assert testbed.ask(later) is None


def test_other_tiers_match_while_one_is_unusable(testbed: SchedulerTestbed) -> None:
    request = testbed.request(4 * CHUNK + 5)
    testbed.hold(request.keys(0, 2), RAM | DISK)
    testbed.hold(request.keys(2, 2), DISK)
    testbed.client.sink(Usable(bits=RAM | NFS))
    assert testbed.ask(request) == 2 * CHUNK
    other = testbed.request(4 * CHUNK + 5, "other", seed=1)
    testbed.hold(other.keys(0, 4), DISK | NFS)
    assert testbed.ask(other) is None
    assert testbed.client.take(Promote)[0].budget_seconds == 9


def test_a_cached_match_is_void_once_a_tier_is_unusable(testbed: SchedulerTestbed) -> None:
    request = testbed.request(4 * CHUNK + 5)
    testbed.hold(request.keys(0, 4), RAM)
    assert testbed.ask(request) == 4 * CHUNK
    testbed.client.sink(Usable(bits=0))
    assert testbed.ask(request) == 0
