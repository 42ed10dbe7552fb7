"""When a lower tier is given up for a while, and how it comes back."""

from __future__ import annotations

import pytest
from tests.support.manual_executor import ManualClock
from tests.unit.store.store_world import World, live

from kvtier.config.models import LiveTier
from kvtier.errors import TierNoSpaceError, TierUnavailableError, TierUnverifiableError
from kvtier.store.context import MAX_KINDS, UnexpectedErrors
from kvtier.store.types import RAM_BITS, PresenceChanged, PromotionOutcome, UsableTiersChanged
from kvtier.tiers.base import TierUsage


def failing(world: World) -> None:
    world.tier.fail = lambda: TierUnavailableError("EIO")


def state(world: World) -> str:
    return world.store.tier_reports()[1].state


def broken(threshold: int = 3) -> World:
    """A world whose tier has just failed so often in a row that its breaker opened."""
    world = World(values=live(threshold=threshold, period=10, disk=LiveTier()))
    world.engine()
    world.lower(*range(10))
    failing(world)
    for chunk in range(threshold):
        world.promote(chunk)
        world.settle()
    return world


def test_failures_in_a_row_open_the_breaker_and_nothing_is_read_or_written() -> None:
    world = broken()
    assert state(world) == "BreakerOpen"
    assert world.store.tier_reports()[1].cause == "unavailable"
    assert world.counted("breaker_opened", "disk", "unavailable") == 1
    promotion = world.promote(9)
    assert world.ends(promotion)[0].outcome is PromotionOutcome.FAILED
    world.put(20)
    world.io.run_all("hash")
    world.pump()
    assert world.calls("read:") == world.calls("write:") == []
    assert world.counted("tier_writes_dropped", "disk", "breaker") == 1


def test_a_success_between_failures_begins_the_row_anew() -> None:
    world = World(values=live(threshold=2, disk=LiveTier()))
    world.engine()
    world.lower(0, 1, 2)
    for chunk, fails in ((0, True), (1, False), (2, True)):
        world.tier.fail = None
        if fails:
            failing(world)
        world.promote(chunk)
        world.settle()
    assert state(world) == "Degraded"


def test_after_the_period_one_probe_decides() -> None:
    world = broken()
    world.advance(9.9)
    assert world.calls("check:") == []
    world.advance(0.1)
    assert len(world.calls("check:")) == 1
    world.io.run_all("check:")
    world.pump()
    assert state(world) == "BreakerOpen"
    world.tier.fail = None
    world.advance(10.0)
    world.io.run_all("check:")
    world.pump()
    assert state(world) == "Healthy"
    assert world.counted("breaker_closed", "disk") == 1
    promotion = world.promote(9)
    world.settle()
    assert world.ends(promotion)[0].outcome is PromotionOutcome.WHOLE


def test_a_tier_that_has_no_room_for_its_probe_can_be_read() -> None:
    world = broken()
    world.tier.fail = lambda: TierNoSpaceError("ENOSPC")
    world.advance(10.0)
    world.io.run_all("check:")
    world.pump()
    assert state(world) == "Healthy"
    world.tier.fail = None
    promotion = world.promote(9)
    world.settle()
    assert world.ends(promotion)[0].outcome is PromotionOutcome.WHOLE


def test_a_period_that_is_changed_holds_for_the_breaker_that_is_open() -> None:
    world = broken()
    world.tier.fail = None
    world.advance(4.0)
    world.store.configure(live(threshold=3, period=86_400, disk=LiveTier()))
    world.advance(60.0)
    assert world.calls("check:") == []
    # Longer ago than that already: it is looked at now, and once.
    world.store.configure(live(threshold=3, period=5, disk=LiveTier()))
    world.advance(0.0)
    assert len(world.calls("check:")) == 1
    world.store.configure(live(threshold=3, period=1, disk=LiveTier()))
    world.advance(20.0)
    assert len(world.calls("check:")) == 1
    world.io.run_all("check:")
    world.pump()
    assert state(world) == "Healthy"
    world.advance(200.0)
    assert world.calls("check:") == []


