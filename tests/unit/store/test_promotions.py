"""Promotions: what is brought into RAM, from where, and when they end."""

from __future__ import annotations

import pytest
from tests.unit.store.store_world import NAMESPACE, PAGE, World, block_hash, live, shard_content

from kvtier.config.models import LiveTier, Selection
from kvtier.errors import TierCorruptError, TierMissError, TierUnavailableError
from kvtier.store.types import PromotionEnded, PromotionOutcome

TWO = ("disk", "nfs")


def ended(world: World, promotion: int) -> tuple[PromotionOutcome, int]:
    """How a promotion ended, which it must have done exactly once."""
    (end,) = world.ends(promotion)
    return end.outcome, end.usable


def test_keys_in_ram_are_there_at_once() -> None:
    world = World()
    world.engine()
    world.put(0)
    world.put(1)
    assert ended(world, world.promote(0, 1)) == (PromotionOutcome.WHOLE, 2)


def test_keys_in_a_lower_tier_are_read_into_pinned_slots_and_then_loaded_from_ram() -> None:
    world = World()
    world.engine()
    world.put(0)
    world.lower(1, 2)
    promotion = world.promote(0, 1, 2)
    assert world.ends(promotion) == []
    world.io.run_all("read:disk")
    world.pump()
    (end,) = world.ends(promotion)
    assert (end.outcome, end.usable, end.tiers) == (PromotionOutcome.WHOLE, 3, (0, 1, 1))
    ready = world.load(0, 1, 2, promotion=promotion)
    assert ready.tiers == (0, 1, 1)
    for chunk, slot in enumerate(ready.slots):
        assert world.pool[slot : slot + PAGE] == shard_content(
            NAMESPACE, b"\0" + block_hash(chunk), 0, PAGE
        )


def test_nothing_anywhere_ends_at_once() -> None:
    world = World()
    world.engine()
    assert ended(world, world.promote(0)) == (PromotionOutcome.FAILED, 0)
    assert ended(world, world.promote()) == (PromotionOutcome.FAILED, 0)


def test_only_the_prefix_before_the_first_missing_key_is_read() -> None:
    world = World()
    world.engine()
    world.lower(0, 2)
    promotion = world.promote(0, 1, 2)
    assert len(world.calls("read:")) == 1
    world.settle()
    assert ended(world, promotion) == (PromotionOutcome.PARTIAL, 1)


@pytest.mark.parametrize("budget", [0.0, -1.0, float("nan")])
def test_without_time_only_what_is_in_ram_counts(budget: float) -> None:
    world = World()
    world.engine()
    world.put(0)
    world.settle()
    world.lower(1)
    assert ended(world, world.promote(0, 1, budget=budget)) == (PromotionOutcome.PARTIAL, 1)


def test_when_the_clock_is_out_what_has_arrived_in_one_piece_counts() -> None:
    world = World()
    world.engine()
    world.lower(0, 1, 2)
    promotion = world.promote(0, 1, 2, budget=2.0)
    calls = world.calls("read:")
    world.io.run(calls[0])
    world.io.run(calls[2])
    world.io.hold(calls[1])
    world.advance(1.99)
    assert world.ends(promotion) == []
    world.advance(0.01)
    assert ended(world, promotion) == (PromotionOutcome.PARTIAL, 1)
    assert world.store.pinned_bytes == PAGE


def test_a_read_that_hangs_keeps_its_slot_long_after_everybody_left() -> None:
    world = World()
    world.engine()
    world.lower(0)
    promotion = world.promote(0)
    (call,) = world.calls("read:")
    world.io.hold(call)
    world.advance(10.0)
    assert ended(world, promotion) == (PromotionOutcome.FAILED, 0)
    world.store.close_engine("e", True)
    world.advance(1000.0)
    assert world.store.accounts().reading == PAGE
    world.io.run(call)
    world.pump()
    assert world.store.accounts().reading == 0
    world.check_accounts()


def test_a_read_that_comes_late_is_kept_for_the_next() -> None:
    world = World()
    world.engine()
    world.lower(0)
    world.promote(0, budget=0.5)
    (call,) = world.calls("read:")
    world.io.hold(call)
    world.advance(2.0)
    world.io.run(call)
    world.pump()
    assert ended(world, world.promote(0)) == (PromotionOutcome.WHOLE, 1)
    assert world.tier.calls.count("read") == 1


def test_a_read_that_nobody_waits_for_and_that_has_not_begun_is_taken_back() -> None:
    world = World()
    world.engine()
    world.lower(0)
    world.promote(0, budget=0.5)
    world.advance(0.5)
    assert world.store.accounts().reading == 0
    world.io.run_all()
    world.pump()
    assert "read" not in world.tier.calls


def test_one_read_serves_all_who_wait_and_each_leaves_at_its_own_time() -> None:
    world = World()
    world.engine()
    world.lower(0)
    first = world.promote(0, budget=0.1)
    second = world.promote(0, budget=4.0)
    (call,) = world.calls("read:")
    world.io.hold(call)
    world.advance(0.5)
    assert ended(world, first) == (PromotionOutcome.FAILED, 0)
    world.io.run(call)
    world.pump()
    assert ended(world, second) == (PromotionOutcome.WHOLE, 1)


