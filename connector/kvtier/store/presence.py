"""Which tier holds which key: the index that the schedulers' replicas follow.

Only namespaces with an open engine are indexed in full. When one is opened, the keys of the
secondary tiers are taken from the tiers' own indexes, a few at a time; meanwhile and from then on
the tiers' announcements update it. Each announcement follows the change it describes, so applying
some that the listing already contains gives the same state. The number of keys is bounded by the
tiers' indexes and the slots of the pool.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import chain, islice
from queue import Empty, SimpleQueue

from kvtier.key_table import KeyTable
from kvtier.store.context import StoreContext
from kvtier.store.types import MEMORY_BIT, RAM_BITS, PresenceChanged
from kvtier.tiers.base import ObjectRef, Tier
from kvtier.tiers.volume_set import VolumeSet

MAX_QUEUED_CHANGES = 65_536
"""Queued announcements. Beyond this the tier's keys are listed again instead."""
MAX_CHANGES_PER_PUMP = 512
"""With their announcement to one engine, about 2 ms of the daemon's loop. A disk writes fewer
objects meanwhile."""
FREED_PER_PUMP = 4_096
"""Buckets of a table that is freed: about a millisecond."""
LISTED_PER_PUMP = 192
"""Keys of tiers that are being listed: about a millisecond, and twice that on a busy machine. A
million keys at once would take seconds, and tierd would count as dead."""


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

    def relist(self, tier_index: int) -> None:
        """Lists the tier with this index again, because other objects of it can be served now."""
        self._lost[tier_index - 1] = True

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
        self._in_ram: dict[str, dict[bytes, int]] = {}
        self._in_tiers: dict[str, KeyTable] = {}
        """Of namespaces with an open engine."""
        self._closed: list[KeyTable] = []
        """Of namespaces that have been closed, to be freed."""
        self._users: dict[str, int] = {}
        self._listings: dict[tuple[int, str], Iterator[bytes]] = {}
        """Tiers (from 0) and namespaces that are being listed, with the keys that remain."""

    @property
    def busy(self) -> bool:
        """Whether ``apply_changes`` has something to do."""
        return (
            bool(self._listings or self._closed) or len(self.changes) > 0 or self.changes.any_lost
        )

    def open(self, namespace: str, persistent: bool) -> None:
        """Registers an engine of the namespace. The keys of the tiers are announced by the next
        calls of ``apply_changes``."""
        users = self._users.get(namespace, 0)
        self._users[namespace] = users + 1
        if users == 0:
            self._in_tiers[namespace] = KeyTable()
            if persistent:
                for i in range(len(self._tiers)):
                    self._list(i, namespace)

    def close(self, namespace: str) -> None:
        """Unregisters an engine of the namespace.

        Without engines only the keys in RAM are indexed.
        """
        users = self._users.pop(namespace) - 1
        if users:
            self._users[namespace] = users
            return
        self._closed.append(self._in_tiers.pop(namespace))
        for i in range(len(self._tiers)):
            self._listings.pop((i, namespace), None)
        if not self._in_ram.get(namespace, True):
            del self._in_ram[namespace]

    def is_open(self, namespace: str) -> bool:
        """Whether the namespace has an open engine."""
        return namespace in self._users

    def bits(self, namespace: str, key: bytes) -> int:
        """Which tiers hold the key: bit 0 the memory tier, bit i the i-th tier of the document, and
        ``UNVERIFIED_BIT``."""
        in_ram, in_tiers = self._in_ram.get(namespace), self._in_tiers.get(namespace)
        bits = 0 if in_ram is None else in_ram.get(key, 0)
        return bits if in_tiers is None else bits | in_tiers.get(key)

    def in_secondary_tier(self, identity: tuple[str, bytes]) -> bool:
        """Whether a secondary tier holds the key of this namespace and key."""
        namespace, key = identity
        in_tiers = self._in_tiers.get(namespace)
        return in_tiers is not None and in_tiers.get(key) != 0

    def entries(self, namespace: str) -> Iterator[tuple[bytes, int]]:
        """The keys of a namespace with their bits at the time of each step, those in RAM first. A
        key that changes meanwhile may be missing: its change is announced."""
        in_ram = dict.fromkeys(self._in_ram.get(namespace, ()))
        for key in in_ram:
            bits = self.bits(namespace, key)
            if bits:
                yield key, bits
        in_tiers = self._in_tiers.get(namespace)
        if in_tiers is not None:
            for part in in_tiers.parts():
                for key, _ in part:
                    bits = 0 if key in in_ram else self.bits(namespace, key)
                    if bits:
                        yield key, bits

    def change(
        self, namespace: str, key: bytes, bit: int, present: bool, location: int = 0
    ) -> None:
        """Sets or clears one bit. Announces the change if the namespace has an open engine.

        ``location``: with ``MEMORY_BIT``, the slot and its generation.
        """
        changed = (
            self._change_in_ram(namespace, key, bit, present)
            if bit & RAM_BITS
            else self._change_in_tiers(namespace, key, bit, present)
        )
        if changed and namespace in self._users:
            self._context.emit(PresenceChanged(namespace, key, bit, present, location))

    def _change_in_ram(self, namespace: str, key: bytes, bit: int, present: bool) -> bool:
        in_ram = self._in_ram.get(namespace)
        if in_ram is None:
            if not present:
                return False
            in_ram = self._in_ram[namespace] = {}
        before = in_ram.get(key, 0)
        after = before | bit if present else before & ~bit
        if after:
            in_ram[key] = after
        elif before:
            del in_ram[key]
            if not in_ram and namespace not in self._users:
                del self._in_ram[namespace]
        return after != before

    def _change_in_tiers(self, namespace: str, key: bytes, bit: int, present: bool) -> bool:
        in_tiers = self._in_tiers.get(namespace)
        if in_tiers is None:
            return False
        return in_tiers.change_bits(key, bit, present)

    def apply_changes(self) -> None:
        """Applies the tiers' announcements since the last call, and lists tiers further."""
        if self._closed and not self._closed[-1].clear_part(FREED_PER_PUMP):
            self._closed.pop()
        # Changes lost while a tier is being listed cause another listing afterwards.
        lost = self.changes.take_lost({i for i, _ in self._listings})
        for namespace, key, tier_index, announced in self.changes.take(MAX_CHANGES_PER_PUMP):
            tier = self._tiers[tier_index - 1]
            # What one volume announces says nothing about the others.
            whole = not isinstance(tier, VolumeSet)
            present = announced if whole else tier.contains(ObjectRef(namespace, key))
            self.change(namespace, key, MEMORY_BIT << tier_index, present)
        for i in lost:
            self._context.count("presence_relisted", self._tiers[i].name)
            for namespace in self._users:
                self._list(i, namespace)
        left = LISTED_PER_PUMP
        while self._listings and left > 0:
            (i, namespace), listing = next(iter(self._listings.items()))
            part = list(islice(listing, left))
            for key in part:
                # Checked at this moment, so that later announcements of the tier come after it.
                present = self._tiers[i].contains(ObjectRef(namespace, key))
                self.change(namespace, key, MEMORY_BIT << (i + 1), present)
            if len(part) < left:
                del self._listings[i, namespace]
            left -= len(part)

    def _list(self, tier: int, namespace: str) -> None:
        """Starts a listing of every key of the namespace that the tier holds, or is indexed as
        holding."""
        bit = MEMORY_BIT << (tier + 1)
        known = self._in_tiers[namespace].parts()
        self._listings[tier, namespace] = chain(
            self._tiers[tier].keys(namespace),
            (key for part in known for key, bits in part if bits & bit),
        )
