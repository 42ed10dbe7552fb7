"""Sealing: checksums over objects that engines delivered, on threads of their own.

Only sealed objects go to lower tiers (DATAPATH 7). An object is pinned while it waits and while it is hashed.

Write-through: sealed objects on their way to lower tiers.

Writes have queues and threads of their own and never delay a read. What does not fit into a tier's bounds is dropped,
and counted; it is considered again when the object is wanted again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from kvtier.config.models import StorePolicy
from kvtier.store.context import StoreContext
from kvtier.store.executor import IoCall
from kvtier.store.memory_tier import ResidentObjects
from kvtier.store.secondary_tier import SecondaryTier, SecondaryTiers, WriteBudget, reason_of
from kvtier.store.state import Entry
from kvtier.tiers.base import ObjectMeta, aligned

SEALING_BIT = 1
"""In ``Entry.busy``."""
MAX_SUBMITTED = 4
"""Calls handed to the executor at a time: enough for two threads never to wait for the owner."""


class Checksummer:
    """Objects on their way to a checksum. Owner's thread only. ``on_sealed`` gets each object that has one, still
    pinned."""

    def __init__(
        self, shared: StoreContext, table: ResidentObjects, max_pending_bytes: int
    ) -> None:
        self.on_sealed: Callable[[Entry], None] | None = None
        self._shared = shared
        self._table = table
        self._max_pending_bytes = max_pending_bytes
        self._queue: deque[Entry] = deque()
        self._submitted = 0
        self.pending_bytes = 0

    def __len__(self) -> int:
        """Objects that wait or are being hashed."""
        return len(self._queue) + self._submitted

    def add(self, entry: Entry) -> None:
        """Seals the object some time, unless it is sealed or more is waiting already than may be pinned for it."""
        if entry.meta is not None or entry.kept is not None or entry.busy & SEALING_BIT:
            return
        size = entry.slot.segment.kind.slot_bytes
        if self.pending_bytes + size > self._max_pending_bytes:
            self._shared.count("checksums_dropped", "", "too_many_pending")
            return
        self.pending_bytes += size
        entry.busy |= SEALING_BIT
        self._table.pin(entry)
        self._queue.append(entry)
        self.run()

    def run(self) -> None:
        """Submits what may be submitted."""
        while self._queue and self._submitted < MAX_SUBMITTED and not self._shared.fenced:
            entry = self._queue.popleft()
            self._submitted += 1
            work = partial(self._hash, entry.slot.offset, entry.shard_bytes)
            IoCall(self._shared.clock, work, partial(self._hashed, entry)).submit(
                self._shared.io, "hash"
            )

    def _hash(self, offset: int, shard_bytes: tuple[int, ...]) -> ObjectMeta:
        """Runs on an I/O thread."""
        checksums = self._shared.checksums
        digests = []
        for size in shard_bytes:
            digests.append(checksums.digest(self._shared.view(offset, size)))
            offset += aligned(size)
        return ObjectMeta(shard_bytes, checksums.kind, tuple(digests))

    def _hashed(self, entry: Entry, result: object, error: BaseException | None) -> None:
        self._submitted -= 1
        self.pending_bytes -= entry.slot.segment.kind.slot_bytes
        entry.busy &= ~SEALING_BIT
        if isinstance(result, ObjectMeta) and error is None:
            entry.meta = result
            self._shared.count("objects_checksummed")
            self._shared.record(entry)
            if self.on_sealed is not None:
                self.on_sealed(entry)
        else:
            self._shared.count("checksums_failed")
            if error is not None:
                self._shared.unexpected.note("sealing", error)
        self._table.unpin(entry)
        self.run()


class WriteThrough:
    """Writes under way. Owner's thread only."""

    def __init__(
        self,
        shared: StoreContext,
        table: ResidentObjects,
        lowers: SecondaryTiers,
        max_pinned_bytes: int,
    ) -> None:
        self._shared = shared
        self._table = table
        self._lowers = lowers
        self._max_pinned_bytes = max_pinned_bytes
        self._writes: dict[tuple[int, Entry], IoCall] = {}
        self._budgets = {lower.index: WriteBudget(shared.clock) for lower in lowers.all}

    def __len__(self) -> int:
        """Writes that wait or run."""
        return len(self._writes)

    def consider(self, entry: Entry) -> None:
        """Writes a sealed object to every tier whose policy asks for it and that does not have it."""
        meta = entry.meta
        if meta is None or not entry.persistent:
            return
        for lower in self._lowers.all:
            policy = lower.settings.store_policy
            if (
                entry.busy & lower.bit
                or policy is StorePolicy.NONE
                or (policy is StorePolicy.REUSED and entry.seen < 2)
                or lower.tier.contains(entry.ref)
            ):
                continue
            self._write(lower, entry, meta)

    def _write(self, lower: SecondaryTier, entry: Entry, meta: ObjectMeta) -> None:
        shared = self._shared
        size = meta.payload_bytes
        if not lower.usable:
            shared.count(
                "tier_writes_dropped", lower.name, "breaker" if lower.opened else "not_open"
            )
            return
        bound = min(lower.settings.max_pending_store_bytes, self._max_pinned_bytes)
        if lower.pending_store_bytes + size > bound:
            shared.count("tier_writes_dropped", lower.name, "too_many_pending")
            return
        if not self._budgets[lower.index].take(size, lower.settings.max_write_bytes_per_second):
            shared.count("tier_writes_dropped", lower.name, "write_budget")
            return
        lower.pending_store_bytes += size
        entry.busy |= lower.bit
        self._table.pin(entry)
        work = partial(lower.tier.write, entry.ref, shared.view(entry.slot.offset, size), meta)
        job = IoCall(shared.clock, work, partial(self._written, lower, entry, size))
        self._writes[lower.index, entry] = job
        job.submit(shared.io, f"write:{lower.name}")

    def _written(
        self,
        lower: SecondaryTier,
        entry: Entry,
        size: int,
        _result: object,
        error: BaseException | None,
    ) -> None:
        if error is None:
            lower.breaker.success()
            lower.negative.discard(entry.namespace, entry.key)
            self._shared.count("tier_writes", lower.name)
            self._shared.count("tier_write_bytes", lower.name, "", size)
        else:
            self._shared.count("tier_writes_failed", lower.name, reason_of(error))
        self._release(lower, entry, size)
        if error is not None:
            self._lowers.note_error(lower, entry.namespace, entry.key, error)

    def _release(self, lower: SecondaryTier, entry: Entry, size: int) -> None:
        del self._writes[lower.index, entry]
        lower.pending_store_bytes -= size
        entry.busy &= ~lower.bit
        self._table.unpin(entry)

    def tier_closed(self, lower: SecondaryTier) -> None:
        """The tier's breaker opened: what has not begun there is dropped."""
        for (index, entry), job in list(self._writes.items()):
            if index == lower.index and entry.meta is not None and job.revoke():
                self._shared.count("tier_writes_dropped", lower.name, "breaker")
                self._budgets[index].give_back(entry.meta.payload_bytes)
                self._release(lower, entry, entry.meta.payload_bytes)
