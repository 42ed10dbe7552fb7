"""The index of a directory in memory: which objects exist, their sizes and their order of use.

One integer per object (size in units of 4 KiB, the scan that last saw it, a use counter) keeps a
million objects below 200 bytes each. Every method may be called from any thread and does no I/O.

The number of indexed objects is bounded. Beyond the bound, an object that is stored or requested
displaces the least recently used ones; an object that a scan merely discovers is not indexed.
Objects that are not indexed stay in the directory and in the leader's ledger, which counts files,
so the capacity holds regardless of what is indexed. When objects are removed, scans index others
and place them first in the order of eviction.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from kvtier.tiers.base import ALIGNMENT_BYTES, TierUsage

_SIZE_BITS = 24
"""Sizes up to 64 GiB in units of 4 KiB. The use counter takes the bits above the scan."""
_SIZE_MASK = (1 << _SIZE_BITS) - 1
_SCAN_BITS = 8
"""The scan that last saw the object, modulo 256. Scans that differ by a multiple of 256 cannot be
confused, because each removes the objects that it did not see."""
_SCAN_MASK = (1 << _SCAN_BITS) - 1
_USE_SHIFT = _SIZE_BITS + _SCAN_BITS
_FIRST_USE = 1 << 26
"""The use counter starts here, so that objects which were displaced before can be placed below;
and a value still fits two digits of 30 bits."""
MAX_INDEXED_OBJECTS = 750_000
"""Of all file tiers of a daemon together. A sidecar has 256 MiB for indexes, and an object takes at
most 352 bytes: 80 for a key of 33 bytes, 32 for the integer, and its part of two dictionaries (here
and in the store's presence index), each up to six entries of 20 bytes right after a resize to three
times its size. That is 252 MiB. Temporary lists (16 bytes per object for ``oldest``, about 80 while
the presence index lists a tier) fit tierd's other memory."""
_MAX_OLDEST = 65_536
"""What ``oldest`` returns at most, so that its list stays small compared with the index."""
_DISPLACED_FRACTION = 32
"""The part of the index that is displaced at a time: finding the least recently used objects reads
the whole index, about half a second when it is full. Displacing three times as many would announce
more changes than the store queues."""
_REFILL_FRACTION = 16
"""A scan is worthwhile when this part of the index is free and some objects are not indexed."""


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
        self._displacing = threading.Lock()
        self._max_objects = max(max_objects, 1)
        self._on_displaced = on_displaced
        self._unindexed = 0
        self._unindexed_in_scan = 0
        self._unindexed_total = 0
        self._objects: dict[str, dict[bytes, int]] = {}
        self._count = 0
        self._used_bytes = 0
        self._reserved_bytes = 0
        self._extra_bytes = 0
        self._uses = _FIRST_USE
        self._old_uses = 0
        self._scan = 0
        self._capacity_bytes = capacity_bytes

    # Queries.

    def contains(self, namespace: str, key: bytes) -> bool:
        """Whether the object is indexed."""
        return key in self._objects.get(namespace, ())

    def keys(self, namespace: str) -> list[bytes]:
        """A snapshot of a namespace."""
        with self._lock:
            return list(self._objects.get(namespace, ()))

    def usage(self) -> TierUsage:
        """Bytes of objects, of files being written and of other files."""
        with self._lock:
            used = self._used_bytes + self._extra_bytes + self._reserved_bytes
            return TierUsage(used, self._capacity_bytes, self._count, self._unindexed_total)

    def entries(self) -> list[tuple[str, bytes, int]]:
        """A snapshot of all objects with their charged bytes."""
        with self._lock:
            return [
                (namespace, key, (value & _SIZE_MASK) * ALIGNMENT_BYTES)
                for namespace, key, value in self._all()
            ]

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

    def publish(self, namespace: str, key: bytes, size_bytes: int) -> bool:
        """A reserved file has its final name. True if the object is new to the index."""
        return self._add(namespace, key, size_bytes, size_bytes)

    def add(self, namespace: str, key: bytes, size_bytes: int) -> bool:
        """An object exists and was used. True if it is new to the index."""
        return self._add(namespace, key, size_bytes, 0)

    def _add(self, namespace: str, key: bytes, size_bytes: int, reserved_bytes: int) -> bool:
        while True:
            with self._lock:
                if self._count < self._max_objects or key in self._objects.get(namespace, ()):
                    self._reserved_bytes -= reserved_bytes
                    self._uses += 1
                    return self._put(namespace, key, size_bytes, self._uses)
            self._displace()

    def add_discovered(self, namespace: str, key: bytes, size_bytes: int) -> bool:
        """A scan found an object. True if it is new to the index and there was room for it."""
        with self._lock:
            if key in self._objects.get(namespace, ()):
                return False
            if self._count >= self._max_objects:
                self._unindexed_in_scan += 1
                return False
            if self._unindexed:
                # Most likely displaced before, because others were used later.
                self._old_uses = min(self._old_uses + 1, _FIRST_USE)
                return self._put(namespace, key, size_bytes, self._old_uses)
            self._uses += 1
            return self._put(namespace, key, size_bytes, self._uses)

    def touch(self, namespace: str, key: bytes) -> None:
        """Notes a use of the object."""
        with self._lock:
            objects = self._objects.get(namespace)
            value = objects.get(key) if objects is not None else None
            if objects is not None and value is not None:
                self._uses += 1
                objects[key] = self._uses << _USE_SHIFT | (value & (1 << _USE_SHIFT) - 1)

    def remove(self, namespace: str, key: bytes) -> bool:
        """The object no longer exists. False if it was not indexed."""
        with self._lock:
            objects = self._objects.get(namespace)
            value = objects.pop(key, None) if objects is not None else None
            if value is None:
                return False
            self._count -= 1
            self._used_bytes -= (value & _SIZE_MASK) * ALIGNMENT_BYTES
            if not objects:
                self._objects.pop(namespace, None)
            return True

    def _put(self, namespace: str, key: bytes, size_bytes: int, use: int) -> bool:
        objects = self._objects.setdefault(namespace, {})
        before = objects.get(key)
        units = min(-(-size_bytes // ALIGNMENT_BYTES), _SIZE_MASK)
        objects[key] = use << _USE_SHIFT | self._scan << _SIZE_BITS | units
        if before is None:
            self._count += 1
            self._used_bytes += units * ALIGNMENT_BYTES
            return True
        self._used_bytes += (units - (before & _SIZE_MASK)) * ALIGNMENT_BYTES
        return False

    def _displace(self) -> None:
        """Drops the least recently used objects from the index. Their files stay: another process
        may index them, and only the leader evicts.
        """
        displaced = []
        with self._displacing:
            if self._count < self._max_objects:
                return
            for namespace, key, use in self.oldest(
                1 << 62, max(self._max_objects // _DISPLACED_FRACTION, 1)
            ):
                if self.is_unused_since(namespace, key, use) and self.remove(namespace, key):
                    displaced.append((namespace, key))
            with self._lock:
                self._unindexed += len(displaced)
                self._unindexed_in_scan += len(displaced)
                self._unindexed_total += len(displaced)
        for namespace, key in displaced:
            self._on_displaced(namespace, key)

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

    def oldest(
        self, surplus_bytes: int, at_most: int = _MAX_OLDEST
    ) -> list[tuple[str, bytes, int]]:
        """The least recently used objects that together have ``surplus_bytes``, or the first
        ``at_most`` of them, each with its last use for ``is_unused_since``. They stay indexed.
        """
        if surplus_bytes <= 0:
            return []
        # Sort the values alone: they exist already, so their list is small, and sorting them does
        # not hold the lock.
        with self._lock:
            values = [value for objects in self._objects.values() for value in objects.values()]
        values.sort()
        del values[at_most:]
        last = -1
        for last in values:
            surplus_bytes -= (last & _SIZE_MASK) * ALIGNMENT_BYTES
            if surplus_bytes <= 0:
                break
        with self._lock:
            chosen = [
                (value, namespace, key) for namespace, key, value in self._all() if value <= last
            ]
        chosen.sort()
        return [(namespace, key, value >> _USE_SHIFT) for value, namespace, key in chosen]

    def is_unused_since(self, namespace: str, key: bytes, use: int) -> bool:
        """Whether the object is indexed and was not used since ``oldest`` returned ``use``."""
        return self._objects.get(namespace, {}).get(key, 0) >> _USE_SHIFT == use

    # Scans.

    def begin_scan(self) -> None:
        """A scan starts. Objects that it does not mark are in ``not_seen``."""
        with self._lock:
            self._scan = (self._scan + 1) & _SCAN_MASK
            self._unindexed_in_scan = 0

    def end_scan(self) -> None:
        """The scan has read the whole directory: its count of unindexed objects holds."""
        with self._lock:
            self._unindexed_total += max(self._unindexed_in_scan - self._unindexed, 0)
            self._unindexed = self._unindexed_in_scan

    def mark_seen(self, namespace: str, key: bytes) -> bool:
        """The scan found the object. False if it is not indexed."""
        with self._lock:
            objects = self._objects.get(namespace)
            value = objects.get(key) if objects is not None else None
            if objects is None or value is None:
                return False
            objects[key] = value & ~(_SCAN_MASK << _SIZE_BITS) | self._scan << _SIZE_BITS
            return True

    def not_seen(self) -> list[tuple[str, bytes]]:
        """Objects that the scan did not find. They may have been removed."""
        with self._lock:
            return [
                (namespace, key)
                for namespace, key, value in self._all()
                if value >> _SIZE_BITS & _SCAN_MASK != self._scan
            ]

    def _all(self) -> Iterator[tuple[str, bytes, int]]:
        for namespace, objects in self._objects.items():
            for key, value in objects.items():
                yield namespace, key, value
