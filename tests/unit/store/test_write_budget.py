"""The write budget of a tier."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.support.manual_executor import ManualClock
from tests.unit.store.store_fixture import PAGE, StoreFixture, block_hash, live

from kvtier.config.models import LiveTier
from kvtier.errors import TierUnavailableError
from kvtier.store.secondary_tier import WriteBudget


def limited(rate: int | None, **more: int) -> StoreFixture:
    fixture = StoreFixture(
        slots=32, values=live(disk=LiveTier(max_write_bytes_per_second=rate, **more))
    )
    fixture.engine()
    return fixture


def put(fixture: StoreFixture, *chunks: int) -> None:
    for chunk in chunks:
        fixture.put(chunk)
        fixture.settle("hash")


def test_writes_beyond_the_budget_wait_and_are_counted_under_their_own_reason() -> None:
    fixture = limited(2 * PAGE)
    put(fixture, *range(5))
    assert len(fixture.calls("write:")) == 2
    assert fixture.counted("tier_writes_postponed", "disk", "write_budget") == 3
    assert fixture.counted("tier_writes_dropped", "disk") == 0
    assert fixture.store.pending_stores() == 5


def test_what_waits_is_written_as_the_budget_grows_without_being_used() -> None:
    fixture = limited(2 * PAGE)
    put(fixture, *range(10))
    began = fixture.clock.now
    written = []
    for _ in range(60):
        fixture.settle()
        written.append(len(fixture.tier.objects))
        assert written[-1] * PAGE <= 2 * PAGE * (fixture.clock.now - began) + 3 * PAGE
        fixture.advance(0.1)
    assert written[-1] == 10
    assert fixture.store.pending_stores() == 0


def test_the_number_that_a_shutdown_waits_for_falls_with_each_write_of_the_backlog() -> None:
    fixture = limited(None, max_pending_store_bytes=2 * PAGE)
    put(fixture, *range(10))
    pending = [fixture.store.pending_stores()]
    while calls := fixture.calls("write:"):
        fixture.io.run(calls[0])
        fixture.pump()
        pending.append(fixture.store.pending_stores())
    assert pending == list(range(10, -1, -1))


def test_what_waits_for_a_budget_is_written_at_once_when_the_limit_is_lifted() -> None:
    fixture = limited(PAGE)
    put(fixture, *range(6))
    fixture.store.configure(live(disk=LiveTier()))
    fixture.settle()
    assert len(fixture.tier.objects) == 6


def test_what_is_evicted_while_it_waits_is_counted() -> None:
    fixture = limited(PAGE)
    for chunk in range(60):
        put(fixture, chunk)
        fixture.advance(0.11)
    for _ in range(100):
        fixture.advance(1.0)
        fixture.settle()
    lost = fixture.counted("tier_writes_dropped", "disk", "evicted")
    assert lost > 0
    lost += fixture.counted("checksums_dropped", "", "evicted")
    assert len(fixture.tier.objects) + lost == 60


def test_without_a_limit_everything_is_written() -> None:
    fixture = limited(None)
    put(fixture, *range(10))
    assert len(fixture.calls("write:")) == 10


def test_the_budget_is_a_live_value() -> None:
    fixture = limited(None)
    put(fixture, 0)
    fixture.store.configure(live(disk=LiveTier(max_write_bytes_per_second=PAGE)))
    put(fixture, 1, 2, 3)
    assert len(fixture.calls("write:")) == 2
    fixture.store.configure(live(disk=LiveTier()))
    put(fixture, 4, 5)
    assert len(fixture.calls("write:")) == 6


def test_each_tier_has_its_own() -> None:
    values = live(disk=LiveTier(max_write_bytes_per_second=PAGE), nfs=LiveTier())
    fixture = StoreFixture(slots=32, tiers=("disk", "nfs"), values=values)
    fixture.engine()
    put(fixture, *range(4))
    assert [len(fixture.calls(f"write:{name}")) for name in ("disk", "nfs")] == [1, 4]


def test_an_object_larger_than_a_seconds_worth_is_written_and_paid_for() -> None:
    fixture = limited(PAGE // 4)
    put(fixture, 0, 1)
    assert len(fixture.calls("write:")) == 1
    fixture.advance(2.9)
    assert len(fixture.calls("write:")) == 1
    fixture.advance(0.2)
    assert len(fixture.calls("write:")) == 2


def test_loads_go_on_while_the_budget_is_used_up() -> None:
    fixture = limited(PAGE)
    put(fixture, 0, 1, 2)
    fixture.put_in_tier(10, 11)
    promotion = fixture.promote(10, 11)
    fixture.settle("read:")
    assert fixture.ends(promotion)[0].usable == 2


@given(
    rate=st.integers(1, 1000),
    steps=st.lists(st.tuples(st.floats(0, 5), st.integers(1, 3000)), max_size=60),
)
def test_over_any_time_no_more_is_written_than_rate_times_time_a_seconds_worth_and_an_object(
    rate: int, steps: list[tuple[float, int]]
) -> None:
    clock = ManualClock()
    budget = WriteBudget(clock)
    began, taken, largest = clock.now, 0, 0
    for seconds, size in steps:
        clock.advance(seconds)
        if budget.take(size, rate):
            taken += size
            largest = max(largest, size)
        assert taken <= rate * (clock.now - began) + rate + largest + 1e-6


def test_writes_that_a_breaker_revokes_are_not_charged() -> None:
    fixture = limited(2 * PAGE)
    put(fixture, 0, 1)
    fixture.put_in_tier(*range(10, 15))
    fixture.tier.fail = lambda: TierUnavailableError("EIO")
    for chunk in range(10, 15):
        fixture.promote(chunk)
        fixture.settle("read:")
    assert fixture.counted("tier_writes_dropped", "disk", "breaker") == 2
    fixture.tier.fail = None
    fixture.advance(60.0)
    fixture.settle()
    # Both are considered again when the tier is back, and the budget is whole.
    assert (
        len([ref for ref in fixture.tier.objects if ref.key[1:] in (block_hash(0), block_hash(1))])
        == 2
    )
