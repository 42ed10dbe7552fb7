"""Giving a tier up for a while, and remembering single objects that were bad.

Pure state: time is passed in. What counts as a failure is decided by the caller (DATAPATH 2).
"""

from __future__ import annotations

from collections import OrderedDict

NEGATIVE_SECONDS = 30.0
"""How long a corrupt or vanished object is not asked for again (DATAPATH 2)."""
MAX_NEGATIVE = 65_536


class TierBreaker:
    """Closed: the tier is used. Open: it is not. ``cause`` and ``since`` belong to the state it is in."""

    def __init__(self, failure_threshold: int, now: float) -> None:
        self.failure_threshold = failure_threshold
        self.open = False
        self.cause = ""
        self.since = now
        self.failures = 0

    def success(self) -> None:
        """The tier did what it was asked: the row of failures ends."""
        self.failures = 0

    def failure(self, cause: str, now: float) -> bool:
        """The tier failed; True if this opened the breaker."""
        self.failures += 1
        if self.open or self.failures < self.failure_threshold:
            return False
        return self.trip(cause, now)

    def trip(self, cause: str, now: float) -> bool:
        """Opens the breaker at once; True if it was closed."""
        if self.open:
            return False
        self.open, self.cause, self.since = True, cause, now
        return True

    def close(self, now: float) -> None:
        """A probe succeeded."""
        self.open, self.cause, self.since, self.failures = False, "", now, 0


class NegativeCache:
    """Objects of one tier that are not to be asked for until a time; the oldest are forgotten beyond
    ``MAX_NEGATIVE``."""

    def __init__(self) -> None:
        self._until: OrderedDict[tuple[str, bytes], float] = OrderedDict()

    def add(self, namespace: str, key: bytes, now: float) -> None:
        """The object turned out corrupt or vanished."""
        self._until.pop((namespace, key), None)
        self._until[namespace, key] = now + NEGATIVE_SECONDS
        if len(self._until) > MAX_NEGATIVE:
            self._until.popitem(last=False)

    def discard(self, namespace: str, key: bytes) -> None:
        """The object was written anew."""
        self._until.pop((namespace, key), None)

    def has(self, namespace: str, key: bytes, now: float) -> bool:
        """Whether the object is not to be asked for."""
        if not self._until:
            return False
        until = self._until.get((namespace, key))
        if until is None:
            return False
        if until <= now:
            del self._until[namespace, key]
            return False
        return True
