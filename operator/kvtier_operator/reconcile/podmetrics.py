"""What is counted about asking pods and posting Events, read when metrics are."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtier_operator.reconcile.poll import PodReports


class PodMetrics(Collector):
    """Registers itself."""

    def __init__(self, registry: CollectorRegistry, reports: PodReports) -> None:
        self._reports = reports
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        reports = self._reports
        polls = CounterMetricFamily(
            "kvtier_operator_polls",
            "Questions to pods for their status, by whether they were answered.",
            labels=["result"],
        )
        polls.add_metric(["answered"], reports.answered)
        polls.add_metric(["unanswered"], reports.unanswered)
        events = CounterMetricFamily("kvtier_operator_events", "Events, by what became of them.", labels=["result"])
        events.add_metric(["posted"], reports.recorder.posted)
        events.add_metric(["dropped"], reports.recorder.dropped)
        yield from (polls, events)
        yield GaugeMetricFamily(
            "kvtier_operator_polled_pods", "Pods that are asked for their status.", reports.followed
        )
