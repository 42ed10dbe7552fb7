"""Reservations, deliveries and commits."""

from __future__ import annotations

import pytest
from tests.unit.store.store_fixture import NAMESPACE, PAGE, StoreFixture, block_hash

from kvtier.store.transfers import MAX_EARLY
from kvtier.store.types import ChunkId, EngineInfo, PresenceChanged


def test_the_writers_of_each_group_commit_its_objects() -> None:
    fixture = StoreFixture()
    shards = ((PAGE,), (PAGE, PAGE))
    info = EngineInfo("e", NAMESPACE, (PAGE, 2 * PAGE), shards, writer_ranks=((0,), (0, 1)))
    fixture.store.open_engine(info)
    fixture.pump()
    for group in (0, 1):
        slot = fixture.credits(group=group)[0]
        fixture.store.reserve("e", group + 1, ChunkId(group, block_hash(group)), slot)
        fixture.store.deliver("e", 1, group + 1)
    assert fixture.counted("protocol_violations", "", "not_a_writer") == 1
    assert fixture.counted("stores_committed") == 0
    for group in (0, 1):
        fixture.store.deliver("e", 0, group + 1)
        assert fixture.counted("stores_committed") == group + 1


def test_an_object_is_visible_once_every_writer_rank_has_delivered() -> None:
    fixture = StoreFixture()
    fixture.engine(shards=((PAGE, PAGE),), writers=(0, 1))
    number, _ = fixture.reserve(0)
    fixture.store.deliver("e", 1, number)
    fixture.pump()
    assert fixture.bits(0) == 0
    fixture.store.deliver("e", 0, number)
    (event,) = [event for event in fixture.pump() if isinstance(event, PresenceChanged)]
    assert (event.key, event.bits, event.present) == (b"\0" + block_hash(0), 1, True)
    assert fixture.bits(0) == 1


def test_with_replicated_kv_one_writer_rank_is_enough() -> None:
    fixture = StoreFixture()
    fixture.engine(shards=((PAGE,),), writers=(1,))
    number, _ = fixture.reserve(0)
    fixture.store.deliver("e", 0, number)
    assert fixture.counted("protocol_violations", "", "not_a_writer") == 1
    fixture.store.deliver("e", 1, number)
    assert fixture.bits(0) == 1


def test_an_abort_prevents_the_commit_and_the_slot_is_free_after_all_ranks() -> None:
    fixture = StoreFixture()
    fixture.engine(shards=((PAGE, PAGE),), writers=(0, 1))
    number, _ = fixture.reserve(0)
    fixture.store.abort("e", 0, number)
    fixture.pump()
    assert fixture.store.accounts().reserved == 2 * PAGE
    fixture.store.deliver("e", 1, number)
    fixture.pump()
    assert fixture.bits(0) == 0
    assert fixture.store.accounts().reserved == 0


@pytest.mark.parametrize("order", ["worker first", "scheduler first"])
def test_a_delivery_may_come_before_the_reservation(order: str) -> None:
    fixture = StoreFixture()
    fixture.engine()
    slot = fixture.credits()[0]
    if order == "worker first":
        fixture.store.deliver("e", 0, 7)
    fixture.store.reserve("e", 7, ChunkId(0, block_hash(0)), slot)
    if order == "scheduler first":
        fixture.store.deliver("e", 0, 7)
    assert fixture.bits(0) == 1


def test_an_abort_may_come_before_the_reservation() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.store.abort("e", 0, 7)
    fixture.store.reserve("e", 7, ChunkId(0, block_hash(0)), fixture.credits()[0])
    assert fixture.bits(0) == 0
    assert fixture.store.accounts().reserved == 0


def test_early_acknowledgements_are_bounded_and_the_oldest_dropped_and_counted() -> None:
    fixture = StoreFixture()
    fixture.engine()
    for number in range(MAX_EARLY + 10):
        fixture.store.deliver("e", 0, number)
    assert fixture.counted("early_acks_dropped") == 10


def test_a_key_that_is_present_is_not_stored_again() -> None:
    fixture = StoreFixture()
    fixture.engine()
    first = fixture.put(0)
    fixture.put(0)
    assert fixture.counted("stores_cancelled", "", "present") == 1
    assert fixture.load(0).slots == (first,)
    assert fixture.store.accounts().committed == PAGE


def test_of_two_engines_that_store_a_key_at_once_the_first_to_reserve_stores_it() -> None:
    fixture = StoreFixture()
    fixture.engine("e0")
    fixture.engine("e1")
    first, slot = fixture.reserve(0, "e0")
    second, _ = fixture.reserve(0, "e1")
    fixture.store.deliver("e1", 0, second)
    fixture.pump()
    assert fixture.bits(0) == 0
    fixture.store.deliver("e0", 0, first)
    fixture.pump()
    assert fixture.load(0, engine="e1").slots == (slot,)
    assert fixture.counted("stores_cancelled", "", "pending") == 1


def test_ranks_of_two_engines_are_never_counted_together() -> None:
    fixture = StoreFixture()
    for name in ("e0", "e1"):
        fixture.engine(name, shards=((PAGE, PAGE),), writers=(0, 1))
    first, _ = fixture.reserve(0, "e0")
    second, _ = fixture.reserve(0, "e1")
    fixture.store.deliver("e0", 0, first)
    fixture.store.deliver("e1", 1, second)
    fixture.pump()
    assert fixture.bits(0) == 0


