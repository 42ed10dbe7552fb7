"""What the last tierd left in RAM: taken over after the fence, verified at its first hit, or absent."""

from __future__ import annotations

import pytest
from tests.unit.store.store_world import NAMESPACE, PAGE, World, block_hash, live

from kvtier.config.models import LiveTier, StorePolicy
from kvtier.store.cost_model import Prefill, PrefixCost
from kvtier.store.types import MEMORY_BIT, UNVERIFIED_BIT, PresenceChanged, PromotionOutcome
from kvtier.tiers import checksum


def left_behind(*chunks: int, slots: int = 16, seal: bool = True, fenced: bool = False) -> World:
    """A world in its second life; in its first these chunks were stored, in RAM alone."""
    values = live(disk=LiveTier(capacity_bytes=1 << 30, store_policy=StorePolicy.NONE))
    world = World(slots=slots, values=values)
    world.engine()
    for chunk in chunks:
        world.put(chunk)
        if seal:
            world.settle("hash")
    world.restart(fenced)
    return world


def offset_of(world: World, chunk: int) -> int:
    entry = world.store._table.get(NAMESPACE, b"\0" + block_hash(chunk))
    assert entry is not None
    return entry.slot.offset


def test_what_was_sealed_is_announced_under_a_bit_of_its_own_and_verified_at_its_first_hit() -> (
    None
):
    world = left_behind(0, 1)
    world.engine()
    assert world.store.objects == 2
    assert [world.bits(chunk) for chunk in (0, 1)] == [UNVERIFIED_BIT, UNVERIFIED_BIT]
    promotion = world.promote(0, 1)
    assert world.ends(promotion) == []
    world.settle("verify")
    (end,) = world.ends(promotion)
    assert (end.outcome, end.usable, end.tiers) == (PromotionOutcome.WHOLE, 2, (0, 0))
    assert [world.bits(chunk) for chunk in (0, 1)] == [MEMORY_BIT, MEMORY_BIT]
    assert len(world.load(0, 1, promotion=promotion).slots) == 2
    assert world.counted("recovered_objects_verified") == 2
    world.check_accounts()


def test_a_second_hit_is_not_hashed_again() -> None:
    world = left_behind(0)
    world.engine()
    world.promote(0)
    world.settle("verify")
    promotion = world.promote(0)
    assert world.ends(promotion)[0].outcome is PromotionOutcome.WHOLE
    assert world.calls("verify") == []


def test_a_flipped_byte_is_a_miss_and_never_served() -> None:
    world = left_behind(0, 1, 2)
    world.flip(offset_of(world, 1) + 77)
    world.engine()
    promotion = world.promote(0, 1, 2)
    world.settle("verify")
    (end,) = world.ends(promotion)
    assert (end.outcome, end.usable) == (PromotionOutcome.PARTIAL, 1)
    assert world.counted("recovered_objects_dropped", "", "corrupt") == 1
    assert world.bits(1) == 0
    assert len(world.load(0, 1, 2, promotion=promotion).slots) == 1
    world.check_accounts()


def test_a_flipped_byte_is_read_again_where_a_lower_tier_has_the_object() -> None:
    world = left_behind(0, 1)
    world.flip(offset_of(world, 0))
    world.engine()
    world.lower(0)
    promotion = world.promote(0, 1)
    world.settle("verify")
    world.settle("read:")
    (end,) = world.ends(promotion)
    assert (end.outcome, end.tiers) == (PromotionOutcome.WHOLE, (1, 0))


def test_what_was_not_sealed_is_not_taken_over() -> None:
    world = left_behind(0, 1, seal=False)
    world.engine()
    assert world.store.objects == 0
    assert world.bits(0) == 0


