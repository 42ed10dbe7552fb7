"""Keeps the schedulers' replicas up to date: snapshots, deltas in order, and announcements of keys that leave RAM.

Changes of one turn of the loop are joined per key, so that a delta names each key's bits once: either added or removed. An
announcement goes out after every change before it. A snapshot is sent a few pieces per turn; what happens meanwhile waits behind it.

What tierd holds, as the scheduler side knows it: a plain dictionary, fed by tierd's ordered deltas, used as a hint only.

One owner: ``apply`` and ``get`` are called by the same thread, or by threads that the caller keeps apart. ``get`` is one
dictionary lookup, because it is called for every chunk of every prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from kvtier.store.types import RAM_BITS
from kvtier.tierd.wire import Delta, EvictionAck, EvictionNotice, Message, Usable

SNAPSHOT_KEYS = 4096
"""Keys in one message: about 170 KB, a few milliseconds to encode."""
PIECES_PER_TURN = 4
MAX_WAITING = 4096
"""Changes that wait behind a snapshot; beyond it a new snapshot says it shorter."""
FORGET_SECONDS = 1.0
"""The store gives up waiting for acknowledgements after 100 ms; what is remembered longer is of no use."""
Change = tuple[bytes, int]


class _ReplicaPublisher:
    """One scheduler's. ``snapshot``: pieces still to be sent; None: the replica is up to date."""

    __slots__ = ("first", "namespace", "sequence", "snapshot", "waiting")

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.sequence = 0
        self.snapshot: Iterator[Change] | None = None
        self.first = True
        self.waiting: deque[tuple[list[Change], list[Change]] | EvictionNotice] = deque()


class ReplicaPublisher:
    """All feeds, by the route of the scheduler's session. Owner's thread only.

    ``presence(namespace)`` is a snapshot of the store; ``left(token)`` tells the store that every scheduler knows;
    ``usable()`` are the bits that count.
    """

    def __init__(
        self,
        send: Callable[[bytes, Message], None],
        presence: Callable[[str], Iterable[Change]],
        left: Callable[[int], None],
        usable: Callable[[], int],
    ) -> None:
        self._send = send
        self._presence = presence
        self._left = left
        self._usable = usable
        self._feeds: dict[bytes, _ReplicaPublisher] = {}
        self._joined: dict[str, dict[bytes, tuple[int, int]]] = {}
        self._tokens: dict[int, tuple[set[bytes], float]] = {}

    def start(self, route: bytes, namespace: str) -> None:
        """A scheduler's replica begins with a snapshot. The store's events up to now must have been passed in."""
        self.flush()
        feed = self._feeds.get(route)
        if feed is None:
            feed = self._feeds[route] = _ReplicaPublisher(namespace)
        feed.namespace = namespace
        self._send(route, Usable(bits=self._usable()))
        self._begin_snapshot(feed)

    def stop(self, route: bytes) -> None:
        """The scheduler is not there any more; nobody waits for its acknowledgements."""
        self._feeds.pop(route, None)
        for token in [token for token, (routes, _) in self._tokens.items() if route in routes]:
            self.acknowledged(route, token)

    def changed(self, namespace: str, key: bytes, bits: int, present: bool) -> None:
        """Bits of a key were set or cleared."""
        joined = self._joined.setdefault(namespace, {})
        added, removed = joined.get(key, (0, 0))
        joined[key] = (
            (added | bits, removed & ~bits) if present else (added & ~bits, removed | bits)
        )

    def usable(self) -> None:
        """The bits that count have changed."""
        for route in self._feeds:
            self._send(route, Usable(bits=self._usable()))

    def leaving(self, namespace: str, token: int, keys: tuple[bytes, ...], now: float) -> None:
        """Keys are about to leave RAM."""
        self.flush()
        routes = {route for route, feed in self._feeds.items() if feed.namespace == namespace}
        if not routes:
            self._left(token)
            return
        self._tokens[token] = (set(routes), now + FORGET_SECONDS)
        message = EvictionNotice(token=token, keys=keys)
        for route in routes:
            self._emit(route, self._feeds[route], message)

    def acknowledged(self, route: bytes, token: int) -> None:
        """A scheduler does not offer the keys of this announcement any more."""
        found = self._tokens.get(token)
        if found is None:
            return
        found[0].discard(route)
        if not found[0]:
            del self._tokens[token]
            self._left(token)

    def flush(self) -> None:
        """Sends the changes joined so far."""
        if not self._joined:
            return
        joined, self._joined = self._joined, {}
        for namespace, keys in joined.items():
            routes = [route for route, feed in self._feeds.items() if feed.namespace == namespace]
            if not routes:
                continue
            items = iter(keys.items())
            while piece := list(islice(items, SNAPSHOT_KEYS)):
                added = [(key, bits) for key, (bits, _) in piece if bits]
                removed = [(key, bits) for key, (_, bits) in piece if bits]
                for route in routes:
                    self._emit(route, self._feeds[route], (added, removed))

    def turn(self, now: float) -> bool:
        """Once per turn of the loop: sends changes and the next pieces of snapshots. True: there is more to send."""
        self.flush()
        for token in [token for token, (_, until) in self._tokens.items() if now > until]:
            del self._tokens[token]
        busy = False
        for route, feed in list(self._feeds.items()):
            if feed.snapshot is not None:
                self._continue_snapshot(route, feed)
                busy = busy or feed.snapshot is not None
        return busy

    def _begin_snapshot(self, feed: _ReplicaPublisher) -> None:
        feed.snapshot = iter(self._presence(feed.namespace))
        feed.first = True
        feed.waiting.clear()

    def _continue_snapshot(self, route: bytes, feed: _ReplicaPublisher) -> None:
        for _ in range(PIECES_PER_TURN):
            snapshot = feed.snapshot
            if snapshot is None:
                break
            piece = list(islice(snapshot, SNAPSHOT_KEYS))
            if piece or feed.first:
                self._delta(route, feed, piece, [], feed.first)
                feed.first = False
            if len(piece) < SNAPSHOT_KEYS:
                feed.snapshot = None
        if feed.snapshot is None:
            while feed.waiting:
                item = feed.waiting.popleft()
                self._emit(route, feed, item)

    def _emit(
        self,
        route: bytes,
        feed: _ReplicaPublisher,
        item: tuple[list[Change], list[Change]] | EvictionNotice,
    ) -> None:
        if feed.snapshot is not None:
            if len(feed.waiting) >= MAX_WAITING:
                self._begin_snapshot(feed)
                return
            feed.waiting.append(item)
        elif isinstance(item, EvictionNotice):
            self._send(route, item)
        else:
            self._delta(route, feed, item[0], item[1], False)

    def _delta(
        self,
        route: bytes,
        feed: _ReplicaPublisher,
        added: list[Change],
        removed: list[Change],
        snapshot: bool,
    ) -> None:
        feed.sequence += 1
        self._send(
            route,
            Delta(
                sequence=feed.sequence,
                added=tuple(added),
                removed=tuple(removed),
                snapshot=snapshot,
            ),
        )


