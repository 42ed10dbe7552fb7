"""Promotions: keys read into RAM, their sources, and when a promotion ends."""

from __future__ import annotations

import pytest
from tests.unit.store.store_fixture import (
    NAMESPACE,
    PAGE,
    StoreFixture,
    block_hash,
    live,
    shard_content,
)

from kvtier.config.models import LiveTier, Selection
from kvtier.errors import TierCorruptError, TierMissError, TierUnavailableError
from kvtier.store.generations import unpack_location
from kvtier.store.types import PromotionEnded, PromotionOutcome

TWO = ("disk", "nfs")


def ended(fixture: StoreFixture, promotion: int) -> tuple[PromotionOutcome, int]:
    """How a promotion ended, which it must have done exactly once."""
    (end,) = fixture.ends(promotion)
    return end.outcome, end.usable


def test_keys_in_ram_are_there_at_once() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.put(0)
    fixture.put(1)
    assert ended(fixture, fixture.promote(0, 1)) == (PromotionOutcome.WHOLE, 2)


def test_keys_in_a_secondary_tier_are_read_into_pinned_slots_and_then_loaded_from_ram() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.put(0)
    fixture.put_in_tier(1, 2)
    promotion = fixture.promote(0, 1, 2)
    assert fixture.ends(promotion) == []
    fixture.io.run_all("read:disk")
    fixture.pump()
    (end,) = fixture.ends(promotion)
    assert (end.outcome, end.usable, end.tiers) == (PromotionOutcome.WHOLE, 3, (0, 1, 1))
    ready = fixture.load(0, 1, 2, promotion=promotion)
    assert tuple(unpack_location(location)[0] for location in end.locations) == ready.slots
    for chunk, slot in enumerate(ready.slots):
        assert fixture.pool[slot : slot + PAGE] == shard_content(
            NAMESPACE, b"\0" + block_hash(chunk), 0, PAGE
        )


def test_a_promotion_without_an_object_in_any_tier_ends_at_once() -> None:
    fixture = StoreFixture()
    fixture.engine()
    assert ended(fixture, fixture.promote(0)) == (PromotionOutcome.FAILED, 0)
    assert ended(fixture, fixture.promote()) == (PromotionOutcome.FAILED, 0)


def test_only_the_prefix_before_the_first_missing_key_is_read() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.put_in_tier(0, 2)
    promotion = fixture.promote(0, 1, 2)
    assert len(fixture.calls("read:")) == 1
    fixture.settle()
    assert ended(fixture, promotion) == (PromotionOutcome.PARTIAL, 1)


@pytest.mark.parametrize("budget", [0.0, -1.0, float("nan")])
def test_without_a_budget_only_keys_in_ram_count(budget: float) -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.put(0)
    fixture.settle()
    fixture.put_in_tier(1)
    assert ended(fixture, fixture.promote(0, 1, budget=budget)) == (PromotionOutcome.PARTIAL, 1)


def test_at_the_deadline_the_contiguous_prefix_that_has_arrived_counts() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.put_in_tier(0, 1, 2)
    promotion = fixture.promote(0, 1, 2, budget=2.0)
    calls = fixture.calls("read:")
    fixture.io.run(calls[0])
    fixture.io.run(calls[2])
    fixture.io.hold(calls[1])
    fixture.advance(1.99)
    assert fixture.ends(promotion) == []
    fixture.advance(0.01)
    assert ended(fixture, promotion) == (PromotionOutcome.PARTIAL, 1)
    assert fixture.store.pinned_bytes == PAGE


def test_a_hung_read_keeps_its_slot_after_all_requests_have_ended() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.put_in_tier(0)
    promotion = fixture.promote(0)
    (call,) = fixture.calls("read:")
    fixture.io.hold(call)
    fixture.advance(10.0)
    assert ended(fixture, promotion) == (PromotionOutcome.FAILED, 0)
    fixture.store.close_engine("e", True)
    fixture.advance(1000.0)
    assert fixture.store.accounts().reading == PAGE
    fixture.io.run(call)
    fixture.pump()
    assert fixture.store.accounts().reading == 0
    fixture.check_accounts()


