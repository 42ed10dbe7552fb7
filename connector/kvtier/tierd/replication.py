"""Replicates the presence of objects to the engines' schedulers.

tierd's ``ReplicaPublisher`` sends each scheduler a snapshot, then deltas in order, and eviction
notices. Changes of one loop iteration are merged per key, so that a delta names each bit of a key
once. An eviction notice follows every earlier change. A snapshot is sent a few pieces per
iteration, each of which tells the state of its moment; the changes since its start follow it.

The scheduler's ``Replica`` applies the messages to what it uses as a hint. ``apply`` is called by
one thread, or by threads that the caller synchronizes. Another one may call ``get``,
``get_hashed`` and ``location`` meanwhile. Every chunk of every prompt is looked up, so
``get_hashed`` takes a fraction of a microsecond for a key.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from kvtier.presence_table import PresenceTable, Words
from kvtier.store.types import MEMORY_BIT, RAM_BITS
from kvtier.tierd.wire import Delta, EvictionAck, EvictionNotice, Message, Usable

SNAPSHOT_KEYS = 512
"""Keys in one message: about 20 KB, about a millisecond to collect and encode."""
PIECES_PER_CALL = 2
"""Of all snapshots together, in turns: about 2 ms of the loop. Together five times as many keys as
the store adds per iteration while it lists a tier, so that snapshots overtake the listing."""
MAX_DEFERRED_KEYS = 65_536
"""Changes that wait behind a snapshot. Beyond that, a new snapshot is shorter."""
_PARTS = 16
"""Dictionaries of keys in RAM: growing one of a hundred thousand keys takes milliseconds."""
FORGET_SECONDS = 1.0
"""The store waits for acknowledgements for 100 ms; later ones are of no use."""
Added = tuple[bytes, int, int]
"""Key, bits, and the location of a key in RAM (0: not in RAM)."""
Removed = tuple[bytes, int]


Deferred = tuple[list[Added], list[Removed]] | EvictionNotice


def _keys_of(item: Deferred) -> int:
    return len(item.keys) if isinstance(item, EvictionNotice) else len(item[0]) + len(item[1])


class _ReplicaState:
    """One scheduler. ``snapshot``: keys still to be sent; None: all are. ``deferred``: changes that
    follow them."""

    __slots__ = ("deferred", "deferred_keys", "first", "namespace", "sequence", "snapshot")

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.sequence = 0
        self.snapshot: Iterator[Added] | None = None
        self.first = True
        self.deferred: deque[Deferred] = deque()
        self.deferred_keys = 0

    @property
    def behind(self) -> bool:
        """Whether something is to be sent before the next change."""
        return self.snapshot is not None or bool(self.deferred)


class ReplicaPublisher:
    """All schedulers, by the route of their session. Only the loop's thread uses it.

    ``presence(namespace)`` is a snapshot of the store. ``acknowledge_eviction(token)`` tells the
    store that every scheduler has acknowledged a notice. ``usable_bits()``: bits of the tiers that
    may be used; ``asked_bits()``: of those that may hold keys which the index lacks.
    """

    def __init__(
        self,
        send: Callable[[bytes, Message], None],
        presence: Callable[[str], Iterable[Added]],
        acknowledge_eviction: Callable[[int], None],
        usable_bits: Callable[[], int],
        asked_bits: Callable[[], int] = lambda: 0,
    ) -> None:
        self._send = send
        self._presence = presence
        self._acknowledge_eviction = acknowledge_eviction
        self._usable_bits = usable_bits
        self._asked_bits = asked_bits
        self._replicas: dict[bytes, _ReplicaState] = {}
        self._pending: dict[str, dict[bytes, tuple[int, int, int]]] = {}
        self._tokens: dict[int, tuple[set[bytes], float]] = {}

    def start(self, route: bytes, namespace: str) -> None:
        """Starts a scheduler's replica with a snapshot. Earlier events of the store must have been
        passed in."""
        self.flush()
        replica = self._replicas.get(route)
        if replica is None:
            replica = self._replicas[route] = _ReplicaState(namespace)
        replica.namespace = namespace
        self._send(route, self._usable())
        self._start_snapshot(replica)

    def stop(self, route: bytes) -> None:
        """Ends the replica of a scheduler that has detached or exited. Its acknowledgements are not
        awaited."""
        self._replicas.pop(route, None)
        for token in [token for token, (routes, _) in self._tokens.items() if route in routes]:
            self.acknowledge(route, token)

    def presence_changed(
        self, namespace: str, key: bytes, bits: int, present: bool, location: int = 0
    ) -> None:
        """Queues a change of a key's bits. ``location``: where it is, if it came into RAM."""
        pending = self._pending.setdefault(namespace, {})
        added, removed, before = pending.get(key, (0, 0, 0))
        if present:
            pending[key] = (added | bits, removed & ~bits, location or before)
        else:
            left = 0 if bits & MEMORY_BIT else before
            pending[key] = (added & ~bits, removed | bits, left)

    def usable_tiers_changed(self) -> None:
        """Queues a change of the tiers that may be used."""
        for route in self._replicas:
            self._send(route, self._usable())

    def _usable(self) -> Usable:
        return Usable(bits=self._usable_bits(), asked_bits=self._asked_bits())

    def evicting(self, namespace: str, token: int, keys: tuple[bytes, ...], now: float) -> None:
        """Queues a notice that keys are about to be evicted from RAM."""
        self.flush()
        routes = {
            route for route, replica in self._replicas.items() if replica.namespace == namespace
        }
        if not routes:
            self._acknowledge_eviction(token)
            return
        self._tokens[token] = (set(routes), now + FORGET_SECONDS)
        message = EvictionNotice(token=token, keys=keys)
        for route in routes:
            self._emit(route, self._replicas[route], message)

    def acknowledge(self, route: bytes, token: int) -> None:
        """Notes that a scheduler no longer uses the keys of this notice."""
        found = self._tokens.get(token)
        if found is None:
            return
        found[0].discard(route)
        if not found[0]:
            del self._tokens[token]
            self._acknowledge_eviction(token)

    def flush(self) -> None:
        """Sends the merged changes."""
        if not self._pending:
            return
        pending, self._pending = self._pending, {}
        for namespace, keys in pending.items():
            routes = [
                route for route, replica in self._replicas.items() if replica.namespace == namespace
            ]
            if not routes:
                continue
            items = iter(keys.items())
            while piece := list(islice(items, SNAPSHOT_KEYS)):
                added = [(key, bits, location) for key, (bits, _, location) in piece if bits]
                removed = [(key, bits) for key, (_, bits, _) in piece if bits]
                for route in routes:
                    self._emit(route, self._replicas[route], (added, removed))

    def publish(self, now: float) -> bool:
        """Once per loop iteration: sends changes and the next pieces of snapshots. True: there is
        more to send."""
        self.flush()
        for token in [token for token, (_, until) in self._tokens.items() if now > until]:
            del self._tokens[token]
        left = PIECES_PER_CALL * SNAPSHOT_KEYS
        behind = deque(route for route, replica in self._replicas.items() if replica.behind)
        while behind and left > 0:
            route = behind.popleft()
            # What was served last comes last: the dictionary keeps the order of insertion.
            replica = self._replicas[route] = self._replicas.pop(route)
            left -= max(1, self._continue_snapshot(route, replica, min(left, SNAPSHOT_KEYS)))
            if replica.behind:
                behind.append(route)
        return bool(behind)

    def _start_snapshot(self, replica: _ReplicaState) -> None:
        replica.snapshot = iter(self._presence(replica.namespace))
        replica.first = True
        replica.deferred.clear()
        replica.deferred_keys = 0

    def _continue_snapshot(self, route: bytes, replica: _ReplicaState, keys: int) -> int:
        """Sends up to about so many keys; returns how many it sent."""
        left = keys
        while left > 0 and (snapshot := replica.snapshot) is not None:
            piece = list(islice(snapshot, SNAPSHOT_KEYS))
            if piece or replica.first:
                self._delta(route, replica, piece, [], replica.first)
                replica.first = False
            if len(piece) < SNAPSHOT_KEYS:
                replica.snapshot = None
            left -= len(piece)
        while replica.snapshot is None and replica.deferred and left > 0:
            item = replica.deferred.popleft()
            size = _keys_of(item)
            replica.deferred_keys -= size
            left -= size
            self._transmit(route, replica, item)
        return keys - left

    def _emit(
        self,
        route: bytes,
        replica: _ReplicaState,
        item: Deferred,
    ) -> None:
        if replica.behind:
            replica.deferred_keys += _keys_of(item)
            if replica.deferred_keys >= MAX_DEFERRED_KEYS:
                self._start_snapshot(replica)
                return
            replica.deferred.append(item)
        else:
            self._transmit(route, replica, item)

    def _transmit(self, route: bytes, replica: _ReplicaState, item: Deferred) -> None:
        if isinstance(item, EvictionNotice):
            self._send(route, item)
        else:
            self._delta(route, replica, item[0], item[1], False)

    def _delta(
        self,
        route: bytes,
        replica: _ReplicaState,
        added: list[Added],
        removed: list[Removed],
        snapshot: bool,
    ) -> None:
        replica.sequence += 1
        self._send(
            route,
            Delta(
                sequence=replica.sequence,
                added=tuple(added),
                removed=tuple(removed),
                snapshot=snapshot,
            ),
        )


