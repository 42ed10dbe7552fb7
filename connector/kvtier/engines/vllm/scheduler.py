"""The scheduler side of the vLLM connector: what vLLM's scheduler asks and tells, turned into loads and stores.

All hooks run on the scheduler's thread and make no call to another process. The order of a step:

    get_num_new_matched_tokens, [update_state_after_alloc] per waiting request,
    build_connector_meta, [the workers run], [request_finished] per request that ended, update_connector_output

With asynchronous scheduling the next step is built before the last one's output arrives, so what the workers have executed is known
only from their reports.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.config.models import Daemon, Topology
from kvtier.engines.vllm.identity import EngineIdentity
from kvtier.engines.vllm.lora import Adapters
from kvtier.engines.vllm.metadata import StepMetadata, WorkerReport
from kvtier.engines.vllm.scheduler_loads import LoadCounts, SchedulerLoads
from kvtier.engines.vllm.scheduler_requests import GROUP, RequestState
from kvtier.engines.vllm.scheduler_speed import PrefillSpeed, StepWork
from kvtier.engines.vllm.scheduler_stores import BlockPool, SchedulerStores
from kvtier.engines.vllm.tierd_session import ClientFactory, Clock, TierdSession, tierd_client
from kvtier.planner import Planner
from kvtier.processes import own_identity
from kvtier.tierd.liveness import own_lock
from kvtier.tierd.wire import PROTOCOL, Heartbeat, Hello

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvtier.engines.vllm.metrics import KVTierStats
logger = logging.getLogger(__name__)
MAX_UNREPORTED_STEPS = 1_024
"""Steps whose execution has not been reported. vLLM has a handful in flight; beyond this the workers do not report at all."""
CLOSE_SECONDS = 2.0
ALL_EXECUTED = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"})
"""Ends that the output of an executed step brought about."""


@dataclass(slots=True)
class _Step:
    """A step that was built: per request with something to gain, its generation and the tokens computed afterwards."""

    number: int
    requests: list[tuple[RequestState, int, int]] = field(default_factory=list)


class SchedulerSide:
    """The scheduler's half of one engine.

    ``identity`` is called on the client's thread before each attempt to attach; it may take its time. ``engine``: the name that the
    workers use too.
    """

    def __init__(
        self,
        topology: Topology,
        planner: Planner,
        engine: str,
        identity: Callable[[], EngineIdentity],
        *,
        client: ClientFactory | None = None,
        adapters: Adapters | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.link = TierdSession(topology, len(planner.groups))
        self.prefill = PrefillSpeed(clock)
        self.loads = SchedulerLoads(planner, self.link, clock, self.prefill.estimate)
        self.stores = SchedulerStores(planner, self.link, clock)
        self._planner = planner
        self._engine = engine
        self._identity = identity
        self._adapters = adapters or Adapters()
        self._states: dict[str, RequestState] = {}
        self._steps: deque[_Step] = deque()
        self._step = 0
        self._prompt_tokens = 0
        self._said_no_pool = False
        self.link.lost = self._session_lost
        self._make_client = client or partial(
            tierd_client, private=topology.structural.daemon is Daemon.ENGINE
        )
        self._run_directory = Path(topology.structural.run_directory)

    def start(self) -> None:
        """Begins to attach to tierd, in the background."""
        self.link.start(
            self._make_client(
                self._run_directory, self._hello, self.link.received, self.link.session_lost
            )
        )

    def _hello(self) -> Hello:
        identity, process, ranks = self._identity(), own_identity(), self._planner.ranks
        return Hello(
            protocol=PROTOCOL,
            role="scheduler",
            engine=self._engine,
            pid=process.pid,
            pid_namespace=process.pid_namespace,
            process_start=process.start,
            identity=identity.text,
            volatile_reason=self.link.volatile_reason() or identity.volatile_reason,
            writer_ranks=tuple(range(ranks)),
            ranks=ranks,
            lock=own_lock(self._run_directory),
        )

    def bind(self, pool: BlockPool) -> None:
        """vLLM's block pool, in which source blocks of stores are referenced."""
        self.stores.pool = pool

    # Loads.

    def matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """``get_num_new_matched_tokens``. vLLM asks while nothing of the request is computed, as often as it likes."""
        self.link.drain()
        state = self._state(request)
        if state.scheduled:
            state.lose_blocks()
        state.computed = computed
        if getattr(request, "skip_reading_prefix_cache", False) or not state.ready(self._adapters):
            self.loads.give_up_waiting(state)
            return 0, False
        tokens = self.loads.offer(state, computed)
        return tokens, bool(tokens)

    def allocated(self, request: Request, block_ids: Sequence[Sequence[int]], tokens: int) -> bool:
        """``update_state_after_alloc``. ``tokens`` 0: nothing is to be loaded, or the load is over (the second call).

        True once a load was begun.
        """
        state = self._state(request)
        if tokens <= 0:
            self.loads.give_up_waiting(state)
            return False
        self.loads.begin(state, state.computed, tokens, block_ids[GROUP])
        return True

    def fail_load(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """``allocated`` broke down: vLLM waits for a report all the same, so the workers get a load that must fail."""
        self.loads.fail(self._state(request), block_ids[GROUP] if block_ids else ())

    def load_sources(self, request: Request) -> dict[int, int]:
        """Tokens of the load in flight of a request by the index of the tier they were found in."""
        state = self._states.get(str(request.request_id))
        return {} if state is None else self.loads.sources(state)

    # Steps.

    def build_step(self, output: SchedulerOutput) -> StepMetadata:
        """``build_connector_meta``: plans stores of what was executed, and hands over what the workers are to do."""
        self.link.drain()
        self._step += 1
        self.stores.begin_step()
        for request_id in output.preempted_req_ids or ():
            state = self._states.get(request_id)
            if state is not None and state.scheduled:
                state.lose_blocks()
        tables = self._tables(output)
        step = _Step(self._step)
        work = StepWork()
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = self._states.get(request_id)
            if state is None:
                work.others += scheduled
                continue
            state.scheduled = True
            request = state.request
            if not state.counted:
                state.counted = True
                self._prompt_tokens += request.num_tokens
            work.add(request.num_computed_tokens, scheduled, request.num_tokens)
            if state.excluded:
                continue
            tokens = request.num_computed_tokens + scheduled
            frontier = state.frontier
            if self._planner.chunks(tokens) > frontier.next_chunk:
                step.requests.append((state, frontier.generation, tokens))
                storable = self._storable(state)
                if storable > frontier.next_chunk and state.ready(self._adapters):
                    self.stores.plan(state, tables(state), storable, last=False)
        self._note_tokens()
        self._steps.append(step)
        self.prefill.built(self._step, work)
        if len(self._steps) > MAX_UNREPORTED_STEPS:
            self._steps.popleft()
        if self.stores.pool is None and not self._said_no_pool:
            self._said_no_pool = True
            logger.warning("KVTier: this vLLM does not lend its block pool, so nothing is stored")
        stores = self.stores.take()
        # Last, for what is taken is owed a report: nothing that could break down may come after it.
        loads, cancelled = self.loads.take()
        return StepMetadata(step=self._step, loads=loads, stores=stores, cancelled_loads=cancelled)

    def rest_step(self) -> StepMetadata:
        """``build_connector_meta`` once KVTier is off: only what is owed."""
        self._step += 1
        self._steps.clear()
        self.prefill.forget()
        self.stores.abandon()
        loads, cancelled = self.loads.take()
        return StepMetadata(step=self._step, loads=loads, cancelled_loads=cancelled)

    def _storable(self, state: RequestState) -> int:
        request, planner = state.request, self._planner
        hashed = len(request.block_hashes) * planner.hash_tokens
        return state.frontier.storable_chunks(planner.chunk_tokens, request.num_tokens, hashed)

    def _tables(self, output: SchedulerOutput) -> Callable[[RequestState], Sequence[int]]:
        """A way to the block tables of this step's requests."""
        offered = getattr(output, "kv_connector_block_state", None)
        if offered is not None:

            def ask(state: RequestState) -> Sequence[int]:
                tables = offered.get_block_ids(state.request_id)
                return tables[GROUP] if tables is not None else ()

            return ask
        for new in output.scheduled_new_reqs:
            state = self._states.get(new.req_id)
            if state is not None:
                state.blocks = list(new.block_ids[GROUP])
        cached = output.scheduled_cached_reqs
        resumed = cached.resumed_req_ids
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            state = self._states.get(request_id)
            if state is None:
                continue
            if request_id in resumed:
                state.blocks = []
            if blocks is not None:
                state.blocks.extend(blocks[GROUP])
        return lambda state: state.blocks

    def output(self, report: object) -> None:
        """``update_connector_output``, with the workers' joint report of a step."""
        if not isinstance(report, WorkerReport):
            return
        self.link.drain()
        self.stores.worker_epoch = report.attached_epoch
        self.prefill.reported(report.step)
        while self._steps and self._steps[0].number <= report.step:
            for state, generation, tokens in self._steps.popleft().requests:
                state.frontier.executed(generation, tokens)
        for result in report.loads:
            self.loads.ended(result)
        if report.loads:
            self._note_tokens()
        self.stores.done(report.stores_done)

    def _note_tokens(self) -> None:
        """What tierd is told with the next heartbeat; it reports which share of prompts came from which tier."""
        loaded, before = self.loads.loaded_tokens, self.link.beat
        totals = tuple(loaded[tier] for tier in range(max(loaded) + 1)) if loaded else ()
        if (before.prompt_tokens, before.loaded_tokens) != (self._prompt_tokens, totals):
            self.link.beat = Heartbeat(prompt_tokens=self._prompt_tokens, loaded_tokens=totals)

    def finished(
        self, request: Request, block_ids: Sequence[Sequence[int]], store: bool = True
    ) -> None:
        """``request_finished_all_groups``: its blocks are still there, for the last time. ``store``: whether to keep the rest."""
        self.link.drain()
        state = self._states.pop(str(request.request_id), None)
        if state is None:
            return
        loading = state.load != 0
        self.loads.request_over(state)
        if loading or not store or not state.ready(self._adapters):
            return
        frontier = state.frontier
        if request.status.name in ALL_EXECUTED and self._steps:
            # vLLM tells of an end before it passes on the report of the step that brought it; that step is the oldest one.
            for other, generation, tokens in self._steps[0].requests:
                if other is state:
                    frontier.executed(generation, tokens)
        self.stores.plan(
            state, block_ids[GROUP] if block_ids else (), self._storable(state), last=True
        )

    def reset(self) -> bool:
        """``reset_cache``: the weights may have been replaced. What runs now was computed with the old ones, wholly or partly."""
        self.link.drain()
        self.stores.reset()
        self.loads.reset()
        for state in self._states.values():
            state.excluded = state.excluded or "reset"
        return self.link.reset()

    @property
    def busy(self) -> bool:
        """``has_pending_push_work``: an engine without requests shall go on making steps for stores."""
        self.link.drain()
        return self.stores.worth_stepping_for()

    def take_counts(self, stats: KVTierStats) -> None:
        """Moves what was counted since the last call into ``stats``."""
        counts, self.loads.counts = self.loads.counts, LoadCounts()
        stats.add("offered_tokens", counts.offered_tokens)
        stats.add_all("loaded_tokens", counts.loaded_tokens)
        stats.add_all("load_failures", counts.failures)
        stats.add_all("promotions", counts.promotions)
        stats.observe_loads(counts.load_seconds)
        stats.add_all("dropped_stores", self.stores.dropped)
        self.stores.dropped.clear()

    def close(self) -> None:
        """The engine ends."""
        self.link.close(CLOSE_SECONDS)

    def _state(self, request: Request) -> RequestState:
        request_id = str(request.request_id)
        state = self._states.get(request_id)
        if state is None or state.request is not request:
            state = self._states[request_id] = RequestState(request)
        return state

    def _session_lost(self) -> None:
        self.loads.session_lost()
        self.stores.session_lost()

    def snapshot(self) -> dict[str, Any]:
        """Numbers for people and tests."""
        return {
            "requests": len(self._states),
            "loads": self.loads.in_flight,
            "stores": self.stores.in_flight,
            "replica": len(self.link.replica),
            "epoch": self.link.epoch,
            "usable": self.link.usable,
        }
