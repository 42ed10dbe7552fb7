"""What a tenant holds in RAM is bounded, and costs no other tenant."""

from __future__ import annotations

import pytest
from tests.unit.store.kept_objects import A, B, C, check_kept_objects
from tests.unit.store.store_fixture import NAMESPACE, PAGE, StoreFixture, block_hash, live

from kvtier import tenants
from kvtier.config.models import LiveTier
from kvtier.store import allocator, operations
from kvtier.store.types import ChunkId, Owner
from kvtier.tenants import MAX_TENANTS, OTHERS, TENANT_BYTES, TenantAccounts, tenant_id
from kvtier.tiers.base import ObjectRef

OF_A, OF_B = Owner(A), Owner(B)


def store_with_shares(percent: int, slots: int = 40) -> StoreFixture:
    values = live(shares=(percent, 20), disk=LiveTier(capacity_bytes=1 << 30))
    fixture = StoreFixture(slots, values=values)
    fixture.engine()
    return fixture


def in_ram(fixture: StoreFixture, *chunks: int) -> list[int]:
    return [chunk for chunk in chunks if fixture.bits(chunk) & 1]


def counted(fixture: StoreFixture, name: str, reason: str = "") -> int:
    return fixture.counters.values.get((name, "", reason), 0)


def test_a_tenant_at_its_share_evicts_the_ends_of_its_own_oldest_prompts() -> None:
    fixture = store_with_shares(25)
    fixture.put_prompt(0, 1, 2, 3, owner=OF_B)
    fixture.put_prompt(100, 101, 102, 103, 104, owner=OF_A)
    fixture.put_prompt(110, 111, 112, 113, 114, owner=OF_A)
    assert fixture.store.tenants() == {A: 10 * PAGE, B: 4 * PAGE}
    fixture.put_prompt(120, 121, 122, owner=OF_A)
    assert in_ram(fixture, *range(100, 130)) == [100, 101, *range(110, 115), 120, 121, 122]
    assert in_ram(fixture, 0, 1, 2, 3) == [0, 1, 2, 3], "another tenant's objects were evicted"
    assert fixture.store.tenants()[A] == 10 * PAGE
    assert counted(fixture, "tenant_evictions") == 3
    check_kept_objects(fixture.store, fixture.clock.now)


def test_of_a_prompt_larger_than_the_share_the_beginning_stays_and_the_rest_is_refused() -> None:
    fixture = store_with_shares(25)
    fixture.put_prompt(*range(14), owner=OF_A)
    assert in_ram(fixture, *range(14)) == list(range(10))
    assert counted(fixture, "stores_cancelled", "tenant_quota") == 1
    assert counted(fixture, "stores_cancelled", "no_predecessor") == 3


def test_objects_without_a_tenant_have_no_share() -> None:
    fixture = store_with_shares(5)
    fixture.put_prompt(*range(14))
    assert in_ram(fixture, *range(14)) == list(range(14))
    assert fixture.store.tenants() == {}


def test_a_lowered_share_is_reached_at_once_and_a_raised_one_serves_at_once() -> None:
    fixture = store_with_shares(100)
    fixture.put_prompt(*range(12), owner=OF_A)
    fixture.put_prompt(20, 21, owner=OF_B)
    fixture.store.configure(live(shares=(10, 20), disk=LiveTier(capacity_bytes=1 << 30)))
    fixture.pump()
    fixture.advance(0.11)
    assert in_ram(fixture, *range(12)) == [0, 1, 2, 3]
    assert in_ram(fixture, 20, 21) == [20, 21]
    fixture.store.configure(live(shares=(100, 20), disk=LiveTier(capacity_bytes=1 << 30)))
    fixture.put_prompt(4, 5, owner=OF_A)
    assert in_ram(fixture, *range(6)) == list(range(6))