def test_a_threshold_that_is_changed_leaves_an_open_breaker_open_and_holds_for_the_next_row() -> (
    None
):
    world = broken()
    world.store.configure(live(threshold=1_000, period=10, disk=LiveTier()))
    world.pump()
    assert state(world) == "BreakerOpen"
    world.tier.fail = None
    world.advance(10.0)
    world.io.run_all("check:")
    world.pump()
    assert state(world) == "Healthy"
    failing(world)
    for chunk in range(5, 9):
        world.promote(chunk)
        world.settle()
    assert state(world) == "Degraded"
    # Fewer than it has failed already: the next one decides.
    world.store.configure(live(threshold=2, period=10, disk=LiveTier()))
    assert state(world) == "Degraded"
    world.promote(9)
    world.settle()
    assert state(world) == "BreakerOpen"


def test_a_probe_that_hangs_is_not_followed_by_another() -> None:
    world = broken()
    world.advance(10.0)
    world.io.hold(world.calls("check:")[0])
    world.advance(100.0)
    assert len(world.calls("check:")) == 1


def test_what_waits_at_a_tier_whose_breaker_opens_is_taken_back_at_once() -> None:
    world = World(values=live(threshold=1, disk=LiveTier()))
    world.engine()
    world.lower(0, 1)
    failing(world)
    failed, waiting = world.promote(0), world.promote(1, budget=100.0)
    world.io.run(world.calls("read:")[0])
    world.pump()
    assert world.ends(failed)[0].outcome is PromotionOutcome.FAILED
    assert world.ends(waiting)[0].outcome is PromotionOutcome.FAILED
    assert world.store.accounts().reading == 0


def test_a_deadline_missed_by_a_read_that_has_only_just_begun_is_not_the_tiers_failure() -> None:
    world = World(values=live(threshold=1, disk=LiveTier()))
    world.engine()
    world.lower(0)
    world.promote(0, budget=0.5)
    world.advance(0.4)
    world.io.hold(world.calls("read:")[0])
    world.advance(0.2)
    assert state(world) == "Healthy"


def test_a_deadline_missed_by_a_read_that_waited_in_its_queue_is_not_the_tiers_failure() -> None:
    world = World(values=live(threshold=1, disk=LiveTier()))
    world.engine()
    world.lower(0)
    world.promote(0, budget=3.0)
    world.advance(3.0)
    assert state(world) == "Healthy"


def test_a_deadline_missed_by_a_read_that_has_itself_taken_too_long_is_the_tiers_failure() -> None:
    world = World(values=live(threshold=1, disk=LiveTier()))
    world.engine()
    world.lower(0)
    world.promote(0, budget=1.5)
    world.io.hold(world.calls("read:")[0])
    world.advance(1.5)
    assert state(world) == "BreakerOpen"
    assert world.counted("tier_late_reads", "disk") == 1


@pytest.mark.parametrize(("limit", "begins_at"), [(1, 0.0), (5, 4.5)])
def test_a_read_that_hangs_is_found_late_also_after_its_limit_has_passed(
    limit: int, begins_at: float
) -> None:
    # Its limit is no longer than what a read may take, or it waited for a thread: then nobody's deadline finds it late.
    world = World(
        values=live(threshold=100, period=10, disk=LiveTier(load_timeout_seconds=limit)),
        read_threads=2,
    )
    world.engine()
    world.lower(0)
    world.promote(0, budget=0.5)
    world.promote(0, budget=float(limit))
    world.advance(begins_at)
    world.io.hold(world.calls("read:")[0])
    world.advance(limit - begins_at)
    assert state(world) == "Healthy"
    world.advance(2.0)
    assert state(world) == "BreakerOpen"
    assert world.store.tier_reports()[1].cause == "hung"
    assert world.counted("tier_late_reads", "disk") == 1
    world.advance(30.0)
    assert world.counted("tier_late_reads", "disk") == 1


def test_a_read_that_comes_after_its_limit_and_before_it_is_late_is_no_failure() -> None:
    world = World(values=live(threshold=1, disk=LiveTier(load_timeout_seconds=1)))
    world.engine()
    world.lower(0)
    world.promote(0, budget=1.0)
    world.advance(0.5)
    call = world.calls("read:")[0]
    world.io.hold(call)
    world.advance(0.6)
    world.io.run(call)
    world.pump()
    world.advance(5.0)
    assert state(world) == "Healthy"
    assert world.counted("tier_late_reads", "disk") == 0


