"""Which objects the store policy ``Reused`` admits to a secondary tier: chunks that occur again.

A chunk occurs again if an engine loads it, if another request stores it while it is in RAM, or if
it is stored once more after it has left RAM. For the last case ``SeenKeys`` remembers what was
stored, long after it was evicted. Only the store's thread uses this module.
"""

from __future__ import annotations

from kvtier.store.memory_tier import ResidentObjects
from kvtier.store.state import Entry

_BITS = 1 << 23
_HASHES = 4
KEYS_PER_FILTER = 500_000
"""A filter with so many keys takes one key in 400 for one that it has."""


class SeenKeys:
    """Remembers at least the last ``keys`` distinct keys, and at most twice as many, in 2 MiB.

    Two Bloom filters: the full one is read only, and is dropped when the other one is full. A key
    may be taken for one that was seen; it is then written at its first occurrence.
    """

    def __init__(self, keys: int = KEYS_PER_FILTER) -> None:
        self._keys = keys
        self._count = 0
        self._recent = bytearray(_BITS // 8)
        self._older = bytearray(_BITS // 8)

    def note(self, namespace: str, key: bytes) -> bool:
        """Notes an occurrence; returns whether there was one before."""
        value = hash((namespace, key))
        step = value >> 32 | 1
        places = [(value + number * step) % _BITS for number in range(_HASHES)]
        if self._has(self._recent, places):
            return True
        seen = self._has(self._older, places)
        if self._count >= self._keys:
            self._older, self._recent = self._recent, bytearray(_BITS // 8)
            self._count = 0
        for place in places:
            self._recent[place >> 3] |= 1 << (place & 7)
        self._count += 1
        return seen

    @staticmethod
    def _has(bits: bytearray, places: list[int]) -> bool:
        return all(bits[place >> 3] >> (place & 7) & 1 for place in places)


def admit_predecessors(resident: ResidentObjects, entry: Entry) -> list[Entry]:
    """An object was used again: so were the objects before it in its prefix, even if no engine
    needed them because they were in GPU memory. Without them the object would be of no use.

    Returns those that have become admitted, in prefix order.
    """
    found: list[Entry] = []
    previous = resident.get(entry.namespace, entry.previous) if entry.previous else None
    while previous is not None and previous.uses < 2 and not previous.evicting:
        previous.uses = 2
        found.append(previous)
        key = previous.previous
        previous = resident.get(entry.namespace, key) if key else None
    return found[::-1]
