"""How many bytes a tier is given in a second."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.support.manual_executor import ManualClock
from tests.unit.store.store_world import PAGE, World, block_hash, live

from kvtier.config.models import LiveTier
from kvtier.errors import TierUnavailableError
from kvtier.store.secondary_tier import WriteBudget


def limited(rate: int | None, **more: int) -> World:
    world = World(slots=32, values=live(disk=LiveTier(max_write_bytes_per_second=rate, **more)))
    world.engine()
    return world


def put(world: World, *chunks: int) -> None:
    for chunk in chunks:
        world.put(chunk)
        world.settle("hash")


def test_what_exceeds_the_budget_is_dropped_and_counted_with_a_reason_of_its_own() -> None:
    world = limited(2 * PAGE)
    put(world, *range(5))
    assert len(world.calls("write:")) == 2
    assert world.counted("tier_writes_dropped", "disk", "write_budget") == 3
    assert world.counted("tier_writes_dropped", "disk") == 3


def test_the_budget_comes_back_with_time() -> None:
    world = limited(2 * PAGE)
    put(world, *range(5))
    world.settle()
    world.advance(1.0)
    put(world, *range(5, 8))
    assert len(world.calls("write:")) == 2


def test_what_was_dropped_is_written_when_it_is_wanted_again() -> None:
    world = limited(PAGE)
    put(world, 0, 1)
    world.settle()
    assert len(world.tier.objects) == 1
    world.advance(1.0)
    world.load(1)
    world.settle()
    assert len(world.tier.objects) == 2


def test_without_a_limit_everything_is_written() -> None:
    world = limited(None)
    put(world, *range(10))
    assert len(world.calls("write:")) == 10


def test_the_budget_is_a_live_value() -> None:
    world = limited(None)
    put(world, 0)
    world.store.configure(live(disk=LiveTier(max_write_bytes_per_second=PAGE)))
    put(world, 1, 2, 3)
    assert len(world.calls("write:")) == 2
    world.store.configure(live(disk=LiveTier()))
    put(world, 4, 5)
    assert len(world.calls("write:")) == 4


def test_each_tier_has_its_own() -> None:
    values = live(disk=LiveTier(max_write_bytes_per_second=PAGE), nfs=LiveTier())
    world = World(slots=32, tiers=("disk", "nfs"), values=values)
    world.engine()
    put(world, *range(4))
    assert [len(world.calls(f"write:{name}")) for name in ("disk", "nfs")] == [1, 4]


def test_an_object_larger_than_a_seconds_worth_is_written_and_paid_for() -> None:
    world = limited(PAGE // 4)
    put(world, 0, 1)
    assert len(world.calls("write:")) == 1
    world.advance(3.0)
    put(world, 2)
    assert len(world.calls("write:")) == 1
    world.advance(0.1)
    put(world, 3)
    assert len(world.calls("write:")) == 2


def test_loads_go_on_while_the_budget_is_used_up() -> None:
    world = limited(PAGE)
    put(world, 0, 1, 2)
    world.lower(10, 11)
    promotion = world.promote(10, 11)
    world.settle("read:")
    assert world.ends(promotion)[0].usable == 2


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


def test_what_a_breaker_takes_back_is_not_paid_for() -> None:
    world = limited(2 * PAGE)
    put(world, 0, 1)
    world.lower(*range(10, 15))
    world.tier.fail = lambda: TierUnavailableError("EIO")
    for chunk in range(10, 15):
        world.promote(chunk)
        world.settle("read:")
    assert world.counted("tier_writes_dropped", "disk", "breaker") == 2
    world.tier.fail = None
    world.advance(60.0)
    world.settle()
    # Both are considered again when the tier is back, and the budget is whole.
    assert (
        len([ref for ref in world.tier.objects if ref.key[1:] in (block_hash(0), block_hash(1))])
        == 2
    )
