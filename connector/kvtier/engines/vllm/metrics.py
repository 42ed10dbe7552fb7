"""Metrics that reach the engine's ``/metrics`` as ``vllm:kvtier_*`` through vLLM's own pipeline.

Both sides of the connector count into ``KVTierStats``. vLLM aggregates the scheduler's and all
ranks', sends the result to the API process as a plain dictionary, and passes it to
``KVTierPromMetrics`` there. An exception on that path ends the server, so nothing here raises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter as PromCounter
from prometheus_client import Gauge as PromGauge
from prometheus_client import Histogram as PromHistogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvtier.config.loader import load_for_engine
from kvtier.engines.vllm.config import topology_directory
from kvtier.engines.vllm.counters import (
    BY_NAME,
    COUNTERS,
    GAUGES,
    HISTOGRAM_NAMES,
    HISTOGRAMS,
    TIER,
    WITHOUT_TIERS,
    Metric,
    check,
)
from kvtier.errors import KVTierError

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

logger = logging.getLogger(__name__)

GAUGE_VALUES = "gauges"
MAX_OBSERVATIONS = 4_096
"""Of each histogram and label, per interval of vLLM's statistics. Further ones are not timed."""
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class KVTierStats(KVConnectorStats):
    """Counts since the last report as ``data[name][label value]``, durations as lists of seconds,
    and the values of gauges as ``data["gauges"][name][label value]``.

    The data crosses processes, so it holds only strings, numbers, lists and dictionaries.
    """

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data={} if data is None else data)

    def add(self, name: str, amount: int = 1, label: str = "") -> None:
        """Adds to a counter of ``COUNTERS``, or a change to the gauge of ``WITHOUT_TIERS``."""
        if amount:
            check(name, label)
            values = self.data.setdefault(name, {})
            values[label] = values.get(label, 0) + amount

    def add_all(self, name: str, counts: Mapping[str, int]) -> None:
        """Adds counts by label value."""
        for label, amount in counts.items():
            self.add(name, amount, label)

    def observe(self, name: str, seconds: Iterable[float], label: str = "") -> None:
        """Adds durations to a histogram of ``HISTOGRAMS``."""
        found = list(seconds)
        if found:
            durations = self.data.setdefault(name, {}).setdefault(label, [])
            durations.extend(found[: MAX_OBSERVATIONS - len(durations)])

    def set_gauge(self, name: str, value: float, label: str = "") -> None:
        """Sets a gauge of ``GAUGES``."""
        self.data.setdefault(GAUGE_VALUES, {}).setdefault(name, {})[label] = value

    def reset(self) -> None:
        """Clears all counts."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds the counts of another rank or of the scheduler."""
        for name, values in other.data.items():
            if name == GAUGE_VALUES:
                for gauge, by_label in values.items():
                    for label, value in by_label.items():
                        self.set_gauge(gauge, value, label)
            elif name in HISTOGRAM_NAMES:
                for label, seconds in values.items():
                    self.observe(name, seconds, label)
            else:
                self.add_all(name, values)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns totals over labels, for vLLM's log line."""
        reduced: dict[str, int | float] = {}
        for name, values in self.data.items():
            if name in HISTOGRAM_NAMES:
                found = [each for seconds in values.values() for each in seconds]
                reduced[f"kvtier_{name}_mean"] = round(sum(found) / max(1, len(found)), 6)
            elif name != GAUGE_VALUES:
                reduced[f"kvtier_{name}"] = sum(values.values())
        return reduced

    def is_empty(self) -> bool:
        """Returns whether there is nothing to report."""
        return not self.data


def tier_names(transfer: KVTransferConfig | None) -> tuple[str, ...]:
    """Returns the names of the tiers; none if the documents cannot be read, which the connector
    itself reports."""
    try:
        topology = load_for_engine(Path(topology_directory(transfer)))
    except KVTierError:
        return ()
    return tuple(tier.name for tier in topology.structural.tiers)


