"""The memory tier: objects in RAM, how long they stay, and which one is evicted next.

``ResidentObjects`` is the only place where an object enters or leaves RAM, so that the slot, the
presence index, the slot table and the eviction order always agree. Only the store's thread uses
this module.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, Protocol, TypeVar

from kvtier.store.context import StoreContext
from kvtier.store.presence import PresenceIndex
from kvtier.store.slot_pool import SlotPool
from kvtier.store.state import Entry, SlotClass, SlotState
from kvtier.store.types import MEMORY_BIT, UNVERIFIED_BIT, PresenceChanged

T = TypeVar("T")


class EvictionOrder(Protocol[T]):
    """The order in which the objects of one slot class are evicted.

    An object is admitted once, then parked and offered any number of times, then forgotten. A
    parked object is in use and never a victim.
    """

    def admit(self, item: T) -> None:
        """Adds an object, parked."""
        ...

    def hit(self, item: T) -> None:
        """Notes a use of the object."""
        ...

    def park(self, item: T) -> None:
        """Excludes the object from eviction."""
        ...

    def offer(self, item: T) -> None:
        """Makes a parked object the most recently used candidate."""
        ...

    def forget(self, item: T) -> None:
        """Removes the object."""
        ...

    def victim(self) -> T | None:
        """Parks and returns the next object to evict; None if all are in use."""
        ...

    def __len__(self) -> int:
        """How many objects can be evicted."""
        ...


class LruPolicy(Generic[T]):
    """Evicts the least recently used object first."""

    def __init__(self) -> None:
        self._order: OrderedDict[T, None] = OrderedDict()

    def admit(self, item: T) -> None:
        """Adds an object, parked."""

    def hit(self, item: T) -> None:
        """Makes the object the most recently used one. For a parked object ``offer`` does that."""
        if item in self._order:
            self._order.move_to_end(item)

    def park(self, item: T) -> None:
        """Excludes the object from eviction."""
        self._order.pop(item, None)

    def offer(self, item: T) -> None:
        """Makes a parked object the most recently used candidate."""
        self._order[item] = None

    def forget(self, item: T) -> None:
        """Removes the object."""
        self._order.pop(item, None)

    def victim(self) -> T | None:
        """Parks and returns the least recently used object."""
        return self._order.popitem(last=False)[0] if self._order else None

    def __len__(self) -> int:
        return len(self._order)


KeyT = TypeVar("KeyT", bound=Hashable)


class ArcPolicy(Generic[KeyT]):
    """Adaptive replacement: a single long scan does not displace objects that are used often.

    After Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache" (FAST 2003), with
    two differences. Parked objects are in neither list, because they cannot be evicted. And the
    size is not fixed, because slots move between classes: it is the number of resident objects.

    ``identify`` returns the identity of an item, which is the same when the object is stored again.
    Ghosts remember evicted objects by it; there are at most as many ghosts as resident objects.
    """

    def __init__(self, identify: Callable[[KeyT], Hashable]) -> None:
        self._identify = identify
        self._recent: OrderedDict[KeyT, None] = OrderedDict()
        self._often: OrderedDict[KeyT, None] = OrderedDict()
        self._is_often: dict[KeyT, bool] = {}
        self._recent_ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self._often_ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self.target_recent = 0.0
        """Target for the number of resident objects that were used once."""

    def admit(self, item: KeyT) -> None:
        """Adds an object, parked. A ghost of it shows which list was too short."""
        identity = self._identify(item)
        recent, often = len(self._recent_ghosts), len(self._often_ghosts)
        came_back = True
        if identity in self._recent_ghosts:
            self.target_recent = min(
                float(len(self._is_often) + 1), self.target_recent + max(1.0, often / recent)
            )
            del self._recent_ghosts[identity]
        elif identity in self._often_ghosts:
            self.target_recent = max(0.0, self.target_recent - max(1.0, recent / often))
            del self._often_ghosts[identity]
        else:
            came_back = False
        self._is_often[item] = came_back

    def hit(self, item: KeyT) -> None:
        """Notes a use of the object."""
        self._is_often[item] = True
        if item in self._recent:
            del self._recent[item]
            self._often[item] = None
        elif item in self._often:
            self._often.move_to_end(item)

    def park(self, item: KeyT) -> None:
        """Excludes the object from eviction."""
        self._recent.pop(item, None)
        self._often.pop(item, None)

    def offer(self, item: KeyT) -> None:
        """Makes a parked object the most recently used one of its list."""
        (self._often if self._is_often[item] else self._recent)[item] = None

    def forget(self, item: KeyT) -> None:
        """Removes the object."""
        self.park(item)
        ghosts = self._often_ghosts if self._is_often.pop(item) else self._recent_ghosts
        ghosts[self._identify(item)] = None
        while len(self._recent_ghosts) + len(self._often_ghosts) > max(1, len(self._is_often)):
            longer = (
                self._recent_ghosts
                if len(self._recent_ghosts) >= len(self._often_ghosts)
                else self._often_ghosts
            )
            longer.popitem(last=False)

    def victim(self) -> KeyT | None:
        """Parks and returns the oldest object of the list that exceeds its target."""
        if self._recent and (len(self._recent) > self.target_recent or not self._often):
            return self._recent.popitem(last=False)[0]
        return self._often.popitem(last=False)[0] if self._often else None

    def __len__(self) -> int:
        return len(self._recent) + len(self._often)


class ResidentObjects:
    """Objects in RAM by namespace and key.

    An object that is being evicted is not pinned. Call ``cancel_eviction`` before using it.
    """

    def __init__(
        self,
        context: StoreContext,
        pool: SlotPool,
        index: PresenceIndex,
        new_order: Callable[[], EvictionOrder[Entry]],
    ) -> None:
        self._context = context
        self._pool = pool
        self._index = index
        self._new_order = new_order
        self._entries: dict[tuple[str, bytes], Entry] = {}
        self._orders: dict[int, EvictionOrder[Entry]] = {}
        self.pinned_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, namespace: str, key: bytes) -> Entry | None:
        """The object, including one that is being evicted."""
        return self._entries.get((namespace, key))

    def entries(self) -> Iterable[Entry]:
        """All objects."""
        return self._entries.values()

    def commit(self, entry: Entry) -> None:
        """Adds an object whose key is not resident, announces it, and makes it a candidate for
        eviction."""
        self._entries[entry.namespace, entry.key] = entry
        slot = entry.slot
        self._pool.move(slot, SlotState.COMMITTED)
        order = self.order(slot.segment.kind)
        order.admit(entry)
        order.offer(entry)
        self._context.record(entry)
        if entry.unverified is None:
            entry.generation = self._context.generations.complete(slot.offset)
        self._index.change(entry.namespace, entry.key, entry.bit, True, entry.location)

    def discard(self, entry: Entry) -> None:
        """Removes an object that is not pinned, and frees its slot."""
        slot = entry.slot
        # Before the slot can be used for anything else, so that no later tierd finds the object in
        # it.
        self._context.erase(slot.offset)
        # Readers that engines did not tell of notice it by this.
        self._context.generations.reopen(slot.offset)
        del self._entries[entry.namespace, entry.key]
        slot.entry = None
        self._orders[slot.segment.kind.slot_bytes].forget(entry)
        self._pool.release(slot)
        self._index.change(entry.namespace, entry.key, entry.bit, False)

    def verified(self, entry: Entry) -> None:
        """A recovered object has the content that its record says; announces it as usable."""
        entry.unverified = None
        entry.generation = self._context.generations.complete(entry.slot.offset)
        self._index.change(entry.namespace, entry.key, MEMORY_BIT, True, entry.location)
        self._index.change(entry.namespace, entry.key, UNVERIFIED_BIT, False)

    def pin(self, entry: Entry) -> None:
        """Keeps the object in its slot until ``unpin``."""
        entry.pins += 1
        if entry.pins == 1:
            size = entry.slot.segment.kind.slot_bytes
            self.pinned_bytes += size
            self._orders[size].park(entry)

    def unpin(self, entry: Entry) -> None:
        """Reverts one ``pin``."""
        entry.pins -= 1
        if entry.pins == 0:
            size = entry.slot.segment.kind.slot_bytes
            self.pinned_bytes -= size
            self._orders[size].offer(entry)

    def hit(self, entry: Entry) -> None:
        """Notes a use of the object."""
        entry.uses += 1
        self._orders[entry.slot.segment.kind.slot_bytes].hit(entry)

    def begin_eviction(self, entry: Entry, token: int) -> None:
        """Excludes an object that is not pinned from further evictions: the notice ``token`` names
        it."""
        entry.evicting = token
        self._orders[entry.slot.segment.kind.slot_bytes].park(entry)
        self._pool.move(entry.slot, SlotState.EVICTING)

    def cancel_eviction(self, entry: Entry) -> None:
        """Keeps an object that is being evicted, and announces it again to the schedulers that have
        dropped it."""
        self._context.count("evictions_cancelled")
        entry.evicting = 0
        self._orders[entry.slot.segment.kind.slot_bytes].offer(entry)
        self._pool.move(entry.slot, SlotState.COMMITTED)
        if self._index.is_open(entry.namespace):
            self._context.emit(
                PresenceChanged(entry.namespace, entry.key, entry.bit, True, entry.location)
            )

    def order(self, kind: SlotClass) -> EvictionOrder[Entry]:
        """The eviction order of one slot class."""
        found = self._orders.get(kind.slot_bytes)
        if found is None:
            found = self._orders[kind.slot_bytes] = self._new_order()
        return found
