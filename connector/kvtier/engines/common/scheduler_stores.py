"""Stores on the scheduler side: which chunks leave GPU memory, and which blocks stay referenced.

A chunk is stored once the workers have executed its last token, unless a tier holds it already,
another request is storing it, or the prompt is too short. Each KV cache group has an object of its
own. If there is no free slot, or too much is in flight, the chunk waits behind its request's
frontier. When the request finishes, chunks without a slot are held for a moment, with their blocks
referenced; then they are dropped. A store never delays a request.

The frontier is for groups of full attention, whose blocks a request keeps. The engine takes other
blocks from a request before a store could begin: those that leave a window, and old states. So
they are referenced in the step that computes them (``reference``), stored or held when it is known
that the step was executed, and never wait behind the frontier.

The blocks of a store are referenced in vLLM's block pool from planning until every rank reports.
docs/datapath.md explains why. The scheduler's thread only.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from kvtier.engines.common.allowed_tiers import AllowedTiers
from kvtier.engines.common.jobs import BlockRun, StoreJob
from kvtier.engines.common.referenced_blocks import ReferencedBlocks
from kvtier.engines.common.request_state import RequestState
from kvtier.engines.common.store_conditions import PASSING_REASONS, StoreConditions
from kvtier.engines.common.tierd_session import TierdSession
from kvtier.engines.common.waiting_stores import ChunkBlocks, WaitingStores
from kvtier.planner import GroupKind, Planner
from kvtier.store.types import RAM_BITS
from kvtier.tierd.wire import Reserve

MAX_CHUNKS_VISITED_PER_STEP = 4_096
"""Over all requests; takes about half a millisecond."""
RECENTLY_COMMITTED_SECONDS = 0.5
"""A committed key counts as present until tierd's delta arrives, so that it is not stored twice."""
PROGRESS_TIMEOUT_SECONDS = 10.0
"""An idle engine keeps stepping for stores as long as one of them ended this recently."""
MAX_STORE_DURATIONS = 4_096


@dataclass(slots=True)
class OpenStore:
    """A store that was planned and is not done. ``blocks`` are referenced in vLLM's pool.
    ``previous``: key of the chunk before it, empty for the first one."""

    job: StoreJob
    key: bytes
    previous: bytes
    state: RequestState
    blocks: list[Any]
    ranks_left: int
    planned_at: float = 0.0
    voided: bool = False
    """Its blocks were given back before the copy was seen done, so it is not delivered."""


class _Reference(NamedTuple):
    """Blocks that the step being built computes, or has computed, which are referenced until it is
    known to be executed. ``generation``: of the request's frontier."""

    state: RequestState
    generation: int
    group: int
    chunk: int
    ids: tuple[int, ...]
    blocks: list[Any]


