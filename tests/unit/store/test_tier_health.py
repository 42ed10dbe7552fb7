"""When a secondary tier is suspended, and how it is used again."""

from __future__ import annotations

import pytest
from tests.support.manual_executor import ManualClock
from tests.unit.store.store_fixture import StoreFixture, live

from kvtier.config.models import LiveTier
from kvtier.errors import (
    TierError,
    TierForeignError,
    TierKeyMissingError,
    TierNoSpaceError,
    TierUnavailableError,
    TierUntrustedError,
    TierUnverifiableError,
)
from kvtier.store.context import MAX_KINDS, UnexpectedErrors
from kvtier.store.types import RAM_BITS, PresenceChanged, PromotionOutcome, UsableTiersChanged
from kvtier.tiers.base import TierUsage


def failing(fixture: StoreFixture) -> None:
    fixture.tier.fail = lambda: TierUnavailableError("EIO")


def state(fixture: StoreFixture) -> str:
    return fixture.store.tier_states()[1].state


def broken(threshold: int = 3) -> StoreFixture:
    """A fixture whose tier has just failed so often in a row that its breaker opened."""
    fixture = StoreFixture(values=live(threshold=threshold, period=10, disk=LiveTier()))
    fixture.engine()
    fixture.put_in_tier(*range(10))
    failing(fixture)
    for chunk in range(threshold):
        fixture.promote(chunk)
        fixture.settle()
    return fixture


def test_consecutive_failures_open_the_breaker_and_nothing_is_read_or_written() -> None:
    fixture = broken()
    assert state(fixture) == "BreakerOpen"
    assert fixture.store.tier_states()[1].cause == "unavailable"
    assert fixture.counted("breaker_opened", "disk", "unavailable") == 1
    promotion = fixture.promote(9)
    assert fixture.ends(promotion)[0].outcome is PromotionOutcome.FAILED
    fixture.put(20)
    fixture.io.run_all("hash")
    fixture.pump()
    assert fixture.calls("read:") == fixture.calls("write:") == []
    assert fixture.counted("tier_writes_dropped", "disk", "breaker") == 1


def test_a_success_resets_the_count_of_failures() -> None:
    fixture = StoreFixture(values=live(threshold=2, disk=LiveTier()))
    fixture.engine()
    fixture.put_in_tier(0, 1, 2)
    for chunk, fails in ((0, True), (1, False), (2, True)):
        fixture.tier.fail = None
        if fails:
            failing(fixture)
        fixture.promote(chunk)
        fixture.settle()
    assert state(fixture) == "Degraded"


def test_after_the_period_one_probe_decides() -> None:
    fixture = broken()
    fixture.advance(9.9)
    assert fixture.calls("check:") == []
    fixture.advance(0.1)
    assert len(fixture.calls("check:")) == 1
    fixture.io.run_all("check:")
    fixture.pump()
    assert state(fixture) == "BreakerOpen"
    fixture.tier.fail = None
    fixture.advance(10.0)
    fixture.io.run_all("check:")
    fixture.pump()
    assert state(fixture) == "Healthy"
    assert fixture.counted("breaker_closed", "disk") == 1
    promotion = fixture.promote(9)
    fixture.settle()
    assert fixture.ends(promotion)[0].outcome is PromotionOutcome.WHOLE


def test_a_tier_that_has_no_room_for_its_probe_can_be_read() -> None:
    fixture = broken()
    fixture.tier.fail = lambda: TierNoSpaceError("ENOSPC")
    fixture.advance(10.0)
    fixture.io.run_all("check:")
    fixture.pump()
    assert state(fixture) == "Healthy"
    fixture.tier.fail = None
    promotion = fixture.promote(9)
    fixture.settle()
    assert fixture.ends(promotion)[0].outcome is PromotionOutcome.WHOLE


