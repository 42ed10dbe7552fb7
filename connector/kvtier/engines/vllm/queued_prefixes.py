"""Requests that wait in the engine's queue: tierd brings their prefixes into RAM meanwhile.

vLLM looks a request up when it could run it. Until then a request of a long queue waits for
nothing, while its prefix lies in a slow tier. tierd is told of the first requests of the queue, and
of their end: when vLLM looks them up, or when they are gone. It is not told of a request that vLLM
looks up in the step in which it arrives. The scheduler's thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from kvtier.engines.common.lora import AdapterDigests
from kvtier.engines.common.request_state import RequestState
from kvtier.engines.common.tierd_session import TierdSession
from kvtier.planner import Planner
from kvtier.store.types import RAM_BITS
from kvtier.tierd.wire import Cancel, Prefetch

MAX_PREFETCHES = 16
"""Requests at a time, the first of the queue."""
MAX_QUEUED = 4_096
"""Requests that are remembered. Later ones are looked up when their turn comes."""
WireKeys = tuple[tuple[int, bytes], ...]
MAX_CHUNKS_PER_STEP = 4_096
"""Looked up in the replica, over all requests; takes about half a millisecond."""


class QueuedPrefixes:
    """The queue of one engine. ``new_id``: returns an unused id of a promotion."""

    def __init__(self, planner: Planner, session: TierdSession, new_id: Callable[[], int]) -> None:
        self._planner = planner
        self._session = session
        self._new_id = new_id
        self._queued: OrderedDict[str, RequestState] = OrderedDict()
        self._prefetches: dict[str, int] = {}
        """Ids by request, 0 for a request without anything to prefetch."""

    def add(self, state: RequestState) -> None:
        """The request is at the end of the queue."""
        if len(self._queued) < MAX_QUEUED and not state.skip_reason:
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

    def prefetch(self, adapters: AdapterDigests) -> None:
        """Tells tierd of the first requests of the queue."""
        if not self._queued or not self._session.replica_ready:
            return
        chunks = 0
        started = sum(map(bool, self._prefetches.values()))
        for name, state in self._queued.items():
            if started >= MAX_PREFETCHES or chunks >= MAX_CHUNKS_PER_STEP:
                return
            if name in self._prefetches or getattr(
                state.request, "skip_reading_prefix_cache", False
            ):
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
        planner, replica = self._planner, self._session.replica
        if not planner.prefix_only:
            return self._missing_of_groups(state)
        get_value, usable_bits = replica.get_value, replica.usable_bits
        keys = state.keys(planner.hashes_per_chunk)
        held, lacking = 0, False
        for key in keys[: planner.chunks(state.request.num_tokens)]:
            bits = get_value(key, 0) & usable_bits
            if not bits:
                break
            held += 1
            lacking = lacking or not bits & RAM_BITS
        enough = planner.tokens(held) >= max(1, self._session.live.min_load_tokens)
        return state.wire_keys(0, held) if lacking and enough else ()

    def _missing_of_groups(self, state: RequestState) -> WireKeys:
        """As ``_missing``, where a prefix is usable as a whole only."""
        planner, replica = self._planner, self._session.replica
        get_value, usable_bits = replica.get_value, replica.usable_bits
        keys = [
            state.group_keys(group, planner.hashes_per_chunk)
            for group in range(len(planner.groups))
        ]
        most = min(len(keys[0]), planner.max_hit_chunks(state.request.num_tokens))
        end = planner.longest_prefix(
            0, most, lambda group, chunk: get_value(keys[group][chunk], 0) & usable_bits
        )
        if planner.tokens(end) < max(1, self._session.live.min_load_tokens):
            return ()
        parts = planner.needed(0, planner.tokens(end))
        if all(get_value(keys[part.group][part.chunk], 0) & RAM_BITS for part in parts):
            return ()
        return state.wire_keys_of(parts)

    def _send(self, keys: WireKeys, state: RequestState) -> int:
        prefetch = self._new_id()
        owner = self._session.owner(state)
        message = Prefetch(promotion=prefetch, keys=keys, owner=owner)
        return prefetch if self._session.send(message) else 0
