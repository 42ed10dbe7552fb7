"""A tier of several volumes in the store: each fails, hangs and fills up by itself."""

import os

from tests.support.manual_executor import ManualCall
from tests.unit.store.store_fixture import NAMESPACE, StoreFixture, WatchedTier, block_hash, live

from kvtier.config.models import LiveTier
from kvtier.errors import TierNoSpaceError, TierUnavailableError
from kvtier.store.types import PromotionOutcome

DISKS = ("nvme0", "nvme1", "nvme2")


def fixture(slots: int = 96, disks: tuple[str, ...] = DISKS, **settings: int) -> StoreFixture:
    capacities = dict.fromkeys(disks, 1 << 30)
    tier = LiveTier(capacity_bytes=len(disks) << 30, volume_capacity_bytes=capacities, **settings)
    found = StoreFixture(
        slots,
        values=live(threshold=3, disk=tier),
        read_threads=2,
        volumes={"disk": disks},
    )
    found.engine()
    return found


def holder(found: StoreFixture, chunk: int) -> WatchedTier | None:
    key = b"\0" + block_hash(chunk)
    for tier in found.tiers:
        if any(ref.key == key for ref in tier.objects):
            return tier
    return None


def on(found: StoreFixture, volume: int, chunks: range) -> list[int]:
    return [chunk for chunk in chunks if holder(found, chunk) is found.tiers[volume]]


def state(found: StoreFixture) -> tuple[str, dict[str, str]]:
    report = found.store.tier_states()[1]
    return report.state, {each.name: each.state for each in report.volumes}


def store(found: StoreFixture, chunks: range) -> None:
    for chunk in chunks:
        found.put(chunk, previous=chunk - 1 if chunk else None)
    found.settle()
    found.advance(0.2)
    found.settle()


def forget_ram(found: StoreFixture) -> None:
    """As a pod that was replaced: what is in files is all there is."""
    found._table_file = os.memfd_create("slots")
    found.restart()
    found.engine()
    found.settle()


def fail_reads(found: StoreFixture, volume: int, chunks: range) -> None:
    found.tiers[volume].fail = lambda: TierUnavailableError("EIO")
    for chunk in on(found, volume, chunks)[:3]:
        found.promote(chunk)
        found.settle("read:")


def test_objects_are_spread_and_all_are_served() -> None:
    found = fixture()
    store(found, range(48))
    assert all(len(tier.objects) >= 8 for tier in found.tiers)
    assert sum(len(tier.objects) for tier in found.tiers) == 48
    forget_ram(found)
    promotion = found.promote(*range(40))
    found.settle("read:")
    (end,) = found.ends(promotion)
    assert (end.outcome, end.usable, set(end.tiers)) == (PromotionOutcome.WHOLE, 40, {1})


def test_each_volume_has_threads_of_its_own() -> None:
    found = fixture()
    store(found, range(24))
    forget_ram(found)
    found.promote(*range(24))
    assert {call.lane for call in found.calls("read:")} == {f"read:disk/{disk}" for disk in DISKS}


def test_a_failing_volume_leaves_the_others_serving_and_its_share_is_stored_elsewhere() -> None:
    found = fixture()
    chunks = range(36)
    store(found, chunks)
    share = on(found, 1, chunks)
    forget_ram(found)
    fail_reads(found, 1, chunks)
    assert state(found) == (
        "Degraded", {"nvme0": "Healthy", "nvme1": "BreakerOpen", "nvme2": "Healthy"}
    )  # fmt: skip
    assert found.counted("breaker_opened", "disk", "unavailable") == 1
    assert found.store.usable_bits & 2, "the tier is used"
    for _ in range(5):
        found.pump()
    assert not [chunk for chunk in share if found.bits(chunk)], "what it holds is hidden"
    for chunk in set(chunks) - set(share):
        promotion = found.promote(chunk)
        found.settle("read:")
        assert found.ends(promotion)[0].usable == 1
    for chunk in share[:3]:
        found.put(chunk)
        found.settle()
        assert any(
            ref.key == b"\0" + block_hash(chunk)
            for tier in (found.tiers[0], found.tiers[2])
            for ref in tier.objects
        )


def test_a_repaired_volume_serves_again() -> None:
    found = fixture()
    chunks = range(36)
    store(found, chunks)
    share = on(found, 1, chunks)
    forget_ram(found)
    fail_reads(found, 1, chunks)
    found.pump()
    found.tiers[1].fail = None
    found.advance(61)
    found.settle("check:")
    for _ in range(3):
        found.pump()
    assert state(found)[1]["nvme1"] == "Healthy"
    assert all(found.bits(chunk) & 2 for chunk in share)
    found.advance(31)  # those that failed are not read for a while
    promotion = found.promote(share[-1])
    found.settle("read:")
    assert found.ends(promotion)[0].usable == 1


