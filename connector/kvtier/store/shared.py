"""What all parts of the store work with, and what they need from outside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.store.contract import Clock, IoExecutor, StoreCounters, StoreEvent
from kvtier.store.records import SlotRecord, SlotTable, object_digest
from kvtier.store.timers import Timers
from kvtier.store.unexpected import UnexpectedErrors
from kvtier.tiers.checksum import Checksum

if TYPE_CHECKING:
    from kvtier.store.memory import Entry

NOTHING = memoryview(b"")


class Shared:
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
