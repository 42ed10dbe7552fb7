"""The webhook's metrics. Each response is counted once, when it is sent."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvtier_operator.api.conditions import SkipReason

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Up to the timeout of the API server."""
FAILURES = ("Malformed", "Failed", "Abandoned")
RESULTS = {
    "/mutate": ("Attached", "Skipped", "Unchanged", *FAILURES, "NotReady"),
    "/validate": ("Allowed", "Denied", *FAILURES),
}


class WebhookMetrics:
    """All metrics of the webhook, in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.answers = Counter(
            "kvtier_webhook_answers",
            "Admission responses, by path and result: Attached, Skipped, Unchanged, Allowed, "
            "Denied, Malformed, Failed, Abandoned, NotReady.",
            ["path", "result"],
            registry=registry,
        )
        self.skipped = Counter(
            "kvtier_webhook_skipped_pods",
            "Pods that a policy selects and that were admitted without tiers, by reason.",
            ["reason"],
            registry=registry,
        )
        self.seconds = Histogram(
            "kvtier_webhook_request_duration_seconds",
            "Time to answer an admission request.",
            ["path"],
            buckets=SECONDS,
            registry=registry,
        )
        self.expires = Gauge(
            "kvtier_webhook_certificate_expiry_timestamp_seconds",
            "Expiry of the serving certificate as Unix time; 0 without a certificate.",
            registry=registry,
        )
        self.ready = Gauge(
            "kvtier_webhook_ready",
            "Whether this replica is ready to answer admission requests.",
            registry=registry,
        )
        self.policies = Gauge(
            "kvtier_webhook_policies",
            "Policies in the cache, by state: readable, unreadable.",
            ["state"],
            registry=registry,
        )
        for path, results in RESULTS.items():
            for result in results:
                self.answers.labels(path, result)
            self.seconds.labels(path)
        for reason in SkipReason:
            self.skipped.labels(reason)

    def observe(self, ready: Callable[[], bool], policies: Callable[[], tuple[int, int]]) -> None:
        """Sets the functions that are called at each scrape: readiness, and the numbers of readable
        and unreadable policies.
        """
        self.ready.set_function(lambda: float(ready()))
        self.policies.labels("readable").set_function(lambda: policies()[0])
        self.policies.labels("unreadable").set_function(lambda: policies()[1])