ALL_BITS = (1 << 20) - 1
"""Of every presence bit, and some more."""


class Replica:
    """Keys (group byte + block hash), the bits of the tiers that hold them, and the location of
    those in RAM.

    The bits are in a ``PresenceTable``, which takes a fraction of a dictionary's memory, never
    stops to grow, and knows a key by a part of its hash. The locations of keys in RAM, which the
    pool bounds, are in dictionaries by the whole key: what is loaded is what was asked for.

    ``removals`` rises whenever a bit is cleared or becomes unusable, which invalidates answers
    derived from the replica. ``stale``: a delta is missing; the replica is empty until the next
    snapshot.
    """

    __slots__ = (
        "_locations",
        "_next_sequence",
        "_resync_requested",
        "_table",
        "asked_bits",
        "removals",
        "stale",
        "usable_bits",
    )

    def __init__(self) -> None:
        self._locations: list[dict[bytes, int]] = [{} for _ in range(_PARTS)]
        """Of keys in RAM, by their last byte."""
        self._table = PresenceTable()
        self._next_sequence = 1
        self._resync_requested = False
        self.removals = 0
        self.stale = False
        self.usable_bits = ALL_BITS
        """Of tiers that may be used."""
        self.asked_bits = 0
        """Of usable tiers that may hold keys which are not in the replica."""

    def __len__(self) -> int:
        return len(self._table)

    def get(self, key: bytes) -> int:
        """Bits of the usable tiers that hold ``key``; 0: none known."""
        return self._table.get(key) & self.usable_bits

    def get_hashed(self, group: int, hashes: Words) -> Words:
        """Bits of all tiers that hold each key of one group, usable or not.

        ``hashes``: ``presence_table.hash_many`` of the keys without their group.
        """
        return self._table.get_hashed(group, hashes)

    def location(self, key: bytes) -> int:
        """Slot and generation of ``key`` (``generations.pack_location``); 0: not in RAM."""
        return self._locations[key[-1] % _PARTS].get(key, 0)

    def locations(self, keys: Sequence[bytes]) -> list[int]:
        """``location`` of each key before the first one that is not in RAM."""
        parts = self._locations
        found = [parts[key[-1] % _PARTS].get(key, 0) for key in keys]
        return found if all(found) else found[: found.index(0)]

    def all_bits(self) -> Iterator[int]:
        """The bits of each key, usable or not. For the thread that applies messages."""
        return self._table.all_bits()

    def clear(self) -> None:
        """Empties the replica after the loss of tierd. The next session counts from 1."""
        self._empty()
        self._next_sequence = 1
        self._resync_requested = False
        self.stale = False
        self.usable_bits = ALL_BITS
        self.asked_bits = 0

    def apply(self, message: Delta | EvictionNotice | Usable) -> EvictionAck | None:
        """Applies one message. The returned message must be sent to tierd.

        Evicted keys lose their RAM bits before tierd receives the acknowledgement.
        """
        if isinstance(message, Usable):
            if self.usable_bits & ~message.bits:
                self.removals += 1
            self.usable_bits = message.bits & ALL_BITS
            self.asked_bits = message.asked_bits & self.usable_bits
            return None
        if isinstance(message, EvictionNotice):
            for key in message.keys:
                self._remove(key, RAM_BITS)
            return EvictionAck(token=message.token)
        if message.sequence != self._next_sequence:
            self._invalidate()
        self._next_sequence = message.sequence + 1
        if message.snapshot:
            self._empty()
            self.stale = False
            self._resync_requested = False
        if self.stale:
            # Without the missing delta, additions and removals would be wrong.
            return None
        locations, change_bits = self._locations, self._table.change_bits
        for key, added, location in message.added:
            if location:
                # Before the bits: another thread that sees these finds the location.
                locations[key[-1] % _PARTS][key] = location
            change_bits(key, added, True)
        for key, removed in message.removed:
            self._remove(key, removed)
        return None

    def needs_resync(self) -> bool:
        """True once per gap: the caller sends ``Resync``, and a snapshot follows."""
        if not self.stale or self._resync_requested:
            return False
        self._resync_requested = True
        return True

    def _remove(self, key: bytes, removed: int) -> None:
        self.removals += self._table.change_bits(key, removed & ALL_BITS, False)
        if removed & MEMORY_BIT:
            self._locations[key[-1] % _PARTS].pop(key, None)

    def _empty(self) -> None:
        if not len(self):
            return
        self.removals += 1
        self._table = PresenceTable()
        for part in self._locations:
            part.clear()

    def _invalidate(self) -> None:
        self._empty()
        self.stale = True
        self._resync_requested = False