def test_nothing_is_announced_hashed_or_evicted_before_the_fence_opens() -> None:
    world = left_behind(0, fenced=True)
    world.engine()
    assert world.bits(0) == 0
    assert world.ends(world.promote(0))[0].outcome is PromotionOutcome.FAILED
    world.store.unfence()
    events = world.pump()
    assert PresenceChanged(NAMESPACE, b"\0" + block_hash(0), UNVERIFIED_BIT, True) in events
    promotion = world.promote(0)
    world.settle("verify")
    assert world.ends(promotion)[0].outcome is PromotionOutcome.WHOLE


@pytest.mark.parametrize("fenced", [True, False])
def test_many_are_taken_over_a_part_at_a_time_and_no_slot_is_handed_out_before_the_last(
    monkeypatch: pytest.MonkeyPatch, fenced: bool
) -> None:
    world = left_behind(*range(6))
    monkeypatch.setattr("kvtier.store.store.RESTORED_PER_PUMP", 2)
    world.restart(True)
    if not fenced:
        world.restart(False)
    else:
        world.store.unfence()
        world.pump()
    assert world.store.objects == 4
    assert world.store.next_wake() == world.clock.now
    world.engine()
    assert world.store.objects == 6
    assert len(world.credits()) > 0
    promotion = world.promote(*range(6))
    world.settle("verify")
    assert world.ends(promotion)[0].outcome is PromotionOutcome.WHOLE
    world.check_accounts()


def test_nothing_is_granted_while_a_part_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    world = left_behind(*range(6))
    monkeypatch.setattr("kvtier.store.store.RESTORED_PER_PUMP", 1)
    world.restart(True)
    world.store.unfence()
    world.engine()
    assert world.credits() == []
    while world.store.objects < 6:
        assert world.credits() == []
        world.pump()
    assert world.credits() != []


def test_a_load_that_names_it_unverified_gets_nothing() -> None:
    world = left_behind(0)
    world.engine()
    assert world.load(0).slots == ()
    assert world.counted("loads_cut", "", "unverified") == 1


def test_an_engine_of_another_geometry_finds_nothing_under_the_same_key() -> None:
    world = left_behind(0)
    world.engine(shards=((PAGE, PAGE),))
    promotion = world.promote(0)
    assert world.ends(promotion)[0].outcome is PromotionOutcome.FAILED
    assert world.counted("recovered_objects_dropped", "", "geometry") == 1
    world.check_accounts()


def test_another_number_of_ranks_in_the_same_bytes_is_another_geometry() -> None:
    world = World(slots=16)
    world.engine(shards=((2 * PAGE,),))
    number, slot = world.reserve(0)
    world.pool[slot : slot + 2 * PAGE] = b"x" * 2 * PAGE
    world.store.deliver("e", 0, number)
    world.settle("hash")
    world.restart()
    world.engine(shards=((PAGE, PAGE),))
    assert world.ends(world.promote(0))[0].outcome is PromotionOutcome.FAILED
    assert world.counted("recovered_objects_dropped", "", "geometry") == 1


def test_what_cannot_be_verified_here_is_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = left_behind(0)
    world.engine()
    monkeypatch.setattr("kvtier.store.recovery.by_kind", lambda _: None)
    assert world.ends(world.promote(0))[0].outcome is PromotionOutcome.FAILED
    assert world.counted("recovered_objects_dropped", "", "unverifiable") == 1
    assert checksum.by_kind("blake3") is not None


def test_a_store_of_the_same_key_takes_its_place() -> None:
    world = left_behind(0)
    world.engine()
    world.put(0)
    assert world.bits(0) == MEMORY_BIT
    assert world.counted("recovered_objects_dropped", "", "replaced") == 1
    world.check_accounts()


def test_it_makes_room_like_any_other_object_and_what_took_its_slot_is_not_mistaken_for_it() -> (
    None
):
    world = left_behind(*range(6), slots=8)
    world.engine()
    for chunk in range(20, 28):
        world.put(chunk)
        world.settle("hash")
        world.advance(0.2)
    assert world.counted("recovered_objects_dropped", "", "evicted") == 6
    held = {e.key for e in world.store._table.entries()}
    world.restart()
    world.engine()
    assert {e.key for e in world.store._table.entries()} <= held
    for chunk in range(6):
        assert world.bits(chunk) == 0


