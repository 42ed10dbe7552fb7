"""Allocates free slots ahead of demand: credits for schedulers, slots for reads, by evicting in
time.

An eviction takes up to ``EVICTION_ACK_SECONDS``: the schedulers that may name the key are notified
first, and the slot is free once all of them have acknowledged. Only the store's thread uses this
module.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import count

from kvtier.store.context import StoreContext, Timer
from kvtier.store.engines import EngineRegistry
from kvtier.store.memory_tier import ResidentObjects
from kvtier.store.presence import PresenceIndex
from kvtier.store.slot_pool import SEGMENTS_PER_POOL, SlotPool
from kvtier.store.state import Entry, Slot, SlotClass, SlotRequest, SlotState
from kvtier.store.types import CreditsGranted, KeysEvicting
from kvtier.tenants import UNLIMITED

EVICTION_ACK_SECONDS = 0.1
MAX_CREDITS = 64
"""Free slots that one engine and group may hold: more than one step of chunked prefill completes.
"""
CREDIT_SHARE = 4
"""Credits take at most a quarter of the pool, apart from the one that each engine and group has at
least."""
URGENT_CREDITS = 16
"""What an engine without credits gets even if queued requests wait for the objects that are evicted
for it."""
MAX_ROUNDS = 64
"""Rounds per ``run``. The next ``run`` continues."""
MAX_RESERVE = 16
ENFORCED_PER_RUN = 256
"""Objects of tenants above their share that one ``run`` evicts. The next one continues."""
RESERVE_SHARE = 16
"""Free slots that credits leave to reads: a sixteenth of the class's share, at most
``MAX_RESERVE``."""


class SlotAllocator:
    """Distributes free slots and decides which objects are evicted for them."""

    def __init__(
        self,
        context: StoreContext,
        pool: SlotPool,
        resident: ResidentObjects,
        index: PresenceIndex,
        engines: EngineRegistry,
    ) -> None:
        self._context = context
        self._pool = pool
        self._resident = resident
        self._index = index
        self._engines = engines
        self._requests: dict[int, deque[SlotRequest]] = {}
        self._notices: dict[int, tuple[list[Entry], Timer]] = {}
        self._tokens = count(1)
        self._claimant: SlotClass | None = None
        self._unchecked: dict[bytes, None] = {}
        """Tenants above their share that may have something to evict."""
        self.busy = False
        """Whether the next ``run`` has something to do at once."""

    # Slots for reads.

    @property
    def pool(self) -> SlotPool:
        """The slots that are handed out."""
        return self._pool

    def spare(self, kind: SlotClass) -> int:
        """How many more reads of this class could get a slot, evictions included."""
        requests = self._requests.get(kind.slot_bytes)
        evictable = len(self._resident.order(kind))
        return (
            self._pool.available(kind)
            + kind.evicting
            + evictable
            - (len(requests) if requests else 0)
        )

    def rank_of_next(self, kind: SlotClass) -> int:
        """The place in the queue of the request whose prefix one more read of this class would
        evict; 0 if it would evict none that is awaited."""
        requests = self._requests.get(kind.slot_bytes)
        free = self._pool.available(kind) + kind.evicting - (len(requests) if requests else 0)
        return 0 if free > 0 else self._resident.order(kind).rank_of_next()

    @property
    def has_requests(self) -> bool:
        """Whether a read waits for a slot."""
        return any(self._requests.values())

    def request(self, request: SlotRequest) -> None:
        """Queues a request for the next free slot of its class."""
        self._requests.setdefault(request.kind.slot_bytes, deque()).append(request)

    def withdraw(self, request: SlotRequest) -> None:
        """Removes a request that has not been served."""
        self._requests[request.kind.slot_bytes].remove(request)

    # Tenants.

    def tenant_room(self, tenant: bytes) -> int:
        """Bytes that a tenant may add, if what it has and does not use is evicted."""
        room = self._resident.accounts.room(tenant)
        if room == UNLIMITED:
            return room
        orders = self._resident.orders()
        return room + sum(size * order.count_of(tenant)[1] for size, order in orders)

    def make_tenant_room(self, tenant: bytes, size_bytes: int, previous: tuple[str, bytes]) -> bool:
        """Evicts objects of the tenant, so that it may add an object of this size; False if it
        cannot. ``previous``: what the object follows, which is not evicted for it."""
        accounts = self._resident.accounts
        if accounts.room(tenant) >= size_bytes:
            return True
        if self._context.fenced or size_bytes > accounts.limit_bytes:
            return False
        while accounts.room(tenant) < size_bytes:
            victim = self._next_of(tenant)
            if victim is None or (victim.namespace, victim.key) == previous:
                return False
            self._context.count("tenant_evictions")
            self._announce([victim])
        return True

    def _next_of(self, tenant: bytes) -> Entry | None:
        """The object of a tenant to evict next: of the groups of a prefix, one of which it has the
        most."""
        found: Entry | None = None
        most = 0
        for _, order in self._resident.orders():
            count, free = order.count_of(tenant)
            if free and count > most:
                victim = order.next_of(tenant)
                if victim is not None:
                    found, most = victim, count
        return found

    def _enforce_shares(self, at_most: int) -> int:
        """Evicts what tenants have above their share: it was lowered, or reads have brought it.
        Returns how many objects."""
        over, number = self._resident.accounts.over, 0
        while self._unchecked and number < at_most:
            tenant = next(iter(self._unchecked))
            del self._unchecked[tenant]
            while tenant in over and number < at_most:
                victim = self._next_of(tenant)
                if victim is None:
                    break
                number += 1
                self._context.count("tenant_evictions")
                self._announce([victim])
        return number

    def _note_unprotected(self, victim: Entry) -> None:
        """An eviction has started: the object before its victim may belong to another tenant, which
        is above its share and could not evict it until then."""
        over = self._resident.accounts.over
        if over and victim.previous:
            before = self._resident.get(victim.namespace, victim.previous)
            if before is not None and before.account in over:
                self._unchecked[before.account] = None

    def expire(self, entry: Entry) -> None:
        """Removes an object that nothing uses and that must not stay."""
        self._announce([entry])

    # Distribution.

    def run(self) -> None:
        """Hands out free slots and evicts for expected demand. Repeats while that frees slots at
        once, or evicts what protected objects of tenants above their shares."""
        self._unchecked = dict.fromkeys(self._resident.accounts.over)
        left = ENFORCED_PER_RUN - self._enforce_shares(ENFORCED_PER_RUN)
        for _ in range(MAX_ROUNDS):
            freed = self._round()
            enforced = self._enforce_shares(left)
            left -= enforced
            if not freed and not enforced:
                break
        self.busy = left <= 0

    def _round(self) -> bool:
        self._drain()
        shares, target = self._shares()
        # The class with the least of its share comes first.
        kinds = sorted(
            (self._pool.classes[size] for size in shares),
            key=lambda k: k.bytes / max(1, shares[k.slot_bytes]),
        )
        for kind in kinds:
            self._serve(kind)
        reserves = {
            size: min(MAX_RESERVE, share // size // RESERVE_SHARE) for size, share in shares.items()
        }
        ungranted = {
            kind.slot_bytes: self._grant(kind, target, reserves[kind.slot_bytes]) for kind in kinds
        }
        freed = False
        for kind in kinds:
            needed = ungranted[kind.slot_bytes] + reserves[kind.slot_bytes]
            missing = self._missing(kind, needed)
            if missing > 0:
                freed = self._reclaim(kind, shares) or freed
                missing = self._missing(kind, needed)
            if missing > 0:
                freed = self._evict(kind, missing) or freed
        return freed

    def _shares(self) -> tuple[dict[int, int], int]:
        """Fair share of the pool in bytes per slot size in use, and the number of credits per
        engine and group.

        A fair share has room for equally many objects of each group of each engine, because a
        prefix needs one of each.
        """
        users: dict[int, int] = {}
        for engine in self._engines.open.values():
            for geometry in engine.geometries:
                size = geometry.kind.slot_bytes
                users[size] = users.get(size, 0) + 1
        for size, requests in self._requests.items():
            if requests:
                users.setdefault(size, 1)
        one_of_each = max(1, sum(size * number for size, number in users.items()))
        shares = {
            size: self._pool.pool_bytes * size * number // one_of_each
            for size, number in users.items()
        }
        return shares, max(
            1, min(MAX_CREDITS, self._pool.pool_bytes // CREDIT_SHARE // one_of_each)
        )

    def _missing(self, kind: SlotClass, needed: int) -> int:
        requests = self._requests.get(kind.slot_bytes)
        coming = (
            sum(s.bytes for s in self._pool.draining()) // kind.slot_bytes
            if self._claimant is kind
            else 0
        )
        expected = self._pool.available(kind) + kind.evicting + coming
        return needed + (len(requests) if requests else 0) - expected

    def _serve(self, kind: SlotClass) -> None:
        requests = self._requests.get(kind.slot_bytes)
        while requests:
            slot = self._pool.take(kind, SlotState.READING)
            if slot is None:
                return
            requests.popleft().receive(slot)

    def _grant(self, kind: SlotClass, target: int, reserve: int) -> int:
        """Tops up the credits of one class; returns how many are still missing."""
        missing = 0
        if kind.row_bytes > self._pool.layout.part_bytes:
            return missing
        for engine in self._engines.open.values():
            for group, held in enumerate(engine.granted):
                short = target - len(held)
                if engine.geometries[group].kind is not kind or short <= 0:
                    continue
                slots = []
                spare = self._pool.available(kind) - reserve
                # An engine without any credit gets one even at the expense of reads.
                for _ in range(min(short, max(spare, 0 if held else 1))):
                    slot = self._pool.take(kind, SlotState.GRANTED, engine.name, group)
                    if slot is None:
                        break
                    held[slot.offset] = slot
                    slots.append(slot.offset)
                if slots:
                    self._context.emit(CreditsGranted(engine.name, group, tuple(slots)))
                missing += short - len(slots)
        return missing

    # Evictions.

    def _evict(self, kind: SlotClass, number: int) -> bool:
        """Evicts up to ``number`` objects of a class; True if that freed a slot at once."""
        order, urgent = self._resident.order(kind), self._urgent(kind)
        victims: list[Entry] = []
        while len(victims) < number:
            victim = order.victim(len(victims) < urgent)
            if victim is None:
                break
            victims.append(victim)
        return self._announce(victims)

    def _urgent(self, kind: SlotClass) -> int:
        """How many slots of the class are needed at once: reads wait for them, or an engine has no
        credit of it."""
        requests = self._requests.get(kind.slot_bytes)
        needed = len(requests) if requests else 0
        for engine in self._engines.open.values():
            for group, held in enumerate(engine.granted):
                if not held and engine.geometries[group].kind is kind:
                    needed += URGENT_CREDITS
        return needed - kind.evicting if needed else 0

    def _reclaim(self, kind: SlotClass, shares: dict[int, int]) -> bool:
        """Takes segments from classes that no open engine uses, and from classes above their share
        while this one is below its own. It precedes evictions from the class itself, which would
        otherwise never grow.

        One set of segments at a time. True if that freed space at once.
        """
        if self._pool.draining():
            return False
        # By at least one segment, so that two classes near their shares do not alternate.
        step = max(kind.slot_bytes * kind.slots_per_row, self._pool.pool_bytes // SEGMENTS_PER_POOL)
        below = kind.bytes + step <= shares[kind.slot_bytes]
        has_none = not kind.segments

        def may_take(other: SlotClass) -> bool:
            return (
                has_none
                or other.slot_bytes not in shares
                or (below and other.bytes > shares[other.slot_bytes])
            )

        def may_move(slot: Slot) -> bool:
            return slot.entry is not None and slot.entry.pins == 0

        chosen = self._pool.drain(kind, may_move, may_take)
        if not chosen:
            return False
        self._claimant = kind
        self._context.count("segments_reclaimed", "", "", len(chosen))
        return self._drain()

    def _drain(self) -> bool:
        """Continues a ``_reclaim``; True if that freed space."""
        draining = self._pool.draining()
        if not draining or self._claimant is None:
            return False
        entries = [
            slot.entry for segment in draining for slot in segment.slots if slot.entry is not None
        ]
        if any(entry.pins for entry in entries):
            # A pin may last indefinitely. The next round chooses other segments.
            self._pool.stop_draining()
            return False
        self._announce([entry for entry in entries if not entry.evicting])
        return self._pool.finish_draining(self._claimant)

    def _announce(self, victims: list[Entry]) -> bool:
        """Notifies the schedulers that these objects are being evicted. Objects of a namespace
        without schedulers are evicted at once; True if there were any."""
        by_namespace: dict[str, list[Entry]] = {}
        for entry in victims:
            by_namespace.setdefault(entry.namespace, []).append(entry)
        freed = False
        for namespace, entries in by_namespace.items():
            token = next(self._tokens)
            for entry in entries:
                self._resident.begin_eviction(entry, token)
                self._note_unprotected(entry)
            if self._index.is_open(namespace):
                until = self._context.clock() + EVICTION_ACK_SECONDS
                timer = self._context.timers.at(until, partial(self._finish, token, "timed_out"))
                self._notices[token] = (entries, timer)
                self._context.emit(
                    KeysEvicting(namespace, token, tuple(entry.key for entry in entries))
                )
            else:
                self._discard(token, entries)
                freed = True
        return freed

    def acknowledge(self, token: int) -> None:
        """Every scheduler of the namespace has dropped the keys of this notice."""
        if token in self._notices:
            self._notices[token][1].cancel()
            self._finish(token, "acknowledged")
        else:
            self._context.count("late_eviction_acks")

    def _finish(self, token: int, reason: str) -> None:
        entries, _ = self._notices.pop(token)
        self._context.count("eviction_notices_ended", "", reason)
        self._discard(token, entries)

    def _discard(self, token: int, entries: list[Entry]) -> None:
        for entry in entries:
            if entry.evicting == token:
                self._context.count("evictions")
                if entry.unverified is not None:
                    self._context.count("recovered_objects_dropped", "", "evicted")
                self._resident.discard(entry)
