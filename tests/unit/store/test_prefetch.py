"""Prefixes of requests that wait in an engine's queue are brought into RAM, within bounds."""

from __future__ import annotations

import random

import pytest
from tests.unit.store.store_fixture import NAMESPACE, PAGE, StoreFixture, block_hash

from kvtier.errors import TierUnavailableError
from kvtier.store.prefetch import MAX_PREFETCHES, POOL_SHARE

SLOTS = 64
THREADS = 8


def fixture_with(*chunks: int, slots: int = SLOTS) -> StoreFixture:
    fixture = StoreFixture(slots=slots, read_threads=THREADS)
    fixture.engine()
    fixture.put_in_tier(*chunks)
    return fixture


def prefetch(fixture: StoreFixture, *chunks: int) -> int:
    number = fixture.number()
    fixture.store.prefetch("e", number, [(0, block_hash(chunk)) for chunk in chunks])
    fixture.pump()
    return number


def cancel(fixture: StoreFixture, number: int) -> None:
    fixture.store.cancel("e", number)
    fixture.pump()


def held(fixture: StoreFixture, *chunks: int) -> list[int]:
    return [chunk for chunk in chunks if fixture.bits(chunk) & 1]


def test_a_prefix_is_brought_into_ram_and_its_request_waits_for_no_read() -> None:
    fixture = fixture_with(*range(6))
    number = prefetch(fixture, *range(6))
    fixture.settle()
    assert held(fixture, *range(6)) == [0, 1, 2, 3, 4, 5]
    assert fixture.store.pinned_bytes == 0
    cancel(fixture, number)
    (end,) = fixture.ends(fixture.promote(*range(6)))
    assert (end.usable, end.outcome) == (6, "whole")
    assert fixture.calls("read:") == []
    assert fixture.counted("prefetch_reads", "disk") == 6
    assert fixture.counted("late_cancels") == 0
    fixture.check_accounts()


def test_a_promotion_joins_the_reads_of_its_prefetch() -> None:
    fixture = fixture_with(*range(4))
    number = prefetch(fixture, *range(4))
    promotion = fixture.promote(*range(4))
    cancel(fixture, number)
    assert len(fixture.calls("read:")) == 4
    fixture.settle()
    (end,) = fixture.ends(promotion)
    assert (end.usable, end.outcome) == (4, "whole")
    assert fixture.counted("tier_reads", "disk") == 4


def test_at_most_half_of_the_threads_of_a_tier_are_used() -> None:
    fixture = fixture_with(*range(30))
    for first in (0, 10, 20):
        prefetch(fixture, *range(first, first + 10))
    assert len(fixture.calls("read:")) == THREADS // 2
    fixture.io.run(fixture.calls("read:")[0])
    fixture.pump()
    assert len(fixture.calls("read:")) == THREADS // 2


