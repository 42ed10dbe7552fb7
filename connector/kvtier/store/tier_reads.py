"""Slots of a pool that was taken over into which a thread of a dead tierd may still be reading: quarantined until it is gone.

Reads from lower tiers: one per key, however many wait for it.

A read belongs to its key. Whoever waits leaves at its own time; the read goes on, keeps its slot until the call has
returned, however late, and what it brings is kept. Only a call that no thread has begun is taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvtier.errors import TierCorruptError, TierMissError
from kvtier.store.context import StoreContext
from kvtier.store.cost_model import Batch
from kvtier.store.executor import IoCall
from kvtier.store.memory_tier import ResidentObjects
from kvtier.store.operations import Read, Waiter
from kvtier.store.presence import PresenceIndex
from kvtier.store.secondary_tier import SecondaryTier, SecondaryTiers, reason_of
from kvtier.store.slot_pool import SlotPool
from kvtier.store.slot_table import ReadLog, SlotLocation
from kvtier.store.state import Entry, Slot, SlotClass, SlotState
from kvtier.store.types import MEMORY_BIT
from kvtier.tiers.base import ObjectMeta, ObjectRef

if TYPE_CHECKING:
    from kvtier.store.allocator import SlotAllocator
OWNER = "a dead tierd"


class OrphanedReads:
    """Those slots by the name of their tierd. Owner's thread only."""

    def __init__(
        self, shared: StoreContext, pool: SlotPool, places: Mapping[str, Sequence[SlotLocation]]
    ) -> None:
        self._shared = shared
        self._pool = pool
        self._places = dict(places)
        self._slots: dict[str, list[Slot]] = {}

    def place(self) -> None:
        """Takes the slots, before anything else is."""
        for name, places in self._places.items():
            slots = self._slots[name] = []
            for place in places:
                slot = self._pool.restore(
                    place.offset, place.slot_bytes, place.segment_start, place.segment_slots
                )
                if slot is None:
                    # Past the end of a pool that is smaller now, or one that a tierd before that one left as well.
                    self._shared.count("orphaned_reads_unplaced")
                    continue
                self._pool.move(slot, SlotState.QUARANTINED, OWNER)
                slots.append(slot)
                self._shared.count("slots_quarantined")
        self._places.clear()

    def over(self, name: str) -> None:
        """No thread of this tierd lives any more."""
        self._places.pop(name, None)
        slots = self._slots.pop(name, [])
        for slot in slots:
            self._pool.release(slot)
        if slots:
            self._shared.count("quarantine_ended", "", "proven")


JOIN_FACTOR = 1.5
"""Half of all reads end after their estimate, which is a median; one that has taken half as long again is past it."""
BLAME_SECONDS = 0.05
"""After a read has become late it is judged."""


def _not_noted() -> None:
    raise TierMissError("the run directory has no room to note a read, so it is not begun")


