"""Reads from secondary tiers: one per key, however many promotions wait for it.

A read belongs to its key, not to a promotion. A promotion that stops waiting does not stop the
read: the slot stays occupied until the call has returned, however late, and what it returns is
committed. Only a call that has not started can be revoked. Only the store's thread uses this
module.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvtier.errors import TierCorruptError, TierExpiredError, TierMissError
from kvtier.store.allocator import SlotAllocator
from kvtier.store.context import StoreContext
from kvtier.store.cost_model import Batch
from kvtier.store.executor import IoCall
from kvtier.store.lifetimes import Lifetimes
from kvtier.store.memory_tier import ResidentObjects
from kvtier.store.operations import KeyWaiter, Read
from kvtier.store.secondary_tier import SecondaryTiers, reason_of
from kvtier.store.slot_table import ReadLog
from kvtier.store.state import Entry, ObjectGeometry, Slot, SlotRequest, SlotState
from kvtier.store.tier_group import SecondaryTier
from kvtier.store.types import MEMORY_BIT, NO_OWNER, Owner
from kvtier.tiers.base import ObjectMeta, ObjectRef
from kvtier.tiers.pieces import reader_of

JOIN_FACTOR = 1.5
"""A read can be joined until it has taken this many times its estimate. The estimate is a median,
which half of all reads exceed."""
CHARGE_DELAY_SECONDS = 0.05
"""How long after a read has become late the tier is charged."""


def _fail_unlogged() -> None:
    raise TierMissError("read not started: the run directory has no room to record it")


class TierReads:
    """Reads in progress, by key."""

    def __init__(
        self,
        context: StoreContext,
        resident: ResidentObjects,
        tiers: SecondaryTiers,
        allocator: SlotAllocator,
        lifetimes: Lifetimes,
        log: ReadLog | None,
    ) -> None:
        self._context = context
        self._pool = allocator.pool
        self._resident = resident
        self._tiers = tiers
        self._allocator = allocator
        self._lifetimes = lifetimes
        self._log = log
        self._reads: dict[tuple[str, bytes], Read] = {}
        tiers.on_suspend(self._suspend_tier)

    def get(self, namespace: str, key: bytes) -> Read | None:
        """The read of this key, if one is in progress."""
        return self._reads.get((namespace, key))

    def can_join(self, read: Read, now: float) -> bool:
        """Whether a further promotion may wait for this read: it is not slower than expected."""
        if read.due_at is not None:
            return not read.late and now <= read.due_at
        return not read.late and now - read.created_at <= read.secondary.late_seconds

    def start(
        self,
        namespace: str,
        key: bytes,
        geometry: ObjectGeometry,
        secondary: SecondaryTier,
        batch: Batch | None = None,
        owner: Owner = NO_OWNER,
    ) -> Read:
        """Starts a read of a key that is neither resident nor being read. ``batch``: reads that are
        requested together."""
        read = Read(namespace, key, geometry, secondary, self._context.clock())
        self._reads[namespace, key] = read
        read.owner = owner
        read.account = self._resident.accounts.account_of(owner.tenant)
        self._resident.accounts.add(read.account, geometry.kind.slot_bytes)
        slot = self._pool.take(geometry.kind, SlotState.READING)
        if slot is None:
            read.request = SlotRequest(geometry.kind, partial(self._receive_slot, read))
            self._allocator.request(read.request)
        else:
            # A read that waits for its slot is not part of the batch: that time is not the tier's.
            read.batch = batch
            read.slot = slot
            self._submit(read, slot)
        return read

    def _receive_slot(self, read: Read, slot: Slot) -> None:
        read.request = None
        read.slot = slot
        self._submit(read, slot)

    def _submit(self, read: Read, slot: Slot) -> None:
        context, secondary = self._context, read.secondary
        self._expect(read)
        into = context.payload(slot, read.geometry.payload_bytes)
        work: Callable[[], object] = partial(
            reader_of(secondary.tier, into), ObjectRef(read.namespace, read.key), into
        )
        if self._log is not None and not self._log.begin(self._pool.location(slot)):
            work = _fail_unlogged
        read.call = IoCall(context.clock, work, partial(self._returned, read))
        read.call.submit(context.io, f"read:{secondary.lane}")
        limit = context.clock() + secondary.settings.load_timeout_seconds
        read.timer = context.timers.at(limit, partial(self._time_out, read))

    def _expect(self, read: Read) -> None:
        """Registers the read with the tier's cost model, and estimates when it ends."""
        model, now = read.secondary.model, self._context.clock()
        if read.batch is None:
            read.batch = model.begin(now)
        model.submitted(read.batch, read.geometry.payload_bytes)
        estimate = model.settled(now)
        if estimate is not None:
            rounds = -(-model.queued_reads // model.threads)
            read.due_at = now + JOIN_FACTOR * estimate.seconds(rounds, model.queued_bytes)

    def _revoke(self, read: Read) -> bool:
        """Revokes the call; False if it has started."""
        if read.call is None or not read.call.revoke():
            return False
        if self._log is not None and read.slot is not None:
            self._log.end(read.slot.offset)
        if read.batch is not None:
            read.secondary.model.withdrawn(read.batch, read.geometry.payload_bytes)
            read.batch = None
        return True

    # Waiters.

    def wait(self, read: Read, waiter: KeyWaiter) -> None:
        """Adds a waiter to a read."""
        read.waiters[waiter] = None

    def stop_waiting(self, read: Read, waiter: KeyWaiter) -> None:
        """Removes a waiter. A read without waiters that has not started is dropped."""
        read.waiters.pop(waiter, None)
        self._drop_if_unused(read)

    def _drop_if_unused(self, read: Read) -> None:
        if read.waiters or self._reads.get((read.namespace, read.key)) is not read:
            return
        if read.request is not None:
            self._allocator.withdraw(read.request)
            self._forget(read)
        elif self._revoke(read):
            self._release(read)

    def deliver(self, entry: Entry) -> None:
        """Completes the read of a key that an engine has stored: its waiters get that object."""
        read = self._reads.get((entry.namespace, entry.key))
        if read is not None:
            self._hand_over(read, entry, 0)
            self._drop_if_unused(read)

    def _hand_over(self, read: Read, entry: Entry, tier_index: int) -> None:
        waiters = list(read.waiters)
        read.waiters.clear()
        # The first waiter may end its promotion and unpin what the second is about to pin.
        self._resident.pin(entry)
        for waiter in waiters:
            waiter.arrived(entry, tier_index)
        self._resident.unpin(entry)

    def _lose(self, read: Read, reason: str) -> None:
        waiters = list(read.waiters)
        read.waiters.clear()
        for waiter in waiters:
            waiter.lost(reason)

    # Time.

    def charge_tier(self, read: Read) -> None:
        """Charges the tier with a failure, if the read itself has taken too long. For a deadline
        that was missed."""
        if (
            read.late
            or read.call is None
            or read.call.seconds(self._context.clock()) <= read.secondary.late_seconds
        ):
            return
        read.late = True
        read.secondary.model.mark_hung(read.geometry.payload_bytes)
        self._tiers.note_late_read(read.secondary)

    def _time_out(self, read: Read) -> None:
        """Handles a read whose time limit has passed."""
        read.timer = None
        self._context.count("tier_reads_timed_out", read.secondary.name)
        self.charge_tier(read)
        if self._reads.get((read.namespace, read.key)) is not read:
            return
        if self._revoke(read):
            self._try_next_tier(read, "tier_timeout")
        else:
            self._lose(read, "tier_timeout")
            self._charge_later(read)

    def _charge_later(self, read: Read) -> None:
        """Charges the tier once the read is late. The time limit may be shorter than that, and
        after it no promotion waits that could charge a mount that hangs."""
        call = read.call
        if (
            read.late
            or call is None
            or call.started_at is None
            or self._reads.get((read.namespace, read.key)) is not read
        ):
            return

        def charge() -> None:
            read.timer = None
            self.charge_tier(read)
            self._charge_later(read)

        due = call.started_at + read.secondary.late_seconds + CHARGE_DELAY_SECONDS
        earliest = self._context.clock() + CHARGE_DELAY_SECONDS
        read.timer = self._context.timers.at(max(due, earliest), charge)

    # Results.

    def _returned(self, read: Read, result: object, error: BaseException | None) -> None:
        secondary, call = read.secondary, read.call
        if self._log is not None and read.slot is not None:
            self._log.end(read.slot.offset)
        read.stop_timer()
        was_late = read.late
        if was_late:
            read.late = False
            secondary.late_reads -= 1
        shards = read.geometry.shard_bytes
        if error is None and (not isinstance(result, ObjectMeta) or result.shard_bytes != shards):
            found = getattr(result, "shard_bytes", None)
            error = TierCorruptError(f"shard sizes {found}: must be {shards}")
        if isinstance(result, ObjectMeta) and 0 < result.expires_at <= self._context.wall():
            error = TierExpiredError("the object has expired")
        if read.batch is not None:
            ended_at = call.finished_at if call is not None else None
            now = self._context.clock() if ended_at is None else ended_at
            size = read.geometry.payload_bytes
            secondary.model.ended(read.batch, now, size, error is None, was_late)
            read.batch = None
        if error is not None:
            reason = reason_of(error)
            self._context.count("tier_reads_failed", secondary.name, reason)
            self._tiers.note_error(secondary, read.namespace, read.key, error)
            if self._resident.get(read.namespace, read.key) is not None:
                self._release(read)
            else:
                self._try_next_tier(read, reason)
            return
        seconds = 0.0 if call is None else call.seconds(self._context.clock())
        secondary.observe_read(seconds)
        secondary.breaker.success()
        self._context.count("tier_reads", secondary.name)
        self._context.count("tier_read_bytes", secondary.name, "", read.geometry.payload_bytes)
        if isinstance(result, ObjectMeta):
            self._commit(read, result)

    def _commit(self, read: Read, meta: ObjectMeta) -> None:
        slot = read.slot
        if slot is None:
            return
        if self._resident.get(read.namespace, read.key) is not None:
            self._release(read)
            return
        entry = Entry(read.namespace, read.key, slot, read.geometry.shard_bytes, True)
        entry.meta = meta
        entry.previous = read.previous or meta.previous
        entry.expires_at = meta.expires_at
        if meta.limited:
            entry.tiers = MEMORY_BIT | MEMORY_BIT << read.secondary.index
        read.slot = None
        self._forget(read)
        entry.tenant = meta.tenant or read.owner.tenant
        entry.account = self._resident.accounts.account_of(entry.tenant)
        self._resident.commit(entry)
        self._lifetimes.used(entry, read.owner)
        self._hand_over(read, entry, read.secondary.index)

    def _suspend_tier(self, secondary: SecondaryTier) -> None:
        """No read that has not started starts at this tier."""
        for read in list(self._reads.values()):
            if (
                read.secondary is not secondary
                or self._reads.get((read.namespace, read.key)) is not read
            ):
                continue
            if read.slot is None or self._revoke(read):
                self._try_next_tier(read, "breaker")

    def _try_next_tier(self, read: Read, reason: str) -> None:
        """Reads from another tier, if a promotion waits and another tier has the key. Otherwise
        ends the read.

        No call uses the slot at this point.
        """
        read.stop_timer()
        read.failed_bits |= read.secondary.bit
        read.call = None
        other = (
            self._tiers.best_for(read.namespace, read.key, read.failed_bits)
            if read.waiters
            else None
        )
        if other is not None:
            read.secondary = other
            if read.slot is not None:
                self._submit(read, read.slot)
            return
        if read.request is not None:
            self._allocator.withdraw(read.request)
            self._forget(read)
        else:
            self._release(read)
        self._lose(read, reason)

    def _release(self, read: Read) -> None:
        if read.slot is not None:
            self._pool.release(read.slot)
            read.slot = None
        self._forget(read)

    def _forget(self, read: Read) -> None:
        read.stop_timer()
        read.request = None
        del self._reads[read.namespace, read.key]
        self._resident.accounts.remove(read.account, read.geometry.kind.slot_bytes)
