"""Loads in flight on the scheduler side of ATOM: from their start until every rank has reported.

ATOM waits for a report of each load, by its operation id. The scheduler's thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvtier.engines.atom.metadata import AtomCancel, AtomJob, AtomLoad
from kvtier.engines.atom.sequence_state import ABORTED, FINISHED, SequenceLoad, SequenceState
from kvtier.engines.atom.types import LoadOperationId, RequestId
from kvtier.engines.common.jobs import BlockRun, LoadJob
from kvtier.engines.common.tierd_session import TierdSession
from kvtier.planner import Planner
from kvtier.store.generations import unpack_location
from kvtier.tierd.wire import Load, LoadReleased

MIN_LOAD_TIMEOUT_SECONDS = 1.0
"""The data of a load is in RAM, so a busy machine must not turn it into a failure."""
MIN_COPY_BYTES_PER_SECOND = 2 << 30
"""A load may take as long as copies at this rate, a fraction of what any GPU link delivers."""


class AtomLoadsInFlight:
    """The loads in flight of one engine. ``new_id``: returns an id that is unique for its life.
    ``counts``: decisions and ends of loads, by name."""

    def __init__(
        self,
        planner: Planner,
        session: TierdSession,
        new_id: Callable[[], int],
        counts: Counter[str],
    ) -> None:
        self.loaded_tokens: Counter[int] = Counter()
        """By tier, since the engine started."""
        self._planner = planner
        self._session = session
        self._new_id = new_id
        self._counts = counts
        self._active: dict[int, SequenceLoad] = {}
        self._jobs: list[AtomLoad] = []
        self._cancels: list[AtomCancel] = []

    def start(
        self,
        state: SequenceState,
        first: int,
        runs: tuple[BlockRun, ...],
        locations: Sequence[int],
        promotion_id: int,
    ) -> bool:
        """Starts a load; returns False if tierd cannot be reached.

        ``first``: its first chunk. ``runs`` and ``locations``: target blocks and source of each
        chunk. ``promotion_id``: the promotion that prepared it, 0 if none.
        """
        planner, session, seq = self._planner, self._session, state.seq
        chunks = len(locations)
        load_id = self._new_id()
        message = Load(
            load=load_id,
            promotion=promotion_id,
            keys=state.wire_keys(first, chunks),
            owner=session.owner(state),
        )
        if not session.send(message):
            self._counts["not_sent"] += 1
            return False
        timeout = MIN_LOAD_TIMEOUT_SECONDS
        timeout += sum(session.slot_bytes) * chunks / MIN_COPY_BYTES_PER_SECOND
        load = SequenceLoad(load_id, state, first, chunks, session.epoch)
        state.load = self._active[load_id] = load
        slots, generations = zip(*map(unpack_location, locations), strict=True)
        job = LoadJob(load_id, state.request_id, runs, timeout, session.epoch, slots, generations)
        self._jobs.append(AtomLoad(LoadOperationId(seq.id, load_id), job))
        _announce(seq, planner.tokens(first), planner.tokens(first + chunks))
        self._counts["loads"] += 1
        return True

    def take_jobs(self) -> list[AtomJob]:
        """Returns the jobs for the next step, loads before the cancellations of others."""
        for load in self._active.values():
            ended = load.state.status in (ABORTED, FINISHED)
            if ended and load.dispatched and not load.cancelled:
                load.cancelled = True
                self._cancels.append(AtomCancel(load.load_id))
        jobs: list[AtomJob] = [*self._jobs, *self._cancels]
        for each in self._jobs:
            self._active[each.operation.generation].dispatched = True
        self._jobs, self._cancels = [], []
        return jobs

    def ended(self, operation: object, succeeded: bool) -> SequenceLoad | None:
        """Every rank has reported a load. Returns the load; None if it is unknown.

        A report of an earlier generation, or for an id alone, says nothing about a current load.
        """
        if not isinstance(operation, LoadOperationId):
            self._counts["unidentified_report"] += 1
            return None
        load = self._active.get(operation.generation)
        if load is None or load.state.seq.id != operation.req_id:
            self._counts["late_report"] += 1
            return None
        del self._active[operation.generation]
        state = load.state
        state.load = None
        if load.epoch == self._session.epoch:
            self._session.send(LoadReleased(load=load.load_id))
        if succeeded:
            tokens = self._planner.tokens(load.chunks)
            self._counts["loads_whole"] += 1
            self._counts["loaded_tokens"] += tokens
            self.loaded_tokens[0] += tokens
        else:
            # ATOM computes from where the load began, and a second attempt would fail again.
            state.load_failed = True
            state.frontier.move_back(load.first_chunk)
            self._counts["loads_failed"] += 1
        return load

    def has_older(self, request_id: RequestId, load_id: int) -> bool:
        """Returns whether an older load in flight belongs to a sequence with the same id."""
        return any(
            load.load_id < load_id and load.state.seq.id == request_id
            for load in self._active.values()
        )

    def __len__(self) -> int:
        """Loads that some rank has not reported."""
        return len(self._active)

    @property
    def undispatched(self) -> bool:
        """Whether jobs wait for the next step."""
        return bool(self._jobs or self._cancels)


def _announce(seq: object, start_tokens: int, end_tokens: int) -> None:
    """Sets the attributes by which ATOM resumes the sequence after the load.

    ``offload_loaded`` and ``offload_load_failed`` of an earlier load are cleared: ATOM takes them
    for the end of this one when the sequence is aborted, and would free blocks that the load still
    writes.
    """
    for name, value in (
        ("offload_load_start_tokens", start_tokens),
        ("offload_loaded_tokens", end_tokens),
        ("offload_loaded", False),
        ("offload_load_failed", False),
    ):
        setattr(seq, name, value)
