"""Waiting for lower tiers, before any GPU block is taken."""

from __future__ import annotations

import pytest
from tests.unit.scheduler.scheduler_rig import (
    CHUNK,
    DISK,
    NFS,
    RAM,
    SLOT_BYTES,
    FakeRequest,
    Rig,
    topology,
)

from kvtier.engines.vllm.scheduler_loads import (
    MAX_PENDING_PROMOTIONS,
    MIN_COPY_BYTES_PER_SECOND,
    PINNED_SECONDS,
    VERIFY_TIMEOUT_SECONDS,
)
from kvtier.store.types import UNVERIFIED_BIT
from kvtier.tierd.wire import Cancel, Load, Promote, Usable


def _waiting(rig: Rig, chunks: int = 4, bits: int = DISK) -> tuple[FakeRequest, Promote]:
    request = rig.request(chunks * CHUNK + 5)
    rig.hold(request.keys(0, chunks), bits)
    assert rig.ask(request) is None
    (promote,) = rig.client.take(Promote)
    return request, promote


def test_keys_in_a_lower_tier_are_promoted_while_the_request_waits(rig: Rig) -> None:
    request, promote = _waiting(rig)
    assert [b"\0" + block_hash for _, block_hash in promote.keys] == request.keys(0, 4)
    assert promote.budget_seconds == 4
    assert rig.ask(request) is None
    assert rig.client.sent == []


def test_the_budget_is_the_largest_limit_of_the_tiers_in_the_plan(rig: Rig) -> None:
    request = rig.request(4 * CHUNK + 5)
    rig.hold(request.keys(0, 1), RAM)
    rig.hold(request.keys(1, 2), DISK)
    rig.hold(request.keys(3, 1), NFS)
    assert rig.ask(request) is None
    assert rig.client.take(Promote)[0].budget_seconds == 9


def test_a_key_in_several_tiers_comes_from_the_first(rig: Rig) -> None:
    _, promote = _waiting(rig, bits=DISK | NFS)
    assert promote.budget_seconds == 4


def test_what_was_promoted_is_offered_and_loaded_under_the_promotion(rig: Rig) -> None:
    request, promote = _waiting(rig)
    rig.client.promoted(promote.promotion, 4)
    assert rig.ask(request) == 4 * CHUNK
    assert rig.ask(request) == 4 * CHUNK
    rig.admit(request, 0, 4 * CHUNK)
    (load,) = rig.client.take(Load)
    assert load.promotion == promote.promotion
    assert len(load.keys) == 4
    assert rig.client.take(Cancel) == []


def test_a_part_that_arrived_is_used(rig: Rig) -> None:
    request, promote = _waiting(rig)
    rig.client.promoted(promote.promotion, 2, "partial")
    assert rig.ask(request) == 2 * CHUNK


def test_a_promotion_that_failed_is_not_tried_again_by_the_request(rig: Rig) -> None:
    """A tier that fails at once would be asked in every step."""
    request, promote = _waiting(rig)
    rig.client.promoted(promote.promotion, 0, "failed")
    assert rig.ask(request) == 0
    rig.now += 1
    assert rig.ask(request) == 0
    assert rig.client.take(Promote) == []


def test_too_little_is_given_back() -> None:
    rig = Rig(topology(min_load_tokens=3 * CHUNK))
    request, promote = _waiting(rig)
    rig.client.promoted(promote.promotion, 2, "partial")
    assert rig.ask(request) == 0
    assert [cancel.promotion for cancel in rig.client.take(Cancel)] == [promote.promotion]


def test_the_wait_ends_by_this_sides_own_clock_if_tierd_does_not_answer(rig: Rig) -> None:
    request, promote = _waiting(rig)
    rig.now += 4.05
    assert rig.ask(request) is None
    rig.now += 0.1
    assert rig.ask(request) == 0
    assert [cancel.promotion for cancel in rig.client.take(Cancel)] == [promote.promotion]
    assert rig.scheduler.loads.counts.promotions["out_of_time"] == 1


