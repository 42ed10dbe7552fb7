"""Records of the host pool: slots, their segments and classes, and the objects in them.

Plain state without rules. ``slot_pool`` changes slots, segments and classes; ``memory_tier``
changes entries. Only the store's thread touches them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from kvtier.store.generations import pack_location
from kvtier.store.pool_layout import PoolLayout
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
    """Space for one object.

    ``owner`` is the engine that the slot is granted to, reserved by or quarantined for, else empty.
    ``entry`` is the object in a slot that is COMMITTED or EVICTING.
    """

    __slots__ = ("entry", "group", "offset", "owner", "segment", "state")

    def __init__(self, offset: int, segment: Segment) -> None:
        self.offset = offset
        self.segment = segment
        self.state = SlotState.FREE
        self.owner = ""
        self.group = -1
        self.entry: Entry | None = None


class Segment:
    """A run of equal slots, the same range of every part of the pool. ``start``: its offset in each
    part. The free slots of a segment that is ``draining`` are not handed out."""

    __slots__ = ("draining", "free", "kind", "slots", "start")

    def __init__(self, start: int, kind: SlotClass, count: int) -> None:
        self.start = start
        self.kind = kind
        self.slots = [
            Slot(part * kind.part_bytes + start + row * kind.row_bytes, self)
            for part in range(kind.slots_per_row)
            for row in range(count // kind.slots_per_row)
        ]
        self.free = count
        self.draining = False

    @property
    def bytes(self) -> int:
        """Size of the run, in all parts together."""
        return len(self.slots) * self.kind.slot_bytes

    @property
    def rows_bytes(self) -> int:
        """Size of the run in each part."""
        return len(self.slots) // self.kind.slots_per_row * self.kind.row_bytes


class SlotClass:
    """All slots of one size. ``evicting`` counts slots that are being evicted, without those of
    draining segments.

    ``pieces``: how many shards, each in its own part of the pool, a slot consists of; 1: the slot
    is one range. Slots lie in rows: ``row_bytes`` of each part, ``part_bytes`` from the same row of
    the next part. A row is one slot of several pieces, or one slot in each part.
    """

    __slots__ = (
        "evicting",
        "free",
        "part_bytes",
        "pieces",
        "row_bytes",
        "segments",
        "slot_bytes",
        "slots_per_row",
    )

    def __init__(self, slot_bytes: int, layout: PoolLayout, scattered: bool) -> None:
        self.slot_bytes = slot_bytes
        self.part_bytes = layout.part_bytes
        self.pieces = layout.parts if scattered else 1
        self.row_bytes = slot_bytes // self.pieces
        self.slots_per_row = layout.parts // self.pieces
        self.free: dict[int, Slot] = {}
        self.segments: dict[int, Segment] = {}
        self.evicting = 0

    @property
    def bytes(self) -> int:
        """Bytes of the pool that the class occupies."""
        return sum(segment.bytes for segment in self.segments.values())


@dataclass(frozen=True, slots=True)
class ObjectGeometry:
    """How objects of one KV group of an engine lie in their slots.

    ``shard_bytes[r]`` is the exact size of rank r's shard; ``payload_bytes`` is the sum of the
    aligned sizes.
    """

    kind: SlotClass
    shard_bytes: tuple[int, ...]
    payload_bytes: int


@dataclass(eq=False, slots=True)
class SlotRequest:
    """A request for a free slot of a class. ``receive`` is called once, with the slot in state
    READING."""

    kind: SlotClass
    receive: Callable[[Slot], None]


class Entry:
    """One object in RAM.

    * ``pins``: how many loads, promotions, checksums and writes may be reading the slot. A pinned
      object is not evicted.
    * ``previous``: key of the chunk before it in its prefix; empty if it is the first or that is
      not known.
    * ``meta``: None until the object has checksums.
    * ``evicting``: token of the eviction notice that names the object; 0 if there is none.
    * ``uses``: how often an engine stored or loaded the object.
    * ``busy``: bits of the secondary tiers that the object is being written to; bit 0 while its
      checksum is computed.
    * ``generation``: the slot's generation word; 0 while the object is unverified.
    * ``tenant``: whom it belongs to, here and in secondary tiers; empty if to no tenant.
      ``account``: the account that its bytes in RAM belong to.
    * ``tiers``: bits of the only tiers that the requests which stored or used it let it be stored
      in, the memory tier's included; 0: all.
    * ``expires_at``: when it must no longer be used, in seconds of the wall clock; 0: never.
    * ``retained_until``, ``pinned_until``: when these wishes end, in seconds of the store's clock;
      0: there is none. ``due_at``: when ``lifetimes`` looks at the object next; 0: it does not.
    * ``unverified``: record of a recovered object whose bytes have not been verified. Nothing but
      the verification may read such an object.
    """

    __slots__ = (
        "account",
        "busy",
        "due_at",
        "evicting",
        "expires_at",
        "generation",
        "key",
        "meta",
        "namespace",
        "persistent",
        "pinned_until",
        "pins",
        "previous",
        "ref",
        "retained_until",
        "shard_bytes",
        "slot",
        "tenant",
        "tiers",
        "unverified",
        "uses",
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
        self.previous = b""
        self.meta: ObjectMeta | None = None
        self.pins = 0
        self.evicting = 0
        self.uses = 1
        self.busy = 0
        self.generation = 0
        self.tenant = b""
        self.account = b""
        self.tiers = 0
        self.expires_at = 0
        self.retained_until = 0.0
        self.pinned_until = 0.0
        self.due_at = 0.0
        self.unverified: SlotRecord | None = None

    @property
    def slot_bytes(self) -> int:
        """Size of its slot."""
        return self.slot.segment.kind.slot_bytes

    @property
    def bit(self) -> int:
        """The presence bit under which the object is announced."""
        return MEMORY_BIT if self.unverified is None else UNVERIFIED_BIT

    @property
    def location(self) -> int:
        """The slot and its generation, as engines get them; 0 while the object is unverified."""
        return pack_location(self.slot.offset, self.generation) if self.generation else 0
