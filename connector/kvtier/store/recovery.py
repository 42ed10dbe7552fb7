"""Recovery of the pool that the previous tierd used.

``RecoveredObjects`` takes over the objects that the slot table names, once the fence is open. A
recovered object is resident like any other and may be evicted, but it is announced under
``UNVERIFIED_BIT``: it is verified on first use, by a promotion that waits for the checksum as it
would wait for a read. If verification fails, the object is dropped.

``OrphanedReads`` quarantines slots that a thread of an earlier tierd may still be reading into. The
kernel keeps such a thread until its mount answers.

Only the store's thread uses this module, except ``_hash``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvtier.store.context import StoreContext
from kvtier.store.executor import IoCall
from kvtier.store.lifetimes import Lifetimes
from kvtier.store.memory_tier import ResidentObjects
from kvtier.store.operations import KeyWaiter
from kvtier.store.slot_pool import SlotPool, recorded_layout
from kvtier.store.slot_table import (
    ReadLog,
    SlotLocation,
    SlotRecord,
    SlotTable,
    key_mark,
    object_digest,
)
from kvtier.store.state import Entry, ObjectGeometry, Slot, SlotState
from kvtier.store.write_through import WriteThrough, hash_object
from kvtier.tiers.base import ObjectMeta
from kvtier.tiers.checksum import by_kind

VERIFY_LANE = "verify"
"""A lane separate from "hash": a load never waits behind checksums of stores."""
RESTORED_PER_PUMP = 16_384
"""Recovered objects per ``restore_next``: about a tenth of a second."""
ORPHAN_OWNER = "previous tierd"
"""``Slot.owner`` of orphaned reads."""


@dataclass(frozen=True, slots=True)
class PoolRecovery:
    """What a tierd takes over from the previous one, and what it records for the next one.

    * ``fenced``: workers of the previous tierd may still write into the pool. Nothing is touched
      until ``unfence``.
    * ``slot_table``: names the recovered objects, and records the objects of this tierd for the
      next one.
    * ``read_log``: records the slots that are being read into.
    * ``orphaned_reads``: slots that a thread of an earlier tierd may still be reading into, by the
      name of that tierd.
    """

    fenced: bool = False
    slot_table: SlotTable | None = None
    read_log: ReadLog | None = None
    orphaned_reads: Mapping[str, Sequence[SlotLocation]] = field(default_factory=dict)


class OrphanedReads:
    """Slots that threads of earlier tierds may still be reading into, by the name of the tierd."""

    def __init__(
        self,
        context: StoreContext,
        pool: SlotPool,
        locations: Mapping[str, Sequence[SlotLocation]],
    ) -> None:
        self._context = context
        self._pool = pool
        self._locations = dict(locations)
        self._slots: dict[str, list[Slot]] = {}

    @property
    def expected(self) -> bool:
        """Whether ``quarantine`` has slots to take."""
        return any(self._locations.values())

    def quarantine(self) -> None:
        """Quarantines the slots. Must precede every other use of the pool."""
        for name, locations in self._locations.items():
            slots = self._slots[name] = []
            for location in locations:
                if location.layout != recorded_layout(self._pool.layout):
                    blocked = self._pool.block(location)
                    for each in blocked:
                        self._pool.move(each, SlotState.QUARANTINED, ORPHAN_OWNER)
                    slots += blocked
                    self._context.count("slots_quarantined", "", "", len(blocked))
                    continue
                slot = self._pool.restore(location)
                if slot is None:
                    # Beyond the end of a pool that has shrunk, or already in quarantine for another
                    # tierd.
                    self._context.count("orphaned_reads_unplaced")
                    continue
                self._pool.move(slot, SlotState.QUARANTINED, ORPHAN_OWNER)
                slots.append(slot)
                self._context.count("slots_quarantined")
        self._locations.clear()

    def release(self, name: str) -> None:
        """Frees the slots of an earlier tierd whose last thread has ended."""
        self._locations.pop(name, None)
        slots = self._slots.pop(name, [])
        for slot in slots:
            self._pool.release(slot)
        if slots:
            self._context.count("quarantine_ended", "", "confirmed")


class _Verification:
    """One object that is being verified, and therefore pinned."""

    __slots__ = ("call", "entry", "waiters")

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.call: IoCall | None = None
        self.waiters: dict[KeyWaiter, None] = {}


class RecoveredObjects:
    """Objects of the previous tierd that have not been verified."""

    def __init__(
        self,
        context: StoreContext,
        pool: SlotPool,
        resident: ResidentObjects,
        lifetimes: Lifetimes,
        writes: WriteThrough,
    ) -> None:
        self._context = context
        self._pool = pool
        self._resident = resident
        self._lifetimes = lifetimes
        self._writes = writes
        self._remaining: list[SlotRecord] = []
        self._marked: dict[tuple[str, bytes], bytes] = {}
        """Keys of the recovered objects by namespace and mark, while they are being restored."""
        self._verifications: dict[tuple[str, bytes], _Verification] = {}

    # Restoring.

    @property
    def restoring(self) -> bool:
        """Whether ``restore_next`` has objects left to restore."""
        return bool(self._remaining)

    def begin_restore(self, slot_table: SlotTable) -> None:
        """Takes the recovered records from the slot table."""
        for reason, number in slot_table.take_rejected().items():
            self._context.count("recovered_objects_rejected", "", reason, number)
        self._remaining = slot_table.take_recovered()
        self._marked = {
            (record.namespace, key_mark(record.key)): record.key for record in self._remaining
        }

    def restore_next(self) -> None:
        """Restores the next objects, oldest first. No slot may be handed out before all are
        restored. An object whose predecessor was not recovered ranks by its own age."""
        records = self._remaining[:RESTORED_PER_PUMP]
        self._remaining = self._remaining[RESTORED_PER_PUMP:]
        for record in records:
            slot = None
            if self._resident.get(record.namespace, record.key) is None:
                slot = self._pool.restore(record.location)
            if slot is None:
                self._context.count("recovered_objects_rejected", "", "overlap")
                self._context.erase(record.offset)
                continue
            entry = Entry(record.namespace, record.key, slot, (), True)
            entry.unverified = record
            entry.tenant = record.tenant
            entry.account = self._resident.accounts.account_of(record.tenant)
            entry.expires_at = record.expires_at
            entry.tiers = record.tiers
            entry.previous = self._marked.get((record.namespace, record.previous), b"")
            self._resident.commit(entry)
            self._lifetimes.restored(entry)
            self._context.count("objects_recovered")
        if not self._remaining:
            self._marked.clear()

    # Verification.

    def verify(self, entry: Entry, geometry: ObjectGeometry, waiter: KeyWaiter) -> bool:
        """Verifies the object for ``waiter``. The object must not be in eviction.

        Returns False, and drops the object, if an engine of this geometry cannot have stored it.
        """
        record = entry.unverified
        if record is None:
            return False
        verification = self._verifications.get((entry.namespace, entry.key))
        if verification is None:
            checksum = by_kind(record.checksum_kind)
            shards = geometry.shard_bytes
            if entry.slot.segment.kind is not geometry.kind or record.shards != len(shards):
                self._drop(entry, "geometry")
                return False
            if checksum is None:
                self._drop(entry, "unverifiable")
                return False
            verification = _Verification(entry)
            self._verifications[entry.namespace, entry.key] = verification
            self._resident.pin(entry)
            entry.shard_bytes = shards
            context = self._context
            payload = context.payload(entry.slot, geometry.payload_bytes)
            work = partial(hash_object, payload, shards, checksum)
            verification.call = IoCall(context.clock, work, partial(self._hashed, verification))
            verification.call.submit(context.io, VERIFY_LANE)
        verification.waiters[waiter] = None
        return True

    def stop_waiting(self, namespace: str, key: bytes, waiter: KeyWaiter) -> None:
        """Removes ``waiter``. A verification without waiters that has not started is dropped; the
        next use starts it."""
        verification = self._verifications.get((namespace, key))
        if verification is None:
            return
        verification.waiters.pop(waiter, None)
        call = verification.call
        if not verification.waiters and call is not None and call.revoke():
            del self._verifications[namespace, key]
            self._resident.unpin(verification.entry)

    def replace(self, entry: Entry) -> bool:
        """Drops the object, because an engine stores the same key.

        False if it is being verified.
        """
        if entry.pins:
            return False
        self._drop(entry, "replaced")
        return True

    def _hashed(
        self, verification: _Verification, result: object, error: BaseException | None
    ) -> None:
        entry = verification.entry
        record = entry.unverified
        del self._verifications[entry.namespace, entry.key]
        waiters = list(verification.waiters)
        if (
            error is not None
            or record is None
            or not isinstance(result, ObjectMeta)
            or object_digest(result) != record.digest
        ):
            if error is not None:
                self._context.unexpected.note("verifying", error)
            self._resident.unpin(entry)
            self._drop(entry, "corrupt")
            for waiter in waiters:
                waiter.lost("recovered_corrupt")
            return
        entry.meta = result
        self._context.count("recovered_objects_verified")
        self._resident.verified(entry)
        for waiter in waiters:
            waiter.arrived(entry, 0)
        self._writes.maybe_write(entry)
        self._resident.unpin(entry)

    def _drop(self, entry: Entry, reason: str) -> None:
        self._context.count("recovered_objects_dropped", "", reason)
        self._resident.discard(entry)