def test_when_the_clock_is_out_ram_is_used(rig: Rig) -> None:
    request = rig.request(4 * CHUNK + 5)
    rig.hold(request.keys(0, 2), RAM)
    rig.hold(request.keys(2, 2), DISK)
    assert rig.ask(request) is None
    rig.now += 4.2
    assert rig.ask(request) == 2 * CHUNK


def test_a_late_answer_to_a_promotion_that_was_given_up_is_ignored(rig: Rig) -> None:
    request, promote = _waiting(rig)
    rig.now += 4.2
    assert rig.ask(request) == 0
    rig.client.promoted(promote.promotion, 4)
    assert rig.ask(request) == 0


def test_losing_tierd_ends_every_wait_at_once(rig: Rig) -> None:
    request, promote = _waiting(rig)
    rig.client.lose()
    assert rig.ask(request) == 0
    rig.client.welcome(epoch=2)
    rig.client.ready()
    rig.client.promoted(promote.promotion, 4)
    assert rig.ask(request) == 0


def test_what_a_lost_tierd_had_promoted_is_not_offered(rig: Rig) -> None:
    request, promote = _waiting(rig)
    rig.client.promoted(promote.promotion, 4)
    assert rig.ask(request) == 4 * CHUNK
    rig.client.lose()
    rig.client.welcome(epoch=2)
    rig.client.ready()
    assert rig.ask(request) == 0


def test_at_most_so_many_requests_wait_and_others_get_what_ram_has(rig: Rig) -> None:
    for number in range(MAX_PENDING_PROMOTIONS):
        request = rig.request(200, f"r{number}", seed=number)
        rig.hold(request.keys(0, 3), DISK)
        assert rig.ask(request) is None
    nothing = rig.request(200, "nothing", seed=500)
    rig.hold(nothing.keys(0, 3), DISK)
    assert rig.ask(nothing) == 0
    something = rig.request(200, "something", seed=501)
    rig.hold(something.keys(0, 1), RAM)
    rig.hold(something.keys(1, 2), DISK)
    assert rig.ask(something) == CHUNK
    assert rig.scheduler.loads.counts.promotions["too_many_waiting"] == 2


def test_an_aborted_request_gives_its_promotion_up(rig: Rig) -> None:
    request, promote = _waiting(rig)
    rig.finish(request, "FINISHED_ABORTED")
    assert [cancel.promotion for cancel in rig.client.take(Cancel)] == [promote.promotion]
    rig.client.promoted(promote.promotion, 0, "cancelled")
    assert rig.build().cancelled_loads == []


def test_a_request_that_is_not_admitted_for_long_gives_its_slots_back(rig: Rig) -> None:
    request, promote = _waiting(rig)
    rig.client.promoted(promote.promotion, 4)
    rig.client.delta(added=dict.fromkeys(request.keys(0, 4), RAM))
    assert rig.ask(request) == 4 * CHUNK
    rig.now += PINNED_SECONDS + 1
    assert rig.ask(request) == 4 * CHUNK
    assert [cancel.promotion for cancel in rig.client.take(Cancel)] == [promote.promotion]


@pytest.mark.parametrize("computed", [CHUNK, 2 * CHUNK])
def test_a_local_hit_that_grew_meanwhile_is_not_loaded_over(rig: Rig, computed: int) -> None:
    request, promote = _waiting(rig)
    rig.client.promoted(promote.promotion, 4)
    rig.client.delta(added=dict.fromkeys(request.keys(0, 4), RAM))
    assert rig.ask(request, computed) == 4 * CHUNK - computed
    assert [cancel.promotion for cancel in rig.client.take(Cancel)] == [promote.promotion]
    rig.admit(request, computed, 4 * CHUNK - computed)
    assert rig.client.take(Load)[0].promotion == 0


