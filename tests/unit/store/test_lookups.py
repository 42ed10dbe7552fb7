"""Keys that no index has are looked up in the tiers, within the time that is allowed."""

from __future__ import annotations

from tests.unit.store.store_fixture import (
    NAMESPACE,
    PAGE,
    StoreFixture,
    WatchedTier,
    block_hash,
    live,
    object_bytes,
    object_meta,
)

from kvtier.config.models import LiveTier
from kvtier.errors import TierUnavailableError
from kvtier.store.cost_model import Prefill, PrefixCost
from kvtier.store.lookups import ABSENT_SECONDS, LOOKUP_THREADS, MAX_CALLS, RETRY_SECONDS
from kvtier.store.types import PromotionOptions, PromotionOutcome, UsableTiersChanged
from kvtier.tiers.base import ObjectRef

DISK = 2


class SharedTier(WatchedTier):
    """A tier in which another process stores objects that its index does not have."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.alone = False
        self.probed: list[bytes] = []
        self._unknown: set[ObjectRef] = set()

    @property
    def asks_on_miss(self) -> bool:
        return not self.alone

    def store_elsewhere(self, *chunks: int) -> None:
        for chunk in chunks:
            ref = ObjectRef(NAMESPACE, b"\0" + block_hash(chunk))
            self._unknown.add(ref)

    def contains(self, ref: ObjectRef) -> bool:
        return ref not in self._unknown and super().contains(ref)

    def probe(self, ref: ObjectRef) -> bool:
        self.probed.append(ref.key)
        self._act("probe")
        if ref in self._unknown:
            self._unknown.discard(ref)
            self.objects[ref] = (
                object_bytes(ref.namespace, ref.key, (PAGE,)),
                object_meta(ref.namespace, ref.key, (PAGE,)),
            )
            self._on_change(ref.namespace, ref.key, True)
        return super().contains(ref)


class LookupFixture(StoreFixture):
    """A store over one shared tier with a lookup timeout of 50 ms."""

    def __init__(self, milliseconds: int = 50) -> None:
        settings = LiveTier(capacity_bytes=1 << 30, lookup_timeout_milliseconds=milliseconds)
        super().__init__(slots=64, values=live(disk=settings), tier_type=SharedTier)
        self.engine()

    @property
    def shared(self) -> SharedTier:
        assert isinstance(self.tier, SharedTier)
        return self.tier

    def look_up(self, *chunks: int, budget: float = 5.0, cost: PrefixCost | None = None) -> int:
        number = self.number()
        keys = [(0, block_hash(chunk)) for chunk in chunks]
        self.store.promote("e", number, keys, budget, cost, PromotionOptions(look_up=True))
        self.pump()
        return number

    def result(self, number: int) -> tuple[PromotionOutcome, int]:
        (end,) = self.ends(number)
        return end.outcome, end.usable

    def counted(self, reason: str, name: str = "tier_lookups") -> int:
        return self.counters.values.get((name, "disk", reason), 0)


def test_keys_are_looked_up_in_the_order_of_the_prompt() -> None:
    fixture = LookupFixture()
    fixture.shared.store_elsewhere(*range(20))
    fixture.look_up(*range(20))
    fixture.settle("lookup:")
    assert fixture.shared.probed == [b"\0" + block_hash(chunk) for chunk in range(20)]


def test_a_key_that_another_process_has_stored_is_found_and_loaded() -> None:
    fixture = LookupFixture()
    fixture.shared.store_elsewhere(*range(20))
    number = fixture.look_up(*range(30))
    fixture.settle()
    assert fixture.result(number) == (PromotionOutcome.WHOLE, 20)
    assert all(fixture.bits(chunk) & DISK for chunk in range(20))
    # One, two, four, eight and sixteen at a time, of which the last ones are absent.
    assert len(fixture.shared.probed) == 30
    assert fixture.counted("found") == 20


def test_one_lookup_tells_that_a_prompt_is_not_there() -> None:
    fixture = LookupFixture()
    number = fixture.look_up(*range(30))
    fixture.settle()
    assert fixture.result(number) == (PromotionOutcome.ABSENT, 0)
    assert len(fixture.shared.probed) == 1
    assert fixture.counted("absent") == 1


def test_what_ram_holds_is_provided_with_what_is_found() -> None:
    fixture = LookupFixture()
    fixture.put(0)
    fixture.settle()
    fixture.shared.store_elsewhere(1, 2)
    number = fixture.look_up(0, 1, 2, 3)
    fixture.settle()
    assert fixture.result(number) == (PromotionOutcome.WHOLE, 3)


def test_a_lookup_that_does_not_return_counts_as_absent_within_the_limit() -> None:
    fixture = LookupFixture(50)
    fixture.put(0)
    fixture.settle()
    number = fixture.look_up(0, 1, 2)
    (call,) = fixture.calls("lookup:")
    fixture.io.hold(call)
    fixture.advance(0.049)
    assert not fixture.ends(number)
    fixture.advance(0.001)
    assert fixture.result(number) == (PromotionOutcome.WHOLE, 1)
    assert fixture.counted("timed_out") == 1
    # A late answer enters the index.
    fixture.shared.store_elsewhere(1)
    fixture.io.run(call)
    fixture.pump()
    assert fixture.bits(1) & DISK


def test_the_limit_is_the_setting_in_force() -> None:
    for milliseconds in (10, 4_000):
        fixture = LookupFixture(milliseconds)
        number = fixture.look_up(1)
        fixture.io.hold(fixture.calls("lookup:")[0])
        fixture.advance(milliseconds / 1e3 - 0.001)
        assert not fixture.ends(number)
        fixture.advance(0.002)
        assert fixture.result(number)[0] is PromotionOutcome.ABSENT


def test_a_lookup_takes_at_most_a_twentieth_of_recomputing_what_is_unknown() -> None:
    fixture = LookupFixture(10_000)
    cost = PrefixCost(0, (256, 512), Prefill(1 / 1024, 0.0))
    number = fixture.look_up(1, 2, cost=cost)
    fixture.io.hold(fixture.calls("lookup:")[0])
    fixture.advance(0.024)
    assert not fixture.ends(number)
    fixture.advance(0.002)
    assert fixture.result(number)[0] is PromotionOutcome.ABSENT


def test_time_for_a_lookup_is_part_of_the_request_s_time() -> None:
    fixture = LookupFixture(4_000)
    fixture.shared.store_elsewhere(1)
    number = fixture.look_up(1, budget=5.0)
    (call,) = fixture.calls("lookup:")
    fixture.io.hold(call)
    fixture.advance(3.0)
    fixture.io.run(call)
    fixture.pump()
    (read,) = fixture.calls("read:")
    fixture.io.hold(read)
    fixture.advance(1.9)
    assert not fixture.ends(number)
    fixture.advance(0.2)
    assert fixture.result(number) == (PromotionOutcome.FAILED, 0)


def test_a_key_that_was_absent_is_not_asked_for_again_at_once() -> None:
    fixture = LookupFixture()
    fixture.look_up(1)
    fixture.settle()
    for _ in range(5):
        number = fixture.look_up(1)
        assert fixture.result(number)[0] is PromotionOutcome.ABSENT
    assert len(fixture.shared.probed) == 1
    fixture.advance(ABSENT_SECONDS)
    fixture.look_up(1)
    fixture.settle()
    assert len(fixture.shared.probed) == 2


def test_lookups_that_hang_are_bounded_and_delay_no_other() -> None:
    fixture = LookupFixture()
    for chunk in range(MAX_CALLS + 5):
        fixture.look_up(chunk)
    assert len(fixture.calls("lookup:")) == MAX_CALLS
    assert fixture.counted("busy") == 5
    for call in fixture.calls("lookup:")[:LOOKUP_THREADS]:
        fixture.io.hold(call)
    fixture.advance(0.1)
    # The others were not started, and are dropped.
    number = fixture.look_up(1_000)
    assert fixture.result(number)[0] is PromotionOutcome.ABSENT
    assert fixture.counted("busy") == 6
    for call in [each for each in fixture.calls("lookup:") if each.started]:
        fixture.io.run(call)
    fixture.pump()
    fixture.advance(RETRY_SECONDS)
    fixture.look_up(1_001)
    fixture.settle()
    assert len(fixture.shared.probed) == LOOKUP_THREADS + 1


def test_a_tier_whose_lookups_take_too_long_is_tried_now_and_then() -> None:
    fixture = LookupFixture(50)
    for chunk in range(8):
        fixture.look_up(chunk)
        for call in fixture.calls("lookup:"):
            fixture.io.hold(call)
            fixture.advance(0.2)
            fixture.io.run(call)
            fixture.pump()
    before = len(fixture.shared.probed)
    assert fixture.counted("too_slow") >= 1
    fixture.look_up(100)
    assert not fixture.calls("lookup:")
    fixture.advance(RETRY_SECONDS)
    fixture.look_up(101)
    fixture.settle()
    assert len(fixture.shared.probed) == before + 1


def test_errors_are_counted_and_open_the_breaker() -> None:
    fixture = LookupFixture()
    fixture.shared.fail = lambda: TierUnavailableError("gone")
    for chunk in range(5):
        number = fixture.look_up(chunk)
        fixture.settle("lookup:")
        assert fixture.result(number)[0] is PromotionOutcome.ABSENT
    assert fixture.counted("unavailable", "tier_lookups_failed") == 5
    assert not fixture.store.usable_bits & DISK
    number = fixture.look_up(10)
    assert fixture.result(number)[0] is PromotionOutcome.ABSENT
    assert not fixture.calls("lookup:")


def test_a_promotion_that_is_cancelled_during_its_lookup_ends_once() -> None:
    fixture = LookupFixture()
    fixture.shared.store_elsewhere(1)
    number = fixture.look_up(1)
    fixture.store.cancel("e", number)
    fixture.settle()
    assert fixture.result(number) == (PromotionOutcome.CANCELLED, 0)
    number = fixture.look_up(2)
    fixture.store.close_engine("e", True)
    fixture.settle()
    assert not fixture.store._engines.open


def test_nothing_is_looked_up_without_being_asked_or_without_other_writers() -> None:
    fixture = LookupFixture()
    fixture.promote(1)
    assert not fixture.calls("lookup:")
    fixture.shared.alone = True
    number = fixture.look_up(1)
    assert fixture.result(number)[0] is PromotionOutcome.ABSENT
    assert not fixture.calls("lookup:")


def test_schedulers_learn_which_tiers_are_asked() -> None:
    fixture = LookupFixture()
    assert fixture.store.asked_bits == DISK
    fixture.events.clear()
    fixture.shared.alone = True
    fixture.advance(5.0)
    fixture.settle()
    assert fixture.store.asked_bits == 0
    assert [type(event) for event in fixture.events].count(UsableTiersChanged) == 1
