"""The scheduler side of the ATOM adapter. Methods have the names of ATOM's hooks.

All hooks run on the scheduler's thread and call no other process. The order within a step:

    process_completions of the previous step
    should_park_partial_prefill_for_load, for each running sequence
    get_num_new_matched_tokens, update_state_after_alloc, should_park_for_load_after_alloc and
    adjust_prefill_chunk_after_alloc, for each admitted sequence
    build_connector_meta
    (the workers run)
    request_finished, for each sequence that ended

ATOM frees the blocks of a sequence only if ``should_defer_free`` is false, both when it ends and
when it is preempted, so the blocks that a copy accesses are never given away.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from kvtier.engines.atom.loads import AtomLoads, LoadLimits
from kvtier.engines.atom.metadata import AtomSave, AtomStepMetadata
from kvtier.engines.atom.prefill_times import StepTimer
from kvtier.engines.atom.sequence_state import (
    ABORTED,
    FINISHED,
    PARKED,
    RUNNING,
    WAITING,
    AtomSequence,
    SequenceState,
)
from kvtier.engines.atom.types import KVConnectorOutput, RequestId, SaveOperationId
from kvtier.engines.common.jobs import BlockRun, StoreJob
from kvtier.engines.common.scheduler_stores import SchedulerStores
from kvtier.engines.common.tierd_session import SessionLost, TierdSession
from kvtier.planner import Planner
from kvtier.tierd.wire import Promoted

CLOSE_SECONDS = 2.0
STANDSTILL_STEPS = 2
"""Steps in which nothing runs although a queued sequence has blocks."""
SAVES = "kvtier"
"""Takes the place of a sequence's id in the operation ids of saves: a store belongs to a chunk."""


@dataclass(frozen=True, slots=True)
class AtomLimits:
    """``min_load_tokens`` and ``min_save_tokens``: None for the live minimum of a load.

    ``step_tokens``: the most prompt tokens of one sequence in one step. ``num_blocks``: of the KV
    cache.
    """

    num_blocks: int
    step_tokens: int
    min_load_tokens: int | None = None
    min_save_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class _EndedLoad:
    request_id: RequestId
    load_id: int
    succeeded: bool
    waked: SequenceState | None = None
    """Reported once more to end a standstill, if it is still parked then."""