def test_a_promotion_brings_no_more_than_the_share_into_ram() -> None:
    fixture = store_with_shares(10)
    for chunk in range(8):
        fixture.tier.put(NAMESPACE, b"\0" + block_hash(chunk), (PAGE,))
    fixture.put_prompt(50, 51, owner=OF_B)
    fixture.pump()
    promotion = fixture.promote(*range(8), owner=OF_A)
    fixture.settle()
    (end,) = fixture.ends(promotion)
    assert end.usable == 4
    assert counted(fixture, "promotions_cut", "tenant_quota") == 1
    assert fixture.store.tenants() == {A: 4 * PAGE, B: 2 * PAGE}


def test_promotions_side_by_side_bring_no_more_than_the_share_into_ram(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operations, "MAX_PARALLEL", 1)
    fixture = store_with_shares(10)
    fixture.put_in_tier(*range(8))
    promotions = [fixture.promote(*chunks, owner=OF_A) for chunks in (range(4), range(4, 8))]
    while fixture.io.run_all("read:"):
        fixture.pump()
        assert fixture.store.tenants()[A] <= 4 * PAGE, "a tenant is above its share"
    usable = [fixture.ends(promotion)[0].usable for promotion in promotions]
    assert sum(usable) == 4
    assert min(usable) > 0
    assert counted(fixture, "promotions_cut", "tenant_quota") == 3


def test_objects_in_use_are_not_evicted_for_the_share() -> None:
    fixture = store_with_shares(10)
    fixture.put_prompt(0, 1, 2, 3, owner=OF_A)
    load = fixture.load(0, 1, 2, 3)
    fixture.put_prompt(10, owner=OF_A)
    assert in_ram(fixture, 0, 1, 2, 3, 10) == [0, 1, 2, 3]
    assert counted(fixture, "stores_cancelled", "tenant_quota") == 1
    fixture.store.release_load("e", load.load)
    fixture.put_prompt(10, owner=OF_A)
    assert in_ram(fixture, 0, 1, 2, 3, 10) == [0, 1, 2, 10]


def test_what_anothers_object_protected_leaves_as_soon_as_that_one_is_evicted() -> None:
    fixture = store_with_shares(100, 24)
    fixture.put_prompt(*range(8), owner=OF_A)
    fixture.put(8, previous=7, owner=OF_B)
    fixture.settle()
    fixture.store.configure(live(shares=(20, 20), disk=LiveTier(capacity_bytes=1 << 30)))
    fixture.advance(0.11)
    assert fixture.store.tenants() == {A: 8 * PAGE, B: PAGE}, "what another one needs was evicted"
    chunk = 100
    while in_ram(fixture, 8):
        fixture.put(chunk)
        check_kept_objects(fixture.store, fixture.clock.now)
        fixture.settle()
        fixture.advance(0.11)
        chunk += 1
    assert fixture.store.tenants() == {A: 4 * PAGE}


def test_the_share_of_one_tenant_frees_what_another_one_has_above_its_share() -> None:
    fixture = store_with_shares(100)
    fixture.put_prompt(*range(6), owner=OF_A)
    fixture.put(6, previous=5, owner=OF_B)
    fixture.settle()
    fixture.put_prompt(10, 11, 12, 13, owner=OF_B)
    fixture.store.configure(live(shares=(10, 20), disk=LiveTier(capacity_bytes=1 << 30)))
    fixture.pump()
    check_kept_objects(fixture.store, fixture.clock.now)
    assert fixture.store.tenants() == {A: 4 * PAGE, B: 4 * PAGE}


def test_the_objects_above_shares_that_one_run_evicts_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(allocator, "ENFORCED_PER_RUN", 3)
    fixture = store_with_shares(100)
    fixture.put_prompt(*range(12), owner=OF_A)
    fixture.store.configure(live(shares=(10, 20), disk=LiveTier(capacity_bytes=1 << 30)))
    fixture.pump()
    assert fixture.store.tenants() == {A: 9 * PAGE}
    assert fixture.store.next_wake() == fixture.clock.now, "the rest would wait for another call"
    fixture.advance(0.11)
    assert fixture.store.tenants() == {A: 4 * PAGE}


