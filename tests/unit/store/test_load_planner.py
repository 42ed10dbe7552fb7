"""Promotions with selection ``Cost``: deadlines, stages and probes."""

from __future__ import annotations

import logging
import math

import msgspec
import pytest
from tests.unit.store.store_fixture import PAGE, StoreFixture, block_hash, live

from kvtier.config.models import LiveTier, Selection
from kvtier.store.cost_model import Prefill, PrefixCost
from kvtier.store.types import PromotionOutcome
from kvtier.tierd.wire import Promote, decode_from_engine, encode

CHUNK = 256
PREFILL = Prefill(1e-3, 0.0)
"""A chunk takes 0.256 s to compute."""


def shape(chunks: int, prefill: Prefill | None = PREFILL, waited: float = 0.0) -> PrefixCost:
    return PrefixCost(0, tuple((i + 1) * CHUNK for i in range(chunks)), prefill, waited)


def promote(
    fixture: StoreFixture, *chunks: int, given: PrefixCost | None = None, budget: float = 60.0
) -> int:
    number = fixture.number()
    keys = [(0, block_hash(chunk)) for chunk in chunks]
    fixture.store.promote("e", number, keys, budget, given or shape(len(chunks)))
    fixture.pump()
    return number


def world_with(
    *chunks: int, threads: int = 8, min_load_tokens: int = 0, slots: int = 64
) -> StoreFixture:
    values = live(disk=LiveTier(capacity_bytes=1 << 30)).model_copy(
        update={"min_load_tokens": min_load_tokens}
    )
    fixture = StoreFixture(slots=slots, values=values, read_threads=threads)
    fixture.engine()
    fixture.put_in_tier(*chunks)
    return fixture


def read_loads(
    fixture: StoreFixture, seconds: float, first: int = 1_000, loads: int = 4, reads: int = 4
) -> None:
    """Loads that take so long, so that there is an estimate."""
    for i in range(loads):
        chunks = [first + i * reads + j for j in range(reads)]
        fixture.put_in_tier(*chunks)
        fixture.promote(*chunks, budget=600.0)
        for call in fixture.calls("read:"):
            fixture.io.hold(call)
        fixture.advance(seconds)
        fixture.settle("read:")


def test_the_deadline_ends_a_wait_after_half_of_the_recomputing_time() -> None:
    fixture = world_with(*range(4))
    number = promote(fixture, *range(4))
    began = fixture.clock.now
    fixture.advance(4 * 0.256 * 0.5 - 0.001)
    assert fixture.ends(number) == []
    fixture.advance(0.002)
    (end,) = fixture.ends(number)
    assert end.outcome is PromotionOutcome.FAILED
    assert fixture.stamps[fixture.events.index(end)] == pytest.approx(began + 4 * 0.256 * 0.5)


def test_keys_that_arrive_in_order_extend_the_deadline_by_their_computing_time() -> None:
    fixture = world_with(*range(4))
    number = promote(fixture, *range(4))
    fixture.advance(0.5)
    fixture.io.run(fixture.calls("read:")[0])
    fixture.pump()
    fixture.advance(0.256)
    assert fixture.ends(number) == []
    fixture.advance(0.02)
    (end,) = fixture.ends(number)
    assert (end.outcome, end.usable) == (PromotionOutcome.PARTIAL, 1)


def test_keys_that_arrive_out_of_order_do_not_extend_the_deadline() -> None:
    fixture = world_with(*range(4))
    number = promote(fixture, *range(4))
    for call in fixture.calls("read:")[1:]:
        fixture.io.run(call)
    fixture.pump()
    fixture.advance(0.52)
    assert [end.usable for end in fixture.ends(number)] == [0]


def test_time_waited_before_the_promotion_counts() -> None:
    fixture = world_with(*range(4))
    number = promote(fixture, *range(4), given=shape(4, waited=0.5))
    fixture.advance(0.02)
    assert len(fixture.ends(number)) == 1


def test_the_budget_ends_a_wait_that_the_deadline_would_allow() -> None:
    fixture = world_with(*range(4))
    number = promote(fixture, *range(4), budget=0.1)
    fixture.advance(0.11)
    assert len(fixture.ends(number)) == 1


