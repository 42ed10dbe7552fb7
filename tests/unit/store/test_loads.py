"""Loads: announced slots, and how long they stay pinned."""

from __future__ import annotations

from tests.unit.store.store_fixture import NAMESPACE, PAGE, StoreFixture, block_hash

from kvtier.store.types import LoadAnnounced


def stored(chunks: int, slots: int = 16) -> StoreFixture:
    fixture = StoreFixture(slots=slots)
    fixture.engine()
    for chunk in range(chunks):
        fixture.put(chunk)
        fixture.settle()
    return fixture


def test_a_load_announces_the_prefix_that_is_there_to_each_rank() -> None:
    fixture = stored(3)
    ready = fixture.load(0, 1, 9, 2, ranks=(0, 1))
    assert len(ready.slots) == 2
    assert ready.ranks == (0, 1)
    assert fixture.counted("loads_cut", "", "gone") == 1


def test_a_load_without_keys_is_answered() -> None:
    fixture = stored(0)
    ready = fixture.load(0)
    assert ready.slots == ()
    fixture.store.release_load("e", 0, ready.load)
    assert fixture.counted("protocol_violations") == 0


def test_slots_stay_until_every_rank_has_finished() -> None:
    fixture = stored(2)
    ready = fixture.load(0, 1, ranks=(0, 1))
    fixture.store.release_load("e", 0, ready.load)
    assert fixture.store.pinned_bytes == 2 * PAGE
    fixture.store.release_load("e", 1, ready.load)
    assert fixture.store.pinned_bytes == 0


def test_two_loads_of_a_key_each_hold_it() -> None:
    fixture = stored(1)
    first, second = fixture.load(0), fixture.load(0)
    fixture.store.release_load("e", 0, first.load)
    assert fixture.store.pinned_bytes == PAGE
    fixture.store.release_load("e", 0, second.load)
    assert fixture.store.pinned_bytes == 0


def test_messages_about_unknown_loads_and_ranks_are_counted_and_ignored() -> None:
    fixture = stored(1)
    ready = fixture.load(0, ranks=(0, 1))
    fixture.store.release_load("e", 7, ready.load)
    fixture.store.release_load("e", 0, ready.load)
    fixture.store.release_load("e", 0, ready.load)
    fixture.store.release_load("e", 0, 12345)
    fixture.store.load("e", ready.load, 0, [], (0,))
    fixture.store.load("e", 999, 0, [], ())
    assert fixture.counted("protocol_violations") == 5
    assert fixture.store.pinned_bytes == PAGE


def test_a_load_that_names_a_running_promotion_ends_it() -> None:
    fixture = stored(1)
    fixture.put_in_tier(1)
    promotion = fixture.promote(0, 1)
    ready = fixture.load(0, promotion=promotion)
    assert len(ready.slots) == 1
    assert [end.outcome.value for end in fixture.ends(promotion)] == ["cancelled"]
    fixture.store.release_load("e", 0, ready.load)
    assert fixture.store.pinned_bytes == 0


def test_objects_of_a_vanished_engines_loads_stay_for_60_seconds_and_remain_readable() -> None:
    fixture = stored(1)
    fixture.load(0)
    fixture.store.close_engine("e", False)
    fixture.engine("e1")
    assert len(fixture.load(0, engine="e1").slots) == 1
    fixture.store.release_load(
        "e1",
        0,
        next(e.load for e in fixture.events if isinstance(e, LoadAnnounced) and e.engine == "e1"),
    )
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
