"""Which tier holds which key: the index that the schedulers' replicas follow.

Only namespaces with an open engine are indexed in full. When one is opened, the keys of the
secondary tiers are taken from the tiers' own indexes; from then on the tiers' announcements update
it. Each announcement follows the change it describes, so applying some that the snapshot already
contains gives the same state. The number of keys is bounded by the tiers' indexes and the slots of
the pool.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import islice
from queue import Empty, SimpleQueue

from kvtier.store.context import StoreContext
from kvtier.store.types import MEMORY_BIT, RAM_BITS, PresenceChanged
from kvtier.tiers.base import ObjectRef, Tier

MAX_QUEUED_CHANGES = 65_536
"""Queued announcements. Beyond this the tier's keys are listed again instead."""
MAX_CHANGES_PER_PUMP = 8_192
"""About 5 ms of the store's thread."""
RELISTED_PER_PUMP = 2_048
"""Keys of a tier that is listed again. A million keys at once would take ten seconds, and tierd
would count as dead."""


class ChangeQueue:
    """Announcements of tiers. ``put`` may be called from any thread and never blocks; the rest on
    the store's thread."""

    def __init__(self, tiers: int) -> None:
        self._queue: SimpleQueue[tuple[str, bytes, int, bool]] = SimpleQueue()
        self._lost = [False] * tiers

    def put(self, namespace: str, key: bytes, tier_index: int, present: bool) -> None:
        """Queues one change of the tier with this index. If the queue is full, the tier is listed
        again instead."""
        if self._queue.qsize() >= MAX_QUEUED_CHANGES:
            self._lost[tier_index - 1] = True
        else:
            self._queue.put((namespace, key, tier_index, present))

    def take(self, limit: int) -> list[tuple[str, bytes, int, bool]]:
        """Up to ``limit`` changes, in order."""
        taken: list[tuple[str, bytes, int, bool]] = []
        try:
            while len(taken) < limit:
                taken.append(self._queue.get_nowait())
        except Empty:
            pass
        return taken

    def take_lost(self, excluded: Container[int] = ()) -> list[int]:
        """Indexes (from 0) of secondary tiers whose changes were lost, without the ``excluded``
        ones, which stay marked. Call before ``take``."""
        lost = [i for i, flag in enumerate(self._lost) if flag and i not in excluded]
        for i in lost:
            self._lost[i] = False
        return lost

    @property
    def any_lost(self) -> bool:
        """Whether changes of any tier were lost."""
        return any(self._lost)

    def __len__(self) -> int:
        return self._queue.qsize()


class PresenceIndex:
    """Presence bits per namespace and key.

    Only the store's thread uses it, except ``changes.put``.
    """

    def __init__(self, context: StoreContext, tiers: Sequence[Tier]) -> None:
        self.changes = ChangeQueue(len(tiers))
        self._context = context
        self._tiers = tiers
        self._bits: dict[str, dict[bytes, int]] = {}
        self._users: dict[str, int] = {}
        self._listings: dict[int, Iterator[tuple[str, bytes]]] = {}
        """Tiers (from 0) that are being listed again, with the keys that remain."""

    @property
    def busy(self) -> bool:
        """Whether ``apply_changes`` has something to do."""
        return bool(self._listings) or len(self.changes) > 0 or self.changes.any_lost

    def open(self, namespace: str, persistent: bool) -> None:
        """Registers an engine of the namespace."""
        users = self._users.get(namespace, 0)
        self._users[namespace] = users + 1
        if users == 0 and persistent:
            bits = self._bits.setdefault(namespace, {})
            for i, tier in enumerate(self._tiers):
                bit = MEMORY_BIT << (i + 1)
                for key in tier.keys(namespace):
                    bits[key] = bits.get(key, 0) | bit

    def close(self, namespace: str) -> None:
        """Unregisters an engine of the namespace.

        Without engines only the keys in RAM are indexed.
        """
        users = self._users.pop(namespace) - 1
        if users:
            self._users[namespace] = users
            return
        in_ram = {
            key: bits & RAM_BITS
            for key, bits in self._bits.pop(namespace, {}).items()
            if bits & RAM_BITS
        }
        if in_ram:
            self._bits[namespace] = in_ram

    def is_open(self, namespace: str) -> bool:
        """Whether the namespace has an open engine."""
        return namespace in self._users

    def bits(self, namespace: str, key: bytes) -> int:
        """Which tiers hold the key: bit 0 the memory tier, bit i the i-th tier of the document, and
        ``UNVERIFIED_BIT``."""
        of_namespace = self._bits.get(namespace)
        return 0 if of_namespace is None else of_namespace.get(key, 0)

    def in_secondary_tier(self, identity: tuple[str, bytes]) -> bool:
        """Whether a secondary tier holds the key of this namespace and key."""
        return bool(self.bits(*identity) & ~RAM_BITS)

    def snapshot(self, namespace: str) -> Iterable[tuple[bytes, int]]:
        """All keys of a namespace with their bits."""
        return list(self._bits.get(namespace, {}).items())

    def change(
        self, namespace: str, key: bytes, bit: int, present: bool, location: int = 0
    ) -> None:
        """Sets or clears one bit. Announces the change if the namespace has an open engine.

        ``location``: with ``MEMORY_BIT``, the slot and its generation.
        """
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
            self._context.emit(PresenceChanged(namespace, key, bit, present, location))

    def apply_changes(self) -> None:
        """Applies the tiers' announcements since the last call."""
        # Changes lost while a tier is being listed cause another listing afterwards.
        lost = self.changes.take_lost(self._listings)
        taken = self.changes.take(MAX_CHANGES_PER_PUMP)
        users = self._users
        for namespace, key, tier_index, present in taken:
            if namespace in users:
                self.change(namespace, key, MEMORY_BIT << tier_index, present)
        for i in lost:
            self._context.count("presence_relisted", self._tiers[i].name)
            self._listings[i] = self._list_tier(i)
        for i, listing in list(self._listings.items()):
            part = list(islice(listing, RELISTED_PER_PUMP))
            for namespace, key in part:
                if namespace in users:
                    # Checked at this moment, so that later announcements of the tier come after it.
                    present = self._tiers[i].contains(ObjectRef(namespace, key))
                    self.change(namespace, key, MEMORY_BIT << (i + 1), present)
            if len(part) < RELISTED_PER_PUMP:
                del self._listings[i]

    def _list_tier(self, tier: int) -> Iterator[tuple[str, bytes]]:
        """Every key that the tier holds, or is indexed as holding, in a namespace with an open
        engine."""
        bit = MEMORY_BIT << (tier + 1)
        for namespace in list(self._users):
            known = [key for key, bits in self._bits.get(namespace, {}).items() if bits & bit]
            for key in dict.fromkeys([*self._tiers[tier].keys(namespace), *known]):
                yield namespace, key