def test_nobody_joins_a_read_that_is_past_its_estimate() -> None:
    world = World()
    world.engine()
    world.lower(0)
    world.promote(0)
    world.io.hold(world.calls("read:")[0])
    world.advance(1.5)
    assert ended(world, world.promote(0)) == (PromotionOutcome.FAILED, 0)
    assert world.counted("promotions_cut", "", "read_past_its_estimate") == 1


def test_two_promotions_of_a_long_prefix_and_a_short_one_hold_what_each_needs() -> None:
    world = World()
    world.engine()
    world.lower(0, 1)
    long = world.promote(0, 1)
    short = world.promote(0)
    world.settle()
    assert ended(world, long) == (PromotionOutcome.WHOLE, 2)
    assert ended(world, short) == (PromotionOutcome.WHOLE, 1)
    world.store.cancel("e", long)
    assert world.store.pinned_bytes == PAGE
    world.store.cancel("e", short)
    assert world.store.pinned_bytes == 0


def test_a_cancelled_promotion_ends_as_cancelled_and_holds_nothing() -> None:
    world = World()
    world.engine()
    world.put(0)
    world.settle()
    world.lower(1)
    promotion = world.promote(0, 1)
    world.store.cancel("e", promotion)
    world.pump()
    assert ended(world, promotion) == (PromotionOutcome.CANCELLED, 0)
    assert world.store.pinned_bytes == 0
    world.store.cancel("e", promotion)
    world.pump()
    assert len(world.ends(promotion)) == 1
    assert world.counted("late_cancels") == 1


def test_what_nobody_loads_or_cancels_is_let_go_after_a_minute_and_counted() -> None:
    world = World()
    world.engine()
    world.put(0)
    world.settle()
    world.promote(0)
    world.advance(59.0)
    assert world.store.pinned_bytes == PAGE
    world.advance(1.0)
    assert world.store.pinned_bytes == 0
    assert world.counted("promotion_leases_expired") == 1


def test_a_number_in_use_is_refused_and_the_first_ends_once() -> None:
    world = World()
    world.engine()
    world.lower(0)
    world.store.promote("e", 5, [(0, block_hash(0))], 1.0)
    world.store.promote("e", 5, [(0, block_hash(0))], 1.0)
    world.settle()
    assert len([e for e in world.events if isinstance(e, PromotionEnded)]) == 1
    assert world.counted("protocol_violations", "", "promotion_twice") == 1


def test_an_engine_that_closes_ends_its_promotions_and_their_pins_at_once() -> None:
    world = World()
    world.engine()
    world.put(0)
    world.settle()
    world.lower(1)
    done = world.promote(0)
    open_ = world.promote(0, 1)
    world.store.close_engine("e", False)
    world.pump()
    assert world.store.pinned_bytes == 0
    assert ended(world, done) == (PromotionOutcome.WHOLE, 1)
    assert ended(world, open_) == (PromotionOutcome.CANCELLED, 0)


def test_the_tier_of_highest_weight_is_read_and_the_next_one_if_that_fails() -> None:
    values = live(disk=LiveTier(load_weight=50), nfs=LiveTier(load_weight=80))
    world = World(tiers=TWO, values=values)
    world.engine()
    world.lower(0, tier=0)
    world.lower(0, tier=1)
    world.tiers[1].fail = lambda: TierUnavailableError("EIO")
    promotion = world.promote(0)
    assert [call.lane for call in world.calls("read:")] == ["read:nfs"]
    world.settle()
    (end,) = world.ends(promotion)
    assert (end.outcome, end.tiers) == (PromotionOutcome.WHOLE, (1,))
    assert world.counted("tier_reads_failed", "nfs", "unavailable") == 1


def test_tiers_of_equal_weight_are_read_in_the_order_of_the_document() -> None:
    world = World(tiers=TWO)
    world.engine()
    for tier in (0, 1):
        world.lower(0, tier=tier)
    world.promote(0)
    assert [call.lane for call in world.calls("read:")] == ["read:disk"]


def test_weights_that_change_count_at_once() -> None:
    world = World(tiers=TWO)
    world.engine()
    for tier in (0, 1):
        world.lower(0, tier=tier)
    world.store.configure(live(disk=LiveTier(load_weight=1), nfs=LiveTier(load_weight=2)))
    world.promote(0)
    assert [call.lane for call in world.calls("read:")] == ["read:nfs"]


