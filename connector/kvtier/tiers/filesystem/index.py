"""What a directory holds, in memory: sizes, order of use, bytes charged.

One integer per object (size in 4 KiB units, the refresh that met it, a use counter) keeps a million objects below 200 bytes each. Every method may
be called from any thread; none does I/O.

Memory is bounded by a number of objects. Beyond it, an object that is stored or asked for takes the place of those that were used longest ago;
one that a pass merely finds is left out. What is left out stays in the directory and in the janitor's books, which count files and ask no index, so
the budget holds whatever is indexed. When objects go, passes take in what was left out, as the next to be evicted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from kvtier.tiers.base import ALIGNMENT_BYTES, TierUsage

_SIZE_BITS = 24
"""Sizes up to 64 GiB in units of 4 KiB; the use counter has the rest."""
_SIZE_MASK = (1 << _SIZE_BITS) - 1
_PASS_BITS = 8
"""Which refresh met the object last, modulo 256: two that differ by a multiple of it are never confused, as each drops what it did not meet."""
_PASS_MASK = (1 << _PASS_BITS) - 1
_USE_SHIFT = _SIZE_BITS + _PASS_BITS
_FIRST_USE = 1 << 26
"""Uses are counted from here, so that what was left out before has numbers below; and a value still fits two digits of 30 bits."""
MAX_INDEXED_OBJECTS = 750_000
"""Of all file tiers of a daemon together. A sidecar has 256 MiB for indexes, and an object takes at most 352 bytes: 80 for a key of 33, 32 for the
integer, and twice, here and in the store's presence index, its part of a dictionary: up to six places of 20 bytes just after that has made room,
which it does for three times of what is in it. Those are 252 MiB. What is made now and then and dropped again (16 bytes per object for
``oldest``, some 80 where the presence index lists a tier afresh) fits what tierd has beside."""
_OLDEST_AT_ONCE = 65_536
"""What ``oldest`` names at most, so that its list stays small beside the index."""
_DISPLACED_FRACTION = 32
"""Part of the index that makes room at a time: finding what was used longest ago looks at everything, about half a second when full. Three
times as many announcements are more than the store lets wait."""
_REFILL_FRACTION = 16
"""A pass is worth its while when so much of the index is free and something was left out."""


def _ignore(_namespace: str, _key: bytes) -> None:
    return


class Index:
    """Objects by namespace and key, least recently used first to go. ``displaced`` is told what leaves the index to make room.

    ``reserved`` bytes belong to files that are being written; ``extra`` to what is no object (descriptions of namespaces).
    """

    def __init__(
        self,
        capacity_bytes: int,
        max_objects: int = MAX_INDEXED_OBJECTS,
        displaced: Callable[[str, bytes], None] = _ignore,
    ) -> None:
        self._lock = threading.Lock()
        self._displacing = threading.Lock()
        self._max_objects = max(max_objects, 1)
        self._displaced = displaced
        self._left_out = 0
        self._left_out_in_pass = 0
        self._left_out_total = 0
        self._objects: dict[str, dict[bytes, int]] = {}
        self._count = 0
        self._used = 0
        self._reserved = 0
        self._extra = 0
        self._uses = _FIRST_USE
        self._old_uses = 0
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
            used = self._used + self._extra + self._reserved
            return TierUsage(used, self._capacity, self._count, self._left_out_total)

    @property
    def left_out(self) -> int:
        """Objects that are known to be there and are not indexed: as many as the last pass found, and what left since."""
        return self._left_out

    @property
    def wants_pass(self) -> bool:
        """Whether there is room for a good part of what is left out, or for all of it."""
        free = self._max_objects - self._count
        return self._left_out > 0 and free >= max(
            min(self._left_out, self._max_objects // _REFILL_FRACTION), 1
        )

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
        return self._add(namespace, key, size_bytes, size_bytes)

    def add(self, namespace: str, key: bytes, size_bytes: int) -> bool:
        """An object is there and used; True if it was not known before."""
        return self._add(namespace, key, size_bytes, 0)

    def _add(self, namespace: str, key: bytes, size_bytes: int, reserved_bytes: int) -> bool:
        while True:
            with self._lock:
                if self._count < self._max_objects or key in self._objects.get(namespace, ()):
                    self._reserved -= reserved_bytes
                    self._uses += 1
                    return self._put(namespace, key, size_bytes, self._uses)
            self._make_room()

    def find(self, namespace: str, key: bytes, size_bytes: int) -> bool:
        """A pass found an object; True if it was not known before and has been taken in."""
        with self._lock:
            if key in self._objects.get(namespace, ()):
                return False
            if self._count >= self._max_objects:
                self._left_out_in_pass += 1
                return False
            if self._left_out:
                # Left out before, most likely, because others were used later.
                self._old_uses = min(self._old_uses + 1, _FIRST_USE)
                return self._put(namespace, key, size_bytes, self._old_uses)
            self._uses += 1
            return self._put(namespace, key, size_bytes, self._uses)

    def charge(self, size_bytes: int) -> None:
        """Bytes of something that is no object, in addition."""
        with self._lock:
            self._extra += size_bytes

    def set_extra(self, size_bytes: int) -> None:
        """Bytes of everything that is no object."""
        with self._lock:
            self._extra = size_bytes

    def _make_room(self) -> None:
        """Has those leave that were used longest ago. Their files stay: another process may index them, and removing is the janitor's."""
        gone = []
        with self._displacing:
            if self._count < self._max_objects:
                return
            for namespace, key, value in self.oldest(
                1 << 62, max(self._max_objects // _DISPLACED_FRACTION, 1)
            ):
                if self.unchanged(namespace, key, value) and self.remove(namespace, key):
                    gone.append((namespace, key))
            with self._lock:
                self._left_out += len(gone)
                self._left_out_in_pass += len(gone)
                self._left_out_total += len(gone)
        for namespace, key in gone:
            self._displaced(namespace, key)

    def _put(self, namespace: str, key: bytes, size_bytes: int, use: int) -> bool:
        objects = self._objects.setdefault(namespace, {})
        before = objects.get(key)
        units = min(-(-size_bytes // ALIGNMENT_BYTES), _SIZE_MASK)
        objects[key] = use << _USE_SHIFT | self._pass << _SIZE_BITS | units
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

    def oldest(
        self, surplus_bytes: int, at_most: int = _OLDEST_AT_ONCE
    ) -> list[tuple[str, bytes, int]]:
        """The least recently used objects that together have ``surplus_bytes``, or a first part of them, each with a value for
        ``unchanged``; they stay until removed."""
        if surplus_bytes <= 0:
            return []
        # Values alone first: they are in memory anyway, so a list of them is small, and it is sorted without holding anybody up.
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

    def unchanged(self, namespace: str, key: bytes, value: int) -> bool:
        """Whether the object is there and was not used since ``oldest`` named it."""
        return self._objects.get(namespace, {}).get(key, 0) >> _USE_SHIFT == value

    # Refreshing.

    def begin_pass(self) -> None:
        """A refresh begins; what it does not ``meet`` is for ``unmet``."""
        with self._lock:
            self._pass = (self._pass + 1) & _PASS_MASK
            self._left_out_in_pass = 0

    def end_pass(self) -> None:
        """It has seen everything: what it left out is what is left out."""
        with self._lock:
            self._left_out_total += max(self._left_out_in_pass - self._left_out, 0)
            self._left_out = self._left_out_in_pass

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
