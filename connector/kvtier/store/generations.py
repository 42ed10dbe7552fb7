"""Generation words: how a reader of the host pool notices that a slot has another content.

One 32-bit word belongs to every page of the pool; that of a slot's first page is the slot's. It is
even while the slot holds one complete object, and odd while the slot may be written. It only rises.
tierd changes it before it frees a slot, so a reader that finds the same even word before and after
it has read the slot has read one object: the next writer was told of the slot after the change.

The words lie in a file beside the pool, which the engines map as well. A tierd that takes an
existing pool over makes every even word odd first. Words of pages inside a slot stay odd, so the
pool can be divided differently without a word of its own.

Words wrap after two billion objects in one slot.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import numpy as np

from kvtier.tiers.base import ALIGNMENT_BYTES

WORD_BYTES = 4
_WORD_MASK = 0xFFFFFFFF
PAGE_SHIFT = ALIGNMENT_BYTES.bit_length() - 1
_PAGE_BITS = 32


def generation_bytes(pool_bytes: int) -> int:
    """Size of the file for a pool of ``pool_bytes``."""
    return pool_bytes // ALIGNMENT_BYTES * WORD_BYTES


def pack_location(offset: int, generation: int) -> int:
    """A slot and its generation as one integer of at most 64 bits, never 0.

    ``offset``: byte offset of the slot in the pool, a multiple of the page size.
    """
    return (offset >> PAGE_SHIFT) | generation << _PAGE_BITS


def unpack_location(location: int) -> tuple[int, int]:
    """(byte offset, generation) of ``pack_location``."""
    return (location & (1 << _PAGE_BITS) - 1) << PAGE_SHIFT, location >> _PAGE_BITS


def unpack_locations(locations: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(byte offset of each, generation of each) of several ``pack_location``.

    Raises ``OverflowError`` if one has more than 64 bits or is negative.
    """
    both = np.frombuffer(array("Q", locations), np.uint64)
    pages, generations = both & np.uint64((1 << _PAGE_BITS) - 1), both >> np.uint64(_PAGE_BITS)
    return tuple((pages << np.uint64(PAGE_SHIFT)).tolist()), tuple(generations.tolist())


class GenerationWords:
    """The words of one pool. Only the store's thread changes them.

    ``memory``: at least ``generation_bytes(pool_bytes)`` bytes, shared with the engines; None keeps
    them private to this process.
    """

    def __init__(self, pool_bytes: int, memory: memoryview | bytearray | None = None) -> None:
        size = generation_bytes(pool_bytes)
        view = memoryview(bytearray(size) if memory is None else memory).cast("B")[:size]
        # The lowest bit of every word. An addition would have to treat each word by itself.
        before = int.from_bytes(view, sys.byteorder)
        one = (1).to_bytes(WORD_BYTES, sys.byteorder)
        odd = int.from_bytes(one * (size // WORD_BYTES), sys.byteorder)
        view[:] = (before | odd).to_bytes(size, sys.byteorder)
        self._words = view.cast("I")

    def get(self, offset: int) -> int:
        """The word of the slot at ``offset``."""
        return self._words[offset >> PAGE_SHIFT]

    def complete(self, offset: int) -> int:
        """The slot at ``offset`` holds a complete object; returns its generation, an even number.

        Call it before anyone is told of the object.
        """
        page = offset >> PAGE_SHIFT
        word = self._words[page]
        if word & 1:
            # Never 0, so that a location is never 0.
            word = (word + 1) & _WORD_MASK or 2
            self._words[page] = word
        return word

    def reopen(self, offset: int) -> None:
        """The slot at ``offset`` may be written from now on. Call it before anyone is told so."""
        self._words[offset >> PAGE_SHIFT] |= 1
