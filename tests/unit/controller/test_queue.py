"""The queue of policies to look at: once each, one at a time, paced, with pauses after failures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvtier_operator.kube.queue import Key, Pauses, WorkQueue

A, B = ("n", "a"), ("n", "b")


class Clock:
    """Turned by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def queue(clock: Clock, per_second: float = 1000.0) -> WorkQueue:
    return WorkQueue(
        per_second, Pauses(first_seconds=1.0, last_seconds=8.0), clock=clock, jitter=lambda: 0.5
    )


def run_scenario(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


async def now(work: WorkQueue) -> Key | None:
    """The key that can be had at once."""
    pending = asyncio.ensure_future(work.get())
    for _ in range(5):
        await asyncio.sleep(0)
    if pending.done():
        return pending.result()
    pending.cancel()
    return None


def test_a_key_that_is_added_often_is_handed_out_once() -> None:
    async def scenario() -> None:
        work = queue(Clock())
        for _ in range(100):
            work.add(A)
        assert (len(work), await now(work), len(work)) == (1, A, 0)
        assert await now(work) is None

    run_scenario(scenario)


def test_a_key_that_is_added_during_its_processing_is_processed_once_more() -> None:
    async def scenario() -> None:
        work = queue(Clock())
        work.add(A)
        assert await now(work) == A
        work.add(A)
        work.add(A)
        assert await now(work) is None, "a key is processed by one worker at a time"
        work.done(A)
        assert await now(work) == A
        work.done(A)
        assert await now(work) is None

    run_scenario(scenario)


def test_the_earlier_of_two_times_counts() -> None:
    async def scenario() -> None:
        clock = Clock()
        work = queue(clock)
        work.add(A, 60)
        work.add(A, 5)
        work.add(A, 90)
        assert await now(work) is None
        clock.now = 5
        assert await now(work) == A
        work.done(A)
        clock.now = 1000
        assert await now(work) is None

    run_scenario(scenario)


def test_an_urgent_key_is_processed_before_waiting_keys() -> None:
    async def scenario() -> None:
        work = queue(Clock())
        work.add(A)
        work.add(B, -60)
        assert [await now(work), await now(work)] == [B, A]

    run_scenario(scenario)


def test_pauses_after_failures_double_to_a_bound_and_end_with_success() -> None:
    async def scenario() -> None:
        clock = Clock()
        work = queue(clock)
        work.add(A)
        waits = []
        for _ in range(6):
            assert await now(work) == A
            waits.append(work.failed(A))
            clock.now += waits[-1]
        assert waits == [1, 2, 4, 8, 8, 8]
        assert await now(work) == A
        work.done(A)
        assert work.failures(A) == 0
        work.add(A)
        assert await now(work) == A
        assert work.failed(A, at_least_seconds=3) == 3

    run_scenario(scenario)


def test_events_do_not_shorten_the_pause_of_a_key_that_failed_while_it_was_worked_on() -> None:
    async def scenario() -> None:
        clock = Clock()
        work = queue(clock)
        work.add(A)
        await now(work)
        work.add(A)
        work.failed(A)
        assert await now(work) is None
        clock.now = 1
        assert await now(work) == A

    run_scenario(scenario)


def test_a_failing_key_does_not_delay_other_keys() -> None:
    async def scenario() -> None:
        work = queue(Clock())
        work.add(A)
        await now(work)
        work.failed(A)
        work.add(B)
        assert await now(work) == B

    run_scenario(scenario)


def test_no_more_keys_per_second_than_allowed_after_a_burst() -> None:
    async def scenario() -> None:
        clock = Clock()
        work = queue(clock, per_second=2)
        for number in range(6):
            work.add(("n", str(number)))
        handed = []
        for tenth in range(30):
            clock.now = tenth / 10
            while (key := await now(work)) is not None:
                handed.append(clock.now)
                work.done(key)
        assert handed == [0, 0, 0.5, 1, 1.5, 2]

    run_scenario(scenario)


def test_the_state_of_a_deleted_policy_is_removed() -> None:
    async def scenario() -> None:
        work = queue(Clock())
        work.add(A)
        await now(work)
        work.failed(A)
        work.forget(A)
        assert (len(work), work.failures(A), work.busy) == (0, 0, False)

    run_scenario(scenario)


def test_a_waiting_worker_is_woken() -> None:
    async def scenario() -> None:
        work = queue(Clock())
        pending = asyncio.ensure_future(work.get())
        await asyncio.sleep(0)
        work.add(A)
        assert await pending == A

    run_scenario(scenario)
