"""What a directory holds, in memory: sizes, order of use, bytes charged.

One integer per object (size in 4 KiB units, the refresh that met it, a use counter) keeps a million objects below 200 bytes each. Every method may
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
_PASS_BITS = 8
"""Which refresh met the object last, modulo 256: two that differ by a multiple of it are never confused, as each drops what it did not meet."""
_PASS_MASK = (1 << _PASS_BITS) - 1
_USE_SHIFT = _SIZE_BITS + _PASS_BITS


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
        self._extra = 0
        self._uses = 0
        self._pass = 0
        self._capacity = capacity_bytes

    def set_capacity(self, capacity_bytes: int) -> None:
        """Changes the capacity that ``usage`` states."""
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
            return TierUsage(self._used + self._extra + self._reserved, self._capacity, self._count)

    def reserve(self, size_bytes: int) -> None:
        """A file is about to be written."""
        with self._lock:
            self._reserved += size_bytes

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
        """Bytes of something that is no object, in addition."""
        with self._lock:
            self._extra += size_bytes

    def set_extra(self, size_bytes: int) -> None:
        """Bytes of everything that is no object."""
        with self._lock:
            self._extra = size_bytes

    def _put(self, namespace: str, key: bytes, size_bytes: int) -> bool:
        objects = self._objects.setdefault(namespace, {})
        before = objects.get(key)
        units = min(-(-size_bytes // ALIGNMENT_BYTES), _SIZE_MASK)
        self._uses += 1
        objects[key] = self._uses << _USE_SHIFT | self._pass << _SIZE_BITS | units
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
                objects[key] = self._uses << _USE_SHIFT | (value & (1 << _USE_SHIFT) - 1)

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

    def oldest(self, surplus_bytes: int) -> list[tuple[str, bytes, int]]:
        """The least recently used objects that together have ``surplus_bytes``, each with a value for ``unchanged``; they stay until
        removed."""
        if surplus_bytes <= 0:
            return []
        with self._lock:
            everything = [(value, namespace, key) for namespace, key, value in self._all()]
        heapq.heapify(everything)
        chosen: list[tuple[str, bytes, int]] = []
        while everything and surplus_bytes > 0:
            value, namespace, key = heapq.heappop(everything)
            surplus_bytes -= (value & _SIZE_MASK) * ALIGNMENT_BYTES
            chosen.append((namespace, key, value >> _USE_SHIFT))
        return chosen

    def unchanged(self, namespace: str, key: bytes, value: int) -> bool:
        """Whether the object is there and was not used since ``oldest`` named it."""
        return self._objects.get(namespace, {}).get(key, 0) >> _USE_SHIFT == value

    # Refreshing.

    def begin_pass(self) -> None:
        """A refresh begins; what it does not ``meet`` is for ``unmet``."""
        with self._lock:
            self._pass = (self._pass + 1) & _PASS_MASK

    def meet(self, namespace: str, key: bytes) -> bool:
        """The refresh found the object; False if it is not known."""
        with self._lock:
            objects = self._objects.get(namespace)
            value = objects.get(key) if objects is not None else None
            if objects is None or value is None:
                return False
            objects[key] = value & ~(_PASS_MASK << _SIZE_BITS) | self._pass << _SIZE_BITS
            return True

    def unmet(self) -> list[tuple[str, bytes]]:
        """Objects that the refresh did not find; they may be gone."""
        with self._lock:
            return [
                (namespace, key)
                for namespace, key, value in self._all()
                if value >> _SIZE_BITS & _PASS_MASK != self._pass
            ]

    def _all(self) -> Iterator[tuple[str, bytes, int]]:
        for namespace, objects in self._objects.items():
            for key, value in objects.items():
                yield namespace, key, value