def test_an_object_survives_any_number_of_lives() -> None:
    world = left_behind(0, 1)
    for _ in range(3):
        world.restart()
    world.engine()
    promotion = world.promote(0, 1)
    world.settle("verify")
    assert world.ends(promotion)[0].outcome is PromotionOutcome.WHOLE


def test_what_came_from_a_lower_tier_is_taken_over_too() -> None:
    world = World()
    world.engine()
    world.lower(0)
    world.promote(0)
    world.settle("read:")
    world.restart()
    world.engine()
    assert world.bits(0) == UNVERIFIED_BIT | 2
    promotion = world.promote(0)
    world.settle("verify")
    assert world.ends(promotion)[0].tiers == (0,)


def test_a_promotion_that_is_cancelled_leaves_it_for_the_next_hit() -> None:
    world = left_behind(0, 1)
    world.engine()
    promotion = world.promote(0, 1)
    world.io.hold(world.calls("verify")[0])
    world.store.cancel("e", promotion)
    world.settle("verify")
    assert [world.bits(chunk) for chunk in (0, 1)] == [MEMORY_BIT, UNVERIFIED_BIT]
    assert world.store.pinned_bytes == 0
    again = world.promote(0, 1)
    world.settle("verify")
    assert world.ends(again)[0].outcome is PromotionOutcome.WHOLE


def test_two_requests_share_one_verification() -> None:
    world = left_behind(0)
    world.engine()
    first, second = world.promote(0), world.promote(0)
    assert len(world.calls("verify")) == 1
    world.settle("verify")
    assert [world.ends(p)[0].outcome for p in (first, second)] == [PromotionOutcome.WHOLE] * 2


def test_a_verification_that_takes_too_long_costs_the_clock_and_no_more() -> None:
    world = left_behind(0)
    world.engine()
    promotion = world.promote(0, budget=0.5)
    world.advance(0.5)
    assert world.ends(promotion)[0].outcome is PromotionOutcome.FAILED
    world.settle("verify")
    assert world.store.pinned_bytes == 0


def test_under_cost_the_clock_of_what_has_to_be_verified_is_half_of_recomputing_it() -> None:
    world = left_behind(0, 1)
    world.engine()
    shape = PrefixCost(0, (1000, 2000), Prefill(1e-3, 0.0))
    world.store.promote("e", 900, [(0, block_hash(chunk)) for chunk in (0, 1)], 60.0, shape)
    world.advance(0.99)
    assert world.ends(900) == []
    world.advance(0.02)
    assert world.ends(900)[0].outcome is PromotionOutcome.FAILED


def test_what_is_verified_goes_to_the_tiers_that_do_not_have_it() -> None:
    values = live(disk=LiveTier(capacity_bytes=1 << 30))
    world = World(values=values)
    world.engine()
    world.put(0)
    world.settle("hash")
    world.restart()
    world.engine()
    assert world.tier.objects == {}
    world.promote(0)
    world.settle("verify")
    world.settle("write:")
    assert len(world.tier.objects) == 1


def test_objects_of_several_sizes_come_back_to_the_slots_they_were_in() -> None:
    world = World(slots=64)
    world.engine("small", namespace="a" * 32)
    world.engine("large", namespace="b" * 32, shards=((3 * PAGE,),))
    for chunk in range(4):
        world.put(chunk, "small", "a" * 32)
        number, slot = world.reserve(chunk, "large")
        world.pool[slot : slot + 3 * PAGE] = bytes([chunk]) * 3 * PAGE
        world.store.deliver("large", 0, number)
        world.settle("hash")
    places = {e.ref: e.slot.offset for e in world.store._table.entries()}
    world.restart()
    assert {e.ref: e.slot.offset for e in world.store._table.entries()} == places
    world.check_accounts()
    assert world.store.accounts().committed == 4 * PAGE + 4 * 3 * PAGE
