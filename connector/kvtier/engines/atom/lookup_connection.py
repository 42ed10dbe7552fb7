"""The scheduler side's connection in the CacheEngine path, where there is no tierd.

The scheduler side speaks tierd's protocol (``TierdSession``). This connection answers it from the
lookup server: a chunk that the server knows is announced as one in RAM, at a *slot* that is only a
number for its key, with its store as the generation. Credits bound the stores in flight.

The scheduler's thread calls everything but the callbacks of the client, which announce chunks on
the I/O thread. Announcements of both are serialized by a lock, which is never held while waiting.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path

from kvtier.lookup.client import LookupCallbacks, LookupClient
from kvtier.lookup.wire import MAX_STORE, Greeting
from kvtier.store.generations import PAGE_SHIFT, pack_location
from kvtier.store.types import MEMORY_BIT, RAM_BITS
from kvtier.tierd.wire import (
    PROTOCOL,
    Credits,
    Delta,
    Heartbeat,
    Hello,
    Message,
    Ready,
    Reserve,
    Welcome,
)

CREDITS = 64
"""Stores in flight. LMCache's memory holds each of them meanwhile."""
FIRST_HANDLE = 1 << 12
"""Numbers of keys begin beyond those of credits."""
MAX_KEYS = 200_000
MAX_MEMOS = 4096
FRESH_SECONDS = 2.0
"""How long an answer is used again for the same prompt, if it has all of its chunks."""
PARTIAL_FRESH_SECONDS = 0.25
"""The same for an answer that lacks some: they may be stored meanwhile."""
CONFIRM_SECONDS = (0.05, 0.5)
"""When the server is asked for a chunk after its store has ended."""
MAX_CONFIRMATIONS = 4096
FAILURES_BEFORE_PAUSE = 3
FIRST_PAUSE_SECONDS = 1.0
LAST_PAUSE_SECONDS = 60.0
_log = logging.getLogger("kvtier.lookup")


@dataclass(frozen=True, slots=True)
class Reserved:
    """A chunk that the ranks are asked to store. ``epoch``: of its credit."""

    key: bytes
    store: int
    slot: int
    epoch: int


