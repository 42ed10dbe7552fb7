"""The memory tier: objects in RAM, how long they stay, and which one is evicted next.

``ResidentObjects`` is the only place where an object enters or leaves RAM, so that the slot, the
presence index, the slot table and the eviction order always agree. Only the store's thread uses
this module.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, Protocol, TypeVar

from kvtier.prefix_order import NONE, PrefixOrder
from kvtier.store.context import StoreContext
from kvtier.store.presence import PresenceIndex
from kvtier.store.slot_pool import SlotPool
from kvtier.store.state import Entry, SlotClass, SlotState
from kvtier.store.types import MEMORY_BIT, UNVERIFIED_BIT, PresenceChanged
from kvtier.tenants import TenantAccounts

T = TypeVar("T")
ItemT = TypeVar("ItemT")
IdentityT = TypeVar("IdentityT", bound=Hashable)


def nowhere(_identity: object) -> bool:
    return False


def _no_rank(_namespace: str, _key: bytes) -> int:
    return 0


def no_tenant(_item: object) -> bytes:
    return b""


class EvictionOrder(Protocol[T]):
    """The order in which the objects of one slot class are evicted.

    An object is admitted once, then parked and offered any number of times, then forgotten. A
    parked object is in use and never a victim.
    """

    def admit(self, item: T) -> None:
        """Adds an object, as the most recently used one."""
        ...

    def hit(self, item: T) -> None:
        """Notes a use of the object."""
        ...

    def follow(self, item: T) -> None:
        """It has become known which object precedes this one."""
        ...

    def park(self, item: T) -> None:
        """Excludes the object from eviction."""
        ...

    def offer(self, item: T) -> None:
        """Makes an object a candidate that was parked, with its place in the order, or that was
        leaving, as the most recently used one."""
        ...

    def leave(self, item: T) -> None:
        """The object is being evicted: it protects the objects before it no longer."""
        ...

    def forget(self, item: T) -> None:
        """Removes the object."""
        ...

    def victim(self, urgent: bool = True) -> T | None:
        """Returns the next object to evict, which is leaving; None if all are in use.

        ``urgent``: otherwise None as well while a queued request is going to use it, or evicting it
        would orphan an object in use: another one may soon be evicted instead.
        """
        ...

    def next_of(self, tenant: bytes) -> T | None:
        """Returns the object of this tenant to evict next, which stays; None if there is none."""
        ...

    def count_of(self, tenant: bytes) -> tuple[int, int]:
        """How many objects a tenant has, and how many of them can be evicted."""
        ...

    def retain(self, item: T, retained: bool) -> None:
        """The object is evicted after all others, or no longer is."""
        ...

    def await_item(self, item: T, rank: int) -> None:
        """A queued request is going to use the object, or none is any longer (0). It is evicted
        when no other one can be, the one with the highest ``rank`` first: the place in the queue.
        """
        ...

    def rank_of_next(self) -> int:
        """The rank of the object to evict next; 0 if no queued request waits for it."""
        ...

    def __len__(self) -> int:
        """How many objects can be evicted."""
        ...


class LruPolicy(Generic[ItemT, IdentityT]):
    """Evicts the end of the least recently used prefix first, and keeps a part of the room for
    prefixes that were used again (``kvtier.prefix_order``).

    ``identify`` returns the identity of an item, which is the same when the object is stored again.
    ``previous`` returns the identity of the object before it, None if there is none or it is not
    known. ``elsewhere`` tells whether that object can be had from another tier; if it cannot, and
    is not resident, the object is evicted before others, unless it is used all the same.
    ``tenant`` returns whom it belongs to, empty if to no tenant.

    While every leaf is in use or awaited, the victim is an awaited one, and while every leaf is in
    use, an object that only objects in use follow.
    """

    def __init__(
        self,
        identify: Callable[[ItemT], IdentityT],
        previous: Callable[[ItemT], IdentityT | None],
        elsewhere: Callable[[IdentityT], bool] = nowhere,
        tenant: Callable[[ItemT], bytes] = no_tenant,
    ) -> None:
        self._identify = identify
        self._previous = previous
        self._elsewhere = elsewhere
        self._tenant = tenant
        self._tree = PrefixOrder()
        self._groups: dict[bytes, int] = {}
        """Of tenants that have objects."""
        self._nodes: dict[IdentityT, int] = {}
        self._items: dict[int, ItemT] = {}
        """Nodes of objects that are resident and not leaving. The other nodes are absent."""

    def admit(self, item: ItemT) -> None:
        """Adds an object, as the most recently used one."""
        self._enter(item, False)

    def hit(self, item: ItemT) -> None:
        """Makes the object the most recently used one, parked or not."""
        node = self._nodes.get(self._identify(item))
        if node is not None:
            self._tree.use(node, often=True, alone=self._has_lost(node))

    def follow(self, item: ItemT) -> None:
        """It has become known which object precedes this one."""
        node, previous = self._nodes.get(self._identify(item)), self._previous(item)
        if node is not None and node in self._items and previous is not None:
            parent = self._node(previous)
            if not self._tree.follow(node, parent):
                self._drop_if_unused(parent, previous)

    def park(self, item: ItemT) -> None:
        """Excludes the object from eviction."""
        node = self._nodes.get(self._identify(item))
        if node is not None:
            self._tree.park(node)

    def offer(self, item: ItemT) -> None:
        """Makes an object a candidate that was parked or leaving."""
        node = self._nodes.get(self._identify(item))
        if node is not None and node in self._items:
            self._tree.offer(node)
            self._note_lost(node)
        else:
            self._return(item)

    def leave(self, item: ItemT) -> None:
        """The object is being evicted."""
        identity = self._identify(item)
        node = self._nodes.get(identity)
        if node is None or self._items.pop(node, None) is None:
            return
        orphaned = self._tree.leave(node)
        tenant = self._tenant(item)
        if tenant and not self._tree.present_of(self._groups[tenant]):
            self._tree.release_group(self._groups.pop(tenant))
        previous = self._previous(item)
        if orphaned and previous is not None:
            self._drop_if_unused(orphaned, previous)
        self._drop_if_unused(node, identity)

    def forget(self, item: ItemT) -> None:
        """Removes the object."""
        self.leave(item)

    def victim(self, urgent: bool = True) -> ItemT | None:
        """The end of the least recently used prefix, which is leaving."""
        return self._take(self._tree.victim() or (self._last_resort() if urgent else NONE))

    def next_of(self, tenant: bytes) -> ItemT | None:
        """The end of the tenant's least recently used prefix."""
        group = self._groups.get(tenant)
        node = NONE if group is None else self._tree.oldest_of(group)
        return self._items[node] if node else None

    def count_of(self, tenant: bytes) -> tuple[int, int]:
        """How many objects a tenant has, and how many of them can be evicted."""
        group = self._groups.get(tenant)
        if group is None:
            return 0, 0
        return self._tree.present_of(group), self._tree.candidates_of(group)

    def retain(self, item: ItemT, retained: bool) -> None:
        """The object is evicted after all others, or no longer is."""
        node = self._nodes.get(self._identify(item))
        if node is not None and node in self._items:
            self._tree.retain(node, retained)

    def await_item(self, item: ItemT, rank: int) -> None:
        """A queued request is going to use the object, or none is any longer (0)."""
        node = self._nodes.get(self._identify(item))
        if node is not None and node in self._items:
            self._tree.await_node(node, rank)

    def rank_of_next(self) -> int:
        """The rank of the object to evict next; 0 if no queued request waits for it."""
        tree = self._tree
        return 0 if tree.victim() else tree.rank_of(tree.awaited_victim())

    def __len__(self) -> int:
        return sum(self._tree.candidates)

    def _last_resort(self) -> int:
        return self._tree.awaited_victim() or self._tree.blocked()

    def _return(self, item: ItemT) -> None:
        """An object that was leaving stays."""
        self._enter(item, False)

    def _enter(self, item: ItemT, often: bool) -> None:
        previous = self._previous(item)
        node = self._node(self._identify(item))
        parent = NONE if previous is None else self._node(previous)
        self._items[node] = item
        self._note_lost(parent)
        elsewhere = previous is not None and self._elsewhere(previous)
        group, tenant = 0, self._tenant(item)
        if tenant:
            group = self._groups.get(tenant, 0)
            if not group:
                group = self._groups[tenant] = self._tree.new_group()
        self._tree.enter(node, parent, group=group, often=often, elsewhere=elsewhere)
        if previous is not None and self._tree.predecessor(node) != parent:
            self._drop_if_unused(parent, previous)

    def _note_lost(self, node: int) -> None:
        """The object before this one may have been evicted while this one was in use."""
        if self._has_lost(node):
            self._tree.orphan(node)

    def _has_lost(self, node: int) -> bool:
        """Whether the object before this one is known, not resident, and in no other tier."""
        above = self._tree.predecessor(node)
        if not above or node not in self._items or self._tree.is_present(above):
            return False
        previous = self._previous(self._items[node])
        return previous is not None and not self._elsewhere(previous)

    def _node(self, identity: IdentityT) -> int:
        node = self._nodes.get(identity)
        if node is None:
            node = self._nodes[identity] = self._tree.new()
        return node

    def _take(self, node: int) -> ItemT | None:
        if not node:
            return None
        item = self._items[node]
        self.leave(item)
        return item

    def _drop_if_unused(self, node: int, identity: IdentityT) -> None:
        if node not in self._items and not self._tree.has_followers(node):
            del self._nodes[identity]
            self._tree.release(node)