def test_after_an_abort_the_key_can_be_stored_by_another() -> None:
    fixture = StoreFixture()
    fixture.engine(shards=((PAGE, PAGE),), writers=(0, 1))
    first, _ = fixture.reserve(0)
    fixture.store.abort("e", 0, first)
    second, _ = fixture.reserve(0)
    fixture.store.deliver("e", 0, second)
    fixture.store.deliver("e", 1, second)
    assert fixture.bits(0) == 1
    fixture.store.deliver("e", 1, first)
    fixture.check_accounts()


@pytest.mark.parametrize(
    ("reason", "act"),
    [
        ("unknown_engine", lambda w: w.store.deliver("unknown", 0, 1)),
        ("slot_not_granted", lambda w: w.store.reserve("e", 1, ChunkId(0, block_hash(0)), 3)),
        (
            "slot_not_granted",
            lambda w: w.store.reserve("e", 1, ChunkId(0, block_hash(0)), w.credits("other")[0]),
        ),
        (
            "unknown_group",
            lambda w: w.store.reserve("e", 1, ChunkId(9, block_hash(0)), w.credits()[0]),
        ),
        ("not_a_writer", lambda w: w.store.deliver("e", 5, 1)),
    ],
)
def test_protocol_violations_are_counted_and_ignored(reason: str, act) -> None:  # type: ignore[no-untyped-def]
    fixture = StoreFixture()
    fixture.engine()
    fixture.engine("other")
    before = fixture.store.accounts()
    act(fixture)
    fixture.pump()
    assert fixture.counted("protocol_violations", "", reason) == 1
    assert fixture.store.accounts() == before


def test_a_slot_is_reserved_once_and_delivered_once() -> None:
    fixture = StoreFixture()
    fixture.engine(shards=((PAGE, PAGE),), writers=(0, 1))
    number, slot = fixture.reserve(0)
    fixture.store.reserve("e", 99, ChunkId(0, block_hash(1)), slot)
    fixture.store.reserve("e", number, ChunkId(0, block_hash(1)), fixture.credits()[0])
    fixture.store.deliver("e", 0, number)
    fixture.store.deliver("e", 0, number)
    fixture.pump()
    assert fixture.bits(0) == 0
    assert fixture.counted("protocol_violations") == 3


def test_after_a_reset_open_reservations_are_cancelled_and_new_ones_stay_in_ram() -> None:
    fixture = StoreFixture()
    fixture.engine()
    number, _ = fixture.reserve(0)
    fixture.store.reset_engine("e", "f" * 32)
    fixture.store.deliver("e", 0, number)
    fixture.put(1, namespace="f" * 32)
    fixture.settle()
    assert fixture.bits(0) == 0
    assert fixture.held("f" * 32) == {b"\0" + block_hash(1): 1}
    assert fixture.tier.objects == {}
    assert len(fixture.load(1).slots) == 1


class TestAnEngineThatWent:
    def test_keeps_its_slots_in_quarantine_for_60_seconds(self) -> None:
        fixture = StoreFixture(slots=16)
        fixture.engine()
        fixture.reserve(0)
        fixture.pump()
        fixture.store.close_engine("e", False)
        fixture.pump()
        assert fixture.store.accounts().quarantined == 5 * PAGE
        fixture.advance(59.0)
        assert fixture.store.accounts().quarantined == 5 * PAGE
        fixture.advance(1.0)
        assert fixture.store.accounts().quarantined == 0

    def test_releases_its_slots_when_its_exit_is_confirmed(self) -> None:
        fixture = StoreFixture()
        fixture.engine()
        fixture.store.close_engine("e", False)
        fixture.store.confirm_engine_dead("e")
        assert fixture.store.accounts().quarantined == 0

    def test_releases_its_slots_at_once_after_an_orderly_exit(self) -> None:
        fixture = StoreFixture()
        fixture.engine()
        fixture.reserve(0)
        fixture.store.close_engine("e", True)
        assert fixture.store.accounts().free == len(fixture.pool)

    def test_an_engine_of_the_same_name_inherits_nothing(self) -> None:
        fixture = StoreFixture(slots=16)
        fixture.engine()
        old = fixture.credits()
        number, _ = fixture.reserve(0)
        fixture.store.deliver("e", 0, 77)
        fixture.engine()
        assert fixture.counted("protocol_violations", "", "engine_opened_twice") == 1
        new = [slot for slot in fixture.credits() if slot not in old]
        assert len(new) == 4
        fixture.store.deliver("e", 0, number)
        fixture.store.reserve("e", 77, ChunkId(0, block_hash(1)), new[0])
        fixture.pump()
        assert fixture.bits(0) == fixture.bits(1) == 0

    def test_its_exit_can_be_confirmed_while_a_successor_of_the_same_name_runs(self) -> None:
        fixture = StoreFixture(slots=16)
        fixture.engine()
        fixture.store.close_engine("e", False)
        fixture.engine()
        fixture.store.confirm_engine_dead("e")
        accounts = fixture.store.accounts()
        assert (accounts.quarantined, accounts.granted) == (0, 4 * PAGE)

    def test_keeps_the_objects_that_it_committed(self) -> None:
        fixture = StoreFixture()
        fixture.engine()
        fixture.put(0)
        fixture.store.close_engine("e", False)
        fixture.engine("e1")
        assert len(fixture.load(0, engine="e1").slots) == 1
