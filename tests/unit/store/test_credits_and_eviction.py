"""Free slots: who gets them, and what goes for them."""

from __future__ import annotations

import pytest
from tests.unit.store.store_world import NAMESPACE, PAGE, World, block_hash

from kvtier.errors import ProtocolError
from kvtier.store.types import CreditsGranted, EngineInfo, KeysEvicting, PresenceChanged


def key(chunk: int) -> bytes:
    return b"\0" + block_hash(chunk)


def fill(world: World, chunks: int) -> None:
    """Stores chunks 0, 1, ... and lets nothing be pending."""
    for chunk in range(chunks):
        world.put(chunk)
        world.settle()


def test_an_engine_is_granted_a_quarter_of_the_pool_ahead_of_need() -> None:
    world = World(slots=16)
    world.engine()
    assert len(world.credits()) == 4
    assert world.store.accounts().granted == 4 * PAGE


def test_no_engine_is_granted_more_than_64_slots() -> None:
    world = World(slots=1000)
    world.engine()
    assert len(world.credits()) == 64


def test_engines_share_the_quarter_and_each_has_at_least_one() -> None:
    world = World(slots=8)
    for name in ("e0", "e1", "e2", "e3"):
        world.engine(name)
    assert [len(world.credits(name)) for name in ("e0", "e1", "e2", "e3")] == [2, 1, 1, 1]


def test_a_used_credit_is_replaced_by_the_next_pump() -> None:
    world = World(slots=16)
    world.engine()
    world.reserve(0)
    granted = [e for e in world.pump() if isinstance(e, CreditsGranted)]
    assert [len(e.slots) for e in granted] == [1]
    assert len(world.credits()) == 4


def test_a_slot_that_does_not_fit_into_the_pool_gets_no_credits_and_is_counted() -> None:
    world = World(slots=2)
    world.engine(shards=((3 * PAGE,),))
    assert world.credits() == []
    assert world.counted("pool_too_small") == 1
    world.check_accounts()


@pytest.mark.parametrize(
    "info",
    [
        EngineInfo("e", NAMESPACE, (PAGE,), ((PAGE + 1,),)),
        EngineInfo("e", NAMESPACE, (), ()),
        EngineInfo("e", NAMESPACE, (PAGE,), ((PAGE,), (PAGE,))),
        EngineInfo("e", NAMESPACE, (PAGE,), ((PAGE, 0),)),
        EngineInfo("e", NAMESPACE, (PAGE,), ((PAGE,),), writer_ranks=()),
        EngineInfo("e", NAMESPACE, (PAGE,), ((PAGE,),), writer_ranks=(0, 0)),
    ],
)
def test_a_description_that_contradicts_itself_is_refused(info: EngineInfo) -> None:
    world = World()
    with pytest.raises(ProtocolError, match="engine e"):
        world.store.open_engine(info)
    assert world.pump() == []


def test_the_pool_is_filled_before_anything_is_evicted() -> None:
    world = World(slots=16)
    world.engine()
    fill(world, 11)
    assert world.leaving() == []
    # 11 objects, 4 credits and 1 slot in reserve for reads make 16.
    fill_one_more(world)
    assert [e.keys for e in world.leaving()] == [(key(0),)]


def fill_one_more(world: World) -> None:
    world.put(100)
    world.settle()


def test_the_least_recently_loaded_object_goes_first() -> None:
    world = World(slots=16)
    world.engine()
    fill(world, 11)
    ready = world.load(0)
    world.store.release_load("e", 0, ready.load)
    fill_one_more(world)
    assert [e.keys for e in world.leaving()] == [(key(1),)]


def test_of_a_loaded_prefix_the_end_goes_before_the_beginning() -> None:
    world = World(slots=16)
    world.engine()
    fill(world, 11)
    ready = world.load(*range(11))
    world.store.release_load("e", 0, ready.load)
    fill_one_more(world)
    assert [e.keys for e in world.leaving()] == [(key(10),)]


def test_a_leaving_slot_is_granted_only_after_the_schedulers_know() -> None:
    world = World(slots=16)
    world.engine()
    fill(world, 12)
    (leaving,) = world.leaving()
    assert world.advance(0.05) == []
    assert world.store.accounts().evicting == PAGE
    world.store.acknowledge_eviction(leaving.token)
    events = world.pump()
    assert PresenceChanged(NAMESPACE, key(0), 1, False) in events
    assert world.store.accounts().evicting == 0
    assert world.counted("eviction_notices_ended", "", "answered") == 1


def test_without_an_answer_a_leaving_slot_is_free_after_100_ms() -> None:
    world = World(slots=16)
    world.engine()
    fill(world, 12)
    wake = world.store.next_wake()
    assert wake is not None
    assert wake <= world.clock.now + 0.1
    world.advance(0.1)
    assert world.store.accounts().evicting == 0
    assert world.counted("eviction_notices_ended", "", "unanswered") == 1


