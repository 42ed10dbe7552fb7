"""Requests that wait in the engine's queue: tierd keeps their prefixes in RAM or brings them there.

vLLM looks a request up when it could run it. Until then a request of a long queue waits for
nothing, while its prefix lies in a slow tier, or is displaced by what requests before it store.
Each request that waits longer than the step in which it arrives is looked up here once, and:

* tierd is told how far its prefix is in RAM, and evicts that when nothing else can be, until the
  request is admitted or gone. It stays protected while vLLM has looked it up and has no room for
  it: the load pins it before the protection ends.
* of the first requests whose prefix is not all in RAM, tierd brings the rest there, until vLLM
  looks them up.

What tierd could not be told, because the client has no room for a message, is looked up again and
sent in a later step.

A request with the hint ``prefetch`` comes before the ones that need its prefix. Its prefetch goes
on after its own end, for a bounded time. The scheduler's thread only.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.engines.common.held_chunks import HeldChunks
from kvtier.engines.common.lora import AdapterDigests
from kvtier.engines.common.request_state import RequestState, reads_no_cache
from kvtier.engines.common.tierd_session import TierdSession
from kvtier.planner import Planner
from kvtier.store.types import MAX_QUEUED_REQUESTS, RAM_BITS
from kvtier.tierd.wire import Cancel, Prefetch, Queued

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


@dataclass(frozen=True, slots=True)
class _HeldPrefix:
    """The prefix of a request that tiers hold. ``looked_up``: chunks that were looked up.

    ``missing``: its keys, if a part of it is not in RAM. ``in_ram``: the key of each group with
    which the part that is in RAM ends.
    """

    looked_up: int
    missing: WireKeys = ()
    in_ram: WireKeys = ()


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
        """Requests that are not admitted."""
        self._unseen: OrderedDict[str, RequestState] = OrderedDict()
        """Of these, those that tierd was not told of yet."""
        self._asked: set[str] = set()
        """Of these, those that vLLM has looked up."""
        self._incomplete: OrderedDict[str, RequestState] = OrderedDict()
        """Requests whose prefix is not all in RAM, for which there was no room among the
        prefetches."""
        self._protected: dict[str, int] = {}
        """Ids by request: tierd knows of it."""
        self._prefetches: dict[str, int] = {}
        """Ids by request."""

    def add(self, state: RequestState) -> None:
        """The request is at the end of the queue."""
        wanted = not (state.skip_reason or state.hints.skip_load or state.hints.prefetch)
        if wanted and len(self._queued) < MAX_QUEUED:
            self._queued[state.request_id] = self._unseen[state.request_id] = state

    def looked_up(self, state: RequestState) -> None:
        """vLLM looks the request up: what is missing in RAM is its own affair from here on."""
        name = state.request_id
        if name in self._queued:
            self._asked.add(name)
        self._incomplete.pop(name, None)
        prefetch = self._prefetches.pop(name, 0)
        if prefetch:
            self._session.send(Cancel(promotion=prefetch))

    def remove(self, state: RequestState) -> None:
        """vLLM has admitted the request, after what it loads is pinned, or it is gone."""
        if self._queued.pop(state.request_id, None) is None:
            return
        self.looked_up(state)
        self._unseen.pop(state.request_id, None)
        self._asked.discard(state.request_id)
        protected = self._protected.pop(state.request_id, 0)
        if protected:
            self._session.send(Cancel(promotion=protected))

    def clear(self) -> None:
        """tierd is lost, or the requests need other objects: starts again with the queue."""
        for number in (*self._prefetches.values(), *self._protected.values()):
            self._session.send(Cancel(promotion=number))
        self._prefetches.clear()
        self._protected.clear()
        self._incomplete.clear()
        self._unseen = self._queued.copy()
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
            keys = self._look_up(state).missing
            prefetch = self._send(keys, state) if keys else 0
            if prefetch:
                self._kept.append((until, prefetch))
            elif keys:
                self._keep_later.append((until, state))
                continue
            self.outcomes["started" if prefetch else "nothing_missing"] += 1

    def advance(self, adapters: AdapterDigests) -> None:
        """Tells tierd what to keep in RAM and what to bring there. Once per step."""
        if self._kept or self._keep_later:
            self._end_kept()
            self._start_kept(adapters)
        if not self._session.replica_ready:
            return
        left = MAX_CHUNKS_PER_STEP
        if self._unseen:
            left = self._protect_next(adapters, left)
        if self._incomplete:
            self._start_prefetches(left)

    def _protect_next(self, adapters: AdapterDigests, left: int) -> int:
        """Looks the next requests up and tells tierd which prefixes to protect; returns how many
        chunks may still be looked up."""
        seen: list[str] = []
        protected: dict[str, int] = {}
        keys: list[tuple[int, WireKeys]] = []
        incomplete: list[tuple[RequestState, WireKeys]] = []
        for name, state in self._unseen.items():
            if left <= 0 or len(self._protected) + len(protected) >= MAX_QUEUED_REQUESTS:
                break
            cacheable = state.is_cacheable(adapters)
            if not cacheable and not state.skip_reason:
                left -= 1  # The digest of its adapter will be known later.
                continue
            seen.append(name)
            if not cacheable or reads_no_cache(state.request):
                continue
            held = self._look_up(state)
            left -= max(1, held.looked_up)
            missing = () if name in self._asked else held.missing
            if not missing and not held.in_ram:
                continue
            protected[name] = self._new_id()
            keys.append((protected[name], held.in_ram))
            if missing:
                incomplete.append((state, missing))
        if keys and not self._session.send(Queued(requests=tuple(keys))):
            # They stay among the unseen: a later step looks them up again.
            seen = [name for name in seen if name not in protected]
            incomplete.clear()
            protected.clear()
        for name in seen:
            del self._unseen[name]
        self._protected.update(protected)
        for state, missing in incomplete:
            if not self._start_prefetch(state, missing):
                self._incomplete[state.request_id] = state
        return left

    def _start_prefetches(self, left: int) -> None:
        """Starts further prefetches, in the order of the queue."""
        while self._incomplete and left > 0 and len(self._prefetches) < MAX_PREFETCHES:
            name, state = next(iter(self._incomplete.items()))
            held = self._look_up(state)
            left -= max(1, held.looked_up)
            if held.missing and not self._start_prefetch(state, held.missing):
                return
            del self._incomplete[name]

    def _start_prefetch(self, state: RequestState, missing: WireKeys) -> bool:
        """Returns False if there is no room for it, here or for the message."""
        prefetch = self._send(missing, state) if len(self._prefetches) < MAX_PREFETCHES else 0
        if prefetch:
            self._prefetches[state.request_id] = prefetch
        return bool(prefetch)

    def _look_up(self, state: RequestState) -> _HeldPrefix:
        """Looks up which prefix tiers hold. One that is too short to be loaded is none."""
        planner = self._planner
        if not planner.prefix_only:
            return self._look_up_groups(state)
        chunks = self._held_chunks(state, self._most_chunks(state))
        held = chunks.first_missing(0, 0, chunks.end)
        if planner.tokens(held) < max(1, self._session.live.min_load_tokens):
            return _HeldPrefix(held)
        in_ram = chunks.only(RAM_BITS.__and__).first_missing(0, 0, held)
        return _HeldPrefix(
            held,
            state.wire_keys(0, held) if in_ram < held else (),
            state.wire_keys(in_ram - 1, 1) if in_ram else (),
        )

    def _held_chunks(self, state: RequestState, most_chunks: int) -> HeldChunks:
        per_chunk = self._planner.hashes_per_chunk
        end = min(len(state.hashes(per_chunk)), most_chunks)
        return HeldChunks(state, self._session.replica, per_chunk, end)

    def _most_chunks(self, state: RequestState) -> int:
        """How many chunks of the request may be loaded, without a local hit."""
        tokens: int = state.request.num_tokens
        most = state.hints.max_load_tokens
        return self._planner.chunks(tokens if most is None else min(tokens, most))

    def _look_up_groups(self, state: RequestState) -> _HeldPrefix:
        """As ``_look_up``, where a prefix is usable as a whole only."""
        planner = self._planner
        most = planner.max_hit_chunks(state.request.num_tokens)
        held = self._held_chunks(state, min(most, self._most_chunks(state)))
        end_tokens = planner.tokens(planner.longest_prefix(0, held.end, held))
        if end_tokens < max(1, self._session.live.min_load_tokens):
            return _HeldPrefix(held.end)
        needed, in_ram = planner.needed_chunks(0, end_tokens), held.only(RAM_BITS.__and__)
        lacking, last = False, []
        for group, begin, stop in needed:
            first = in_ram.first_missing(group, begin, stop)
            lacking = lacking or first < stop
            if first > begin:
                last.append((group, first - 1, first))
        return _HeldPrefix(
            sum(stop - begin for _, begin, stop in needed),
            state.wire_keys_of_chunks(needed) if lacking else (),
            state.wire_keys_of_chunks(last),
        )

    def _send(self, keys: WireKeys, state: RequestState) -> int:
        prefetch = self._new_id()
        owner = self._session.owner(state)
        queued = self._protected.get(state.request_id, 0)
        message = Prefetch(promotion=prefetch, keys=keys, owner=owner, queued=queued)
        return prefetch if self._session.send(message) else 0
