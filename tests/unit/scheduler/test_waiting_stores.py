"""Chunks that wait for a slot: in which order they are stored or given up, and what they cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.support.python_calls import python_lines
from tests.unit.scheduler.groups_testbed import GroupsTestbed
from tests.unit.scheduler.scheduler_testbed import BLOCK, CHUNK

from kvtier.engines.common.waiting_stores import (
    WAITING_SECONDS,
    WAITING_STEPS,
    ChunkBlocks,
    WaitingStores,
)

GROUPS = 3


@dataclass
class _One:
    name: str
    group: int
    until: float
    steps_left: int = WAITING_STEPS


class _Model:
    """One queue, in which every chunk is looked at in every step."""

    def __init__(self) -> None:
        self.queue: deque[_One] = deque()

    def step(self, slots: list[deque[int]], now: float) -> tuple[list[str], list[str]]:
        """Names of the chunks that are stored, and of those that are given up."""
        stored, waiting = [], deque[_One]()
        for one in self.queue:
            if slots[one.group]:
                slots[one.group].popleft()
                stored.append(one.name)
            else:
                one.steps_left -= 1
                waiting.append(one)
        given_up = []
        while waiting and waiting[0].steps_left < 0 and waiting[0].until <= now:
            given_up.append(waiting.popleft().name)
        self.queue = waiting
        return stored, given_up


STEPS = st.lists(
    st.tuples(
        st.lists(st.integers(0, GROUPS - 1), max_size=6),
        st.lists(st.integers(0, 3), min_size=GROUPS, max_size=GROUPS),
        st.sampled_from([0.0, WAITING_SECONDS / 3, WAITING_SECONDS]),
    ),
    max_size=20,
)


@given(steps=STEPS)
def test_chunks_leave_in_the_order_in_which_they_came(
    steps: list[tuple[list[int], list[int], float]],
) -> None:
    waiting, model, now, number = WaitingStores(GROUPS), _Model(), 0.0, 0
    state: Any = None
    for added, free, seconds in steps:
        for group in added:
            number += 1
            name = f"c{number}"
            waiting.add(ChunkBlocks(group, name.encode(), b"", state, (), []), now)
            model.queue.append(_One(name, group, now + WAITING_SECONDS))
        now += seconds
        slots = [deque(range(count)) for count in free]
        expected = model.step([deque(each) for each in slots], now)
        waiting.begin_step()
        stored = []
        for chunk in waiting.with_slots(slots):
            slots[chunk.group].popleft()
            stored.append(chunk.key.decode())
        given_up = [chunk.key.decode() for chunk in waiting.take_given_up(now)]
        assert (stored, given_up) == expected
        assert len(waiting) == len(model.queue)
    assert [chunk.key.decode() for chunk in waiting.take_all()] == [one.name for one in model.queue]
    assert not waiting


def _with_waiting(chunks: int) -> GroupsTestbed:
    """A decoding request, and ``chunks`` chunks of another one whose states wait for a slot."""
    testbed = GroupsTestbed()
    for slots in testbed.scheduler.session.credits:
        slots.clear()
    request = testbed.request((chunks + 1) * CHUNK, "waits")
    testbed.ask(request)
    tables = testbed.tables_of(request.num_tokens)
    offers: Iterable[tuple[int, int, int]] = [
        (2, 2000 + number, (number + 1) * CHUNK) for number in range(chunks)
    ]
    testbed.compute(request, chunks * CHUNK, tables, list(offers))
    testbed.report()
    # 20 slots of each group were free.
    assert testbed.scheduler.stores.in_flight - len(testbed.built.stores) >= chunks
    return testbed


def test_chunks_that_wait_cost_a_step_nothing() -> None:
    """The engine's thread does the same for a step, however many of them there are."""
    lines = []
    for chunks in (50, 250):
        testbed = _with_waiting(chunks)
        request = testbed.request(BLOCK, "decodes")
        testbed.ask(request)
        tables = testbed.tables_of(BLOCK)
        testbed.compute(request, BLOCK - 1, tables)
        testbed.report()
        step = partial(testbed.compute, request, 1, tables)
        lines.append(python_lines(step))
    assert lines[1] <= lines[0] + 5
