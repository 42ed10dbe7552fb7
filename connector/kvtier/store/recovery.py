"""What the last tierd left in the pool: taken over after the fence, verified at its first hit (DATAPATH 7).

A kept object is in the table of RAM like any other, may be evicted like any other, and is announced under a bit of its own, because it
must not be used yet: whoever wants it asks for a promotion, and waits for its checksum as for a read. From then on it is an object
like any other; or it is none, and the key is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from kvtier.store.context import StoreContext
from kvtier.store.executor import IoCall
from kvtier.store.memory_tier import ResidentObjects
from kvtier.store.presence import PresenceIndex
from kvtier.store.slot_pool import SlotPool
from kvtier.store.slot_table import SlotRecord, object_digest
from kvtier.store.state import Entry, SlotClass
from kvtier.store.types import MEMORY_BIT, UNVERIFIED_BIT
from kvtier.tiers.base import ObjectMeta, aligned
from kvtier.tiers.checksum import Checksum, by_kind

if TYPE_CHECKING:
    from kvtier.store.allocator import SlotAllocator
LANE = "verify"
"""Threads of its own: a load never queues behind the sealing of stores."""


class RecoveryWaiter(Protocol):
    """Who wants a kept object."""

    def arrived(self, position: int, entry: Entry, tier_index: int) -> None:
        """It is what it should be."""
        ...

    def lost(self, position: int, reason: str) -> None:
        """It is not, and the key is absent."""
        ...


class _Check:
    """One object that is being verified, pinned meanwhile."""

    __slots__ = ("entry", "job", "waiters")

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.job: IoCall | None = None
        self.waiters: dict[tuple[RecoveryWaiter, int], None] = {}


class RecoveredObjects:
    """Objects of the last tierd. Owner's thread only. ``on_verified`` gets each that is an object like any other from now on, pinned."""

    def __init__(
        self,
        shared: StoreContext,
        pool: SlotPool,
        table: ResidentObjects,
        index: PresenceIndex,
        supply: SlotAllocator,
    ) -> None:
        self.on_verified: Callable[[Entry], None] | None = None
        self._shared = shared
        self._pool = pool
        self._table = table
        self._index = index
        self._supply = supply
        self._checks: dict[tuple[str, bytes], _Check] = {}

    def restore(self, records: Sequence[SlotRecord]) -> None:
        """Takes over what was sealed, oldest first. Before any slot is handed out."""
        shared = self._shared
        for record in records:
            slot = None
            if self._table.get(record.namespace, record.key) is None:
                slot = self._pool.restore(
                    record.offset, record.slot_bytes, record.segment_start, record.segment_slots
                )
            if slot is None:
                shared.count("recovered_objects_rejected", "", "overlap")
                shared.erase(record.offset)
                continue
            entry = Entry(record.namespace, record.key, slot, (), True)
            entry.kept = record
            self._table.add(entry)
            self._index.change(record.namespace, record.key, UNVERIFIED_BIT, True)
            shared.count("objects_recovered")

    def want(
        self,
        entry: Entry,
        kind: SlotClass,
        shard_bytes: tuple[int, ...],
        waiter: RecoveryWaiter,
        position: int,
    ) -> bool:
        """Has the object verified for ``waiter``; False if it cannot be what an engine of this geometry has stored. It is gone then.

        The object must not be leaving.
        """
        record = entry.kept
        if record is None:
            return False
        check = self._checks.get((entry.namespace, entry.key))
        if check is None:
            checksum = by_kind(record.checksum_kind)
            if entry.slot.segment.kind is not kind or record.shards != len(shard_bytes):
                self._drop(entry, "geometry")
                return False
            if checksum is None:
                self._drop(entry, "unverifiable")
                return False
            check = self._checks[entry.namespace, entry.key] = _Check(entry)
            self._table.pin(entry)
            entry.shard_bytes = shard_bytes
            work = partial(self._hash, entry.slot.offset, shard_bytes, checksum)
            check.job = IoCall(self._shared.clock, work, partial(self._hashed, check)).submit(
                self._shared.io, LANE
            )
        check.waiters[waiter, position] = None
        return True

    def leave(self, namespace: str, key: bytes, waiter: RecoveryWaiter, position: int) -> None:
        """``waiter`` does not wait any more. What nobody waits for and no thread has begun is put off to the next hit."""
        check = self._checks.get((namespace, key))
        if check is None:
            return
        check.waiters.pop((waiter, position), None)
        if not check.waiters and check.job is not None and check.job.revoke():
            del self._checks[namespace, key]
            self._table.unpin(check.entry)

    def replace(self, entry: Entry) -> bool:
        """Somebody is about to store the same key afresh: True if the kept object made way for it."""
        if entry.pins:
            return False
        self._drop(entry, "replaced")
        return True

    def _hash(self, offset: int, shard_bytes: tuple[int, ...], checksum: Checksum) -> ObjectMeta:
        """Runs on an I/O thread."""
        digests = []
        for size in shard_bytes:
            digests.append(checksum.digest(self._shared.view(offset, size)))
            offset += aligned(size)
        return ObjectMeta(shard_bytes, checksum.kind, tuple(digests))

    def _hashed(self, check: _Check, result: object, error: BaseException | None) -> None:
        entry = check.entry
        record = entry.kept
        del self._checks[entry.namespace, entry.key]
        good = (
            error is None
            and isinstance(result, ObjectMeta)
            and record is not None
            and object_digest(result) == record.digest
        )
        waiters = list(check.waiters)
        if not good or not isinstance(result, ObjectMeta):
            if error is not None:
                self._shared.unexpected.note("verifying", error)
            self._table.unpin(entry)
            self._drop(entry, "corrupt")
            for waiter, position in waiters:
                waiter.lost(position, "recovered_corrupt")
            return
        entry.meta, entry.kept = result, None
        self._shared.count("recovered_objects_verified")
        self._index.change(entry.namespace, entry.key, MEMORY_BIT, True)
        self._index.change(entry.namespace, entry.key, UNVERIFIED_BIT, False)
        for waiter, position in waiters:
            waiter.arrived(position, entry, 0)
        if self.on_verified is not None:
            self.on_verified(entry)
        self._table.unpin(entry)

    def _drop(self, entry: Entry, reason: str) -> None:
        self._shared.count("recovered_objects_dropped", "", reason)
        self._supply.discard(entry)