def test_a_period_that_is_changed_holds_for_the_breaker_that_is_open() -> None:
    fixture = broken()
    fixture.tier.fail = None
    fixture.advance(4.0)
    fixture.store.configure(live(threshold=3, period=86_400, disk=LiveTier()))
    fixture.advance(60.0)
    assert fixture.calls("check:") == []
    # Longer ago than that already: it is looked at now, and once.
    fixture.store.configure(live(threshold=3, period=5, disk=LiveTier()))
    fixture.advance(0.0)
    assert len(fixture.calls("check:")) == 1
    fixture.store.configure(live(threshold=3, period=1, disk=LiveTier()))
    fixture.advance(20.0)
    assert len(fixture.calls("check:")) == 1
    fixture.io.run_all("check:")
    fixture.pump()
    assert state(fixture) == "Healthy"
    fixture.advance(200.0)
    assert fixture.calls("check:") == []


def test_a_changed_threshold_applies_to_later_failures_and_keeps_an_open_breaker_open() -> None:
    fixture = broken()
    fixture.store.configure(live(threshold=1_000, period=10, disk=LiveTier()))
    fixture.pump()
    assert state(fixture) == "BreakerOpen"
    fixture.tier.fail = None
    fixture.advance(10.0)
    fixture.io.run_all("check:")
    fixture.pump()
    assert state(fixture) == "Healthy"
    failing(fixture)
    for chunk in range(5, 9):
        fixture.promote(chunk)
        fixture.settle()
    assert state(fixture) == "Degraded"
    # Fewer than it has failed already: the next one decides.
    fixture.store.configure(live(threshold=2, period=10, disk=LiveTier()))
    assert state(fixture) == "Degraded"
    fixture.promote(9)
    fixture.settle()
    assert state(fixture) == "BreakerOpen"


def test_a_probe_that_hangs_is_not_followed_by_another() -> None:
    fixture = broken()
    fixture.advance(10.0)
    fixture.io.hold(fixture.calls("check:")[0])
    fixture.advance(100.0)
    assert len(fixture.calls("check:")) == 1


def test_queued_calls_of_a_tier_whose_breaker_opens_are_revoked_at_once() -> None:
    fixture = StoreFixture(values=live(threshold=1, disk=LiveTier()))
    fixture.engine()
    fixture.put_in_tier(0, 1)
    failing(fixture)
    failed, waiting = fixture.promote(0), fixture.promote(1, budget=100.0)
    fixture.io.run(fixture.calls("read:")[0])
    fixture.pump()
    assert fixture.ends(failed)[0].outcome is PromotionOutcome.FAILED
    assert fixture.ends(waiting)[0].outcome is PromotionOutcome.FAILED
    assert fixture.store.accounts().reading == 0


def test_a_deadline_missed_by_a_read_that_has_just_started_is_not_charged_to_the_tier() -> None:
    fixture = StoreFixture(values=live(threshold=1, disk=LiveTier()))
    fixture.engine()
    fixture.put_in_tier(0)
    fixture.promote(0, budget=0.5)
    fixture.advance(0.4)
    fixture.io.hold(fixture.calls("read:")[0])
    fixture.advance(0.2)
    assert state(fixture) == "Healthy"


def test_a_deadline_missed_by_a_read_that_waited_in_its_queue_is_not_the_tiers_failure() -> None:
    fixture = StoreFixture(values=live(threshold=1, disk=LiveTier()))
    fixture.engine()
    fixture.put_in_tier(0)
    fixture.promote(0, budget=3.0)
    fixture.advance(3.0)
    assert state(fixture) == "Healthy"


def test_a_deadline_missed_by_a_slow_read_is_charged_to_the_tier() -> None:
    fixture = StoreFixture(values=live(threshold=1, disk=LiveTier()))
    fixture.engine()
    fixture.put_in_tier(0)
    fixture.promote(0, budget=1.5)
    fixture.io.hold(fixture.calls("read:")[0])
    fixture.advance(1.5)
    assert state(fixture) == "BreakerOpen"
    assert fixture.counted("tier_late_reads", "disk") == 1