class SchedulerStores:
    """All stores of one engine. Reservation ids are unique for the life of the engine."""

    def __init__(
        self,
        planner: Planner,
        session: TierdSession,
        clock: Callable[[], float],
    ) -> None:
        self.blocks = ReferencedBlocks()
        self.conditions = StoreConditions(session, self.blocks)
        self.dropped: Counter[str] = Counter()
        self.store_seconds: list[float] = []
        """Durations of stores that have ended, since they were last collected."""
        self._planner = planner
        self._session = session
        self._clock = clock
        self._ids = count(1)
        self._planned: list[OpenStore] = []
        """For the next step's metadata."""
        self._waiting = WaitingStores(len(planner.groups))
        self._open: dict[int, OpenStore] = {}
        """Sent to the workers."""
        self._keys: set[bytes] = set()
        """Keys that are planned, open or recently committed."""
        self._recently_committed: deque[tuple[float, bytes]] = deque()
        self._tiers = AllowedTiers(session)
        self._voided: list[int] = []
        """Reservations that the workers must not deliver; for the next step's metadata."""
        self._references: deque[tuple[int, _Reference]] = deque()
        """In the order of their steps."""
        self._full_groups = tuple(
            number for number, group in enumerate(planner.groups) if group.kind is GroupKind.FULL
        )
        self._progress_at = clock()
        self._least_blocks = min(map(planner.object_blocks, self._full_groups), default=0)
        self._visited_chunks = 0
        self._blocked = True

    # Planning.

    def begin_step(self) -> None:
        """Starts the planning of one step."""
        self._visited_chunks = 0
        now = self._clock()
        while self._recently_committed and self._recently_committed[0][0] <= now:
            self._keys.discard(self._recently_committed.popleft()[1])
        self._plan_waiting(now)
        self._blocked = bool(self.conditions.blocked_reason())

    def can_plan(self) -> bool:
        """Whether ``plan`` can store anything more in this step for a request that goes on.

        While no slot is free, it spares a walk over the chunks that wait, for every request.
        """
        credits = self._session.credits
        if self._blocked or not all(map(credits.__getitem__, self._full_groups)):
            return False
        return self.blocks.fit(self._least_blocks)

    def plan(
        self,
        state: RequestState,
        tables: Sequence[Sequence[int]],
        storable_chunks: int,
        finished: bool,
    ) -> None:
        """Plans stores of a request's chunks between its frontier and ``storable_chunks``.

        ``tables``: the request's block tables by group, which must be valid during the call.
        ``finished``: what has no slot is held for a moment; whatever else cannot be stored is
        dropped.
        """
        frontier = state.frontier
        if frontier.next_chunk >= storable_chunks:
            return
        blocked = blocked_reason = self.conditions.blocked_reason(state)
        # The frontier stays, so that a limit that is lowered has its effect on running requests.
        if blocked_reason and not finished:
            return
        if blocked_reason in PASSING_REASONS:
            # What is held is stored if the reason passes soon, as after a request of one step.
            blocked_reason = ""
        replica = self._session.replica
        get, pending_keys = replica.get, self._keys
        by_group = [
            (group, state.group_keys(group, self._planner.hashes_per_chunk))
            for group in self._full_groups
        ]
        end = min([storable_chunks, *(len(keys) for _, keys in by_group)])
        owner = self._session.owner(state)
        keeps = owner.keeps
        tiers = self._tiers
        # Limits of other chunks, which the loop adds, change nothing.
        widens = len(tiers) > 0 and not blocked_reason
        for chunk in range(frontier.next_chunk, end):
            if not finished and self._visited_chunks >= MAX_CHUNKS_VISITED_PER_STEP:
                return
            self._visited_chunks += 1
            for group, keys in by_group:
                key = keys[chunk]
                bits = get(key)
                if bits or key in pending_keys:
                    widened = widens and tiers.widen(owner, group, key)
                    if keeps and not widened and bits & RAM_BITS:
                        tiers.keep(owner, group, key)
                    continue
                first, stop = self._planner.object_range(group, chunk)
                ids = tuple(tables[group][first:stop]) if group < len(tables) else ()
                previous = keys[chunk - 1] if chunk else b""
                reason = blocked_reason or self.blocks.cannot_reference(ids, stop - first)
                if not reason and not finished and not self._session.credits[group]:
                    return
                if not reason:
                    taken = self.blocks.touch(ids)
                    chunk_blocks = ChunkBlocks(group, key, previous, state, ids, taken)
                    self._store(chunk_blocks, bool(blocked))
                elif not finished and reason != "blocks_gone":
                    return
                else:
                    self.dropped[reason] += 1
            frontier.next_chunk = chunk + 1

    # References to blocks of a step.

    def reference(
        self, step: int, state: RequestState, group: int, chunk: int, ids: Sequence[int]
    ) -> None:
        """References the blocks of an object that ``step``, which is being built, completes.

        ``on_step_executed`` stores them. Nothing is referenced if the object is there already, or
        if too much is in flight.
        """
        if self._visited_chunks >= MAX_CHUNKS_VISITED_PER_STEP:
            self.dropped["in_flight_blocks"] += 1
            return
        self._visited_chunks += 1
        keys = state.group_keys(group, self._planner.hashes_per_chunk)
        if chunk < len(keys) and self._is_stored(keys[chunk]):
            if len(self._tiers) and not self.conditions.blocked_reason(state):
                self._tiers.widen(self._session.owner(state), group, keys[chunk])
            return
        reason = self.conditions.blocked_reason(state)
        if reason in PASSING_REASONS:
            # It may have passed when the step has been executed.
            reason = ""
        reason = reason or self.blocks.cannot_reference(ids, max(1, len(ids)))
        if reason:
            self.dropped[reason] += 1
            return
        ids = tuple(ids)
        generation = state.frontier.generation
        self._references.append(
            (step, _Reference(state, generation, group, chunk, ids, self.blocks.touch(ids)))
        )

    def on_step_executed(self, step: int, storable: Callable[[RequestState], int]) -> None:
        """Every step up to ``step`` was executed: stores what was referenced for it.

        ``storable``: of how many chunks of a request the content is final.
        """
        if not self._references or self._references[0][0] > step:
            return
        blocked = bool(self.conditions.blocked_reason())
        while self._references and self._references[0][0] <= step:
            _, found = self._references.popleft()
            state, chunk = found.state, found.chunk
            # Also when this raises, the blocks go back. The hook that called counts and logs it.
            stale = True
            try:
                keys = state.group_keys(found.group, self._planner.hashes_per_chunk)
                stale = (
                    found.generation != state.frontier.generation
                    or chunk >= min(storable(state), len(keys))
                    or self._is_stored(keys[chunk])
                )
            finally:
                if stale:
                    self.blocks.free(found.blocks)
            if stale:
                continue
            group, ids, blocks = found.group, found.ids, found.blocks
            self._store(ChunkBlocks(group, keys[chunk], b"", state, ids, blocks), blocked)

    def _is_stored(self, key: bytes) -> bool:
        """Whether a tier holds the object, or it is being stored."""
        replica = self._session.replica
        return bool(replica.get(key)) or key in self._keys

    def _store(self, chunk: ChunkBlocks, blocked: bool) -> None:
        """Plans the store of a chunk whose blocks are referenced, or holds it until there is a
        slot, and nothing is ``blocked`` as a whole."""
        taken = False
        try:
            if self._session.credits[chunk.group] and not blocked:
                self._add_planned(chunk)
            else:
                self._waiting.add(chunk, self._clock())
            taken = True
        finally:
            # If this raises, the blocks go back. The hook that called counts and logs it.
            if not taken:
                self.blocks.free(chunk.blocks)
        chunk.state.stores_in_flight += 1
        self._keys.add(chunk.key)
        self._tiers.on_store(chunk.state, chunk.key)

    def _add_planned(self, chunk: ChunkBlocks) -> None:
        """Takes a slot for a chunk whose blocks are referenced. There must be a credit."""
        slot = self._session.credits[chunk.group].popleft()
        run = BlockRun(chunk.group, 0, chunk.ids)
        job = StoreJob(next(self._ids), slot, self._session.epoch, run)
        ranks = self._planner.ranks
        self._planned.append(
            OpenStore(
                job, chunk.key, chunk.previous, chunk.state, chunk.blocks, ranks, self._clock()
            )
        )

    # Chunks that wait for a slot.

    def _plan_waiting(self, now: float) -> None:
        """Stores chunks that wait, as far as there are slots now, and drops those that waited too
        long."""
        waiting = self._waiting
        waiting.begin_step()
        if not waiting:
            return
        blocked = self.conditions.blocked_reason()
        if not blocked:
            for chunk in waiting.with_slots(self._session.credits):
                self._add_planned(chunk)
        for chunk in waiting.take_given_up(now):
            self._drop_waiting(chunk, blocked or "no_credit")

    def _drop_waiting(self, chunk: ChunkBlocks, reason: str) -> None:
        self._release(chunk)
        self._keys.discard(chunk.key)
        self.dropped[reason] += 1

    def take_jobs(self) -> list[StoreJob]:
        """Reserves the planned stores and returns their jobs.

        What cannot be reserved is dropped.
        """
        jobs = self._take_jobs()
        # What is kept may just have been reserved.
        self._tiers.send()
        return jobs

    def _take_jobs(self) -> list[StoreJob]:
        planned = self._planned
        if not planned:
            return []
        session = self._session
        current = [store for store in planned if store.job.epoch == session.epoch]
        items = tuple(
            (
                store.job.reservation,
                store.job.run.group,
                store.key[1:],
                store.job.slot,
                store.previous[1:],
            )
            for store in current
        )
        owners = self._tiers.owners((store.state, store.key) for store in current)
        message = Reserve(items=items, owners=owners)
        if not items or not session.namespace_open or not session.send(message):
            current = []
        if current and not self._open:
            self._progress_at = self._clock()
        # After an error before this line the planned stores are still there, and are dropped.
        self._planned = []
        self._open.update((store.job.reservation, store) for store in current)
        if len(current) < len(planned):
            self._drop([each for each in planned if each.job.reservation not in self._open], "lost")
        return [store.job for store in current]

    # Completion.

    def on_stores_done(self, ranks_by_reservation: dict[int, int]) -> None:
        """Takes the workers' reports: how many ranks are done with each reservation."""
        if not ranks_by_reservation:
            return
        now = self._clock()
        self._progress_at = now
        for reservation, ranks in ranks_by_reservation.items():
            store = self._open.get(reservation)
            if store is None:
                self.dropped["unknown_report"] += 1
                continue
            store.ranks_left -= ranks
            if store.ranks_left > 0:
                continue
            del self._open[reservation]
            if len(self.store_seconds) < MAX_STORE_DURATIONS:
                self.store_seconds.append(now - store.planned_at)
            if store.voided:
                continue
            self._release(store)
            self._recently_committed.append((now + RECENTLY_COMMITTED_SECONDS, store.key))

    def awaits_presence(self) -> bool:
        """Returns whether tierd has not yet announced a store that ended a moment ago."""
        now, get = self._clock(), self._session.replica.get
        return any(now < until and not get(key) for until, key in self._recently_committed)

    def _release(self, store: OpenStore | ChunkBlocks) -> None:
        store.state.stores_in_flight -= 1
        self.blocks.free(store.blocks)

    def _drop(self, stores: Iterable[OpenStore], reason: str) -> None:
        for store in stores:
            self._release(store)
            self._keys.discard(store.key)
            self.dropped[reason] += 1

    def _drop_planned(self, reason: str) -> None:
        """Drops all that the workers have not been told of."""
        references, self._references = self._references, deque()
        for _, found in references:
            self.blocks.free(found.blocks)
        planned, self._planned = self._planned, []
        self._drop(planned, reason)
        for chunk in self._waiting.take_all():
            self._drop_waiting(chunk, reason)

    def _forget_committed(self) -> None:
        self._recently_committed.clear()
        self._keys = {store.key for store in self._open.values() if not store.voided}

    def on_session_lost(self) -> None:
        """Handles the loss of tierd, whose slots are lost as well.

        The blocks of open stores stay referenced until the workers report.
        """
        self._drop_planned("lost")
        self._forget_committed()
        self.conditions.worker_epoch = None

    def reset(self) -> None:
        """Drops planned stores, because the weights may have changed. Their slots are still valid
        and are reused."""
        for store in self._planned:
            self._session.credits[store.job.run.group].append(store.job.slot)
        self._drop_planned("reset")
        self._forget_committed()

    def give_back_blocks(self) -> None:
        """Drops all references to blocks, before vLLM resets its prefix cache.

        vLLM cannot reset a cache with referenced blocks. Stores in flight are voided: the workers
        do not deliver them. They learn it with the next step, before its kernels write blocks.
        """
        self.reset()
        for reservation, store in self._open.items():
            if not store.voided:
                self._release(store)
                store.voided = True
                self._voided.append(reservation)
                self.dropped["reset"] += 1
        self._keys.clear()

    def take_voided(self) -> tuple[int, ...]:
        """Returns the reservations to void in the next step."""
        voided, self._voided = self._voided, []
        return tuple(voided)

    def turn_off(self) -> None:
        """Drops planned stores, because KVTier is off."""
        self._drop_planned("off")

    @property
    def in_flight(self) -> int:
        """Stores that were planned and are not done."""
        return len(self._open) + len(self._planned) + len(self._waiting)

    @property
    def referenced_blocks(self) -> int:
        """Blocks that are referenced, counted once for each reference."""
        return self.blocks.count

    def has_pending_work(self) -> bool:
        """Returns whether an engine without requests should keep stepping, so that stores end."""
        if self._planned or self._waiting:
            return True
        return (
            bool(self.blocks.count) and self._clock() - self._progress_at < PROGRESS_TIMEOUT_SECONDS
        )