class LookupConnection:
    """A ``SchedulerClient`` that is backed by a lookup server."""

    def __init__(
        self,
        directory: Path,
        greeting: Greeting,
        lookup_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ``LookupUnavailableError`` for a path that no socket can have."""
        callbacks = LookupCallbacks(self._attached, self._lost, self._answered)
        self.client = LookupClient(directory, greeting, callbacks)
        self.counts: Counter[str] = Counter()
        self._lookup_seconds = lookup_seconds
        self._clock = clock
        self._sink: Callable[[Message], None] = lambda _message: None
        self._on_lost: Callable[[str], None] = lambda _reason: None
        self._lock = threading.Lock()
        """Guards the numbers of keys and the order of announcements."""
        self._epoch = 0
        self._live = False
        self._sequence = 0
        self._next_handle = FIRST_HANDLE
        self._handles: OrderedDict[bytes, int] = OrderedDict()
        self._keys: dict[int, bytes] = {}
        # The scheduler's thread only.
        self._fresh: OrderedDict[bytes, float] = OrderedDict()
        self._fresh_epoch = 0
        self._reserved: dict[int, Reserved] = {}
        self._confirm: list[tuple[float, bytes]] = []
        """A heap of when to ask for which chunk."""
        self._failures = 0
        self._paused_until = 0.0

    def connect(
        self,
        _run_directory: Path,
        _hello: Callable[[], Hello],
        sink: Callable[[Message], None],
        on_lost: Callable[[str], None],
        _heartbeat: Callable[[], Heartbeat],
    ) -> LookupConnection:
        """The form in which ``TierdSession`` makes its client."""
        self._sink, self._on_lost = sink, on_lost
        return self

    # What TierdSession uses.

    @property
    def epoch(self) -> int:
        """Rises with each attachment to a server; 0 while there is none."""
        return self._epoch if self._live else 0

    def start(self) -> None:
        """Starts to attach, in the background."""
        self.client.start()

    def close(self, timeout_seconds: float) -> None:
        """Detaches."""
        self.client.close(timeout_seconds)

    def send(self, message: Message) -> bool:
        """Takes what the scheduler side tells tierd; False: there is no server."""
        if not self._live:
            return False
        if isinstance(message, Reserve):
            for reservation, group, key, slot, _ in message.items:
                store = 1 + secrets.randbelow(MAX_STORE)
                whole = bytes([group]) + key
                self._reserved[reservation] = Reserved(whole, store, slot, self._epoch)
        return True

    # The I/O thread.

    def _attached(self, _instance: str) -> None:
        with self._lock:
            self._epoch += 1
            self._handles.clear()
            self._keys.clear()
            self._sequence = 0
            self._live = True
            self._sink(
                Welcome(
                    protocol=PROTOCOL,
                    epoch=self._epoch,
                    session=self._epoch,
                    pool_path="",
                    pool_bytes=0,
                    tiers=("lmcache",),
                    settings="",
                )
            )
            self._sink(Ready(namespace="lmcache", slot_bytes=(0,), persistent=True))
            self._announce({}, (), snapshot=True)
            slots = tuple((number + 1) << PAGE_SHIFT for number in range(CREDITS))
            self._sink(Credits(group=0, slots=slots))

    def _lost(self, reason: str) -> None:
        with self._lock:
            self._live = False
            _log.info("lookups have ended: %s", reason)
            self._on_lost(reason)

    def _answered(self, keys: tuple[bytes, ...], stores: tuple[int, ...]) -> None:
        known = dict(zip(keys, stores, strict=False))
        with self._lock:
            if self._live:
                self._announce(
                    {key: store for key, store in known.items() if store},
                    [key for key, store in known.items() if not store],
                )

    def _announce(
        self, added: dict[bytes, int], removed: Sequence[bytes], snapshot: bool = False
    ) -> None:
        """Tells the replica. Callers hold the lock."""
        announced = []
        for key, store in added.items():
            handle = self._handles.get(key)
            if handle is None:
                handle = self._handles[key] = self._next_handle
                self._keys[handle] = key
                self._next_handle += 1
            self._handles.move_to_end(key)
            announced.append((key, MEMORY_BIT, pack_location(handle << PAGE_SHIFT, store)))
        gone = [(key, RAM_BITS) for key in removed if self._drop(key)]
        while len(self._handles) > MAX_KEYS:
            oldest = next(iter(self._handles))
            self._drop(oldest)
            gone.append((oldest, RAM_BITS))
        if announced or gone or snapshot:
            self._sequence += 1
            self._sink(
                Delta(
                    sequence=self._sequence,
                    added=tuple(announced),
                    removed=tuple(gone),
                    snapshot=snapshot,
                )
            )

    def _drop(self, key: bytes) -> bool:
        handle = self._handles.pop(key, None)
        if handle is None:
            return False
        self._keys.pop(handle, None)
        return True

    # The scheduler's thread.

    def look_up(self, keys: Sequence[bytes]) -> None:
        """Asks which of a prompt's chunks can be loaded, and waits ``lookup_seconds`` at most."""
        if not keys or not self._live or self.paused:
            return
        if self._fresh_epoch != self._epoch:
            # The replica is empty since the server was attached again.
            self._fresh.clear()
            self._fresh_epoch = self._epoch
        now, last = self._clock(), keys[-1]
        if self._fresh.get(last, 0.0) > now:
            return
        stores = self.client.ask(keys, self._lookup_seconds)
        if stores is None:
            self.counts["lookups_unanswered"] += 1
            return
        self.counts["lookups"] += 1
        whole = len(stores) == len(keys) and all(stores)
        self._fresh[last] = now + (FRESH_SECONDS if whole else PARTIAL_FRESH_SECONDS)
        self._fresh.move_to_end(last)
        while len(self._fresh) > MAX_MEMOS:
            self._fresh.popitem(last=False)

    def begin_step(self) -> None:
        """Asks for chunks whose stores have ended. Does not wait."""
        now = self._clock()
        due = []
        while self._confirm and self._confirm[0][0] <= now:
            due.append(heappop(self._confirm)[1])
        if due:
            self.client.ask_later(due, self._lookup_seconds)

    @property
    def paused(self) -> bool:
        """Whether nothing is to be loaded, because loads have failed."""
        return self._clock() < self._paused_until

    def keys_at(self, slots: Sequence[int]) -> tuple[bytes, ...]:
        """Returns the keys of announced slots, up to the first that is no longer known."""
        found = []
        with self._lock:
            for slot in slots:
                key = self._keys.get(slot >> PAGE_SHIFT)
                if key is None:
                    break
                found.append(key)
        return tuple(found)

    def reserved(self, reservation: int) -> Reserved | None:
        """What a store is about; None if it is unknown."""
        return self._reserved.get(reservation)

    def store_ended(self, reservation: int) -> None:
        """Every rank has reported a store, whether it is there or not: returns its credit."""
        found = self._reserved.pop(reservation, None)
        if found is None:
            return
        with self._lock:
            if self._live and found.epoch == self._epoch:
                self._sink(Credits(group=0, slots=(found.slot,)))
        now = self._clock()
        for after in CONFIRM_SECONDS if len(self._confirm) < MAX_CONFIRMATIONS else ():
            heappush(self._confirm, (now + after, found.key))

    def load_ended(self, keys: Sequence[bytes], succeeded: bool) -> None:
        """A load has ended. What a failed one did not bring is looked up again before it is used.

        After some failures in a row nothing is loaded for a while: LMCache hangs, or loses objects.
        """
        if succeeded:
            self._failures = 0
            return
        self._fresh.clear()
        with self._lock:
            if self._live:
                self._announce({}, keys)
        self._failures += 1
        over = self._failures - FAILURES_BEFORE_PAUSE
        if over >= 0 and not self.paused:
            pause = min(FIRST_PAUSE_SECONDS * 2 ** min(over, 10), LAST_PAUSE_SECONDS)
            self._paused_until = self._clock() + pause
            self.counts["pauses"] += 1