def test_a_promoted_load_has_the_rest_of_the_requests_clock(rig: Rig) -> None:
    request, promote = _waiting(rig)
    rig.now += 1
    rig.client.promoted(promote.promotion, 4)
    rig.admit(request, 0, rig.ask(request) or 0)
    (job,) = rig.build().loads
    assert job.timeout_seconds == pytest.approx(3.05 + 4 * SLOT_BYTES / MIN_COPY_BYTES_PER_SECOND)


def test_where_promoted_tokens_came_from_is_known_when_the_load_begins(rig: Rig) -> None:
    request, promote = _waiting(rig)
    rig.client.promoted(promote.promotion, 4, tiers=(0, 0, 1, 2))
    rig.admit(request, 0, rig.ask(request) or 0)
    assert rig.scheduler.get_external_token_sources(request) == {0: 2 * CHUNK, 1: CHUNK, 2: CHUNK}  # type: ignore[arg-type]


def test_what_is_in_ram_since_before_this_tierd_is_promoted_because_it_has_to_be_verified(
    rig: Rig,
) -> None:
    request = rig.request(4 * CHUNK + 5)
    rig.hold(request.keys(0, 2), RAM)
    rig.hold(request.keys(2, 1), UNVERIFIED_BIT)
    rig.hold(request.keys(3, 1), UNVERIFIED_BIT | DISK)
    assert rig.ask(request) is None
    (promote,) = rig.client.take(Promote)
    assert len(promote.keys) == 4
    assert promote.budget_seconds == VERIFY_TIMEOUT_SECONDS
    rig.client.promoted(promote.promotion, 4, tiers=(0, 0, 0, 0))
    assert rig.ask(request) == 4 * CHUNK


def test_what_has_to_be_verified_does_not_count_as_ram_where_it_cannot_be_waited_for(
    rig: Rig,
) -> None:
    request = rig.request(4 * CHUNK + 5)
    rig.hold(request.keys(0, 2), RAM)
    rig.hold(request.keys(2, 2), UNVERIFIED_BIT)
    assert rig.ask(request) is None
    (promote,) = rig.client.take(Promote)
    rig.client.promoted(promote.promotion, 0, "failed")
    assert rig.ask(request) == 2 * CHUNK


def test_a_request_whose_hits_lie_only_in_a_tier_that_is_given_up_is_answered_at_once(
    rig: Rig,
) -> None:
    request = rig.request(4 * CHUNK + 5)
    rig.hold(request.keys(0, 4), DISK)
    rig.client.sink(Usable(bits=RAM | NFS))
    assert rig.ask(request) == 0
    assert rig.client.sent == []
    # Also one that would have been asked for in the next step.
    assert rig.ask(request) == 0
    rig.client.sink(Usable(bits=RAM | DISK | NFS))
    later = rig.request(4 * CHUNK + 5, "later")
    assert rig.ask(later) is None


def test_what_ram_and_other_tiers_have_is_offered_while_one_is_given_up(rig: Rig) -> None:
    request = rig.request(4 * CHUNK + 5)
    rig.hold(request.keys(0, 2), RAM | DISK)
    rig.hold(request.keys(2, 2), DISK)
    rig.client.sink(Usable(bits=RAM | NFS))
    assert rig.ask(request) == 2 * CHUNK
    other = rig.request(4 * CHUNK + 5, "other", seed=1)
    rig.hold(other.keys(0, 4), DISK | NFS)
    assert rig.ask(other) is None
    assert rig.client.take(Promote)[0].budget_seconds == 9


def test_an_answer_from_before_a_tier_was_given_up_does_not_hold(rig: Rig) -> None:
    request = rig.request(4 * CHUNK + 5)
    rig.hold(request.keys(0, 4), RAM)
    assert rig.ask(request) == 4 * CHUNK
    rig.client.sink(Usable(bits=0))
    assert rig.ask(request) == 0
