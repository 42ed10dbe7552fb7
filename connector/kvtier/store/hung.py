"""Slots of a pool that was taken over into which a thread of a dead tierd may still be reading: quarantined until it is gone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtier.store.records import SlotPlace
from kvtier.store.shared import Shared
from kvtier.store.slots import Slot, SlotPool, SlotState

OWNER = "a dead tierd"


class Hung:
    """Those slots by the name of their tierd. Owner's thread only."""

    def __init__(self, shared: Shared, pool: SlotPool, places: Mapping[str, Sequence[SlotPlace]]) -> None:
        self._shared = shared
        self._pool = pool
        self._places = dict(places)
        self._slots: dict[str, list[Slot]] = {}

    def place(self) -> None:
        """Takes the slots, before anything else is."""
        for name, places in self._places.items():
            slots = self._slots[name] = []
            for place in places:
                slot = self._pool.restore(place.offset, place.slot_bytes, place.segment_start, place.segment_slots)
                if slot is None:
                    # Past the end of a pool that is smaller now, or one that a tierd before that one left as well.
                    self._shared.count("hung_reads_elsewhere")
                    continue
                self._pool.move(slot, SlotState.QUARANTINED, OWNER)
                slots.append(slot)
                self._shared.count("slots_quarantined")
        self._places.clear()

    def over(self, name: str) -> None:
        """No thread of this tierd lives any more."""
        self._places.pop(name, None)
        slots = self._slots.pop(name, [])
        for slot in slots:
            self._pool.release(slot)
        if slots:
            self._shared.count("quarantine_ended", "", "proven")
