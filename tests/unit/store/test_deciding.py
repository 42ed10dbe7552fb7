"""How a promotion under ``Cost`` uses what an engine says about its prompt."""

from __future__ import annotations

import logging
import math

import msgspec
import pytest
from tests.unit.store.store_world import PAGE, World, block_hash, live

from kvtier.config.models import LiveTier
from kvtier.store.cost_model import Prefill, PrefixCost
from kvtier.store.selection import usable_shape
from kvtier.store.types import PromotionOutcome
from kvtier.tierd.wire import Promote, decode_from_engine, encode

CHUNK = 256
PREFILL = Prefill(1e-3, 0.0)
"""A chunk takes 0.256 s to compute."""


def shape(chunks: int, prefill: Prefill | None = PREFILL, waited: float = 0.0) -> PrefixCost:
    return PrefixCost(0, tuple((i + 1) * CHUNK for i in range(chunks)), prefill, waited)


def promote(
    world: World, *chunks: int, given: PrefixCost | None = None, budget: float = 60.0
) -> int:
    number = world.number()
    keys = [(0, block_hash(chunk)) for chunk in chunks]
    world.store.promote("e", number, keys, budget, given or shape(len(chunks)))
    world.pump()
    return number


def world_with(*chunks: int, threads: int = 8, min_load_tokens: int = 0, slots: int = 64) -> World:
    values = live(disk=LiveTier(capacity_bytes=1 << 30)).model_copy(
        update={"min_load_tokens": min_load_tokens}
    )
    world = World(slots=slots, values=values, read_threads=threads)
    world.engine()
    world.lower(*chunks)
    return world


def read_loads(
    world: World, seconds: float, first: int = 1_000, loads: int = 4, reads: int = 4
) -> None:
    """Loads that take so long, so that there is an estimate."""
    for i in range(loads):
        chunks = [first + i * reads + j for j in range(reads)]
        world.lower(*chunks)
        world.promote(*chunks, budget=600.0)
        for call in world.calls("read:"):
            world.io.hold(call)
        world.advance(seconds)
        world.settle("read:")


def test_the_clock_ends_a_wait_after_half_of_recomputing() -> None:
    world = world_with(*range(4))
    number = promote(world, *range(4))
    began = world.clock.now
    world.advance(4 * 0.256 * 0.5 - 0.001)
    assert world.ends(number) == []
    world.advance(0.002)
    (end,) = world.ends(number)
    assert end.outcome is PromotionOutcome.FAILED
    assert world.stamps[world.events.index(end)] == pytest.approx(began + 4 * 0.256 * 0.5)


def test_what_has_arrived_in_order_gives_back_the_time_of_computing_it() -> None:
    world = world_with(*range(4))
    number = promote(world, *range(4))
    world.advance(0.5)
    world.io.run(world.calls("read:")[0])
    world.pump()
    world.advance(0.256)
    assert world.ends(number) == []
    world.advance(0.02)
    (end,) = world.ends(number)
    assert (end.outcome, end.usable) == (PromotionOutcome.PARTIAL, 1)


def test_what_has_arrived_out_of_order_gives_nothing_back() -> None:
    world = world_with(*range(4))
    number = promote(world, *range(4))
    for call in world.calls("read:")[1:]:
        world.io.run(call)
    world.pump()
    world.advance(0.52)
    assert [end.usable for end in world.ends(number)] == [0]


def test_time_that_the_request_has_waited_before_counts() -> None:
    world = world_with(*range(4))
    number = promote(world, *range(4), given=shape(4, waited=0.5))
    world.advance(0.02)
    assert len(world.ends(number)) == 1


def test_the_budget_ends_a_wait_that_the_clock_would_allow() -> None:
    world = world_with(*range(4))
    number = promote(world, *range(4), budget=0.1)
    world.advance(0.11)
    assert len(world.ends(number)) == 1


def test_a_tier_slower_than_recomputing_is_not_read() -> None:
    world = world_with(*range(4))
    read_loads(world, seconds=3.0)
    number = promote(world, *range(4))
    assert [end.outcome for end in world.ends(number)] == [PromotionOutcome.FAILED]
    assert world.counted("selections", "", "recomputing_is_faster") == 1
    assert world.counted("tier_too_slow", "disk") == 1


def test_a_trial_reads_one_round_for_nobody_and_its_objects_stay() -> None:
    world = world_with(*range(12), threads=4)
    read_loads(world, seconds=3.0)
    world.advance(31.0)
    number = promote(world, *range(12))
    assert len(world.ends(number)) == 1
    assert world.counted("tier_probe_reads", "disk") == len(world.calls("read:")) // 4 == 1
    promote(world, *range(12))
    assert len(world.calls("read:")) == 4
    world.settle("read:")
    assert [world.bits(chunk) & 1 for chunk in range(12)] == [1] * 4 + [0] * 8
    world.check_accounts()