def add_worker_counts(stats: KVTierStats, counts: Mapping[str, int], chunk_tokens: int) -> None:
    """Adds the counts of a rank to ``stats``.

    ``chunk_tokens``: tokens of each store that was delivered; 0 if another rank counts them.
    """
    for name, amount in counts.items():
        if name in ("loaded_bytes", "stored_bytes"):
            stats.add(name, amount)
        elif name == "stores_delivered" and chunk_tokens:
            stats.add("stored_chunks", amount)
            stats.add("stored_tokens", amount * chunk_tokens)
        elif name not in ("stores_delivered", "loads_whole"):
            stats.add("worker_events", amount, name)


def made_metrics(
    make: Callable[..., Any], metrics: Iterable[Metric], labelnames: Sequence[str], **options: Any
) -> dict[str, Any]:
    """Creates metrics with the class ``make``; returns them by name, without their prefix."""
    return {
        metric.name: make(
            name=f"vllm:kvtier_{metric.name}",
            documentation=metric.help,
            labelnames=[*labelnames, *([metric.label] if metric.label else ())],
            **options,
        )
        for metric in metrics
    }


def label_values(metric: Metric, outer: Sequence[object], value: str) -> list[object]:
    """Returns the values of all labels of a metric: ``outer`` of those that every metric has, and
    ``value`` of its own label, if it has one."""
    return [*outer, value] if metric.label else list(outer)


class KVTierPromMetrics(KVConnectorPromMetrics):
    """The Prometheus metrics in the API process. ``tiers``: the names of the policy's tiers."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        tiers: Iterable[str] = (),
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = made_metrics(metric_types[PromCounter], COUNTERS, labelnames)
        self._histograms = made_metrics(
            metric_types[PromHistogram], HISTOGRAMS, labelnames, buckets=list(BUCKETS)
        )
        self._gauges = made_metrics(
            metric_types[PromGauge], GAUGES, labelnames, multiprocess_mode="mostrecent"
        )
        # Several API processes each receive some of an engine's reports.
        self._without_tiers = metric_types[PromGauge](
            name=f"vllm:kvtier_{WITHOUT_TIERS[0]}",
            documentation=WITHOUT_TIERS[1],
            labelnames=labelnames,
            multiprocess_mode="sum",
        )
        self._processes_without_tiers = dict.fromkeys(per_engine_labelvalues, 0)
        self._failure_logged = False
        self._declare(tuple(tiers))

    def _declare(self, tiers: tuple[str, ...]) -> None:
        """Creates every label set with value 0, so that ``increase()`` sees the first event."""
        for engine_values in self.per_engine_labelvalues.values():
            for metrics, made in (
                (COUNTERS, self._counters),
                (HISTOGRAMS, self._histograms),
                (GAUGES, self._gauges),
            ):
                for metric in metrics:
                    for value in tiers if metric.label == TIER else metric.values:
                        made[metric.name].labels(*label_values(metric, engine_values, value))
            self._without_tiers.labels(*engine_values).set(0)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds one report of one engine."""
        try:
            self._observe(transfer_stats_data, engine_idx)
        except Exception as error:  # vLLM would end the server
            if not self._failure_logged:
                self._failure_logged = True
                logger.exception("KVTier: cannot record metrics: %s", error)

    def _observe(self, data: Mapping[str, Any], engine: int) -> None:
        engine_values = list(self.per_engine_labelvalues.get(engine, ()))
        if not engine_values and self._labelnames:
            return
        for name, values in data.items():
            metric = BY_NAME.get(name)
            if metric is not None:
                for label, amount in values.items():
                    labels = label_values(metric, engine_values, label)
                    self._counters[name].labels(*labels).inc(amount)
            elif name == WITHOUT_TIERS[0]:
                # Ray's gauges can be set only.
                count = self._processes_without_tiers.get(engine, 0) + sum(values.values())
                self._processes_without_tiers[engine] = count
                self._without_tiers.labels(*engine_values).set(count)
            elif name in self._histograms:
                for label, durations in values.items():
                    labels = [*engine_values, label] if label else engine_values
                    for seconds in durations:
                        self._histograms[name].labels(*labels).observe(seconds)
            elif name == GAUGE_VALUES:
                for gauge, by_label in values.items():
                    for label, value in by_label.items():
                        labels = [*engine_values, label] if label else engine_values
                        self._gauges[gauge].labels(*labels).set(value)
