"""The index of a directory in memory: which objects exist, their sizes and their order of use.

Objects are numbers in arrays (``kvtier.prefix_order``, ``kvtier.key_table``), about 90 bytes each.
Every method may be called from any thread, does no I/O and holds the lock for one object or a few
thousand at most, however many there are.

An object that is known to follow another one in its prefix is evicted before that one. A scan does
not see what an object follows: the object ranks by the age of its file until a use tells.

The number of indexed objects is bounded. Beyond the bound, an object that is stored or requested
displaces the one that would be evicted next; an object that a scan merely discovers is not indexed.
Objects that are not indexed stay in the directory and in the leader's ledger, which counts files,
so the capacity holds regardless of what is indexed. When objects are removed, scans index others
and place them first in the order of eviction.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.key_table import KeyTable
from kvtier.prefix_order import KINDS, NONE, PrefixOrder
from kvtier.tenants import NO_TENANT, TenantAccounts
from kvtier.tiers.base import ALIGNMENT_BYTES, NO_FACTS, ObjectFacts, TierUsage

_MAX_UNITS = (1 << 24) - 1
"""Sizes up to 64 GiB in units of 4 KiB."""
_MAX_TIME = (1 << 32) - 1
MAX_USES = (1 << 16) - 1
"""Uses of an object that are counted."""
_SCANS = 256
"""The scan that last saw an object is known modulo this. Scans that differ by a multiple of it
cannot be confused, because each removes the objects that it did not see."""
_NAMESPACE_BYTES = 4
"""Before each key in the table: the number of its namespace."""
_PART_OBJECTS = 4_096
"""Objects that are visited at a time with the lock held."""
_PLACEHOLDER_FRACTION = 4
"""At most this part of the bound may be predecessors that are not indexed."""
MAX_INDEXED_OBJECTS = 750_000
"""Of all file tiers of a daemon together. A sidecar has 256 MiB for indexes, and an object takes at
most 170 bytes: 110 here with a key of 33 bytes, and 60 in the store's presence index. That is 122
MiB; predecessors that are not indexed, at most a quarter as many, take 20."""
_REFILL_FRACTION = 16
"""A scan is worthwhile when this part of the index is free and some objects are not indexed."""


class SavedObject(NamedTuple):
    """An object of a saved index (saved_index.py). ``previous``: key of the one before it in its
    prefix; empty if it is not known. ``often``: it was used again. ``facts``: None if they are not
    known. ``uses``: how many were counted."""

    namespace: str
    key: bytes
    size_bytes: int
    previous: bytes
    often: bool
    facts: ObjectFacts | None = None
    uses: int = 0


@dataclass(slots=True)
class TenantClaim:
    """Bytes of a file that is being written, which count for an account of the index until they are
    given back."""

    account: bytes
    size_bytes: int


def age_rank(used_at: float) -> float:
    """Ranks files by their last use, the first to be evicted first. Ascends from minute to minute
    and descends within each: the chunks of a prompt are written and read in its order."""
    minute = used_at // 60
    return 60 * minute + 60 - (used_at - 60 * minute)


def _ignore(_namespace: str, _key: bytes) -> None:
    return


class Index:
    """Objects by namespace and key, in the order of their last use.

    ``on_displaced`` is called for each object that leaves the index to make room. Reserved bytes
    belong to files that are being written; extra bytes to files that are not objects.
    """

    def __init__(
        self,
        capacity_bytes: int,
        max_objects: int = MAX_INDEXED_OBJECTS,
        on_displaced: Callable[[str, bytes], None] = _ignore,
    ) -> None:
        self._lock = threading.Lock()
        self._max_objects = max(max_objects, 1)
        self._on_displaced = on_displaced
        self._unindexed = 0
        self._unindexed_in_scan = 0
        self._unindexed_total = 0
        self._table = KeyTable()
        """Nodes by namespace and key. Absent nodes are predecessors that are not indexed."""
        self._order = PrefixOrder()
        # Indexed by node; the first ones are no nodes.
        self._key_bytes = bytearray(KINDS)
        self._buckets = array("H", (0,) * KINDS)
        self._units = array("I", (0,) * KINDS)
        self._seen_by = bytearray(KINDS)
        self._uses = array("H", (0,) * KINDS)
        self._known = bytearray(KINDS)
        """Whether the facts of an object are known."""
        self._unknown = 0
        self._asked = KINDS
        """The node at which the search for unknown facts goes on."""
        self._expires_at = array("I")
        """By node, as far as objects that expire were seen."""
        self._accounts = TenantAccounts()
        """Of objects, and of files that are being written."""
        self._groups: dict[bytes, int] = {}
        self._tenants: dict[int, bytes] = {0: NO_TENANT}
        """The account of each group of the order."""
        self._file_used_at = array("d")
        """By node: when the file was used last, as the scan at the start found it. Empty later."""
        self._ordering = False
        self._namespaces: dict[str, bytes] = {}
        self._names: dict[bytes, str] = {}
        self._counts: dict[str, int] = {}
        """Indexed objects of each namespace."""
        self._next_namespace = 0
        self._count = 0
        self._used_bytes = 0
        self._reserved_bytes = 0
        self._extra_bytes = 0
        self._scan = 0
        self._capacity_bytes = capacity_bytes

    # Queries.

    def contains(self, namespace: str, key: bytes) -> bool:
        """Whether the object is indexed."""
        return self._find(namespace, key) != NONE

    def keys(self, namespace: str) -> Iterator[bytes]:
        """The keys of a namespace, without a snapshot: objects that are added or removed meanwhile
        may or may not be among them."""
        prefix = self._namespaces.get(namespace)
        if prefix is None:
            return
        for part in self._table.parts():
            for name, node in part:
                if name.startswith(prefix) and self._order.is_present(node):
                    yield name[_NAMESPACE_BYTES:]

    def previous(self, namespace: str, key: bytes) -> bytes:
        """The key of the object that precedes this one in its prefix; empty if it is not known."""
        with self._lock:
            node = self._find(namespace, key)
            parent = self._order.predecessor(node) if node else NONE
            return self._name(parent)[1] if parent else b""

    def usage(self) -> TierUsage:
        """Bytes of objects, of files being written and of other files."""
        with self._lock:
            used = self._used_bytes + self._extra_bytes + self._reserved_bytes
            return TierUsage(used, self._capacity_bytes, self._count, self._unindexed_total)

    def entries(self) -> Iterator[tuple[str, bytes, int]]:
        """All objects with their charged bytes, without a snapshot, as ``keys``."""
        start = KINDS
        while start < len(self._units):
            with self._lock:
                end = min(start + _PART_OBJECTS, len(self._units))
                found = [
                    (*self._name(node), self._units[node] * ALIGNMENT_BYTES)
                    for node in range(start, end)
                    if self._order.is_present(node)
                ]
            yield from found
            start = end

    # For saving and restoring.

    @property
    def longest_key_bytes(self) -> int:
        """Length of the longest key."""
        return self._table.longest_bytes - _NAMESPACE_BYTES

    @property
    def uses(self) -> int:
        """Rises with every use and every new object."""
        return self._order.now

    def count_of(self, namespace: str) -> int:
        """How many objects of a namespace are indexed."""
        return self._counts.get(namespace, 0)

    def namespaces(self) -> list[str]:
        """The namespaces of the indexed objects."""
        with self._lock:
            return list(self._counts)

    def nodes(self, namespace: str) -> Iterator[tuple[bytes, int]]:
        """The keys of a namespace with their nodes, without a snapshot, as ``keys``."""
        prefix = self._namespaces.get(namespace)
        if prefix is None:
            return
        for part in self._table.parts():
            for name, node in part:
                if name.startswith(prefix) and self._order.is_present(node):
                    yield name[_NAMESPACE_BYTES:], node

    def ranks(self) -> NDArray[np.uint32]:
        """By node: the rank of its last use, from 1; 0 for nodes without an object."""
        with self._lock:
            used_at, flags = self._order.recency()
        present = np.flatnonzero(flags)
        found = np.zeros(len(used_at), dtype=np.uint32)
        order = np.argsort(used_at[present], kind="stable")
        found[present[order]] = np.arange(1, len(present) + 1, dtype=np.uint32)
        return found

    def describe(self, node: int) -> tuple[int, int, bool]:
        """Size in units of 4 KiB, predecessor, and whether it was used again."""
        return self._units[node], self._order.predecessor(node), self._order.is_often(node)

    def uses_of(self, node: int) -> int:
        """How often an object was used, as far as this process knows, up to ``MAX_USES``."""
        return self._uses[node]

    def add_uses(self, namespace: str, key: bytes, uses: int) -> None:
        """An object was used so often before this process counted."""
        with self._lock:
            node = self._find(namespace, key)
            if node:
                self._uses[node] = min(self._uses[node] + uses, MAX_USES)

    def facts(self, node: int) -> ObjectFacts | None:
        """The facts of an object; None if they are not known."""
        if not self._known[node]:
            return None
        tenant = self._tenants[self._order.group_of(node)]
        at = self._expires_at[node] if node < len(self._expires_at) else 0
        return ObjectFacts(tenant, at)

    def add_saved(self, saved: SavedObject) -> bool:
        """A saved index names an object. True if it is new to the index and there was room."""
        namespace, key, size_bytes, previous, often, facts, uses = saved
        with self._lock:
            if self._count >= self._max_objects or self._find(namespace, key):
                return False
            node = self._enter(namespace, key, size_bytes, previous, often=often)
            self._learn(node, facts)
            if uses:
                self._uses[node] = min(uses, MAX_USES)
            return True

    # Tenants, and objects that expire.

    def set_tenant_limit(self, limit_bytes: int) -> None:
        """Changes what one tenant may hold."""
        with self._lock:
            if limit_bytes != self._accounts.limit_bytes:
                self._accounts.set_limit(limit_bytes)

    def tenants(self) -> dict[bytes, int]:
        """Bytes of each tenant that holds some, files that are being written included."""
        with self._lock:
            return dict(self._accounts.held)

    @property
    def tenant_limit_bytes(self) -> int:
        """What one tenant may hold."""
        return self._accounts.limit_bytes

    def claim(self, tenant: bytes, size_bytes: int) -> TenantClaim | None:
        """Charges a file that is about to be written to its tenant's share, until ``publish`` or
        ``unclaim``. None if there is no room."""
        with self._lock:
            account = self._accounts.account_of(tenant)
            if self._accounts.room(account) < size_bytes:
                return None
            self._accounts.add(account, size_bytes)
            return TenantClaim(account, size_bytes)

    def unclaim(self, claim: TenantClaim) -> None:
        """The file was not published. No effect if it was."""
        with self._lock:
            self._give_back(claim)

    def _give_back(self, claim: TenantClaim) -> None:
        """Needs the lock."""
        self._accounts.remove(claim.account, claim.size_bytes)
        claim.size_bytes = 0

    def oldest_of(self, tenant: bytes) -> tuple[str, bytes] | None:
        """The object of a tenant to evict next, which stays indexed; None if there is none."""
        with self._lock:
            return self._oldest_of(self._accounts.account_of(tenant))

    def oldest_above_share(self) -> tuple[str, bytes] | None:
        """The object to evict next of a tenant above its share, which stays indexed."""
        with self._lock:
            for account in self._accounts.over:
                found = self._oldest_of(account)
                if found is not None:
                    return found
        return None

    def _oldest_of(self, account: bytes) -> tuple[str, bytes] | None:
        group = self._groups.get(account)
        node = NONE if group is None else self._order.oldest_of(group)
        return self._name(node) if node else None

    @property
    def unknown(self) -> int:
        """Objects whose facts are not known: a scan or another process has found them."""
        return self._unknown

    def next_unknown(self, number: int) -> list[tuple[str, bytes]]:
        """Up to so many objects whose facts are not known, the next ones of all."""
        found: list[tuple[str, bytes]] = []
        with self._lock:
            left = len(self._known)
            while len(found) < number and left > 0 and self._unknown:
                node = self._asked if self._asked < len(self._known) else KINDS
                at = self._known.find(0, node)
                left -= max((at if at >= 0 else len(self._known)) - node, 1)
                self._asked = at + 1 if at >= 0 else KINDS
                if at >= 0 and self._order.is_present(at):
                    found.append(self._name(at))
        return found

    def learn(self, namespace: str, key: bytes, facts: ObjectFacts) -> None:
        """The header of an object was read."""
        with self._lock:
            node = self._find(namespace, key)
            if node and not self._known[node]:
                self._learn(node, facts)

    def expired(self, now: float, at_most: int) -> list[tuple[str, bytes]]:
        """Objects that have expired at ``now`` (seconds since the epoch)."""
        found: list[tuple[str, bytes]] = []
        for start in range(0, len(self._expires_at), _PART_OBJECTS):
            with self._lock:
                part = np.array(self._expires_at[start : start + _PART_OBJECTS], dtype=np.uint32)
                nodes = np.flatnonzero((part > 0) & (part <= int(now)))
                found += [self._name(start + int(node)) for node in nodes]
            if len(found) >= at_most:
                return found[:at_most]
        return found

    def _learn(self, node: int, facts: ObjectFacts | None) -> None:
        """Needs the lock. Takes the facts of an object, if there are any."""
        if facts is not None:
            self._unknown -= not self._known[node]
            self._set_facts(node, facts)

    def _set_facts(self, node: int, facts: ObjectFacts) -> None:
        """Needs the lock. The node is present."""
        self._known[node] = 1
        if facts.expires_at:
            missing = node + 1 - len(self._expires_at)
            if missing > 0:
                self._expires_at.extend((0,) * missing)
            self._expires_at[node] = min(facts.expires_at, _MAX_TIME)
        elif node < len(self._expires_at):
            self._expires_at[node] = 0
        account = self._accounts.account_of(facts.tenant)
        before = self._tenants[self._order.group_of(node)]
        if account == before:
            return
        size = self._units[node] * ALIGNMENT_BYTES
        self._order.move(node, self._group(account))
        self._accounts.remove(before, size)
        self._accounts.add(account, size)
        self._drop_group(before)

    def _group(self, account: bytes) -> int:
        if not account:
            return 0
        group = self._groups.get(account)
        if group is None:
            group = self._groups[account] = self._order.new_group()
            self._tenants[group] = account
        return group

    def _drop_group(self, account: bytes) -> None:
        group = self._groups.get(account)
        if group is not None and not self._order.present_of(group):
            del self._groups[account], self._tenants[group]
            self._order.release_group(group)

    @property
    def count(self) -> int:
        """How many objects are indexed."""
        return self._count

    @property
    def max_objects(self) -> int:
        """How many objects are indexed at most."""
        return self._max_objects

    @property
    def unindexed(self) -> int:
        """Objects known to exist that are not indexed: those that the last scan found, and those
        displaced since.
        """
        return self._unindexed

    @property
    def wants_scan(self) -> bool:
        """Whether a scan could index a good part of the objects that are not indexed."""
        free = self._max_objects - self._count
        return self._unindexed > 0 and free >= max(
            min(self._unindexed, self._max_objects // _REFILL_FRACTION), 1
        )

    # Objects.

    def reserve(self, size_bytes: int) -> None:
        """Reserves the bytes of a file that is about to be written."""
        with self._lock:
            self._reserved_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        """Releases the bytes of a reserved file that was not published."""
        with self._lock:
            self._reserved_bytes -= size_bytes

    def publish(
        self,
        namespace: str,
        key: bytes,
        size_bytes: int,
        previous: bytes = b"",
        facts: ObjectFacts = NO_FACTS,
        claim: TenantClaim | None = None,
    ) -> bool:
        """A reserved file has its final name. True if the object is new to the index.

        ``previous``: key of the object that precedes it in its prefix, if that is known. ``claim``:
        what the file was charged, which is given back. At no time does it count twice.
        """
        with self._lock:
            self._reserved_bytes -= size_bytes
        return self._add(namespace, key, size_bytes, previous, facts, claim)

    def add(self, namespace: str, key: bytes, size_bytes: int, previous: bytes = b"") -> bool:
        """An object exists and was used. True if it is new to the index. ``previous``: as for
        ``publish``. Its facts are not known."""
        return self._add(namespace, key, size_bytes, previous, None)

    def _add(
        self,
        namespace: str,
        key: bytes,
        size_bytes: int,
        previous: bytes,
        facts: ObjectFacts | None,
        claim: TenantClaim | None = None,
    ) -> bool:
        displaced: list[tuple[str, bytes]] = []
        with self._lock:
            node = self._find(namespace, key)
            if node:
                self._use(namespace, node, previous)
                self._resize(node, size_bytes)
                # A scan may have found the file before its writer comes to this.
                self._learn(node, facts)
            else:
                while self._count >= self._max_objects:
                    displaced.append(self._displace())
                self._learn(self._enter(namespace, key, size_bytes, previous), facts)
            if claim is not None:
                self._give_back(claim)
        for displaced_namespace, displaced_key in displaced:
            self._on_displaced(displaced_namespace, displaced_key)
        return not node

    def add_discovered(
        self, namespace: str, key: bytes, size_bytes: int, used_at: float = 0.0
    ) -> bool:
        """A scan found an object. True if it is new to the index and there was room for it.

        ``used_at``: when its file was used last, in seconds; for ``order_discovered``.
        """
        with self._lock:
            if self._find(namespace, key):
                return False
            if self._count >= self._max_objects:
                self._unindexed_in_scan += 1
                return False
            # If some are not indexed, it was most likely displaced before, because others were used
            # later.
            node = self._enter(namespace, key, size_bytes, b"", oldest=self._unindexed > 0)
            if self._ordering:
                missing = node + 1 - len(self._file_used_at)
                if missing > 0:
                    self._file_used_at.extend((0.0,) * missing)
                self._file_used_at[node] = used_at
            return True

    def touch(
        self, namespace: str, key: bytes, previous: bytes = b"", *, often: bool = True
    ) -> None:
        """Notes a use of the object. ``previous``: as for ``publish``. Without ``often`` it becomes
        the most recently used object, but is not known to have been used again."""
        with self._lock:
            node = self._find(namespace, key)
            if node:
                self._use(namespace, node, previous, often=often)
                self._count_use(node, often)

    def used(self, namespace: str, key: bytes, previous: bytes, facts: ObjectFacts) -> bytes:
        """An object was read: ``touch``, ``learn`` and ``previous`` with one search."""
        with self._lock:
            node = self._find(namespace, key)
            if not node:
                return b""
            if not self._known[node]:
                self._learn(node, facts)
            self._use(namespace, node, previous)
            self._count_use(node, True)
            parent = self._order.predecessor(node)
            return self._name(parent)[1] if parent else b""

    def remove(self, namespace: str, key: bytes) -> bool:
        """The object no longer exists. False if it was not indexed."""
        with self._lock:
            node = self._find(namespace, key)
            if node:
                self._leave(node)
            return bool(node)

    # Capacity and other files.

    def set_capacity(self, capacity_bytes: int) -> None:
        """Changes the capacity that ``usage`` reports."""
        with self._lock:
            self._capacity_bytes = capacity_bytes

    def add_extra(self, size_bytes: int) -> None:
        """Adds bytes of a file that is not an object."""
        with self._lock:
            self._extra_bytes += size_bytes

    def set_extra(self, size_bytes: int) -> None:
        """Sets the bytes of all files that are not objects."""
        with self._lock:
            self._extra_bytes = size_bytes

    # Eviction.

    def oldest(self) -> tuple[str, bytes] | None:
        """The object to evict next, which stays indexed; None if there is none."""
        with self._lock:
            node = self._order.victim()
            return self._name(node) if node else None

    # Scans.

    def begin_scan(self) -> None:
        """A scan starts. Objects that it does not mark are in ``not_seen``."""
        with self._lock:
            self._scan = (self._scan + 1) % _SCANS
            self._unindexed_in_scan = 0

    def end_scan(self) -> None:
        """The scan has read the whole directory: its count of unindexed objects holds."""
        with self._lock:
            self._unindexed_total += max(self._unindexed_in_scan - self._unindexed, 0)
            self._unindexed = self._unindexed_in_scan

    def begin_ordering(self) -> None:
        """A scan of the whole directory starts, before any object is used."""
        with self._lock:
            self._ordering = True

    def order_discovered(self) -> None:
        """The scan has ended: puts the objects that it found in the order of use of their files.

        Of files that were used in the same minute the latest is the first to be evicted: the chunks
        of a prompt are written and read in the order of the prompt.
        """
        with self._lock:
            used_at, self._file_used_at, self._ordering = self._file_used_at, array("d"), False
        nodes = [node for node, at in enumerate(used_at) if at]
        nodes.sort(key=lambda node: age_rank(used_at[node]))
        for start in range(0, len(nodes), _PART_OBJECTS):
            with self._lock:
                for node in nodes[start : start + _PART_OBJECTS]:
                    self._order.use(node)

    def mark_seen(self, namespace: str, key: bytes, size_bytes: int = 0) -> bool:
        """The scan found the object. False if it is not indexed. ``size_bytes``: 0 if the scan does
        not tell."""
        with self._lock:
            node = self._find(namespace, key)
            if node:
                self._seen_by[node] = self._scan
                if size_bytes:
                    self._resize(node, size_bytes)
            return bool(node)

    def not_seen(self) -> Iterator[tuple[str, bytes]]:
        """Objects that the scan did not find. They may have been removed."""
        start = KINDS
        while start < len(self._seen_by):
            with self._lock:
                end = min(start + _PART_OBJECTS, len(self._seen_by))
                found = [
                    self._name(node)
                    for node in range(start, end)
                    if self._seen_by[node] != self._scan and self._order.is_present(node)
                ]
            yield from found
            start = end

    # Helpers. All but ``_find`` need the lock.

    def _find(self, namespace: str, key: bytes) -> int:
        """The node of an indexed object, or ``NONE``."""
        prefix = self._namespaces.get(namespace)
        node = self._table.get(prefix + key) if prefix is not None else NONE
        return node if node and self._order.is_present(node) else NONE

    def _name(self, node: int) -> tuple[str, bytes]:
        name = self._table.key_at(self._key_bytes[node], self._buckets[node], node)
        return self._names[name[:_NAMESPACE_BYTES]], name[_NAMESPACE_BYTES:]

    def _node(self, name: bytes) -> int:
        """The node of a namespace and key, which may be absent."""
        node = self._table.get(name)
        if not node:
            node = self._order.new()
            while len(self._seen_by) <= node:
                self._key_bytes.append(0)
                self._buckets.append(0)
                self._units.append(0)
                self._seen_by.append(0)
                self._uses.append(0)
                # No node that is absent is unknown.
                self._known.append(1)
            self._table.add(name, node)
            self._key_bytes[node], self._buckets[node] = self._table.place(name)
        return node

    def _predecessor(self, namespace: str, previous: bytes) -> int:
        if not previous:
            return NONE
        name = self._namespaces[namespace] + previous
        placeholders = len(self._table) - self._count
        if placeholders > self._max_objects // _PLACEHOLDER_FRACTION:
            return self._table.get(name)
        return self._node(name)

    def _enter(
        self,
        namespace: str,
        key: bytes,
        size_bytes: int,
        previous: bytes,
        *,
        oldest: bool = False,
        often: bool = False,
    ) -> int:
        """Needs the lock. Adds an object, whose facts are not known, and returns its node."""
        if namespace not in self._namespaces:
            self._next_namespace += 1
            prefix = self._next_namespace.to_bytes(_NAMESPACE_BYTES, "big")
            self._namespaces[namespace] = prefix
            self._names[prefix] = namespace
        node = self._node(self._namespaces[namespace] + key)
        parent = self._predecessor(namespace, previous)
        self._order.enter(node, parent, oldest=oldest, often=often)
        if parent and not self._order.predecessor(node):
            self._forget(parent)
        self._seen_by[node] = self._scan
        self._units[node] = 0
        self._uses[node] = 0
        self._known[node] = 0
        self._unknown += 1
        self._resize(node, size_bytes)
        self._count += 1
        self._counts[namespace] = self._counts.get(namespace, 0) + 1
        return node

    def _resize(self, node: int, size_bytes: int) -> None:
        units = min(-(-size_bytes // ALIGNMENT_BYTES), _MAX_UNITS)
        more = (units - self._units[node]) * ALIGNMENT_BYTES
        self._used_bytes += more
        self._units[node] = units
        account = self._tenants[self._order.group_of(node)]
        if account and more > 0:
            self._accounts.add(account, more)
        elif account and more < 0:
            self._accounts.remove(account, -more)

    def _use(self, namespace: str, node: int, previous: bytes, *, often: bool = True) -> None:
        if previous and not self._order.predecessor(node):
            parent = self._predecessor(namespace, previous)
            if parent and not self._order.follow(node, parent):
                self._forget(parent)
        self._order.use(node, often=often)

    def _count_use(self, node: int, counts: bool) -> None:
        if counts and self._uses[node] < MAX_USES:
            self._uses[node] += 1

    def _leave(self, node: int) -> tuple[str, bytes]:
        namespace, key = self._name(node)
        account = self._tenants[self._order.group_of(node)]
        self._resize(node, 0)
        self._count -= 1
        self._unknown -= not self._known[node]
        self._known[node] = 1
        if node < len(self._expires_at):
            self._expires_at[node] = 0
        orphaned = self._order.leave(node)
        self._drop_group(account)
        if orphaned:
            self._forget(orphaned)
        self._forget(node)
        self._counts[namespace] -= 1
        if not self._counts[namespace]:
            # Its nodes are all gone: an absent one is there only while an indexed one follows it.
            del self._counts[namespace]
            del self._names[self._namespaces.pop(namespace)]
        return namespace, key

    def _forget(self, node: int) -> None:
        """Forgets a node that is absent, unless an indexed object follows it."""
        if self._order.is_present(node) or self._order.has_followers(node):
            return
        size, bucket = self._key_bytes[node], self._buckets[node]
        self._table.pop(self._table.key_at(size, bucket, node))
        self._order.release(node)

    def _displace(self) -> tuple[str, bytes]:
        """Drops the object that would be evicted next from the index. Its file stays: another
        process may index it, and only the leader evicts.
        """
        self._unindexed += 1
        self._unindexed_in_scan += 1
        self._unindexed_total += 1
        return self._leave(self._order.victim())
