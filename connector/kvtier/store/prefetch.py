"""Prefetches: bring the prefixes of requests that wait in an engine's queue into RAM.

A prefetch is a help and never a promise: nothing waits for it, and it pins nothing. What has
arrived of a prefix is evicted when nothing else can be (``queued_requests``). It reads with at most
half of a tier's threads, so a request whose turn has come finds the others free, and what all
prefetches have brought and not ended takes at most a ``POOL_SHARE``-th of the pool: so it displaces
no more than that, the least recently used objects first, and nothing that another prefetch has
brought. What is in RAM of such a prefix already counts as used.

The engine ends each prefetch, with a cancellation, when it looks the request up or when the request
is gone. Reads that have not started are dropped then. Only the store's thread uses this module.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.store.allocator import SlotAllocator
from kvtier.store.context import StoreContext
from kvtier.store.operations import EngineState, Read
from kvtier.store.promotion import ObjectSources
from kvtier.store.queued_requests import QueuedRequests
from kvtier.store.state import Entry
from kvtier.store.tier_group import SecondaryTier
from kvtier.store.types import NO_OWNER, Owner

MAX_PREFETCHES = 64
"""Of all engines together."""
POOL_SHARE = 8


@dataclass(eq=False, slots=True)
class OpenPrefetch:
    """The rest of one request's prefix. ``keys``: (group, key) from ``position`` on are neither in
    RAM nor requested; those of a group follow each other. ``bytes``: of what was requested.
    ``queued``: the number of the request in the queue, 0 if it has none; it knows of the first
    ``awaited`` keys that they are in RAM."""

    engine: EngineState
    namespace: str
    keys: list[tuple[int, bytes]]
    owner: Owner = NO_OWNER
    queued: int = 0
    position: int = 0
    awaited: int = 0
    bytes: int = 0
    reads: dict[int, tuple[Read, int]] = field(default_factory=dict)
    """In progress, with the tier that they count for."""


@dataclass(frozen=True, slots=True)
class _PrefetchKey:
    """Waits for the read of one position."""

    prefetches: Prefetches
    prefetch: OpenPrefetch
    position: int

    def arrived(self, entry: Entry, tier_index: int) -> None:
        self.prefetches.key_ended(self.prefetch, self.position, True)

    def lost(self, reason: str) -> None:
        self.prefetches.key_ended(self.prefetch, self.position, False)


class Prefetches:
    """The prefetches of all engines, in the order of their queues."""

    def __init__(
        self,
        context: StoreContext,
        sources: ObjectSources,
        allocator: SlotAllocator,
        queued: QueuedRequests,
        pool_bytes: int,
    ) -> None:
        self._context = context
        self._queued = queued
        self._resident = sources.resident
        self._tiers = sources.tiers
        self._reads = sources.reads
        self._allocator = allocator
        self._max_bytes = pool_bytes // POOL_SHARE
        self._open: OrderedDict[tuple[str, int], OpenPrefetch] = OrderedDict()
        self._reading: Counter[int] = Counter()
        """Reads in progress, by tier."""
        self.bytes = 0
        """Of what open prefetches have requested."""

    def __len__(self) -> int:
        return len(self._open)

    def begin(
        self,
        engine: EngineState,
        number: int,
        keys: Sequence[tuple[int, bytes]],
        owner: Owner = NO_OWNER,
        queued: int = 0,
    ) -> None:
        """Starts to bring the longest prefix of ``keys`` that the tiers hold into RAM."""
        if (engine.name, number) in self._open or number in engine.promotions:
            self._context.violation("prefetch_twice")
            return
        if len(self._open) >= MAX_PREFETCHES:
            self._context.count("prefetches_rejected", "", "too_many")
            return
        named: list[tuple[int, bytes]] = []
        for group, block_hash in keys:
            key = engine.key(group, block_hash)
            if key is None:
                self._context.violation("unknown_group")
                break
            named.append((group, key))
        self._context.count("prefetches")
        self._open[engine.name, number] = OpenPrefetch(
            engine, engine.namespace, named, owner, queued
        )
        self.run()

    def end(self, engine: EngineState, number: int) -> bool:
        """The request's turn has come, or it is gone. False if there is no such prefetch."""
        prefetch = self._open.pop((engine.name, number), None)
        if prefetch is None:
            return False
        self.bytes -= prefetch.bytes
        reads, prefetch.reads = prefetch.reads, {}
        for position, (read, tier_index) in reads.items():
            self._reading[tier_index] -= 1
            self._reads.stop_waiting(read, _PrefetchKey(self, prefetch, position))
        return True

    def close(self, engine: EngineState) -> None:
        """Ends all prefetches of an engine, which is closed or has other weights."""
        for number in [number for name, number in self._open if name == engine.name]:
            self.end(engine, number)

    def key_ended(self, prefetch: OpenPrefetch, position: int, arrived: bool) -> None:
        """A read has ended. A key that cannot be had makes those after it worthless."""
        ended = prefetch.reads.pop(position, None)
        if ended is None:
            return
        self._reading[ended[1]] -= 1
        if not arrived:
            del prefetch.keys[prefetch.position :]
        self.run()

    def run(self) -> None:
        """Starts reads, as far as the bounds allow."""
        if self._context.fenced:
            return
        for prefetch in list(self._open.values()):
            while self._start_next(prefetch):
                pass
            if prefetch.queued:
                self._protect(prefetch)

    def _protect(self, prefetch: OpenPrefetch) -> None:
        """Protects what is in RAM of the beginning of the prefix, by its last object of each
        group."""
        arrived = min(prefetch.reads, default=prefetch.position)
        if arrived <= prefetch.awaited:
            return
        last = dict(prefetch.keys[prefetch.awaited : arrived])
        prefetch.awaited = arrived
        self._queued.extend(prefetch.engine, prefetch.queued, last)

    def _start_next(self, prefetch: OpenPrefetch) -> bool:
        """Goes on with one key; False if the prefetch has to wait or has ended."""
        if prefetch.position >= len(prefetch.keys):
            return False
        group, key = prefetch.keys[prefetch.position]
        namespace = prefetch.namespace
        entry = self._resident.get(namespace, key)
        if entry is not None:
            # Unverified or not, it is in RAM; a verification is the request's own affair.
            if not entry.evicting:
                self._resident.hit(entry)
            prefetch.position += 1
            return True
        if self._reads.get(namespace, key) is not None:
            prefetch.position += 1
            return True
        secondary = self._tiers.best_for(namespace, key) if prefetch.engine.persistent else None
        if secondary is None:
            del prefetch.keys[prefetch.position :]
            return False
        geometry = prefetch.engine.geometries[group]
        size = geometry.kind.slot_bytes
        if not self._has_room(prefetch, secondary, size):
            return False
        position, prefetch.position = prefetch.position, prefetch.position + 1
        prefetch.bytes += size
        self.bytes += size
        self._reading[secondary.index] += 1
        read = self._reads.start(namespace, key, geometry, secondary, owner=prefetch.owner)
        if position and prefetch.keys[position - 1][0] == group:
            read.previous = prefetch.keys[position - 1][1]
        prefetch.reads[position] = (read, secondary.index)
        self._reads.wait(read, _PrefetchKey(self, prefetch, position))
        self._context.count("prefetch_reads", secondary.name)
        return True

    def _has_room(self, prefetch: OpenPrefetch, secondary: SecondaryTier, size: int) -> bool:
        if secondary.late_reads or self.bytes + size > self._max_bytes:
            return False
        if self._reading[secondary.index] >= max(1, secondary.read_threads // 2):
            return False
        tenant = self._resident.accounts.account_of(prefetch.owner.tenant)
        if self._allocator.tenant_room(tenant) < size:
            return False
        kind = prefetch.engine.geometries[prefetch.keys[prefetch.position][0]].kind
        if self._allocator.spare(kind) <= 0:
            return False
        # The prefixes of requests before it are not evicted for it, nor its own for the rest of it.
        rank = self._allocator.rank_of_next(kind)
        return not rank or rank > self._queued.rank_of(prefetch.engine, prefetch.queued)
