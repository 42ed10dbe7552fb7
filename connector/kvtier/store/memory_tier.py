"""Which object goes when a slot is needed.

A policy orders the objects of one slot class. Objects in use (pinned) are *parked*: they stay known and are no victims.

Adaptive replacement: recently used and often used objects compete for room, and what went too early decides.

After Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache" (FAST 2003), with two differences that come from
where it is used. Objects in use (parked) are in neither list, as they cannot go; and the size is not fixed, because slots move
between classes: it is the number of objects that are resident at the moment.

The memory tier: committed objects by key, what keeps them, and which one goes next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, Protocol, TypeVar

from kvtier.store.state import Entry, SlotClass

T = TypeVar("T")


class EvictionOrder(Protocol[T]):
    """Order of eviction. Every object is admitted once, then parked and offered any number of times, then forgotten."""

    def admit(self, item: T) -> None:
        """The object is resident, and parked."""
        ...

    def hit(self, item: T) -> None:
        """The object was used again."""
        ...

    def park(self, item: T) -> None:
        """The object is in use and must not be a victim."""
        ...

    def offer(self, item: T) -> None:
        """The object may be a victim again; it was in use just now."""
        ...

    def forget(self, item: T) -> None:
        """The object is gone."""
        ...

    def victim(self) -> T | None:
        """The next object to go, which is parked by this call; None if all are in use."""
        ...

    def __len__(self) -> int:
        """How many objects could be victims."""
        ...


class LruPolicy(Generic[T]):
    """Least recently used first."""

    def __init__(self) -> None:
        self._order: OrderedDict[T, None] = OrderedDict()

    def admit(self, item: T) -> None:
        """The object is resident, and parked."""

    def hit(self, item: T) -> None:
        """The object was used again: it is the last to go. One that is parked will be when it is offered."""
        if item in self._order:
            self._order.move_to_end(item)

    def park(self, item: T) -> None:
        """The object is in use and must not be a victim."""
        self._order.pop(item, None)

    def offer(self, item: T) -> None:
        """The object may be a victim again, the last of all."""
        self._order[item] = None

    def forget(self, item: T) -> None:
        """The object is gone."""
        self._order.pop(item, None)

    def victim(self) -> T | None:
        """The least recently used object, parked."""
        return self._order.popitem(last=False)[0] if self._order else None

    def __len__(self) -> int:
        return len(self._order)


KeyT = TypeVar("KeyT", bound=Hashable)


class ArcPolicy(Generic[KeyT]):
    """An ``EvictionOrder`` that one long scan does not empty.

    ``name`` gives what stays the same when an object comes back as another item: the ghosts of what went are kept by it, at
    most as many as there are resident objects.
    """

    def __init__(self, name: Callable[[KeyT], Hashable]) -> None:
        self._name = name
        self._recent: OrderedDict[KeyT, None] = OrderedDict()
        self._often: OrderedDict[KeyT, None] = OrderedDict()
        self._is_often: dict[KeyT, bool] = {}
        self._recent_ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self._often_ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self.target_recent = 0.0
        """How many of the resident objects should be such that were used once."""

    def admit(self, item: KeyT) -> None:
        """The object is resident, and parked. One that went lately shows which list was too short."""
        name = self._name(item)
        recent, often = len(self._recent_ghosts), len(self._often_ghosts)
        came_back = True
        if name in self._recent_ghosts:
            self.target_recent = min(
                float(len(self._is_often) + 1), self.target_recent + max(1.0, often / recent)
            )
            del self._recent_ghosts[name]
        elif name in self._often_ghosts:
            self.target_recent = max(0.0, self.target_recent - max(1.0, recent / often))
            del self._often_ghosts[name]
        else:
            came_back = False
        self._is_often[item] = came_back

    def hit(self, item: KeyT) -> None:
        """The object was used again."""
        self._is_often[item] = True
        if item in self._recent:
            del self._recent[item]
            self._often[item] = None
        elif item in self._often:
            self._often.move_to_end(item)

    def park(self, item: KeyT) -> None:
        """The object is in use and must not be a victim."""
        self._recent.pop(item, None)
        self._often.pop(item, None)

    def offer(self, item: KeyT) -> None:
        """The object may be a victim again, the last of its list."""
        (self._often if self._is_often[item] else self._recent)[item] = None

    def forget(self, item: KeyT) -> None:
        """The object is gone."""
        self.park(item)
        ghosts = self._often_ghosts if self._is_often.pop(item) else self._recent_ghosts
        ghosts[self._name(item)] = None
        while len(self._recent_ghosts) + len(self._often_ghosts) > max(1, len(self._is_often)):
            longer = (
                self._recent_ghosts
                if len(self._recent_ghosts) >= len(self._often_ghosts)
                else self._often_ghosts
            )
            longer.popitem(last=False)

    def victim(self) -> KeyT | None:
        """The oldest object of the list that is longer than it should be, parked."""
        if self._recent and (len(self._recent) > self.target_recent or not self._often):
            return self._recent.popitem(last=False)[0]
        return self._often.popitem(last=False)[0] if self._often else None

    def __len__(self) -> int:
        return len(self._recent) + len(self._often)


class ResidentObjects:
    """Objects in RAM. Owner's thread only. An entry that leaves is held by nobody; whoever wants it calls ``stay``
    first."""

    def __init__(self, policy: Callable[[], EvictionOrder[Entry]]) -> None:
        self._entries: dict[tuple[str, bytes], Entry] = {}
        self._new_policy = policy
        self._policies: dict[int, EvictionOrder[Entry]] = {}
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

    def policy(self, kind: SlotClass) -> EvictionOrder[Entry]:
        """The order of eviction of one slot class."""
        found = self._policies.get(kind.slot_bytes)
        if found is None:
            found = self._policies[kind.slot_bytes] = self._new_policy()
        return found

    def evictable(self, kind: SlotClass) -> int:
        """How many objects of a class could be evicted."""
        return len(self.policy(kind))