def test_what_was_brought_and_not_used_takes_a_bounded_part_of_the_pool() -> None:
    fixture = fixture_with(*range(40))
    numbers = [prefetch(fixture, *range(first, first + 10)) for first in range(0, 40, 10)]
    fixture.settle()
    assert held(fixture, *range(40)) == list(range(SLOTS // POOL_SHARE))
    # The turn of the first request has come: the others go on.
    cancel(fixture, numbers[0])
    fixture.settle()
    assert held(fixture, *range(10, 40)) == list(range(10, 10 + SLOTS // POOL_SHARE))
    for number in numbers[1:]:
        cancel(fixture, number)
    assert (len(fixture.store._prefetches), fixture.store._prefetches.bytes) == (0, 0)


def test_no_more_than_that_part_of_ram_is_displaced_and_nothing_that_queued_requests_need() -> None:
    fixture = fixture_with(*range(200, 240))
    for first in range(0, 80, 10):
        fixture.put_prompt(*range(first, first + 10))
    before = held(fixture, *range(80))
    needed = before[:10]
    # The least recently used prompt is what a queued request needs.
    prefetch(fixture, *needed)
    for first in range(200, 240, 10):
        prefetch(fixture, *range(first, first + 10))
    for _ in range(20):
        fixture.settle("read:")
        fixture.advance(0.11)
    assert held(fixture, *range(200, 240))
    after = held(fixture, *range(80))
    assert after[: len(needed)] == needed
    assert len(before) - len(after) <= SLOTS // POOL_SHARE


@pytest.mark.parametrize("started", [False, True])
def test_a_request_that_is_gone_ends_its_reads(started: bool) -> None:
    fixture = fixture_with(*range(6))
    number = prefetch(fixture, *range(6))
    calls = fixture.calls("read:")
    if started:
        for call in calls:
            fixture.io.hold(call)
    cancel(fixture, number)
    fixture.settle()
    # What has started cannot be recalled, and is kept.
    assert held(fixture, *range(6)) == ([0, 1, 2, 3] if started else [])
    assert fixture.store._prefetches.bytes == 0
    assert fixture.store.pinned_bytes == 0
    fixture.check_accounts()


def test_a_tier_that_fails_ends_the_prefetch_and_harms_no_promotion() -> None:
    fixture = fixture_with(*range(10))
    fixture.tier.fail = lambda: TierUnavailableError("no")
    number = prefetch(fixture, *range(10))
    fixture.settle()
    assert held(fixture, *range(10)) == []
    assert fixture.calls("read:") == []
    fixture.tier.fail = None
    cancel(fixture, number)
    fixture.check_accounts()


def test_the_end_of_an_engine_or_of_its_weights_ends_its_prefetches() -> None:
    fixture = fixture_with(*range(10))
    prefetch(fixture, *range(10))
    fixture.store.reset_engine("e", "b" * 32, True)
    assert len(fixture.store._prefetches) == 0
    prefetch(fixture, *range(10))
    fixture.store.close_engine("e", True)
    assert len(fixture.store._prefetches) == 0
    fixture.settle()
    assert fixture.store._prefetches.bytes == 0
    fixture.check_accounts()


def test_the_number_of_prefetches_is_bounded_and_a_second_one_of_a_number_a_violation() -> None:
    fixture = fixture_with(*range(4))
    for _ in range(MAX_PREFETCHES):
        last = prefetch(fixture, 0)
    prefetch(fixture, 1)
    assert fixture.counted("prefetches_rejected") == 1
    fixture.store.prefetch("e", last, [])
    assert fixture.counted("protocol_violations", "", "prefetch_twice") == 1
    assert len(fixture.store._prefetches) == MAX_PREFETCHES


def test_an_engine_whose_identity_does_not_hold_prefetches_nothing() -> None:
    fixture = StoreFixture(slots=SLOTS)
    fixture.engine(persistent=False)
    fixture.put_in_tier(0, 1)
    prefetch(fixture, 0, 1)
    assert fixture.calls("read:") == []


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_prefetches_promotions_and_ends_keeps_the_accounts(seed: int) -> None:
    draw = random.Random(seed)
    fixture = fixture_with(*range(60), slots=32)
    numbers: list[int] = []
    for _ in range(120):
        what = draw.random()
        first = draw.randrange(0, 60, 10)
        if what < 0.3:
            numbers.append(prefetch(fixture, *range(first, first + draw.randint(1, 10))))
        elif what < 0.5 and numbers:
            cancel(fixture, numbers.pop(draw.randrange(len(numbers))))
        elif what < 0.6:
            promotion = fixture.promote(*range(first, first + 3))
            fixture.settle("read:")
            ready = fixture.load(*range(first, first + 3), promotion=promotion)
            fixture.store.release_load("e", ready.load)
        elif what < 0.9 and (calls := fixture.calls("read:")):
            fixture.io.run(draw.choice(calls))
            fixture.pump()
        else:
            fixture.advance(0.2)
        fixture.check_accounts()
        assert 0 <= fixture.store._prefetches.bytes <= 32 * PAGE // POOL_SHARE
        assert all(count >= 0 for count in fixture.store._prefetches._reading.values())
    for number in numbers:
        cancel(fixture, number)
    fixture.settle()
    assert fixture.store._prefetches.bytes == 0
    assert fixture.held(NAMESPACE)


def test_a_tier_that_hangs_keeps_half_of_its_threads_for_requests_and_gets_no_more() -> None:
    fixture = fixture_with(*range(30))
    number = prefetch(fixture, *range(10))
    hung = fixture.calls("read:")
    for call in hung:
        fixture.io.hold(call)
    promotion = fixture.promote(20, 21)
    waiting = [call for call in fixture.calls("read:") if call not in hung]
    assert (len(hung), len(waiting)) == (THREADS // 2, 2)
    for call in waiting:
        fixture.io.run(call)
    fixture.pump()
    (end,) = fixture.ends(promotion)
    assert (end.usable, end.outcome) == (2, "whole")
    fixture.advance(60.0)
    assert fixture.counted("prefetch_reads", "disk") == THREADS // 2
    assert fixture.store._prefetches._reading[1] == 0
    cancel(fixture, number)
    # What returns at last is kept or dropped, and every slot is accounted for.
    for call in hung:
        fixture.io.run(call)
    fixture.pump()
    fixture.check_accounts()
