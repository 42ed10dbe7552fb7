"""Requests retain, pin and limit the life of objects in RAM."""

from __future__ import annotations

import pytest
from tests.unit.store.kept_objects import A, B, check_kept_objects
from tests.unit.store.store_fixture import NAMESPACE, PAGE, StoreFixture, block_hash, live

from kvtier.config.models import LiveTier
from kvtier.store.lifetimes import PIN_SECONDS
from kvtier.store.types import Owner, PromotionOutcome
from kvtier.tiers.base import ObjectRef

DISK = LiveTier(capacity_bytes=1 << 30)
PIN, RETAIN = Owner(pin=True), Owner(retain_seconds=60)


def store(pinned_percent: int = 20, share: int = 100, slots: int = 40) -> StoreFixture:
    fixture = StoreFixture(slots, values=live(shares=(share, pinned_percent), disk=DISK))
    fixture.engine()
    return fixture


def in_ram(fixture: StoreFixture, *chunks: int) -> list[int]:
    return [chunk for chunk in chunks if fixture.bits(chunk) & 1]


def counted(fixture: StoreFixture, name: str, reason: str = "") -> int:
    return fixture.counters.values.get((name, "", reason), 0)


def fill(fixture: StoreFixture, number: int = 60) -> None:
    """Stores what is never used again."""
    for chunk in range(1_000, 1_000 + number):
        fixture.put_prompt(chunk)


class TestRetained:
    @pytest.mark.parametrize("policy", ["LRU", "ARC"])
    def test_a_retained_prompt_outlives_others_for_its_time(self, policy: str) -> None:
        fixture = StoreFixture(40, values=live(disk=DISK), eviction_policy=policy)  # type: ignore[arg-type]
        fixture.engine()
        fixture.put_prompt(0, 1, 2, owner=RETAIN)
        fixture.put_prompt(10, 11, 12)
        fill(fixture)
        assert in_ram(fixture, 0, 1, 2, 10, 11, 12) == [0, 1, 2]
        fixture.advance(61.0)
        for chunk in range(2_000, 2_060):
            fixture.put_prompt(chunk)
        assert in_ram(fixture, 0, 1, 2) == []

    def test_who_retains_everything_takes_at_most_half(self) -> None:
        fixture = store()
        for chunk in range(100):
            fixture.put_prompt(chunk, owner=RETAIN)
        fixture.put_prompt(500, 501)
        fixture.put_prompt(600, 601, owner=RETAIN)
        assert in_ram(fixture, 500, 501, 600, 601) == [500, 501, 600, 601]

    def test_a_later_request_retains_what_is_there(self) -> None:
        fixture = store()
        fixture.put_prompt(0, 1)
        fixture.store.keep("e", [(0, block_hash(0)), (0, block_hash(1))], RETAIN)
        fill(fixture)
        assert in_ram(fixture, 0, 1) == [0, 1]


class TestPinned:
    def test_a_pinned_prompt_stays_until_its_time_has_passed(self) -> None:
        fixture = store()
        fixture.put_prompt(0, 1, owner=PIN)
        fill(fixture)
        assert in_ram(fixture, 0, 1) == [0, 1]
        assert fixture.store.pinned_by_requests == 2 * PAGE
        fixture.advance(PIN_SECONDS + 1)
        assert fixture.store.pinned_by_requests == 0
        assert counted(fixture, "pins_ended", "expired") == 2
        fill(fixture)
        assert in_ram(fixture, 0, 1) == []

    def test_what_exceeds_the_limit_is_refused_and_counted(self) -> None:
        fixture = store(pinned_percent=10)
        fixture.put_prompt(*range(6), owner=PIN)
        assert fixture.store.pinned_by_requests == 4 * PAGE
        assert counted(fixture, "pins") == 4
        assert counted(fixture, "pins_refused", "tier_limit") == 2
        fill(fixture)
        assert in_ram(fixture, *range(6)) == [0, 1, 2, 3]

    def test_a_tenant_pins_its_part_of_its_share(self) -> None:
        fixture = store(pinned_percent=50, share=20)
        fixture.put_prompt(*range(6), owner=Owner(A, pin=True))
        fixture.put_prompt(10, 11, owner=Owner(B, pin=True))
        assert counted(fixture, "pins_refused", "tenant_limit") == 2
        assert fixture.store._lifetimes.pinned_by == {A: 4 * PAGE, B: 2 * PAGE}
        fixture.put_prompt(*range(20, 28), owner=Owner(A))
        assert in_ram(fixture, *range(4)) == [0, 1, 2, 3]
        check_kept_objects(fixture.store, fixture.clock.now)

    def test_a_lowered_limit_ends_pins(self) -> None:
        fixture = store(pinned_percent=50)
        fixture.put_prompt(*range(10), owner=PIN)
        fixture.store.configure(live(shares=(100, 10), disk=DISK))
        assert fixture.store.pinned_by_requests == 4 * PAGE
        assert counted(fixture, "pins_ended", "limit") == 6

    def test_a_lowered_share_ends_pins_of_tenants_above_their_part(self) -> None:
        fixture = store(pinned_percent=50, share=100)
        fixture.put_prompt(*range(8), owner=Owner(A, pin=True))
        fixture.put_prompt(20, owner=Owner(B, pin=True))
        fixture.store.configure(live(shares=(20, 50), disk=DISK))
        assert fixture.store._lifetimes.pinned_by == {A: 4 * PAGE, B: PAGE}
        fixture.pump()
        check_kept_objects(fixture.store, fixture.clock.now)

    def test_a_tier_whose_objects_are_all_in_use_gives_no_credits_and_never_blocks(self) -> None:
        fixture = store(pinned_percent=80, slots=10)
        for chunk in range(20):
            if fixture.credits():
                fixture.put_prompt(chunk, owner=PIN)
        held = in_ram(fixture, *range(20))
        load = fixture.load(*held)
        fixture.advance(1.0)
        assert fixture.store.pinned_by_requests == 8 * PAGE
        accounts = fixture.store.accounts()
        assert accounts.committed + accounts.granted + accounts.free == accounts.pool_bytes
        assert fixture.store.next_wake() is None or fixture.store.next_wake() > fixture.clock.now
        fixture.store.release_load("e", load.load)
        before = counted(fixture, "stores_committed")
        for chunk in range(500, 510):
            fixture.put_prompt(chunk)
        assert counted(fixture, "stores_committed") == before + 10, "stores are blocked"
        assert in_ram(fixture, *range(20)) == held[:8]

    def test_a_model_without_slots_takes_the_room_of_pinned_objects(self) -> None:
        fixture = store(pinned_percent=80, slots=8)
        fixture.put_prompt(*range(6), owner=PIN)
        fixture.engine("big", "b" * 32, shards=((4 * PAGE,),))
        fixture.advance(0.5)
        assert fixture.credits("big"), "another model starves"
        assert counted(fixture, "pins_ended", "reclaimed")
        check_kept_objects(fixture.store, fixture.clock.now)


