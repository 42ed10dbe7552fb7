"""Which tiers hold a request's chunks, as one lookup finds them.

The replica is asked for many keys in one call, and the answers are searched by the interpreter
rather than chunk by chunk: a lookup of a prompt of 131,072 tokens takes a few dozen calls. Each
object is looked up once, so the prefixes that a lookup compares are of one moment. The scheduler's
thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

from kvtier.engines.common.request_state import ALL_TIERS, RequestState
from kvtier.keys import group_prefix
from kvtier.planner import FIRST_BATCH, LARGEST_BATCH
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
        self._keys, self._hashes = state.keys(hashes_per_chunk), state.hashes(hashes_per_chunk)
        self.end = end
        self._usable = replica.usable_bits
        self._bits: dict[int, list[int]] = {}
        """By group, of each chunk; ``_UNKNOWN`` before it is looked up."""
        self._counts: Callable[[int], object] = bool

    def only(self, counts: Callable[[int], object]) -> HeldChunks:
        """Returns the same presence, in which an object is there only if ``counts(bits)``.

        ``counts`` is false for 0.
        """
        view = copy(self)
        view._counts = counts
        return view

    def bits(self, group: int, begin: int, end: int) -> list[int]:
        """Returns the bits of the chunks from ``begin`` to before ``end``, which are in range."""
        known = self._bits.get(group)
        if known is None:
            known = self._bits[group] = [_UNKNOWN] * self.end
        found = known[begin:end]
        if _UNKNOWN not in found:
            return found
        prefix, usable = group_prefix(group), self._usable
        if group:
            keys = [prefix + each for each in self._hashes[begin:end]]
        else:
            keys = self._keys[begin:end]
        found = [bits & usable for bits in self._replica.get_many(keys)]
        if self._state.tier_bits != ALL_TIERS:
            visible = {bits: self._state.visible(bits) for bits in set(found)}
            found = [visible[bits] for bits in found]
        known[begin:end] = found
        return found

    def first_missing(self, group: int, begin: int, end: int) -> int:
        """The first chunk from ``begin`` on whose object is not there; ``end`` if there is none
        before that."""
        size, counts = FIRST_BATCH, self._counts
        while begin < end:
            batch = self.bits(group, begin, min(end, begin + size))
            missing = [bits for bits in set(batch) if not counts(bits)]
            if missing:
                return begin + min(map(batch.index, missing))
            begin += len(batch)
            size = min(4 * size, LARGEST_BATCH)
        return end

    def held(self, group: int, begin: int, end: int) -> list[bool]:
        """Of each chunk from ``begin`` to before ``end``: whether its object is there."""
        found = self.bits(group, begin, end)
        counts = {bits: bool(self._counts(bits)) for bits in set(found)}
        return [counts[bits] for bits in found]
