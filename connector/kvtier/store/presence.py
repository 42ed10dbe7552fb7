"""Which tier holds which key: the index that the replicas are fed from.

Only namespaces that an engine uses are indexed in full. When one is opened, the lower tiers' keys are taken from their
own indexes, and from then on their announcements keep it true: each announcement follows the change it tells of, so
repeating some that the snapshot already contains ends in the same state. How many keys there can be is bounded by the tiers' own
indexes and the slots of the pool.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import islice
from queue import Empty, SimpleQueue

from kvtier.store.context import StoreContext
from kvtier.store.types import MEMORY_BIT, RAM_BITS, PresenceChanged
from kvtier.tiers.base import ObjectRef, Tier

MAX_QUEUED_CHANGES = 65_536
"""Announcements that wait for the owner; past this many, the tier's keys are listed afresh instead."""
MAX_CHANGES_PER_PUMP = 8_192
"""About 5 ms of the owner's time."""
RELISTED_PER_PUMP = 2_048
"""Keys of a tier that is listed afresh. A million at once would take the owner ten seconds, and everybody would take it for dead."""


class ChangeQueue:
    """Announcements of tiers on their way to the owner. ``put`` may be called from any thread and never blocks."""

    def __init__(self, tiers: int) -> None:
        self._queue: SimpleQueue[tuple[str, bytes, int, bool]] = SimpleQueue()
        self._lost = [False] * tiers

    def put(self, namespace: str, key: bytes, tier_index: int, present: bool) -> None:
        """Queues one change of the tier with this index in the document, or notes that the tier must be listed
        afresh."""
        if self._queue.qsize() >= MAX_QUEUED_CHANGES:
            self._lost[tier_index - 1] = True
        else:
            self._queue.put((namespace, key, tier_index, present))

    def take(self, limit: int) -> list[tuple[str, bytes, int, bool]]:
        """Up to ``limit`` changes, in order. Owner's thread."""
        taken: list[tuple[str, bytes, int, bool]] = []
        try:
            while len(taken) < limit:
                taken.append(self._queue.get_nowait())
        except Empty:
            pass
        return taken

    def take_lost(self, but: Container[int] = ()) -> list[int]:
        """Indexes (from 0) of lower tiers of which changes were lost; of those in ``but`` it stays noted. Owner's thread, before
        ``take``."""
        lost = [i for i, flag in enumerate(self._lost) if flag and i not in but]
        for i in lost:
            self._lost[i] = False
        return lost

    @property
    def any_lost(self) -> bool:
        """Whether ``take_lost`` would have something to say."""
        return any(self._lost)

    def __len__(self) -> int:
        return self._queue.qsize()


class PresenceIndex:
    """Bits per key and namespace. Owner's thread only."""

    def __init__(self, shared: StoreContext, tiers: Sequence[Tier]) -> None:
        self.changes = ChangeQueue(len(tiers))
        self._shared = shared
        self._tiers = tiers
        self._bits: dict[str, dict[bytes, int]] = {}
        self._users: dict[str, int] = {}
        self._listings: dict[int, Iterator[tuple[str, bytes]]] = {}
        """Tiers (from 0) that are being listed afresh, with what is still to be looked at."""

    @property
    def busy(self) -> bool:
        """Whether ``apply_changes`` has something to do."""
        return bool(self._listings) or len(self.changes) > 0 or self.changes.any_lost

    def open(self, namespace: str, persistent: bool) -> None:
        """An engine uses the namespace from now on."""
        users = self._users.get(namespace, 0)
        self._users[namespace] = users + 1
        if users == 0 and persistent:
            bits = self._bits.setdefault(namespace, {})
            for i, tier in enumerate(self._tiers):
                bit = MEMORY_BIT << (i + 1)
                for key in tier.keys(namespace):
                    bits[key] = bits.get(key, 0) | bit

    def close(self, namespace: str) -> None:
        """An engine uses the namespace no more. Without users only what is in RAM is known."""
        users = self._users.pop(namespace) - 1
        if users:
            self._users[namespace] = users
            return
        kept = {
            key: bits & RAM_BITS
            for key, bits in self._bits.pop(namespace, {}).items()
            if bits & RAM_BITS
        }
        if kept:
            self._bits[namespace] = kept

    def is_open(self, namespace: str) -> bool:
        """Whether any engine uses the namespace."""
        return namespace in self._users

    def bits(self, namespace: str, key: bytes) -> int:
        """Which tiers hold the key: bit 0 the memory tier, bit i the i-th tier of the document, and ``UNVERIFIED_BIT``."""
        of_namespace = self._bits.get(namespace)
        return 0 if of_namespace is None else of_namespace.get(key, 0)

    def snapshot(self, namespace: str) -> Iterable[tuple[bytes, int]]:
        """All keys of a namespace with their bits."""
        return list(self._bits.get(namespace, {}).items())

    def change(self, namespace: str, key: bytes, bit: int, present: bool) -> None:
        """Sets or clears one bit, and announces it where that is a change that an engine can see."""
        of_namespace = self._bits.get(namespace)
        if of_namespace is None:
            if not present:
                return
            of_namespace = self._bits[namespace] = {}
        before = of_namespace.get(key, 0)
        after = before | bit if present else before & ~bit
        if after == before:
            return
        if after:
            of_namespace[key] = after
        else:
            del of_namespace[key]
            if not of_namespace and namespace not in self._users:
                del self._bits[namespace]
        if namespace in self._users:
            self._shared.emit(PresenceChanged(namespace, key, bit, present))

    def apply_changes(self) -> None:
        """Takes over what tiers announced since the last call."""
        # What is lost while a tier is being listed has it listed once more afterwards.
        lost = self.changes.take_lost(self._listings)
        taken = self.changes.take(MAX_CHANGES_PER_PUMP)
        users = self._users
        for namespace, key, tier_index, present in taken:
            if namespace in users:
                self.change(namespace, key, MEMORY_BIT << tier_index, present)
        for i in lost:
            self._shared.count("presence_relisted", self._tiers[i].name)
            self._listings[i] = self._everything(i)
        for i, listing in list(self._listings.items()):
            part = list(islice(listing, RELISTED_PER_PUMP))
            for namespace, key in part:
                if namespace in users:
                    # Asked now: what the tier announces from here on comes after it.
                    present = self._tiers[i].contains(ObjectRef(namespace, key))
                    self.change(namespace, key, MEMORY_BIT << (i + 1), present)
            if len(part) < RELISTED_PER_PUMP:
                del self._listings[i]

    def _everything(self, tier: int) -> Iterator[tuple[str, bytes]]:
        """Every key that the tier holds, or was thought to hold, in a namespace that is used."""
        bit = MEMORY_BIT << (tier + 1)
        for namespace in list(self._users):
            known = [key for key, bits in self._bits.get(namespace, {}).items() if bits & bit]
            for key in dict.fromkeys([*self._tiers[tier].keys(namespace), *known]):
                yield namespace, key