def test_a_tier_slower_than_recomputing_is_not_read() -> None:
    fixture = world_with(*range(4))
    read_loads(fixture, seconds=3.0)
    number = promote(fixture, *range(4))
    assert [end.outcome for end in fixture.ends(number)] == [PromotionOutcome.FAILED]
    assert fixture.counted("selections", "", "recomputing_is_faster") == 1
    assert fixture.counted("tier_too_slow", "disk") == 1


def test_a_probe_reads_one_round_and_its_objects_stay_in_ram() -> None:
    fixture = world_with(*range(12), threads=4)
    read_loads(fixture, seconds=3.0)
    fixture.advance(31.0)
    number = promote(fixture, *range(12))
    assert len(fixture.ends(number)) == 1
    assert fixture.counted("tier_probe_reads", "disk") == len(fixture.calls("read:")) // 4 == 1
    promote(fixture, *range(12))
    assert len(fixture.calls("read:")) == 4
    fixture.settle("read:")
    assert [fixture.bits(chunk) & 1 for chunk in range(12)] == [1] * 4 + [0] * 8
    fixture.check_accounts()


def test_a_plan_in_stages_limits_parallel_reads_and_continues_in_order() -> None:
    fixture = world_with(*range(8))
    # A load of eight takes 1.6 s where computing them takes 2.05: the clock would be out before one
    # of them is there.
    read_loads(fixture, seconds=1.6, reads=8)
    number = promote(fixture, *range(8))
    assert len(fixture.calls("read:")) == 4
    for expected in (4, 4, 4, 4, 3, 2, 1, 0):
        fixture.io.run(fixture.calls("read:")[0])
        fixture.pump()
        assert len(fixture.calls("read:")) == expected
    assert [end.outcome for end in fixture.ends(number)] == [PromotionOutcome.WHOLE]


def test_a_key_that_becomes_resident_before_its_stage_is_not_read() -> None:
    fixture = world_with(*range(8))
    read_loads(fixture, seconds=1.6, reads=8)
    number = promote(fixture, *range(8))
    fixture.put(6)
    fixture.settle("read:")
    assert [end.outcome for end in fixture.ends(number)] == [PromotionOutcome.WHOLE]
    assert fixture.tier.calls.count("read") == 4 * 8 + 7


def test_a_key_whose_tier_is_suspended_before_its_stage_ends_the_prefix() -> None:
    fixture = world_with(*range(8))
    read_loads(fixture, seconds=1.6, reads=8)
    number = promote(fixture, *range(8))
    fixture.tier.drop("a" * 32, b"\0" + block_hash(5))
    fixture.pump()
    fixture.settle("read:")
    assert [(end.outcome, end.usable) for end in fixture.ends(number)] == [
        (PromotionOutcome.PARTIAL, 5)
    ]
    fixture.check_accounts()


def test_a_read_past_its_estimate_cannot_be_joined() -> None:
    fixture = world_with(*range(4))
    read_loads(fixture, seconds=0.01)
    first = promote(fixture, 0)
    fixture.io.hold(fixture.calls("read:")[0])
    fixture.advance(0.003)
    second = promote(fixture, 0)
    assert fixture.ends(second) == []
    fixture.advance(0.05)
    third = promote(fixture, 0)
    assert [end.usable for end in fixture.ends(third)] == [0]
    assert fixture.counted("promotions_cut", "", "read_past_its_estimate") == 1
    assert fixture.ends(first) == []


def test_a_read_past_its_estimate_at_the_time_of_its_stage_cannot_be_joined() -> None:
    fixture = world_with(*range(8))
    read_loads(fixture, seconds=1.6, reads=8)
    other = fixture.promote(6, budget=60.0)
    (hung,) = fixture.calls("read:")
    fixture.io.hold(hung)
    fixture.advance(0.05)
    number = promote(fixture, *range(8))
    assert 0 < len(fixture.calls("read:")) < 8
    fixture.advance(0.4)
    while (
        calls := [call for call in fixture.calls("read:") if call is not hung]
    ) and not fixture.ends(number):
        fixture.io.run(calls[0])
        fixture.pump()
    # It ends with what is there, instead of waiting until its clock is out for one that may never
    # come.
    assert [(end.outcome, end.usable) for end in fixture.ends(number)] == [
        (PromotionOutcome.PARTIAL, 6)
    ]
    assert fixture.counted("promotions_cut", "", "read_past_its_estimate") == 1
    assert fixture.ends(other) == []
    fixture.check_accounts()


