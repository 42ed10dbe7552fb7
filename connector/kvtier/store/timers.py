"""Things to do at a time: one heap, run by the owner from ``pump``.

Equal times run in the order they were set, so that the same inputs always give the same sequence.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

COMPACT_ABOVE = 1024
"""Cancelled timers stay in the heap until they come up; more than this many, and more than half of all, are swept."""


class Timer:
    """A pending call. ``cancel`` forgets it; cancelling twice, or after it ran, is harmless."""

    __slots__ = ("_owner", "call", "when")

    def __init__(self, owner: Timers, when: float, call: Callable[[], None]) -> None:
        self.when = when
        self.call: Callable[[], None] | None = call
        self._owner = owner

    def cancel(self) -> None:
        """Makes sure that the call is not made."""
        if self.call is not None:
            self.call = None
            self._owner.cancelled += 1


class Timers:
    """Pending timers, earliest first. Owner's thread only."""

    def __init__(self) -> None:
        self.cancelled = 0
        self._heap: list[tuple[float, int, Timer]] = []
        self._sequence = 0

    def at(self, when: float, call: Callable[[], None]) -> Timer:
        """Has ``call`` made by the first ``run_due`` whose time is at least ``when`` (seconds of the store's clock)."""
        if self.cancelled > COMPACT_ABOVE and self.cancelled * 2 > len(self._heap):
            self._heap = [item for item in self._heap if item[2].call is not None]
            heapq.heapify(self._heap)
            self.cancelled = 0
        timer = Timer(self, when, call)
        self._sequence += 1
        heapq.heappush(self._heap, (when, self._sequence, timer))
        return timer

    def run_due(self, now: float) -> None:
        """Makes every call that is due. Calls set meanwhile for ``now`` or earlier are made by the next run."""
        last = self._sequence
        postponed = []
        while self._heap and self._heap[0][0] <= now:
            item = heapq.heappop(self._heap)
            call = item[2].call
            if call is None:
                self.cancelled -= 1
            elif item[1] > last:
                postponed.append(item)
            else:
                item[2].call = None
                call()
        for item in postponed:
            heapq.heappush(self._heap, item)

    def next_due(self) -> float | None:
        """When the earliest pending call is due, or None."""
        while self._heap and self._heap[0][2].call is None:
            heapq.heappop(self._heap)
            self.cancelled -= 1
        return self._heap[0][0] if self._heap else None
