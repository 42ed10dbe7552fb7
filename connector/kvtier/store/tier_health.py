"""When a tier is suspended, and which of its objects are not read for a while."""

from __future__ import annotations

from collections import OrderedDict

NEGATIVE_SECONDS = 30.0
"""How long a corrupt or vanished object is not read again."""
MAX_NEGATIVE = 65_536


class TierBreaker:
    """Closed: the tier is used. Open: it is suspended. ``cause`` and ``since`` describe the present
    state.

    The caller passes in the time, and decides what counts as a failure.
    """

    def __init__(self, failure_threshold: int, now: float) -> None:
        self.failure_threshold = failure_threshold
        self.open = False
        self.cause = ""
        self.since = now
        self.failures = 0

    def success(self) -> None:
        """An operation succeeded: the count of consecutive failures starts over."""
        self.failures = 0

    def failure(self, cause: str, now: float) -> bool:
        """An operation failed. True if that opened the breaker."""
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
        """Closes the breaker, because a probe succeeded."""
        self.open, self.cause, self.since, self.failures = False, "", now, 0


class NegativeCache:
    """Objects of one tier that are not read for a while. Beyond ``MAX_NEGATIVE`` the oldest are
    dropped."""

    def __init__(self) -> None:
        self._until: OrderedDict[tuple[str, bytes], float] = OrderedDict()

    def add(self, namespace: str, key: bytes, now: float) -> None:
        """Adds an object that is corrupt or has vanished."""
        self._until.pop((namespace, key), None)
        self._until[namespace, key] = now + NEGATIVE_SECONDS
        if len(self._until) > MAX_NEGATIVE:
            self._until.popitem(last=False)

    def discard(self, namespace: str, key: bytes) -> None:
        """Removes an object, because it was written."""
        self._until.pop((namespace, key), None)

    def has(self, namespace: str, key: bytes, now: float) -> bool:
        """Whether the object must not be read."""
        if not self._until:
            return False
        until = self._until.get((namespace, key))
        if until is None:
            return False
        if until <= now:
            del self._until[namespace, key]
            return False
        return True
