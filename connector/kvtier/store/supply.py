"""Keeps everybody supplied with free slots ahead of need: schedulers with credits, reads with room, by evicting in
time.

An eviction takes up to ``LEAVING_SECONDS``, because the schedulers that may name the key are told first (DATAPATH 1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count

from kvtier.store.contract import CreditsGranted, KeysLeaving, PresenceChanged
from kvtier.store.engines import Engines
from kvtier.store.memory import Entry, MemoryTable
from kvtier.store.presence import MEMORY_BIT, PresenceIndex
from kvtier.store.reads import Read
from kvtier.store.shared import Shared
from kvtier.store.slots import Segment, Slot, SlotClass, SlotPool, SlotState
from kvtier.store.timers import Timer

LEAVING_SECONDS = 0.1
MAX_CREDITS = 64
"""Free slots that one engine and group may hold: more than a step of chunked prefill completes."""
CREDIT_SHARE = 4
"""At most a quarter of the pool is out as credits."""
MAX_RESERVE = 16
RESERVE_SHARE = 16
"""Free slots kept back for reads: a sixteenth of the class, at most 16."""


class Supply:
    """Free slots: who gets them, and what has to go for them. Owner's thread only."""

    def __init__(
        self, shared: Shared, pool: SlotPool, table: MemoryTable, index: PresenceIndex, engines: Engines
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

    def spare(self, kind: SlotClass) -> int:
        """How many more reads of this class could get a slot, if need be by evicting."""
        waiting = self._waiting.get(kind.slot_bytes)
        return (
            self._pool.available(kind) + kind.leaving + self._table.evictable(kind) - (len(waiting) if waiting else 0)
        )

    def wait(self, read: Read) -> None:
        """The read gets the next free slot of its class."""
        self._waiting.setdefault(read.kind.slot_bytes, deque()).append(read)

    def stop_waiting(self, read: Read) -> None:
        """The read wants no slot any more."""
        self._waiting[read.kind.slot_bytes].remove(read)

    def run(self) -> None:
        """Hands out what is free, and evicts what will be needed."""
        kinds: dict[int, SlotClass] = {}
        pairs = 0
        for engine in self._engines.open.values():
            for kind in engine.kinds:
                kinds[kind.slot_bytes] = kind
                pairs += 1
        for size, waiting in self._waiting.items():
            if waiting:
                kinds.setdefault(size, self._pool.classes[size])
        for kind in kinds.values():
            self._serve(kind)
        wanted = self._grant(pairs)
        for kind in kinds.values():
            missing = self._missing(kind, wanted)
            if missing > 0 and self._reclaim(kind, kinds):
                missing = self._missing(kind, wanted)
            if missing > 0:
                self._evict(kind, missing)

    def _missing(self, kind: SlotClass, wanted: dict[int, int]) -> int:
        waiting = self._waiting.get(kind.slot_bytes)
        needed = wanted.get(kind.slot_bytes, 0) + self._reserve(kind) + (len(waiting) if waiting else 0)
        return needed - self._pool.available(kind) - kind.leaving

    def _reserve(self, kind: SlotClass) -> int:
        return min(MAX_RESERVE, self._pool.pool_bytes // kind.slot_bytes // RESERVE_SHARE)

    def _serve(self, kind: SlotClass) -> None:
        waiting = self._waiting.get(kind.slot_bytes)
        while waiting:
            slot = self._pool.take(kind, SlotState.READING)
            if slot is None:
                return
            read = waiting.popleft()
            if self.begin is not None:
                self.begin(read, slot)

    def _grant(self, pairs: int) -> dict[int, int]:
        """Tops up credits; returns how many are still missing per slot size."""
        missing: dict[int, int] = {}
        for engine in self._engines.open.values():
            for group, kind in enumerate(engine.kinds):
                capacity = self._pool.pool_bytes // kind.slot_bytes
                target = min(capacity, max(1, min(MAX_CREDITS, capacity // CREDIT_SHARE // pairs)))
                held = engine.granted[group]
                short = target - len(held)
                if short <= 0:
                    continue
                slots = []
                for _ in range(min(short, self._pool.available(kind) - self._reserve(kind))):
                    slot = self._pool.take(kind, SlotState.GRANTED, engine.name, group)
                    if slot is None:
                        break
                    held[slot.offset] = slot
                    slots.append(slot.offset)
                if slots:
                    self._shared.emit(CreditsGranted(engine.name, group, tuple(slots)))
                missing[kind.slot_bytes] = missing.get(kind.slot_bytes, 0) + short - len(slots)
        return missing

    def _evict(self, kind: SlotClass, number: int) -> int:
        policy = self._table.policy(kind)
        victims: list[Entry] = []
        while len(victims) < number:
            victim = policy.victim()
            if victim is None:
                break
            victims.append(victim)
        self._announce(victims)
        return len(victims)

    def _reclaim(self, kind: SlotClass, used: dict[int, SlotClass]) -> bool:
        """Takes room from classes that no open engine uses, and from those above an equal share while this one is
        below; before the class evicts its own, for else it would never grow. One choice at a time; True if room is free
        at once."""
        draining = self._pool.draining()
        if draining:
            self._empty(draining)
            return False
        share = self._pool.pool_bytes // len(used)
        below = kind.bytes + kind.slot_bytes <= share
        has_none = not kind.segments

        def may_take(other: SlotClass) -> bool:
            return has_none or other.slot_bytes not in used or (below and other.bytes > share)

        def may_move(slot: Slot) -> bool:
            return slot.entry is not None and slot.entry.pins == 0

        chosen = self._pool.drain(kind, may_move, may_take)
        if not chosen:
            return False
        self._shared.count("segments_reclaimed", "", "", len(chosen))
        self._empty(chosen)
        return not self._pool.draining()

    def _empty(self, segments: list[Segment]) -> None:
        """Sends away what is in segments that go back to the pool, objects that came to be held meanwhile excepted."""
        slots = [slot for segment in segments for slot in segment.slots]
        self._announce([s.entry for s in slots if s.entry is not None and not s.entry.pins and not s.entry.leaving])

    def _announce(self, victims: list[Entry]) -> None:
        """Tells the schedulers that these objects, held by nobody, are leaving; at once gone where there is none to
        tell."""
        by_namespace: dict[str, list[Entry]] = {}
        for entry in victims:
            by_namespace.setdefault(entry.namespace, []).append(entry)
        for namespace, entries in by_namespace.items():
            token = next(self._tokens)
            for entry in entries:
                self._table.leave(entry, token)
                self._pool.move(entry.slot, SlotState.LEAVING)
            if self._index.is_open(namespace):
                timer = self._shared.timers.at(
                    self._shared.clock() + LEAVING_SECONDS, partial(self._gone, token, "unanswered")
                )
                self._leaving[token] = (entries, timer)
                self._shared.emit(KeysLeaving(namespace, token, tuple(entry.key for entry in entries)))
            else:
                self._remove(token, entries)

    def leaving_keys(self, namespace: str) -> set[bytes]:
        """Keys of a namespace that are announced as leaving."""
        announced = ((token, entry) for token, (entries, _) in self._leaving.items() for entry in entries)
        return {entry.key for token, entry in announced if entry.leaving == token and entry.namespace == namespace}

    def left(self, token: int) -> None:
        """Every scheduler of the namespace knows that these keys are leaving."""
        if token in self._leaving:
            self._leaving[token][1].cancel()
            self._gone(token, "answered")
        else:
            self._shared.count("late_left")

    def _gone(self, token: int, reason: str) -> None:
        entries, _ = self._leaving.pop(token)
        self._shared.count("leaving_ended", "", reason)
        self._remove(token, entries)

    def _remove(self, token: int, entries: list[Entry]) -> None:
        for entry in entries:
            if entry.leaving == token:
                self._shared.count("evictions")
                self._table.remove(entry)
                self._pool.release(entry.slot)
                self._index.change(entry.namespace, entry.key, MEMORY_BIT, False)

    def rescue(self, entry: Entry) -> None:
        """A leaving object is wanted after all: it stays, and is announced again to those who were told to forget
        it."""
        self._shared.count("evictions_taken_back")
        self._table.stay(entry)
        self._pool.move(entry.slot, SlotState.COMMITTED)
        if self._index.is_open(entry.namespace):
            self._shared.emit(PresenceChanged(entry.namespace, entry.key, MEMORY_BIT, True))