@pytest.mark.parametrize(("limit", "begins_at"), [(1, 0.0), (5, 4.5)])
def test_a_read_that_hangs_is_found_late_also_after_its_limit_has_passed(
    limit: int, begins_at: float
) -> None:
    # The request's limit is not longer than a read may take, or the read waited for a thread. In
    # both cases no deadline finds it late.
    fixture = StoreFixture(
        values=live(threshold=100, period=10, disk=LiveTier(load_timeout_seconds=limit)),
        read_threads=2,
    )
    fixture.engine()
    fixture.put_in_tier(0)
    fixture.promote(0, budget=0.5)
    fixture.promote(0, budget=float(limit))
    fixture.advance(begins_at)
    fixture.io.hold(fixture.calls("read:")[0])
    fixture.advance(limit - begins_at)
    assert state(fixture) == "Healthy"
    fixture.advance(2.0)
    assert state(fixture) == "BreakerOpen"
    assert fixture.store.tier_states()[1].cause == "hung"
    assert fixture.counted("tier_late_reads", "disk") == 1
    fixture.advance(30.0)
    assert fixture.counted("tier_late_reads", "disk") == 1


def test_a_read_after_its_time_limit_that_is_not_late_is_no_failure() -> None:
    fixture = StoreFixture(values=live(threshold=1, disk=LiveTier(load_timeout_seconds=1)))
    fixture.engine()
    fixture.put_in_tier(0)
    fixture.promote(0, budget=1.0)
    fixture.advance(0.5)
    call = fixture.calls("read:")[0]
    fixture.io.hold(call)
    fixture.advance(0.6)
    fixture.io.run(call)
    fixture.pump()
    fixture.advance(5.0)
    assert state(fixture) == "Healthy"
    assert fixture.counted("tier_late_reads", "disk") == 0


def test_a_slow_tier_is_late_only_at_three_times_its_usual_time() -> None:
    fixture = StoreFixture(values=live(threshold=1, disk=LiveTier(load_timeout_seconds=60)))
    fixture.engine()
    fixture.put_in_tier(*range(4))
    for chunk in range(2):
        promotion = fixture.promote(chunk, budget=60.0)
        call = fixture.calls("read:")[0]
        fixture.io.hold(call)
        fixture.advance(2.0)
        fixture.io.run(call)
        fixture.pump()
        assert fixture.ends(promotion)[0].outcome is PromotionOutcome.WHOLE
    fixture.promote(2, budget=4.0)
    fixture.io.hold(fixture.calls("read:")[0])
    fixture.advance(5.0)
    assert state(fixture) == "Healthy"
    fixture.promote(3, budget=7.0)
    fixture.io.hold(fixture.calls("read:")[1])
    fixture.advance(8.0)
    assert state(fixture) == "BreakerOpen"


def test_half_of_the_read_threads_hung_opens_the_breaker_for_any_threshold() -> None:
    fixture = StoreFixture(values=live(threshold=100, period=10, disk=LiveTier()), read_threads=4)
    fixture.engine()
    fixture.put_in_tier(0, 1)
    fixture.promote(0, 1, budget=2.0)
    calls = fixture.calls("read:")
    for call in calls:
        fixture.io.hold(call)
    fixture.advance(2.0)
    assert state(fixture) == "BreakerOpen"
    assert fixture.store.tier_states()[1].cause == "hung"
    assert fixture.store.tier_states()[1].late_reads == 2
    fixture.advance(10.0)
    fixture.io.run_all("check:")
    fixture.pump()
    assert state(fixture) == "BreakerOpen"
    for call in calls:
        fixture.io.run(call)
    fixture.advance(10.0)
    fixture.io.run_all("check:")
    fixture.pump()
    assert state(fixture) == "Healthy"


def test_a_tier_is_not_used_before_it_is_open_and_a_failed_open_is_retried() -> None:
    fixture = StoreFixture(values=live(period=10, disk=LiveTier()), opened=False)
    fixture.engine()
    assert state(fixture) == "Unknown"
    failing(fixture)
    fixture.settle()
    assert state(fixture) == "BreakerOpen"
    fixture.tier.fail = None
    fixture.advance(10.0)
    fixture.settle()
    assert state(fixture) == "Healthy"


