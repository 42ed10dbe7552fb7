"""Write-through: sealed objects on their way to lower tiers.

Writes have queues and threads of their own and never delay a read. What does not fit into a tier's bounds is dropped,
and counted; it is considered again when the object is wanted again.
"""

from __future__ import annotations

from functools import partial

from kvtier.store.budget import WriteBudget
from kvtier.store.jobs import Job
from kvtier.store.lower import LowerTier, LowerTiers, reason_of
from kvtier.store.memory import Entry, MemoryTable
from kvtier.store.shared import Shared
from kvtier.tiers.base import ObjectMeta
from kvtier.topology.models import StorePolicy


class WriteThrough:
    """Writes under way. Owner's thread only."""

    def __init__(self, shared: Shared, table: MemoryTable, lowers: LowerTiers, max_pinned_bytes: int) -> None:
        self._shared = shared
        self._table = table
        self._lowers = lowers
        self._max_pinned_bytes = max_pinned_bytes
        self._writes: dict[tuple[int, Entry], Job] = {}
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

    def _write(self, lower: LowerTier, entry: Entry, meta: ObjectMeta) -> None:
        shared = self._shared
        size = meta.payload_bytes
        if not lower.usable:
            shared.count("tier_writes_dropped", lower.name, "breaker" if lower.opened else "not_open")
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
        job = Job(shared.clock, work, partial(self._written, lower, entry, size))
        self._writes[lower.index, entry] = job
        job.submit(shared.io, f"write:{lower.name}")

    def _written(self, lower: LowerTier, entry: Entry, size: int, _result: object, error: BaseException | None) -> None:
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

    def _release(self, lower: LowerTier, entry: Entry, size: int) -> None:
        del self._writes[lower.index, entry]
        lower.pending_store_bytes -= size
        entry.busy &= ~lower.bit
        self._table.unpin(entry)

    def tier_closed(self, lower: LowerTier) -> None:
        """The tier's breaker opened: what has not begun there is dropped."""
        for (index, entry), job in list(self._writes.items()):
            if index == lower.index and entry.meta is not None and job.revoke():
                self._shared.count("tier_writes_dropped", lower.name, "breaker")
                self._budgets[index].give_back(entry.meta.payload_bytes)
                self._release(lower, entry, entry.meta.payload_bytes)