def test_a_late_read_is_committed_for_the_next_request() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.put_in_tier(0)
    fixture.promote(0, budget=0.5)
    (call,) = fixture.calls("read:")
    fixture.io.hold(call)
    fixture.advance(2.0)
    fixture.io.run(call)
    fixture.pump()
    assert ended(fixture, fixture.promote(0)) == (PromotionOutcome.WHOLE, 1)
    assert fixture.tier.calls.count("read") == 1


def test_a_read_without_waiters_that_has_not_started_is_revoked() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.put_in_tier(0)
    fixture.promote(0, budget=0.5)
    fixture.advance(0.5)
    assert fixture.store.accounts().reading == 0
    fixture.io.run_all()
    fixture.pump()
    assert "read" not in fixture.tier.calls


def test_one_read_serves_all_waiters_and_each_stops_independently() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.put_in_tier(0)
    first = fixture.promote(0, budget=0.1)
    second = fixture.promote(0, budget=4.0)
    (call,) = fixture.calls("read:")
    fixture.io.hold(call)
    fixture.advance(0.5)
    assert ended(fixture, first) == (PromotionOutcome.FAILED, 0)
    fixture.io.run(call)
    fixture.pump()
    assert ended(fixture, second) == (PromotionOutcome.WHOLE, 1)


def test_a_read_past_its_estimate_cannot_be_joined() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.put_in_tier(0)
    fixture.promote(0)
    fixture.io.hold(fixture.calls("read:")[0])
    fixture.advance(1.5)
    assert ended(fixture, fixture.promote(0)) == (PromotionOutcome.FAILED, 0)
    assert fixture.counted("promotions_cut", "", "read_past_its_estimate") == 1


def test_promotions_of_a_long_and_a_short_prefix_each_pin_their_keys() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.put_in_tier(0, 1)
    long = fixture.promote(0, 1)
    short = fixture.promote(0)
    fixture.settle()
    assert ended(fixture, long) == (PromotionOutcome.WHOLE, 2)
    assert ended(fixture, short) == (PromotionOutcome.WHOLE, 1)
    fixture.store.cancel("e", long)
    assert fixture.store.pinned_bytes == PAGE
    fixture.store.cancel("e", short)
    assert fixture.store.pinned_bytes == 0


def test_a_cancelled_promotion_ends_as_cancelled_and_holds_nothing() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.put(0)
    fixture.settle()
    fixture.put_in_tier(1)
    promotion = fixture.promote(0, 1)
    fixture.store.cancel("e", promotion)
    fixture.pump()
    assert ended(fixture, promotion) == (PromotionOutcome.CANCELLED, 0)
    assert fixture.store.pinned_bytes == 0
    fixture.store.cancel("e", promotion)
    fixture.pump()
    assert len(fixture.ends(promotion)) == 1
    assert fixture.counted("late_cancels") == 1


def test_the_lease_of_a_promotion_expires_after_a_minute_and_is_counted() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.put(0)
    fixture.settle()
    fixture.promote(0)
    fixture.advance(59.0)
    assert fixture.store.pinned_bytes == PAGE
    fixture.advance(1.0)
    assert fixture.store.pinned_bytes == 0
    assert fixture.counted("promotion_leases_expired") == 1


def test_a_promotion_number_in_use_is_rejected_and_the_first_ends_once() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.put_in_tier(0)
    fixture.store.promote("e", 5, [(0, block_hash(0))], 1.0)
    fixture.store.promote("e", 5, [(0, block_hash(0))], 1.0)
    fixture.settle()
    assert len([e for e in fixture.events if isinstance(e, PromotionEnded)]) == 1
    assert fixture.counted("protocol_violations", "", "promotion_twice") == 1


