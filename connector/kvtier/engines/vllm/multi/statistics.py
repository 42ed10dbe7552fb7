"""Statistics of ``WeightedMultiConnector``: what each child reports, under its name, and counters
of the parent.

They travel through vLLM's pipeline: collected on both sides, aggregated, sent to the API process as
a plain dictionary, and there passed to ``MultiPromMetrics``. An exception on that path ends the
server, so nothing here raises. Every metric of a child has the label ``connector`` with its name,
so two children of one kind do not collide.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter as PromCounter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvtier.engines.vllm.metrics import label_values, made_metrics
from kvtier.engines.vllm.multi.counters import CONNECTOR_LABEL, MULTI_COUNTERS
from kvtier.engines.vllm.multi.settings import MultiSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

CHILDREN, OWN = "children", "own"


_BY_NAME = {metric.name: metric for metric in MULTI_COUNTERS}


class MultiStats(KVConnectorStats):
    """Counts since the last report. ``children``: each child's own statistics, by name.

    ``own[metric][child][label value]``: counters of the parent.
    """

    def __init__(
        self,
        children: dict[str, KVConnectorStats] | None = None,
        own: dict[str, dict[str, dict[str, int]]] | None = None,
    ) -> None:
        self.children = children if children is not None else {}
        self.own = own if own is not None else {}

    @property
    def data(self) -> dict[str, Any]:
        """The plain form, which crosses processes. vLLM 0.24 reads it."""
        children = {}
        for name, stats in self.children.items():
            try:
                plain = stats.to_dict() if hasattr(stats, "to_dict") else stats.data
                children[name] = {"class": _class_path(stats), "data": plain}
            except Exception as error:  # noqa: BLE001 - statistics never end the engine
                _log_once(name, "statistics", error)
        return {CHILDREN: children, OWN: self.own}

    def to_dict(self) -> dict[str, Any]:
        """The plain form, which crosses processes."""
        return self.data

    def count(self, metric: str, child: str, label: str = "", amount: int = 1) -> None:
        """Adds to a counter of ``MULTI_COUNTERS``."""
        if amount:
            values = self.own.setdefault(metric, {}).setdefault(child, {})
            values[label] = values.get(label, 0) + amount

    def reset(self) -> None:
        """Clears all counts."""
        self.children = {}
        self.own = {}

    def aggregate(self, other: KVConnectorStats) -> MultiStats:
        """Adds the counts of another rank, or of the other side."""
        if not isinstance(other, MultiStats):
            return self
        for name, stats in other.children.items():
            known = self.children.get(name)
            try:
                self.children[name] = stats if known is None else known.aggregate(stats)
            except Exception as error:  # noqa: BLE001 - statistics never end the engine
                _log_once(name, "aggregate", error)
        for metric, by_child in other.own.items():
            for child, values in by_child.items():
                for label, amount in values.items():
                    self.count(metric, child, label, amount)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns values for vLLM's log line."""
        reduced: dict[str, int | float] = {}
        for name, stats in self.children.items():
            try:
                values = stats.reduce()
            except Exception as error:  # noqa: BLE001 - statistics never end the engine
                _log_once(name, "reduce", error)
                continue
            reduced.update({f"{name}: {key}": value for key, value in values.items()})
        for metric, by_child in self.own.items():
            for child, counts in by_child.items():
                reduced[f"{child}: {metric}"] = sum(counts.values())
        return reduced

    def is_empty(self) -> bool:
        """Returns whether there is nothing to report."""
        return not self.own and all(_is_empty(*each) for each in self.children.items())


def _is_empty(name: str, stats: KVConnectorStats) -> bool:
    try:
        return bool(stats.is_empty())
    except Exception as error:  # noqa: BLE001 - statistics never end the engine
        _log_once(name, "is_empty", error)
        return True


def stats_from_plain(data: Mapping[str, Any] | None) -> MultiStats:
    """Returns the statistics that ``MultiStats.data`` described."""
    made = MultiStats()
    if not data:
        return made
    for name, entry in data.get(CHILDREN, {}).items():
        try:
            module, _, kind = entry["class"].partition(":")
            made.children[name] = _imported(module, kind)(data=entry["data"])
        except Exception as error:  # noqa: BLE001 - a log line less
            _log_once(name, "build_kv_connector_stats", error)
    for metric, by_child in data.get(OWN, {}).items():
        for child, values in by_child.items():
            for label, amount in values.items():
                made.count(metric, child, label, amount)
    return made


def _class_path(stats: KVConnectorStats) -> str:
    return f"{type(stats).__module__}:{type(stats).__qualname__}"


def _imported(module: str, name: str) -> Any:
    import importlib

    return getattr(importlib.import_module(module), name)


_logged: set[tuple[str, str]] = set()


def _log_once(name: str, what: str, error: Exception) -> None:
    if (name, what) not in _logged:
        _logged.add((name, what))
        logger.error(
            "KVTier: statistics of connector %s are incomplete: %s raised",
            name,
            what,
            exc_info=error,
        )


class MultiPromMetrics(KVConnectorPromMetrics):
    """The Prometheus metrics in the API process."""

    def __init__(
        self,
        settings: MultiSettings,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        names = [*labelnames, CONNECTOR_LABEL]
        shared = {kind: _shared(make) for kind, make in metric_types.items()}
        self._children: dict[str, KVConnectorPromMetrics] = {}
        for child in settings.children:
            values = {
                engine: [*labels, child.name] for engine, labels in per_engine_labelvalues.items()
            }
            try:
                made = child.connector_class.build_prom_metrics(
                    child.vllm_config(vllm_config), shared, list(names), values
                )
            except Exception as error:  # noqa: BLE001 - metrics never end the server
                _log_once(child.name, "build_prom_metrics", error)
                continue
            if made is not None:
                self._children[child.name] = made
        self._counters = made_metrics(metric_types[PromCounter], MULTI_COUNTERS, names)
        self._declare([child.name for child in settings.children])

    def _declare(self, children: Iterable[str]) -> None:
        """Creates every label set with value 0, so that ``increase()`` sees the first event."""
        for child in children:
            for engine_values in self.per_engine_labelvalues.values():
                for metric in MULTI_COUNTERS:
                    for value in metric.values:
                        labels = label_values(metric, [*engine_values, child], value)
                        self._counters[metric.name].labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds one report of one engine."""
        for name, entry in transfer_stats_data.get(CHILDREN, {}).items():
            child = self._children.get(name)
            if child is None:
                continue
            try:
                child.observe(entry["data"], engine_idx)
            except Exception as error:  # noqa: BLE001 - vLLM would end the server
                _log_once(name, "observe", error)
        try:
            self._observe_own(transfer_stats_data.get(OWN, {}), engine_idx)
        except Exception as error:  # noqa: BLE001 - vLLM would end the server
            _log_once("WeightedMultiConnector", "observe", error)

    def _observe_own(self, own: Mapping[str, Any], engine: int) -> None:
        engine_values = list(self.per_engine_labelvalues.get(engine, ()))
        if not engine_values and self._labelnames:
            return
        for name, by_child in own.items():
            metric = _BY_NAME.get(name)
            if metric is None:
                continue
            for child, values in by_child.items():
                for label, amount in values.items():
                    labels = label_values(metric, [*engine_values, child], label)
                    self._counters[name].labels(*labels).inc(amount)


def _shared(make: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a maker of metrics that makes each name once, for children of one kind."""
    made: dict[str, Any] = {}

    def shared(*arguments: Any, **named: Any) -> Any:
        name = named.get("name") or arguments[0]
        if name not in made:
            made[name] = make(*arguments, **named)
        return made[name]

    return shared