def test_a_slow_tier_is_late_only_at_three_times_its_usual_time() -> None:
    world = World(values=live(threshold=1, disk=LiveTier(load_timeout_seconds=60)))
    world.engine()
    world.lower(*range(4))
    for chunk in range(2):
        promotion = world.promote(chunk, budget=60.0)
        call = world.calls("read:")[0]
        world.io.hold(call)
        world.advance(2.0)
        world.io.run(call)
        world.pump()
        assert world.ends(promotion)[0].outcome is PromotionOutcome.WHOLE
    world.promote(2, budget=4.0)
    world.io.hold(world.calls("read:")[0])
    world.advance(5.0)
    assert state(world) == "Healthy"
    world.promote(3, budget=7.0)
    world.io.hold(world.calls("read:")[1])
    world.advance(8.0)
    assert state(world) == "BreakerOpen"


def test_half_of_the_read_threads_hung_opens_the_breaker_whatever_the_threshold() -> None:
    world = World(values=live(threshold=100, period=10, disk=LiveTier()), read_threads=4)
    world.engine()
    world.lower(0, 1)
    world.promote(0, 1, budget=2.0)
    calls = world.calls("read:")
    for call in calls:
        world.io.hold(call)
    world.advance(2.0)
    assert state(world) == "BreakerOpen"
    assert world.store.tier_reports()[1].cause == "hung"
    assert world.store.tier_reports()[1].late_reads == 2
    world.advance(10.0)
    world.io.run_all("check:")
    world.pump()
    assert state(world) == "BreakerOpen"
    for call in calls:
        world.io.run(call)
    world.advance(10.0)
    world.io.run_all("check:")
    world.pump()
    assert state(world) == "Healthy"


def test_a_tier_that_is_not_open_yet_is_not_used_and_one_that_cannot_be_opened_is_tried_again() -> (
    None
):
    world = World(values=live(period=10, disk=LiveTier()), opened=False)
    world.engine()
    assert state(world) == "Unknown"
    failing(world)
    world.settle()
    assert state(world) == "BreakerOpen"
    world.tier.fail = None
    world.advance(10.0)
    world.settle()
    assert state(world) == "Healthy"


def test_upkeep_runs_every_few_seconds_one_at_a_time_and_not_while_the_breaker_is_open() -> None:
    world = World()
    world.advance(5.0)
    (call,) = world.calls("maintain:")
    world.io.hold(call)
    world.advance(60.0)
    assert world.calls("maintain:") == [call]
    world.io.run(call)
    world.pump()
    world.advance(5.0)
    assert len(world.calls("maintain:")) == 1


def test_objects_that_a_tier_has_no_room_to_index_are_counted_once_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(opened=False)
    left_out = 7
    monkeypatch.setattr(world.tier, "usage", lambda: TierUsage(0, 1 << 30, 5, left_out))
    world.settle("maintain:")
    assert world.counted("tier_objects_not_indexed", "disk") == 7
    left_out = 9
    for _ in range(3):
        world.advance(5.0)
        world.settle("maintain:")
    assert world.counted("tier_objects_not_indexed", "disk") == 9


def test_live_limits_reach_the_tier_at_once() -> None:
    world = World()
    world.store.configure(
        live(disk=LiveTier(capacity_bytes=77, high_watermark_percent=80, sync_data=True))
    )
    limits = world.tier.limits
    assert limits is not None
    assert (limits.capacity_bytes, limits.high_watermark_percent, limits.sync_data) == (
        77,
        80,
        True,
    )


def test_an_error_that_is_no_tier_error_is_a_failure_like_any_other() -> None:
    world = World(values=live(threshold=1, disk=LiveTier()))
    world.engine()
    world.lower(0)
    world.tier.fail = lambda: ValueError("a bug")  # type: ignore[return-value, assignment]
    promotion = world.promote(0)
    world.settle()
    assert world.ends(promotion)[0].outcome is PromotionOutcome.FAILED
    assert world.counted("tier_reads_failed", "disk", "unexpected") == 1


@pytest.mark.parametrize("name", ["ram", "disk"])
def test_every_tier_reports_its_state(name: str) -> None:
    world = World()
    world.engine()
    world.put(0)
    world.settle()
    (found,) = [tier for tier in world.store.tier_reports() if tier.name == name]
    assert found.state == "Healthy"
    assert found.objects == 1


