"""Presence: which tier holds which key, as announced by the store."""

from __future__ import annotations

import pytest
from tests.unit.store.store_fixture import NAMESPACE, PAGE, StoreFixture, block_hash

from kvtier.store import presence
from kvtier.store.types import EngineInfo, PresenceChanged
from kvtier.tiers.base import ObjectRef


def key(chunk: int) -> bytes:
    return b"\0" + block_hash(chunk)


def test_a_new_engine_finds_the_objects_that_tiers_hold() -> None:
    fixture = StoreFixture(tiers=("disk", "nfs"))
    fixture.put_in_tier(0, 1, tier=0)
    fixture.put_in_tier(1, 2, tier=1)
    fixture.engine()
    assert fixture.held(NAMESPACE) == {key(0): 2, key(1): 6, key(2): 4}


def test_objects_of_namespaces_without_engines_are_not_announced() -> None:
    fixture = StoreFixture()
    fixture.tier.put("b" * 32, key(0), (PAGE,))
    assert fixture.pump() == []
    assert list(fixture.store.presence("b" * 32)) == []


def test_keys_added_to_and_removed_from_a_tier_are_announced() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.tier.put(NAMESPACE, key(0), (PAGE,))
    assert fixture.store.next_wake() == fixture.clock.now
    assert fixture.pump() == [PresenceChanged(NAMESPACE, key(0), 2, True)]
    fixture.tier.put(NAMESPACE, key(0), (PAGE,))
    assert fixture.pump() == []
    fixture.tier.drop(NAMESPACE, key(0))
    assert fixture.pump() == [PresenceChanged(NAMESPACE, key(0), 2, False)]


def test_changes_without_an_open_engine_are_known_to_the_next_one() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.put_in_tier(0, 1)
    fixture.store.close_engine("e", True)
    fixture.tier.drop(NAMESPACE, key(0))
    fixture.pump()
    fixture.engine("e1")
    assert fixture.held(NAMESPACE) == {key(1): 2}


def test_objects_in_ram_survive_the_engine() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.put(0)
    fixture.settle()
    fixture.store.close_engine("e", False)
    fixture.engine("e1")
    assert fixture.held(NAMESPACE) == {key(0): 3}


def test_too_many_announcements_at_once_cause_a_new_listing_of_the_tier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(presence, "MAX_QUEUED_CHANGES", 10)
    fixture = StoreFixture()
    fixture.engine()
    fixture.put_in_tier(100)
    for chunk in range(50):
        fixture.tier.put(NAMESPACE, key(chunk), (PAGE,))
    fixture.tier.drop(NAMESPACE, key(100))
    while fixture.store.next_wake() == fixture.clock.now:
        fixture.pump()
    assert fixture.held(NAMESPACE) == {key(chunk): 2 for chunk in range(50)}
    assert fixture.counted("presence_relisted", "disk") == 1


def _listed_again(monkeypatch: pytest.MonkeyPatch) -> StoreFixture:
    """A tier with so many changes that it is listed again, in several parts."""
    monkeypatch.setattr(presence, "MAX_QUEUED_CHANGES", 10)
    monkeypatch.setattr(presence, "LISTED_PER_PUMP", 8)
    fixture = StoreFixture()
    fixture.engine()
    for chunk in range(50):
        fixture.tier.put(NAMESPACE, key(chunk), (PAGE,))
    return fixture


def test_a_tier_is_listed_again_in_parts_while_it_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fixture = _listed_again(monkeypatch)
    held = dict.fromkeys(range(50))
    looks = 0
    while fixture.store.next_wake() == fixture.clock.now:
        assert len(fixture.pump()) <= 10 + 8
        looks += 1
        if looks <= 3:
            # One key already listed, one not yet listed, and one unknown to the index.
            for gone in (looks, 49 - looks):
                del held[gone]
                fixture.tier.drop(NAMESPACE, key(gone))
            held[60 + looks] = None
            fixture.tier.put(NAMESPACE, key(60 + looks), (PAGE,))
    assert looks > 6
    assert fixture.held(NAMESPACE) == {key(chunk): 2 for chunk in held}
    assert fixture.counted("presence_relisted", "disk") == 1


def test_changes_lost_during_a_listing_cause_another_listing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fixture = _listed_again(monkeypatch)
    fixture.pump()
    fixture.pump()
    for chunk in range(50):
        fixture.tier.drop(NAMESPACE, key(chunk))
    while fixture.store.next_wake() == fixture.clock.now:
        fixture.pump()
    assert fixture.held(NAMESPACE) == {}
    assert fixture.counted("presence_relisted", "disk") == 2


def test_a_namespace_that_is_closed_while_its_tier_is_listed_is_not_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fixture = _listed_again(monkeypatch)
    fixture.pump()
    fixture.store.close_engine("e", True)
    while fixture.store.next_wake() == fixture.clock.now:
        assert not [event for event in fixture.pump() if isinstance(event, PresenceChanged)]
    assert list(fixture.store.presence(NAMESPACE)) == []


def test_two_engines_of_one_namespace_see_each_others_objects() -> None:
    fixture = StoreFixture()
    fixture.engine("e0")
    fixture.engine("e1")
    fixture.put(0, "e0")
    assert len(fixture.load(0, engine="e1").slots) == 1


def test_an_attach_lists_a_tier_in_parts_and_ram_is_there_at_once() -> None:
    fixture = StoreFixture(slots=32)
    fixture.engine("first")
    fixture.put(100_000, "first")
    fixture.settle()
    fixture.store.close_engine("first", True)
    count = 5 * presence.LISTED_PER_PUMP
    for chunk in range(count):
        fixture.tier.objects[ObjectRef(NAMESPACE, key(chunk))] = fixture.tier.objects[
            ObjectRef(NAMESPACE, key(100_000))
        ]
    fixture.store.open_engine(EngineInfo("e", NAMESPACE, (PAGE,), ((PAGE,),)))
    assert [held for held, *_ in fixture.store.presence(NAMESPACE)] == [key(100_000)]
    most, calls = 0, 0
    while fixture.store.next_wake() == fixture.clock.now:
        most = max(most, sum(isinstance(e, PresenceChanged) for e in fixture.pump()))
        calls += 1
    assert most <= presence.LISTED_PER_PUMP
    assert calls >= 5
    assert len(fixture.held(NAMESPACE)) == count + 1


def test_a_snapshot_and_the_events_since_its_start_give_the_present_state() -> None:
    fixture = StoreFixture(slots=32)
    fixture.engine()
    fixture.put_in_tier(*range(20))
    for chunk in range(10, 14):
        fixture.put(chunk)
    fixture.settle()
    steps = fixture.store.presence(NAMESPACE)
    replica: dict[bytes, int] = {}
    before = len(fixture.events)
    for turn, (held, bits, _) in enumerate(steps):
        replica[held] = replica.get(held, 0) | bits
        if turn % 3 == 0:
            fixture.tier.drop(NAMESPACE, key(turn))
            fixture.put_in_tier(100 + turn)
        if turn % 4 == 0:
            fixture.promote(19 - turn)
            fixture.settle()
    for event in fixture.events[before:]:
        if isinstance(event, PresenceChanged):
            held = replica.get(event.key, 0)
            replica[event.key] = held | event.bits if event.present else held & ~event.bits
    assert {held: bits for held, bits in replica.items() if bits} == fixture.held(NAMESPACE)
