"""How many bytes a tier may be given in a second: a token bucket, which spares flash.

Full, it holds what one second may bring. An object is taken for as long as there is anything in it, and may leave a debt: so objects that
are larger than a second's worth are written all the same, and over any time no more is than rate x time + one second's worth + one
object.
"""

from __future__ import annotations

from kvtier.store.contract import Clock

BURST_SECONDS = 1.0


class WriteBudget:
    """The budget of one tier. Owner's thread only. The rate (bytes a second, None for no limit) is named with each question, because it
    is a live value."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rate: int | None = None
        self._left = 0.0
        self._at = 0.0

    def take(self, size_bytes: int, rate: int | None) -> bool:
        """Whether so many bytes may be written now; then they are taken."""
        now = self._clock()
        if rate is None:
            self._rate = None
            return True
        full = rate * BURST_SECONDS
        if self._rate is None:
            self._left = full
        else:
            self._left = min(full, self._left + self._rate * (now - self._at))
        self._rate, self._at = rate, now
        if self._left <= 0:
            return False
        self._left -= size_bytes
        return True

    def give_back(self, size_bytes: int) -> None:
        """What was taken is not written after all."""
        self._left += size_bytes
