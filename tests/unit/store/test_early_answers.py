"""A promotion that is answered before its end, and the load that begins then."""

from __future__ import annotations

import pytest
from tests.unit.store.store_fixture import PAGE, StoreFixture, block_hash

from kvtier.errors import TierCorruptError, TierMissError
from kvtier.store.cost_model import Prefill, PrefixCost
from kvtier.store.types import (
    LoadExtended,
    PromotionArriving,
    PromotionEnded,
    PromotionOutcome,
)

CHUNKS = 16
SLOW_COPY = 10.0
"""Seconds to copy a key: whatever is missing is expected to arrive within the copy."""


class Early:
    """A store whose tier has been measured, and a promotion of ``CHUNKS`` chunks in it."""

    def __init__(self, copy_seconds: float = SLOW_COPY, whole: bool = False) -> None:
        self.fixture = StoreFixture(64, read_threads=4)
        self.fixture.engine()
        for first in (100, 110, 120, 130):
            self.fixture.put_in_tier(*range(first, first + 4))
            self.finish(self.fixture.promote(*range(first, first + 4)))
        self.fixture.put_in_tier(*range(CHUNKS))
        self.promotion = self.fixture.number()
        ends = tuple(256 * (chunk + 1) for chunk in range(CHUNKS))
        self.keys = [(0, block_hash(chunk)) for chunk in range(CHUNKS)]
        cost = PrefixCost(0, ends, Prefill(1.0, 0.0), 0.0, whole, copy_seconds)
        self.fixture.store.promote("e", self.promotion, self.keys, 5.0, cost)
        self.fixture.pump()
        self.pinned_before = self.fixture.store.pinned_bytes

    def finish(self, promotion: int) -> None:
        for _ in range(8):
            self.fixture.advance(0.01)
            self.fixture.io.run_all("read:")
            self.fixture.pump()
        self.fixture.store.cancel("e", promotion)

    def read(self, count: int) -> None:
        """So many reads end, in order."""
        for _ in range(count):
            self.fixture.io.run(self.fixture.calls("read:")[0])
            self.fixture.pump()

    def arriving(self) -> list[PromotionArriving]:
        return [
            event
            for event in self.fixture.events
            if isinstance(event, PromotionArriving) and event.promotion == self.promotion
        ]

    def ended(self) -> PromotionEnded | None:
        return next(iter(self.fixture.ends(self.promotion)), None)

    def load(self) -> int:
        number = self.fixture.number()
        self.fixture.store.load("e", number, self.promotion, self.keys)
        self.fixture.pump()
        return number

    def pins_of(self, load: int) -> int:
        return len(self.fixture.store._engines.open["e"].loads.get(load, ()))


def test_the_first_answer_names_what_has_arrived_and_predicts_the_rest() -> None:
    early = Early()
    assert early.arriving() == []
    early.read(1)
    (first,) = early.arriving()
    assert (first.first, first.predicted, len(first.locations)) == (0, CHUNKS, 1)
    assert early.ended() is None
    early.read(CHUNKS - 1)
    parts = early.arriving()
    assert [part.first for part in parts] == list(range(len(parts)))
    end = early.ended()
    assert end is not None
    assert (end.outcome, end.usable) == (PromotionOutcome.WHOLE, CHUNKS)
    named = [location for part in parts for location in part.locations]
    assert tuple(named) == end.locations[: len(named)]


@pytest.mark.parametrize("copy_seconds", [0.0, 1e-9])
def test_nothing_is_answered_early_if_the_copy_is_shorter_than_the_rest(
    copy_seconds: float,
) -> None:
    early = Early(copy_seconds)
    early.fixture.advance(0.5)
    early.read(CHUNKS - 4)
    assert early.arriving() == []
    early.read(4)
    assert early.ended() is not None


def test_keys_that_are_of_use_together_only_are_not_answered_early() -> None:
    early = Early(whole=True)
    early.read(CHUNKS - 1)
    assert early.arriving() == []


