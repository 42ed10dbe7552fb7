"""What the webhook counts. One registry per process; nothing is counted twice."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Up to the time after which the API server no longer waits."""


class WebhookMetrics:
    """Counters of results, not of intentions: each is raised when an answer is given."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.answers = Counter(
            "kvtier_webhook_answers",
            "Answers, by path and result: Attached, Skipped, Unchanged, Accepted, Refused, Malformed, Failed, Abandoned, NotReady.",
            ["path", "result"],
            registry=registry,
        )
        self.skipped = Counter(
            "kvtier_webhook_skipped_pods",
            "Selected pods that were left alone, by reason.",
            ["reason"],
            registry=registry,
        )
        self.seconds = Histogram(
            "kvtier_webhook_seconds",
            "From a request's headers to its answer.",
            ["path"],
            buckets=SECONDS,
            registry=registry,
        )
        self.expires = Gauge(
            "kvtier_webhook_certificate_expiry_timestamp_seconds",
            "When the serving certificate in use ends; 0 without one.",
            registry=registry,
        )
        self.ready = Gauge(
            "kvtier_webhook_ready", "Whether this replica can decide about pods.", registry=registry
        )
        self.policies = Gauge(
            "kvtier_webhook_policies",
            "Policies known, by whether they can be read.",
            ["state"],
            registry=registry,
        )
        for result in (
            "Attached",
            "Skipped",
            "Unchanged",
            "Malformed",
            "Failed",
            "Abandoned",
            "NotReady",
        ):
            self.answers.labels("/mutate", result)
        for result in ("Accepted", "Refused", "Malformed", "Failed", "Abandoned"):
            self.answers.labels("/validate", result)

    def follow(self, ready: Callable[[], bool], policies: Callable[[], tuple[int, int]]) -> None:
        """Asks these whenever metrics are read: whether this replica is ready, how many policies can(not) be read."""
        self.ready.set_function(lambda: float(ready()))
        self.policies.labels("readable").set_function(lambda: policies()[0])
        self.policies.labels("unreadable").set_function(lambda: policies()[1])