def test_upkeep_runs_every_few_seconds_one_at_a_time_and_not_while_the_breaker_is_open() -> None:
    fixture = StoreFixture()
    fixture.advance(5.0)
    (call,) = fixture.calls("maintain:")
    fixture.io.hold(call)
    fixture.advance(60.0)
    assert fixture.calls("maintain:") == [call]
    fixture.io.run(call)
    fixture.pump()
    fixture.advance(5.0)
    assert len(fixture.calls("maintain:")) == 1


def test_objects_that_a_tier_has_no_room_to_index_are_counted_once_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fixture = StoreFixture(opened=False)
    unindexed = 7
    monkeypatch.setattr(fixture.tier, "usage", lambda: TierUsage(0, 1 << 30, 5, unindexed))
    fixture.settle("maintain:")
    assert fixture.counted("tier_objects_not_indexed", "disk") == 7
    unindexed = 9
    for _ in range(3):
        fixture.advance(5.0)
        fixture.settle("maintain:")
    assert fixture.counted("tier_objects_not_indexed", "disk") == 9


def test_live_limits_reach_the_tier_at_once() -> None:
    fixture = StoreFixture()
    fixture.store.configure(
        live(disk=LiveTier(capacity_bytes=77, high_watermark_percent=80, sync_data=True))
    )
    limits = fixture.tier.limits
    assert limits is not None
    assert (limits.capacity_bytes, limits.high_watermark_percent, limits.sync_data) == (
        77,
        80,
        True,
    )


def test_an_error_other_than_a_tier_error_is_a_failure() -> None:
    fixture = StoreFixture(values=live(threshold=1, disk=LiveTier()))
    fixture.engine()
    fixture.put_in_tier(0)
    fixture.tier.fail = lambda: ValueError("a bug")  # type: ignore[return-value, assignment]
    promotion = fixture.promote(0)
    fixture.settle()
    assert fixture.ends(promotion)[0].outcome is PromotionOutcome.FAILED
    assert fixture.counted("tier_reads_failed", "disk", "unexpected") == 1


@pytest.mark.parametrize("name", ["ram", "disk"])
def test_every_tier_reports_its_state(name: str) -> None:
    fixture = StoreFixture()
    fixture.engine()
    fixture.put(0)
    fixture.settle()
    (found,) = [tier for tier in fixture.store.tier_states() if tier.name == name]
    assert found.state == "Healthy"
    assert found.objects == 1


def test_a_promotion_whose_deadline_opens_the_breaker_ends_once() -> None:
    fixture = StoreFixture(values=live(threshold=1, disk=LiveTier()))
    fixture.engine()
    fixture.put_in_tier(0, 1)
    promotion = fixture.promote(0, 1, budget=2.0)
    fixture.io.hold(fixture.calls("read:")[1])
    fixture.advance(2.0)
    assert state(fixture) == "BreakerOpen"
    assert [end.outcome for end in fixture.ends(promotion)] == [PromotionOutcome.FAILED]
    assert fixture.store.pinned_bytes == 0


def usable(fixture: StoreFixture) -> list[int]:
    return [event.bits for event in fixture.events if isinstance(event, UsableTiersChanged)]


def test_one_event_announces_that_a_tier_is_suspended_and_that_it_is_back() -> None:
    fixture = broken()
    assert usable(fixture) == [RAM_BITS | 2, RAM_BITS]
    assert fixture.store.usable_bits == RAM_BITS
    # The index still has its keys: none of them is announced again.
    assert fixture.bits(9) == 2
    before = len([e for e in fixture.events if isinstance(e, PresenceChanged)])
    fixture.tier.fail = None
    fixture.advance(10.0)
    fixture.io.run_all("check:")
    fixture.pump()
    assert usable(fixture) == [RAM_BITS | 2, RAM_BITS, RAM_BITS | 2]
    assert len([e for e in fixture.events if isinstance(e, PresenceChanged)]) == before


def test_a_tier_counts_from_when_it_is_open() -> None:
    fixture = StoreFixture(opened=False)
    fixture.engine()
    assert (usable(fixture), fixture.store.usable_bits) == ([], RAM_BITS)
    fixture.settle("maintain:")
    assert usable(fixture) == [RAM_BITS | 2]


