"""Credits, and the evictions that provide them."""

from __future__ import annotations

import pytest
from tests.unit.store.store_fixture import NAMESPACE, PAGE, StoreFixture, block_hash

from kvtier.errors import ProtocolError
from kvtier.store.types import CreditsGranted, EngineInfo, KeysEvicting, PresenceChanged


def key(chunk: int) -> bytes:
    return b"\0" + block_hash(chunk)


def test_an_engine_is_granted_a_quarter_of_the_pool_ahead_of_need() -> None:
    fixture = StoreFixture(slots=16)
    fixture.engine()
    assert len(fixture.credits()) == 4
    assert fixture.store.accounts().granted == 4 * PAGE


def test_no_engine_is_granted_more_than_64_slots() -> None:
    fixture = StoreFixture(slots=1000)
    fixture.engine()
    assert len(fixture.credits()) == 64


def test_engines_share_the_quarter_and_each_has_at_least_one() -> None:
    fixture = StoreFixture(slots=8)
    for name in ("e0", "e1", "e2", "e3"):
        fixture.engine(name)
    assert [len(fixture.credits(name)) for name in ("e0", "e1", "e2", "e3")] == [2, 1, 1, 1]


def test_a_used_credit_is_replaced_by_the_next_pump() -> None:
    fixture = StoreFixture(slots=16)
    fixture.engine()
    fixture.reserve(0)
    granted = [e for e in fixture.pump() if isinstance(e, CreditsGranted)]
    assert [len(e.slots) for e in granted] == [1]
    assert len(fixture.credits()) == 4


def test_a_slot_that_does_not_fit_into_the_pool_gets_no_credits_and_is_counted() -> None:
    fixture = StoreFixture(slots=2)
    fixture.engine(shards=((3 * PAGE,),))
    assert fixture.credits() == []
    assert fixture.counted("pool_too_small") == 1
    fixture.check_accounts()


@pytest.mark.parametrize(
    "info",
    [
        EngineInfo("e", NAMESPACE, (PAGE,), ((PAGE + 1,),)),
        EngineInfo("e", NAMESPACE, (), ()),
        EngineInfo("e", NAMESPACE, (PAGE,), ((PAGE,), (PAGE,))),
        EngineInfo("e", NAMESPACE, (PAGE,), ((PAGE, 0),)),
        EngineInfo("e", NAMESPACE, (PAGE,), ((PAGE,),), writer_ranks=()),
        EngineInfo("e", NAMESPACE, (PAGE,), ((PAGE,),), writer_ranks=((),)),
        EngineInfo("e", NAMESPACE, (PAGE,), ((PAGE,),), writer_ranks=((0, 0),)),
        EngineInfo("e", NAMESPACE, (2 * PAGE,), ((PAGE, PAGE),), writer_ranks=((0,),)),
        EngineInfo("e", NAMESPACE, (2 * PAGE,), ((PAGE, PAGE),), writer_ranks=((0, 0),)),
    ],
)
def test_an_inconsistent_engine_description_is_rejected(info: EngineInfo) -> None:
    fixture = StoreFixture()
    with pytest.raises(ProtocolError, match="engine e"):
        fixture.store.open_engine(info)
    assert fixture.pump() == []


def test_the_pool_is_filled_before_anything_is_evicted() -> None:
    fixture = StoreFixture(slots=16)
    fixture.engine()
    fixture.fill(11)
    assert fixture.eviction_notices() == []
    # 11 objects, 4 credits and 1 slot in reserve for reads make 16.
    fill_one_more(fixture)
    assert [e.keys for e in fixture.eviction_notices()] == [(key(0),)]


def fill_one_more(fixture: StoreFixture) -> None:
    fixture.put(100)
    fixture.settle()


def test_the_least_recently_loaded_object_is_evicted_first() -> None:
    fixture = StoreFixture(slots=16)
    fixture.engine()
    fixture.fill(11)
    ready = fixture.load(0)
    fixture.store.release_load("e", ready.load)
    fill_one_more(fixture)
    assert [e.keys for e in fixture.eviction_notices()] == [(key(1),)]


def test_the_end_of_a_loaded_prefix_is_evicted_before_its_beginning() -> None:
    fixture = StoreFixture(slots=16)
    fixture.engine()
    fixture.fill(11)
    ready = fixture.load(*range(11))
    fixture.store.release_load("e", ready.load)
    fill_one_more(fixture)
    assert [e.keys for e in fixture.eviction_notices()] == [(key(10),)]


def test_an_evicted_slot_is_granted_only_after_the_acknowledgement() -> None:
    fixture = StoreFixture(slots=16)
    fixture.engine()
    fixture.fill(12)
    (leaving,) = fixture.eviction_notices()
    assert fixture.advance(0.05) == []
    assert fixture.store.accounts().evicting == PAGE
    fixture.store.acknowledge_eviction(leaving.token)
    events = fixture.pump()
    assert PresenceChanged(NAMESPACE, key(0), 1, False) in events
    assert fixture.store.accounts().evicting == 0
    assert fixture.counted("eviction_notices_ended", "", "acknowledged") == 1


def test_without_an_acknowledgement_an_evicted_slot_is_free_after_100_ms() -> None:
    fixture = StoreFixture(slots=16)
    fixture.engine()
    fixture.fill(12)
    wake = fixture.store.next_wake()
    assert wake is not None
    assert wake <= fixture.clock.now + 0.1
    fixture.advance(0.1)
    assert fixture.store.accounts().evicting == 0
    assert fixture.counted("eviction_notices_ended", "", "timed_out") == 1


