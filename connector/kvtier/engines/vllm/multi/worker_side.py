"""The worker side of ``WeightedMultiConnector``: one in each rank, called by its main thread only.

It knows which child loads which request, because vLLM would take the report of any child for that
of the loader: a P/D connector reports a transfer that only releases blocks elsewhere.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.engines.vllm.multi.child import ChildConnector
from kvtier.engines.vllm.multi.messages import LoadOrder, MultiStepMetadata, MultiWorkerReport
from kvtier.engines.vllm.multi.statistics import MultiStats

logger = logging.getLogger(__name__)

GRACE_SECONDS = 30.0
"""A load of a child that raised may still be writing to its blocks, so it is reported as failed
only after this time, unless the child reports it before."""


@dataclass(slots=True)
class _RunningLoad:
    """A load on this rank. ``give_up_at``: when it is reported as failed, if nothing came."""

    order: LoadOrder
    failed: bool = False
    give_up_at: float | None = None


@dataclass(frozen=True, slots=True)
class TransferResults:
    """What ended on this rank, of what vLLM waits for. ``invalid_blocks``: to be recomputed."""

    received: set[str]
    failed: set[str]
    invalid_blocks: set[int]


class MultiWorkerSide:
    """The children's worker sides.

    ``several_groups``: block errors are reported by request. ``reports_failed``: vLLM takes failed
    requests; if not, it takes their blocks. ``clock``: monotonic, in seconds.
    """

    def __init__(
        self,
        children: Sequence[ChildConnector],
        stats: MultiStats,
        clock: Callable[[], float],
        *,
        several_groups: bool,
        reports_failed: bool,
    ) -> None:
        self.children = children
        self.stats = stats
        self._clock = clock
        self._several_groups = several_groups
        self._reports_failed = reports_failed
        self._loads: dict[str, _RunningLoad] = {}
        self._bound: list[ChildConnector] = []
        """The children that have a message for this step."""
        self._raised = [child.raised for child in children]
        self._load_errors = [child.load_errors for child in children]
        self._owes_preemptions = False
        self._report_wanted = False
        self._sent: list[Counter[str]] = [Counter() for _ in children]
        self._synchronous: dict[str, bool] = {}
        self._invalid_blocks: set[int] = set()
        self._told_dead: frozenset[int] = frozenset()

    # The beginning of a step.

    def handle_preemptions(self, told: Any) -> None:
        """Passes on what the engine tells: a step's message, or ids of requests as it was once."""
        if isinstance(told, MultiStepMetadata):
            self._tell_preemptions(told, told.preempted)
            return
        self._owes_preemptions = True
        for child in self.children:
            if child.takes_request_ids:
                child.call("handle_preemptions", None, told)

    def _tell_preemptions(self, message: MultiStepMetadata, preempted: frozenset[str]) -> None:
        for child, own in zip(self.children, message.children, strict=True):
            if not child.takes_request_ids:
                if own is not None:
                    child.call("handle_preemptions", None, own)
            elif preempted:
                child.call("handle_preemptions", None, set(preempted))

    def bind(self, message: MultiStepMetadata) -> None:
        """Begins a step."""
        if self._owes_preemptions:
            # The engine told ids only. Before the step's kernels is early enough.
            self._owes_preemptions = False
            self._tell_preemptions(message, frozenset())
        self._report_wanted = message.wants_report
        self._bound = []
        for child, own in zip(self.children, message.children, strict=True):
            if own is None or child.connector is None:
                continue
            raised = child.raised
            child.call("bind_connector_metadata", None, own)
            if child.raised == raised:
                self._bound.append(child)
        for name, order in message.loads.items():
            child = self.children[order.child]
            unsure = order.unsure or child not in self._bound
            self._loads[name] = load = _RunningLoad(order, failed=unsure)
            if unsure:
                grace = GRACE_SECONDS if child.connector is not None else 0.0
                load.give_up_at = self._clock() + grace

    def clear(self) -> None:
        """Ends a step."""
        for child in self.children:
            child.call("clear_connector_metadata", None)
        self._bound = []

    def forward(self, hook: str, *arguments: Any, **named: Any) -> None:
        """Calls a hook of every child that takes part in this step."""
        for child in self._bound:
            child.call(hook, None, *arguments, **named)

    # The end of a step.

    def transfer_results(self, finished_request_ids: set[str]) -> TransferResults:
        """Returns what ended, each request once and only if its loader says so."""
        ended: dict[str, bool] = {}
        invalid: set[int] = set()
        for index, child in enumerate(self.children):
            if child.connector is None:
                continue
            sent, received, failed = _results(child, finished_request_ids)
            self._sent[index].update(sent)
            nothing: set[int] = set()
            blocks = child.read("get_block_ids_with_load_errors", _blocks, nothing)
            if blocks:
                invalid |= self._attribute(index, blocks)
            for name in received:
                load = self._loads.get(name)
                if load is None or load.order.child != index or not load.order.is_async:
                    self.stats.count("multi_unexpected_reports", child.name, "received")
                    continue
                ended[name] = load.failed or name in failed
        self._note_raised()
        self._end_synchronous(invalid)
        now = self._clock()
        for name, load in self._loads.items():
            if name not in ended and load.give_up_at is not None and now >= load.give_up_at:
                ended[name] = True
        failed_requests = {name for name, failed in ended.items() if failed}
        for name in ended:
            load = self._loads.pop(name)
            if name in failed_requests and not self._reports_failed:
                invalid |= load.order.blocks
        self._invalid_blocks = invalid
        return TransferResults(
            set(ended), failed_requests if self._reports_failed else set(), invalid
        )

    def take_invalid_blocks(self) -> set[int]:
        """Returns the block errors of the last ``transfer_results``."""
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def _attribute(self, index: int, blocks: set[int]) -> set[int]:
        """Marks loads that block errors of a child belong to; returns the blocks to report."""
        loads = [load for load in self._loads.values() if load.order.child == index]
        hit = [load for load in loads if not blocks.isdisjoint(load.order.blocks)]
        if not self._several_groups:
            for load in hit:
                load.failed = load.failed or not load.order.is_async
            return blocks
        # Block ids are unique within a group only, and vLLM ends the engine if it gets any.
        if not hit:
            self.stats.count("multi_unexpected_reports", self.children[index].name, "blocks")
        for load in hit or loads:
            load.failed = True
        return set()

    def _note_raised(self) -> None:
        """The loads of a child that raised in this step have failed, or may never be reported."""
        for index, child in enumerate(self.children):
            if child.load_errors == self._load_errors[index]:
                continue
            self._load_errors[index] = child.load_errors
            for load in self._loads.values():
                if load.order.child == index:
                    load.failed = True
                    if load.give_up_at is None:
                        load.give_up_at = self._clock() + GRACE_SECONDS

    def _end_synchronous(self, invalid: set[int]) -> None:
        done = {name: load for name, load in self._loads.items() if not load.order.is_async}
        for name, load in done.items():
            del self._loads[name]
            self._synchronous[name] = load.failed
            if load.give_up_at is not None:
                # The child has raised, so none of its blocks can be trusted.
                invalid |= load.order.blocks

    def report(self) -> MultiWorkerReport | None:
        """Returns this step's report to the scheduler side, None if there is nothing to say."""
        children = tuple(child.call("build_connector_worker_meta", None) for child in self.children)
        errors: dict[int, int] = {}
        dead = frozenset(i for i, child in enumerate(self.children) if child.connector is None)
        for index, child in enumerate(self.children):
            if child.raised != self._raised[index]:
                errors[index] = child.raised - self._raised[index]
                self._raised[index] = child.raised
        sent, self._sent = self._sent, [Counter() for _ in self.children]
        synchronous, self._synchronous = self._synchronous, {}
        news = self._report_wanted or errors or synchronous or any(sent) or dead != self._told_dead
        if not news and all(each is None for each in children):
            return None
        self._told_dead = dead
        return MultiWorkerReport(
            children, tuple(dict(each) for each in sent), synchronous, errors, dead
        )

    @property
    def pending_loads(self) -> int:
        """How many loads have not ended. For tests."""
        return len(self._loads)


_Results = tuple[set[str], set[str], set[str]]
"""Requests that a child has sent, has received, and has failed to receive."""


def _results(child: ChildConnector, finished_request_ids: set[str]) -> _Results:
    nothing: _Results = (set(), set(), set())
    if hasattr(child.connector, "get_transfer_results"):
        return child.read("get_transfer_results", _transfer_answer, nothing, finished_request_ids)
    # vLLM 0.24.
    return child.read("get_finished", _finished_answer, nothing, finished_request_ids)


def _transfer_answer(answer: Any) -> _Results:
    if answer is None:
        return set(), set(), set()
    return set(answer.finished_sending), set(answer.finished_recving), set(answer.failed_recving)


def _finished_answer(answer: Any) -> _Results:
    sent, received = answer or (None, None)
    return set(sent or ()), set(received or ()), set()


def _blocks(answer: Any) -> set[int]:
    return set(answer or ())
