"""Prometheus metrics of the controller. Gauges about policies and pods are computed when they are
scraped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtier_operator.api.conditions import ConditionType
from kvtier_operator.api.status import PolicyStatus
from kvtier_operator.controller.events import EventRecorder
from kvtier_operator.controller.pods.poll import PodPoller
from kvtier_operator.kube.queue import Key

RECONCILE_BUCKETS_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
RECONCILE_ERRORS = (
    "Fault", "Deadline", "OrphanedDataUnreported", "Unreachable", "BadRequest", "Unauthorized",
    "Forbidden", "NotFound", "AlreadyExists", "Conflict", "Gone", "Invalid", "Timeout",
    "ServerTimeout", "TooManyRequests", "InternalError", "ServiceUnavailable",
)  # fmt: skip
"""Reasons that exist from the start at 0, so that ``increase()`` sees the first error."""
POD_COUNTS = {
    "selected": "Pods that the policy selects.",
    "attached": "Selected pods that use their tiers.",
    "current": "Attached pods that have the policy's current structure.",
    "outdated": "Attached pods that have an earlier structure, until they are replaced.",
    "skipped": "Selected pods that were admitted without tiers.",
    "tuned": "Attached pods that apply the current live values.",
}
"""Fields of ``PodCounts``. A pod is in several of them, so each is a metric of its own."""
CONDITION_VALUES = {"True": 1.0, "False": 0.0, "Unknown": -1.0}
POLICY_LABELS = ("policy_namespace", "policy")
"""Not ``namespace``, which Prometheus sets to the namespace of the operator's pod."""


class ControllerMetrics:
    """Metrics that the reconcile loop sets. Serves the certificate rotation too, as its
    ``CertificateMetrics``.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.seconds = Histogram(
            "kvtier_operator_reconcile_duration_seconds",
            "Duration of one reconcile of a policy, from reading the cache to writing its status.",
            buckets=RECONCILE_BUCKETS_SECONDS,
            registry=registry,
        )
        self.errors = Counter(
            "kvtier_operator_reconcile_errors",
            "Failed reconciles, by reason. Each is retried.",
            ["reason"],
            registry=registry,
        )
        self.statuses = Counter(
            "kvtier_operator_status_writes",
            "Policy statuses written, because they changed.",
            registry=registry,
        )
        self.removed = Counter(
            "kvtier_operator_removed_objects",
            "Objects deleted by garbage collection, because their policy no longer exists.",
            registry=registry,
        )
        self.certificate = Gauge(
            "kvtier_operator_certificate_expiry_timestamp_seconds",
            "Expiry of the self-managed webhook certificate in seconds since 1970. "
            "0 until it is known, and if the certificate is mounted.",
            registry=registry,
        )
        self.certificate_failures = Counter(
            "kvtier_operator_certificate_failures",
            "Failed checks or renewals of the self-managed webhook certificate.",
            registry=registry,
        )

        for reason in RECONCILE_ERRORS:
            self.errors.labels(reason)

    def certificate_ends(self, seconds: float) -> None:
        """The serving certificate expires then (seconds since 1970)."""
        self.certificate.set(seconds)

    def certificate_failed(self) -> None:
        """A check or renewal of the certificate failed."""
        self.certificate_failures.inc()


class PolicyMetrics(Collector):
    """Queue depth, policies by condition, and pods by state. Series of deleted policies disappear
    with them.

    ``queue_depth``: policies that wait for a reconcile. ``statuses``: the current status of each
    policy.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        queue_depth: Callable[[], int],
        statuses: Callable[[], Iterable[tuple[Key, PolicyStatus]]],
    ) -> None:
        self._queue_depth = queue_depth
        self._statuses = statuses
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Called at each scrape."""
        yield GaugeMetricFamily(
            "kvtier_operator_queue_depth",
            "Policies that wait for a reconcile.",
            self._queue_depth(),
        )
        counts: dict[tuple[str, str], int] = {}
        values = GaugeMetricFamily(
            "kvtier_operator_policy_condition",
            "Conditions of a policy: 1 for True, 0 for False, -1 for Unknown.",
            labels=[*POLICY_LABELS, "condition"],
        )
        pods = {
            field: GaugeMetricFamily(
                f"kvtier_operator_policy_{field}_pods", text, labels=POLICY_LABELS
            )
            for field, text in POD_COUNTS.items()
        }
        for key, status in self._statuses():
            for condition in status.conditions or ():
                values.add_metric([*key, condition.type], CONDITION_VALUES[condition.status])
                counted = (condition.type, condition.status)
                counts[counted] = counts.get(counted, 0) + 1
            if status.pods is not None:
                for field, gauge in pods.items():
                    gauge.add_metric(key, getattr(status.pods, field))
        policies = GaugeMetricFamily(
            "kvtier_operator_policies",
            "Policies, by condition and its status.",
            labels=["condition", "status"],
        )
        for condition_type in ConditionType:
            for name in CONDITION_VALUES:
                policies.add_metric([condition_type, name], counts.get((condition_type, name), 0))
        yield from (policies, values, *pods.values())


class PodMetrics(Collector):
    """Polls of pods, and Events."""

    def __init__(
        self, registry: CollectorRegistry, poller: PodPoller, recorder: EventRecorder
    ) -> None:
        self._poller = poller
        self._recorder = recorder
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Called at each scrape."""
        polls = CounterMetricFamily(
            "kvtier_operator_polls",
            "Requests for a pod's /status, by result.",
            labels=["result"],
        )
        polls.add_metric(["answered"], self._poller.answered)
        polls.add_metric(["unanswered"], self._poller.unanswered)
        events = CounterMetricFamily(
            "kvtier_operator_events", "Kubernetes Events, by result.", labels=["result"]
        )
        events.add_metric(["posted"], self._recorder.posted)
        events.add_metric(["dropped"], self._recorder.dropped)
        yield from (polls, events)
        yield GaugeMetricFamily(
            "kvtier_operator_polled_pods",
            "Pods whose /status is polled.",
            self._poller.polled_pods,
        )


class LeaderMetrics:
    """Leader election. ``changed`` is called at the start and at the end of each term."""

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
