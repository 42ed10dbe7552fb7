"""The scheduler side of the vLLM connector: turns vLLM's scheduler hooks into loads and stores.

All hooks run on the scheduler's thread and call no other process. The order within a step:

    get_num_new_matched_tokens and, for admitted requests, update_state_after_alloc
    build_connector_meta
    (the workers run)
    request_finished for each request that ended
    update_connector_output

Only the workers' reports say which steps were executed (``built_steps``).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvtier.config.models import Honour
from kvtier.engines.common.hints import NO_HINTS
from kvtier.engines.common.lora import AdapterDigests
from kvtier.engines.common.request_state import RequestState, reads_no_cache
from kvtier.engines.common.scheduler_stores import BlockPool, SchedulerStores
from kvtier.engines.common.tierd_session import TierdSession
from kvtier.engines.vllm.built_steps import BuiltStep, BuiltSteps
from kvtier.engines.vllm.cost_estimates import PrefillEstimator, StepTokens
from kvtier.engines.vllm.kv_events import KVEvents
from kvtier.engines.vllm.metadata import StepMetadata, WorkerReport
from kvtier.engines.vllm.metrics import KVTierStats
from kvtier.engines.vllm.queued_prefixes import QueuedPrefixes
from kvtier.engines.vllm.request_hints import HintReader
from kvtier.engines.vllm.scheduler_blocks import (
    BlockReferences,
    before_reset,
    boundary_states,
    step_block_tables,
)
from kvtier.engines.vllm.scheduler_loads import SchedulerLoads
from kvtier.engines.vllm.scheduler_statistics import SchedulerStatistics
from kvtier.engines.vllm.weights_state import WeightsState
from kvtier.planner import Planner
from kvtier.tierd.wire import Arriving, Promoted

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)
CLOSE_SECONDS = 2.0
EXECUTED_STATUSES = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"})
"""Statuses that result from the output of an executed step."""


class KVTierConnectorScheduler:
    """The scheduler side of one engine. Hook methods have the names of vLLM's hooks."""

    def __init__(
        self,
        session: TierdSession,
        planner: Planner,
        *,
        adapters: AdapterDigests | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.session = session
        self.prefill = PrefillEstimator(clock)
        self.loads = SchedulerLoads(planner, session, self.prefill, clock)
        self.stores = SchedulerStores(planner, session, clock)
        self._references = BlockReferences(planner, self.stores)
        self.queue = QueuedPrefixes(planner, session, self.loads.new_id, clock)
        self.events: KVEvents | None = None
        """Set before ``start`` if the engine publishes KV events."""
        self._planner = planner
        self.weights = WeightsState(planner.ranks, clock)
        self._hints = HintReader(lambda: session.tier_names, clock)
        self.skipped: Counter[str] = Counter()
        """Finished requests that took no part, or only stored, by reason."""
        self._statistics = SchedulerStatistics(
            session, self.loads, self.stores, self.queue, self._hints, self.skipped
        )
        self._adapters = adapters or AdapterDigests()
        self._clock = clock
        self._states: dict[str, RequestState] = {}
        self._steps = BuiltSteps()
        self._step = 0
        self._prompt_tokens = 0
        self._missing_pool_logged = False

    def start(self) -> None:
        """Starts to attach to tierd, in the background."""
        self.session.start()

    def shutdown(self) -> None:
        """Detaches from tierd."""
        self.session.close(CLOSE_SECONDS)

    def bind_gpu_block_pool(self, pool: BlockPool) -> None:
        """Takes vLLM's block pool, in which the source blocks of stores are referenced."""
        self.stores.pool = pool
        self.weights.watch(pool)
        before_reset(pool, self.stores.give_back_blocks)

    def _process_messages(self) -> None:
        for event in self.session.drain():
            if isinstance(event, Promoted):
                self.loads.on_promoted(event)
            elif isinstance(event, Arriving):
                self.loads.on_arriving(event)
            else:
                self.loads.on_session_lost()
                self.stores.on_session_lost()
                self.queue.clear()

    # Lookup and loads.

    def on_new_request(self, request: Request) -> None:
        """The request waits in the engine's queue from now on."""
        self.queue.add(self._state(request))

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """vLLM calls this in every step until the request is admitted, and after a preemption."""
        self._begin_hook()
        state = self._state(request)
        self.queue.looked_up(state)
        if state.scheduled:
            state.drop_blocks()
        state.computed_tokens = num_computed_tokens
        if not state.skip_reason and self._adapters.worth_waiting(request.lora_request):
            return None, False
        reason = self._skip_reason(state)
        if reason:
            self.loads.cancel_promotion(state)
            self._count_query(state, reason)
            return 0, False
        if not self.weights.usable and not self.session.replica_ready:
            # The step that the workers take the fingerprint in comes next.
            waits = self.weights.worth_waiting and self.session.ready is not None
            if waits:
                return None, False
            self._count_query(state, "not_ready")
            return 0, False
        tokens = self.loads.match(state, num_computed_tokens)
        if tokens is not None:
            self._count_query(state, "load" if tokens else self.loads.decision)
        return tokens, bool(tokens)

    def _skip_reason(self, state: RequestState) -> str:
        """Returns why nothing is loaded for a request; empty if something may be."""
        if state.hints.skip_load:
            return "skip_load"
        if reads_no_cache(state.request):
            return "not_read"
        return "" if state.is_cacheable(self._adapters) else "skipped"

    def _count_query(self, state: RequestState, decision: str) -> None:
        """vLLM repeats a lookup until there is room for the request; one of them is counted."""
        if state.query_counted:
            return
        state.query_counted = True
        counts = self.loads.in_flight.counts
        counts.queries += 1
        counts.queried_tokens += max(0, state.request.num_tokens - state.computed_tokens)
        counts.decisions[decision] += 1
        if state.promotion_tried and state.lookup_started_at is not None:
            counts.note_wait(self._clock() - state.lookup_started_at)

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> bool:
        """Starts the load of ``num_external_tokens`` tokens; returns whether one was started.

        0 tokens: nothing is loaded, or this is the second call after an asynchronous load.
        """
        state = self._state(request)
        if num_external_tokens <= 0:
            self.loads.cancel_promotion(state)
        else:
            self.loads.start(state, num_external_tokens, block_ids)
        # The load has pinned what the queue has protected.
        self.queue.remove(state)
        return num_external_tokens > 0

    def fail_load(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """Gives the workers a load that must fail, after ``update_state_after_alloc`` raised.

        vLLM waits for a report in any case.
        """
        self.loads.in_flight.start_failing(self._state(request), block_ids[0] if block_ids else ())

    def get_external_token_sources(self, request: Request) -> dict[int, int]:
        """Returns the tokens of a request's load in flight, by the tier where they were found."""
        state = self._states.get(str(request.request_id))
        return {} if state is None else self.loads.in_flight.token_sources(state)

    def _state(self, request: Request) -> RequestState:
        request_id = str(request.request_id)
        state = self._states.get(request_id)
        if state is None or state.request is not request:
            honoured = self.session.live.hints.honour is Honour.ENABLED
            hints = self._hints.read(request) if honoured else NO_HINTS
            state = self._states[request_id] = RequestState(request, hints)
            if hints.tiers is not None:
                state.tier_bits = self.session.tier_bits(hints.tiers)
            if hints.prefetch:
                self.queue.keep(state, self._adapters)
        return state

    # Steps.

    def build_connector_meta(self, output: SchedulerOutput) -> StepMetadata:
        """Plans stores of executed chunks and returns the workers' jobs for this step."""
        self._begin_hook()
        self._step += 1
        self.queue.advance(self._adapters)
        self.stores.begin_step()
        events = self.events
        if events is not None:
            events.begin_step()
        for request_id in output.preempted_req_ids or ():
            state = self._states.get(request_id)
            if state is not None and state.scheduled:
                state.drop_blocks()
        block_tables = step_block_tables(output, self._states, len(self._planner.groups))
        offers = boundary_states(output)
        step, references = BuiltStep(self._step), self._references
        step_tokens, decode_tokens = StepTokens(), 0
        stores, states, chunk_tokens = self.stores, self._states, self._planner.chunk_tokens
        may_store, windows = stores.can_plan(), bool(references.windows)
        # With hundreds of running requests, what is done for each of them is the cost of a step.
        for request_id, scheduled_tokens in output.num_scheduled_tokens.items():
            state = states.get(request_id)
            if state is None:
                decode_tokens += scheduled_tokens
                continue
            admitted, state.scheduled = not state.scheduled, True
            if admitted:
                self.queue.remove(state)
            request = state.request
            known, computed = request.num_tokens, request.num_computed_tokens
            tokens = computed + scheduled_tokens
            if not state.prompt_counted:
                state.prompt_counted = True
                self._prompt_tokens += known
            if computed < known - 1:
                step_tokens.prompt_spans.append((computed, tokens))
            else:
                # Only the last token can be freshly sampled.
                decode_tokens += scheduled_tokens
            if state.skip_reason:
                continue
            frontier, chunks = state.frontier, tokens // chunk_tokens
            if events is not None and state.is_cacheable(self._adapters):
                events.describe(state, self._planner.chunks(self._hashed_tokens(state)))
            if chunks > frontier.next_chunk:
                step.requests.append((state, frontier.generation, tokens))
                if may_store and stores.may_be_stored(state):
                    storable = self._storable_chunks(state)
                    if storable > frontier.next_chunk and state.is_cacheable(self._adapters):
                        stores.plan(state, block_tables(state), storable, finished=False)
                        may_store = stores.can_plan()
            if windows and chunks and chunks * chunk_tokens > computed - admitted:
                ends = range(computed + 1 - admitted, tokens + 1)
                references.add_windows(self._step, state, ends, block_tables)
            if offers and request_id in offers:
                references.add_states(self._step, state, tokens, offers[request_id])
        step_tokens.decode_tokens = decode_tokens
        self._update_heartbeat()
        self.prefill.step_built(self._step, step_tokens)
        unreported = self._steps.add(step)
        if unreported:
            self.stores.on_step_executed(unreported, lambda state: 0)
        if self.stores.pool is None and not self._missing_pool_logged:
            self._missing_pool_logged = True
            logger.warning("KVTier: storing nothing: this vLLM does not expose its block pool")
        ready = self.session.ready
        metadata = StepMetadata(
            step=self._step,
            idle=not output.num_scheduled_tokens,
            identity=self.weights.number,
            report_weights=self.weights.report_needed,
            assumed_weights=self.weights.of_loads(ready.weights if ready is not None else ()),
        )
        # What was taken must reach the workers: nothing after this line may raise.
        metadata.stores = self.stores.take_jobs()
        metadata.loads, metadata.cancelled_loads = self.loads.in_flight.take_jobs()
        metadata.arrived_keys = self.loads.in_flight.take_arrived()
        metadata.voided_stores = self.stores.take_voided()
        return metadata

    def build_load_meta(self) -> StepMetadata:
        """Returns only the loads that vLLM waits for, once KVTier is off."""
        self._step += 1
        try:
            self._steps.clear()
            self.prefill.clear()
            self.stores.turn_off()
        except Exception as error:  # vLLM waits for the loads in any case
            logger.exception("KVTier: cannot drop stores: %s", error)
        loads, cancelled = self.loads.in_flight.take_jobs()
        return StepMetadata(
            step=self._step,
            loads=loads,
            cancelled_loads=cancelled,
            arrived_keys=self.loads.in_flight.take_arrived(),
            identity=self.weights.number,
            voided_stores=self.stores.take_voided(),
        )

    def _storable_chunks(self, state: RequestState) -> int:
        request, planner = state.request, self._planner
        return state.frontier.storable_chunks(
            planner.chunk_tokens, request.num_tokens, self._hashed_tokens(state)
        )

    def _hashed_tokens(self, state: RequestState) -> int:
        return len(state.request.block_hashes) * self._planner.hash_tokens

    def _final_chunks(self, state: RequestState) -> int:
        """Of how many chunks the content is final, as far as they are executed; 0 if the request
        takes no part."""
        if not state.is_cacheable(self._adapters):
            return 0
        return self._planner.chunks(min(state.request.num_tokens - 1, self._hashed_tokens(state)))

    def update_connector_output(self, report: object, *, recomputes: bool = False) -> None:
        """Takes the workers' aggregated report of a step.

        ``recomputes``: vLLM has turned requests back to before blocks that could not be loaded.
        """
        try:
            if recomputes:
                self._steps.drop_turned_back()
            if not isinstance(report, WorkerReport):
                return
            self._begin_hook()
            self._take_weights(report)
            self.stores.worker_epoch = report.attached_epoch
            self.prefill.step_executed(report.step)
            self._steps.executed(report.step)
            self.stores.on_step_executed(report.step, self._final_chunks)
        finally:
            # Each end is reported once: what it holds would be held until the engine ends.
            if isinstance(report, WorkerReport):
                self._take_ends(report)

    def _take_ends(self, report: WorkerReport) -> None:
        """Takes every end of a load and of a store, whatever one of them raises."""
        error: Exception | None = None
        for result in report.loads:
            try:
                self.loads.in_flight.on_load_done(result)
            except Exception as raised:  # noqa: BLE001 - it is raised below
                error = raised
        for reservation, ranks in report.stores_done.items():
            try:
                self.stores.on_stores_done({reservation: ranks})
            except Exception as raised:  # noqa: BLE001 - it is raised below
                error = raised
        if error is not None:
            raise error
        if report.loads:
            self._update_heartbeat()

    def _update_heartbeat(self) -> None:
        """tierd reports which share of prompt tokens came from which tier."""
        self.session.report_tokens(self._prompt_tokens, self.loads.in_flight.loaded_tokens)

    # Ends.

    def request_finished(
        self, request: Request, block_ids: Sequence[Sequence[int]], store: bool = True
    ) -> None:
        """Plans the last stores of a request; its blocks are valid during this call only."""
        self._begin_hook()
        state = self._states.pop(str(request.request_id), None)
        if state is None:
            return
        self.queue.remove(state)
        if state.skip_reason:
            self.skipped[state.skip_reason] += 1
        elif reads_no_cache(request):
            self.skipped["not_read"] += 1
        elif state.hints.skip_load:
            self.skipped["skip_load"] += 1
        loading = state.load_id != 0
        self.loads.on_request_finished(state)
        if loading or not store or not state.is_cacheable(self._adapters):
            return
        if request.status.name in EXECUTED_STATUSES:
            self._steps.request_ended(state)
        if self.events is not None:
            chunks = self._planner.chunks(self._hashed_tokens(state))
            self.events.describe(state, chunks, at_end=True)
        self.stores.plan(state, block_ids, self._storable_chunks(state), finished=True)

    def take_events(self) -> list[object]:
        """Returns the KV events since the last step."""
        return self.events.take() if self.events is not None else []

    def reset_cache(self) -> bool:
        """vLLM resets the caches of connectors. Objects of the weights that the engine has now
        stay valid."""
        self._begin_hook()
        self.stores.give_back_blocks()
        self._weights_may_have_changed("the connector's cache was reset", reset=False)
        return True

    def start_over(self) -> None:
        """Goes on after an unexpected error. What was planned is dropped, and requests that are
        known take no further part: what is known about them may be wrong."""
        self.stores.reset()
        self.loads.reset()
        self.queue.clear()
        self._steps.clear()
        self.prefill.clear()
        for state in self._states.values():
            state.skip_reason = state.skip_reason or "error"

    def on_engine_signal(self, name: str) -> None:
        """The engine's thread is about to do something that can change weights."""
        self._begin_hook()
        self._weights_may_have_changed(name, reset=False)

    def on_adapter_removed(self) -> None:
        """vLLM reads an adapter's files again when the next request names it."""
        self._adapters.check_again()

    def _begin_hook(self) -> None:
        """Every hook begins with what has happened since the last one."""
        if self.weights.was_reset():
            self._weights_may_have_changed("the prefix cache was reset", reset=True)
        if self.session.inbox:
            self._process_messages()

    def _weights_may_have_changed(self, cause: str, *, reset: bool) -> None:
        """Stops loads and stores until the workers have taken the fingerprint again.

        What requests have computed so far is never stored.
        """
        self.weights.rise(reset=reset)
        if reset and self.events is not None:
            self.events.announce_again()
        self._adapters.check_again()
        logger.info("KVTier: identity %d: %s", self.weights.number, cause)
        self.session.suspend(assumed=self.weights.assumed)
        self.stores.reset()
        self._forget_matches()
        for state in self._states.values():
            if state.scheduled:
                state.skip_reason = state.skip_reason or "reset"

    def _take_weights(self, report: WorkerReport) -> None:
        state = self.weights
        if not state.take_report(report):
            return
        if state.stale:
            self.session.suspend(stale=True)
            self._forget_matches()
            return
        if not self.session.identify(state.number, state.weights, state.reason):
            # What was found for the assumed weights belongs to others.
            self._forget_matches()
        logger.info(
            "KVTier: identity %d: %s",
            state.number,
            f"the weights are unknown: {state.reason}" if state.reason else "the weights are known",
        )

    def _forget_matches(self) -> None:
        """Forgets what lookups have found, promotions included."""
        self.loads.reset()
        self.queue.clear()
        for state in self._states.values():
            state.cached_match = None

    def has_pending_work(self) -> bool:
        """Returns whether an engine without requests should keep stepping, so that copies end."""
        self._begin_hook()
        if self.events is not None and (self.events.pending or self.stores.awaits_presence()):
            return True
        return self.stores.has_pending_work() or self.loads.in_flight.has_pending_work()

    def collect_stats(self, stats: KVTierStats) -> None:
        """Moves the counts since the last call into ``stats``."""
        self._statistics.collect(stats, self.events)

    def report_gauges(self, stats: KVTierStats) -> None:
        """Adds the current state to ``stats``, as far as it has changed since the last call."""
        self._statistics.report_gauges(stats)

    def snapshot(self) -> dict[str, object]:
        """Returns the current state, for debugging and tests."""
        return {
            "requests": len(self._states),
            "loads": len(self.loads.in_flight),
            "stores": self.stores.in_flight,
            "replica": len(self.session.replica),
            "epoch": self.session.epoch,
            "usable": self.session.replica_ready,
        }
