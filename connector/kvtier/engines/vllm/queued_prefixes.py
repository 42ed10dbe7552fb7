"""Requests that wait in the engine's queue: tierd brings their prefixes into RAM meanwhile.

vLLM looks a request up when it could run it. Until then a request of a long queue waits for
nothing, while its prefix lies in a slow tier. tierd is told of the first requests of the queue, and
of their end: when vLLM looks them up, or when they are gone. It is not told of a request that vLLM
looks up in the step in which it arrives.

A request with the hint ``prefetch`` comes before the ones that need its prefix. Its prefetch goes
on after its own end, for a bounded time. The scheduler's thread only.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable

from kvtier.engines.common.held_chunks import HeldChunks
from kvtier.engines.common.lora import AdapterDigests
from kvtier.engines.common.request_state import RequestState, reads_no_cache
from kvtier.engines.common.tierd_session import TierdSession
from kvtier.planner import Planner
from kvtier.store.types import RAM_BITS
from kvtier.tierd.wire import Cancel, Prefetch

MAX_PREFETCHES = 16
"""Requests at a time, the first of the queue."""
MAX_KEPT = 16
"""Prefetches at a time that requests with the hint have asked for."""
KEPT_SECONDS = 30.0
"""How long such a prefetch goes on at most. An object of it that is in RAM by then stays as any
other."""
MAX_QUEUED = 4_096
"""Requests that are remembered. Later ones are looked up when their turn comes."""
WireKeys = tuple[tuple[int, bytes], ...]
MAX_CHUNKS_PER_STEP = 1_024
"""Looked up in the replica, over all requests; takes about half a millisecond."""


class QueuedPrefixes:
    """The queue of one engine. ``new_id``: returns an unused id of a promotion."""

    def __init__(
        self,
        planner: Planner,
        session: TierdSession,
        new_id: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self.outcomes: Counter[str] = Counter()
        """Of requests with the hint ``prefetch``, since the counts were last taken."""
        self._clock = clock
        self._kept: deque[tuple[float, int]] = deque()
        """When they end, and their ids, in order."""
        self._keep_later: deque[tuple[float, RequestState]] = deque()
        """Requests whose prefetch cannot start yet, and until when it may."""
        self._planner = planner
        self._session = session
        self._new_id = new_id
        self._queued: OrderedDict[str, RequestState] = OrderedDict()
        self._prefetches: dict[str, int] = {}
        """Ids by request, 0 for a request without anything to prefetch."""

    def add(self, state: RequestState) -> None:
        """The request is at the end of the queue."""
        wanted = not (state.skip_reason or state.hints.skip_load or state.hints.prefetch)
        if wanted and len(self._queued) < MAX_QUEUED:
            self._queued[state.request_id] = state

    def remove(self, state: RequestState) -> None:
        """vLLM looks the request up, or it is gone."""
        self._queued.pop(state.request_id, None)
        prefetch = self._prefetches.pop(state.request_id, 0)
        if prefetch:
            self._session.send(Cancel(promotion=prefetch))

    def clear(self) -> None:
        """tierd is lost, or the requests need other objects: starts again with the queue."""
        for prefetch in self._prefetches.values():
            if prefetch:
                self._session.send(Cancel(promotion=prefetch))
        self._prefetches.clear()
        while self._kept:
            self._session.send(Cancel(promotion=self._kept.popleft()[1]))

    def keep(self, state: RequestState, adapters: AdapterDigests) -> None:
        """The request has the hint ``prefetch``."""
        self._end_kept()
        if len(self._kept) + len(self._keep_later) >= MAX_KEPT:
            self.outcomes["too_many"] += 1
            return
        self._keep_later.append((self._clock() + KEPT_SECONDS, state))
        self._start_kept(adapters)

    def _end_kept(self) -> None:
        now = self._clock()
        while self._kept and self._kept[0][0] <= now:
            self._session.send(Cancel(promotion=self._kept.popleft()[1]))
        while self._keep_later and self._keep_later[0][0] <= now:
            self._keep_later.popleft()
            self.outcomes["not_ready"] += 1

    def _start_kept(self, adapters: AdapterDigests) -> None:
        if not self._session.replica_ready:
            return
        for _ in range(len(self._keep_later)):
            until, state = self._keep_later.popleft()
            if state.skip_reason:
                self.outcomes["not_ready"] += 1
                continue
            if not state.is_cacheable(adapters):
                self._keep_later.append((until, state))
                continue
            keys = self._missing(state)
            prefetch = self._send(keys, state) if keys else 0
            self.outcomes["started" if prefetch else "nothing_missing"] += 1
            if prefetch:
                self._kept.append((until, prefetch))

    def prefetch(self, adapters: AdapterDigests) -> None:
        """Tells tierd of the first requests of the queue."""
        if self._kept or self._keep_later:
            self._end_kept()
            self._start_kept(adapters)
        if not self._queued or not self._session.replica_ready:
            return
        chunks = 0
        started = sum(map(bool, self._prefetches.values()))
        for name, state in self._queued.items():
            if started >= MAX_PREFETCHES or chunks >= MAX_CHUNKS_PER_STEP:
                return
            if name in self._prefetches or reads_no_cache(state.request):
                continue
            if not state.is_cacheable(adapters):
                continue
            keys = self._missing(state)
            chunks += max(1, len(keys))
            self._prefetches[name] = self._send(keys, state) if keys else 0
            started += bool(self._prefetches[name])

    def _missing(self, state: RequestState) -> WireKeys:
        """Returns the keys that tierd is told of: the prefix that tiers hold, if a part of it is
        not in RAM."""
        planner = self._planner
        if not planner.prefix_only:
            return self._missing_of_groups(state)
        held = self._held_chunks(state, self._most_chunks(state))
        end = held.first_missing(0, 0, held.end)
        if planner.tokens(end) < max(1, self._session.live.min_load_tokens):
            return ()
        in_ram = held.only(RAM_BITS.__and__).first_missing(0, 0, end) == end
        return () if in_ram else state.wire_keys(0, end)

    def _held_chunks(self, state: RequestState, most_chunks: int) -> HeldChunks:
        per_chunk = self._planner.hashes_per_chunk
        end = min(len(state.hashes(per_chunk)), most_chunks)
        return HeldChunks(state, self._session.replica, per_chunk, end)

    def _most_chunks(self, state: RequestState) -> int:
        """How many chunks of the request may be loaded, without a local hit."""
        tokens: int = state.request.num_tokens
        most = state.hints.max_load_tokens
        return self._planner.chunks(tokens if most is None else min(tokens, most))

    def _missing_of_groups(self, state: RequestState) -> WireKeys:
        """As ``_missing``, where a prefix is usable as a whole only."""
        planner = self._planner
        most = planner.max_hit_chunks(state.request.num_tokens)
        held = self._held_chunks(state, min(most, self._most_chunks(state)))
        end = planner.longest_prefix(0, held.end, held)
        end_tokens = planner.tokens(end)
        if end_tokens < max(1, self._session.live.min_load_tokens):
            return ()
        in_ram = held.only(RAM_BITS.__and__)
        needed = planner.needed_chunks(0, end_tokens)
        if all(in_ram.first_missing(group, begin, stop) == stop for group, begin, stop in needed):
            return ()
        return state.wire_keys_of_chunks(needed)

    def _send(self, keys: WireKeys, state: RequestState) -> int:
        prefetch = self._new_id()
        owner = self._session.owner(state)
        message = Prefetch(promotion=prefetch, keys=keys, owner=owner)
        return prefetch if self._session.send(message) else 0
