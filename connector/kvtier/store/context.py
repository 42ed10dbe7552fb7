"""Things to do at a time: one heap, run by the owner from ``pump``.

Equal times run in the order they were set, so that the same inputs always give the same sequence.

Errors that nobody raises on purpose: bugs, in a tier or below it. They cost a miss like every other error, and must be seen.

What all parts of the store work with, and what they need from outside.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvtier.errors import TierError
from kvtier.store.slot_table import SlotRecord, SlotTable, object_digest
from kvtier.store.types import Clock, IoExecutor, StoreCounters, StoreEvent
from kvtier.tiers.checksum import Checksum

if TYPE_CHECKING:
    from kvtier.store.state import Entry
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


REPEAT_SECONDS = 600.0
MAX_KINDS = 64
"""Kinds that are told apart; what comes after that many is only counted."""
_log = logging.getLogger("kvtier.store")


class UnexpectedErrors:
    """Logs each kind (where, type) once with its traceback, and again after ten minutes with how often it came since. Owner's thread
    only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kinds: dict[tuple[str, type[BaseException]], tuple[float, int]] = {}

    def note(self, where: str, error: BaseException) -> None:
        """Logs the error unless it is one of ours, or its kind was logged lately."""
        if isinstance(error, TierError):
            return
        kind, now = (where, type(error)), self._clock()
        known = self._kinds.get(kind)
        if known is None and len(self._kinds) >= MAX_KINDS:
            return
        if known is not None and now - known[0] < REPEAT_SECONDS:
            self._kinds[kind] = (known[0], known[1] + 1)
            return
        since = "" if known is None else f" ({known[1]} more since it was logged last)"
        self._kinds[kind] = (now, 0)
        _log.error("%s: unexpected %s%s", where, type(error).__name__, since, exc_info=error)


NOTHING = memoryview(b"")


class StoreContext:
    """State that belongs to the store as a whole. Owner's thread only, except ``view``.

    ``fenced``: no slot may be granted, evicted, hashed or read into, because workers of the pool's last tierd may still
    write anywhere (DATAPATH 4).
    """

    def __init__(
        self,
        memory: memoryview | None,
        io: IoExecutor,
        clock: Clock,
        checksums: Checksum,
        counters: StoreCounters,
        fenced: bool,
        slot_table: SlotTable | None = None,
    ) -> None:
        self.io = io
        self.clock = clock
        self.checksums = checksums
        self.counters = counters
        self.fenced = fenced
        self.timers = Timers()
        self.unexpected = UnexpectedErrors(clock)
        self.events: list[StoreEvent] = []
        self._memory = memory
        self._slot_table = slot_table

    def view(self, offset: int, size: int) -> memoryview:
        """``size`` bytes of the pool from ``offset``; empty where the store runs without memory. Any thread."""
        return NOTHING if self._memory is None else self._memory[offset : offset + size]

    def record(self, entry: Entry) -> None:
        """Notes a sealed object for the next tierd."""
        meta, segment = entry.meta, entry.slot.segment
        if self._slot_table is None or meta is None or not entry.persistent:
            return
        why_not = self._slot_table.add(
            SlotRecord(
                entry.namespace,
                entry.key,
                entry.slot.offset,
                segment.kind.slot_bytes,
                segment.start,
                len(segment.slots),
                len(meta.shard_bytes),
                meta.checksum_kind,
                object_digest(meta),
            )
        )
        if why_not:
            self.count("slot_records_failed", "", why_not)

    def erase(self, offset: int) -> None:
        """The next tierd shall not find anything in this slot. Before it is given away."""
        why_not = "" if self._slot_table is None else self._slot_table.erase(offset)
        if why_not:
            self.count("slot_records_failed", "", why_not)

    def emit(self, event: StoreEvent) -> None:
        """Queues an event for the owner."""
        self.events.append(event)

    def count(self, name: str, tier: str = "", reason: str = "", by: int = 1) -> None:
        """Adds to a counter."""
        self.counters.add(name, tier, reason, by)

    def violation(self, reason: str) -> None:
        """Counts something that a correct client does not do. It has no other effect."""
        self.counters.add("protocol_violations", "", reason)
