"""The scheduler side of ``WeightedMultiConnector``. Called by the scheduler's thread only.

For each request it knows which child loads it and which children still send it. vLLM's scheduler
asserts that it waits for every id that is reported to it, and frees blocks at the first report, so
reports pass through here: an id is passed on once, when the last child has finished with it.
"""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA

from kvtier.engines.vllm.multi.child import ChildConnector
from kvtier.engines.vllm.multi.messages import LoadOrder, MultiStepMetadata, MultiWorkerReport
from kvtier.engines.vllm.multi.statistics import MultiStats

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)
NOTHING: tuple[int | None, bool] = (0, False)
SEND_GRACE_SECONDS = 600.0
"""Blocks that a child keeps are released after this time if it has raised since it kept them, as
its report may never come. vLLM's own lease of blocks for another engine takes 480 s."""


@dataclass(slots=True)
class _RequestChoice:
    """One request, from its first lookup until vLLM finishes it.

    ``outcomes``: by child, what its last answer led to. ``failed``: children that have failed to
    load it; they are not asked again, because vLLM repeats the lookup after a failed load.
    """

    chosen: int = -1
    is_async: bool = False
    computed_tokens: int = 0
    waiting_since: float | None = None
    outcomes: dict[int, str] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _ActiveLoad:
    """A load that vLLM waits for, or one within a step. ``lookup``: of its request."""

    order: LoadOrder
    tokens: int
    lookup: _RequestChoice
    failed: bool = False


@dataclass(frozen=True, slots=True)
class SchedulerGeometry:
    """``block_tokens``: of the one group, for which synchronous loads are possible. ``groups``:
    number of KV cache groups. ``ranks``: how many workers report each load."""

    block_tokens: int
    groups: int
    ranks: int


