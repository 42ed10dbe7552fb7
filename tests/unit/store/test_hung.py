"""Slots into which a thread of a dead tierd may still read are nobody's until it is gone."""

from __future__ import annotations

from tests.unit.store.store_world import CHECKSUMS, PAGE, World, live

from kvtier.store.core import TierStore
from kvtier.store.records import SlotPlace
from kvtier.topology.models import LiveTier


class Log:
    """What the store notes. ``full``: nothing more can be."""

    def __init__(self) -> None:
        self.places: dict[int, SlotPlace] = {}
        self.full = False

    def begin(self, place: SlotPlace) -> bool:
        if not self.full:
            self.places[place.offset] = place
        return not self.full

    def end(self, offset: int) -> None:
        self.places.pop(offset, None)


def logged() -> tuple[World, Log]:
    world, log = World(values=live(disk=LiveTier(capacity_bytes=1 << 30))), Log()
    world.store._reads.log = log
    world.engine()
    return world, log


def second_life(world: World, log: Log, fenced: bool = False) -> World:
    """The next tierd over the same pool."""
    world.store = TierStore(
        len(world.pool),
        world.pool,
        world.tiers,
        world._document,
        world.io,
        world.clock,
        CHECKSUMS,
        fenced=fenced,
        hung={"7": tuple(log.places.values())},
    )
    world.events.clear()
    world._used.clear()
    return world


def test_a_slot_is_noted_while_a_read_into_it_may_run() -> None:
    world, log = logged()
    world.lower(0, 1)
    world.promote(0, 1)
    assert len(log.places) == 2
    world.io.run(world.calls("read:")[0])
    world.pump()
    assert len(log.places) == 1
    world.settle("read:")
    assert log.places == {}


def test_a_read_that_is_taken_back_is_not_noted_any_more() -> None:
    world, log = logged()
    world.lower(0)
    promotion = world.promote(0)
    world.store.cancel("e", promotion)
    world.pump()
    assert log.places == {}


def test_a_read_that_cannot_be_noted_is_not_made() -> None:
    world, log = logged()
    world.lower(0)
    log.full = True
    promotion = world.promote(0)
    world.settle("read:")
    assert world.ends(promotion)[0].usable == 0
    assert "read" not in world.tier.calls


def test_slots_of_hung_reads_are_quarantined_until_their_process_is_gone() -> None:
    world, log = logged()
    world.lower(0, 1)
    world.promote(0, 1)
    second_life(world, log)
    world.engine()
    assert world.store.accounts().quarantined == 2 * PAGE
    for chunk in range(40):
        if world.credits():
            world.put(chunk)
            world.settle("hash")
        world.advance(0.11)
    assert not set(log.places) & {entry.slot.offset for entry in world.store._table.entries()}
    world.check_accounts()
    world.store.hung_over("7")
    assert world.store.accounts().quarantined == 0
    world.store.hung_over("7")
    world.check_accounts()


def test_behind_the_fence_as_well() -> None:
    world, log = logged()
    world.lower(0)
    world.promote(0)
    second_life(world, log, fenced=True)
    world.store.unfence()
    assert world.store.accounts().quarantined == PAGE


def test_one_that_is_gone_before_the_fence_opens_keeps_nothing() -> None:
    world, log = logged()
    world.lower(0)
    world.promote(0)
    second_life(world, log, fenced=True)
    world.store.hung_over("7")
    world.store.unfence()
    assert world.store.accounts().quarantined == 0


def test_a_place_that_is_not_in_this_pool_is_counted() -> None:
    world, log = logged()
    log.places = {0: SlotPlace(1 << 30, PAGE, 1 << 30, 4)}
    second_life(world, log)
    assert world.counted("hung_reads_elsewhere") == 1
    world.check_accounts()
