"""Objects of the previous tierd: recovered after the fence and verified on first use."""

from __future__ import annotations

import pytest
from tests.unit.store.store_fixture import NAMESPACE, PAGE, StoreFixture, block_hash, live

from kvtier.config.models import LiveTier, StorePolicy
from kvtier.store.cost_model import Prefill, PrefixCost
from kvtier.store.types import MEMORY_BIT, UNVERIFIED_BIT, PresenceChanged, PromotionOutcome
from kvtier.tiers import checksum


def left_behind(
    *chunks: int, slots: int = 16, seal: bool = True, fenced: bool = False
) -> StoreFixture:
    """A fixture after a restart; these chunks were stored before, in RAM only."""
    values = live(disk=LiveTier(capacity_bytes=1 << 30, store_policy=StorePolicy.NONE))
    fixture = StoreFixture(slots=slots, values=values)
    fixture.engine()
    for chunk in chunks:
        fixture.put(chunk)
        if seal:
            fixture.settle("hash")
    fixture.restart(fenced)
    return fixture


def offset_of(fixture: StoreFixture, chunk: int) -> int:
    entry = fixture.store._resident.get(NAMESPACE, b"\0" + block_hash(chunk))
    assert entry is not None
    return entry.slot.offset


def test_a_recovered_object_is_announced_as_unverified_and_verified_on_first_use() -> None:
    fixture = left_behind(0, 1)
    fixture.engine()
    assert fixture.store.objects == 2
    assert [fixture.bits(chunk) for chunk in (0, 1)] == [UNVERIFIED_BIT, UNVERIFIED_BIT]
    promotion = fixture.promote(0, 1)
    assert fixture.ends(promotion) == []
    fixture.settle("verify")
    (end,) = fixture.ends(promotion)
    assert (end.outcome, end.usable, end.tiers) == (PromotionOutcome.WHOLE, 2, (0, 0))
    assert [fixture.bits(chunk) for chunk in (0, 1)] == [MEMORY_BIT, MEMORY_BIT]
    assert len(fixture.load(0, 1, promotion=promotion).slots) == 2
    assert fixture.counted("recovered_objects_verified") == 2
    fixture.check_accounts()


def test_a_second_hit_is_not_hashed_again() -> None:
    fixture = left_behind(0)
    fixture.engine()
    fixture.promote(0)
    fixture.settle("verify")
    promotion = fixture.promote(0)
    assert fixture.ends(promotion)[0].outcome is PromotionOutcome.WHOLE
    assert fixture.calls("verify") == []


def test_a_flipped_byte_is_a_miss_and_never_served() -> None:
    fixture = left_behind(0, 1, 2)
    fixture.flip(offset_of(fixture, 1) + 77)
    fixture.engine()
    promotion = fixture.promote(0, 1, 2)
    fixture.settle("verify")
    (end,) = fixture.ends(promotion)
    assert (end.outcome, end.usable) == (PromotionOutcome.PARTIAL, 1)
    assert fixture.counted("recovered_objects_dropped", "", "corrupt") == 1
    assert fixture.bits(1) == 0
    assert len(fixture.load(0, 1, 2, promotion=promotion).slots) == 1
    fixture.check_accounts()


def test_a_flipped_byte_is_read_from_a_secondary_tier_that_has_the_object() -> None:
    fixture = left_behind(0, 1)
    fixture.flip(offset_of(fixture, 0))
    fixture.engine()
    fixture.put_in_tier(0)
    promotion = fixture.promote(0, 1)
    fixture.settle("verify")
    fixture.settle("read:")
    (end,) = fixture.ends(promotion)
    assert (end.outcome, end.tiers) == (PromotionOutcome.WHOLE, (1, 0))


def test_objects_without_checksums_are_not_recovered() -> None:
    fixture = left_behind(0, 1, seal=False)
    fixture.engine()
    assert fixture.store.objects == 0
    assert fixture.bits(0) == 0


def test_nothing_is_announced_hashed_or_evicted_before_the_fence_opens() -> None:
    fixture = left_behind(0, fenced=True)
    fixture.engine()
    assert fixture.bits(0) == 0
    assert fixture.ends(fixture.promote(0))[0].outcome is PromotionOutcome.FAILED
    fixture.store.unfence()
    events = fixture.pump()
    assert PresenceChanged(NAMESPACE, b"\0" + block_hash(0), UNVERIFIED_BIT, True) in events
    promotion = fixture.promote(0)
    fixture.settle("verify")
    assert fixture.ends(promotion)[0].outcome is PromotionOutcome.WHOLE