def test_an_engine_that_closes_ends_its_promotions_and_their_pins_at_once() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.put(0)
    fixture.settle()
    fixture.put_in_tier(1)
    done = fixture.promote(0)
    open_ = fixture.promote(0, 1)
    fixture.store.close_engine("e", False)
    fixture.pump()
    assert fixture.store.pinned_bytes == 0
    assert ended(fixture, done) == (PromotionOutcome.WHOLE, 1)
    assert ended(fixture, open_) == (PromotionOutcome.CANCELLED, 0)


def test_the_tier_of_highest_weight_is_read_and_the_next_one_if_that_fails() -> None:
    values = live(disk=LiveTier(load_weight=50), nfs=LiveTier(load_weight=80))
    fixture = StoreFixture(tiers=TWO, values=values)
    fixture.engine()
    fixture.put_in_tier(0, tier=0)
    fixture.put_in_tier(0, tier=1)
    fixture.tiers[1].fail = lambda: TierUnavailableError("EIO")
    promotion = fixture.promote(0)
    assert [call.lane for call in fixture.calls("read:")] == ["read:nfs"]
    fixture.settle()
    (end,) = fixture.ends(promotion)
    assert (end.outcome, end.tiers) == (PromotionOutcome.WHOLE, (1,))
    assert fixture.counted("tier_reads_failed", "nfs", "unavailable") == 1


def test_tiers_of_equal_weight_are_read_in_the_order_of_the_document() -> None:
    fixture = StoreFixture(tiers=TWO)
    fixture.engine()
    for tier in (0, 1):
        fixture.put_in_tier(0, tier=tier)
    fixture.promote(0)
    assert [call.lane for call in fixture.calls("read:")] == ["read:disk"]


def test_weights_that_change_count_at_once() -> None:
    fixture = StoreFixture(tiers=TWO)
    fixture.engine()
    for tier in (0, 1):
        fixture.put_in_tier(0, tier=tier)
    fixture.store.configure(live(disk=LiveTier(load_weight=1), nfs=LiveTier(load_weight=2)))
    fixture.promote(0)
    assert [call.lane for call in fixture.calls("read:")] == ["read:nfs"]


@pytest.mark.parametrize(
    ("error", "reason"), [(TierCorruptError, "corrupt"), (TierMissError, "vanished")]
)
def test_a_corrupt_object_is_not_read_again_for_30_seconds(
    error: type[Exception], reason: str
) -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.put_in_tier(0, 1)
    fixture.tier.fail = lambda: error("no")  # type: ignore[return-value, assignment]
    first = fixture.promote(0)
    fixture.settle()
    fixture.tier.fail = None
    assert ended(fixture, first) == (PromotionOutcome.FAILED, 0)
    assert fixture.counted("tier_reads_failed", "disk", reason) == 1
    assert ended(fixture, fixture.promote(0)) == (PromotionOutcome.FAILED, 0)
    fixture.promote(1)
    assert len(fixture.calls("read:")) == 1
    fixture.advance(30.0)
    again = fixture.promote(0)
    fixture.settle()
    assert ended(fixture, again) == (PromotionOutcome.WHOLE, 1)


def test_an_object_of_another_geometry_is_a_miss() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.tier.put(NAMESPACE, b"\0" + block_hash(0), (PAGE - 1,))
    fixture.pump()
    promotion = fixture.promote(0)
    fixture.settle()
    assert ended(fixture, promotion) == (PromotionOutcome.FAILED, 0)
    assert fixture.counted("tier_reads_failed", "disk", "corrupt") == 1


def test_a_key_stored_by_an_engine_ends_the_wait_for_its_read() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.put_in_tier(0)
    promotion = fixture.promote(0)
    (call,) = fixture.calls("read:")
    fixture.io.hold(call)
    slot = fixture.put(0)
    assert ended(fixture, promotion) == (PromotionOutcome.WHOLE, 1)
    fixture.io.run(call)
    fixture.pump()
    assert fixture.load(0).slots == (slot,)
    assert fixture.store.accounts().reading == 0
    fixture.check_accounts()


