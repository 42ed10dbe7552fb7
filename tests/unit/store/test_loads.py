"""Loads: what is announced, and for how long it stays."""

from __future__ import annotations

from tests.unit.store.store_world import NAMESPACE, PAGE, World, block_hash

from kvtier.store.types import LoadAnnounced


def stored(chunks: int, slots: int = 16) -> World:
    world = World(slots=slots)
    world.engine()
    for chunk in range(chunks):
        world.put(chunk)
        world.settle()
    return world


def test_a_load_announces_the_prefix_that_is_there_to_each_rank() -> None:
    world = stored(3)
    ready = world.load(0, 1, 9, 2, ranks=(0, 1))
    assert len(ready.slots) == 2
    assert ready.ranks == (0, 1)
    assert world.counted("loads_cut", "", "gone") == 1


def test_a_load_of_nothing_is_answered_all_the_same() -> None:
    world = stored(0)
    ready = world.load(0)
    assert ready.slots == ()
    world.store.release_load("e", 0, ready.load)
    assert world.counted("protocol_violations") == 0


def test_slots_stay_until_every_rank_is_through() -> None:
    world = stored(2)
    ready = world.load(0, 1, ranks=(0, 1))
    world.store.release_load("e", 0, ready.load)
    assert world.store.pinned_bytes == 2 * PAGE
    world.store.release_load("e", 1, ready.load)
    assert world.store.pinned_bytes == 0


def test_two_loads_of_a_key_each_hold_it() -> None:
    world = stored(1)
    first, second = world.load(0), world.load(0)
    world.store.release_load("e", 0, first.load)
    assert world.store.pinned_bytes == PAGE
    world.store.release_load("e", 0, second.load)
    assert world.store.pinned_bytes == 0


def test_words_about_unknown_loads_and_ranks_are_counted_and_harmless() -> None:
    world = stored(1)
    ready = world.load(0, ranks=(0, 1))
    world.store.release_load("e", 7, ready.load)
    world.store.release_load("e", 0, ready.load)
    world.store.release_load("e", 0, ready.load)
    world.store.release_load("e", 0, 12345)
    world.store.load("e", ready.load, 0, [], (0,))
    world.store.load("e", 999, 0, [], ())
    assert world.counted("protocol_violations") == 5
    assert world.store.pinned_bytes == PAGE


def test_a_load_that_names_a_running_promotion_ends_it() -> None:
    world = stored(1)
    world.lower(1)
    promotion = world.promote(0, 1)
    ready = world.load(0, promotion=promotion)
    assert len(ready.slots) == 1
    assert [end.outcome.value for end in world.ends(promotion)] == ["cancelled"]
    world.store.release_load("e", 0, ready.load)
    assert world.store.pinned_bytes == 0


def test_what_a_vanished_engine_may_be_reading_stays_for_60_seconds_and_readable_for_others() -> (
    None
):
    world = stored(1)
    world.load(0)
    world.store.close_engine("e", False)
    world.engine("e1")
    assert len(world.load(0, engine="e1").slots) == 1
    world.store.release_load(
        "e1",
        0,
        next(e.load for e in world.events if isinstance(e, LoadAnnounced) and e.engine == "e1"),
    )
    world.advance(59.0)
    assert world.store.pinned_bytes == PAGE
    world.advance(1.0)
    assert world.store.pinned_bytes == 0


def test_what_an_engine_was_reading_is_free_once_it_is_proven_gone() -> None:
    world = stored(1)
    world.load(0)
    world.store.close_engine("e", False)
    world.store.confirm_engine_dead("e")
    assert world.store.pinned_bytes == 0


def test_a_load_is_a_use_in_the_lower_tiers_that_hold_the_key() -> None:
    world = stored(2)
    world.tier.drop(NAMESPACE, b"\0" + block_hash(1))
    world.pump()
    world.load(0, 1)
    assert [ref.key for ref in world.tier.touched] == [b"\0" + block_hash(0)]