def test_what_lies_in_ram_moves_to_the_others_when_a_volume_fails() -> None:
    found = fixture()
    chunks = range(30)
    store(found, chunks)
    share = on(found, 1, chunks)
    found.tiers[1].fail = lambda: TierUnavailableError("EIO")
    for chunk in range(100, 130):
        found.put(chunk)
        found.settle("hash")
        found.settle("write:")
    found.advance(1)
    found.settle()
    assert state(found)[1]["nvme1"] == "BreakerOpen"
    working = {ref.key for tier in (found.tiers[0], found.tiers[2]) for ref in tier.objects}
    assert all(b"\0" + block_hash(chunk) in working for chunk in share)


def test_a_hanging_volume_delays_no_read_or_write_of_the_others() -> None:
    found = fixture()
    chunks = range(30)
    store(found, chunks)
    forget_ram(found)
    hung = on(found, 1, chunks)
    found.promote(*hung[:2], budget=1.0)
    for call in found.calls("read:disk/nvme1"):
        found.io.hold(call)
    for chunk in on(found, 0, chunks) + on(found, 2, chunks):
        promotion = found.promote(chunk)
        found.settle("read:disk/nvme0")
        found.settle("read:disk/nvme2")
        assert found.ends(promotion)[0].usable == 1
    found.advance(6)
    assert state(found)[1] == {"nvme0": "Healthy", "nvme1": "BreakerOpen", "nvme2": "Healthy"}
    assert found.store.tier_states()[1].late_reads == 2
    for chunk in range(200, 220):
        found.put(chunk)
        found.settle("hash")
        found.settle("write:disk/nvme0")
        found.settle("write:disk/nvme2")
    assert not found.calls("write:disk/nvme1")
    assert all(holder(found, chunk) is not None for chunk in range(200, 220))


def test_hanging_writes_of_one_volume_leave_the_others_their_part_of_the_queue() -> None:
    found = fixture(slots=96, max_pending_store_bytes=6 * 4096)
    for chunk in range(60):
        found.put(chunk)
        found.settle("hash")
        found.settle("write:disk/nvme0")
        found.settle("write:disk/nvme2")
    assert len(found.calls("write:disk/nvme1")) == 2
    stored = len(found.tiers[0].objects) + len(found.tiers[2].objects)
    waiting = found.store.pending_stores()
    assert stored + waiting == 60
    assert stored >= 30
    found.settle()
    assert sum(len(tier.objects) for tier in found.tiers) == 60


def _run_others(found: StoreFixture) -> None:
    for lane in ("hash", "write:disk/nvme0", "write:disk/nvme2", "maintain:"):
        found.settle(lane)


def _hang_writes(found: StoreFixture, chunks: range) -> list[ManualCall]:
    """Stores chunks, while writes to the second volume hang."""
    for chunk in chunks:
        found.put(chunk)
        found.settle("hash")
        for call in found.calls("write:disk/nvme1")[:2]:
            found.io.hold(call)
        _run_others(found)
    return found.calls("write:disk/nvme1")[:2]


def test_a_volume_whose_writes_hang_is_suspended_though_nothing_is_read() -> None:
    found = fixture(slots=96)
    hung = _hang_writes(found, range(60))
    assert state(found)[1]["nvme1"] == "Healthy"
    for _ in range(20):
        found.advance(5)
        _run_others(found)
    assert state(found)[1] == {"nvme0": "Healthy", "nvme1": "BreakerOpen", "nvme2": "Healthy"}
    assert found.counted("breaker_opened", "disk", "hung") == 1
    stored = [chunk for chunk in range(60) if holder(found, chunk) is not None]
    assert stored == list(range(60)), "files hold all that RAM holds, what hangs included"
    found.check_accounts()
    # The mount works again.
    for call in hung:
        found.io.run(call)
    for _ in range(20):
        found.advance(5)
        found.settle()
    assert state(found)[0] == "Healthy"
    assert found.store.pending_stores() == 0
    found.check_accounts()


def test_writes_that_hang_in_a_tier_of_one_volume_are_reported_and_reads_go_on() -> None:
    found = StoreFixture(48, values=live(threshold=3, disk=LiveTier()))
    found.engine()
    found.put_in_tier(100)
    found.put(0)
    found.settle("hash")
    (hung,) = found.calls("write:")
    found.io.hold(hung)
    found.advance(31)
    found.settle("maintain:")
    assert found.store.tier_states()[1].state == "Degraded"
    promotion = found.promote(100)
    found.settle("read:")
    assert found.ends(promotion)[0].usable == 1
    found.io.run(hung)
    found.settle()
    assert found.store.tier_states()[1].state == "Healthy"


def test_a_slow_write_is_late_only_at_three_times_its_usual_time() -> None:
    found = fixture(slots=96, disks=("nvme0", "nvme1"))
    for chunk in range(4):
        found.put(chunk)
        found.settle("hash")
        for call in found.calls("write:"):
            found.io.hold(call)
            found.advance(29)
            found.io.run(call)
            found.pump()
    found.put(50)
    found.settle("hash")
    for call in found.calls("write:"):
        found.io.hold(call)
    found.advance(80)
    assert state(found)[0] == "Healthy"
    found.advance(100)
    assert state(found)[0] == "Degraded"


