"""Prometheus metrics on a registry of the test's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvtier.engines.vllm.metrics import KVTierPromMetrics


class MetricTypes:
    """Metric classes as vLLM hands them in, on a registry of the test's own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def types(self) -> dict[Any, Any]:
        return {kind: self._made(kind) for kind in (Counter, Gauge, Histogram)}

    def _made(self, kind: Any) -> Any:
        return lambda **named: kind(registry=self.registry, **named)

    def text(self) -> str:
        return generate_latest(self.registry).decode()


def made_metrics(types: MetricTypes) -> KVTierPromMetrics:
    """The metrics of engines 0 and 1, whose tiers are ram and disk."""
    config = SimpleNamespace(kv_transfer_config=None)
    labels: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
    return KVTierPromMetrics(
        config,  # type: ignore[arg-type]
        types.types(),
        ["model_name", "engine"],
        labels,
        ("ram", "disk"),
    )
