"""What every part of the store works with: counters, events, timers, the clock, the executor and
the pool's memory.

Only the store's thread uses it.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier.errors import TierError
from kvtier.store.generations import GenerationWords
from kvtier.store.slot_table import SlotRecord, SlotTable, key_mark, object_digest
from kvtier.store.state import Entry, Slot
from kvtier.store.types import Clock, IoExecutor, StoreCounters, StoreEvent
from kvtier.tiers.base import Payload, Pieces
from kvtier.tiers.checksum import Checksum, preferred

COMPACT_ABOVE = 1024
"""Cancelled timers stay in the heap until they are due. The heap is compacted when more than this
many, and more than half of all, are cancelled."""
REPEAT_SECONDS = 600.0
MAX_KINDS = 64
"""Kinds of unexpected errors that are logged. Errors of further kinds are only counted."""

_log = logging.getLogger("kvtier.store")
_EMPTY = memoryview(b"")


class Timer:
    """A pending call. ``cancel`` is idempotent, and has no effect once the call has been made."""

    __slots__ = ("_owner", "call", "when")

    def __init__(self, owner: Timers, when: float, call: Callable[[], None]) -> None:
        self.when = when
        self.call: Callable[[], None] | None = call
        self._owner = owner

    def cancel(self) -> None:
        """Drops the call."""
        if self.call is not None:
            self.call = None
            self._owner.cancelled += 1


class Timers:
    """Pending timers, earliest first. Equal times run in the order of their scheduling, so that the
    same inputs always give the same sequence."""

    def __init__(self) -> None:
        self.cancelled = 0
        self._heap: list[tuple[float, int, Timer]] = []
        self._sequence = 0

    def at(self, when: float, call: Callable[[], None]) -> Timer:
        """Schedules ``call`` for the first ``run_due`` at or after ``when`` (seconds of the store's
        clock)."""
        if self.cancelled > COMPACT_ABOVE and self.cancelled * 2 > len(self._heap):
            self._heap = [item for item in self._heap if item[2].call is not None]
            heapq.heapify(self._heap)
            self.cancelled = 0
        timer = Timer(self, when, call)
        self._sequence += 1
        heapq.heappush(self._heap, (when, self._sequence, timer))
        return timer

    def run_due(self, now: float) -> None:
        """Makes every call that is due. Calls that these schedule for ``now`` or earlier wait for
        the next run."""
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
        """When the earliest pending call is due; None if there is none."""
        while self._heap and self._heap[0][2].call is None:
            heapq.heappop(self._heap)
            self.cancelled -= 1
        return self._heap[0][0] if self._heap else None


class UnexpectedErrors:
    """Errors that no tier raises on purpose, that is, bugs. They cost a miss like any other error,
    and are logged.

    Each kind (place, type) is logged once with its traceback, and again after ten minutes with the
    number of occurrences since.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kinds: dict[tuple[str, type[BaseException]], tuple[float, int]] = {}

    def note(self, where: str, error: BaseException) -> None:
        """Logs the error, unless it is a ``TierError`` or its kind was logged recently."""
        if isinstance(error, TierError):
            return
        kind, now = (where, type(error)), self._clock()
        known = self._kinds.get(kind)
        if known is None and len(self._kinds) >= MAX_KINDS:
            return
        if known is not None and now - known[0] < REPEAT_SECONDS:
            self._kinds[kind] = (known[0], known[1] + 1)
            return
        since = "" if known is None else f" ({known[1]} more since it was last logged)"
        self._kinds[kind] = (now, 0)
        _log.error("%s: unexpected %s%s", where, type(error).__name__, since, exc_info=error)


@dataclass(frozen=True, slots=True)
class StoreRuntime:
    """What the store needs from its process. ``checksums`` computes the checksums of objects that
    engines store. ``generations``: memory of the generation words, shared with the engines.
    ``wall``: seconds since the epoch, for the times at which objects expire."""

    io: IoExecutor
    clock: Clock
    checksums: Checksum = field(default_factory=preferred)
    counters: StoreCounters = field(default_factory=StoreCounters)
    generations: memoryview | None = None
    wall: Clock = time.time


class StoreContext:
    """State of the store as a whole. Only the store's thread uses it.

    While ``fenced``, no slot is granted, evicted, hashed or read into, because workers of the
    previous tierd may still write anywhere in the pool.
    """

    def __init__(
        self,
        runtime: StoreRuntime,
        pool_bytes: int,
        memory: memoryview | None,
        slot_table: SlotTable | None,
    ) -> None:
        self.io = runtime.io
        self.clock = runtime.clock
        self.wall = runtime.wall
        self.checksums = runtime.checksums
        self.counters = runtime.counters
        self.generations = GenerationWords(pool_bytes, runtime.generations)
        self.fenced = True
        self.timers = Timers()
        self.unexpected = UnexpectedErrors(runtime.clock)
        self.events: list[StoreEvent] = []
        self.count = runtime.counters.add
        self.emit = self.events.append
        """``count`` and ``emit`` are called once or more per key, hence bound here instead of
        forwarded."""
        self._memory = memory
        self._slot_table = slot_table

    def payload(self, slot: Slot, size: int) -> Payload:
        """The first ``size`` bytes of a slot, which its shards fill; empty if the store runs
        without memory."""
        memory, kind, offset = self._memory, slot.segment.kind, slot.offset
        if memory is None:
            return _EMPTY
        if kind.pieces == 1:
            return memory[offset : offset + size]
        row, step = kind.row_bytes, kind.part_bytes
        starts = range(offset, offset + kind.pieces * step, step)
        return Pieces(tuple(memory[start : start + row] for start in starts))

    def record(self, entry: Entry) -> None:
        """Adds an object with checksums to the slot table, so that the next tierd can recover
        it."""
        meta, segment = entry.meta, entry.slot.segment
        if self._slot_table is None or meta is None or not entry.persistent:
            return
        failure = self._slot_table.add(
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
                previous=key_mark(entry.previous) if entry.previous else b"",
                tenant=entry.tenant,
                expires_at=entry.expires_at,
                tiers=entry.tiers,
            )
        )
        if failure:
            self.count("slot_records_failed", "", failure)

    def erase(self, offset: int) -> None:
        """Removes a slot from the slot table. Must precede any other use of the slot."""
        failure = "" if self._slot_table is None else self._slot_table.erase(offset)
        if failure:
            self.count("slot_records_failed", "", failure)

    def take_events(self) -> list[StoreEvent]:
        """Returns the queued events, in order, and empties the queue."""
        taken = list(self.events)
        self.events.clear()
        return taken

    def violation(self, reason: str) -> None:
        """Counts an action of a client that violates the protocol.

        The action has no other effect.
        """
        self.counters.add("protocol_violations", "", reason)