def test_a_store_that_is_not_delivered_returns_its_bytes() -> None:
    fixture = store_with_shares(10)
    numbers = [fixture.reserve(chunk, owner=OF_A)[0] for chunk in range(4)]
    assert fixture.store.tenants() == {A: 4 * PAGE}
    for number in numbers:
        fixture.store.abort("e", 0, number)
    assert fixture.store.tenants() == {}


def test_the_tenant_of_an_object_survives_a_restart() -> None:
    fixture = store_with_shares(25)
    fixture.put_prompt(0, 1, 2, owner=OF_A)
    fixture.put_prompt(10, owner=OF_B)
    fixture.restart()
    assert fixture.store.tenants() == {A: 3 * PAGE, B: PAGE}
    fixture.engine()
    promotion = fixture.promote(0, 1)
    fixture.settle()
    assert fixture.ends(promotion)[0].usable == 2
    check_kept_objects(fixture.store, fixture.clock.now)


def test_a_message_with_an_invalid_tenant_is_no_tenant() -> None:
    accounts = TenantAccounts()
    accounts.add(b"", 5)
    assert accounts.held == {}
    assert accounts.room(b"") > 1 << 60


def test_tenants_beyond_the_bound_share_one_account() -> None:
    accounts = TenantAccounts()
    for number in range(MAX_TENANTS + 5):
        account = accounts.account_of(number.to_bytes(TENANT_BYTES, "big"))
        accounts.add(account, 1)
    assert len(accounts.held) == MAX_TENANTS + 1
    assert accounts.held[OTHERS] == 5
    accounts.remove((0).to_bytes(TENANT_BYTES, "big"), 1)
    accounts.remove(OTHERS, 5)
    assert accounts.account_of(b"new one.") == b"new one."


def test_files_name_the_tenant_of_an_object_that_shares_an_account_in_ram(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tenants, "MAX_TENANTS", 2)
    fixture = store_with_shares(50)
    for chunk, tenant in enumerate((A, B, C)):
        fixture.put_prompt(chunk, owner=Owner(tenant))
    assert fixture.store.tenants() == {A: PAGE, B: PAGE, OTHERS: PAGE}
    ref = ObjectRef(NAMESPACE, b"\0" + block_hash(2))
    assert fixture.tier.objects[ref][1].tenant == C, "the file would count for no tenant"
    fixture.restart()
    fixture.engine()
    fixture.tier.drop(ref.namespace, ref.key)
    fixture.promote(2)
    fixture.settle()
    assert fixture.tier.objects[ref][1].tenant == C
    check_kept_objects(fixture.store, fixture.clock.now)


@pytest.mark.parametrize("policy", ["LRU", "ARC"])
def test_many_tenants_are_evicted_in_the_order_of_use(policy: str) -> None:
    fixture = StoreFixture(24, eviction_policy=policy)  # type: ignore[arg-type]
    fixture.engine()
    stored = []
    for number in range(40):
        fixture.put_prompt(number, owner=Owner(number.to_bytes(TENANT_BYTES, "big")))
        stored.append(number)
        held = in_ram(fixture, *stored)
        assert held == stored[len(stored) - len(held) :]
    assert (
        len(fixture.store._resident.order(next(iter(fixture.store._pool.classes.values())))._groups)
        < 24
    )  # type: ignore[attr-defined]


def test_an_identity_says_nothing_about_the_salt_and_depends_on_all_of_it() -> None:
    found = tenant_id("customer-17", "CacheSalt")
    assert len(found) == TENANT_BYTES
    assert b"17" not in found
    assert found == tenant_id("customer-17", "CacheSalt")
    others = {
        tenant_id("customer-18", "CacheSalt"),
        tenant_id("customer-17", "Policy"),
        tenant_id("customer-17", "CacheSalt", "pepper"),
        tenant_id("\udcff", "CacheSalt"),
    }
    assert len(others) == 4
    assert found not in others


def test_a_reservation_of_an_unknown_group_has_no_account() -> None:
    fixture = store_with_shares(10)
    fixture.store.reserve("e", 999, ChunkId(9, block_hash(1)), fixture.credits()[0], OF_A)
    assert fixture.store.tenants() == {}