@pytest.mark.parametrize("fenced", [True, False])
def test_many_objects_are_restored_in_parts_and_no_slot_is_granted_before_the_last(
    monkeypatch: pytest.MonkeyPatch, fenced: bool
) -> None:
    fixture = left_behind(*range(6))
    monkeypatch.setattr("kvtier.store.recovery.RESTORED_PER_PUMP", 2)
    fixture.restart(True)
    if not fenced:
        fixture.restart(False)
    else:
        fixture.store.unfence()
        fixture.pump()
    assert fixture.store.objects == 4
    assert fixture.store.next_wake() == fixture.clock.now
    fixture.engine()
    assert fixture.store.objects == 6
    assert len(fixture.credits()) > 0
    promotion = fixture.promote(*range(6))
    fixture.settle("verify")
    assert fixture.ends(promotion)[0].outcome is PromotionOutcome.WHOLE
    fixture.check_accounts()


def test_nothing_is_granted_until_everything_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = left_behind(*range(6))
    monkeypatch.setattr("kvtier.store.recovery.RESTORED_PER_PUMP", 1)
    fixture.restart(True)
    fixture.store.unfence()
    fixture.engine()
    assert fixture.credits() == []
    while fixture.store.objects < 6:
        assert fixture.credits() == []
        fixture.pump()
    assert fixture.credits() != []


def test_a_load_of_an_unverified_object_gets_nothing() -> None:
    fixture = left_behind(0)
    fixture.engine()
    assert fixture.load(0).slots == ()
    assert fixture.counted("loads_cut", "", "unverified") == 1


def test_an_engine_of_another_geometry_finds_nothing_under_the_same_key() -> None:
    fixture = left_behind(0)
    fixture.engine(shards=((PAGE, PAGE),), writers=(0, 1))
    promotion = fixture.promote(0)
    assert fixture.ends(promotion)[0].outcome is PromotionOutcome.FAILED
    assert fixture.counted("recovered_objects_dropped", "", "geometry") == 1
    fixture.check_accounts()


def test_another_number_of_ranks_in_the_same_bytes_is_another_geometry() -> None:
    fixture = StoreFixture(slots=16)
    fixture.engine(shards=((2 * PAGE,),))
    number, slot = fixture.reserve(0)
    fixture.pool[slot : slot + 2 * PAGE] = b"x" * 2 * PAGE
    fixture.store.deliver("e", 0, number)
    fixture.settle("hash")
    fixture.restart()
    fixture.engine(shards=((PAGE, PAGE),), writers=(0, 1))
    assert fixture.ends(fixture.promote(0))[0].outcome is PromotionOutcome.FAILED
    assert fixture.counted("recovered_objects_dropped", "", "geometry") == 1


def test_an_object_with_an_unavailable_checksum_is_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fixture = left_behind(0)
    fixture.engine()
    monkeypatch.setattr("kvtier.store.recovery.by_kind", lambda _: None)
    assert fixture.ends(fixture.promote(0))[0].outcome is PromotionOutcome.FAILED
    assert fixture.counted("recovered_objects_dropped", "", "unverifiable") == 1
    assert checksum.by_kind("blake3") is not None


def test_a_store_of_the_same_key_replaces_the_recovered_object() -> None:
    fixture = left_behind(0)
    fixture.engine()
    fixture.put(0)
    assert fixture.bits(0) == MEMORY_BIT
    assert fixture.counted("recovered_objects_dropped", "", "replaced") == 1
    fixture.check_accounts()


def test_a_recovered_object_is_evicted_and_its_slot_is_never_mistaken_for_it() -> None:
    fixture = left_behind(*range(6), slots=8)
    fixture.engine()
    for chunk in range(20, 28):
        fixture.put(chunk)
        fixture.settle("hash")
        fixture.advance(0.2)
    assert fixture.counted("recovered_objects_dropped", "", "evicted") == 6
    held = {e.key for e in fixture.store._resident.entries()}
    fixture.restart()
    fixture.engine()
    assert {e.key for e in fixture.store._resident.entries()} <= held
    for chunk in range(6):
        assert fixture.bits(chunk) == 0


