"""Write-through to lower tiers: what is written, when, and what is dropped."""

from __future__ import annotations

from tests.unit.store.store_world import (
    CHECKSUMS,
    NAMESPACE,
    PAGE,
    World,
    block_hash,
    live,
    object_meta,
)

from kvtier.config.models import LiveTier, StorePolicy
from kvtier.errors import TierNoSpaceError, TierUnavailableError
from kvtier.store.types import PresenceChanged
from kvtier.tiers.base import ObjectRef


def ref(chunk: int) -> ObjectRef:
    return ObjectRef(NAMESPACE, b"\0" + block_hash(chunk))


def test_an_object_is_sealed_over_the_exact_bytes_of_each_shard_and_then_written() -> None:
    world = World()
    world.engine(shards=((100, 5000),), writers=(0, 1))
    number, slot = world.reserve(0)
    world.pool[slot : slot + 3 * PAGE] = bytes(range(256)) * (3 * PAGE // 256)
    for rank in (0, 1):
        world.store.deliver("e", rank, number)
    world.settle()
    data, meta = world.tier.objects[ref(0)]
    assert data == world.pool[slot : slot + 3 * PAGE]
    assert meta.shard_bytes == (100, 5000)
    assert meta.checksums == (
        CHECKSUMS.digest(memoryview(data)[:100]),
        CHECKSUMS.digest(memoryview(data)[PAGE : PAGE + 5000]),
    )


def test_an_object_is_visible_in_ram_before_it_is_sealed_and_in_a_tier_only_after_it_was_written() -> (
    None
):
    world = World()
    world.engine()
    world.put(0)
    assert world.bits(0) == 1
    assert world.calls("write:") == []
    world.io.run_all("hash")
    world.pump()
    assert world.bits(0) == 1
    world.io.run_all("write:")
    assert PresenceChanged(NAMESPACE, b"\0" + block_hash(0), 2, True) in world.pump()


def test_an_object_that_waits_for_its_checksum_or_a_write_is_not_evicted() -> None:
    world = World()
    world.engine()
    world.put(0)
    assert world.store.pinned_bytes == PAGE
    world.io.run_all("hash")
    world.pump()
    assert world.store.pinned_bytes == PAGE
    world.settle()
    assert world.store.pinned_bytes == 0


def test_policy_none_writes_nothing() -> None:
    world = World(values=live(disk=LiveTier(store_policy=StorePolicy.NONE)))
    world.engine()
    world.put(0)
    world.settle()
    world.load(0)
    world.settle()
    assert world.tier.objects == {}


def test_policy_reused_writes_what_is_loaded() -> None:
    world = World(values=live(disk=LiveTier(store_policy=StorePolicy.REUSED)))
    world.engine()
    world.put(0)
    world.put(1)
    world.settle()
    assert world.tier.objects == {}
    world.load(1)
    world.settle()
    assert list(world.tier.objects) == [ref(1)]


def test_policy_reused_writes_what_is_stored_a_second_time() -> None:
    world = World(values=live(disk=LiveTier(store_policy=StorePolicy.REUSED)))
    world.engine()
    world.put(0)
    world.settle()
    world.put(0)
    world.settle()
    assert list(world.tier.objects) == [ref(0)]


def test_each_tier_follows_its_own_policy_and_a_change_counts_at_once() -> None:
    values = live(
        disk=LiveTier(store_policy=StorePolicy.ALL), nfs=LiveTier(store_policy=StorePolicy.NONE)
    )
    world = World(tiers=("disk", "nfs"), values=values)
    world.engine()
    world.put(0)
    world.settle()
    assert [len(tier.objects) for tier in world.tiers] == [1, 0]
    world.store.configure(live(disk=LiveTier(), nfs=LiveTier()))
    world.put(1)
    world.settle()
    assert [len(tier.objects) for tier in world.tiers] == [2, 1]


def test_what_exceeds_the_bound_of_pending_bytes_is_dropped_and_counted() -> None:
    world = World(values=live(disk=LiveTier(max_pending_store_bytes=2 * PAGE)))
    world.engine()
    for chunk in range(4):
        world.put(chunk)
    while world.io.run_all("hash"):
        world.pump()
    assert len(world.calls("write:")) == 2
    assert world.counted("tier_writes_dropped", "disk", "too_many_pending") == 2
    assert world.store.tier_reports()[1].pending_store_bytes == 2 * PAGE
    world.settle()
    assert len(world.tier.objects) == 2
    assert world.store.tier_reports()[1].pending_store_bytes == 0


def test_what_was_dropped_is_written_when_it_is_wanted_again() -> None:
    world = World(values=live(disk=LiveTier(max_pending_store_bytes=0)))
    world.engine()
    world.put(0)
    world.settle()
    world.store.configure(live(disk=LiveTier()))
    world.load(0)
    world.settle()
    assert list(world.tier.objects) == [ref(0)]


def test_hung_writes_never_pin_more_than_half_of_the_pool() -> None:
    world = World(slots=16)
    world.engine()
    for chunk in range(30):
        if world.credits():
            world.put(chunk)
        world.io.run_all("hash")
        world.advance(0.11)
    assert world.store.pinned_bytes == 8 * PAGE
    assert len(world.credits()) >= 1
    world.lower(100)
    promotion = world.promote(100)
    world.io.run_all("read:")
    world.pump()
    assert world.ends(promotion)[0].usable == 1


def test_an_unsealed_backlog_never_pins_more_than_half_of_the_pool() -> None:
    world = World(slots=16)
    world.engine()
    for chunk in range(30):
        world.put(chunk)
        world.advance(0.11)
    assert world.store.pinned_bytes == 8 * PAGE
    assert world.counted("checksums_dropped") > 0
    world.settle()
    assert world.store.pending_stores() == 0


def test_a_full_tier_costs_the_write_and_does_not_open_the_breaker() -> None:
    world = World(values=live(threshold=1, disk=LiveTier()))
    world.engine()
    world.tier.fail = lambda: TierNoSpaceError("ENOSPC")
    world.put(0)
    world.settle()
    assert world.counted("tier_writes_failed", "disk", "no_space") == 1
    assert world.store.tier_reports()[1].state == "Healthy"
    assert world.store.pinned_bytes == 0


def test_an_object_that_the_tier_has_is_not_written_again() -> None:
    world = World()
    world.engine()
    world.lower(0)
    world.put(0)
    world.settle()
    assert "write" not in world.tier.calls


def test_what_came_from_one_tier_is_offered_to_the_others_when_it_is_loaded() -> None:
    world = World(tiers=("disk", "nfs"))
    world.engine()
    world.lower(0, tier=1)
    promotion = world.promote(0)
    world.settle()
    assert world.tiers[0].objects == {}
    world.load(0, promotion=promotion)
    world.settle()
    assert world.tiers[0].objects[ref(0)][1] == object_meta(NAMESPACE, ref(0).key, (PAGE,))


def test_writes_of_an_engine_that_went_are_finished() -> None:
    world = World()
    world.engine()
    world.put(0)
    world.store.close_engine("e", False)
    world.settle()
    assert list(world.tier.objects) == [ref(0)]
    world.engine("e1")
    assert world.bits(0) == 3


def test_pending_stores_count_what_waits_for_a_checksum_or_a_write() -> None:
    world = World(tiers=("disk", "nfs"))
    world.engine()
    world.put(0)
    assert world.store.pending_stores() == 1
    world.io.run_all("hash")
    world.pump()
    assert world.store.pending_stores() == 2
    world.settle()
    assert world.store.pending_stores() == 0


def test_a_failed_write_leaves_the_object_in_ram() -> None:
    world = World()
    world.engine()
    world.tier.fail = lambda: TierUnavailableError("EIO")
    world.put(0)
    world.settle()
    assert len(world.load(0).slots) == 1
    assert world.bits(0) == 1


def test_what_was_sealed_while_a_tier_was_opening_is_written_once_it_is_open() -> None:
    world = World(opened=False)
    world.engine()
    world.put(0)
    world.io.run_all("hash")
    world.pump()
    assert world.calls("write:") == []
    world.settle()
    assert ref(0) in world.tier.objects
    assert world.bits(0) == 3


def test_what_was_dropped_while_a_breaker_was_open_is_written_once_it_has_closed() -> None:
    world = World(values=live(threshold=1, period=10, disk=LiveTier()))
    world.engine()
    world.tier.fail = TierUnavailableError("gone")
    world.put(0)
    world.settle()
    assert world.store.tier_reports()[1].state == "BreakerOpen"
    world.tier.fail = None
    world.advance(10.0)
    world.settle()
    assert ref(0) in world.tier.objects