@pytest.mark.parametrize("wanted_by", ["load", "promote", "reserve"])
def test_a_leaving_object_that_is_wanted_stays_and_is_announced_again(wanted_by: str) -> None:
    world = World(slots=16)
    world.engine()
    fill(world, 12)
    (leaving,) = world.leaving()
    assert dict(world.store.presence(NAMESPACE)).get(key(0), 0) & 1 == 0
    before = len(world.events)
    if wanted_by == "load":
        assert len(world.load(0).slots) == 1
    elif wanted_by == "promote":
        assert world.ends(world.promote(0))[0].usable == 1
    else:
        world.reserve(0)
        world.pump()
    assert PresenceChanged(NAMESPACE, key(0), 1, True) in world.events[before:]
    world.store.acknowledge_eviction(leaving.token)
    world.pump()
    assert world.bits(0) & 1
    assert world.counted("evictions_cancelled") == 1
    world.check_accounts()


def test_nothing_that_is_being_loaded_is_evicted_however_many_slots_are_wanted() -> None:
    world = World(slots=16)
    world.engine()
    fill(world, 11)
    ready = world.load(*range(11))
    assert len(ready.slots) == 11
    for chunk in range(20, 25):
        world.reserve(chunk)
        world.pump()
    assert [e for e in world.advance(10.0) if isinstance(e, KeysEvicting)] == []
    assert world.credits() == []


def test_objects_of_a_namespace_that_nobody_uses_go_without_announcement() -> None:
    world = World(slots=16)
    world.engine("old", namespace="b" * 32)
    for chunk in range(11):
        world.put(chunk, "old", "b" * 32)
        world.settle()
    world.store.close_engine("old", True)
    world.engine("e")
    fill(world, 10)
    assert world.leaving() == []
    assert world.counted("evictions") > 0


def test_an_engine_of_another_geometry_takes_over_the_pool() -> None:
    world = World(slots=64)
    world.engine("old", namespace="b" * 32)
    for chunk in range(60):
        world.put(chunk, "old", "b" * 32)
        world.settle()
        world.advance(0.1)
    world.store.close_engine("old", True)
    world.engine("e", shards=((3 * PAGE,),))
    for chunk in range(40):
        number, slot = world.reserve(chunk)
        world.pool[slot : slot + 3 * PAGE] = bytes([chunk]) * (3 * PAGE)
        world.store.deliver("e", 0, number)
        world.settle()
        world.advance(0.1)
        world.check_accounts()
    # 20 slots of 3 pages fit, beside a rest of the old geometry; with 5 credits and 1 in reserve, 14 objects stay.
    assert world.store.accounts().committed >= 14 * 3 * PAGE


def test_groups_of_one_engine_get_room_for_about_as_many_objects_each() -> None:
    world = World(slots=256)
    world.engine("e", shards=((PAGE,), (4 * PAGE,)))
    for chunk in range(100):
        for group in (0, 1):
            number, _ = world.reserve(chunk, "e", group)
            world.store.deliver("e", 0, number)
        world.settle()
        world.advance(0.1)
    world.check_accounts()
    held = [
        [bits & 1 for key, bits in world.store.presence(NAMESPACE) if key[0] == group]
        for group in (0, 1)
    ]
    assert 30 <= sum(held[0]) <= 51
    assert 30 <= sum(held[1]) <= 51


def test_an_engine_that_comes_later_gets_its_share_of_a_full_pool() -> None:
    world = World(slots=128)
    world.engine("first", namespace="b" * 32)
    for chunk in range(150):
        world.put(chunk, "first", "b" * 32)
        world.settle()
        world.advance(0.1)
    world.engine("e", shards=((3 * PAGE,),))
    world.advance(1.0)
    for chunk in range(60):
        number, _ = world.reserve(chunk)
        world.store.deliver("e", 0, number)
        world.settle()
        world.advance(0.3)
    world.check_accounts()
    # Its share is three quarters of the pool, 32 slots, some of which are credits.
    assert sum(bits & 1 for _, bits in world.store.presence(NAMESPACE)) >= 18
    assert sum(bits & 1 for _, bits in world.store.presence("b" * 32)) >= 1


def test_a_rest_that_no_slot_fits_into_is_accounted_as_unusable() -> None:
    world = World(slots=10)
    world.engine(shards=((3 * PAGE,),))
    accounts = world.store.accounts()
    assert accounts.unusable == PAGE
    world.check_accounts()


def test_while_fenced_no_slot_is_granted_until_the_fence_is_gone() -> None:
    world = World(fenced=True)
    world.engine()
    world.advance(100.0)
    assert world.credits() == []
    world.store.unfence()
    world.pump()
    assert len(world.credits()) == 4
