"""References to the engine's blocks: how many there may be, and that each is given back once."""

from __future__ import annotations

import pytest
from tests.unit.scheduler.scheduler_testbed import FakePool

from kvtier.engines.common.referenced_blocks import MAX_CACHE_FRACTION, ReferencedBlocks

BLOCKS = 40
MOST = BLOCKS // MAX_CACHE_FRACTION


@pytest.fixture
def blocks() -> ReferencedBlocks:
    found = ReferencedBlocks()
    found.pool = FakePool(BLOCKS)
    return found


def referenced(blocks: ReferencedBlocks) -> list[int]:
    assert isinstance(blocks.pool, FakePool)
    return blocks.pool.referenced()


def test_blocks_are_referenced_until_they_are_given_back(blocks: ReferencedBlocks) -> None:
    first, second = blocks.touch((3, 4)), blocks.touch((4, 7))
    assert referenced(blocks) == [3, 4, 7]
    assert blocks.count == 4, "counted once for each reference"
    blocks.free(first)
    assert referenced(blocks) == [4, 7]
    blocks.free(second)
    assert referenced(blocks) == []
    assert blocks.count == 0


def test_the_last_block_is_given_back_first(blocks: ReferencedBlocks) -> None:
    blocks.free(blocks.touch((3, 4, 5)))
    assert isinstance(blocks.pool, FakePool)
    assert blocks.pool.freed == [5, 4, 3]


def test_a_quarter_of_the_cache_may_be_referenced(blocks: ReferencedBlocks) -> None:
    taken = blocks.touch(range(1, MOST))
    assert blocks.fit(1)
    assert blocks.cannot_reference((20,), 1) == ""
    assert not blocks.fit(2)
    assert blocks.cannot_reference((20, 21), 2) == "in_flight_blocks"
    blocks.free(taken)
    assert blocks.cannot_reference((20, 21), 2) == ""


def test_one_object_may_always_be_referenced(blocks: ReferencedBlocks) -> None:
    assert blocks.fit(BLOCKS)
    assert blocks.cannot_reference(range(1, BLOCKS), BLOCKS - 1) == ""


def test_blocks_that_are_not_there_cannot_be_referenced(blocks: ReferencedBlocks) -> None:
    assert blocks.cannot_reference((3,), 2) == "blocks_gone"
    assert blocks.cannot_reference((), 1) == "blocks_gone"
    assert blocks.cannot_reference((3, 0), 2) == "blocks_gone", "the null block"


def test_without_a_pool_nothing_can_be_referenced() -> None:
    blocks = ReferencedBlocks()
    assert blocks.cannot_reference((3, 4), 2) == "no_block_pool"
    assert blocks.touch((3, 4)) == []
    blocks.free([])
    assert blocks.count == 0
