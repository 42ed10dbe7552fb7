"""Slots are quarantined while a thread of a previous tierd may still read into them."""

from __future__ import annotations

from tests.unit.store.store_fixture import PAGE, StoreFixture, live

from kvtier.config.models import LiveTier
from kvtier.store.slot_table import SlotLocation


def reading(*chunks: int) -> StoreFixture:
    """A fixture with reads of these chunks under way."""
    fixture = StoreFixture(values=live(disk=LiveTier(capacity_bytes=1 << 30)))
    fixture.engine()
    fixture.put_in_tier(*chunks)
    fixture.promote(*chunks)
    return fixture


def test_a_slot_is_noted_while_a_read_into_it_may_run() -> None:
    fixture = reading(0, 1)
    assert len(fixture.read_log.places) == 2
    fixture.io.run(fixture.calls("read:")[0])
    fixture.pump()
    assert len(fixture.read_log.places) == 1
    fixture.settle("read:")
    assert fixture.read_log.places == {}


def test_a_revoked_read_is_no_longer_recorded() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.put_in_tier(0)
    promotion = fixture.promote(0)
    fixture.store.cancel("e", promotion)
    fixture.pump()
    assert fixture.read_log.places == {}


def test_a_read_that_cannot_be_recorded_is_not_started() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.put_in_tier(0)
    fixture.read_log.full = True
    promotion = fixture.promote(0)
    fixture.settle("read:")
    assert fixture.ends(promotion)[0].usable == 0
    assert "read" not in fixture.tier.calls


def test_slots_of_orphaned_reads_are_quarantined_until_their_process_has_exited() -> None:
    fixture = reading(0, 1)
    hung = set(fixture.read_log.places)
    fixture.restart(hung="7")
    fixture.engine()
    assert fixture.store.accounts().quarantined == 2 * PAGE
    for chunk in range(40):
        if fixture.credits():
            fixture.put(chunk)
            fixture.settle("hash")
        fixture.advance(0.11)
    assert not hung & {entry.slot.offset for entry in fixture.store._resident.entries()}
    fixture.check_accounts()
    fixture.release_orphaned_reads("7")
    assert fixture.store.accounts().quarantined == 0
    fixture.store.release_orphaned_reads("7")
    fixture.check_accounts()


def test_slots_of_orphaned_reads_stay_quarantined_across_restarts() -> None:
    fixture = reading(0, 1)
    fixture.restart(hung="7")
    fixture.restart()
    assert fixture.store.accounts().quarantined == 2 * PAGE


def test_slots_of_an_orphaned_read_stay_quarantined_after_the_fence_opens() -> None:
    fixture = reading(0)
    fixture.restart(True, hung="7")
    fixture.store.unfence()
    assert fixture.store.accounts().quarantined == PAGE


def test_an_orphaned_read_that_ends_before_the_fence_opens_releases_its_slots() -> None:
    fixture = reading(0)
    fixture.restart(True, hung="7")
    fixture.release_orphaned_reads("7")
    fixture.store.unfence()
    assert fixture.store.accounts().quarantined == 0


def test_a_location_outside_the_pool_is_counted() -> None:
    fixture = reading()
    fixture.orphaned_reads["7"] = (SlotLocation(1 << 30, PAGE, 1 << 30, 4),)
    fixture.restart()
    assert fixture.counted("orphaned_reads_unplaced") == 1
    fixture.check_accounts()
