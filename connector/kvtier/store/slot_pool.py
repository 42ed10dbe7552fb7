"""The host pool, divided into slots.

Each slot size, that is, each geometry of a KV group, has a *class*. A class takes *segments* from
the pool, runs of equal slots; the space between segments is *room* for further ones, merged when a
segment is dissolved. So engines with different geometries, one after the other or side by side,
share one pool, and a pool with a single geometry wastes less than one slot.

A pool may be laid out in parts (``pool_layout``). Segments and room are then ranges of every part
alike, and offsets of them are offsets in a part. The slots of an engine with one equal shard for
each part are *scattered*: one shard in each part. Those of other engines are one range in one part.
A slot size that is a multiple of a page of each part is that of scattered slots, so a size alone
says how a slot lies.

This module knows states and bytes, not why a slot is in a state, and never decides which slot is
freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvtier.store.pool_layout import PoolLayout, pool_layout
from kvtier.store.slot_table import SlotLocation
from kvtier.store.state import Segment, Slot, SlotClass, SlotState
from kvtier.store.types import Accounts
from kvtier.tiers.base import ALIGNMENT_BYTES, aligned

SEGMENTS_PER_POOL = 32
"""A segment is about this fraction of the pool: small enough to move between classes, large enough
that they are few."""


def recorded_layout(layout: PoolLayout) -> PoolLayout | None:
    """A layout as records name it: None for one part."""
    return layout if layout.parts > 1 else None


def _ranges(location: SlotLocation) -> list[tuple[int, int]]:
    """The bytes of the pool that a slot covers."""
    layout, offset, size = location.layout, location.offset, location.slot_bytes
    if layout is None or size % (layout.parts * ALIGNMENT_BYTES):
        return [(offset, offset + size)]
    row = size // layout.parts
    starts = (offset + part * layout.part_bytes for part in range(layout.parts))
    return [(start, start + row) for start in starts]


class SlotPool:
    """All slots and their accounts. Only the store's thread uses it. ``layout``: its parts."""

    def __init__(self, pool_bytes: int, layout: PoolLayout | None = None) -> None:
        """``layout``: as the previous tierd recorded it; None: one part."""
        self.pool_bytes = pool_bytes
        self.layout = layout or pool_layout(pool_bytes)
        self.classes: dict[int, SlotClass] = {}
        self._slots: dict[int, Slot] = {}
        usable = self.layout.part_bytes
        self._room: dict[int, int] = {0: usable} if usable else {}
        self._bytes = [0] * len(SlotState)

    @property
    def is_unused(self) -> bool:
        """Whether every slot is free."""
        return not any(self._bytes[state] for state in SlotState if state is not SlotState.FREE)

    def lay_out(self, layout: PoolLayout) -> None:
        """Lays an unused pool out again, for which no class is in use."""
        self.layout = layout
        self.classes.clear()
        self._slots.clear()
        self._room = {0: layout.part_bytes} if layout.part_bytes else {}
        self._bytes = [0] * len(SlotState)

    def slot_class(self, slot_bytes: int, scattered: bool = False) -> SlotClass:
        """The class for objects of ``slot_bytes``, created on first use. ``scattered``: the objects
        have one shard of the same aligned size for each part."""
        size = aligned(slot_bytes)
        if not scattered and self._is_scattered(size):
            size += ALIGNMENT_BYTES
        return self._class_of(size)

    def _is_scattered(self, size: int) -> bool:
        parts = self.layout.parts
        return parts > 1 and size % (parts * ALIGNMENT_BYTES) == 0

    def _class_of(self, size: int) -> SlotClass:
        found = self.classes.get(size)
        if found is None:
            found = SlotClass(size, self.layout, self._is_scattered(size))
            self.classes[size] = found
        return found

    def at(self, offset: int) -> Slot | None:
        """The slot that starts at ``offset``, if there is one."""
        return self._slots.get(offset)

    def take(
        self, kind: SlotClass, state: SlotState, owner: str = "", group: int = -1
    ) -> Slot | None:
        """A free slot, moved to ``state``; None if the class has none and can get no segment
        without an eviction."""
        if not kind.free and not self._grow(kind):
            return None
        _, slot = kind.free.popitem()
        slot.segment.free -= 1
        size = kind.slot_bytes
        self._bytes[SlotState.FREE] -= size
        self._bytes[state] += size
        slot.state, slot.owner, slot.group = state, owner, group
        return slot

    def move(self, slot: Slot, state: SlotState, owner: str = "") -> None:
        """Moves a slot that is not free to another state."""
        size = slot.segment.kind.slot_bytes
        self._bytes[slot.state] -= size
        self._bytes[state] += size
        if not slot.segment.draining:
            slot.segment.kind.evicting += (state is SlotState.EVICTING) - (
                slot.state is SlotState.EVICTING
            )
        slot.state, slot.owner = state, owner

    def release(self, slot: Slot) -> None:
        """Frees a slot. The caller guarantees that no call or engine reads or writes it."""
        self.move(slot, SlotState.FREE)
        slot.group = -1
        segment = slot.segment
        segment.free += 1
        if not segment.draining:
            segment.kind.free[slot.offset] = slot

    def restore(self, location: SlotLocation) -> Slot | None:
        """The slot at this location, in state COMMITTED, in the segment that it belonged to under
        the previous tierd. None if that conflicts with existing segments or exceeds the pool."""
        slot_bytes, segment_slots = location.slot_bytes, location.segment_slots
        segment_start, offset = location.segment_start, location.offset
        if (
            slot_bytes <= 0
            or segment_slots <= 0
            or slot_bytes % ALIGNMENT_BYTES
            or segment_start % ALIGNMENT_BYTES
        ):
            return None
        kind = self._class_of(slot_bytes)
        segment = kind.segments.get(segment_start)
        if segment is None and segment_slots % kind.slots_per_row == 0:
            segment = self._cut(kind, segment_start, segment_slots // kind.slots_per_row)
        if segment is None or len(segment.slots) != segment_slots or segment.draining:
            return None
        slot = kind.free.get(offset)
        if slot is None or slot.segment is not segment:
            return None
        del kind.free[offset]
        segment.free -= 1
        self.move(slot, SlotState.COMMITTED)
        return slot

    def location(self, slot: Slot) -> SlotLocation:
        """The slot's location, for ``restore``."""
        segment, size = slot.segment, slot.segment.kind.slot_bytes
        return SlotLocation(
            slot.offset, size, segment.start, len(segment.slots), recorded_layout(self.layout)
        )

    def block(self, location: SlotLocation) -> list[Slot]:
        """Takes everything unused that a slot of another layout overlaps; returns slots in state
        COMMITTED that cover it."""
        rows: set[tuple[int, int]] = set()
        part_bytes = self.layout.part_bytes
        for begin, end in _ranges(location):
            for part in range(self.layout.parts):
                low = max(begin - part * part_bytes, 0) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
                high = min(aligned(max(end - part * part_bytes, 0)), part_bytes)
                if low < high:
                    rows.add((low, high))
        found = []
        for low, high in sorted(rows):
            for start, size in sorted(self._room.items()):
                first, last = max(low, start), min(high, start + size)
                if first >= last:
                    continue
                kind = self._class_of((last - first) * self.layout.parts)
                if self._cut(kind, first, 1) is None:
                    continue
                slot = kind.free.pop(first)
                slot.segment.free -= 1
                self.move(slot, SlotState.COMMITTED)
                found.append(slot)
        return found

    def available(self, kind: SlotClass) -> int:
        """How many slots ``take`` can provide: free ones, and those that fit into unused room or
        other classes' free segments."""
        size = kind.row_bytes
        found = sum(room // size for room in self._room.values())
        for other in self.classes.values():
            if other is not kind and other.free:
                whole = (
                    s for s in other.segments.values() if s.free == len(s.slots) and not s.draining
                )
                found += sum(s.rows_bytes // size for s in whole)
        return len(kind.free) + found * kind.slots_per_row

    def accounts(self) -> Accounts:
        """Bytes by use. Unused room is free as far as slots of the smallest known size fit, else
        unusable."""
        rows = (kind.row_bytes for kind in self.classes.values())
        smallest = min(rows, default=ALIGNMENT_BYTES)
        usable_room = sum(size // smallest * smallest for size in self._room.values())
        usable_room *= self.layout.parts
        of = self._bytes
        used = sum(of)
        return Accounts(
            pool_bytes=self.pool_bytes,
            free=of[SlotState.FREE] + usable_room,
            granted=of[SlotState.GRANTED],
            reserved=of[SlotState.RESERVED],
            reading=of[SlotState.READING],
            committed=of[SlotState.COMMITTED],
            quarantined=of[SlotState.QUARANTINED],
            evicting=of[SlotState.EVICTING],
            unusable=self.pool_bytes - used - usable_room,
        )

    def draining(self) -> list[Segment]:
        """Segments on their way back to the pool."""
        return [s for kind in self.classes.values() for s in kind.segments.values() if s.draining]

    def slots(self) -> Iterator[Slot]:
        """All slots."""
        return iter(self._slots.values())

    def drain(
        self,
        kind: SlotClass,
        may_move: Callable[[Slot], bool],
        may_take: Callable[[SlotClass], bool],
    ) -> list[Segment]:
        """Chooses adjacent segments of classes that ``may_take`` allows, wide enough for a slot of
        ``kind``, whose slots are all free or ``may_move``, and marks them draining: their slots are
        not handed out.

        The choice with the fewest slots to empty wins, ties to the lowest offset. Empty if there is
        none.
        """
        pieces: list[tuple[int, int, Segment | None]] = [
            (start, size, None) for start, size in self._room.items()
        ]
        for other in self.classes.values():
            pieces += [
                (start, segment.rows_bytes, segment) for start, segment in other.segments.items()
            ]
        pieces.sort(key=lambda piece: piece[0])
        best: list[Segment] | None = None
        best_cost = -1
        run: list[tuple[int, Segment | None, int]] = []
        end = -1
        for start, size, segment in pieces:
            cost = self._cost_of_emptying(segment, kind, may_move, may_take)
            if cost is None or start != end:
                run = []
            if cost is not None:
                run.append((size, segment, cost))
            end = start + size
            while sum(piece[0] for piece in run) >= kind.row_bytes:
                total = sum(piece[2] for piece in run)
                segments = [piece[1] for piece in run if piece[1] is not None]
                if segments and (best is None or total < best_cost):
                    best, best_cost = segments, total
                run = run[1:]
        if best is None:
            return []
        for segment in best:
            self._set_draining(segment, True)
        return best

    def finish_draining(self, kind: SlotClass) -> bool:
        """Turns the draining segments into one of ``kind``, if all are empty; True if it did."""
        draining = self.draining()
        if not draining or any(segment.free < len(segment.slots) for segment in draining):
            return False
        for segment in draining:
            self._dissolve(segment)
        return self._grow(kind)

    def stop_draining(self) -> None:
        """Keeps the draining segments as they are."""
        for segment in self.draining():
            self._set_draining(segment, False)

    def _cost_of_emptying(
        self,
        segment: Segment | None,
        kind: SlotClass,
        may_move: Callable[[Slot], bool],
        may_take: Callable[[SlotClass], bool],
    ) -> int | None:
        if segment is None:
            return 0
        if segment.draining or segment.kind is kind or not may_take(segment.kind):
            return None
        busy = [slot for slot in segment.slots if slot.state is not SlotState.FREE]
        return len(busy) if all(map(may_move, busy)) else None

    def _set_draining(self, segment: Segment, draining: bool) -> None:
        kind = segment.kind
        segment.draining = draining
        for slot in segment.slots:
            if slot.state is SlotState.EVICTING:
                kind.evicting += -1 if draining else 1
            elif slot.state is SlotState.FREE and draining:
                del kind.free[slot.offset]
            elif slot.state is SlotState.FREE:
                kind.free[slot.offset] = slot

    def _grow(self, kind: SlotClass) -> bool:
        """Cuts a segment for ``kind`` out of the first room that fits one, free segments of other
        classes included."""
        row = kind.row_bytes
        if not any(size >= row for size in self._room.values()):
            for other in self.classes.values():
                if other is not kind:
                    for segment in [
                        s
                        for s in other.segments.values()
                        if s.free == len(s.slots) and not s.draining
                    ]:
                        self._set_draining(segment, True)
                        self._dissolve(segment)
        for start in sorted(self._room):
            size = self._room[start]
            if size >= row:
                rows = max(1, self.pool_bytes // self.layout.parts // SEGMENTS_PER_POOL // row)
                return self._cut(kind, start, min(rows, size // row)) is not None
        return False

    def _cut(self, kind: SlotClass, start: int, rows: int) -> Segment | None:
        """Creates a segment in unused room; None if there is not enough at ``start``."""
        end = start + rows * kind.row_bytes
        for room, size in self._room.items():
            if room <= start and end <= room + size:
                break
        else:
            return None
        segment = Segment(start, kind, rows * kind.slots_per_row)
        del self._room[room]
        if room < start:
            self._room[room] = start - room
        if end < room + size:
            self._room[end] = room + size - end
        kind.segments[start] = segment
        self._bytes[SlotState.FREE] += segment.bytes
        for slot in reversed(segment.slots):
            self._slots[slot.offset] = kind.free[slot.offset] = slot
        return segment

    def _dissolve(self, segment: Segment) -> None:
        del segment.kind.segments[segment.start]
        for slot in segment.slots:
            del self._slots[slot.offset]
        self._bytes[SlotState.FREE] -= segment.bytes
        start, size = segment.start, segment.rows_bytes
        for other in sorted(self._room):
            if other + self._room[other] == start:
                start, size = other, size + self._room.pop(other)
            elif other == start + size:
                size += self._room.pop(other)
        self._room[start] = size