def test_without_measurements_of_the_tier_nothing_is_predicted() -> None:
    fixture = StoreFixture(64, read_threads=4)
    fixture.engine()
    fixture.put_in_tier(0, 1)
    keys = [(0, block_hash(0)), (0, block_hash(1))]
    cost = PrefixCost(0, (256, 512), Prefill(1.0, 0.0), copy_seconds=SLOW_COPY)
    fixture.store.promote("e", fixture.number(), keys, 5.0, cost)
    fixture.pump()
    fixture.io.run(fixture.calls("read:")[0])
    fixture.pump()
    assert not any(isinstance(event, PromotionArriving) for event in fixture.events)


def test_a_load_that_begins_early_pins_what_arrives_until_it_is_released() -> None:
    early = Early()
    early.read(3)
    load = early.load()
    assert early.pins_of(load) == 3
    early.read(CHUNKS - 3)
    end = early.ended()
    assert end is not None
    assert end.usable == CHUNKS
    assert early.pins_of(load) == CHUNKS
    extended = [event for event in early.fixture.events if isinstance(event, LoadExtended)]
    assert [(event.load, event.keys) for event in extended] == [(load, CHUNKS)]
    assert early.fixture.store.pinned_bytes == CHUNKS * PAGE
    early.fixture.store.release_load("e", load)
    early.fixture.pump()
    assert early.fixture.store.pinned_bytes == 0
    assert early.fixture.store._engines.open["e"].promotions == {}
    early.fixture.check_accounts()


@pytest.mark.parametrize("failure", [TierCorruptError, TierMissError])
def test_a_predicted_object_that_does_not_come_ends_the_load_before_it(
    failure: type[Exception],
) -> None:
    early = Early()
    early.read(3)
    load = early.load()
    early.fixture.tier.fail = lambda: failure("as planned")
    early.read(1)
    early.fixture.tier.fail = None
    early.fixture.settle()
    end = early.ended()
    assert end is not None
    assert (end.outcome, end.usable) == (PromotionOutcome.PARTIAL, 3)
    assert early.pins_of(load) == 3
    early.fixture.store.release_load("e", load)
    early.fixture.settle()
    assert early.fixture.store.pinned_bytes == 0


def test_a_tier_that_hangs_after_an_early_answer_ends_the_promotion_at_its_deadline() -> None:
    early = Early()
    early.read(3)
    load = early.load()
    for call in early.fixture.calls("read:"):
        early.fixture.io.hold(call)
    early.fixture.advance(5.1)
    end = early.ended()
    assert end is not None
    assert (end.outcome, end.usable) == (PromotionOutcome.PARTIAL, 3)
    assert early.pins_of(load) == 3


def test_a_load_that_is_released_before_the_end_cancels_its_promotion() -> None:
    early = Early()
    early.read(3)
    load = early.load()
    early.fixture.store.release_load("e", load)
    early.fixture.pump()
    end = early.ended()
    assert end is not None
    assert (end.outcome, end.usable) == (PromotionOutcome.CANCELLED, 0)
    early.fixture.settle()
    assert early.fixture.store.pinned_bytes == 0
    assert early.fixture.store._engines.open["e"].promotions == {}


def test_an_engine_that_closes_while_keys_arrive_leaves_nothing_pinned() -> None:
    early = Early()
    early.read(3)
    early.load()
    early.fixture.store.close_engine("e", True)
    early.fixture.settle()
    assert early.fixture.store.pinned_bytes == 0
    assert early.fixture.store.accounts().reading == 0
    early.fixture.check_accounts()


def test_an_early_answer_that_no_load_takes_up_is_a_promotion_like_any_other() -> None:
    early = Early()
    early.read(CHUNKS)
    end = early.ended()
    assert end is not None
    assert end.usable == CHUNKS
    early.fixture.advance(61.0)
    assert early.fixture.store.pinned_bytes == 0
