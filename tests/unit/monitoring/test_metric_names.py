"""Prometheus' own linter accepts every metric."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from tests.support.prometheus import PROMTOOL, lint

from kvtier.engines.vllm.metrics import KVTierPromMetrics
from kvtier.store.types import StoreCounters
from kvtier.tierd.status import Snapshot, TierSnapshot, metrics_text
from kvtier_operator.controller.metrics import ControllerMetrics, LeaderMetrics, PolicyMetrics
from kvtier_operator.runtime import ApiMetrics, new_registry
from kvtier_operator.webhook.metrics import WebhookMetrics


def tierd() -> str:
    counters = StoreCounters()
    counters.declare(["disk"])
    tier = TierSnapshot("disk", "fileSystem", "Healthy", volume_bytes=2, volume_available_bytes=1)
    return metrics_text(
        Snapshot(policy="n/p", tiers=(tier,), pool={"free": 1}, events=dict(counters.values))
    ).decode()


def operator() -> str:
    registry = new_registry()
    ApiMetrics(registry).call("get", "Pod", 200, 0.1)
    LeaderMetrics(registry)
    ControllerMetrics(registry)
    WebhookMetrics(registry)
    PolicyMetrics(registry, lambda: 0, list)
    return generate_latest(registry).decode()


def engine() -> str:
    registry = CollectorRegistry()

    def on_registry(kind: Any) -> Any:
        return lambda **named: kind(registry=registry, **named)

    KVTierPromMetrics(
        SimpleNamespace(kv_transfer_config=None),  # type: ignore[arg-type]
        {kind: on_registry(kind) for kind in (Counter, Gauge, Histogram)},
        ["model_name", "engine"],
        {0: ["m", "0"]},
        ("ram", "disk"),
    )
    return generate_latest(registry).decode()


@pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian package prometheus) is missing")
@pytest.mark.parametrize("exported", [tierd, operator, engine])
def test_the_linter_of_prometheus_accepts_every_metric(exported: Callable[[], str]) -> None:
    assert lint(exported()) == ""
