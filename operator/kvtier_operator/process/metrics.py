"""Metrics that both processes of the operator have. Each process has one registry; names begin with
``kvtier_operator_``.
"""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    disable_created_metrics,
)
from prometheus_client import ProcessCollector as Process

from kvtier import __version__
from kvtier_operator.cluster.contract import Kind

CALL_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0)


def new_registry() -> CollectorRegistry:
    """A registry with the process's memory, descriptors and CPU time in it."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    Process(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    info = Gauge("kvtier_operator_build_info", "The version; always 1.", ["version"], registry=registry)
    info.labels(__version__).set(1)
    return registry


class ApiMetrics:
    """Calls to the API server and restarts of watches. ``call`` is a client's observer, ``restart`` a cache's
    ``on_restart``.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.calls = Counter(
            "kvtier_operator_api_calls",
            "Attempts to call the API server; code 0: no answer.",
            ["verb", "kind", "code"],
            registry=registry,
        )
        self.seconds = Histogram(
            "kvtier_operator_api_call_seconds",
            "Until an attempt was answered.",
            ["verb"],
            buckets=CALL_SECONDS,
            registry=registry,
        )
        self.restarts = Counter(
            "kvtier_operator_watch_restarts",
            "Lists, and watches begun again, by reason; Start is the first list.",
            ["kind", "reason"],
            registry=registry,
        )

    def call(self, verb: str, kind: str, status: int, seconds: float) -> None:
        """One attempt."""
        self.calls.labels(verb, kind, str(status)).inc()
        if verb != "watch":
            self.seconds.labels(verb).observe(seconds)

    def restart(self, kind: Kind, reason: str) -> None:
        """A list or watch that was begun (again)."""
        self.restarts.labels(kind.kind, reason or "Unknown").inc()