class TierReads:
    """Reads under way. Owner's thread only."""

    def __init__(
        self,
        shared: StoreContext,
        pool: SlotPool,
        table: ResidentObjects,
        index: PresenceIndex,
        lowers: SecondaryTiers,
        supply: SlotAllocator,
    ) -> None:
        self._shared = shared
        self._pool = pool
        self._table = table
        self._index = index
        self._lowers = lowers
        self._supply = supply
        self._reads: dict[tuple[str, bytes], Read] = {}
        self.log: ReadLog | None = None

    def get(self, namespace: str, key: bytes) -> Read | None:
        """The read of this key, if one is under way."""
        return self._reads.get((namespace, key))

    def joinable(self, read: Read, now: float) -> bool:
        """Whether somebody may still start to wait for it: not past its estimate (DATAPATH 2)."""
        if read.due_at is not None:
            return not read.late and now <= read.due_at
        return not read.late and now - read.created_at <= read.lower.late_seconds

    def add(
        self,
        namespace: str,
        key: bytes,
        kind: SlotClass,
        shard_bytes: tuple[int, ...],
        payload_bytes: int,
        lower: SecondaryTier,
        batch: Batch | None = None,
    ) -> Read:
        """Starts a read of a key that is neither in RAM nor being read. ``batch``: of the reads asked for together."""
        read = Read(namespace, key, kind, shard_bytes, payload_bytes, lower, self._shared.clock())
        self._reads[namespace, key] = read
        slot = self._pool.take(kind, SlotState.READING)
        if slot is None:
            self._supply.wait(read)
        else:
            # One that has to wait for its slot does not count in the batch: that is not the tier's time.
            read.batch = batch
            self.begin(read, slot)
        return read

    def begin(self, read: Read, slot: Slot) -> None:
        """The read has its slot."""
        read.slot = slot
        self._submit(read)

    def _submit(self, read: Read) -> None:
        shared, lower, slot = self._shared, read.lower, read.slot
        if slot is None:
            return
        self._expect(read)
        into = shared.view(slot.offset, read.payload_bytes)
        work: Callable[[], object] = partial(
            lower.tier.read, ObjectRef(read.namespace, read.key), into
        )
        if self.log is not None and not self.log.begin(self._pool.place(slot)):
            work = _not_noted
        read.job = IoCall(shared.clock, work, partial(self._returned, read)).submit(
            shared.io, f"read:{lower.name}"
        )
        limit = shared.clock() + lower.settings.load_timeout_seconds
        read.timer = shared.timers.at(limit, partial(self._out_of_time, read))

    def _expect(self, read: Read) -> None:
        model, now = read.lower.model, self._shared.clock()
        if read.batch is None:
            read.batch = model.begin(now)
        model.submitted(read.batch, read.payload_bytes)
        estimate = model.settled(now)
        if estimate is not None:
            rounds = -(-model.queued_reads // model.threads)
            read.due_at = now + JOIN_FACTOR * estimate.seconds(rounds, model.queued_bytes)

    def _revoke(self, read: Read) -> bool:
        """Takes the call back; False if it has begun."""
        if read.job is None or not read.job.revoke():
            return False
        if self.log is not None and read.slot is not None:
            self.log.end(read.slot.offset)
        if read.batch is not None:
            read.lower.model.withdrawn(read.batch, read.payload_bytes)
            read.batch = None
        return True

    def wait(self, read: Read, waiter: Waiter, position: int) -> None:
        """``waiter`` is told when the key arrives or cannot come."""
        read.waiters[waiter, position] = None

    def leave(self, read: Read, waiter: Waiter, position: int) -> None:
        """``waiter`` does not wait any more. A read for nobody that has not begun is taken back."""
        read.waiters.pop((waiter, position), None)
        self._drop_if_idle(read)

    def _drop_if_idle(self, read: Read) -> None:
        if read.waiters or self._reads.get((read.namespace, read.key)) is not read:
            return
        if read.slot is None:
            self._supply.stop_waiting(read)
            self._forget(read)
        elif self._revoke(read):
            self._release(read)

    def blame(self, read: Read) -> None:
        """Somebody's time ran out on this read: the tier's failure if the read itself has taken too long."""
        if (
            read.late
            or read.job is None
            or read.job.seconds(self._shared.clock()) <= read.lower.late_seconds
        ):
            return
        read.late = True
        read.lower.model.hangs(read.payload_bytes)
        self._lowers.note_late(read.lower)

    def committed(self, entry: Entry) -> None:
        """The key came from an engine meanwhile: nobody needs to wait for its read."""
        read = self._reads.get((entry.namespace, entry.key))
        if read is not None:
            self._hand_over(read, entry, 0)
            self._drop_if_idle(read)

    def tier_closed(self, lower: SecondaryTier) -> None:
        """The tier's breaker opened: nothing that has not begun there begins."""
        for read in list(self._reads.values()):
            if read.lower is not lower or self._reads.get((read.namespace, read.key)) is not read:
                continue
            if read.slot is None or self._revoke(read):
                self._next_tier(read, "breaker")

    def _out_of_time(self, read: Read) -> None:
        """The tier's own limit for this read has passed."""
        read.timer = None
        self._shared.count("tier_reads_timed_out", read.lower.name)
        self.blame(read)
        if self._reads.get((read.namespace, read.key)) is not read:
            return
        if self._revoke(read):
            self._next_tier(read, "tier_timeout")
        else:
            self._lose(read, "tier_timeout")
            self._blame_later(read)

    def _blame_later(self, read: Read) -> None:
        """A deadline that came before the read had taken too long is judged again when it has: nobody waits for it any more who
        could, and a mount that hangs must be given up whatever its limit is."""
        job = read.job
        if (
            read.late
            or job is None
            or job.started_at is None
            or self._reads.get((read.namespace, read.key)) is not read
        ):
            return

        def judge() -> None:
            read.timer = None
            self.blame(read)
            self._blame_later(read)

        due = job.started_at + read.lower.late_seconds + BLAME_SECONDS
        read.timer = self._shared.timers.at(max(due, self._shared.clock() + BLAME_SECONDS), judge)

    def _returned(self, read: Read, result: object, error: BaseException | None) -> None:
        lower, job = read.lower, read.job
        if self.log is not None and read.slot is not None:
            self.log.end(read.slot.offset)
        if read.timer is not None:
            read.timer.cancel()
            read.timer = None
        was_late = read.late
        if was_late:
            read.late = False
            lower.late_reads -= 1
        if error is None and (
            not isinstance(result, ObjectMeta) or result.shard_bytes != read.shard_bytes
        ):
            error = TierCorruptError(
                f"shards of {getattr(result, 'shard_bytes', None)} bytes instead of {read.shard_bytes}"
            )
        if read.batch is not None:
            ended_at = job.finished_at if job is not None else None
            now = self._shared.clock() if ended_at is None else ended_at
            lower.model.ended(read.batch, now, read.payload_bytes, error is None, was_late)
            read.batch = None
        if error is not None:
            reason = reason_of(error)
            self._shared.count("tier_reads_failed", lower.name, reason)
            self._lowers.note_error(lower, read.namespace, read.key, error)
            if self._table.get(read.namespace, read.key) is not None:
                self._release(read)
            else:
                self._next_tier(read, reason)
            return
        seconds = 0.0 if job is None else job.seconds(self._shared.clock())
        lower.observe_read(seconds)
        lower.breaker.success()
        self._shared.count("tier_reads", lower.name)
        self._shared.count("tier_read_bytes", lower.name, "", read.payload_bytes)
        if isinstance(result, ObjectMeta):
            self._keep(read, result)

    def _keep(self, read: Read, meta: ObjectMeta) -> None:
        slot = read.slot
        if slot is None:
            return
        if self._table.get(read.namespace, read.key) is not None:
            self._release(read)
            return
        entry = Entry(read.namespace, read.key, slot, read.shard_bytes, True)
        entry.meta = meta
        read.slot = None
        self._forget(read)
        self._pool.move(slot, SlotState.COMMITTED)
        self._table.add(entry)
        self._shared.record(entry)
        self._index.change(read.namespace, read.key, MEMORY_BIT, True)
        self._hand_over(read, entry, read.lower.index)

    def _hand_over(self, read: Read, entry: Entry, tier_index: int) -> None:
        waiters = list(read.waiters)
        read.waiters.clear()
        # Pinned for the while: the first waiter may end its promotion and let go of what the second is about to hold.
        self._table.pin(entry)
        for waiter, position in waiters:
            waiter.arrived(position, entry, tier_index)
        self._table.unpin(entry)

    def _next_tier(self, read: Read, reason: str) -> None:
        """The tier did not bring it: another one may, while somebody waits; the slot is this read's alone at this
        point."""
        if read.timer is not None:
            read.timer.cancel()
            read.timer = None
        read.tried |= read.lower.bit
        read.job = None
        other = (
            self._lowers.best_for(read.namespace, read.key, read.tried) if read.waiters else None
        )
        if other is not None:
            read.lower = other
            if read.slot is not None:
                self._submit(read)
            return
        if read.slot is None:
            self._supply.stop_waiting(read)
            self._forget(read)
        else:
            self._release(read)
        self._lose(read, reason)

    def _lose(self, read: Read, reason: str) -> None:
        waiters = list(read.waiters)
        read.waiters.clear()
        for waiter, position in waiters:
            waiter.lost(position, reason)

    def _release(self, read: Read) -> None:
        if read.slot is not None:
            self._pool.release(read.slot)
            read.slot = None
        self._forget(read)

    def _forget(self, read: Read) -> None:
        if read.timer is not None:
            read.timer.cancel()
            read.timer = None
        del self._reads[read.namespace, read.key]
