"""Write-through to secondary tiers: which objects are written or dropped, and when."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.unit.store.store_fixture import (
    CHECKSUMS,
    NAMESPACE,
    PAGE,
    StoreFixture,
    WatchedTier,
    block_hash,
    live,
    object_meta,
)

from kvtier.config.models import LiveTier, StorePolicy
from kvtier.errors import TierNoSpaceError, TierQuotaError, TierUnavailableError
from kvtier.store import write_through
from kvtier.store.admission import SeenKeys
from kvtier.store.state import Entry
from kvtier.store.types import PresenceChanged
from kvtier.store.write_through import FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS
from kvtier.tiers.base import ObjectMeta, ObjectRef


def ref(chunk: int) -> ObjectRef:
    return ObjectRef(NAMESPACE, b"\0" + block_hash(chunk))


def test_an_object_is_checksummed_over_the_exact_bytes_of_each_shard_and_then_written() -> None:
    fixture = StoreFixture()
    fixture.engine(shards=((100, 5000),), writers=(0, 1))
    number, slot = fixture.reserve(0)
    fixture.pool[slot : slot + 3 * PAGE] = bytes(range(256)) * (3 * PAGE // 256)
    for rank in (0, 1):
        fixture.store.deliver("e", rank, number)
    fixture.settle()
    data, meta = fixture.tier.objects[ref(0)]
    assert data == fixture.pool[slot : slot + 3 * PAGE]
    assert meta.shard_bytes == (100, 5000)
    assert meta.checksums == (
        CHECKSUMS.digest(memoryview(data)[:100]),
        CHECKSUMS.digest(memoryview(data)[PAGE : PAGE + 5000]),
    )


def test_an_object_is_visible_in_ram_at_once_and_in_a_tier_after_the_write() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.put(0)
    assert fixture.bits(0) == 1
    assert fixture.calls("write:") == []
    fixture.io.run_all("hash")
    fixture.pump()
    assert fixture.bits(0) == 1
    fixture.io.run_all("write:")
    assert PresenceChanged(NAMESPACE, b"\0" + block_hash(0), 2, True) in fixture.pump()


def test_an_object_that_waits_for_its_checksum_or_a_write_is_not_evicted() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.put(0)
    assert fixture.store.pinned_bytes == PAGE
    fixture.io.run_all("hash")
    fixture.pump()
    assert fixture.store.pinned_bytes == PAGE
    fixture.settle()
    assert fixture.store.pinned_bytes == 0


def test_policy_none_writes_nothing() -> None:
    fixture = StoreFixture(values=live(disk=LiveTier(store_policy=StorePolicy.NONE)))
    fixture.engine()
    fixture.put(0)
    fixture.settle()
    fixture.load(0)
    fixture.settle()
    assert fixture.tier.objects == {}


def test_policy_reused_writes_loaded_objects() -> None:
    fixture = StoreFixture(values=live(disk=LiveTier(store_policy=StorePolicy.REUSED)))
    fixture.engine()
    fixture.put(0)
    fixture.put(1)
    fixture.settle()
    assert fixture.tier.objects == {}
    fixture.load(1)
    fixture.settle()
    assert list(fixture.tier.objects) == [ref(1)]


def test_policy_reused_writes_objects_stored_a_second_time() -> None:
    fixture = StoreFixture(values=live(disk=LiveTier(store_policy=StorePolicy.REUSED)))
    fixture.engine()
    fixture.put(0)
    fixture.settle()
    fixture.put(0)
    fixture.settle()
    assert list(fixture.tier.objects) == [ref(0)]


def test_policy_reused_writes_what_is_stored_again_after_it_has_left_ram() -> None:
    fixture = StoreFixture(values=live(disk=LiveTier(store_policy=StorePolicy.REUSED)))
    fixture.engine()
    fixture.put_prompt(0)
    for chunk in range(1, 40):
        fixture.put_prompt(chunk)
    assert fixture.bits(0) == 0
    assert fixture.tier.objects == {}
    assert fixture.counted("tier_writes_skipped", "disk", "not_reused") == 40
    fixture.put_prompt(0)
    assert list(fixture.tier.objects) == [ref(0)]


def test_policy_reused_writes_the_beginning_of_a_prefix_that_was_loaded_in_part() -> None:
    fixture = StoreFixture(values=live(disk=LiveTier(store_policy=StorePolicy.REUSED)))
    fixture.engine()
    fixture.put_prompt(0, 1, 2, 3, 4)
    # The engine has the chunks before these in GPU memory, and loads no more than it needs.
    fixture.load(2, 3)
    fixture.settle()
    assert list(fixture.tier.objects) == [ref(0), ref(1), ref(2), ref(3)]


def test_what_was_stored_is_remembered_for_a_bounded_time() -> None:
    seen = SeenKeys(keys=1_000)
    keys = [block_hash(number) for number in range(3_000)]
    assert not any(seen.note(NAMESPACE, key) for key in keys[:1_000])
    assert all(seen.note(NAMESPACE, key) for key in keys[:1_000])
    assert not seen.note("b" * 32, keys[0])
    for key in keys[1_000:]:
        seen.note(NAMESPACE, key)
    assert all(seen.note(NAMESPACE, key) for key in keys[2_000:])
    assert not seen.note(NAMESPACE, keys[1])


def test_each_tier_follows_its_own_policy_and_a_change_counts_at_once() -> None:
    values = live(
        disk=LiveTier(store_policy=StorePolicy.ALL), nfs=LiveTier(store_policy=StorePolicy.NONE)
    )
    fixture = StoreFixture(tiers=("disk", "nfs"), values=values)
    fixture.engine()
    fixture.put(0)
    fixture.settle()
    assert [len(tier.objects) for tier in fixture.tiers] == [1, 0]
    fixture.store.configure(live(disk=LiveTier(), nfs=LiveTier()))
    fixture.put(1)
    fixture.settle()
    assert [len(tier.objects) for tier in fixture.tiers] == [2, 2], "what lies in RAM counts too"


def test_writes_beyond_the_pending_bytes_limit_wait_and_are_written_later() -> None:
    fixture = StoreFixture(values=live(disk=LiveTier(max_pending_store_bytes=2 * PAGE)))
    fixture.engine()
    for chunk in range(4):
        fixture.put(chunk)
    while fixture.io.run_all("hash"):
        fixture.pump()
    assert len(fixture.calls("write:")) == 2
    assert fixture.counted("tier_writes_postponed", "disk") == 2
    assert fixture.counted("tier_writes_dropped", "disk") == 0
    assert fixture.store.tier_states()[1].pending_store_bytes == 2 * PAGE
    fixture.settle()
    assert len(fixture.tier.objects) == 4
    assert fixture.store.tier_states()[1].pending_store_bytes == 0


def test_after_a_burst_a_tier_holds_everything_that_ram_holds() -> None:
    fixture = StoreFixture(slots=300, values=live(disk=LiveTier(max_pending_store_bytes=16 * PAGE)))
    fixture.engine()
    fixture.fill(200)
    assert len(fixture.tier.objects) == 200
    assert fixture.store.pinned_bytes == 0


def test_an_object_that_is_evicted_before_its_write_is_counted() -> None:
    fixture = StoreFixture(slots=12, values=live(disk=LiveTier(max_pending_store_bytes=2 * PAGE)))
    fixture.engine()
    for chunk in range(40):
        fixture.put(chunk)
        while fixture.io.run_all("hash"):
            fixture.pump()
        fixture.advance(0.11)
    fixture.settle()
    dropped = fixture.counted("tier_writes_dropped", "disk", "evicted")
    assert dropped > 0
    dropped += fixture.counted("checksums_dropped", "", "evicted")
    assert len(fixture.tier.objects) + dropped == fixture.counted("stores_committed")


@pytest.mark.parametrize("stores_per_write", [1, 2, 5])
def test_objects_are_evicted_unwritten_only_while_the_tier_takes_no_more(
    stores_per_write: int,
) -> None:
    limit = 4 * PAGE
    fixture = StoreFixture(slots=24, values=live(disk=LiveTier(max_pending_store_bytes=limit)))
    fixture.engine()
    unwritten = seen = 0
    for chunk in range(120):
        fixture.put(chunk)
        while fixture.io.run_all("hash"):
            fixture.pump()
        notices = fixture.eviction_notices()
        for key in (key for notice in notices[seen:] for key in notice.keys):
            if ObjectRef(NAMESPACE, key) not in fixture.tier.objects:
                unwritten += 1
                assert fixture.store.tier_states()[1].pending_store_bytes == limit
        seen = len(notices)
        if chunk % stores_per_write == 0:
            for call in fixture.calls("write:")[:1]:
                fixture.io.run(call)
        fixture.advance(0.11)
    assert bool(unwritten) == (stores_per_write > 1)
    assert fixture.counted("checksums_dropped", "", "evicted") == 0


def test_the_beginning_of_a_loaded_prefix_is_touched_last_in_the_tiers() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.fill(3)
    fixture.load(0, 1, 2)
    assert fixture.tier.touched == [ref(2), ref(1), ref(0)]


def test_a_dropped_write_is_retried_on_the_next_use() -> None:
    fixture = StoreFixture(values=live(disk=LiveTier(max_pending_store_bytes=0)))
    fixture.engine()
    fixture.put(0)
    fixture.settle()
    fixture.store.configure(live(disk=LiveTier()))
    fixture.load(0)
    fixture.settle()
    assert list(fixture.tier.objects) == [ref(0)]


def test_hung_writes_never_pin_more_than_half_of_the_pool() -> None:
    fixture = StoreFixture(slots=16)
    fixture.engine()
    for chunk in range(30):
        if fixture.credits():
            fixture.put(chunk)
        fixture.io.run_all("hash")
        fixture.advance(0.11)
    assert fixture.store.pinned_bytes == 8 * PAGE
    assert len(fixture.credits()) >= 1
    fixture.put_in_tier(100)
    promotion = fixture.promote(100)
    fixture.io.run_all("read:")
    fixture.pump()
    assert fixture.ends(promotion)[0].usable == 1


def test_a_checksum_backlog_never_pins_more_than_half_of_the_pool() -> None:
    fixture = StoreFixture(slots=16)
    fixture.engine()
    for chunk in range(30):
        fixture.put(chunk)
        fixture.advance(0.11)
    assert fixture.store.pinned_bytes == 8 * PAGE
    assert fixture.counted("checksums_postponed") > 0
    fixture.settle()
    assert fixture.store.pending_stores() == 0


def test_a_full_tier_costs_the_write_and_does_not_open_the_breaker() -> None:
    fixture = StoreFixture(values=live(threshold=1, disk=LiveTier()))
    fixture.engine()
    fixture.tier.fail = lambda: TierNoSpaceError("ENOSPC")
    fixture.put(0)
    fixture.settle()
    assert fixture.counted("tier_writes_failed", "disk", "no_space") == 1
    assert fixture.store.tier_states()[1].state == "Healthy"
    assert fixture.store.pinned_bytes == 0


def test_an_object_that_the_tier_has_is_not_written_again() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.put_in_tier(0)
    fixture.put(0)
    fixture.settle()
    assert "write" not in fixture.tier.calls


def test_an_object_read_from_one_tier_is_written_to_the_others_when_it_is_loaded() -> None:
    fixture = StoreFixture(tiers=("disk", "nfs"))
    fixture.engine()
    fixture.put_in_tier(0, tier=1)
    promotion = fixture.promote(0)
    fixture.settle()
    assert fixture.tiers[0].objects == {}
    fixture.load(0, promotion=promotion)
    fixture.settle()
    assert fixture.tiers[0].objects[ref(0)][1] == object_meta(NAMESPACE, ref(0).key, (PAGE,))


def test_writes_of_an_engine_that_exited_are_completed() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.put(0)
    fixture.store.close_engine("e", False)
    fixture.settle()
    assert list(fixture.tier.objects) == [ref(0)]
    fixture.engine("e1")
    assert fixture.bits(0) == 3


def test_pending_stores_count_objects_that_wait_for_a_checksum_or_a_write() -> None:
    fixture = StoreFixture(tiers=("disk", "nfs"))
    fixture.engine()
    fixture.put(0)
    assert fixture.store.pending_stores() == 1
    fixture.io.run_all("hash")
    fixture.pump()
    assert fixture.store.pending_stores() == 2
    fixture.settle()
    assert fixture.store.pending_stores() == 0


def test_a_failed_write_does_not_affect_the_object_in_ram() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.tier.fail = lambda: TierUnavailableError("EIO")
    fixture.put(0)
    fixture.settle()
    assert len(fixture.load(0).slots) == 1
    assert fixture.bits(0) == 1


def test_objects_checksummed_while_a_tier_was_opening_are_written_once_it_is_open() -> None:
    fixture = StoreFixture(opened=False)
    fixture.engine()
    fixture.put(0)
    fixture.io.run_all("hash")
    fixture.pump()
    assert fixture.calls("write:") == []
    fixture.settle()
    assert ref(0) in fixture.tier.objects
    assert fixture.bits(0) == 3


def test_writes_dropped_while_a_breaker_was_open_are_written_once_it_closes() -> None:
    fixture = StoreFixture(values=live(threshold=1, period=10, disk=LiveTier()))
    fixture.engine()
    fixture.tier.fail = TierUnavailableError("gone")
    fixture.put(0)
    fixture.settle()
    assert fixture.store.tier_states()[1].state == "BreakerOpen"
    fixture.tier.fail = None
    fixture.advance(10.0)
    fixture.settle()
    assert ref(0) in fixture.tier.objects


def test_a_write_that_failed_is_tried_again_and_then_all_that_failed() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.tier.fail = lambda: TierNoSpaceError("no grant within 2 s")
    for chunk in range(8):
        fixture.put(chunk)
        fixture.settle()
    failed = fixture.counted("tier_writes_failed", "disk", "no_space")
    assert failed == 8
    assert fixture.store.pending_stores() == 0, "a shutdown does not wait for what has failed"
    fixture.advance(FIRST_RETRY_SECONDS - 0.1)
    assert fixture.calls("write:") == []
    fixture.tier.fail = None
    fixture.advance(0.2)
    assert len(fixture.calls("write:")) == 1, "a single one is tried"
    fixture.settle()
    assert set(fixture.tier.objects) == {ref(chunk) for chunk in range(8)}
    assert fixture.store.pending_stores() == 0
    assert fixture.counted("tier_writes_failed", "disk", "no_space") == failed


def test_while_writes_fail_one_at_a_time_is_tried_at_growing_intervals() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.tier.fail = lambda: TierNoSpaceError("full")
    for chunk in range(8):
        fixture.put(chunk)
        fixture.settle()
    tried = []
    for second in range(1_000):
        fixture.advance(1.0)
        calls = len(fixture.calls("write:"))
        assert calls <= 1
        if calls:
            tried.append(second)
        fixture.settle()
    waits = [later - earlier for earlier, later in pairwise(tried)]
    assert waits == sorted(waits)
    assert waits[0] <= 2 * FIRST_RETRY_SECONDS + 1
    assert len(tried) < 20
    fixture.tier.fail = None
    fixture.advance(LONGEST_RETRY_SECONDS)
    fixture.settle()
    assert set(fixture.tier.objects) == {ref(chunk) for chunk in range(8)}


def test_an_object_that_can_never_be_written_does_not_keep_others_from_it() -> None:
    class Refuses(WatchedTier):
        def write(self, ref: ObjectRef, payload: memoryview, meta: ObjectMeta) -> None:
            if ref.key == b"\0" + block_hash(0):
                raise TierNoSpaceError("too large")
            super().write(ref, payload, meta)

    fixture = StoreFixture(tier_type=Refuses)
    fixture.engine()
    fixture.tier.fail = lambda: TierNoSpaceError("full")
    for chunk in range(4):
        fixture.put(chunk)
        fixture.settle()
    fixture.tier.fail = None
    for _ in range(10):
        fixture.advance(LONGEST_RETRY_SECONDS)
        fixture.settle()
    assert set(fixture.tier.objects) == {ref(chunk) for chunk in range(1, 4)}


def test_what_exceeds_a_tenants_share_is_not_tried_again() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.tier.fail = lambda: TierQuotaError("the tenant's share is used up")
    fixture.put(0)
    fixture.settle()
    assert fixture.store.pending_stores() == 0
    fixture.advance(10 * LONGEST_RETRY_SECONDS)
    assert fixture.calls("write:") == []


def test_a_failed_write_of_an_object_that_has_left_ram_is_forgotten() -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.tier.fail = lambda: TierNoSpaceError("full")
    for chunk in range(40):
        fixture.put_prompt(chunk)
    fixture.tier.fail = None
    for _ in range(4):
        fixture.advance(LONGEST_RETRY_SECONDS)
        fixture.settle()
    held = {ref(chunk) for chunk in range(40) if fixture.bits(chunk) & 1}
    assert held
    assert set(fixture.tier.objects) == held
    assert fixture.store.pending_stores() == 0


def test_no_call_considers_more_than_a_bounded_part_of_what_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(write_through, "CONSIDERED_PER_RUN", 4)
    values = live(disk=LiveTier(max_write_bytes_per_second=1))
    fixture = StoreFixture(slots=64, values=values)
    fixture.engine()
    for chunk in range(40):
        fixture.put(chunk)
        fixture.settle()
    assert fixture.store.pending_stores() > 30
    considered: list[int] = []
    writes = fixture.store._writes
    maybe_write = writes.maybe_write

    def counted(entry: Entry) -> None:
        considered[-1] += 1
        maybe_write(entry)

    monkeypatch.setattr(writes, "maybe_write", counted)
    considered.append(0)
    fixture.store.configure(live(disk=LiveTier(store_policy=StorePolicy.NONE)))
    while (wake := fixture.store.next_wake()) is not None and wake <= fixture.clock.now:
        considered.append(0)
        fixture.pump()
    assert sum(considered) > 30
    assert max(considered) <= 4
    assert fixture.store.pending_stores() == 0
