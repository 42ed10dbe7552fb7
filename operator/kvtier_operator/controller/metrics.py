"""What the controller counts and measures.

What is counted about asking pods and posting Events, read when metrics are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtier_operator.api.status import PolicyStatus
from kvtier_operator.controller.pods.poll import PodReports
from kvtier_operator.kube.queue import Key

RECONCILE_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
POD_STATES = ("selected", "attached", "current", "outdated", "skipped", "tuned")


class ControllerMetrics:
    """``CertificateMetrics`` of the keeper of certificates too."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.seconds = Histogram(
            "kvtier_operator_reconcile_seconds",
            "Looking at one policy, from observing to its status.",
            buckets=RECONCILE_SECONDS,
            registry=registry,
        )
        self.errors = Counter(
            "kvtier_operator_reconcile_errors",
            "Reconciles that will be tried again, by what went wrong.",
            ["reason"],
            registry=registry,
        )
        self.statuses = Counter(
            "kvtier_operator_status_writes",
            "Statuses written because they had changed.",
            registry=registry,
        )
        self.removed = Counter(
            "kvtier_operator_removed_objects",
            "Objects of dead policies removed by a resync.",
            registry=registry,
        )
        self.certificate = Gauge(
            "kvtier_operator_certificate_expiry_timestamp_seconds",
            "When the webhook's self-managed certificate ends; 0 before it is known, and where certificates are mounted.",
            registry=registry,
        )
        self.certificate_failures = Counter(
            "kvtier_operator_certificate_failures",
            "Rounds of looking after it that failed.",
            registry=registry,
        )
        self._registry = registry

    def follow(
        self,
        queue_depth: Callable[[], int],
        statuses: Callable[[], Iterable[tuple[Key, PolicyStatus]]],
    ) -> None:
        """Asks these whenever metrics are read: policies that wait, and the statuses in force."""
        depth = Gauge(
            "kvtier_operator_queue_depth",
            "Policies that wait to be looked at.",
            registry=self._registry,
        )
        depth.set_function(queue_depth)
        self._registry.register(_Policies(statuses))

    def certificate_ends(self, seconds: float) -> None:
        """The serving certificate ends then (seconds since 1970)."""
        self.certificate.set(seconds)

    def certificate_failed(self) -> None:
        """A round could not be finished."""
        self.certificate_failures.inc()


class _Policies(Collector):
    """Policies by condition, and pods, summed up when asked: series of policies that are gone go with them."""

    def __init__(self, statuses: Callable[[], Iterable[tuple[Key, PolicyStatus]]]) -> None:
        self._statuses = statuses

    def collect(self) -> Iterable[GaugeMetricFamily]:
        conditions: dict[tuple[str, str], int] = {}
        pods = GaugeMetricFamily(
            "kvtier_operator_policy_pods",
            "Pods of a policy, by state: selected, attached, current, outdated, skipped, tuned.",
            labels=["namespace", "policy", "state"],
        )
        for (namespace, name), status in self._statuses():
            for condition in status.conditions or ():
                place = (condition.type, condition.status)
                conditions[place] = conditions.get(place, 0) + 1
            if status.pods is not None:
                for state in POD_STATES:
                    pods.add_metric([namespace, name, state], getattr(status.pods, state))
        policies = GaugeMetricFamily(
            "kvtier_operator_policies",
            "Policies, by condition and its status.",
            labels=["condition", "status"],
        )
        for (condition_type, verdict), count in sorted(conditions.items()):
            policies.add_metric([condition_type, verdict], count)
        yield policies
        yield pods


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
        events = CounterMetricFamily(
            "kvtier_operator_events", "Events, by what became of them.", labels=["result"]
        )
        events.add_metric(["posted"], reports.recorder.posted)
        events.add_metric(["dropped"], reports.recorder.dropped)
        yield from (polls, events)
        yield GaugeMetricFamily(
            "kvtier_operator_polled_pods", "Pods that are asked for their status.", reports.followed
        )


class LeaderMetrics:
    """Leader election. ``changed`` is told of the start and the end of each term."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.leads = Gauge(
            "kvtier_operator_leader", "1 while this replica is the leader.", registry=registry
        )
        self.lost = Counter(
            "kvtier_operator_leader_lost",
            "Terms that ended before the process did.",
            registry=registry,
        )

    def changed(self, leads: bool) -> None:
        """This replica became the leader, or no longer is."""
        self.leads.set(int(leads))
        if not leads:
            self.lost.inc()
