"""Keeps everybody supplied with free slots ahead of need: schedulers with credits, reads with room, by evicting in
time.

An eviction takes up to ``LEAVING_SECONDS``, because the schedulers that may name the key are told first (DATAPATH 1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count

from kvtier.store.context import StoreContext, Timer
from kvtier.store.engines import EngineRegistry
from kvtier.store.memory_tier import ResidentObjects
from kvtier.store.operations import Read
from kvtier.store.presence import PresenceIndex
from kvtier.store.slot_pool import SEGMENTS_PER_POOL, SlotPool
from kvtier.store.state import Entry, Slot, SlotClass, SlotState
from kvtier.store.types import CreditsGranted, KeysEvicting, PresenceChanged

LEAVING_SECONDS = 0.1
MAX_CREDITS = 64
"""Free slots that one engine and group may hold: more than a step of chunked prefill completes."""
CREDIT_SHARE = 4
"""At most a quarter of the pool is out as credits, but for the one that each engine and group has at least."""
MAX_ROUNDS = 64
"""Per pump; what is missing then is found by the next."""
MAX_RESERVE = 16
RESERVE_SHARE = 16
"""Free slots kept back for reads: a sixteenth of the class's share, at most 16."""


class SlotAllocator:
    """Free slots: who gets them, and what has to go for them. Owner's thread only."""

    def __init__(
        self,
        shared: StoreContext,
        pool: SlotPool,
        table: ResidentObjects,
        index: PresenceIndex,
        engines: EngineRegistry,
    ) -> None:
        self.begin: Callable[[Read, Slot], None] | None = None
        """Starts a read that waited for its slot."""
        self._shared = shared
        self._pool = pool
        self._table = table
        self._index = index
        self._engines = engines
        self._waiting: dict[int, deque[Read]] = {}
        self._leaving: dict[int, tuple[list[Entry], Timer]] = {}
        self._tokens = count(1)
        self._claimant: SlotClass | None = None

    def spare(self, kind: SlotClass) -> int:
        """How many more reads of this class could get a slot, if need be by evicting."""
        waiting = self._waiting.get(kind.slot_bytes)
        return (
            self._pool.available(kind)
            + kind.leaving
            + self._table.evictable(kind)
            - (len(waiting) if waiting else 0)
        )

    def wait(self, read: Read) -> None:
        """The read gets the next free slot of its class."""
        self._waiting.setdefault(read.kind.slot_bytes, deque()).append(read)

    def stop_waiting(self, read: Read) -> None:
        """The read wants no slot any more."""
        self._waiting[read.kind.slot_bytes].remove(read)

    def run(self) -> None:
        """Hands out what is free, and evicts what will be needed; again, for as long as that frees something at once."""
        for _ in range(MAX_ROUNDS):
            if not self._round():
                return

    def _round(self) -> bool:
        self._drain()
        shares, target = self._shares()
        # Who has least of its share comes first.
        kinds = sorted(
            (self._pool.classes[size] for size in shares),
            key=lambda k: k.bytes / max(1, shares[k.slot_bytes]),
        )
        for kind in kinds:
            self._serve(kind)
        reserves = {
            size: min(MAX_RESERVE, share // size // RESERVE_SHARE) for size, share in shares.items()
        }
        wanted = {
            kind.slot_bytes: self._grant(kind, target, reserves[kind.slot_bytes]) for kind in kinds
        }
        freed = False
        for kind in kinds:
            needed = wanted[kind.slot_bytes] + reserves[kind.slot_bytes]
            missing = self._missing(kind, needed)
            if missing > 0:
                freed = self._reclaim(kind, shares) or freed
                missing = self._missing(kind, needed)
            if missing > 0:
                freed = self._evict(kind, missing) or freed
        return freed

    def _shares(self) -> tuple[dict[int, int], int]:
        """Bytes of the pool that each slot size in use may count on, and how many credits each engine and group gets.

        Fair is room for as many objects of each group of each engine: a prefix needs one of each.
        """
        users: dict[int, int] = {}
        for engine in self._engines.open.values():
            for kind in engine.kinds:
                users[kind.slot_bytes] = users.get(kind.slot_bytes, 0) + 1
        for size, waiting in self._waiting.items():
            if waiting:
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
        waiting = self._waiting.get(kind.slot_bytes)
        coming = (
            sum(s.bytes for s in self._pool.draining()) // kind.slot_bytes
            if self._claimant is kind
            else 0
        )
        supply = self._pool.available(kind) + kind.leaving + coming
        return needed + (len(waiting) if waiting else 0) - supply

    def _serve(self, kind: SlotClass) -> None:
        waiting = self._waiting.get(kind.slot_bytes)
        while waiting:
            slot = self._pool.take(kind, SlotState.READING)
            if slot is None:
                return
            read = waiting.popleft()
            if self.begin is not None:
                self.begin(read, slot)

    def _grant(self, kind: SlotClass, target: int, reserve: int) -> int:
        """Tops up the credits of one class; returns how many are still missing."""
        missing = 0
        if kind.slot_bytes > self._pool.pool_bytes:
            return missing
        for engine in self._engines.open.values():
            for group, held in enumerate(engine.granted):
                short = target - len(held)
                if engine.kinds[group] is not kind or short <= 0:
                    continue
                slots = []
                spare = self._pool.available(kind) - reserve
                for _ in range(
                    min(short, max(spare, 0 if held else 1))
                ):  # one even at the expense of reads
                    slot = self._pool.take(kind, SlotState.GRANTED, engine.name, group)
                    if slot is None:
                        break
                    held[slot.offset] = slot
                    slots.append(slot.offset)
                if slots:
                    self._shared.emit(CreditsGranted(engine.name, group, tuple(slots)))
                missing += short - len(slots)
        return missing

    def _evict(self, kind: SlotClass, number: int) -> bool:
        """Sends away so many objects of a class; True if any slot is free at once."""
        policy = self._table.policy(kind)
        victims: list[Entry] = []
        while len(victims) < number:
            victim = policy.victim()
            if victim is None:
                break
            victims.append(victim)
        return self._announce(victims)

    def _reclaim(self, kind: SlotClass, shares: dict[int, int]) -> bool:
        """Takes room from classes that no open engine uses, and from those above their share while this one is below its
        own; before the class evicts its own, for else it would never grow. One choice at a time; True if room is free at
        once."""
        if self._pool.draining():
            return False
        # By a whole segment, so that two classes near their shares do not take turns.
        step = max(kind.slot_bytes, self._pool.pool_bytes // SEGMENTS_PER_POOL)
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
        self._shared.count("segments_reclaimed", "", "", len(chosen))
        return self._drain()

    def _drain(self) -> bool:
        """Goes on with what ``_reclaim`` began; True if that has given room."""
        draining = self._pool.draining()
        if not draining or self._claimant is None:
            return False
        entries = [
            slot.entry for segment in draining for slot in segment.slots if slot.entry is not None
        ]
        if any(entry.pins for entry in entries):
            # Somebody came to need one of the objects, for nobody knows how long: another choice will do.
            self._pool.stop_draining()
            return False
        self._announce([entry for entry in entries if not entry.leaving])
        return self._pool.finish_draining(self._claimant)

    def _announce(self, victims: list[Entry]) -> bool:
        """Tells the schedulers that these objects, held by nobody, are leaving. Where there is none to tell they are gone
        at once: True."""
        by_namespace: dict[str, list[Entry]] = {}
        for entry in victims:
            by_namespace.setdefault(entry.namespace, []).append(entry)
        gone = False
        for namespace, entries in by_namespace.items():
            token = next(self._tokens)
            for entry in entries:
                self._table.leave(entry, token)
                self._pool.move(entry.slot, SlotState.EVICTING)
            if self._index.is_open(namespace):
                until = self._shared.clock() + LEAVING_SECONDS
                timer = self._shared.timers.at(until, partial(self._gone, token, "unanswered"))
                self._leaving[token] = (entries, timer)
                self._shared.emit(
                    KeysEvicting(namespace, token, tuple(entry.key for entry in entries))
                )
            else:
                self._remove(token, entries)
                gone = True
        return gone

    def leaving_keys(self, namespace: str) -> set[bytes]:
        """Keys of a namespace that are announced as leaving."""
        announced = (
            (token, entry) for token, (entries, _) in self._leaving.items() for entry in entries
        )
        return {
            entry.key
            for token, entry in announced
            if entry.leaving == token and entry.namespace == namespace
        }

    def left(self, token: int) -> None:
        """Every scheduler of the namespace knows that these keys are leaving."""
        if token in self._leaving:
            self._leaving[token][1].cancel()
            self._gone(token, "answered")
        else:
            self._shared.count("late_eviction_acks")

    def _gone(self, token: int, reason: str) -> None:
        entries, _ = self._leaving.pop(token)
        self._shared.count("eviction_notices_ended", "", reason)
        self._remove(token, entries)

    def _remove(self, token: int, entries: list[Entry]) -> None:
        for entry in entries:
            if entry.leaving == token:
                self._shared.count("evictions")
                if entry.kept is not None:
                    self._shared.count("recovered_objects_dropped", "", "evicted")
                self.discard(entry)

    def discard(self, entry: Entry) -> None:
        """Forgets an object that nobody holds and that is not leaving: its slot is free."""
        # First of all, so that no tierd ever finds it in a slot that is somebody else's.
        self._shared.erase(entry.slot.offset)
        self._table.remove(entry)
        self._pool.release(entry.slot)
        self._index.change(entry.namespace, entry.key, entry.bit, False)

    def rescue(self, entry: Entry) -> None:
        """A leaving object is wanted after all: it stays, and is announced again to those who were told to forget
        it."""
        self._shared.count("evictions_cancelled")
        self._table.stay(entry)
        self._pool.move(entry.slot, SlotState.COMMITTED)
        if self._index.is_open(entry.namespace):
            self._shared.emit(PresenceChanged(entry.namespace, entry.key, entry.bit, True))