def test_reads_make_room_by_evicting_and_wait_for_it() -> None:
    fixture = StoreFixture(slots=16)
    fixture.engine()
    fixture.fill(11)
    fixture.put_in_tier(*range(100, 104))
    promotion = fixture.promote(*range(100, 104))
    # One slot was in reserve; the evictions provide the others.
    assert len(fixture.calls("read:")) == 1
    for _ in range(3):
        fixture.advance(0.11)
        fixture.io.run_all("read:")
    fixture.pump()
    assert ended(fixture, promotion) == (PromotionOutcome.WHOLE, 4)
    fixture.check_accounts()


def test_a_prefix_ends_where_no_slot_is_free_and_is_counted() -> None:
    fixture = StoreFixture(slots=16)
    fixture.engine()
    fixture.fill(11)
    fixture.load(*range(11))
    fixture.put_in_tier(100, 101, 102)
    promotion = fixture.promote(100, 101, 102)
    fixture.io.run_all("read:")
    fixture.pump()
    assert ended(fixture, promotion) == (PromotionOutcome.PARTIAL, 1)
    assert fixture.counted("promotions_cut", "", "no_slot") == 1


def test_while_fenced_nothing_is_read() -> None:
    fixture = StoreFixture(fenced=True)
    fixture.engine()
    fixture.put_in_tier(0)
    assert ended(fixture, fixture.promote(0)) == (PromotionOutcome.FAILED, 0)
    fixture.store.unfence()
    promotion = fixture.promote(0)
    fixture.settle()
    assert ended(fixture, promotion) == (PromotionOutcome.WHOLE, 1)


def test_an_engine_without_a_persistent_identity_uses_no_secondary_tier() -> None:
    fixture = StoreFixture()
    fixture.put_in_tier(0)
    fixture.engine(persistent=False)
    assert list(fixture.store.presence(NAMESPACE)) == []
    assert ended(fixture, fixture.promote(0)) == (PromotionOutcome.FAILED, 0)
    fixture.put(1)
    fixture.settle()
    assert len(fixture.tier.objects) == 1


def test_under_weighted_selection_a_slow_tier_is_not_read_for_a_few_chunks_more() -> None:
    values = live(Selection.WEIGHTED, disk=LiveTier(load_weight=10))
    fixture = StoreFixture(values=values)
    fixture.engine()
    fixture.fill(4)
    fixture.put_in_tier(4)
    assert ended(fixture, fixture.promote(0, 1, 2, 3, 4)) == (PromotionOutcome.PARTIAL, 4)
    assert fixture.counted("selections", "", "highest_score") == 1


def test_a_tier_that_takes_longer_than_its_own_limit_is_not_waited_for() -> None:
    values = live(disk=LiveTier(load_timeout_seconds=1), nfs=LiveTier(load_timeout_seconds=20))
    fixture = StoreFixture(tiers=TWO, values=values)
    fixture.engine()
    fixture.put_in_tier(0)
    promotion = fixture.promote(0, budget=20.0)
    fixture.io.hold(fixture.calls("read:")[0])
    fixture.advance(1.0)
    assert ended(fixture, promotion) == (PromotionOutcome.FAILED, 0)
    assert fixture.counted("tier_reads_timed_out", "disk") == 1


def test_a_read_queued_for_too_long_goes_to_the_next_tier() -> None:
    values = live(disk=LiveTier(load_timeout_seconds=1), nfs=LiveTier(load_timeout_seconds=20))
    fixture = StoreFixture(tiers=TWO, values=values)
    fixture.engine()
    for tier in (0, 1):
        fixture.put_in_tier(0, tier=tier)
    promotion = fixture.promote(0, budget=20.0)
    fixture.advance(1.0)
    fixture.io.run_all("read:nfs")
    fixture.pump()
    (end,) = fixture.ends(promotion)
    assert (end.outcome, end.tiers) == (PromotionOutcome.WHOLE, (2,))
