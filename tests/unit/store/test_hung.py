"""Slots into which a thread of a dead tierd may still read are nobody's until it is gone."""

from __future__ import annotations

from tests.unit.store.store_world import PAGE, World, live

from kvtier.config.models import LiveTier
from kvtier.store.slot_table import SlotLocation


def reading(*chunks: int) -> World:
    """A world with reads of these chunks under way."""
    world = World(values=live(disk=LiveTier(capacity_bytes=1 << 30)))
    world.engine()
    world.lower(*chunks)
    world.promote(*chunks)
    return world


def test_a_slot_is_noted_while_a_read_into_it_may_run() -> None:
    world = reading(0, 1)
    assert len(world.notes.places) == 2
    world.io.run(world.calls("read:")[0])
    world.pump()
    assert len(world.notes.places) == 1
    world.settle("read:")
    assert world.notes.places == {}


def test_a_read_that_is_taken_back_is_not_noted_any_more() -> None:
    world = World()
    world.engine()
    world.lower(0)
    promotion = world.promote(0)
    world.store.cancel("e", promotion)
    world.pump()
    assert world.notes.places == {}


def test_a_read_that_cannot_be_noted_is_not_made() -> None:
    world = World()
    world.engine()
    world.lower(0)
    world.notes.full = True
    promotion = world.promote(0)
    world.settle("read:")
    assert world.ends(promotion)[0].usable == 0
    assert "read" not in world.tier.calls


def test_slots_of_hung_reads_are_quarantined_until_their_process_is_gone() -> None:
    world = reading(0, 1)
    hung = set(world.notes.places)
    world.restart(hung="7")
    world.engine()
    assert world.store.accounts().quarantined == 2 * PAGE
    for chunk in range(40):
        if world.credits():
            world.put(chunk)
            world.settle("hash")
        world.advance(0.11)
    assert not hung & {entry.slot.offset for entry in world.store._table.entries()}
    world.check_accounts()
    world.release_orphaned_reads("7")
    assert world.store.accounts().quarantined == 0
    world.store.release_orphaned_reads("7")
    world.check_accounts()


def test_over_several_lives() -> None:
    world = reading(0, 1)
    world.restart(hung="7")
    world.restart()
    assert world.store.accounts().quarantined == 2 * PAGE


def test_behind_the_fence_as_well() -> None:
    world = reading(0)
    world.restart(True, hung="7")
    world.store.unfence()
    assert world.store.accounts().quarantined == PAGE


def test_one_that_is_gone_before_the_fence_opens_keeps_nothing() -> None:
    world = reading(0)
    world.restart(True, hung="7")
    world.release_orphaned_reads("7")
    world.store.unfence()
    assert world.store.accounts().quarantined == 0


def test_a_place_that_is_not_in_this_pool_is_counted() -> None:
    world = reading()
    world.hung["7"] = (SlotLocation(1 << 30, PAGE, 1 << 30, 4),)
    world.restart()
    assert world.counted("orphaned_reads_unplaced") == 1
    world.check_accounts()