class ResidentObjects:
    """Objects in RAM by namespace and key.

    An object that is being evicted is not pinned. Call ``cancel_eviction`` before using it.
    ``rank_of(namespace, key)``: the place in the queue of the first request that waits and is going
    to use the object; 0 if there is none.
    """

    def __init__(
        self,
        context: StoreContext,
        pool: SlotPool,
        index: PresenceIndex,
        new_order: Callable[[], EvictionOrder[Entry]],
        rank_of: Callable[[str, bytes], int] = _no_rank,
    ) -> None:
        self._context = context
        self._pool = pool
        self._index = index
        self._new_order = new_order
        self._rank_of = rank_of
        self._entries: dict[tuple[str, bytes], Entry] = {}
        self._orders: dict[int, EvictionOrder[Entry]] = {}
        self._on_removed: Callable[[Entry], None] | None = None
        self.pinned_bytes = 0
        """Of objects that something uses."""
        self.accounts = TenantAccounts()
        """Bytes of each tenant: of objects that are not being evicted, and of those on their way
        into RAM."""

    def __len__(self) -> int:
        return len(self._entries)

    def on_removed(self, handler: Callable[[Entry], None]) -> None:
        """Registers what is told when an object begins to leave RAM."""
        self._on_removed = handler

    def get(self, namespace: str, key: bytes) -> Entry | None:
        """The object, including one that is being evicted or has expired."""
        return self._entries.get((namespace, key))

    def is_expired(self, entry: Entry) -> bool:
        """Whether the object must no longer be used."""
        return 0 < entry.expires_at <= self._context.wall()

    def orders(self) -> Iterable[tuple[int, EvictionOrder[Entry]]]:
        """The orders of all slot classes, by slot size."""
        return self._orders.items()

    def entries(self) -> Iterable[Entry]:
        """All objects."""
        return self._entries.values()

    def commit(self, entry: Entry) -> None:
        """Adds an object whose key is not resident, announces it, and makes it a candidate for
        eviction: the first one, if the object before it is in no tier."""
        self._entries[entry.namespace, entry.key] = entry
        slot = entry.slot
        self._pool.move(slot, SlotState.COMMITTED)
        order = self.order(slot.segment.kind)
        order.admit(entry)
        self._restore_rank(entry, order)
        self.accounts.add(entry.account, entry.slot_bytes)
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
        if not entry.evicting:
            self._remove_bytes(entry)
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
            size = entry.slot_bytes
            self.pinned_bytes += size
            if not entry.pinned_until:
                self._orders[size].park(entry)

    def unpin(self, entry: Entry) -> None:
        """Reverts one ``pin``."""
        entry.pins -= 1
        if entry.pins == 0:
            size = entry.slot_bytes
            self.pinned_bytes -= size
            if not entry.pinned_until:
                self._orders[size].offer(entry)

    def keep(self, entry: Entry, kept: bool) -> None:
        """The object is not evicted, or may be again, at the wish of a request
        (``pinned_until``)."""
        if entry.pins == 0:
            order = self._orders[entry.slot_bytes]
            if kept:
                order.park(entry)
            else:
                order.offer(entry)

    def retain(self, entry: Entry, retained: bool) -> None:
        """The object is evicted after all others, or no longer is."""
        self._orders[entry.slot_bytes].retain(entry, retained)

    def rank_changed(self, namespace: str, key: bytes) -> None:
        """Takes over what ``rank_of`` says of a key, whether it is in RAM or not."""
        entry = self._entries.get((namespace, key))
        if entry is not None and not entry.evicting:
            self._orders[entry.slot_bytes].await_item(entry, self._rank_of(namespace, key))

    def _restore_rank(self, entry: Entry, order: EvictionOrder[Entry]) -> None:
        rank = self._rank_of(entry.namespace, entry.key)
        if rank:
            order.await_item(entry, rank)

    def hit(self, entry: Entry) -> None:
        """Notes a use of the object."""
        entry.uses += 1
        self._orders[entry.slot_bytes].hit(entry)

    def learn_previous(self, entry: Entry, previous: bytes) -> None:
        """It has become known which key precedes the object's in its prefix."""
        if not entry.previous and previous:
            entry.previous = previous
            self._orders[entry.slot_bytes].follow(entry)

    def begin_eviction(self, entry: Entry, token: int) -> None:
        """Excludes an object that is not pinned from further evictions: the notice ``token`` names
        it."""
        self._remove_bytes(entry)
        if self._rank_of(entry.namespace, entry.key):
            self._context.count("awaited_evictions")
        entry.evicting = token
        self._orders[entry.slot_bytes].leave(entry)
        self._pool.move(entry.slot, SlotState.EVICTING)

    def cancel_eviction(self, entry: Entry) -> None:
        """Keeps an object that is being evicted, and announces it again to the schedulers that have
        dropped it."""
        self._context.count("evictions_cancelled")
        entry.evicting = 0
        self.accounts.add(entry.account, entry.slot_bytes)
        order = self._orders[entry.slot_bytes]
        order.offer(entry)
        if entry.retained_until:
            order.retain(entry, True)
        self._restore_rank(entry, order)
        self._pool.move(entry.slot, SlotState.COMMITTED)
        if self._index.is_open(entry.namespace):
            self._context.emit(
                PresenceChanged(entry.namespace, entry.key, entry.bit, True, entry.location)
            )

    def _remove_bytes(self, entry: Entry) -> None:
        self.accounts.remove(entry.account, entry.slot_bytes)
        if self._on_removed is not None:
            self._on_removed(entry)

    def order(self, kind: SlotClass) -> EvictionOrder[Entry]:
        """The eviction order of one slot class."""
        found = self._orders.get(kind.slot_bytes)
        if found is None:
            found = self._orders[kind.slot_bytes] = self._new_order()
        return found
