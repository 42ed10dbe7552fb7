"""A map from keys to presence bits for lookups of thousands of keys at once.

A key is represented by 62 bits of its hash, so one that was never set has bits with a probability
of one in 10^12 for a million keys. What acts on the bits must name the whole key to the store of
the object. In return a key takes 32 to 64 bytes, 96 while the table grows, and a lookup of many
keys is a few calls of numpy, whose reads of memory do not wait for one another.

Keys of a prompt's chunks differ between groups in their first byte only. What is hashed is the
rest, once for all groups (``hash_many``), and the group is mixed in.

Open addressing with linear probing. The table grows while it is used: a second, larger array takes
the new keys, and some of the old ones are moved with each few changes, so no call is slow. One
thread at a time may change the table. Any thread may call ``get`` and ``get_hashed`` meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from mmap import MADV_NOHUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap

import numpy as np
from numpy.typing import NDArray

_HASH_BITS = (1 << 62) - 1
_LEAST_SLOTS = 1 << 10
_CHANGES_PER_MOVE = 256
_MOVED = 6 * _CHANGES_PER_MOVE
"""Slots of the old array that are moved together, once in so many changes. With two for each change
the old one would be empty just in time."""
_FEW_KEYS = 16
"""Fewer keys than this are searched one by one, which is faster."""
_LINE = 4
"""Slots in a line of the processor's cache. A search begins with the first slot of a line, so that
most read one line."""
_USED = _HASH_BITS + 1
"""Set in every tag."""
_GROUP_MIX = tuple(group * 0x1E3779B97F4A7C15 & _HASH_BITS for group in range(256))
"""By group: different bits, which distinguish the tags of one hash in several groups."""
Words = NDArray[np.int64]


def hash_many(block_hashes: Sequence[bytes]) -> Words:
    """The hash of each key without its group, as ``PresenceTable.get_hashed`` takes them."""
    hashes = np.fromiter(map(hash, block_hashes), np.int64, len(block_hashes))
    return hashes & _HASH_BITS | _USED


def _tag(key: bytes) -> int:
    return (hash(key[1:]) & _HASH_BITS | _USED) ^ _GROUP_MIX[key[0]]


class _Slots:
    """One array. A slot has a tag, 0 if it is free, and bits, which are written before the tag: so
    another thread sees no tag without bits."""

    __slots__ = ("_home", "_lines", "bits", "cells", "mask", "tags", "used")

    def __init__(self, count: int) -> None:
        self.mask = count - 1
        self._home = self.mask & -_LINE
        self.used = 0
        """Slots with a tag, those of removed keys included."""
        memory = mmap(-1, 16 * count, flags=MAP_PRIVATE | MAP_ANONYMOUS)
        # Otherwise each of the first changes waits until the kernel has cleared 2 MiB.
        memory.madvise(MADV_NOHUGEPAGE)
        cells: Words = np.frombuffer(memory, np.int64)
        self.cells = memoryview(memory).cast("q")
        """The tag of slot n is cell 2n, and its bits are the cell after it."""
        self.tags, self.bits = cells[::2], cells[1::2]
        self._lines = cells.reshape(count // _LINE, 2 * _LINE)

    def find(self, tag: int) -> int:
        """The slot of a tag; if it has none, -1 - the free slot where it would be."""
        cells, last = self.cells, 2 * self.mask
        at = 2 * (tag & self._home)
        while (seen := cells[at]) != tag:
            if not seen:
                return -1 - at // 2
            at = at + 2 & last
        return at // 2

    def bits_of(self, tags: Words, absent: int = 0) -> Words:
        """The bits of each tag; ``absent``, 0 or -1, if it has no slot."""
        found: Words = np.full(tags.size, absent, np.int64)
        left: Words = np.arange(tags.size)
        lines: Words = (tags & self.mask) // _LINE
        while left.size >= _FEW_KEYS:
            # Tags and bits come with one read of memory. A tag that another thread adds meanwhile
            # may be seen with the bits of before, which are 0.
            cells, wanted = self._lines.take(lines, axis=0), tags[left]
            bits = np.full(left.size, absent, np.int64)
            for slot in range(0, 2 * _LINE, 2):
                np.copyto(bits, cells[:, slot + 1], where=cells[:, slot] == wanted)
            found[left] = bits
            further = np.flatnonzero((bits == absent) & (cells[:, -2] != 0))
            left, lines = left[further], lines[further] + 1 & self.mask // _LINE
        for index in left.tolist():
            slot = self.find(int(tags[index]))
            if slot >= 0:
                found[index] = self.cells[2 * slot + 1]
        return found

    def add(self, at: int, tag: int, bits: int) -> None:
        """Fills a free slot."""
        self.cells[2 * at + 1] = bits
        self.cells[2 * at] = tag
        self.used += 1

    def add_many(self, tags: Words, bits: Words) -> None:
        """Adds those of different tags that have no slot."""
        at = tags & self._home
        while tags.size:
            seen = self.tags[at]
            free = np.flatnonzero(seen == 0)
            # Of several that come to one free slot the first takes it, and the others see it there.
            slots, first = np.unique(at[free], return_index=True)
            taken = free[first]
            self.bits[slots] = bits[taken]
            self.tags[slots] = tags[taken]
            self.used += taken.size
            left = seen != tags
            left[taken] = False
            at = (at + (seen != 0))[left] & self.mask
            tags, bits = tags[left], bits[left]


class PresenceTable:
    """Bits by key, from 1 to 2^62; 0 for a key that is not there."""

    def __init__(self) -> None:
        self._slots: tuple[_Slots, ...] = (_Slots(_LEAST_SLOTS),)
        """The array in use, and while the table grows the one before it. A key in both has the bits
        of the first."""
        self._moved = 0
        """How many slots of the array before were moved."""
        self._changes = 0
        """Since the growth started."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def get(self, key: bytes) -> int:
        """The bits of the key."""
        tag = _tag(key)
        for slots in self._slots:
            at = slots.find(tag)
            if at >= 0:
                return slots.cells[2 * at + 1]
        return 0

    def get_hashed(self, group: int, hashes: Words) -> Words:
        """The bits of the keys of one group, by the hashes of their other parts (``hash_many``)."""
        tags, (slots, *before) = hashes ^ _GROUP_MIX[group], self._slots
        if not before:
            return slots.bits_of(tags)
        found = slots.bits_of(tags, -1)
        left = np.flatnonzero(found < 0)
        found[left] = before[0].bits_of(tags[left])
        return found

    def all_bits(self) -> Iterator[int]:
        """The bits of all keys. Only the thread that changes the table may call it."""
        while len(self._slots) > 1:
            self._move(self._slots[1].mask + 1)
        yield from (int(bits) for bits in self._slots[0].bits if bits)

    def change_bits(self, key: bytes, bits: int, present: bool) -> bool:
        """Sets or clears bits of the key. False if they were set or clear before."""
        if len(self._slots) > 1:
            self._changes += 1
            if self._changes % _CHANGES_PER_MOVE == 0:
                self._move(_MOVED)
        tag = _tag(key)
        slots = self._slots[0]
        at = slots.find(tag)
        before = slots.cells[2 * at + 1] if at >= 0 else self._before(tag)
        after = before | bits if present else before & ~bits
        if after == before:
            return False
        if at < 0:
            slots.add(-1 - at, tag, after)
        else:
            slots.cells[2 * at + 1] = after
        self._count += (not before) - (not after)
        if 2 * slots.used > slots.mask:
            self._grow()
        return True

    def _before(self, tag: int) -> int:
        """The bits in the array before, if there is one."""
        if len(self._slots) == 1:
            return 0
        slots = self._slots[1]
        at = slots.find(tag)
        return slots.cells[2 * at + 1] if at >= 0 else 0

    def _grow(self) -> None:
        """Starts to move the keys to a larger array, or to one of the same size if most of what
        fills this one are removed keys."""
        if len(self._slots) > 1:
            self._move(self._slots[1].mask + 1)
        slots = self._slots[0]
        size = slots.mask + 1
        self._slots = (_Slots(2 * size if 4 * self._count > size else size), slots)
        self._moved = self._changes = 0

    def _move(self, count: int) -> None:
        slots, before = self._slots
        end = min(self._moved + count, before.mask + 1)
        tags, bits = before.tags[self._moved : end], before.bits[self._moved : end]
        live = (tags != 0) & (bits != 0)
        slots.add_many(tags[live], bits[live])
        self._moved = end
        if end > before.mask:
            self._slots = (slots,)
