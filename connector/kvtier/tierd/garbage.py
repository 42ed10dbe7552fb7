"""Keeps the interpreter's collector of cyclic garbage from stopping tierd's loop.

A full collection visits every object that may be part of a cycle, with the interpreter lock held:
about 30 ms for the modules of tierd alone, and more with every object in RAM. What is there when
tierd begins to serve is therefore never visited again. Young objects are collected as they are
made, a few thousand at a time. Full collections happen only while nothing is in use, because a
cycle that becomes garbage after it has grown old, such as a session that has ended, can wait.
"""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 700
"""A collection of the youngest objects follows when so many were made: the interpreter's own
value."""
YOUNG_COLLECTIONS = 4
"""A collection of the next generation follows after so many: about 3,500 objects, 2 ms."""
NEVER = 1 << 30
IDLE_PERIOD_SECONDS = 600.0
"""Between two full collections, if nothing is in use."""
LONGEST_PERIOD_SECONDS = 6 * 3600.0
"""Between two full collections. So long that a stall of some ten milliseconds does not matter, and
so short that what leaks meanwhile does not."""


class BoundedCollections:
    """The collector of this process, which must be tierd's own. Only the loop's thread uses it.
    ``now``: monotonic seconds."""

    def __init__(self, now: float) -> None:
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS, YOUNG_COLLECTIONS, NEVER)
        self._collected_at = now

    def run(self, now: float, idle: bool) -> bool:
        """Makes a full collection if one is due, and returns whether it did. ``idle``: nothing
        waits for the loop."""
        period = IDLE_PERIOD_SECONDS if idle else LONGEST_PERIOD_SECONDS
        if now - self._collected_at < period:
            return False
        gc.collect()
        self._collected_at = now
        return True
