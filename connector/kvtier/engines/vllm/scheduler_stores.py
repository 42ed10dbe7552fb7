"""Stores, as the scheduler side sees them: which chunks leave the GPU, and whose blocks stay referenced until they have (DATAPATH 5, 6).

A chunk is stored once the worker has executed its last token, if no tier holds it and nobody is storing it. Where there is no
free slot, or too much is in flight, it waits behind the frontier while its request runs, and is dropped when the request ends: a
store never holds anything up.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from kvtier.engines.vllm.metadata import BlockRun, StoreJob
from kvtier.engines.vllm.scheduler_requests import GROUP, RequestState
from kvtier.engines.vllm.tierd_session import Clock, TierdSession
from kvtier.planner import Planner
from kvtier.tierd.wire import Reserve

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT_BYTES = 512 << 20
CACHE_SHARE = 4
"""Stores in flight keep at most a quarter of the engine's KV cache referenced: slow copies must leave blocks for requests."""
MAX_VISITED_PER_STEP = 4_096
"""Chunks looked at in one step, over all requests: about half a millisecond."""
SETTLING_SECONDS = 0.5
"""A key that was just delivered counts as there until tierd's delta arrives, so that nobody stores it twice."""
PROGRESS_SECONDS = 10.0
"""The engine is kept going for stores in flight as long as one of them ended this recently."""
NULL_BLOCK = 0


class BlockPool(Protocol):
    """The part of vLLM's block pool that is used."""

    blocks: Sequence[Any]

    def touch(self, blocks: Sequence[Any]) -> None: ...

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...


@dataclass(slots=True)
class OpenStore:
    """A reservation. ``blocks`` are referenced in vLLM's pool until every rank is done with them."""

    job: StoreJob
    key: bytes
    block_hash: bytes
    state: RequestState
    blocks: list[Any]
    size_bytes: int
    ranks_left: int