def test_too_few_tokens_are_not_promoted() -> None:
    fixture = world_with(0, 1, min_load_tokens=512)
    number = promote(fixture, 0)
    assert len(fixture.ends(number)) == 1
    assert fixture.counted("selections", "", "below_min_load_tokens") == 1
    assert fixture.ends(promote(fixture, 0, 1)) == []


def test_every_decision_can_be_read_in_the_debug_log(caplog: pytest.LogCaptureFixture) -> None:
    fixture = world_with(*range(4))
    with caplog.at_level(logging.DEBUG, "kvtier.store.selection"):
        promote(fixture, *range(4))
    assert "1024 tokens from disk (ready in 0.0 ms): tier_without_estimate" in caplog.text


@pytest.mark.parametrize(
    "given",
    [
        PrefixCost(0, (256,)),
        PrefixCost(0, (256, 256)),
        PrefixCost(300, (256, 512)),
        PrefixCost(-1, (256, 512)),
        PrefixCost(0, (256, 512), Prefill(-1.0, 0.0)),
        PrefixCost(0, (256, 512), Prefill(math.nan, 0.0)),
        PrefixCost(0, (256, 512), None, -1.0),
        PrefixCost(0, (256, 512), None, math.inf),
    ],
)
def test_an_invalid_prefix_cost_is_counted_and_ignored(given: PrefixCost) -> None:
    assert not given.is_valid(2)
    fixture = world_with(0, 1)
    number = promote(fixture, 0, 1, given=given)
    assert fixture.counted("protocol_violations", "", "prefix_cost") == 1
    fixture.settle("read:")
    assert [end.outcome for end in fixture.ends(number)] == [PromotionOutcome.WHOLE]


def test_a_promotion_without_a_prefix_cost_takes_the_longest_prefix() -> None:
    short = msgspec.msgpack.encode(["Promote", 1, [[0, b"k"]], 5.0])
    assert decode_from_engine(short) == Promote(promotion=1, keys=((0, b"k"),), budget_seconds=5.0)
    full = Promote(
        promotion=1,
        keys=((0, b"k"),),
        budget_seconds=5.0,
        start_tokens=3,
        ends=(256,),
        alpha=1e-5,
        beta=1e-9,
    )
    assert decode_from_engine(encode(full)) == full


def test_objects_are_counted_with_their_whole_size() -> None:
    fixture = world_with(*range(4))
    promote(fixture, *range(4))
    assert fixture.store.accounts().reading == 4 * PAGE


@pytest.mark.parametrize("selection", list(Selection))
@pytest.mark.parametrize(("present", "usable"), [((1, 2, 3), 3), ((1, 2), 0), ((2, 3), 0)])
def test_keys_that_are_of_use_together_only_are_read_if_all_are_there(
    selection: Selection, present: tuple[int, ...], usable: int
) -> None:
    fixture = StoreFixture(values=live(selection, disk=LiveTier(capacity_bytes=1 << 30)))
    fixture.engine()
    fixture.put_in_tier(*present)
    given = PrefixCost(0, (1, 2, 3 * CHUNK), PREFILL, whole=True)
    number = promote(fixture, 1, 2, 3, given=given)
    assert len(fixture.calls("read:")) == usable
    fixture.settle("read:")
    (end,) = fixture.ends(number)
    assert end.usable == usable


def test_a_part_of_keys_that_are_of_use_together_only_earns_no_time() -> None:
    fixture = world_with(1, 2, 3)
    given = PrefixCost(0, (1, 2, 3 * CHUNK), PREFILL, whole=True)
    number = promote(fixture, 1, 2, 3, given=given)
    for call in fixture.calls("read:")[:2]:
        fixture.io.run(call)
    fixture.pump()
    fixture.advance(3 * 0.256 * 0.5 + 0.01)
    assert len(fixture.ends(number)) == 1
