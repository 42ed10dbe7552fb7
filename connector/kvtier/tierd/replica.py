"""What tierd holds, as the scheduler side knows it: a plain dictionary, fed by tierd's ordered deltas, used as a hint only.

One owner: ``apply`` and ``get`` are called by the same thread, or by threads that the caller keeps apart. ``get`` is one
dictionary lookup, because it is called for every chunk of every prompt.
"""

from __future__ import annotations

from kvtier.tierd.wire import RAM_BITS, Delta, Leaving, LeftAck, Usable

ALL_BITS = -1


class Replica:
    """Keys (group byte + block hash) and the bits of the tiers that hold them.

    ``removals`` rises whenever a bit was cleared or stopped counting, so that an answer derived from the replica can be known to be outdated.
    ``stale``: a delta is missing; nothing is known until a snapshot has come.
    """

    __slots__ = ("_asked", "_bits", "_next_sequence", "get_bits", "removals", "stale", "usable_bits")

    def __init__(self) -> None:
        self._bits: dict[bytes, int] = {}
        self._next_sequence = 1
        self._asked = False
        self.removals = 0
        self.stale = False
        self.usable_bits = ALL_BITS
        """Of tiers that may be used."""
        self.get_bits = self._bits.get
        """``get_bits(key, 0)``: the dictionary's own method, for loops over hundreds of keys. Only ``usable_bits`` of it count."""

    def __len__(self) -> int:
        return len(self._bits)

    def get(self, key: bytes) -> int:
        """Bits of the tiers that hold ``key`` and may be used; 0: none that is known."""
        return self._bits.get(key, 0) & self.usable_bits

    def clear(self) -> None:
        """Forgets everything: tierd was lost. The next session counts from 1 again."""
        if self._bits:
            self.removals += 1
            self._bits.clear()
        self._next_sequence = 1
        self._asked = False
        self.stale = False
        self.usable_bits = ALL_BITS

    def apply(self, message: Delta | Leaving | Usable) -> LeftAck | None:
        """Takes over one message of tierd. What it returns must be sent back.

        Keys that are leaving RAM lose its bits at once, before tierd gets the acknowledgement.
        """
        if isinstance(message, Usable):
            if self.usable_bits & ~message.bits:
                self.removals += 1
            self.usable_bits = message.bits
            return None
        if isinstance(message, Leaving):
            for key in message.keys:
                self._remove(key, RAM_BITS)
            return LeftAck(token=message.token)
        if message.sequence != self._next_sequence:
            self._lose()
        self._next_sequence = message.sequence + 1
        if message.snapshot:
            if self._bits:
                self.removals += 1
                self._bits.clear()
            self.stale = False
            self._asked = False
        if self.stale:
            # Without what is missing, a removal could be undone and an addition be long gone.
            return None
        bits = self._bits
        for key, added in message.added:
            bits[key] = bits.get(key, 0) | added
        for key, removed in message.removed:
            self._remove(key, removed)
        return None

    def wants_resync(self) -> bool:
        """True once per gap: the caller sends ``Resync``, and a snapshot follows."""
        if not self.stale or self._asked:
            return False
        self._asked = True
        return True

    def _remove(self, key: bytes, removed: int) -> None:
        before = self._bits.get(key, 0)
        left = before & ~removed
        if left == before:
            return
        self.removals += 1
        if left:
            self._bits[key] = left
        else:
            del self._bits[key]

    def _lose(self) -> None:
        if self._bits:
            self.removals += 1
            self._bits.clear()
        self.stale = True
        self._asked = False
