"""Statistics that leave by vLLM's own pipeline and appear on the engine's ``/metrics`` as ``vllm:kvtier_*``.

Both sides put numbers into ``KVTierStats``; vLLM adds those of all ranks and of the scheduler, takes them to the API process as a plain
dictionary, and hands them to ``KVTierPromMetrics`` there. An exception on that way would end the server, so nothing here raises.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter as PromCounter
from prometheus_client import Histogram as PromHistogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

LOAD_SECONDS = "load_seconds"
MAX_OBSERVATIONS = 4_096
"""Kept for one interval of the engine's statistics; further ones are counted but not timed."""
LOAD_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """A counter. ``label``: the one label beyond vLLM's own, empty if there is none."""

    name: str
    text: str
    label: str = ""


COUNTERS = (
    Metric(
        "loaded_tokens",
        "Prompt tokens whose KV was loaded into GPU memory, counted when the load was complete.",
        "tier",
    ),
    Metric("offered_tokens", "Prompt tokens whose load was begun, whatever became of it."),
    Metric("stored_tokens", "Tokens whose KV has left GPU memory for the memory tier."),
    Metric("stored_chunks", "Chunks whose KV has left GPU memory for the memory tier."),
    Metric("load_failures", "Loads that ended without all that was asked for.", "reason"),
    Metric("promotions", "Requests that waited for lower tiers, by how that ended.", "outcome"),
    Metric("dropped_stores", "Chunks that were computed and not stored.", "reason"),
    Metric("loaded_bytes", "Bytes copied from the memory tier into GPU memory."),
    Metric("stored_bytes", "Bytes copied from GPU memory into the memory tier."),
    Metric("worker_events", "What else happened on the workers.", "event"),
    Metric(
        "errors", "Unexpected errors at the border to the engine; KVTier is off after one.", "hook"
    ),
    Metric("off", "Starts of an engine that serves without tiers.", "reason"),
)
_BY_NAME = {metric.name: metric for metric in COUNTERS}


class KVTierStats(KVConnectorStats):
    """Counts since the last report: ``data[name][label value]``, and durations of loads as a list.

    Only strings, numbers, lists and dictionaries: it crosses processes.
    """

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data={} if data is None else data)

    def add(self, name: str, amount: int = 1, label: str = "") -> None:
        """Adds to a counter of ``COUNTERS``."""
        if amount:
            values = self.data.setdefault(name, {})
            values[label] = values.get(label, 0) + amount

    def add_all(self, name: str, counts: Mapping[str, int]) -> None:
        """Adds counts by label value."""
        for label, amount in counts.items():
            self.add(name, amount, label)

    def observe_loads(self, seconds: Iterable[float]) -> None:
        """Adds durations of loads."""
        kept = self.data.setdefault(LOAD_SECONDS, [])
        kept.extend(list(seconds)[: MAX_OBSERVATIONS - len(kept)])
        if not kept:
            del self.data[LOAD_SECONDS]

    def reset(self) -> None:
        """Forgets everything."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds another rank's, or the scheduler's."""
        for name, values in other.data.items():
            if isinstance(values, Mapping):
                self.add_all(name, values)
            elif name == LOAD_SECONDS:
                self.observe_loads(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line: totals over labels."""
        reduced: dict[str, int | float] = {}
        for name, values in self.data.items():
            if isinstance(values, Mapping):
                reduced[f"kvtier_{name}"] = sum(values.values())
            elif values:
                reduced["kvtier_load_seconds_mean"] = round(sum(values) / len(values), 6)
        return reduced

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data


class KVTierPromMetrics(KVConnectorPromMetrics):
    """Registers the metrics in the API process and adds what arrives there."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, histogram = metric_types[PromCounter], metric_types[PromHistogram]
        self._counters = {
            metric.name: counter(
                name=f"vllm:kvtier_{metric.name}",
                documentation=metric.text,
                labelnames=labelnames + ([metric.label] if metric.label else []),
            )
            for metric in COUNTERS
        }
        self._load_seconds = histogram(
            name="vllm:kvtier_load_seconds",
            documentation="From the worker's getting a load to its report.",
            buckets=list(LOAD_BUCKETS),
            labelnames=labelnames,
        )
        self._complained = False

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds one report of one engine."""
        try:
            self._observe(transfer_stats_data, engine_idx)
        except Exception as error:  # the border: vLLM would end the server
            if not self._complained:
                self._complained = True
                logger.exception("KVTier: statistics could not be recorded: %s", error)

    def _observe(self, data: Mapping[str, Any], engine: int) -> None:
        engine_values = list(self.per_engine_labelvalues.get(engine, ()))
        if not engine_values and self._labelnames:
            return
        for name, values in data.items():
            metric = _BY_NAME.get(name)
            if metric is not None:
                for label, amount in values.items():
                    labels = [*engine_values, label] if metric.label else engine_values
                    self._counters[name].labels(*labels).inc(amount)
            elif name == LOAD_SECONDS:
                for seconds in values:
                    self._load_seconds.labels(*engine_values).observe(seconds)
