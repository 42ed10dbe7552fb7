"""Metrics on their way from the connector to the engine's /metrics."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from tests.unit.scheduler.scheduler_testbed import CHUNK, SchedulerTestbed

from kvtier.engines.vllm.metrics import MAX_OBSERVATIONS, KVTierPromMetrics, KVTierStats


def _stats() -> KVTierStats:
    stats = KVTierStats()
    stats.add("loaded_tokens", 128, "ram")
    stats.add("loaded_tokens", 64, "disk")
    stats.add("offered_tokens", 256)
    stats.observe_loads([0.25, 0.75])
    return stats


def test_stats_are_plain_data() -> None:
    data = _stats().data
    assert json.loads(json.dumps(data)) == data


def test_stats_of_ranks_and_scheduler_are_aggregated() -> None:
    joined = _stats().aggregate(_stats())
    assert joined.data["loaded_tokens"] == {"ram": 256, "disk": 128}
    assert joined.data["load_seconds"] == [0.25, 0.75, 0.25, 0.75]


def test_the_log_line_shows_totals() -> None:
    assert _stats().reduce() == {
        "kvtier_loaded_tokens": 192,
        "kvtier_offered_tokens": 256,
        "kvtier_load_seconds_mean": 0.5,
    }


def test_stats_without_counts_are_empty() -> None:
    stats = KVTierStats()
    stats.add("offered_tokens", 0)
    stats.observe_loads([])
    assert stats.is_empty()
    filled = _stats()
    filled.reset()
    assert filled.is_empty()


def test_load_durations_are_bounded() -> None:
    stats = KVTierStats()
    for _ in range(3):
        stats.observe_loads([0.1] * MAX_OBSERVATIONS)
    assert len(stats.data["load_seconds"]) == MAX_OBSERVATIONS


class _Types:
    """Metric classes as vLLM hands them in, on a registry of the test's own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def types(self) -> dict[Any, Any]:
        return {kind: self._made(kind) for kind in (Counter, Gauge, Histogram)}

    def _made(self, kind: Any) -> Any:
        return lambda **named: kind(registry=self.registry, **named)

    def text(self) -> str:
        return generate_latest(self.registry).decode()


def _metrics(types: _Types) -> KVTierPromMetrics:
    config = SimpleNamespace(kv_transfer_config=None)
    labels: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
    return KVTierPromMetrics(config, types.types(), ["model_name", "engine"], labels)  # type: ignore[arg-type]


def test_metrics_have_the_engines_labels() -> None:
    types = _Types()
    metrics = _metrics(types)
    metrics.observe(_stats().data, 1)
    metrics.observe(_stats().data, 1)
    text = types.text()
    assert 'vllm:kvtier_loaded_tokens_total{engine="1",model_name="m",tier="disk"} 128.0' in text
    assert 'vllm:kvtier_offered_tokens_total{engine="1",model_name="m"} 512.0' in text
    assert 'vllm:kvtier_load_seconds_count{engine="1",model_name="m"} 4.0' in text


@pytest.mark.parametrize(
    "data",
    [
        {"unheard": {"": 1}},
        {"loaded_tokens": 3},
        {"load_seconds": ["x"]},
        {"offered_tokens": {"": -1}},
    ],
)
def test_invalid_stats_do_not_end_the_server(data: dict[str, Any]) -> None:
    _metrics(_Types()).observe(data, 0)


def test_stats_of_an_unknown_engine_are_ignored() -> None:
    types = _Types()
    _metrics(types).observe(_stats().data, 9)
    assert "loaded_tokens_total{" not in types.text()


def test_scheduler_counts_are_collected_once(testbed: SchedulerTestbed) -> None:
    request = testbed.request(300)
    testbed.hold(request.keys(0, 4))
    testbed.admit(request, 0, testbed.ask(request) or 0)
    (job,) = testbed.build().loads
    testbed.report(loads=[testbed.result(job.load, 3, reason="address: 5 is outside")])
    stats = KVTierStats()
    testbed.scheduler.collect_stats(stats)
    testbed.scheduler.collect_stats(stats)
    assert stats.data["offered_tokens"] == {"": 4 * CHUNK}
    assert stats.data["loaded_tokens"] == {"ram": 3 * CHUNK}
    assert stats.data["load_failures"] == {"address": 1}


def test_heartbeats_carry_prompt_tokens_and_loaded_tokens_by_tier(
    testbed: SchedulerTestbed,
) -> None:
    request = testbed.request(300)
    job = testbed.promoted_load(request, (0, 0, 1, 1))
    testbed.report(loads=[testbed.result(job.load, 4)])
    testbed.build({"r": 300 - 4 * CHUNK})
    testbed.build({"r": 1})
    beat = testbed.client.heartbeat()
    assert beat.prompt_tokens == 300
    assert beat.loaded_tokens == (2 * CHUNK, 2 * CHUNK)
