"""Loads that begin before all of their keys are in RAM."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.stub_tierd import FIRST_GENERATION
from tests.unit.worker.worker_testbeds import RankTestbed, load_job

from kvtier.engines.common.jobs import ArrivedKeys, LoadJob

A, B, C = (1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)


def arriving(testbed: RankTestbed, *slots: int) -> LoadJob:
    """Load 7 of three keys, of which so many are in RAM."""
    return replace(load_job(7, A, B, C, slots=testbed.slots(*slots)), arriving=True)


def arrived(testbed: RankTestbed, *slots: int, last: bool = False, load: int = 7) -> None:
    generations = (FIRST_GENERATION,) * len(slots)
    testbed.loads.extend([ArrivedKeys(load, testbed.slots(*slots), generations, last)])
    testbed.run()


def test_keys_are_copied_as_they_arrive_and_the_load_is_reported_once(
    rank_testbed: RankTestbed,
) -> None:
    for slot in (1, 2, 3):
        rank_testbed.fill_slot(slot, 11 * slot)
    rank_testbed.add(arriving(rank_testbed, 1))
    rank_testbed.run()
    assert set(rank_testbed.page_bytes(1)) == {11}
    assert rank_testbed.taken().loads == []
    arrived(rank_testbed, 2)
    assert set(rank_testbed.page_bytes(5)) == {22}
    assert rank_testbed.taken().loads == []
    arrived(rank_testbed, 3, last=True)
    assert set(rank_testbed.page_bytes(9)) == {33}
    taken = rank_testbed.taken()
    assert [(each.keys_loaded, each.reason) for each in taken.loads] == [(3, "")]
    assert (taken.recving, taken.invalid_blocks) == ({"request-7"}, set())


def test_the_last_key_ends_the_load_even_if_no_message_says_that_it_is_the_last(
    rank_testbed: RankTestbed,
) -> None:
    rank_testbed.add(arriving(rank_testbed, 1))
    arrived(rank_testbed, 2, 3)
    assert [each.keys_loaded for each in rank_testbed.taken().loads] == [3]
    arrived(rank_testbed, last=True)
    assert rank_testbed.taken().loads == []


@pytest.mark.parametrize("named", [0, 1, 2])
def test_what_does_not_arrive_fails_the_load_from_there_on(
    rank_testbed: RankTestbed, named: int
) -> None:
    rank_testbed.add(arriving(rank_testbed, *range(1, named + 1)))
    rank_testbed.run()
    assert rank_testbed.taken().loads == []
    arrived(rank_testbed, last=True)
    taken = rank_testbed.taken()
    assert [(each.keys_loaded, each.reason) for each in taken.loads] == [(named, "not_arrived")]
    assert taken.invalid_blocks == set((A + B + C)[4 * named :])


def test_keys_that_never_come_end_the_load_at_its_deadline(rank_testbed: RankTestbed) -> None:
    rank_testbed.add(arriving(rank_testbed, 1))
    rank_testbed.run()
    rank_testbed.clock.now += 4.9
    rank_testbed.run()
    assert rank_testbed.taken().loads == []
    rank_testbed.clock.now += 0.2
    rank_testbed.run()
    taken = rank_testbed.taken()
    assert [(each.keys_loaded, each.reason) for each in taken.loads] == [(1, "limit")]
    arrived(rank_testbed, 2, 3, last=True)
    assert rank_testbed.taken().loads == []


def test_keys_after_one_that_was_lost_are_not_copied(rank_testbed: RankTestbed) -> None:
    """Its slot was reused: what comes after it is of no use."""
    rank_testbed.reuse(2, 99)
    rank_testbed.add(arriving(rank_testbed, 1))
    arrived(rank_testbed, 2)
    arrived(rank_testbed, 3, last=True)
    taken = rank_testbed.taken()
    assert [(each.keys_loaded, each.reason) for each in taken.loads] == [(1, "gone")]
    copied = [copy.shard for _, copies, _ in rank_testbed.engine.submitted for copy in copies]
    assert copied == [rank_testbed.slot(1)]


@pytest.mark.parametrize("end", ["cancelled", "lost", "identity"])
def test_a_load_that_is_stopped_while_keys_arrive_ends_at_once(
    rank_testbed: RankTestbed, end: str
) -> None:
    rank_testbed.add(arriving(rank_testbed, 1))
    rank_testbed.run()
    if end == "cancelled":
        rank_testbed.loads.cancel([7])
    else:
        rank_testbed.loads.stop_all(end)
    rank_testbed.run()
    taken = rank_testbed.taken()
    expected = 0 if end == "identity" else 1
    assert [(each.keys_loaded, each.reason) for each in taken.loads] == [(expected, end)]
    arrived(rank_testbed, 2, 3, last=True)
    assert rank_testbed.taken().loads == []


def test_later_loads_do_not_wait_for_one_whose_keys_are_still_arriving(
    rank_testbed: RankTestbed,
) -> None:
    rank_testbed.add(arriving(rank_testbed, 1), load_job(8, (13, 14), slots=rank_testbed.slots(4)))
    rank_testbed.run()
    assert [each.load for each in rank_testbed.taken().loads] == [8]
    arrived(rank_testbed, 9, load=99)
    arrived(rank_testbed, 2, 3, last=True)
    assert [each.load for each in rank_testbed.taken().loads] == [7]


def test_keys_of_a_load_that_expects_none_are_ignored(rank_testbed: RankTestbed) -> None:
    rank_testbed.engine.hold()
    rank_testbed.add(load_job(7, A, B, slots=rank_testbed.slots(1)))
    rank_testbed.run()
    arrived(rank_testbed, 2, last=True)
    rank_testbed.engine.move()
    rank_testbed.run()
    assert [(e.keys_loaded, e.reason) for e in rank_testbed.taken().loads] == [(1, "gone")]
