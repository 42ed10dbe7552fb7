"""Checksums of stored objects, and their way to secondary tiers.

``Checksummer`` computes checksums on the "hash" lane; only objects with checksums are written to
secondary tiers. An object is pinned while it waits for its checksum and while it is hashed.

``WriteThrough`` writes objects to the tiers whose store policy asks for them. Writes have their own
queues and threads and never delay a read. A write that exceeds a tier's pending bytes or its write
budget waits in a backlog of objects that lie in RAM. The backlog pins nothing, and is drawn from as
writes end and as the budget grows.

A write that fails is tried again while its object lies in RAM: a single one after some seconds,
and if that succeeds, all others. One that hangs is late after a while: if it is a volume's, others
take what it and the writes behind it were to write. So files hold everything that RAM holds once a
store has been idle for a while, whatever went wrong before.

Only the store's thread uses this module, except ``hash_object``.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice

from kvtier.config.models import StorePolicy
from kvtier.errors import TierQuotaError
from kvtier.store.admission import admit_predecessors
from kvtier.store.context import StoreContext, Timer
from kvtier.store.executor import IoCall
from kvtier.store.memory_tier import ResidentObjects
from kvtier.store.secondary_tier import SecondaryTiers, WriteBudget, reason_of
from kvtier.store.state import Entry
from kvtier.store.tier_group import SecondaryTier
from kvtier.store.types import MEMORY_BIT
from kvtier.tiers.base import ObjectMeta, Payload
from kvtier.tiers.checksum import Checksum
from kvtier.tiers.pieces import shards_of, writer_of

HASH_LANE = "hash"
CHECKSUM_BIT = 1
"""In ``Entry.busy``: the checksum is being computed. The other bits are those of tiers."""
CONSIDERED_PER_RUN = 256
"""Objects that ``WriteThrough`` considers for a write at a time: about two milliseconds."""
FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 5.0, 120.0
"""After a write has failed, another one is tried after the first of these, then after twice as long
each time, up to the second."""
MAX_SUBMITTED = 4
"""Calls at the executor at a time: enough to keep two threads busy."""


def hash_object(payload: Payload, shard_bytes: tuple[int, ...], checksum: Checksum) -> ObjectMeta:
    """Checksums of an object's shards. Runs on an I/O thread."""
    shards = zip(shards_of(payload, shard_bytes), shard_bytes, strict=True)
    digests = tuple(checksum.digest(shard[:size]) for shard, size in shards)
    return ObjectMeta(shard_bytes, checksum.kind, digests)


