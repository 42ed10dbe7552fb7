"""Which tiers hold a request's chunks, as one lookup finds them.

The replica is asked for many keys in one call, and the answers are arrays, so that a lookup of a
prompt of 131,072 tokens takes a few dozen calls. Each object is looked up once, so the prefixes
that a lookup compares are of one moment. The scheduler's thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from operator import and_

import numpy as np
from numpy.typing import NDArray

from kvtier.engines.common.request_state import RequestState
from kvtier.planner import FIRST_BATCH, FURTHER_BATCH
from kvtier.presence_table import Words
from kvtier.tierd.replication import Replica

_UNKNOWN = -1


class HeldChunks:
    """The presence bits of a request's objects, by group and chunk. A ``planner.ChunkPresence``.

    ``end``: the first chunk that is not looked up. Bits are those of usable tiers that the request
    may use (``RequestState.visible``); an object without any is not there.
    """

    def __init__(
        self, state: RequestState, replica: Replica, hashes_per_chunk: int, end: int
    ) -> None:
        self._state = state
        self._replica = replica
        state.hashes(hashes_per_chunk)
        self.end = end
        self._usable = replica.usable_bits
        self._bits: dict[int, Words] = {}
        """By group, of each chunk; ``_UNKNOWN`` before it is looked up."""
        self._counts: Callable[[Words], Words | NDArray[np.bool_]] | None = None

    def only(self, counts: Callable[[Words], Words | NDArray[np.bool_]]) -> HeldChunks:
        """Returns the same presence, in which an object is there only if ``counts`` is true (not 0)
        for its bits.

        ``counts`` takes the bits of many objects, and is false for 0.
        """
        view = copy(self)
        view._counts = counts
        return view

    def only_bits(self, bits: int) -> HeldChunks:
        """Returns the same presence, in which an object is there only if it has one of ``bits``."""
        return self.only(partial(and_, bits))

    def bits(self, group: int, begin: int, end: int) -> Words:
        """Returns the bits of the chunks from ``begin`` to before ``end``, which are in range.

        The array is not to be changed.
        """
        known = self._bits.get(group)
        if known is None:
            known = self._bits[group] = np.full(self.end, _UNKNOWN, np.int64)
        found = known[begin:end]
        unknown = np.flatnonzero(found < 0)
        if unknown.size:
            hashed = self._state.hashed(begin, end)[unknown]
            bits = self._replica.get_hashed(group, hashed) & self._usable
            found[unknown] = self._state.visible_many(bits)
        return found

    def distinct_bits(self, group: int, begin: int, end: int) -> set[int]:
        """Returns the different bits of these chunks."""
        return set(self.bits(group, begin, end).tolist())

    def first_missing(self, group: int, begin: int, end: int) -> int:
        """The first chunk from ``begin`` on whose object is not there; ``end`` if there is none
        before that."""
        size = FIRST_BATCH
        while begin < end:
            batch = self.held(group, begin, min(end, begin + size))
            first = int(batch.argmin())
            if not batch[first]:
                return begin + first
            begin += len(batch)
            size = FURTHER_BATCH
        return end

    def held(self, group: int, begin: int, end: int) -> NDArray[np.bool_]:
        """Of each chunk from ``begin`` to before ``end``: whether its object is there."""
        found = self.bits(group, begin, end)
        there: NDArray[np.bool_] = (found if self._counts is None else self._counts(found)) != 0
        return there
