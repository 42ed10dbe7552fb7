"""What a rank owes the engine: one report per load and per store, whatever fails.

vLLM waits for the report of a load without a time limit, and the scheduler side references the
blocks of a store until every rank has reported it. So each job is entered here before anything is
done with it. A job that an unexpected error has lost, that is, which is neither open nor ended, is
reported as failed. A report that is not owed is discarded and counted, because a second report
of a request ends the engine.

A report counts as made once vLLM has taken it: what a hook could not return is returned by the next
step's hooks. The engine's thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet

from kvtier.engines.common.jobs import LoadJob, StoreJob
from kvtier.engines.common.worker_state import (
    CompletionQueue,
    Completions,
    Counters,
    LoadEnd,
)

MAX_ENDED_LOADS = 4096
"""Ended loads that are remembered, so that a job that comes twice is not reported twice."""

OpenJobs = Callable[[AbstractSet[int], AbstractSet[int]], tuple[AbstractSet[int], AbstractSet[int]]]
"""(loads, stores) -> those of them that have not ended."""


def no_open_jobs(
    loads: AbstractSet[int], stores: AbstractSet[int]
) -> tuple[AbstractSet[int], AbstractSet[int]]:
    """The ``OpenJobs`` of a rank that copies nothing."""
    return frozenset(), frozenset()


class OwedReports:
    """The jobs of this rank that vLLM or the scheduler side waits for."""

    def __init__(self, completions: CompletionQueue, counters: Counters) -> None:
        self._completions = completions
        self._counters = counters
        self._loads: dict[int, LoadJob] = {}
        self._stores: set[int] = set()
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._seen: set[int] = set()
        """Loads of which the running ``take`` has found the end."""
        self._current = Completions()
        self._taken = False
        """Whether vLLM has taken the requests and blocks of ``_current``."""
        self._reported = True
        """Whether the scheduler side gets the rest of ``_current``."""

    def enter(self, loads: Iterable[LoadJob], stores: Iterable[StoreJob]) -> None:
        """Enters the jobs of a step, before anything is done with them."""
        for job in loads:
            if job.load not in self._ended:
                self._loads.setdefault(job.load, job)
        self._stores.update(job.reservation for job in stores)

    def fail_lost(self, open_jobs: OpenJobs) -> tuple[int, ...]:
        """Reports jobs that an unexpected error has lost; returns the stores among them.

        No copy of them runs: what was submitted is open until its end was seen.
        """
        if not self._loads and not self._stores:
            return ()
        # In this order: what ends meanwhile moves from the open jobs to the queue.
        open_loads, open_stores = open_jobs(self._loads.keys(), self._stores)
        queued_loads, queued_stores = self._completions.queued()
        loads = self._loads.keys() - open_loads - queued_loads
        stores = tuple(sorted(self._stores - open_stores - queued_stores))
        if loads or stores:
            self._counters.add("lost_jobs", len(loads) + len(stores))
            self._completions.reject_loads((self._loads[each] for each in sorted(loads)), "error")
            self._completions.add_stores(stores)
        return stores

    def take(self) -> Completions:
        """Returns what ended since the last call, and what vLLM has not taken before."""
        self._seen.clear()
        new = self._completions.take(self._is_owed)
        for result in new.loads:
            if self._loads.pop(result.load, None) is not None:
                self._ended[result.load] = None
                if len(self._ended) > MAX_ENDED_LOADS:
                    self._ended.popitem(last=False)
        unexpected = new.stores_done.keys() - self._stores
        for reservation in unexpected:
            del new.stores_done[reservation]
        self._counters.add("unexpected_reports", len(unexpected))
        self._stores.difference_update(new.stores_done)
        self._current = self._left().merged(new)
        self._taken = self._reported = False
        return self._current

    def _is_owed(self, end: LoadEnd) -> bool:
        number = end.result.load
        if end.result.follows or (number in self._loads and number not in self._seen):
            self._seen.add(number)
            return True
        self._counters.add("unexpected_reports")
        return False

    def _left(self) -> Completions:
        if not self._taken:
            return self._current
        if not self._reported:
            return Completions(loads=self._current.loads, stores_done=self._current.stores_done)
        return Completions()

    def hand_over(self) -> None:
        """vLLM takes the requests and blocks of the last ``take``."""
        self._taken = True

    def withhold(self) -> None:
        """vLLM did not get what the last ``take`` returned."""
        self._taken = False

    @property
    def current(self) -> Completions:
        """What was handed over and is not reported to the scheduler side yet."""
        return self._current if self._taken and not self._reported else Completions()

    def reported(self) -> None:
        """The scheduler side gets ``current``."""
        self._reported = self._taken
