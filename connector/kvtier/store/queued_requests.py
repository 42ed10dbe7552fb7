"""Requests that wait in the queues of engines: what they are going to use is evicted last.

An engine knows its queue, and with it the future of the least recently used objects: while the
first requests of a long queue are served, their new chunks would displace the prefixes of those
that wait. An engine names the last object of the prefix of each request, one of each group. As
prefixes shrink from their ends, that object protects the whole prefix (``kvtier.prefix_order``).

* Nothing is pinned. Where everything is awaited, the request that was named last loses its prefix.
* A key is awaited whether it is in RAM or not, so an object that arrives later is protected too.
* It ends when the engine says so, with the engine or its weights, and after ``QUEUED_SECONDS``.

Only the store's thread uses this module.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvtier.store.context import StoreContext, Timer
from kvtier.store.memory_tier import ResidentObjects
from kvtier.store.operations import EngineState
from kvtier.store.types import MAX_QUEUED_REQUESTS

QUEUED_SECONDS = 600.0
"""How long a request protects anything: one that never gets its turn must not do so without end."""
_MAX_OUTDATED = 16


class _Ranks:
    """The places in the queue of the requests that wait for one key."""

    __slots__ = ("_heap", "_live")

    def __init__(self) -> None:
        self._heap: list[int] = []
        self._live: set[int] = set()

    def __len__(self) -> int:
        return len(self._live)

    def add(self, rank: int) -> None:
        if len(self._heap) > _MAX_OUTDATED + 2 * len(self._live):
            self._heap = sorted(self._live)
        self._live.add(rank)
        heapq.heappush(self._heap, rank)

    def remove(self, rank: int) -> None:
        self._live.discard(rank)

    def first(self) -> int:
        while self._heap[0] not in self._live:
            heapq.heappop(self._heap)
        return self._heap[0]


class AwaitedKeys:
    """The keys that queued requests wait for, in RAM or not."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[str, bytes], _Ranks] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    def rank_of(self, namespace: str, key: bytes) -> int:
        """The place in the queue of the first request that waits for a key; 0 if there is none."""
        if not self._ranks:
            return 0
        ranks = self._ranks.get((namespace, key))
        return 0 if ranks is None else ranks.first()

    def add(self, namespace: str, key: bytes, rank: int) -> None:
        """The request at this place waits for the key."""
        ranks = self._ranks.get((namespace, key))
        if ranks is None:
            ranks = self._ranks[namespace, key] = _Ranks()
        ranks.add(rank)

    def remove(self, namespace: str, key: bytes, rank: int) -> None:
        """The request at this place does not wait for the key any longer."""
        ranks = self._ranks[namespace, key]
        ranks.remove(rank)
        if not ranks:
            del self._ranks[namespace, key]


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """A request in an engine's queue. ``rank``: its place among those of all engines. ``keys``: the
    last object of its prefix, by group. ``until``: when it protects nothing any longer."""

    engine: EngineState
    namespace: str
    rank: int
    until: float
    keys: dict[int, bytes] = field(default_factory=dict)


class QueuedRequests:
    """The queued requests of all engines, in the order in which they were named."""

    def __init__(
        self, context: StoreContext, resident: ResidentObjects, awaited: AwaitedKeys
    ) -> None:
        self._context = context
        self._resident = resident
        self._awaited = awaited
        self._requests: OrderedDict[tuple[str, int], QueuedRequest] = OrderedDict()
        self._counts: Counter[str] = Counter()
        """By engine."""
        self._last_rank = 0
        self._timer: Timer | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def begin(self, engine: EngineState, number: int, keys: Sequence[tuple[int, bytes]]) -> None:
        """A request waits in the queue and is going to use what precedes these keys of the engine,
        at most one of each group. One that is known gets other keys in these groups."""
        named: dict[int, bytes] = {}
        for group, block_hash in keys:
            key = engine.key(group, block_hash)
            if key is None:
                self._context.violation("unknown_group")
                return
            named[group] = key
        if (engine.name, number) not in self._requests:
            if self._counts[engine.name] >= MAX_QUEUED_REQUESTS:
                self._context.count("queued_requests_rejected", "", "too_many")
                return
            self._last_rank += 1
            self._requests[engine.name, number] = QueuedRequest(
                engine,
                engine.namespace,
                self._last_rank,
                self._context.clock() + QUEUED_SECONDS,
            )
            self._counts[engine.name] += 1
            self._context.count("queued_requests")
            self._arm()
        self.extend(engine, number, named)

    def extend(self, engine: EngineState, number: int, keys: Mapping[int, bytes]) -> None:
        """The prefix of a request that is in RAM ends with these keys, by group."""
        request = self._requests.get((engine.name, number))
        if request is None:
            return
        namespace, rank = request.namespace, request.rank
        for group, key in keys.items():
            before = request.keys.get(group)
            if before == key:
                continue
            request.keys[group] = key
            self._awaited.add(namespace, key, rank)
            self._resident.rank_changed(namespace, key)
            if before is not None:
                self._forget(namespace, (before,), rank)

    def rank_of(self, engine: EngineState, number: int) -> int:
        """The place of a request; behind all others if it is not known."""
        request = self._requests.get((engine.name, number))
        return self._last_rank + 1 if request is None else request.rank

    def end(self, engine: EngineState, number: int) -> bool:
        """The request has left the queue. False if it is not known."""
        request = self._requests.pop((engine.name, number), None)
        if request is None:
            return False
        self._counts[engine.name] -= 1
        if not self._counts[engine.name]:
            del self._counts[engine.name]
        self._forget(request.namespace, request.keys.values(), request.rank)
        return True

    def close(self, engine: EngineState) -> None:
        """Ends all requests of an engine, which is closed or has other weights."""
        if engine.name in self._counts:
            for number in [number for name, number in self._requests if name == engine.name]:
                self.end(engine, number)

    def _forget(self, namespace: str, keys: Iterable[bytes], rank: int) -> None:
        for key in keys:
            self._awaited.remove(namespace, key, rank)
            self._resident.rank_changed(namespace, key)

    def _arm(self) -> None:
        if self._timer is None and self._requests:
            first = next(iter(self._requests.values()))
            self._timer = self._context.timers.at(first.until, self._run)

    def _run(self) -> None:
        self._timer = None
        now = self._context.clock()
        while self._requests:
            (_, number), request = next(iter(self._requests.items()))
            if request.until > now:
                break
            self._context.count("queued_requests_expired")
            self.end(request.engine, number)
        self._arm()