class _BlockNumbers:
    """ATOM's blocks in the form of vLLM's pool, numbered from 1: there, block 0 holds nothing.

    References are not counted: the blocks stay allocated because ATOM asks before it frees them.
    """

    def __init__(self, num_blocks: int) -> None:
        self.blocks: Sequence[int] = range(num_blocks + 1)

    def touch(self, blocks: Sequence[Any]) -> None:
        """Does nothing."""

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Does nothing."""


class AtomScheduler:
    """The scheduler side of one engine."""

    def __init__(
        self,
        session: TierdSession,
        planner: Planner,
        limits: AtomLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.session = session
        self.timer = StepTimer(clock)
        self.loads = AtomLoads(
            planner,
            session,
            self.timer.estimate,
            clock,
            LoadLimits(limits.min_load_tokens, limits.step_tokens),
        )
        self.stores = SchedulerStores(planner, session, clock)
        self.stores.blocks.pool = _BlockNumbers(limits.num_blocks)
        self._planner = planner
        self._limits = limits
        self._numbers = count(1)
        self._states: dict[int, SequenceState] = {}
        """By ``id`` of the sequence object, which the state keeps alive."""
        self._saving: set[int] = set()
        """Reservations that were sent to the workers."""
        self._held: deque[_EndedLoad] = deque()
        """Ends of loads that ATOM would attribute to another sequence with the same id."""
        self._prompt_tokens = 0
        self._off = False

    def start(self) -> None:
        """Starts to attach to tierd, in the background."""
        self.session.start()

    def shutdown(self) -> None:
        """Detaches from tierd."""
        self.session.close(CLOSE_SECONDS)

    def turn_off(self) -> None:
        """From now on nothing is loaded or stored. What was started is finished."""
        self._off = True
        self.stores.turn_off()
        for state in self._states.values():
            state.handoff = None

    def _process_messages(self) -> None:
        for event in self.session.drain():
            if isinstance(event, Promoted):
                self.loads.on_promoted(event)
            elif isinstance(event, SessionLost):
                self.loads.on_session_lost()
                self.stores.on_session_lost()

    def _find(self, seq: AtomSequence) -> SequenceState | None:
        state = self._states.get(id(seq))
        return state if state is not None and state.seq is seq else None

    def _state(self, seq: AtomSequence) -> SequenceState:
        state = self._find(seq)
        if state is None:
            state = SequenceState(seq, next(self._numbers), self._planner.chunk_tokens)
            self._states[id(seq)] = state
        return state

    # Admission.

    def get_num_new_matched_tokens(self, seq: AtomSequence) -> tuple[int, bool]:
        """Returns (tokens that tiers hold, whether the sequence may have to be parked).

        The decision follows after the allocation, when the local hit is known.
        """
        if self.session.inbox:
            self._process_messages()
        tokens = self.loads.may_hit(self._state(seq))
        return (tokens, True) if tokens >= self.loads.min_load_tokens else (0, False)

    def update_state_after_alloc(self, seq: AtomSequence) -> None:
        """The sequence has got its blocks, for the first time or after a preemption."""
        state = self._state(seq)
        if state.allocated:
            state.drop_blocks()
            state.tail_tried = False
            self.loads.drop_handoff(state, "preempted")
        else:
            self._prompt_tokens += int(seq.num_prompt_tokens)
        state.allocated = True
        self.timer.forget(state)

    def should_park_for_load_after_alloc(self, seq: AtomSequence) -> bool:
        """Scheme A: decides on the real local hit whether the sequence waits for a load."""
        return self._parked(self._state(seq), self.loads.after_allocation)

    def should_park_partial_prefill_for_load(self, seq: AtomSequence) -> bool:
        """Returns whether a running prefill has reached the boundary of its load."""
        state = self._find(seq)
        if state is None or state.handoff is None:
            return False
        if self.session.inbox:
            self._process_messages()
        return self._parked(state, self.loads.should_park)

    def _parked(self, state: SequenceState, decide: Callable[[SequenceState], bool]) -> bool:
        parked = not self._off and decide(state)
        if parked:
            self.timer.forget(state)
        return parked

    def adjust_prefill_chunk_after_alloc(self, seq: AtomSequence, chunk: int) -> int:
        """Returns how many of ``chunk`` tokens to compute, so that a step ends at a boundary."""
        state = self._find(seq)
        return chunk if state is None else self.loads.adjust_chunk(state, chunk)

    # Steps.

    def build_connector_meta(self) -> AtomStepMetadata:
        """Plans stores of computed chunks and returns the workers' jobs.

        ATOM also calls it while it is idle.
        """
        if self.session.inbox:
            self._process_messages()
        self.stores.begin_step()
        for state in list(self._states.values()):
            if state.finished or state.status == FINISHED:
                self._drop_if_done(state)
            elif state.load is None:
                self._plan_stores(state, finished=False)
        self.wake_holders()
        self.timer.step_begins(list(self._states.values()))
        self._update_heartbeat()
        saves = self._take_saves()
        # Nothing after this line may raise: ATOM waits for a report of every load that was taken.
        return AtomStepMetadata([*self.loads.in_flight.take_jobs(), *saves])

    def wake_holders(self) -> None:
        """Ends a standstill of ATOM's queue that only parked sequences can cause, also once KVTier
        is off. Called in every step.

        ATOM admits in order. If the first waiting sequence does not fit, and one behind it holds
        the blocks since it was parked, nothing runs and nothing ends: ATOM moves a sequence whose
        load has ended to the head only while that end is news, and an aborted one never. So such a
        sequence is reported once more as loaded. An aborted one is marked again once it runs.
        """
        states = self._states.values()
        running = any(state.status == RUNNING for state in states)
        for state in list(states):
            if state.aborted and state.status == RUNNING:
                _set_status(state.seq, ABORTED)
            holds = state.allocated and state.seq.block_table and state.load is None
            if running or not holds or state.status not in (WAITING, ABORTED):
                state.standstill_steps = 0
                continue
            state.standstill_steps += 1
            if state.standstill_steps < STANDSTILL_STEPS:
                continue
            state.standstill_steps = 0
            self.loads.counts["standstills_ended"] += 1
            state.aborted = state.status == ABORTED
            _set_status(state.seq, PARKED)
            # Otherwise ATOM still has the report of the load's end, and must not get a second one.
            if getattr(state.seq, "offload_loaded", False) or getattr(
                state.seq, "offload_load_failed", False
            ):
                self._held.append(_EndedLoad(state.seq.id, 0, True, state))

    def build_load_meta(self) -> AtomStepMetadata:
        """Returns only the jobs that ATOM waits for, once KVTier is off."""
        self._off = True
        self.stores.turn_off()
        return AtomStepMetadata(self.loads.in_flight.take_jobs())

    def _plan_stores(self, state: SequenceState, finished: bool) -> None:
        if self._off or state.skip_reason or not state.allocated:
            return
        seq, planner = state.seq, self._planner
        minimum = self._limits.min_save_tokens
        if minimum is None:
            minimum = self.loads.min_load_tokens
        if int(seq.num_prompt_tokens) < minimum:
            return
        storable = planner.chunks(state.computed_tokens_now)
        if storable <= state.frontier.next_chunk:
            return
        table = [block + 1 for block in seq.block_table]
        self.stores.plan(state, (table,), storable, finished)

    def _take_saves(self) -> list[AtomSave]:
        saves = []
        for job in self.stores.take_jobs():
            self._saving.add(job.reservation)
            operation = SaveOperationId(SAVES, job.reservation)
            saves.append(AtomSave(operation, _from_zero(job)))
        return saves

    def _update_heartbeat(self) -> None:
        self.session.report_tokens(self._prompt_tokens, self.loads.in_flight.loaded_tokens)

    def process_completions(self, output: KVConnectorOutput) -> KVConnectorOutput:
        """Takes what ended on every rank, and returns the plain ids that ATOM acts on."""
        self.timer.step_ended()
        if self.session.inbox:
            self._process_messages()
        for operation in sorted(output.finished_loading, key=_generation):
            self._load_ended(operation, True)
        for operation in sorted(output.failed_loading, key=_generation):
            self._load_ended(operation, False)
        done: dict[int, int] = {}
        for operation in output.finished_saving:
            self._save_ended(operation, done)
        self.stores.on_stores_done(done)
        # ATOM looks at the blocks that it has deferred only when it gets their id, whatever ended
        # the last copy.
        saved: set[Any] = set()
        for state in self._states.values():
            if state.deferred and state.status == FINISHED and not state.busy:
                state.deferred = False
                saved.add(state.seq.id)
        loaded, failed = self._release_held()
        output.finished_loading, output.failed_loading = loaded, failed
        output.finished_saving = saved
        output.connector_completions = set()
        return output

    def _load_ended(self, operation: object, succeeded: bool) -> None:
        state = self.loads.ended(operation, succeeded)
        if state is not None:
            self._held.append(_EndedLoad(state.seq.id, _generation(operation), succeeded))

    def _release_held(self) -> tuple[set[Any], set[Any]]:
        """Returns the ids of (loaded, failed) sequences.

        ATOM knows an end by the id alone. Where two sequences have one id, it must learn of the
        older one first, and of one at a time.
        """
        loaded: set[Any] = set()
        failed: set[Any] = set()
        kept: deque[_EndedLoad] = deque()
        for end in self._held:
            if end.waked is not None and end.waked.status != PARKED:
                continue  # Aborted meanwhile: ATOM would keep the report for the next with this id.
            busy = end.request_id in loaded or end.request_id in failed
            if busy or self.loads.in_flight.has_older(end.request_id, end.load_id):
                kept.append(end)
            else:
                (loaded if end.succeeded else failed).add(end.request_id)
        self._held = kept
        return loaded, failed

    def take_waked(self) -> set[Any]:
        """Returns the ids of sequences that are reported once more to end a standstill.

        For a caller that can no longer use ``process_completions``.
        """
        held, self._held = self._held, deque()
        return {
            end.request_id for end in held if end.waked is not None and end.waked.status == PARKED
        }

    def _save_ended(self, operation: object, done: dict[int, int]) -> None:
        if not isinstance(operation, SaveOperationId):
            self.loads.counts["unidentified_report"] += 1
        elif operation.req_id != SAVES or operation.generation not in self._saving:
            self.loads.counts["late_report"] += 1
        else:
            self._saving.discard(operation.generation)
            done[operation.generation] = self._planner.ranks

    # Ends.

    def should_defer_free(self, seq: AtomSequence) -> bool:
        """Returns whether copies may still access the blocks of the sequence."""
        state = self._find(seq)
        if state is None:
            return False
        if state.status == FINISHED:
            # If not, ATOM frees them, though it calls ``request_finished`` before: an aborted
            # sequence that was parked gets that call here for the first time.
            state.finished = True
        if not state.busy:
            return False
        state.deferred = True
        return True

    def request_finished(self, seq: AtomSequence) -> None:
        """Plans the last stores. ATOM calls it more than once, the last time before it frees."""
        state = self._find(seq)
        if state is None:
            return
        if self.session.inbox:
            self._process_messages()
        self.loads.forget(state)
        if state.load is None and not state.finished:
            self._plan_stores(state, finished=True)
        if state.status == FINISHED:
            state.finished = True
            if not state.busy:
                state.deferred = False
            self._drop_if_done(state)

    def _drop_if_done(self, state: SequenceState) -> None:
        if not state.busy and not state.deferred:
            self.loads.forget(state)
            self.timer.forget(state)
            self._states.pop(id(state.seq), None)

    def has_pending_work(self) -> bool:
        """Returns whether an engine without sequences should go on asking for completions."""
        if self.session.inbox:
            self._process_messages()
        return (
            bool(self._held or self.loads.in_flight.undispatched or self.loads.in_flight)
            or self.stores.has_pending_work()
        )

    def get_statistics(self) -> dict[str, int]:
        """Returns counts since the start and the numbers in flight."""
        counts = self.loads.counts
        dropped = sum(self.stores.dropped.values())
        return {
            **{name: int(amount) for name, amount in counts.items()},
            "stores_dropped": int(dropped),
            "loads_pending": len(self.loads.in_flight),
            "saves_pending": len(self._saving),
            "sequences": len(self._states),
        }


def _set_status(seq: AtomSequence, name: str) -> None:
    """Sets a status by its name; ATOM's enumeration is that of the present status."""
    seq.status = type(seq.status)[name]


def _from_zero(job: StoreJob) -> StoreJob:
    """The job with ATOM's block numbers."""
    blocks = tuple(block - 1 for block in job.run.blocks)
    run = BlockRun(job.run.group, job.run.first, blocks)
    return StoreJob(job.reservation, job.slot, job.epoch, run)


def _generation(operation: object) -> int:
    return int(getattr(operation, "generation", -1))