class TestTimeToLive:
    def test_an_expired_object_leaves_ram_and_is_not_loaded(self) -> None:
        fixture = store()
        fixture.put_prompt(0, 1, owner=Owner(ttl_seconds=30))
        fixture.put_prompt(5)
        fixture.advance(28.0)
        assert in_ram(fixture, 0, 1) == [0, 1]
        fixture.advance(2.5)
        assert in_ram(fixture, 0, 1, 5) == [5]
        assert counted(fixture, "objects_expired") == 2
        assert fixture.load(0, 1).slots == ()

    def test_one_that_is_being_copied_leaves_afterwards_and_is_not_loaded_again(self) -> None:
        fixture = store()
        fixture.put_prompt(0, owner=Owner(ttl_seconds=5))
        load = fixture.load(0)
        assert len(load.slots) == 1
        fixture.advance(10.0)
        assert fixture.load(0).slots == ()
        assert counted(fixture, "loads_cut", "expired") == 1
        promotion = fixture.promote(0)
        fixture.settle()
        assert fixture.ends(promotion)[0].outcome in (
            PromotionOutcome.ABSENT,
            PromotionOutcome.FAILED,
        )
        fixture.store.release_load("e", load.load)
        fixture.advance(1.5)
        assert in_ram(fixture, 0) == []

    def test_a_time_to_live_never_shortens_that_of_another_request(self) -> None:
        fixture = store()
        fixture.put_prompt(0)
        fixture.put_prompt(0, owner=Owner(ttl_seconds=5))
        fixture.put_prompt(1, owner=Owner(ttl_seconds=5))
        fixture.put_prompt(1)
        fixture.put_prompt(2, owner=Owner(ttl_seconds=5))
        fixture.put_prompt(2, owner=Owner(ttl_seconds=50))
        fixture.advance(30.0)
        assert in_ram(fixture, 0, 1, 2) == [0, 1, 2]
        fixture.advance(30.0)
        assert in_ram(fixture, 0, 1, 2) == [0, 1]

    def test_it_holds_after_a_restart(self) -> None:
        fixture = store()
        fixture.put_prompt(0, owner=Owner(ttl_seconds=30))
        fixture.restart()
        fixture.advance(32.0)
        assert fixture.store.objects == 0

    def test_it_goes_with_the_object_to_lower_tiers_and_back(self) -> None:
        fixture = store()
        fixture.put_prompt(0, owner=Owner(A, ttl_seconds=100))
        ref = ObjectRef(NAMESPACE, b"\0" + block_hash(0))
        _data, meta = fixture.tier.objects[ref]
        assert meta.tenant == A
        assert 95 <= meta.expires_at - fixture.clock.now <= 100
        fill(fixture)
        assert in_ram(fixture, 0) == []
        promotion = fixture.promote(0)
        fixture.settle()
        assert fixture.ends(promotion)[0].usable == 1
        assert fixture.store.tenants() == {A: PAGE}
        fixture.advance(120.0)
        assert in_ram(fixture, 0) == []
        promotion = fixture.promote(0)
        fixture.settle()
        assert fixture.ends(promotion)[0].usable == 0, "what has expired was read"

    def test_a_tier_that_cannot_remove_what_expires_is_not_given_it(self) -> None:
        fixture = store()
        fixture.tier.capabilities = type(fixture.tier.capabilities)(True, False, True)
        fixture.put_prompt(0, owner=Owner(ttl_seconds=100))
        fixture.put_prompt(1)
        assert [ref.key[1:] for ref in fixture.tier.objects] == [block_hash(1)]
        assert fixture.counters.values["tier_writes_skipped", "disk", "expires"] >= 1


def test_a_request_names_the_tiers_that_its_objects_are_written_to() -> None:
    fixture = StoreFixture(40, ("disk", "nfs"))
    fixture.engine()
    fixture.put_prompt(0, owner=Owner(tiers=4))
    assert [len(tier.objects) for tier in fixture.tiers] == [0, 1]
    assert fixture.counters.values["tier_writes_skipped", "disk", "hint_tiers"] >= 1