def test_a_full_volume_gets_no_new_objects_for_a_while() -> None:
    found = fixture(slots=96)
    found.tiers[1].fail = lambda: TierNoSpaceError("full")
    for chunk in range(60):
        found.put(chunk)
        found.settle()
    assert state(found)[0] == "Healthy"
    dropped = 60 - len(found.tiers[0].objects) - len(found.tiers[2].objects)
    assert dropped == 1 == found.counted("tier_writes_failed", "disk", "no_space")
    found.tiers[1].fail = None
    found.advance(31)
    for chunk in range(300, 320):
        found.put(chunk)
        found.settle()
    assert found.tiers[1].objects


def test_a_volume_that_cannot_be_opened_leaves_the_others() -> None:
    found = fixture()
    store(found, range(24))
    for tier in found.tiers:
        tier.fail = None
    found.tiers[0].fail = lambda: TierUnavailableError("no such device")
    forget_ram(found)
    for _ in range(3):
        found.pump()
    assert state(found) == (
        "Degraded", {"nvme0": "BreakerOpen", "nvme1": "Healthy", "nvme2": "Healthy"}
    )  # fmt: skip
    served = [chunk for chunk in range(24) if found.bits(chunk) & 2]
    assert served == sorted(on(found, 1, range(24)) + on(found, 2, range(24)))
    found.tiers[0].fail = None
    found.advance(61)
    found.settle("maintain:")
    for _ in range(3):
        found.pump()
    assert all(found.bits(chunk) & 2 for chunk in range(24))


def test_a_volume_that_never_opens_loses_its_share_after_a_minute() -> None:
    capacities = dict.fromkeys(DISKS, 1 << 30)
    found = StoreFixture(
        96,
        values=live(disk=LiveTier(capacity_bytes=3 << 30, volume_capacity_bytes=capacities)),
        volumes={"disk": DISKS},
        opened=False,
    )
    (hung,) = found.calls("maintain:disk/nvme1")
    found.io.hold(hung)
    for call in found.calls("maintain:"):
        if call is not hung:
            found.io.run(call)
    found.pump()
    found.engine()
    for chunk in range(30):
        found.put(chunk)
        found.settle("hash")
        found.settle("write:")
    stored = len(found.tiers[0].objects) + len(found.tiers[2].objects)
    assert stored < 30, "it may only take long to be scanned"
    found.clock.now += 61
    for chunk in range(100, 120):
        found.put(chunk)
        found.settle("hash")
        found.settle("write:")
    assert all(holder(found, chunk) is not None for chunk in range(100, 120))


def test_all_volumes_failed_is_a_failed_tier() -> None:
    found = fixture()
    chunks = range(36)
    store(found, chunks)
    forget_ram(found)
    for volume in range(3):
        fail_reads(found, volume, chunks)
    assert state(found)[0] == "BreakerOpen"
    assert not found.store.usable_bits & 2


def test_an_object_in_two_volumes_stays_known_until_both_have_lost_it() -> None:
    found = fixture()
    key = b"\0" + block_hash(5)
    for tier in found.tiers[:2]:
        tier.put(NAMESPACE, key, (4096,))
    found.pump()
    found.tiers[0].drop(NAMESPACE, key)
    found.pump()
    assert found.bits(5) & 2
    found.tiers[1].drop(NAMESPACE, key)
    found.pump()
    assert not found.bits(5)


def test_capacities_are_live_and_one_that_is_not_named_stays() -> None:
    found = fixture()
    capacities = {"nvme0": 5 << 20, "nvme1": 7 << 20, "removed": 1}
    tier = LiveTier(capacity_bytes=12 << 20, volume_capacity_bytes=capacities, min_free_percent=9)
    found.store.configure(live(disk=tier))
    sizes = [each.limits.capacity_bytes for each in found.tiers if each.limits is not None]
    assert sizes == [5 << 20, 7 << 20, 1 << 30]
    assert all(each.limits and each.limits.min_free_percent == 9 for each in found.tiers)


def test_the_cost_of_a_tier_is_that_of_its_volumes_together() -> None:
    found = fixture()
    chunks = range(60)
    store(found, chunks)
    forget_ram(found)
    for start in range(0, 60, 6):
        found.promote(*range(start, start + 6))
        for _ in range(6):
            found.clock.now += 0.001
            found.settle("read:")
    group = found.store._tiers.groups[0]
    estimate, threads, queued, _ = group.load(found.clock.now)
    slowest = min(
        each.bytes_per_second
        for member in group.members
        if (each := member.model.estimate(found.clock.now)) is not None
    )
    assert estimate is not None
    assert (estimate.bytes_per_second, threads, queued) == (3 * slowest, 6, 0)


def test_an_object_larger_than_a_volumes_part_of_the_queue_is_written() -> None:
    found = fixture(max_pending_store_bytes=4096)
    for chunk in range(12):
        found.put(chunk)
    found.settle("hash")
    assert len(found.calls("write:")) == 1
    found.settle()
    assert sum(len(tier.objects) for tier in found.tiers) == 12
