"""What the two sides of ``WeightedMultiConnector`` tell each other, carried by vLLM: the messages
of the children by their position, and what belongs to the parent.

vLLM pickles them between processes of one version.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_events import KVConnectorKVEvents
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

logger = logging.getLogger(__name__)
_logged: set[int] = set()


def _log_once(child: int, what: str, error: Exception) -> None:
    if child not in _logged:
        _logged.add(child)
        logger.error(
            "KVTier: connectors[%d] cannot combine the %s of its ranks", child, what, exc_info=error
        )


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """One child loads KV of one request. ``blocks``: the ids of the blocks that it writes, of all
    groups. ``unsure``: the child raised when it was told, so it may load or not."""

    child: int
    is_async: bool
    blocks: frozenset[int]
    unsure: bool = False


@dataclass(slots=True)
class MultiStepMetadata(KVConnectorMetadata):
    """One step, from the scheduler to the workers. ``children``: None if the child raised; its
    hooks are skipped in this step. ``loads``: by request, those that begin. ``preempted``: requests
    that lost their blocks. ``wants_report``: the workers answer although they have no news."""

    children: tuple[KVConnectorMetadata | None, ...]
    loads: dict[str, LoadOrder] = field(default_factory=dict)
    preempted: frozenset[str] = frozenset()
    wants_report: bool = False


@dataclass(slots=True)
class MultiWorkerReport(KVConnectorWorkerMetadata):
    """One step of one rank, or of several after aggregation, from the workers to the scheduler.

    ``sent``: by child, how many ranks have finished sending a request. ``synchronous``: loads that
    ended within the step, with whether one failed. ``errors``: by child, how often a hook raised.
    ``dead``: children that a rank could not create or start. ``uncombined``: children that raised
    when the reports of two ranks were combined; they get none of this step.
    """

    children: tuple[KVConnectorWorkerMetadata | None, ...]
    sent: tuple[dict[str, int], ...]
    synchronous: dict[str, bool] = field(default_factory=dict)
    errors: dict[int, int] = field(default_factory=dict)
    dead: frozenset[int] = frozenset()
    uncombined: frozenset[int] = frozenset()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> MultiWorkerReport:
        """Combines the reports of two ranks for the same step."""
        if not isinstance(other, MultiWorkerReport):
            return self
        uncombined = self.uncombined | other.uncombined
        children: list[KVConnectorWorkerMetadata | None] = []
        errors = _sums(self.errors, other.errors)
        for index, (one, two) in enumerate(zip(self.children, other.children, strict=True)):
            try:
                combined = None if index in uncombined else _aggregated(one, two)
            except Exception as error:  # noqa: BLE001 - vLLM would end the engine
                _log_once(index, "reports", error)
                combined = None
                uncombined |= {index}
                errors[index] = errors.get(index, 0) + 1
            children.append(combined)
        return MultiWorkerReport(
            children=tuple(children),
            sent=tuple(_sums(one, two) for one, two in zip(self.sent, other.sent, strict=True)),
            synchronous={
                name: self.synchronous.get(name, False) or other.synchronous.get(name, False)
                for name in self.synchronous.keys() | other.synchronous.keys()
            },
            errors=errors,
            dead=self.dead | other.dead,
            uncombined=uncombined,
        )


def _aggregated(
    one: KVConnectorWorkerMetadata | None, two: KVConnectorWorkerMetadata | None
) -> KVConnectorWorkerMetadata | None:
    if one is None or two is None:
        return two if one is None else one
    return one.aggregate(two)


def _sums(one: dict[Any, int], two: dict[Any, int]) -> dict[Any, int]:
    result = dict(one)
    for key, amount in two.items():
        result[key] = result.get(key, 0) + amount
    return result


@dataclass(slots=True)
class MultiHandshake(KVConnectorHandshakeMetadata):
    """What the workers of each child tell the schedulers of other engines."""

    children: tuple[KVConnectorHandshakeMetadata | None, ...]


@dataclass(frozen=True, slots=True)
class _EventsOfChild:
    """Travels through vLLM's aggregation as if it were an event."""

    child: int
    events: KVConnectorKVEvents


class MultiKVEvents(KVConnectorKVEvents):
    """KV events of the children's workers, kept apart by child."""

    def __init__(self, children: list[KVConnectorKVEvents | None]) -> None:
        self.children = children
        self._workers = 1

    def add_events(self, events: list[Any]) -> None:
        """Adds what ``get_all_events`` of another rank has returned."""
        for each in events:
            own = self.children[each.child]
            if own is None:
                self.children[each.child] = each.events
                continue
            try:
                own.add_events(each.events.get_all_events())
                own.increment_workers(each.events.get_number_of_workers())
            except Exception as error:  # noqa: BLE001 - vLLM would end the engine
                _log_once(each.child, "events", error)

    def aggregate(self) -> MultiKVEvents:
        """Each child aggregates its own events when it receives them."""
        return self

    def increment_workers(self, count: int = 1) -> None:
        """Counts ranks. The children's ranks are counted by ``add_events``."""
        self._workers += count

    def get_all_events(self) -> list[Any]:
        """The events of all children, for ``add_events``."""
        return [
            _EventsOfChild(child, events)
            for child, events in enumerate(self.children)
            if events is not None
        ]

    def get_number_of_workers(self) -> int:
        """How many ranks have reported."""
        return self._workers

    def clear_events(self) -> None:
        """Removes all events."""
        self.children = [None] * len(self.children)