class SchedulerStores:
    """All stores of one engine. The scheduler's thread only. Reservation numbers are unique in the engine's life."""

    def __init__(
        self,
        planner: Planner,
        link: TierdSession,
        clock: Clock,
        max_in_flight_bytes: int = MAX_IN_FLIGHT_BYTES,
    ) -> None:
        self.pool: BlockPool | None = None
        self.worker_epoch: int | None = None
        """Epoch that the workers' last report named; None: no report since the namespace was opened."""
        self.dropped: Counter[str] = Counter()
        self._planner = planner
        self._link = link
        self._clock = clock
        self._max_in_flight_bytes = max_in_flight_bytes
        self._numbers = count(1)
        self._open: dict[int, OpenStore] = {}
        """Sent to the workers."""
        self._planned: list[OpenStore] = []
        """For the next step."""
        self._keys: set[bytes] = set()
        self._settling: deque[tuple[float, bytes]] = deque()
        self._in_flight_bytes = 0
        self._in_flight_chunks = 0
        self._progress_at = clock()
        self._visited = 0

    # Planning.

    def begin_step(self) -> None:
        """A new step is being built."""
        self._visited = 0
        now = self._clock()
        while self._settling and self._settling[0][0] <= now:
            self._keys.discard(self._settling.popleft()[1])

    def plan(
        self, state: RequestState, block_ids: Sequence[int], storable_chunks: int, last: bool
    ) -> None:
        """Plans what is storable of a request beyond its frontier. ``block_ids``: its table, alive at this moment.

        ``last``: the request ends, so what cannot be stored at once is dropped.
        """
        frontier = state.frontier
        if frontier.next_chunk >= storable_chunks:
            return
        obstacle = self._obstacle()
        if obstacle and not last:
            return
        keys = state.keys(self._planner)
        get, usable, open_keys = (
            self._link.replica.get_bits,
            self._link.replica.usable_bits,
            self._keys,
        )
        for chunk in range(frontier.next_chunk, min(storable_chunks, len(keys))):
            if not last and self._visited >= MAX_VISITED_PER_STEP:
                return
            self._visited += 1
            key = keys[chunk]
            if not get(key, 0) & usable and key not in open_keys:
                reason = obstacle or self._store(state, chunk, key, block_ids)
                if reason and not last and reason != "blocks_gone":
                    return
                if reason:
                    self.dropped[reason] += 1
            frontier.next_chunk = chunk + 1

    def _obstacle(self) -> str:
        """Why nothing at all can be stored at this moment; empty if something can."""
        if self.pool is None:
            return "no_block_pool"
        if not self._link.open:
            return "not_attached"
        if self._link.replica.stale or not self._link.usable:
            return "replica_incomplete"
        if self.worker_epoch is not None and self.worker_epoch != self._link.epoch:
            return "worker_not_attached"
        return ""

    def _store(self, state: RequestState, chunk: int, key: bytes, block_ids: Sequence[int]) -> str:
        """Takes a slot and references the blocks; or says why not."""
        planner, pool = self._planner, self.pool
        if pool is None:
            return "no_block_pool"
        length = planner.blocks_per_chunk(GROUP)
        ids = block_ids[chunk * length : (chunk + 1) * length]
        if len(ids) < length or NULL_BLOCK in ids:
            return "blocks_gone"
        size_bytes = self._link.slot_bytes[GROUP]
        if self._in_flight_bytes + size_bytes > self._max_in_flight_bytes:
            return "in_flight_bytes"
        if self._in_flight_chunks >= max(1, len(pool.blocks) // (CACHE_SHARE * length)):
            return "in_flight_blocks"
        credits = self._link.credits[GROUP]
        if not credits:
            return "no_credit"
        blocks = [pool.blocks[block] for block in ids]
        pool.touch(blocks)
        slot = credits.popleft()
        job = StoreJob(next(self._numbers), slot, self._link.epoch, BlockRun(GROUP, 0, tuple(ids)))
        self._planned.append(OpenStore(job, key, key[1:], state, blocks, size_bytes, planner.ranks))
        self._keys.add(key)
        self._in_flight_bytes += size_bytes
        self._in_flight_chunks += 1
        state.stores += 1
        return ""

    def take(self) -> list[StoreJob]:
        """Reserves what was planned and returns the jobs for the workers. What cannot be reserved is dropped."""
        planned, self._planned = self._planned, []
        if not planned:
            return []
        epoch = self._link.epoch
        good = [store for store in planned if store.job.epoch == epoch]
        items = tuple(
            (store.job.reservation, GROUP, store.block_hash, store.job.slot) for store in good
        )
        if not items or not self._link.open or not self._link.send(Reserve(items=items)):
            good = []
        for store in good:
            self._open[store.job.reservation] = store
        if len(good) < len(planned):
            self._drop(
                [store for store in planned if store.job.reservation not in self._open], "lost"
            )
        if good and len(self._open) == len(good):
            self._progress_at = self._clock()
        return [store.job for store in good]

    # Ends.

    def done(self, stores_done: dict[int, int]) -> None:
        """Ranks that are done with reservations, by reservation."""
        if not stores_done:
            return
        now = self._clock()
        self._progress_at = now
        for reservation, ranks in stores_done.items():
            store = self._open.get(reservation)
            if store is None:
                self.dropped["unknown_report"] += 1
                continue
            store.ranks_left -= ranks
            if store.ranks_left > 0:
                continue
            del self._open[reservation]
            self._release(store)
            self._settling.append((now + SETTLING_SECONDS, store.key))

    def _release(self, store: OpenStore) -> None:
        self._in_flight_bytes -= store.size_bytes
        self._in_flight_chunks -= 1
        store.state.stores -= 1
        if self.pool is not None:
            # The end of a prefix is of no use without its beginning, so it is to be evicted first.
            self.pool.free_blocks(reversed(store.blocks))

    def _drop(self, stores: Iterable[OpenStore], reason: str) -> None:
        for store in stores:
            self._release(store)
            self._keys.discard(store.key)
            self.dropped[reason] += 1

    def session_lost(self) -> None:
        """tierd is gone, and its slots with it. Blocks of what the workers were given stay referenced until they report."""
        planned, self._planned = self._planned, []
        self._drop(planned, "lost")
        self._settling.clear()
        self._keys = {store.key for store in self._open.values()}
        self.worker_epoch = None

    def reset(self) -> None:
        """The cache was reset: what was not sent yet is not stored. Its slots are still ours."""
        planned, self._planned = self._planned, []
        for store in planned:
            self._link.credits[GROUP].append(store.job.slot)
        self._drop(planned, "reset")
        self._settling.clear()
        self._keys = {store.key for store in self._open.values()}

    def abandon(self) -> None:
        """KVTier is off: nothing that was planned is sent."""
        planned, self._planned = self._planned, []
        self._drop(planned, "off")

    @property
    def in_flight(self) -> int:
        """Stores that were planned and are not done."""
        return len(self._open) + len(self._planned)

    def worth_stepping_for(self) -> bool:
        """Whether an engine without requests shall go on making steps, so that stores end."""
        if self._planned:
            return True
        return bool(self._open) and self._clock() - self._progress_at < PROGRESS_SECONDS
