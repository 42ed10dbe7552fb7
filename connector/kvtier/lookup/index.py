"""Which chunks of a host can be loaded: an object exists once every rank has stored it.

Ranks report what they have stored. When the last one has, a *commit marker* is written to the
storage, and only then the chunk is found. So the answer does not depend on how far one rank is
ahead of another, as a minimum over the ranks' own answers would: ranks evict and lose shards
independently of each other, and a minimum of lengths says nothing about which shards are there.

After a restart the markers are what is left; a chunk whose marker is missing was never committed.
For one thread.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

_log = logging.getLogger("kvtier.lookup")


class Markers(Protocol):
    """The storage of the process that answers. Methods may block and may raise ``OSError``."""

    def write(self, key: bytes, store: int) -> bool:
        """Writes the marker of a chunk; False: there is no room."""
        ...

    def read(self, key: bytes) -> int:
        """Returns the store that a marker names; 0: there is no valid one."""
        ...

    def remove(self, key: bytes) -> None:
        """Removes a marker, if there is one."""
        ...

    def holds(self, key: bytes) -> bool:
        """Whether this process still holds its own shard of a chunk."""
        ...


@dataclass(frozen=True, slots=True)
class IndexLimits:
    """``max_keys``: committed chunks that are remembered without their markers. ``max_pending``:
    chunks that some ranks have stored; after ``pending_seconds`` they are given up."""

    max_keys: int = 1_000_000
    max_pending: int = 65_536
    pending_seconds: float = 120.0


@dataclass(slots=True)
class _Pending:
    ranks: set[int]
    until: float


class CommitIndex:
    """The commits of one engine on one host."""

    def __init__(
        self,
        ranks: int,
        markers: Markers,
        limits: IndexLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ranks = ranks
        self._markers = markers
        self._limits = limits or IndexLimits()
        self._clock = clock
        self._committed: OrderedDict[bytes, int] = OrderedDict()
        self._pending: OrderedDict[tuple[bytes, int], _Pending] = OrderedDict()
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._committed)

    @property
    def pending(self) -> int:
        """Chunks that not every rank has stored yet."""
        return len(self._pending)

    def stored(self, rank: int, key: bytes, store: int) -> bool:
        """A rank holds its shard. Returns whether this was the last one and the chunk exists."""
        now = self._clock()
        self._expire(now)
        name = (key, store)
        entry = self._pending.get(name)
        if entry is None:
            entry = self._pending[name] = _Pending(set(), now + self._limits.pending_seconds)
        entry.ranks.add(rank)
        if len(entry.ranks) < self._ranks:
            return False
        del self._pending[name]
        return self._commit(key, store)

    def _commit(self, key: bytes, store: int) -> bool:
        try:
            written = self._markers.write(key, store)
        except OSError as error:
            _log.warning("cannot write a commit marker: %s", error)
            written = False
        if not written:
            # Without it the chunk would be lost at a restart, and its space with it.
            self.counts["markers_failed"] += 1
            return False
        self._remember(key, store)
        self.counts["committed"] += 1
        return True

    def _remember(self, key: bytes, store: int) -> None:
        self._committed[key] = store
        self._committed.move_to_end(key)
        while len(self._committed) > self._limits.max_keys:
            self._committed.popitem(last=False)

    def _expire(self, now: float) -> None:
        """Gives up chunks that a rank never stored, the oldest first."""
        while self._pending:
            name = next(iter(self._pending))
            full = len(self._pending) > self._limits.max_pending
            if not full and self._pending[name].until > now:
                return
            del self._pending[name]
            self.counts["given_up"] += 1

    def lost(self, key: bytes, store: int) -> None:
        """A rank cannot load its shard: the chunk no longer exists for any rank."""
        self._pending.pop((key, store), None)
        if self._committed.get(key) == store:
            del self._committed[key]
        elif key in self._committed:
            return  # It was stored again meanwhile.
        try:
            if self._markers.read(key) == store:
                self._markers.remove(key)
        except OSError as error:
            _log.warning("cannot remove a commit marker: %s", error)
        self.counts["lost"] += 1

    def look_up(self, keys: Sequence[bytes], deadline: float) -> tuple[int, ...]:
        """Returns the store of each key, 0 if it does not exist; fewer if ``deadline`` has passed.

        The storage is asked up to the first key that does not exist: what follows can be loaded
        only if the process remembers it.
        """
        found: list[int] = []
        ask_storage = True
        for key in keys:
            if self._clock() >= deadline:
                self.counts["out_of_time"] += 1
                break
            store = self._find(key, ask_storage)
            ask_storage = ask_storage and store != 0
            found.append(store)
        self.counts["lookups"] += 1
        return tuple(found)

    def _find(self, key: bytes, ask_storage: bool) -> int:
        try:
            store = self._committed.get(key, 0)
            if store:
                if self._markers.holds(key):
                    self._committed.move_to_end(key)
                    return store
                # Evicted here, and of no use on the other ranks.
                self.lost(key, store)
                return 0
            if not ask_storage:
                return 0
            store = self._markers.read(key)
            if store and self._markers.holds(key):
                self._remember(key, store)
                return store
        except OSError as error:
            self.counts["storage_failed"] += 1
            _log.debug("cannot look into the storage: %s", error)
        return 0
