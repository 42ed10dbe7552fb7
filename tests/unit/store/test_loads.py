"""Loads: what they pin and for how long, and the generations of slots."""

from __future__ import annotations

from tests.unit.store.store_fixture import NAMESPACE, PAGE, StoreFixture, block_hash

from kvtier.store.generations import unpack_location


def stored(chunks: int, slots: int = 16) -> StoreFixture:
    fixture = StoreFixture(slots=slots)
    fixture.engine()
    fixture.fill(chunks)
    return fixture


def test_a_load_pins_the_prefix_that_is_there() -> None:
    fixture = stored(3)
    ready = fixture.load(0, 1, 9, 2)
    assert len(ready.slots) == 2
    assert fixture.counted("loads_cut", "", "gone") == 1


def test_a_load_without_keys_may_be_released() -> None:
    fixture = stored(0)
    ready = fixture.load(0)
    assert ready.slots == ()
    fixture.store.release_load("e", ready.load)
    assert fixture.counted("protocol_violations") == 0


def test_slots_stay_until_the_load_is_released() -> None:
    fixture = stored(2)
    ready = fixture.load(0, 1)
    assert fixture.store.pinned_bytes == 2 * PAGE
    fixture.store.release_load("e", ready.load)
    assert fixture.store.pinned_bytes == 0


def test_two_loads_of_a_key_each_hold_it() -> None:
    fixture = stored(1)
    first, second = fixture.load(0), fixture.load(0)
    fixture.store.release_load("e", first.load)
    assert fixture.store.pinned_bytes == PAGE
    fixture.store.release_load("e", second.load)
    assert fixture.store.pinned_bytes == 0


def test_messages_about_unknown_loads_are_counted_and_ignored() -> None:
    fixture = stored(1)
    ready = fixture.load(0)
    fixture.store.release_load("e", 12345)
    fixture.store.load("e", ready.load, 0, [])
    assert fixture.counted("protocol_violations") == 2
    assert fixture.store.pinned_bytes == PAGE
    fixture.store.release_load("e", ready.load)
    fixture.store.release_load("e", ready.load)
    assert fixture.counted("protocol_violations") == 3


def test_a_slot_has_the_generation_that_engines_were_told_until_it_is_reused() -> None:
    fixture = stored(1)
    ((_, _, location),) = fixture.store.presence(NAMESPACE)
    offset, generation = unpack_location(location)
    assert (offset, fixture.word(offset)) == (fixture.load(0).slots[0], generation)
    assert generation % 2 == 0


def test_the_generation_changes_before_anyone_may_write_the_slot() -> None:
    fixture = stored(10)
    named = dict(unpack_location(entry[2]) for entry in fixture.store.presence(NAMESPACE))
    granted = len(fixture.credits())
    while not fixture.eviction_notices():
        fixture.put(100 + fixture.number())
        fixture.settle()
    for notice in fixture.eviction_notices():
        fixture.store.acknowledge_eviction(notice.token)
    fixture.pump()
    reused = [slot for slot in fixture.credits() if slot in named]
    assert granted
    assert reused
    for slot in fixture.credits():
        assert fixture.word(slot) % 2 == 1, "a granted slot may be written"
        assert fixture.word(slot) > named.get(slot, 0)


def test_a_new_tierd_makes_every_earlier_generation_void() -> None:
    fixture = stored(3)
    named = [unpack_location(location) for _, _, location in fixture.store.presence(NAMESPACE)]
    fixture.restart()
    assert [fixture.word(offset) == generation for offset, generation in named] == [False] * 3
    fixture.engine()
    promotion = fixture.promote(0)
    fixture.settle()
    (end,) = fixture.ends(promotion)
    offset, generation = unpack_location(end.locations[0])
    assert fixture.word(offset) == generation
    assert (offset, generation) not in named


def test_a_load_that_names_a_running_promotion_ends_it() -> None:
    fixture = stored(1)
    fixture.put_in_tier(1)
    promotion = fixture.promote(0, 1)
    ready = fixture.load(0, promotion=promotion)
    assert len(ready.slots) == 1
    assert [end.outcome.value for end in fixture.ends(promotion)] == ["cancelled"]
    fixture.store.release_load("e", ready.load)
    assert fixture.store.pinned_bytes == 0


def test_objects_of_a_vanished_engines_loads_stay_for_60_seconds_and_remain_readable() -> None:
    fixture = stored(1)
    fixture.load(0)
    fixture.store.close_engine("e", False)
    fixture.engine("e1")
    other = fixture.load(0, engine="e1")
    assert len(other.slots) == 1
    fixture.store.release_load("e1", other.load)
    fixture.advance(59.0)
    assert fixture.store.pinned_bytes == PAGE
    fixture.advance(1.0)
    assert fixture.store.pinned_bytes == 0


def test_objects_an_engine_was_reading_are_released_once_its_exit_is_confirmed() -> None:
    fixture = stored(1)
    fixture.load(0)
    fixture.store.close_engine("e", False)
    fixture.store.confirm_engine_dead("e")
    assert fixture.store.pinned_bytes == 0


def test_a_load_touches_the_object_in_every_secondary_tier_that_holds_it() -> None:
    fixture = stored(2)
    fixture.tier.drop(NAMESPACE, b"\0" + block_hash(1))
    fixture.pump()
    fixture.load(0, 1)
    assert [ref.key for ref in fixture.tier.touched] == [b"\0" + block_hash(0)]