def test_of_two_tiers_only_the_broken_one_is_withdrawn() -> None:
    fixture = StoreFixture(
        tiers=("disk", "nfs"), values=live(threshold=1, disk=LiveTier(), nfs=LiveTier())
    )
    fixture.engine()
    fixture.put_in_tier(0)
    failing(fixture)
    fixture.promote(0)
    fixture.settle()
    assert fixture.store.usable_bits == RAM_BITS | 4


def test_an_unexpected_error_is_logged_once_with_its_traceback_and_costs_a_miss(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fixture = StoreFixture(values=live(threshold=100, disk=LiveTier()))
    fixture.engine()
    fixture.put_in_tier(*range(12))
    fixture.tier.fail = lambda: ZeroDivisionError("a bug")
    for chunk in range(5):
        promotion = fixture.promote(chunk)
        fixture.settle()
        assert fixture.ends(promotion)[0].outcome is PromotionOutcome.FAILED
    assert fixture.counted("tier_reads_failed", "disk", "unexpected") == 5
    (record,) = caplog.records
    assert record.getMessage() == "tier disk: unexpected ZeroDivisionError"
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError
    fixture.tier.fail = lambda: KeyError("another")
    fixture.promote(5)
    fixture.settle()
    assert len(caplog.records) == 2
    fixture.tier.fail = lambda: ZeroDivisionError("a bug")
    fixture.advance(600.0)
    fixture.promote(6)
    fixture.settle()
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


@pytest.mark.parametrize(
    "error",
    [
        TierUnverifiableError("written with xxh3"),
        TierForeignError("version 3"),
        TierUntrustedError("unkeyed", "no tag"),
        TierUntrustedError("unknown_key", "no such key"),
        TierUntrustedError("wrong_tag", "another key"),
    ],
    ids=lambda error: error.reason,
)
def test_an_object_that_cannot_be_used_is_a_miss_with_a_reason_of_its_own(
    error: TierError,
) -> None:
    fixture = StoreFixture(values=live(threshold=1, disk=LiveTier()))
    fixture.engine()
    fixture.put_in_tier(0)
    fixture.tier.fail = lambda: error
    promotion = fixture.promote(0)
    fixture.settle()
    assert fixture.ends(promotion)[0].outcome is PromotionOutcome.FAILED
    assert fixture.counted("tier_reads_failed", "disk", error.reason) == 1
    assert state(fixture) == "Healthy"
    # Not read again for a while.
    assert fixture.ends(fixture.promote(0))[0].outcome is PromotionOutcome.FAILED
    assert fixture.counted("tier_reads_failed", "disk") == 1


def without_keys() -> StoreFixture:
    """A fixture whose tier has just found that its keys are gone, at the first failure."""
    fixture = StoreFixture(values=live(threshold=1_000, period=600, disk=LiveTier()))
    fixture.engine()
    fixture.put_in_tier(0, 1)
    fixture.tier.fail = lambda: TierKeyMissingError("no Secret")
    fixture.promote(0)
    fixture.settle()
    return fixture


def test_a_tier_without_its_keys_is_suspended_at_once() -> None:
    fixture = without_keys()
    assert state(fixture) == "BreakerOpen"
    assert fixture.store.tier_states()[1].cause == "key_missing"


def test_when_keys_appear_a_tier_is_checked_before_its_period_has_passed() -> None:
    fixture = without_keys()
    fixture.tier.fail = None
    fixture.store.check_suspended("unavailable")
    assert fixture.calls("check:") == []
    fixture.store.check_suspended("key_missing")
    fixture.store.check_suspended("key_missing")
    assert len(fixture.calls("check:")) == 1
    fixture.io.run_all("check:")
    fixture.pump()
    assert state(fixture) == "Healthy"
    promotion = fixture.promote(0)
    fixture.settle()
    assert fixture.ends(promotion)[0].outcome is PromotionOutcome.WHOLE
