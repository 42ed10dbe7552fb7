"""How chunks become objects: reservations, deliveries, commits."""

from __future__ import annotations

import pytest
from tests.unit.store.store_world import NAMESPACE, PAGE, World, block_hash

from kvtier.store.transfers import MAX_EARLY
from kvtier.store.types import PresenceChanged


def test_an_object_is_visible_once_every_writer_rank_has_delivered() -> None:
    world = World()
    world.engine(shards=((PAGE, PAGE),), writers=(0, 1))
    number, _ = world.reserve(0)
    world.store.deliver("e", 1, number)
    world.pump()
    assert world.bits(0) == 0
    world.store.deliver("e", 0, number)
    assert PresenceChanged(NAMESPACE, b"\0" + block_hash(0), 1, True) in world.pump()
    assert world.bits(0) == 1


def test_with_replicated_kv_one_writer_rank_is_enough() -> None:
    world = World()
    world.engine(shards=((PAGE, PAGE),), writers=(1,))
    number, _ = world.reserve(0)
    world.store.deliver("e", 0, number)
    assert world.counted("protocol_violations", "", "not_a_writer") == 1
    world.store.deliver("e", 1, number)
    assert world.bits(0) == 1


def test_an_abort_of_any_rank_prevents_the_commit_and_the_slot_is_free_after_all_have_answered() -> (
    None
):
    world = World()
    world.engine(shards=((PAGE, PAGE),), writers=(0, 1))
    number, _ = world.reserve(0)
    world.store.abort("e", 0, number)
    world.pump()
    assert world.store.accounts().reserved == 2 * PAGE
    world.store.deliver("e", 1, number)
    world.pump()
    assert world.bits(0) == 0
    assert world.store.accounts().reserved == 0


@pytest.mark.parametrize("order", ["worker first", "scheduler first"])
def test_a_delivery_may_come_before_the_reservation(order: str) -> None:
    world = World()
    world.engine()
    slot = world.credits()[0]
    if order == "worker first":
        world.store.deliver("e", 0, 7)
    world.store.reserve("e", 7, 0, block_hash(0), slot)
    if order == "scheduler first":
        world.store.deliver("e", 0, 7)
    assert world.bits(0) == 1


def test_an_abort_may_come_before_the_reservation() -> None:
    world = World()
    world.engine()
    world.store.abort("e", 0, 7)
    world.store.reserve("e", 7, 0, block_hash(0), world.credits()[0])
    assert world.bits(0) == 0
    assert world.store.accounts().reserved == 0


def test_early_answers_are_kept_up_to_a_bound_and_the_oldest_dropped_and_counted() -> None:
    world = World()
    world.engine()
    for number in range(MAX_EARLY + 10):
        world.store.deliver("e", 0, number)
    assert world.counted("early_answers_dropped") == 10


def test_a_key_that_is_present_is_not_stored_again() -> None:
    world = World()
    world.engine()
    first = world.put(0)
    world.put(0)
    assert world.counted("stores_cancelled", "", "present") == 1
    assert world.load(0).slots == (first,)
    assert world.store.accounts().committed == PAGE


def test_of_two_engines_that_store_a_key_at_once_the_first_to_reserve_stores_it() -> None:
    world = World()
    world.engine("e0")
    world.engine("e1")
    first, slot = world.reserve(0, "e0")
    second, _ = world.reserve(0, "e1")
    world.store.deliver("e1", 0, second)
    world.pump()
    assert world.bits(0) == 0
    world.store.deliver("e0", 0, first)
    world.pump()
    assert world.load(0, engine="e1").slots == (slot,)
    assert world.counted("stores_cancelled", "", "pending") == 1


def test_ranks_of_two_engines_are_never_counted_together() -> None:
    world = World()
    for name in ("e0", "e1"):
        world.engine(name, shards=((PAGE, PAGE),), writers=(0, 1))
    first, _ = world.reserve(0, "e0")
    second, _ = world.reserve(0, "e1")
    world.store.deliver("e0", 0, first)
    world.store.deliver("e1", 1, second)
    world.pump()
    assert world.bits(0) == 0


def test_after_an_abort_the_key_can_be_stored_by_another() -> None:
    world = World()
    world.engine(shards=((PAGE, PAGE),), writers=(0, 1))
    first, _ = world.reserve(0)
    world.store.abort("e", 0, first)
    second, _ = world.reserve(0)
    world.store.deliver("e", 0, second)
    world.store.deliver("e", 1, second)
    assert world.bits(0) == 1
    world.store.deliver("e", 1, first)
    world.check_accounts()