class MultiSchedulerSide:
    """The children's scheduler sides. ``clock``: monotonic, in seconds."""

    def __init__(
        self,
        children: Sequence[ChildConnector],
        geometry: SchedulerGeometry,
        max_wait_seconds: float,
        stats: MultiStats,
        clock: Callable[[], float],
    ) -> None:
        self.children = children
        self._geometry = geometry
        self._max_wait_seconds = max_wait_seconds
        self.stats = stats
        self._clock = clock
        self._lookups: dict[str, _RequestChoice] = {}
        self._loads: dict[str, _ActiveLoad] = {}
        self._new_loads: dict[str, LoadOrder] = {}
        self._sending: dict[str, dict[int, int]] = {}
        """By finished request and child that delays the release of its blocks: ranks that have
        reported."""
        self._give_up_at: dict[tuple[str, int], float] = {}
        """By finished request and child that has raised: when its report is not waited for."""
        self._raised = [child.raised for child in children]
        self._partial_tails: dict[str, set[int]] = {}
        self._held: set[str] = set()
        """Requests that all children have sent, while a load still writes to their blocks."""
        counts = [child.read("get_finished_count", _count, 0) for child in children]
        self._reports = [count or geometry.ranks for count in counts]

    def _trouble(self, index: int) -> None:
        """A child has raised, on either side."""
        self.children[index].suspend()
        self._raised[index] = self.children[index].raised
        give_up_at = self._clock() + SEND_GRACE_SECONDS
        for name, waiting in self._sending.items():
            if index in waiting:
                self._give_up_at.setdefault((name, index), give_up_at)

    def _look_for_trouble(self) -> None:
        for index, child in enumerate(self.children):
            if child.raised != self._raised[index]:
                self._trouble(index)

    # Lookups.

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Asks every child. The largest product of tokens and weight decides, then the order.

        A child that answers "not yet" is waited for only if no other child has anything.
        """
        state = self._lookups.setdefault(str(request.request_id), _RequestChoice())
        state.chosen, state.computed_tokens = -1, num_computed_tokens
        state.outcomes.clear()
        best_score, best = 0, NOTHING
        for index, child in enumerate(self.children):
            tokens, is_async = self._ask(state, index, request, num_computed_tokens)
            score = (tokens or 0) * child.spec.weight
            if score > best_score:
                if state.chosen >= 0:
                    state.outcomes[state.chosen] = "fewer"
                best_score, best = score, (tokens, is_async)
                state.chosen, state.is_async = index, is_async
                state.outcomes[index] = "chosen"
        if state.chosen < 0 and self._waits(state):
            return None, False
        return best

    def _waits(self, state: _RequestChoice) -> bool:
        if "not_yet" not in state.outcomes.values():
            return False
        now = self._clock()
        if state.waiting_since is None:
            state.waiting_since = now
        return now - state.waiting_since < self._max_wait_seconds

    def _ask(
        self, state: _RequestChoice, index: int, request: Request, computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Returns a child's answer, or ``NOTHING`` if it cannot be used."""
        child = self.children[index]
        if not child.may_load:
            state.outcomes[index] = "suspended"
            return NOTHING
        if index in state.failed:
            state.outcomes[index] = "failed_before"
            return NOTHING
        raised = child.raised
        answer = child.read(
            "get_num_new_matched_tokens", _lookup_answer, NOTHING, request, computed_tokens
        )
        if child.raised != raised:
            self._trouble(index)
            state.outcomes[index] = "error"
            return NOTHING
        outcome = self._verdict(index, answer, request.num_tokens - computed_tokens)
        state.outcomes[index] = outcome
        return answer if outcome in ("fewer", "not_yet") else NOTHING

    def _verdict(self, index: int, answer: tuple[int | None, bool], missing_tokens: int) -> str:
        """Returns the outcome of an answer; "fewer" if it can be used."""
        tokens, is_async = answer
        if tokens is None:
            return "not_yet"
        if tokens <= 0:
            return "nothing"
        if tokens > missing_tokens or (tokens == missing_tokens and not is_async):
            # vLLM asserts that a request is not longer, and that a step computes a token.
            return "invalid"
        if not self.children[index].spec.weight:
            return "unweighted"
        if not is_async and self._geometry.groups > 1:
            # vLLM cannot recompute such a load if it fails.
            return "synchronous"
        if is_async and self._reports[index] != self._geometry.ranks:
            # vLLM waits for a report of every rank.
            return "wrong_rank_count"
        return "fewer"

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Tells the chosen child to load, and the others that they do not."""
        name = str(request.request_id)
        state = self._lookups.setdefault(name, _RequestChoice())
        loader = state.chosen if num_external_tokens > 0 else -1
        unsure = False
        for index, child in enumerate(self.children):
            raised = child.raised
            tokens = num_external_tokens if index == loader else 0
            child.call("update_state_after_alloc", None, request, blocks, tokens)
            unsure = unsure or (index == loader and child.raised != raised)
        self._look_for_trouble()
        self._count_lookup(state)
        if num_external_tokens <= 0:
            return
        order = LoadOrder(
            loader,
            state.is_async,
            self._loaded_blocks(blocks.get_block_ids(), state, num_external_tokens),
            unsure or loader < 0,
        )
        self._new_loads[name] = order
        self._loads[name] = _ActiveLoad(order, num_external_tokens, state)

    def _count_lookup(self, state: _RequestChoice) -> None:
        for index, outcome in state.outcomes.items():
            self.stats.count("multi_lookups", self.children[index].name, outcome)
        state.outcomes.clear()
        state.waiting_since = None

    def _loaded_blocks(
        self, block_ids: Sequence[Sequence[int]], state: _RequestChoice, tokens: int
    ) -> frozenset[int]:
        """The blocks that a load writes. With several groups, all of the request."""
        if len(block_ids) != 1:
            return frozenset(block for group in block_ids for block in group if block)
        size = self._geometry.block_tokens
        first = state.computed_tokens // size
        end = -(-(state.computed_tokens + tokens) // size)
        return frozenset(block_ids[0][first:end])

    def loader(self, request: Request) -> ChildConnector | None:
        """Returns the child that loads, or last loaded, a request."""
        state = self._lookups.get(str(request.request_id))
        return self.children[state.chosen] if state is not None and state.chosen >= 0 else None

    # Steps.

    def build_connector_meta(self, output: SchedulerOutput) -> MultiStepMetadata:
        """Returns the children's messages of this step and the loads that begin in it."""
        messages: list[Any] = [
            child.call("build_connector_meta", None, output) for child in self.children
        ]
        self._look_for_trouble()
        loads, self._new_loads = self._new_loads, {}
        return MultiStepMetadata(
            children=tuple(messages),
            loads={
                name: order
                if messages[order.child] is not None
                else LoadOrder(order.child, order.is_async, order.blocks, unsure=True)
                for name, order in loads.items()
            },
            preempted=frozenset(getattr(output, "preempted_req_ids", None) or ()),
            wants_report=bool(self._give_up_at) and min(self._give_up_at.values()) <= self._clock(),
        )

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Reduces a step's report to what vLLM waits for, and passes each child its own part.

        vLLM's scheduler reads ``output`` after this call.
        """
        found = output.kv_connector_worker_meta
        report = found if isinstance(found, MultiWorkerReport) else None
        for index in report.dead if report is not None else ():
            self.children[index].turn_off("a worker could not start it")
            self._trouble(index)
        invalid = set(output.invalid_block_ids or ())
        loads = dict(self._loads)
        for load in loads.values():
            load.failed = load.failed or not invalid.isdisjoint(load.order.blocks)
        failed = set(getattr(output, "failed_recving", None) or ())
        received = set(self._take_received(output.finished_recving or (), failed))
        self._end_synchronous(report)
        sent = self._take_sent(report)
        passed_on = (received | self._take_held(received)) - self._sending.keys()
        output.finished_recving = passed_on or None
        complete = {name for names in sent for name in names if name not in self._sending}
        waiting = {name for name in complete if name in self._loads}
        self._held |= waiting
        output.finished_sending = (complete - waiting - passed_on) or None
        for index in report.errors if report is not None else ():
            self._trouble(index)
        for index, child in enumerate(self.children):
            view = copy.copy(output)
            own = {name for name, load in loads.items() if load.order.child == index}
            view.finished_sending = sent[index] or None
            view.finished_recving = {name for name in received if name in own} or None
            if hasattr(view, "failed_recving"):
                view.failed_recving = failed & own
            view.invalid_block_ids = set()
            if invalid:
                written: set[int] = set()
                view.invalid_block_ids = invalid & written.union(
                    *(loads[name].order.blocks for name in own)
                )
            view.kv_connector_worker_meta = report.children[index] if report else None
            stats, events = output.kv_connector_stats, output.kv_cache_events
            view.kv_connector_stats = (
                stats.children.get(child.name) if isinstance(stats, MultiStats) else None
            )
            view.kv_cache_events = events.children[index] if events is not None else None
            child.call("update_connector_output", None, view)
        self._look_for_trouble()

    def _take_received(self, reported: Iterable[str], failed: set[str]) -> Iterator[str]:
        """Ends asynchronous loads."""
        for name in reported:
            load = self._loads.get(name)
            if load is None or not load.order.is_async:
                logger.warning("KVTier: dropped the report of a load that vLLM does not wait for")
                continue
            del self._loads[name]
            self._end(load, load.failed or name in failed)
            yield name

    def _take_held(self, received: set[str]) -> set[str]:
        """Requests that were sent before their load has ended: now vLLM may free their blocks."""
        held = self._held & received
        self._held -= held
        return held

    def _end_synchronous(self, report: MultiWorkerReport | None) -> None:
        for name, failed in (report.synchronous if report is not None else {}).items():
            load = self._loads.get(name)
            if load is not None and not load.order.is_async:
                del self._loads[name]
                self._end(load, load.failed or failed)

    def _end(self, load: _ActiveLoad, failed: bool) -> None:
        child = load.order.child
        name = self.children[child].name
        if failed:
            load.lookup.failed.add(child)
        else:
            self.stats.count("multi_loaded_tokens", name, amount=load.tokens)
        self.stats.count("multi_loads", name, "failed" if failed else "loaded")

    def _take_sent(self, report: MultiWorkerReport | None) -> list[set[str]]:
        """Counts the ranks that have sent; returns by child what it has finished."""
        finished: list[set[str]] = [set() for _ in self.children]
        for index, sent in enumerate(report.sent if report is not None else ()):
            for name, ranks in sent.items():
                waiting = self._sending.get(name, {})
                if index not in waiting:
                    self.stats.count(
                        "multi_unexpected_reports", self.children[index].name, "sent", ranks
                    )
                    continue
                waiting[index] += ranks
                if waiting[index] >= self._reports[index]:
                    finished[index].add(name)
        now = self._clock()
        for (name, index), when in list(self._give_up_at.items()):
            if now >= when:
                self.stats.count("multi_abandoned_sends", self.children[index].name)
                finished[index].add(name)
        for index, names in enumerate(finished):
            for name in names:
                self._give_up_at.pop((name, index), None)
                del self._sending[name][index]
                if not self._sending[name]:
                    del self._sending[name]
        return finished

    # Ends.

    def register_finished_partial_tail(
        self, request: Request, block_ids: Any, offloads: Any
    ) -> bool:
        """0.32: whether a child keeps the blocks of a request that is about to finish."""
        keepers = set()
        for index, child in enumerate(self.children):
            if child.call("register_finished_partial_tail", False, request, block_ids, offloads):
                keepers.add(index)
        if keepers:
            self._partial_tails[str(request.request_id)] = keepers
        return bool(keepers)

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Tells every child. True if one of them keeps the blocks until it has reported."""
        name = str(request.request_id)
        keepers = self._partial_tails.pop(name, set())
        merged: dict[str, Any] = {}
        answered = False
        nothing: tuple[bool, dict[str, Any] | None] = (False, None)
        for index, child in enumerate(self.children):
            hybrid = isinstance(child.connector, SupportsHMA)
            hook = "request_finished_all_groups" if hybrid else "request_finished"
            ids = block_ids if hybrid else block_ids[0]
            keeps, parameters = child.read(hook, _finish_answer, nothing, request, ids)
            if keeps:
                keepers.add(index)
            if parameters is None:
                continue
            answered = True
            for key, value in parameters.items():
                if key in merged:
                    self.stats.count("multi_unexpected_reports", child.name, "transfer_params")
                    continue
                merged[key] = value
        if keepers:
            self._sending[name] = dict.fromkeys(keepers, 0)
        self._lookups.pop(name, None)
        load = self._loads.get(name)
        if load is not None and not load.order.is_async:
            del self._loads[name]
        return bool(keepers), merged if answered else None

    @property
    def pending(self) -> dict[str, int]:
        """How many requests are known, by state. For tests: nothing is left behind."""
        return {
            "lookups": len(self._lookups),
            "loads": len(self._loads),
            "sending": len(self._sending),
            "held": len(self._held),
            "given_up": len(self._give_up_at),
            "partial_tails": len(self._partial_tails),
        }


def _lookup_answer(answer: Any) -> tuple[int | None, bool]:
    tokens, is_async = answer
    return None if tokens is None else operator.index(tokens), bool(is_async)


def _finish_answer(answer: Any) -> tuple[bool, dict[str, Any] | None]:
    keeps, parameters = answer
    return bool(keeps), None if parameters is None else dict(parameters)


def _count(answer: Any) -> int:
    return 0 if answer is None else int(answer)
