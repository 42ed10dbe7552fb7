"""What a directory holds, in memory: sizes, order of use, bytes charged.

One integer per object (size in 4 KiB units and a use counter) keeps a million objects below 200 bytes each. Every method may
be called from any thread; none does I/O.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterator

from kvtier.tiers.base import ALIGNMENT_BYTES, TierUsage

_SIZE_BITS = 24
"""Sizes up to 64 GiB in units of 4 KiB; the use counter has the rest."""
_SIZE_MASK = (1 << _SIZE_BITS) - 1


class Index:
    """Objects by namespace and key, least recently used first to go.

    ``reserved`` bytes belong to files that are being written; ``extra`` to what is no object (descriptions of namespaces).
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, dict[bytes, int]] = {}
        self._count = 0
        self._used = 0
        self._reserved = 0
        self._uses = 0
        self._capacity = capacity_bytes

    def set_capacity(self, capacity_bytes: int) -> None:
        """Changes the budget; what is above it is for ``victims``."""
        with self._lock:
            self._capacity = capacity_bytes

    def contains(self, namespace: str, key: bytes) -> bool:
        """Whether the object is known."""
        return key in self._objects.get(namespace, ())

    def keys(self, namespace: str) -> list[bytes]:
        """Snapshot of a namespace."""
        with self._lock:
            return list(self._objects.get(namespace, ()))

    def usage(self) -> TierUsage:
        """Bytes of objects, files being written and descriptions."""
        with self._lock:
            return TierUsage(self._used + self._reserved, self._capacity, self._count)

    def reserve(self, size_bytes: int) -> bool:
        """Charges a file that is about to be written; False if it would exceed the capacity."""
        with self._lock:
            if self._used + self._reserved + size_bytes > self._capacity:
                return False
            self._reserved += size_bytes
            return True

    def release(self, size_bytes: int) -> None:
        """A reserved file was not published after all."""
        with self._lock:
            self._reserved -= size_bytes

    def publish(self, namespace: str, key: bytes, size_bytes: int) -> bool:
        """A reserved file is visible under its name; True if the object was not known before."""
        with self._lock:
            self._reserved -= size_bytes
            return self._put(namespace, key, size_bytes)

    def add(self, namespace: str, key: bytes, size_bytes: int) -> bool:
        """An object was found; True if it was not known before."""
        with self._lock:
            return self._put(namespace, key, size_bytes)

    def charge(self, size_bytes: int) -> None:
        """Bytes of something that is no object."""
        with self._lock:
            self._used += size_bytes

    def _put(self, namespace: str, key: bytes, size_bytes: int) -> bool:
        objects = self._objects.setdefault(namespace, {})
        before = objects.get(key)
        units = -(-size_bytes // ALIGNMENT_BYTES)
        self._uses += 1
        objects[key] = self._uses << _SIZE_BITS | min(units, _SIZE_MASK)
        if before is None:
            self._count += 1
            self._used += units * ALIGNMENT_BYTES
            return True
        self._used += (units - (before & _SIZE_MASK)) * ALIGNMENT_BYTES
        return False

    def touch(self, namespace: str, key: bytes) -> None:
        """The object was used."""
        with self._lock:
            objects = self._objects.get(namespace)
            value = objects.get(key) if objects is not None else None
            if objects is not None and value is not None:
                self._uses += 1
                objects[key] = self._uses << _SIZE_BITS | (value & _SIZE_MASK)

    def remove(self, namespace: str, key: bytes) -> bool:
        """The object is gone; False if it was not known."""
        with self._lock:
            objects = self._objects.get(namespace)
            value = objects.pop(key, None) if objects is not None else None
            if value is None:
                return False
            self._count -= 1
            self._used -= (value & _SIZE_MASK) * ALIGNMENT_BYTES
            if not objects:
                self._objects.pop(namespace, None)
            return True

    def victims(self, target_bytes: int) -> list[tuple[str, bytes]]:
        """The least recently used objects that have to go so that ``target_bytes`` are used; they stay until removed."""
        with self._lock:
            surplus = self._used + self._reserved - target_bytes
            if surplus <= 0:
                return []
            everything = [(value, namespace, key) for namespace, key, value in self._all()]
        heapq.heapify(everything)
        chosen: list[tuple[str, bytes]] = []
        while everything and surplus > 0:
            value, namespace, key = heapq.heappop(everything)
            surplus -= (value & _SIZE_MASK) * ALIGNMENT_BYTES
            chosen.append((namespace, key))
        return chosen

    def _all(self) -> Iterator[tuple[str, bytes, int]]:
        for namespace, objects in self._objects.items():
            for key, value in objects.items():
                yield namespace, key, value