@pytest.mark.parametrize("wanted_by", ["load", "promote", "reserve"])
def test_a_use_cancels_the_eviction_and_the_object_is_announced_again(wanted_by: str) -> None:
    fixture = StoreFixture(slots=16)
    fixture.engine()
    fixture.fill(12)
    (leaving,) = fixture.eviction_notices()
    assert fixture.held(NAMESPACE).get(key(0), 0) & 1 == 0
    before = len(fixture.events)
    if wanted_by == "load":
        assert len(fixture.load(0).slots) == 1
    elif wanted_by == "promote":
        assert fixture.ends(fixture.promote(0))[0].usable == 1
    else:
        fixture.reserve(0)
        fixture.pump()
    again = [event for event in fixture.events[before:] if isinstance(event, PresenceChanged)]
    assert (key(0), 1, True) in [(event.key, event.bits, event.present) for event in again]
    fixture.store.acknowledge_eviction(leaving.token)
    fixture.pump()
    assert fixture.bits(0) & 1
    assert fixture.counted("evictions_cancelled") == 1
    fixture.check_accounts()


def test_nothing_that_is_being_loaded_is_evicted_however_many_slots_are_wanted() -> None:
    fixture = StoreFixture(slots=16)
    fixture.engine()
    fixture.fill(11)
    ready = fixture.load(*range(11))
    assert len(ready.slots) == 11
    for chunk in range(20, 25):
        fixture.reserve(chunk)
        fixture.pump()
    assert [e for e in fixture.advance(10.0) if isinstance(e, KeysEvicting)] == []
    assert fixture.credits() == []


def test_objects_of_a_namespace_without_engines_are_evicted_without_a_notice() -> None:
    fixture = StoreFixture(slots=16)
    fixture.engine("old", namespace="b" * 32)
    for chunk in range(11):
        fixture.put(chunk, "old", "b" * 32)
        fixture.settle()
    fixture.store.close_engine("old", True)
    fixture.engine("e")
    fixture.fill(10)
    assert fixture.eviction_notices() == []
    assert fixture.counted("evictions") > 0


def test_an_engine_of_another_geometry_takes_over_the_pool() -> None:
    fixture = StoreFixture(slots=64)
    fixture.engine("old", namespace="b" * 32)
    for chunk in range(60):
        fixture.put(chunk, "old", "b" * 32)
        fixture.settle()
        fixture.advance(0.1)
    fixture.store.close_engine("old", True)
    fixture.engine("e", shards=((3 * PAGE,),))
    for chunk in range(40):
        number, slot = fixture.reserve(chunk)
        fixture.pool[slot : slot + 3 * PAGE] = bytes([chunk]) * (3 * PAGE)
        fixture.store.deliver("e", 0, number)
        fixture.settle()
        fixture.advance(0.1)
        fixture.check_accounts()
    # 20 slots of 3 pages fit, beside a rest of the old geometry; with 5 credits and 1 in reserve,
    # 14 objects stay.
    assert fixture.store.accounts().committed >= 14 * 3 * PAGE


def test_groups_of_one_engine_get_room_for_about_as_many_objects_each() -> None:
    fixture = StoreFixture(slots=256)
    fixture.engine("e", shards=((PAGE,), (4 * PAGE,)))
    for chunk in range(100):
        for group in (0, 1):
            number, _ = fixture.reserve(chunk, "e", group)
            fixture.store.deliver("e", 0, number)
        fixture.settle()
        fixture.advance(0.1)
    fixture.check_accounts()
    held = [
        [bits & 1 for key, bits, _ in fixture.store.presence(NAMESPACE) if key[0] == group]
        for group in (0, 1)
    ]
    assert 30 <= sum(held[0]) <= 51
    assert 30 <= sum(held[1]) <= 51


def test_a_later_engine_gets_its_share_of_a_full_pool() -> None:
    fixture = StoreFixture(slots=128)
    fixture.engine("first", namespace="b" * 32)
    for chunk in range(150):
        fixture.put(chunk, "first", "b" * 32)
        fixture.settle()
        fixture.advance(0.1)
    fixture.engine("e", shards=((3 * PAGE,),))
    fixture.advance(1.0)
    for chunk in range(60):
        number, _ = fixture.reserve(chunk)
        fixture.store.deliver("e", 0, number)
        fixture.settle()
        fixture.advance(0.3)
    fixture.check_accounts()
    # Its share is three quarters of the pool, 32 slots, some of which are credits.
    assert sum(bits & 1 for _, bits, _ in fixture.store.presence(NAMESPACE)) >= 18
    assert sum(bits & 1 for _, bits, _ in fixture.store.presence("b" * 32)) >= 1


def test_a_remainder_smaller_than_a_slot_is_counted_as_unusable() -> None:
    fixture = StoreFixture(slots=10)
    fixture.engine(shards=((3 * PAGE,),))
    accounts = fixture.store.accounts()
    assert accounts.unusable == PAGE
    fixture.check_accounts()


def test_while_fenced_no_slot_is_granted_until_the_fence_is_gone() -> None:
    fixture = StoreFixture(fenced=True)
    fixture.engine()
    fixture.advance(100.0)
    assert fixture.credits() == []
    fixture.store.unfence()
    fixture.pump()
    assert len(fixture.credits()) == 4