@pytest.mark.parametrize(
    ("reason", "act"),
    [
        ("unknown_engine", lambda w: w.store.deliver("nobody", 0, 1)),
        ("slot_not_granted", lambda w: w.store.reserve("e", 1, 0, block_hash(0), 3)),
        (
            "slot_not_granted",
            lambda w: w.store.reserve("e", 1, 0, block_hash(0), w.credits("other")[0]),
        ),
        ("unknown_group", lambda w: w.store.reserve("e", 1, 9, block_hash(0), w.credits()[0])),
        ("not_a_writer", lambda w: w.store.deliver("e", 5, 1)),
    ],
)
def test_what_the_protocol_does_not_allow_is_counted_and_harmless(reason: str, act) -> None:  # type: ignore[no-untyped-def]
    world = World()
    world.engine()
    world.engine("other")
    before = world.store.accounts()
    act(world)
    world.pump()
    assert world.counted("protocol_violations", "", reason) == 1
    assert world.store.accounts() == before


def test_a_slot_is_reserved_once_and_delivered_once() -> None:
    world = World()
    world.engine(shards=((PAGE, PAGE),), writers=(0, 1))
    number, slot = world.reserve(0)
    world.store.reserve("e", 99, 0, block_hash(1), slot)
    world.store.reserve("e", number, 0, block_hash(1), world.credits()[0])
    world.store.deliver("e", 0, number)
    world.store.deliver("e", 0, number)
    world.pump()
    assert world.bits(0) == 0
    assert world.counted("protocol_violations") == 3


def test_after_a_reset_open_reservations_are_not_committed_and_new_ones_are_kept_in_ram_alone() -> (
    None
):
    world = World()
    world.engine()
    number, _ = world.reserve(0)
    world.store.reset_engine("e", "f" * 32)
    world.store.deliver("e", 0, number)
    world.put(1, namespace="f" * 32)
    world.settle()
    assert world.bits(0) == 0
    assert dict(world.store.presence("f" * 32)) == {b"\0" + block_hash(1): 1}
    assert world.tier.objects == {}
    assert len(world.load(1).slots) == 1


class TestAnEngineThatWent:
    def test_keeps_its_slots_in_quarantine_for_60_seconds(self) -> None:
        world = World(slots=16)
        world.engine()
        world.reserve(0)
        world.pump()
        world.store.close_engine("e", False)
        world.pump()
        assert world.store.accounts().quarantined == 5 * PAGE
        world.advance(59.0)
        assert world.store.accounts().quarantined == 5 * PAGE
        world.advance(1.0)
        assert world.store.accounts().quarantined == 0

    def test_gives_its_slots_back_when_it_is_proven_gone(self) -> None:
        world = World()
        world.engine()
        world.store.close_engine("e", False)
        world.store.confirm_engine_dead("e")
        assert world.store.accounts().quarantined == 0

    def test_gives_its_slots_back_at_once_when_it_ended_in_order(self) -> None:
        world = World()
        world.engine()
        world.reserve(0)
        world.store.close_engine("e", True)
        assert world.store.accounts().free == len(world.pool)

    def test_leaves_nothing_to_one_of_the_same_name(self) -> None:
        world = World(slots=16)
        world.engine()
        old = world.credits()
        number, _ = world.reserve(0)
        world.store.deliver("e", 0, 77)
        world.engine()
        assert world.counted("protocol_violations", "", "engine_opened_twice") == 1
        new = [slot for slot in world.credits() if slot not in old]
        assert len(new) == 4
        world.store.deliver("e", 0, number)
        world.store.reserve("e", 77, 0, block_hash(1), new[0])
        world.pump()
        assert world.bits(0) == world.bits(1) == 0

    def test_can_be_proven_gone_while_a_new_one_of_its_name_works(self) -> None:
        world = World(slots=16)
        world.engine()
        world.store.close_engine("e", False)
        world.engine()
        world.store.confirm_engine_dead("e")
        accounts = world.store.accounts()
        assert (accounts.quarantined, accounts.granted) == (0, 4 * PAGE)

    def test_does_not_take_with_it_what_it_committed(self) -> None:
        world = World()
        world.engine()
        world.put(0)
        world.store.close_engine("e", False)
        world.engine("e1")
        assert len(world.load(0, engine="e1").slots) == 1