def test_a_plan_in_stages_reads_so_many_at_a_time_and_goes_on_in_order() -> None:
    world = world_with(*range(8))
    # A load of eight takes 1.6 s where computing them takes 2.05: the clock would be out before one of them is there.
    read_loads(world, seconds=1.6, reads=8)
    number = promote(world, *range(8))
    assert len(world.calls("read:")) == 4
    for expected in (4, 4, 4, 4, 3, 2, 1, 0):
        world.io.run(world.calls("read:")[0])
        world.pump()
        assert len(world.calls("read:")) == expected
    assert [end.outcome for end in world.ends(number)] == [PromotionOutcome.WHOLE]


def test_a_key_that_comes_otherwise_before_its_stage_is_not_read() -> None:
    world = world_with(*range(8))
    read_loads(world, seconds=1.6, reads=8)
    number = promote(world, *range(8))
    world.put(6)
    world.settle("read:")
    assert [end.outcome for end in world.ends(number)] == [PromotionOutcome.WHOLE]
    assert world.tier.calls.count("read") == 4 * 8 + 7


def test_a_key_whose_tier_goes_before_its_stage_ends_the_prefix_there() -> None:
    world = world_with(*range(8))
    read_loads(world, seconds=1.6, reads=8)
    number = promote(world, *range(8))
    world.tier.drop("a" * 32, b"\0" + block_hash(5))
    world.pump()
    world.settle("read:")
    assert [(end.outcome, end.usable) for end in world.ends(number)] == [
        (PromotionOutcome.PARTIAL, 5)
    ]
    world.check_accounts()


def test_nobody_joins_a_read_that_is_past_its_estimate() -> None:
    world = world_with(*range(4))
    read_loads(world, seconds=0.01)
    first = promote(world, 0)
    world.io.hold(world.calls("read:")[0])
    world.advance(0.003)
    second = promote(world, 0)
    assert world.ends(second) == []
    world.advance(0.05)
    third = promote(world, 0)
    assert [end.usable for end in world.ends(third)] == [0]
    assert world.counted("promotions_cut", "", "read_past_its_estimate") == 1
    assert world.ends(first) == []


def test_nobody_joins_a_read_that_has_gone_past_its_estimate_by_the_time_of_its_stage() -> None:
    world = world_with(*range(8))
    read_loads(world, seconds=1.6, reads=8)
    other = world.promote(6, budget=60.0)
    (hung,) = world.calls("read:")
    world.io.hold(hung)
    world.advance(0.05)
    number = promote(world, *range(8))
    assert 0 < len(world.calls("read:")) < 8
    world.advance(0.4)
    while (calls := [call for call in world.calls("read:") if call is not hung]) and not world.ends(
        number
    ):
        world.io.run(calls[0])
        world.pump()
    # It ends with what is there, instead of waiting until its clock is out for one that may never come.
    assert [(end.outcome, end.usable) for end in world.ends(number)] == [
        (PromotionOutcome.PARTIAL, 6)
    ]
    assert world.counted("promotions_cut", "", "read_past_its_estimate") == 1
    assert world.ends(other) == []
    world.check_accounts()


def test_too_few_tokens_are_not_promoted() -> None:
    world = world_with(0, 1, min_load_tokens=512)
    number = promote(world, 0)
    assert len(world.ends(number)) == 1
    assert world.counted("selections", "", "below_min_load_tokens") == 1
    assert world.ends(promote(world, 0, 1)) == []


def test_every_decision_can_be_read_in_the_debug_log(caplog: pytest.LogCaptureFixture) -> None:
    world = world_with(*range(4))
    with caplog.at_level(logging.DEBUG, "kvtier.store.selection"):
        promote(world, *range(4))
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
def test_a_shape_that_cannot_be_is_counted_and_not_believed(given: PrefixCost) -> None:
    assert not usable_shape(given, 2)
    world = world_with(0, 1)
    number = promote(world, 0, 1, given=given)
    assert world.counted("protocol_violations", "", "prompt_shape") == 1
    world.settle("read:")
    assert [end.outcome for end in world.ends(number)] == [PromotionOutcome.WHOLE]


def test_a_promotion_without_a_shape_means_what_it_always_did() -> None:
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
    world = world_with(*range(4))
    promote(world, *range(4))
    assert world.store.accounts().reading == 4 * PAGE