class _Backlog:
    """Objects in RAM that wait for a write or a checksum, oldest first.

    It pins nothing: an object that is evicted meanwhile is lost for the tier, which ``on_lost``
    counts. Holds at most twice as many objects as RAM.
    """

    def __init__(self, resident: ResidentObjects, on_lost: Callable[[], None]) -> None:
        self._resident = resident
        self._on_lost = on_lost
        self._waiting: OrderedDict[Entry, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._waiting

    def _drop_evicted(self, entry: Entry) -> bool:
        if self._resident.get(entry.namespace, entry.key) is entry and not entry.evicting:
            return False
        del self._waiting[entry]
        self._on_lost()
        return True

    def add(self, entry: Entry) -> bool:
        """Adds an object; returns whether it was not waiting already."""
        if entry in self._waiting:
            return False
        if len(self._waiting) > 2 * len(self._resident):
            for each in list(self._waiting):
                self._drop_evicted(each)
        self._waiting[entry] = None
        return True

    def first(self) -> Entry | None:
        """The oldest object that still lies in RAM."""
        while self._waiting:
            entry = next(iter(self._waiting))
            if not self._drop_evicted(entry):
                return entry
        return None

    def clear(self) -> None:
        """Removes everything, because it is written elsewhere."""
        self._waiting.clear()

    def move_to(self, other: _Backlog) -> None:
        """Moves everything behind what waits in the other one."""
        for entry in self._waiting:
            other.add(entry)
        self._waiting.clear()

    def remove(self, entry: Entry) -> None:
        """Removes an object that is written or hashed now."""
        self._waiting.pop(entry, None)


class WriteThrough:
    """Writes in progress. ``max_pinned_bytes`` limits what writes to one tier may pin."""

    def __init__(
        self,
        context: StoreContext,
        resident: ResidentObjects,
        tiers: SecondaryTiers,
        max_pinned_bytes: int,
    ) -> None:
        self._context = context
        self._resident = resident
        self._tiers = tiers
        self._max_pinned_bytes = max_pinned_bytes
        self._writes: dict[tuple[SecondaryTier, Entry], IoCall] = {}
        self._backlogs = {
            secondary: _Backlog(
                resident, partial(context.count, "tier_writes_dropped", secondary.name, "evicted")
            )
            for secondary in tiers.all
        }
        self._budgets = {group.index: WriteBudget(context.clock) for group in tiers.groups}
        self._budget_timers: dict[int, Timer] = {}
        """By tier: when the budget allows the next write of the backlog."""
        self._failed = {secondary: _Backlog(resident, lambda: None) for secondary in tiers.all}
        """Objects whose writes have failed, which was counted."""
        self._retry_timers: dict[SecondaryTier, Timer] = {}
        """Of tiers with failed writes."""
        self._retry_seconds: dict[SecondaryTier, float] = {}
        """The next wait of tiers whose last writes have failed."""
        self._trials: dict[SecondaryTier, Entry] = {}
        """The failed write that is tried again before all others."""
        self._late: dict[IoCall, SecondaryTier] = {}
        """Writes that hang."""
        self._late_timers: dict[SecondaryTier, Timer] = {}
        """Of tiers with writes: when the next look for late ones is due."""
        self._drawing: dict[SecondaryTier, None] = {}
        """Tiers whose backlog has more to be considered."""
        self._missing: Iterator[Entry] | None = None
        """Objects that were stored while some tier was not available."""
        self._on_passed: Callable[[Entry], None] | None = None
        tiers.on_suspend(self._suspend_tier)
        tiers.on_available(self._write_missing)

    def on_passed(self, handler: Callable[[Entry], None]) -> None:
        """Registers what removes an object that was in RAM only to be written elsewhere."""
        self._on_passed = handler

    def __len__(self) -> int:
        """Writes that run or wait, in the backlog as well. Not those that have failed, whatever is
        tried later: they are counted, and no shutdown waits for them."""
        return len(self._writes) + sum(map(len, self._backlogs.values()))

    @property
    def busy(self) -> bool:
        """Whether ``run`` has something to do."""
        return self._missing is not None or bool(self._drawing)

    def run(self) -> None:
        """Considers the next objects of backlogs, and of those that were stored while some tier was
        not available."""
        if self._drawing:
            secondary = next(iter(self._drawing))
            del self._drawing[secondary]
            self._draw(secondary)
            return
        if self._missing is None:
            return
        part = list(islice(self._missing, CONSIDERED_PER_RUN))
        for entry in part:
            if (
                self._resident.get(entry.namespace, entry.key) is entry
                and entry.meta is not None
                and not entry.evicting
            ):
                self.maybe_write(entry)
        if len(part) < CONSIDERED_PER_RUN:
            self._missing = None

    def configured(self) -> None:
        """Live settings have changed: what waits for a budget may be written at once, and so may
        what another policy kept out, or what has failed."""
        for secondary in self._tiers.all:
            self._stop_timer(secondary)
            self._forget_failed(secondary)
            self._drawing[secondary] = None
        self._write_missing()

    def maybe_write(self, entry: Entry) -> None:
        """Writes an object with checksums to every tier whose policy asks for it and that does not
        have it."""
        if entry.meta is None or not entry.persistent:
            return
        if entry.uses > 1:
            for each in admit_predecessors(self._resident, entry):
                self._write_where_missing(each)
        self._write_where_missing(entry)

    def _write_where_missing(self, entry: Entry) -> None:
        meta = entry.meta
        if meta is None or self._resident.is_expired(entry):
            return
        for group in self._tiers.groups:
            policy = group.settings.store_policy
            if entry.tiers and not entry.tiers & group.bit:
                self._context.count("tier_writes_skipped", group.name, "hint_tiers")
                continue
            if entry.expires_at and not group.tier.capabilities.expires:
                self._context.count("tier_writes_skipped", group.name, "expires")
                continue
            if (
                entry.busy & group.bit
                or policy is StorePolicy.NONE
                or group.tier.contains(entry.ref)
            ):
                continue
            if policy is StorePolicy.REUSED and entry.uses < 2:
                self._context.count("tier_writes_skipped", group.name, "not_reused")
                continue
            self._write(self._tiers.target(group, entry.ref), entry, meta)

    def pass_on(self, entry: Entry) -> None:
        """Removes an object from RAM that nothing uses, if no request lets it stay there and no
        write of it runs, waits, or is tried again."""
        if not entry.tiers or entry.tiers & MEMORY_BIT or entry.busy or entry.pins:
            return
        if entry.evicting or entry.pinned_until or entry.retained_until or self._context.fenced:
            return
        if self._resident.get(entry.namespace, entry.key) is not entry:
            return
        waiting = (*self._backlogs.values(), *self._failed.values())
        if self._on_passed is not None and not any(entry in backlog for backlog in waiting):
            self._context.count("objects_passed_on")
            self._on_passed(entry)

    def _write_missing(self) -> None:
        """A tier has become available. Writes what was stored before, which would otherwise wait
        for its next use."""
        self._missing = iter(list(self._resident.entries()))
        self.run()

    def _write(self, secondary: SecondaryTier, entry: Entry, meta: ObjectMeta) -> None:
        context, size = self._context, meta.payload_bytes
        if (secondary, entry) in self._writes:
            # It hangs there.
            return
        refused = self._refused(secondary, size)
        waits = refused == "write_budget" or (
            # Some write is in progress, whose end draws from the backlog.
            refused == "too_many_pending" and self._pending_bytes(secondary)
        )
        if waits:
            if self._backlogs[secondary].add(entry):
                context.count("tier_writes_postponed", secondary.name, refused)
            self._await_budget(secondary)
            return
        if refused:
            context.count("tier_writes_dropped", secondary.name, refused)
            return
        secondary.pending_store_bytes += size
        entry.busy |= secondary.bit
        self._resident.pin(entry)
        if entry.previous or entry.tenant or entry.expires_at or entry.tiers or meta.limited:
            meta = replace(
                meta,
                previous=entry.previous or meta.previous,
                tenant=entry.tenant,
                expires_at=entry.expires_at,
                limited=bool(entry.tiers),
            )
        payload = context.payload(entry.slot, size)
        work = partial(writer_of(secondary.tier, payload), entry.ref, payload, meta)
        call = IoCall(context.clock, work, partial(self._written, secondary, entry, size))
        self._writes[secondary, entry] = call
        call.submit(context.io, f"write:{secondary.lane}")
        if secondary not in self._late_timers:
            self._look_later(secondary)

    def _look_later(self, secondary: SecondaryTier) -> None:
        self._late_timers[secondary] = self._context.timers.at(
            self._context.clock() + secondary.late_write_seconds,
            partial(self._look_for_late, secondary),
        )

    def _look_for_late(self, secondary: SecondaryTier) -> None:
        """Charges a tier with writes that hang."""
        del self._late_timers[secondary]
        now, late, running, waiting = self._context.clock(), 0, 0, False
        for (member, _), call in self._writes.items():
            if member is not secondary:
                continue
            if call.started_at is None:
                # Calls start in their order.
                waiting = True
                break
            running += 1
            if call.seconds(now) >= secondary.late_write_seconds and call not in self._late:
                self._late[call] = secondary
                late += 1
        if running or waiting:
            self._look_later(secondary)
        if late:
            total = secondary.late_writes + late
            stuck = total == running and (waiting or bool(len(self._backlogs[secondary])))
            self._tiers.note_late_writes(secondary, late, stuck=stuck)

    def _refused(self, secondary: SecondaryTier, size: int) -> str:
        """Why the tier takes no further write of ``size`` bytes; empty, with the budget charged, if
        it does."""
        if not secondary.usable:
            return "breaker" if secondary.opened else "not_open"
        if not self._has_room(secondary, size):
            return "too_many_pending"
        rate = secondary.settings.max_write_bytes_per_second
        return "" if self._budgets[secondary.index].take(size, rate) else "write_budget"

    def _has_room(self, secondary: SecondaryTier, size: int) -> bool:
        bound = min(secondary.settings.max_pending_store_bytes, self._max_pinned_bytes)
        members = self._tiers.group_of(secondary).members
        # A volume that hangs must not use what the others may have pending.
        if secondary.pending_store_bytes + size <= bound // len(members):
            return True
        # An object may be larger than a volume's part.
        return not secondary.pending_store_bytes and self._pending_bytes(secondary) + size <= bound

    def _pending_bytes(self, secondary: SecondaryTier) -> int:
        """Of all volumes of the tier."""
        members = self._tiers.group_of(secondary).members
        return sum(member.pending_store_bytes for member in members)

    def _written(
        self,
        secondary: SecondaryTier,
        entry: Entry,
        size: int,
        _result: object,
        error: BaseException | None,
    ) -> None:
        if error is None:
            secondary.observe_write(self._writes[secondary, entry].seconds(self._context.clock()))
            secondary.breaker.success()
            secondary.negative.discard(entry.namespace, entry.key)
            self._context.count("tier_writes", secondary.name)
            self._context.count("tier_write_bytes", secondary.name, "", size)
        else:
            self._context.count("tier_writes_failed", secondary.name, reason_of(error))
        self._release(secondary, entry, size)
        members = self._tiers.group_of(secondary).members
        if error is None:
            for member in members:
                if self._trials.get(member) is entry:
                    self._failed[member].move_to(self._backlogs[member])
                    self._forget_failed(member)
        else:
            self._tiers.note_error(secondary, entry.namespace, entry.key, error)
            # What exceeds a tenant's share fails again, and a tier that is suspended gets all that
            # it lacks when it is available.
            if secondary.usable and not isinstance(error, TierQuotaError):
                self._retry_later(secondary, entry)
        for member in members:
            self._draw(member)
        self.pass_on(entry)

    def _retry_later(self, secondary: SecondaryTier, entry: Entry) -> None:
        """A write has failed. Another one will be tried later."""
        if not entry.evicting and self._resident.get(entry.namespace, entry.key) is entry:
            self._failed[secondary].add(entry)
            self._start_retry_timer(secondary)

    def _start_retry_timer(self, secondary: SecondaryTier) -> None:
        if secondary in self._retry_timers:
            return
        seconds = self._retry_seconds.get(secondary, FIRST_RETRY_SECONDS)
        self._retry_seconds[secondary] = min(2 * seconds, LONGEST_RETRY_SECONDS)
        self._retry_timers[secondary] = self._context.timers.at(
            self._context.clock() + seconds, partial(self._retry, secondary)
        )

    def _retry(self, secondary: SecondaryTier) -> None:
        """Tries one of the writes that have failed, the others if it succeeds."""
        del self._retry_timers[secondary]
        failed = self._failed[secondary]
        for _ in range(CONSIDERED_PER_RUN):
            entry = failed.first()
            if entry is None:
                self._retry_seconds.pop(secondary, None)
                return
            failed.remove(entry)
            self._trials[secondary] = entry
            self.maybe_write(entry)
            if entry.busy & secondary.bit:
                break
        if len(failed):
            self._start_retry_timer(secondary)

    def _forget_failed(self, secondary: SecondaryTier) -> None:
        """The tier takes writes again, or what failed is written elsewhere."""
        self._failed[secondary].clear()
        self._trials.pop(secondary, None)
        self._retry_seconds.pop(secondary, None)
        timer = self._retry_timers.pop(secondary, None)
        if timer is not None:
            timer.cancel()

    def _draw(self, secondary: SecondaryTier) -> None:
        """Starts writes of the backlog for which the tier has room again."""
        backlog = self._backlogs[secondary]
        for _ in range(CONSIDERED_PER_RUN):
            entry = backlog.first() if secondary.usable else None
            if entry is None:
                return
            size = 0 if entry.meta is None else entry.meta.payload_bytes
            if self._pending_bytes(secondary) and not self._has_room(secondary, size):
                return
            if self._await_budget(secondary):
                return
            backlog.remove(entry)
            self.maybe_write(entry)
        self._drawing[secondary] = None

    def _await_budget(self, secondary: SecondaryTier) -> bool:
        """Draws from the backlog again when the tier's budget allows a write; False if it does."""
        rate = secondary.settings.max_write_bytes_per_second
        seconds = self._budgets[secondary.index].seconds_until_free(rate)
        if seconds <= 0:
            return False
        if secondary.index not in self._budget_timers:

            def draw() -> None:
                self._budget_timers.pop(secondary.index, None)
                for member in self._tiers.group_of(secondary).members:
                    self._draw(member)

            self._budget_timers[secondary.index] = self._context.timers.at(
                self._context.clock() + seconds, draw
            )
        return True

    def _stop_timer(self, secondary: SecondaryTier) -> None:
        timer = self._budget_timers.pop(secondary.index, None)
        if timer is not None:
            timer.cancel()

    def _release(self, secondary: SecondaryTier, entry: Entry, size: int) -> None:
        call = self._writes.pop((secondary, entry))
        if self._late.pop(call, None) is not None:
            secondary.late_writes -= 1
        secondary.pending_store_bytes -= size
        members = self._tiers.group_of(secondary).members
        if not any((member, entry) in self._writes for member in members):
            entry.busy &= ~secondary.bit
        self._resident.unpin(entry)

    def _suspend_tier(self, secondary: SecondaryTier) -> None:
        """Drops the writes to this tier that have not started. Other volumes of the tier take what
        lies in RAM."""
        for (member, entry), call in list(self._writes.items()):
            if member is secondary and entry.meta is not None and call.revoke():
                self._context.count("tier_writes_dropped", secondary.name, "breaker")
                self._budgets[secondary.index].give_back(entry.meta.payload_bytes)
                self._release(secondary, entry, entry.meta.payload_bytes)
        self._forget_failed(secondary)
        if self._tiers.group_of(secondary).usable:
            for member, entry in self._writes:
                if member is secondary:
                    # It may never return. Its slot stays pinned, and another volume may have it.
                    entry.busy &= ~secondary.bit
            self._backlogs[secondary].clear()
            self._write_missing()


class Checksummer:
    """Objects that wait for a checksum. ``max_pending_bytes`` limits what they may pin."""

    def __init__(
        self,
        context: StoreContext,
        resident: ResidentObjects,
        writes: WriteThrough,
        max_pending_bytes: int,
    ) -> None:
        self._context = context
        self._resident = resident
        self._writes = writes
        self._max_pending_bytes = max_pending_bytes
        self._queue: deque[Entry] = deque()
        self._backlog = _Backlog(
            resident, partial(context.count, "checksums_dropped", "", "evicted")
        )
        self._submitted = 0
        self.pending_bytes = 0

    def __len__(self) -> int:
        """Objects that wait, in the backlog as well, or are being hashed."""
        return len(self._queue) + self._submitted + len(self._backlog)

    def persist(self, entry: Entry) -> None:
        """Brings an object that was stored or used to the secondary tiers: computes its checksum,
        if it has none, and passes it to ``WriteThrough``. If too many bytes are pending, it waits
        in RAM without being pinned."""
        if not entry.persistent:
            return
        if entry.meta is not None:
            self._writes.maybe_write(entry)
            return
        if entry.unverified is not None or entry.busy & CHECKSUM_BIT:
            return
        size = entry.slot.segment.kind.slot_bytes
        if self.pending_bytes + size > self._max_pending_bytes:
            if self._backlog.add(entry):
                self._context.count("checksums_postponed")
            return
        self.pending_bytes += size
        entry.busy |= CHECKSUM_BIT
        self._resident.pin(entry)
        self._queue.append(entry)
        self.run()

    def run(self) -> None:
        """Submits queued objects, unless the store is fenced."""
        context = self._context
        while self._queue and self._submitted < MAX_SUBMITTED and not context.fenced:
            entry = self._queue.popleft()
            self._submitted += 1
            payload = context.payload(entry.slot, entry.slot_bytes)
            work = partial(hash_object, payload, entry.shard_bytes, context.checksums)
            IoCall(context.clock, work, partial(self._hashed, entry)).submit(context.io, HASH_LANE)

    def _hashed(self, entry: Entry, result: object, error: BaseException | None) -> None:
        self._submitted -= 1
        self.pending_bytes -= entry.slot.segment.kind.slot_bytes
        entry.busy &= ~CHECKSUM_BIT
        if isinstance(result, ObjectMeta) and error is None:
            entry.meta = result
            self._context.count("objects_checksummed")
            self._context.record(entry)
            self._writes.maybe_write(entry)
        else:
            self._context.count("checksums_failed")
            if error is not None:
                self._context.unexpected.note("checksumming", error)
        self._resident.unpin(entry)
        self._writes.pass_on(entry)
        waiting = self._backlog.first()
        if waiting is not None:
            self._backlog.remove(waiting)
            self.persist(waiting)
        self.run()
