"""The memory tier: committed objects by key, what keeps them, and which one goes next."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvtier.store.eviction import EvictionPolicy
from kvtier.store.presence import KEPT_BIT, MEMORY_BIT
from kvtier.store.records import SlotRecord
from kvtier.store.slots import Slot, SlotClass
from kvtier.tiers.base import ObjectMeta, ObjectRef


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

    def __init__(self, namespace: str, key: bytes, slot: Slot, shard_bytes: tuple[int, ...], persistent: bool) -> None:
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
        return MEMORY_BIT if self.kept is None else KEPT_BIT


class MemoryTable:
    """Objects in RAM. Owner's thread only. An entry that leaves is held by nobody; whoever wants it calls ``stay``
    first."""

    def __init__(self, policy: Callable[[], EvictionPolicy[Entry]]) -> None:
        self._entries: dict[tuple[str, bytes], Entry] = {}
        self._new_policy = policy
        self._policies: dict[int, EvictionPolicy[Entry]] = {}
        self.pinned_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, namespace: str, key: bytes) -> Entry | None:
        """The object, leaving ones included."""
        return self._entries.get((namespace, key))

    def entries(self) -> Iterable[Entry]:
        """All objects."""
        return self._entries.values()

    def add(self, entry: Entry) -> None:
        """Takes in an object whose key is not there yet. It can be evicted from now on."""
        self._entries[entry.namespace, entry.key] = entry
        policy = self.policy(entry.slot.segment.kind)
        policy.admit(entry)
        policy.offer(entry)

    def remove(self, entry: Entry) -> None:
        """Forgets an object that nobody holds."""
        del self._entries[entry.namespace, entry.key]
        entry.slot.entry = None
        self.policy(entry.slot.segment.kind).forget(entry)

    def pin(self, entry: Entry) -> None:
        """Keeps the object where it is until ``unpin``."""
        entry.pins += 1
        if entry.pins == 1:
            self.pinned_bytes += entry.slot.segment.kind.slot_bytes
            self.policy(entry.slot.segment.kind).park(entry)

    def unpin(self, entry: Entry) -> None:
        """Undoes one ``pin``."""
        entry.pins -= 1
        if entry.pins == 0:
            self.pinned_bytes -= entry.slot.segment.kind.slot_bytes
            self.policy(entry.slot.segment.kind).offer(entry)

    def hit(self, entry: Entry) -> None:
        """Notes that the object was wanted."""
        entry.seen += 1
        self.policy(entry.slot.segment.kind).hit(entry)

    def stay(self, entry: Entry) -> None:
        """The object is not leaving after all."""
        entry.leaving = 0
        self.policy(entry.slot.segment.kind).offer(entry)

    def leave(self, entry: Entry, token: int) -> None:
        """The object, held by nobody, is announced as leaving: it is nobody's victim any more."""
        entry.leaving = token
        self.policy(entry.slot.segment.kind).park(entry)

    def policy(self, kind: SlotClass) -> EvictionPolicy[Entry]:
        """The order of eviction of one slot class."""
        found = self._policies.get(kind.slot_bytes)
        if found is None:
            found = self._policies[kind.slot_bytes] = self._new_policy()
        return found

    def evictable(self, kind: SlotClass) -> int:
        """How many objects of a class could be evicted."""
        return len(self.policy(kind))