@pytest.mark.parametrize(
    ("error", "reason"), [(TierCorruptError, "corrupt"), (TierMissError, "vanished")]
)
def test_a_bad_object_is_not_asked_for_again_for_30_seconds(
    error: type[Exception], reason: str
) -> None:
    world = World()
    world.engine()
    world.lower(0, 1)
    world.tier.fail = lambda: error("no")  # type: ignore[return-value, assignment]
    first = world.promote(0)
    world.settle()
    world.tier.fail = None
    assert ended(world, first) == (PromotionOutcome.FAILED, 0)
    assert world.counted("tier_reads_failed", "disk", reason) == 1
    assert ended(world, world.promote(0)) == (PromotionOutcome.FAILED, 0)
    world.promote(1)
    assert len(world.calls("read:")) == 1
    world.advance(30.0)
    again = world.promote(0)
    world.settle()
    assert ended(world, again) == (PromotionOutcome.WHOLE, 1)


def test_an_object_of_another_geometry_is_not_believed() -> None:
    world = World()
    world.engine()
    world.tier.put(NAMESPACE, b"\0" + block_hash(0), (PAGE - 1,))
    world.pump()
    promotion = world.promote(0)
    world.settle()
    assert ended(world, promotion) == (PromotionOutcome.FAILED, 0)
    assert world.counted("tier_reads_failed", "disk", "corrupt") == 1


def test_a_key_that_an_engine_stores_meanwhile_ends_the_wait_for_its_read() -> None:
    world = World()
    world.engine()
    world.lower(0)
    promotion = world.promote(0)
    (call,) = world.calls("read:")
    world.io.hold(call)
    slot = world.put(0)
    assert ended(world, promotion) == (PromotionOutcome.WHOLE, 1)
    world.io.run(call)
    world.pump()
    assert world.load(0).slots == (slot,)
    assert world.store.accounts().reading == 0
    world.check_accounts()


def test_reads_make_room_by_evicting_and_wait_for_it() -> None:
    world = World(slots=16)
    world.engine()
    for chunk in range(11):
        world.put(chunk)
        world.settle()
    world.lower(*range(100, 104))
    promotion = world.promote(*range(100, 104))
    # One slot was kept in reserve; the others come when what leaves has left.
    assert len(world.calls("read:")) == 1
    for _ in range(3):
        world.advance(0.11)
        world.io.run_all("read:")
    world.pump()
    assert ended(world, promotion) == (PromotionOutcome.WHOLE, 4)
    world.check_accounts()


def test_where_no_slot_can_be_had_the_prefix_ends_there_and_is_counted() -> None:
    world = World(slots=16)
    world.engine()
    for chunk in range(11):
        world.put(chunk)
        world.settle()
    world.load(*range(11))
    world.lower(100, 101, 102)
    promotion = world.promote(100, 101, 102)
    world.io.run_all("read:")
    world.pump()
    assert ended(world, promotion) == (PromotionOutcome.PARTIAL, 1)
    assert world.counted("promotions_cut", "", "no_slot") == 1


def test_while_fenced_nothing_is_read() -> None:
    world = World(fenced=True)
    world.engine()
    world.lower(0)
    assert ended(world, world.promote(0)) == (PromotionOutcome.FAILED, 0)
    world.store.unfence()
    promotion = world.promote(0)
    world.settle()
    assert ended(world, promotion) == (PromotionOutcome.WHOLE, 1)


def test_an_engine_whose_identity_does_not_hold_uses_no_lower_tier() -> None:
    world = World()
    world.lower(0)
    world.engine(persistent=False)
    assert list(world.store.presence(NAMESPACE)) == []
    assert ended(world, world.promote(0)) == (PromotionOutcome.FAILED, 0)
    world.put(1)
    world.settle()
    assert len(world.tier.objects) == 1


def test_under_weighted_selection_a_slow_tier_is_not_read_for_a_few_chunks_more() -> None:
    values = live(Selection.WEIGHTED, disk=LiveTier(load_weight=10))
    world = World(values=values)
    world.engine()
    for chunk in range(4):
        world.put(chunk)
        world.settle()
    world.lower(4)
    assert ended(world, world.promote(0, 1, 2, 3, 4)) == (PromotionOutcome.PARTIAL, 4)
    assert world.counted("selections", "", "highest_score") == 1


def test_a_tier_that_takes_longer_than_its_own_limit_is_not_waited_for() -> None:
    values = live(disk=LiveTier(load_timeout_seconds=1), nfs=LiveTier(load_timeout_seconds=20))
    world = World(tiers=TWO, values=values)
    world.engine()
    world.lower(0)
    promotion = world.promote(0, budget=20.0)
    world.io.hold(world.calls("read:")[0])
    world.advance(1.0)
    assert ended(world, promotion) == (PromotionOutcome.FAILED, 0)
    assert world.counted("tier_reads_timed_out", "disk") == 1


def test_a_read_that_waited_in_its_queue_too_long_goes_to_the_next_tier() -> None:
    values = live(disk=LiveTier(load_timeout_seconds=1), nfs=LiveTier(load_timeout_seconds=20))
    world = World(tiers=TWO, values=values)
    world.engine()
    for tier in (0, 1):
        world.lower(0, tier=tier)
    promotion = world.promote(0, budget=20.0)
    world.advance(1.0)
    world.io.run_all("read:nfs")
    world.pump()
    (end,) = world.ends(promotion)
    assert (end.outcome, end.tiers) == (PromotionOutcome.WHOLE, (2,))