def test_a_promotion_whose_deadline_opens_the_breaker_ends_once() -> None:
    world = World(values=live(threshold=1, disk=LiveTier()))
    world.engine()
    world.lower(0, 1)
    promotion = world.promote(0, 1, budget=2.0)
    world.io.hold(world.calls("read:")[1])
    world.advance(2.0)
    assert state(world) == "BreakerOpen"
    assert [end.outcome for end in world.ends(promotion)] == [PromotionOutcome.FAILED]
    assert world.store.pinned_bytes == 0


def usable(world: World) -> list[int]:
    return [event.bits for event in world.events if isinstance(event, UsableTiersChanged)]


def test_schedulers_are_told_in_one_word_when_a_tier_is_given_up_and_when_it_is_back() -> None:
    world = broken()
    assert usable(world) == [RAM_BITS | 2, RAM_BITS]
    assert world.store.usable_bits == RAM_BITS
    # The index keeps its keys: none of them is announced anew.
    assert world.bits(9) == 2
    before = len([e for e in world.events if isinstance(e, PresenceChanged)])
    world.tier.fail = None
    world.advance(10.0)
    world.io.run_all("check:")
    world.pump()
    assert usable(world) == [RAM_BITS | 2, RAM_BITS, RAM_BITS | 2]
    assert len([e for e in world.events if isinstance(e, PresenceChanged)]) == before


def test_a_tier_counts_from_when_it_is_open() -> None:
    world = World(opened=False)
    world.engine()
    assert (usable(world), world.store.usable_bits) == ([], RAM_BITS)
    world.settle("maintain:")
    assert usable(world) == [RAM_BITS | 2]


def test_of_two_tiers_only_the_broken_one_is_withdrawn() -> None:
    world = World(tiers=("disk", "nfs"), values=live(threshold=1, disk=LiveTier(), nfs=LiveTier()))
    world.engine()
    world.lower(0)
    failing(world)
    world.promote(0)
    world.settle()
    assert world.store.usable_bits == RAM_BITS | 4


def test_an_error_that_nobody_raises_on_purpose_is_logged_with_its_traceback_once_and_costs_a_miss(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(values=live(threshold=100, disk=LiveTier()))
    world.engine()
    world.lower(*range(12))
    world.tier.fail = lambda: ZeroDivisionError("a bug")
    for chunk in range(5):
        promotion = world.promote(chunk)
        world.settle()
        assert world.ends(promotion)[0].outcome is PromotionOutcome.FAILED
    assert world.counted("tier_reads_failed", "disk", "unexpected") == 5
    (record,) = caplog.records
    assert record.getMessage() == "tier disk: unexpected ZeroDivisionError"
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError
    world.tier.fail = lambda: KeyError("another")
    world.promote(5)
    world.settle()
    assert len(caplog.records) == 2
    world.tier.fail = lambda: ZeroDivisionError("a bug")
    world.advance(600.0)
    world.promote(6)
    world.settle()
    assert "ZeroDivisionError (" in caplog.records[-1].getMessage()


def test_errors_of_storage_are_not_logged_as_bugs(caplog: pytest.LogCaptureFixture) -> None:
    broken()
    assert caplog.records == []


def test_the_kinds_of_unexpected_errors_that_are_remembered_are_bounded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors = UnexpectedErrors(ManualClock())
    for number in range(200):
        errors.note(f"place {number}", ValueError())
    assert len(caplog.records) == MAX_KINDS


def test_an_object_whose_checksum_cannot_be_computed_is_a_miss_with_a_reason_of_its_own() -> None:
    world = World(values=live(threshold=1, disk=LiveTier()))
    world.engine()
    world.lower(0)
    world.tier.fail = lambda: TierUnverifiableError("written with xxh3")
    promotion = world.promote(0)
    world.settle()
    assert world.ends(promotion)[0].outcome is PromotionOutcome.FAILED
    assert world.counted("tier_reads_failed", "disk", "unverifiable") == 1
    assert state(world) == "Healthy"
    # Not asked for again for a while.
    assert world.ends(world.promote(0))[0].outcome is PromotionOutcome.FAILED
    assert world.counted("tier_reads_failed", "disk") == 1