ALL_BITS = -1


class Replica:
    """Keys (group byte + block hash) and the bits of the tiers that hold them.

    ``removals`` rises whenever a bit was cleared or stopped counting, so that an answer derived from the replica can be known to be outdated.
    ``stale``: a delta is missing; nothing is known until a snapshot has come.
    """

    __slots__ = (
        "_asked",
        "_bits",
        "_next_sequence",
        "get_bits",
        "removals",
        "stale",
        "usable_bits",
    )

    def __init__(self) -> None:
        self._bits: dict[bytes, int] = {}
        self._next_sequence = 1
        self._asked = False
        self.removals = 0
        self.stale = False
        self.usable_bits = ALL_BITS
        """Of tiers that may be used."""
        self.get_bits = self._bits.get
        """``get_bits(key, 0)``: the dictionary's own method, for loops over hundreds of keys. Only ``usable_bits`` of it count."""

    def __len__(self) -> int:
        return len(self._bits)

    def get(self, key: bytes) -> int:
        """Bits of the tiers that hold ``key`` and may be used; 0: none that is known."""
        return self._bits.get(key, 0) & self.usable_bits

    def clear(self) -> None:
        """Forgets everything: tierd was lost. The next session counts from 1 again."""
        if self._bits:
            self.removals += 1
            self._bits.clear()
        self._next_sequence = 1
        self._asked = False
        self.stale = False
        self.usable_bits = ALL_BITS

    def apply(self, message: Delta | EvictionNotice | Usable) -> EvictionAck | None:
        """Takes over one message of tierd. What it returns must be sent back.

        Keys that are leaving RAM lose its bits at once, before tierd gets the acknowledgement.
        """
        if isinstance(message, Usable):
            if self.usable_bits & ~message.bits:
                self.removals += 1
            self.usable_bits = message.bits
            return None
        if isinstance(message, EvictionNotice):
            for key in message.keys:
                self._remove(key, RAM_BITS)
            return EvictionAck(token=message.token)
        if message.sequence != self._next_sequence:
            self._lose()
        self._next_sequence = message.sequence + 1
        if message.snapshot:
            if self._bits:
                self.removals += 1
                self._bits.clear()
            self.stale = False
            self._asked = False
        if self.stale:
            # Without what is missing, a removal could be undone and an addition be long gone.
            return None
        bits = self._bits
        for key, added in message.added:
            bits[key] = bits.get(key, 0) | added
        for key, removed in message.removed:
            self._remove(key, removed)
        return None

    def wants_resync(self) -> bool:
        """True once per gap: the caller sends ``Resync``, and a snapshot follows."""
        if not self.stale or self._asked:
            return False
        self._asked = True
        return True

    def _remove(self, key: bytes, removed: int) -> None:
        before = self._bits.get(key, 0)
        left = before & ~removed
        if left == before:
            return
        self.removals += 1
        if left:
            self._bits[key] = left
        else:
            del self._bits[key]

    def _lose(self) -> None:
        if self._bits:
            self.removals += 1
            self._bits.clear()
        self.stale = True
        self._asked = False
