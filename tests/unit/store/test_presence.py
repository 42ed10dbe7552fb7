"""What the store says about which tier holds what."""

from __future__ import annotations

import pytest
from tests.unit.store.store_world import NAMESPACE, PAGE, World, block_hash

from kvtier.store import presence
from kvtier.store.types import PresenceChanged


def key(chunk: int) -> bytes:
    return b"\0" + block_hash(chunk)


def test_an_engine_that_opens_finds_what_the_tiers_hold() -> None:
    world = World(tiers=("disk", "nfs"))
    world.lower(0, 1, tier=0)
    world.lower(1, 2, tier=1)
    world.engine()
    assert dict(world.store.presence(NAMESPACE)) == {key(0): 2, key(1): 6, key(2): 4}


def test_objects_of_namespaces_that_nobody_uses_are_not_announced() -> None:
    world = World()
    world.tier.put("b" * 32, key(0), (PAGE,))
    assert world.pump() == []
    assert list(world.store.presence("b" * 32)) == []


def test_what_a_tier_gains_and_loses_is_announced() -> None:
    world = World()
    world.engine()
    world.tier.put(NAMESPACE, key(0), (PAGE,))
    assert world.store.next_wake() == world.clock.now
    assert world.pump() == [PresenceChanged(NAMESPACE, key(0), 2, True)]
    world.tier.put(NAMESPACE, key(0), (PAGE,))
    assert world.pump() == []
    world.tier.drop(NAMESPACE, key(0))
    assert world.pump() == [PresenceChanged(NAMESPACE, key(0), 2, False)]


def test_what_happened_while_no_engine_was_there_is_known_to_the_next() -> None:
    world = World()
    world.engine()
    world.lower(0, 1)
    world.store.close_engine("e", True)
    world.tier.drop(NAMESPACE, key(0))
    world.pump()
    world.engine("e1")
    assert dict(world.store.presence(NAMESPACE)) == {key(1): 2}


def test_what_is_in_ram_survives_the_engine() -> None:
    world = World()
    world.engine()
    world.put(0)
    world.settle()
    world.store.close_engine("e", False)
    world.engine("e1")
    assert dict(world.store.presence(NAMESPACE)) == {key(0): 3}


def test_when_too_much_is_announced_at_once_the_tier_is_listed_afresh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(presence, "MAX_QUEUED_CHANGES", 10)
    world = World()
    world.engine()
    world.lower(100)
    for chunk in range(50):
        world.tier.put(NAMESPACE, key(chunk), (PAGE,))
    world.tier.drop(NAMESPACE, key(100))
    while world.store.next_wake() == world.clock.now:
        world.pump()
    assert dict(world.store.presence(NAMESPACE)) == {key(chunk): 2 for chunk in range(50)}
    assert world.counted("presence_relisted", "disk") == 1


def test_a_tier_is_listed_afresh_a_part_at_a_time_while_it_goes_on_changing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(presence, "MAX_QUEUED_CHANGES", 10)
    monkeypatch.setattr(presence, "RELISTED_PER_PUMP", 8)
    world = World()
    world.engine()
    for chunk in range(50):
        world.tier.put(NAMESPACE, key(chunk), (PAGE,))
    held = dict.fromkeys(range(50))
    looks = 0
    while world.store.next_wake() == world.clock.now:
        assert len(world.pump()) <= 10 + 8
        looks += 1
        if looks <= 3:
            # One that was listed, one that is still to be, and one that nobody knows yet.
            for gone in (looks, 49 - looks):
                del held[gone]
                world.tier.drop(NAMESPACE, key(gone))
            held[60 + looks] = None
            world.tier.put(NAMESPACE, key(60 + looks), (PAGE,))
    assert looks > 6
    assert dict(world.store.presence(NAMESPACE)) == {key(chunk): 2 for chunk in held}
    assert world.counted("presence_relisted", "disk") == 1


def test_what_is_lost_while_a_tier_is_listed_has_it_listed_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(presence, "MAX_QUEUED_CHANGES", 10)
    monkeypatch.setattr(presence, "RELISTED_PER_PUMP", 8)
    world = World()
    world.engine()
    for chunk in range(50):
        world.tier.put(NAMESPACE, key(chunk), (PAGE,))
    world.pump()
    world.pump()
    for chunk in range(50):
        world.tier.drop(NAMESPACE, key(chunk))
    while world.store.next_wake() == world.clock.now:
        world.pump()
    assert dict(world.store.presence(NAMESPACE)) == {}
    assert world.counted("presence_relisted", "disk") == 2


def test_a_namespace_that_is_closed_while_its_tier_is_listed_is_not_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(presence, "MAX_QUEUED_CHANGES", 10)
    monkeypatch.setattr(presence, "RELISTED_PER_PUMP", 8)
    world = World()
    world.engine()
    for chunk in range(50):
        world.tier.put(NAMESPACE, key(chunk), (PAGE,))
    world.pump()
    world.store.close_engine("e", True)
    while world.store.next_wake() == world.clock.now:
        assert not [event for event in world.pump() if isinstance(event, PresenceChanged)]
    assert list(world.store.presence(NAMESPACE)) == []


def test_two_engines_of_one_namespace_see_what_the_other_stored() -> None:
    world = World()
    world.engine("e0")
    world.engine("e1")
    world.put(0, "e0")
    assert len(world.load(0, engine="e1").slots) == 1
