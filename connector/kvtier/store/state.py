from __future__ import annotations

from enum import IntEnum

from kvtier.store.slot_table import SlotRecord
from kvtier.store.types import MEMORY_BIT, UNVERIFIED_BIT
from kvtier.tiers.base import ObjectMeta, ObjectRef


class SlotState(IntEnum):
    """What a slot is used for."""

    FREE = 0
    GRANTED = 1
    RESERVED = 2
    READING = 3
    COMMITTED = 4
    EVICTING = 5
    QUARANTINED = 6


class Slot:
    """Room for one object. ``owner``: the engine it is granted to, reserved by or quarantined for; else empty.
    ``entry``: the object in it, if one is committed there (leaving ones included)."""

    __slots__ = ("entry", "group", "offset", "owner", "segment", "state")

    def __init__(self, offset: int, segment: Segment) -> None:
        self.offset = offset
        self.segment = segment
        self.state = SlotState.FREE
        self.owner = ""
        self.group = -1
        self.entry: Entry | None = None


class Segment:
    """A run of equal slots. ``draining``: on its way back to the pool; its free slots are not handed out."""

    __slots__ = ("draining", "free", "kind", "slots", "start")

    def __init__(self, start: int, kind: SlotClass, count: int) -> None:
        self.start = start
        self.kind = kind
        self.slots = [Slot(start + i * kind.slot_bytes, self) for i in range(count)]
        self.free = count
        self.draining = False

    @property
    def bytes(self) -> int:
        """Size of the run."""
        return len(self.slots) * self.kind.slot_bytes


class SlotClass:
    """All slots of one size. ``leaving``: how many are announced as leaving (in segments that stay)."""

    __slots__ = ("free", "leaving", "segments", "slot_bytes")

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.free: dict[int, Slot] = {}
        self.segments: dict[int, Segment] = {}
        self.leaving = 0

    @property
    def bytes(self) -> int:
        """What the class takes from the pool."""
        return sum(segment.bytes for segment in self.segments.values())


class Entry:
    """One object in RAM.

    ``pins`` counts who may be reading the slot: loads, promotions, checksums, writes to lower tiers. ``meta`` is None
    until the object is sealed. ``leaving``: token of the announcement that it goes, 0 if it stays. ``seen`` counts how
    often the object was wanted; ``busy`` has the bits of the lower tiers it is being written to, and bit 0 while it is
    being sealed. ``kept``: what the last tierd wrote of it, until its bytes are known to be that; nobody else may read it before.
    """

    __slots__ = (
        "busy",
        "kept",
        "key",
        "leaving",
        "meta",
        "namespace",
        "persistent",
        "pins",
        "ref",
        "seen",
        "shard_bytes",
        "slot",
    )

    def __init__(
        self, namespace: str, key: bytes, slot: Slot, shard_bytes: tuple[int, ...], persistent: bool
    ) -> None:
        self.namespace = namespace
        self.key = key
        self.ref = ObjectRef(namespace, key)
        self.slot = slot
        slot.entry = self
        self.shard_bytes = shard_bytes
        self.persistent = persistent
        self.meta: ObjectMeta | None = None
        self.pins = 0
        self.leaving = 0
        self.seen = 1
        self.busy = 0
        self.kept: SlotRecord | None = None

    @property
    def bit(self) -> int:
        """Under which bit it is announced."""
        return MEMORY_BIT if self.kept is None else UNVERIFIED_BIT
