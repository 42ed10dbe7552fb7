"""The work queue: keys of policies to reconcile, deduplicated and rate-limited.

A key is queued once and processed by one worker at a time; if it is added during that time, it is
processed once more afterwards. A key that failed is retried after a pause that doubles per key,
until ``done`` or ``forget``. The number of existing keys bounds the queue.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

Key = tuple[str, str]
"""Namespace and name of a policy."""
FIRST_PAUSE_SECONDS = 0.2
LAST_PAUSE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Pauses:
    """Back-off of a key that fails."""

    first_seconds: float = FIRST_PAUSE_SECONDS
    last_seconds: float = LAST_PAUSE_SECONDS

    def after(self, failures: int, jitter: float) -> float:
        """The pause before the next attempt. ``jitter``: from 0 to 1."""
        pause: float = min(self.first_seconds * 2.0 ** min(failures - 1, 30), self.last_seconds)
        return pause * (0.75 + 0.5 * jitter)


class WorkQueue:
    """For one event loop. ``per_second``: the maximum rate of ``get``, and the size of a burst."""

    def __init__(
        self,
        per_second: float,
        pauses: Pauses = Pauses(),
        *,
        clock: Callable[[], float],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._per_second = per_second
        self._pauses = pauses
        self._clock = clock
        self._jitter = jitter
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._order = itertools.count()
        self._working: set[Key] = set()
        self._again: dict[Key, float] = {}
        self._failures: dict[Key, int] = {}
        self._changed = asyncio.Event()
        self._allowance = max(1.0, per_second)
        self._allowed_at = clock()

    def __len__(self) -> int:
        """The number of waiting keys, including those that were added while they are processed."""
        return len(self._due) + len(self._again)

    @property
    def ready(self) -> int:
        """The number of keys that are due."""
        now = self._clock()
        return sum(due <= now for due in self._due.values())

    @property
    def busy(self) -> bool:
        """Whether a key is being processed, is due, or waits for a retry."""
        return bool(self._working or self._failures) or self.ready > 0

    def add(self, key: Key, after_seconds: float = 0.0) -> None:
        """Adds the key, or moves it forward if it is due later.

        A negative number of seconds puts it before keys that became due after that time.
        """
        due = self._clock() + after_seconds
        if key in self._working:
            self._again[key] = min(due, self._again.get(key, due))
            return
        if due < self._due.get(key, float("inf")):
            self._due[key] = due
            heapq.heappush(self._heap, (due, next(self._order), key))
            self._changed.set()

    def failures(self, key: Key) -> int:
        """The number of consecutive failures of the key."""
        return self._failures.get(key, 0)

    async def get(self) -> Key:
        """Waits for the next key. The caller processes it and calls ``done`` or ``failed``."""
        while True:
            self._changed.clear()
            now = self._clock()
            while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
                heapq.heappop(self._heap)
            wait = self._heap[0][0] - now if self._heap else None
            if wait is not None and wait <= 0:
                wait = self._allow(now)
                if wait <= 0:
                    _, _, key = heapq.heappop(self._heap)
                    del self._due[key]
                    self._working.add(key)
                    return key
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def done(self, key: Key) -> None:
        """Processing succeeded."""
        self._failures.pop(key, None)
        self._release(key)

    def failed(self, key: Key, at_least_seconds: float = 0.0) -> float:
        """Processing failed. Schedules a retry and returns the pause before it."""
        self._failures[key] = self._failures.get(key, 0) + 1
        pause = max(at_least_seconds, self._pauses.after(self._failures[key], self._jitter()))
        # An addition during processing does not shorten the pause: every failure would become a
        # busy loop.
        self._again.pop(key, None)
        self._working.discard(key)
        self.add(key, pause)
        return pause

    def clear(self) -> None:
        """Removes every key that waits, and what is known of failures."""
        self._due.clear()
        self._heap.clear()
        self._again.clear()
        self._failures.clear()

    def forget(self, key: Key) -> None:
        """Removes the key, because its policy is gone."""
        self._failures.pop(key, None)
        self._due.pop(key, None)
        self._again.pop(key, None)

    def _release(self, key: Key) -> None:
        self._working.discard(key)
        due = self._again.pop(key, None)
        if due is not None:
            self.add(key, max(0.0, due - self._clock()))

    def _allow(self, now: float) -> float:
        """Takes a token and returns 0, or returns the seconds until there is one."""
        most = max(1.0, self._per_second)
        self._allowance = min(most, self._allowance + (now - self._allowed_at) * self._per_second)
        self._allowed_at = now
        if self._allowance >= 1.0:
            self._allowance -= 1.0
            return 0.0
        return (1.0 - self._allowance) / self._per_second
