"""Objects of a directory that this process cannot use, although they are not proven to be corrupt:
of another format version, without the right tag, with a checksum that it cannot compute.

They stay in the directory, where another process may use them, and in the index, so that they are
charged and evicted. They are not served, so that no engine waits for them again, until they are
replaced, the keys change, or ``RETRY_SECONDS`` have passed: another process may have replaced them.
A module of its own because all threads of the tier share the set.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.tiers.base import ObjectRef

MAX_UNUSABLE = 65_536
"""Beyond this the oldest are forgotten; reading such an object adds it again."""
RETRY_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class _Unusable:
    replaceable: bool
    since: float


class UnusableObjects:
    """The set of one tier. Any thread may call any method. ``clock``: monotonic seconds.

    ``generation`` rises when the keys change. An object that was read with earlier keys is not
    added.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._objects: OrderedDict[ObjectRef, _Unusable] = OrderedDict()
        self.generation = 0

    def __contains__(self, ref: ObjectRef) -> bool:
        return bool(self._objects) and ref in self._objects

    def __bool__(self) -> bool:
        return bool(self._objects)

    def add(self, ref: ObjectRef, replaceable: bool, generation: int) -> bool:
        """Adds an object; False if the keys have changed since ``generation``, before it was read.

        ``replaceable``: a new object of that name takes its place, because no engine with this
        tier's keys can use the present one.
        """
        with self._lock:
            if generation != self.generation:
                return False
            self._objects.pop(ref, None)
            self._objects[ref] = _Unusable(replaceable, self._clock())
            if len(self._objects) > MAX_UNUSABLE:
                self._objects.popitem(last=False)
            return True

    def replaceable(self, ref: ObjectRef) -> bool | None:
        """Whether a new object may take the place of this one; None if it is not in the set."""
        found = self._objects.get(ref)
        return None if found is None else found.replaceable

    def discard(self, ref: ObjectRef) -> bool:
        """Removes an object, because it was replaced or removed. Returns whether it was there."""
        if not self._objects:
            return False
        with self._lock:
            return self._objects.pop(ref, None) is not None

    def keys_changed(self) -> list[ObjectRef]:
        """Empties the set and returns what it held."""
        with self._lock:
            self.generation += 1
            found = list(self._objects)
            self._objects.clear()
            return found

    def take_expired(self) -> list[ObjectRef]:
        """Removes and returns the objects that may be tried again."""
        found: list[ObjectRef] = []
        limit = self._clock() - RETRY_SECONDS
        with self._lock:
            while self._objects:
                ref, entry = next(iter(self._objects.items()))
                if entry.since > limit:
                    break
                del self._objects[ref]
                found.append(ref)
        return found