def test_an_object_survives_any_number_of_restarts() -> None:
    fixture = left_behind(0, 1)
    for _ in range(3):
        fixture.restart()
    fixture.engine()
    promotion = fixture.promote(0, 1)
    fixture.settle("verify")
    assert fixture.ends(promotion)[0].outcome is PromotionOutcome.WHOLE


def test_objects_read_from_a_secondary_tier_are_recovered_as_well() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.put_in_tier(0)
    fixture.promote(0)
    fixture.settle("read:")
    fixture.restart()
    fixture.engine()
    assert fixture.bits(0) == UNVERIFIED_BIT | 2
    promotion = fixture.promote(0)
    fixture.settle("verify")
    assert fixture.ends(promotion)[0].tiers == (0,)


def test_a_cancelled_promotion_postpones_the_verification_to_the_next_use() -> None:
    fixture = left_behind(0, 1)
    fixture.engine()
    promotion = fixture.promote(0, 1)
    fixture.io.hold(fixture.calls("verify")[0])
    fixture.store.cancel("e", promotion)
    fixture.settle("verify")
    assert [fixture.bits(chunk) for chunk in (0, 1)] == [MEMORY_BIT, UNVERIFIED_BIT]
    assert fixture.store.pinned_bytes == 0
    again = fixture.promote(0, 1)
    fixture.settle("verify")
    assert fixture.ends(again)[0].outcome is PromotionOutcome.WHOLE


def test_two_requests_share_one_verification() -> None:
    fixture = left_behind(0)
    fixture.engine()
    first, second = fixture.promote(0), fixture.promote(0)
    assert len(fixture.calls("verify")) == 1
    fixture.settle("verify")
    assert [fixture.ends(p)[0].outcome for p in (first, second)] == [PromotionOutcome.WHOLE] * 2


def test_a_slow_verification_costs_no_more_than_the_deadline() -> None:
    fixture = left_behind(0)
    fixture.engine()
    promotion = fixture.promote(0, budget=0.5)
    fixture.advance(0.5)
    assert fixture.ends(promotion)[0].outcome is PromotionOutcome.FAILED
    fixture.settle("verify")
    assert fixture.store.pinned_bytes == 0


def test_under_cost_the_deadline_of_a_verification_is_half_of_the_recomputing_time() -> None:
    fixture = left_behind(0, 1)
    fixture.engine()
    shape = PrefixCost(0, (1000, 2000), Prefill(1e-3, 0.0))
    fixture.store.promote("e", 900, [(0, block_hash(chunk)) for chunk in (0, 1)], 60.0, shape)
    fixture.advance(0.99)
    assert fixture.ends(900) == []
    fixture.advance(0.02)
    assert fixture.ends(900)[0].outcome is PromotionOutcome.FAILED


def test_a_verified_object_is_written_to_the_tiers_that_lack_it() -> None:
    values = live(disk=LiveTier(capacity_bytes=1 << 30))
    fixture = StoreFixture(values=values)
    fixture.engine()
    fixture.put(0)
    fixture.settle("hash")
    fixture.restart()
    fixture.engine()
    assert fixture.tier.objects == {}
    fixture.promote(0)
    fixture.settle("verify")
    fixture.settle("write:")
    assert len(fixture.tier.objects) == 1


def test_objects_of_several_sizes_are_recovered_in_their_slots() -> None:
    fixture = StoreFixture(slots=64)
    fixture.engine("small", namespace="a" * 32)
    fixture.engine("large", namespace="b" * 32, shards=((3 * PAGE,),))
    for chunk in range(4):
        fixture.put(chunk, "small", "a" * 32)
        number, slot = fixture.reserve(chunk, "large")
        fixture.pool[slot : slot + 3 * PAGE] = bytes([chunk]) * 3 * PAGE
        fixture.store.deliver("large", 0, number)
        fixture.settle("hash")
    places = {e.ref: e.slot.offset for e in fixture.store._resident.entries()}
    fixture.restart()
    assert {e.ref: e.slot.offset for e in fixture.store._resident.entries()} == places
    fixture.check_accounts()
    assert fixture.store.accounts().committed == 4 * PAGE + 4 * 3 * PAGE
