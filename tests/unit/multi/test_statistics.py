"""Statistics of several connectors on their way to the engine's ``/metrics``."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from tests.support.multi_world import transfer_config
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvtier.engines.vllm.metrics import KVTierStats
from kvtier.engines.vllm.multi import statistics
from kvtier.engines.vllm.multi.connector import WeightedMultiConnector
from kvtier.engines.vllm.multi.counters import MULTI_COUNTERS
from kvtier.engines.vllm.multi.statistics import MultiStats

LABELS = ["model_name", "engine"]
VALUES: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}


class BrokenStats(KVConnectorStats):
    def _no(self, *_: Any) -> Any:
        raise RuntimeError("no")

    to_dict = aggregate = reduce = is_empty = reset = _no


def stats(stored: int = 1) -> MultiStats:
    kvtier = KVTierStats()
    kvtier.add("stored_tokens", stored)
    made = MultiStats({"tiers": kvtier})
    made.count("multi_loads", "tiers", "loaded")
    return made


def prometheus() -> tuple[Any, CollectorRegistry]:
    registry = CollectorRegistry()

    def maker(kind: Any) -> Any:
        return lambda **named: kind(registry=registry, **named)

    class Config:
        kv_transfer_config = transfer_config(
            [
                {"kv_connector": "KVTierConnector", "name": "tiers"},
                {"kv_connector": "ExampleConnector", "name": "a"},
                {"kv_connector": "ExampleConnector", "name": "b"},
            ]
        )

    types = {kind: maker(kind) for kind in (Counter, Gauge, Histogram)}
    made = WeightedMultiConnector.build_prom_metrics(Config(), types, LABELS, VALUES)  # type: ignore[arg-type]
    return made, registry


def sample(registry: CollectorRegistry, name: str, engine: str, **labels: str) -> float | None:
    return registry.get_sample_value(
        f"vllm:kvtier_{name}_total", {"model_name": "m", "engine": engine, **labels}
    )


def test_statistics_of_ranks_and_sides_are_added_by_child_and_cross_processes() -> None:
    combined = stats(2).aggregate(stats(3))
    plain = json.loads(json.dumps(combined.to_dict()))
    found = WeightedMultiConnector.build_kv_connector_stats(plain)
    assert isinstance(found, MultiStats)
    assert isinstance(found.children["tiers"], KVTierStats)
    assert found.reduce() == {"tiers: kvtier_stored_tokens": 5, "tiers: multi_loads": 2}
    assert found.aggregate(stats(1)).reduce()["tiers: kvtier_stored_tokens"] == 6
    assert WeightedMultiConnector.build_kv_connector_stats().is_empty()  # type: ignore[union-attr]


def test_every_metric_has_the_name_of_its_connector() -> None:
    made, registry = prometheus()
    made.observe(json.loads(json.dumps(stats(7).to_dict())), 1)
    assert sample(registry, "stored_tokens", "1", connector="tiers") == 7
    assert sample(registry, "stored_tokens", "0", connector="tiers") == 0
    assert sample(registry, "multi_loads", "1", connector="tiers", result="loaded") == 1
    assert sample(registry, "multi_loads", "1", connector="b", result="failed") == 0


def test_every_counter_is_there_from_the_start() -> None:
    made, registry = prometheus()
    text = generate_latest(registry).decode()
    for metric in MULTI_COUNTERS:
        for child in ("tiers", "a", "b"):
            for value in metric.values:
                label = f'{metric.label}="{value}"' if metric.label else ""
                assert any(
                    line.startswith(f"vllm:kvtier_{metric.name}_total{{")
                    and f'connector="{child}"' in line
                    and label in line
                    for line in text.splitlines()
                )
    assert made is not None


def test_two_connectors_of_one_kind_share_a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

    class Metrics:
        def __init__(self, types: Any, labels: list[str], values: dict[int, list[object]]) -> None:
            made = types[Counter](name="example", documentation="", labelnames=labels)
            self.counters = {engine: made.labels(*each) for engine, each in values.items()}

        def observe(self, data: dict[str, Any], engine: int = 0) -> None:
            self.counters[engine].inc(data["loads"])

    monkeypatch.setattr(
        ExampleConnector, "build_prom_metrics", lambda _, *rest: Metrics(*rest), raising=False
    )
    made, registry = prometheus()
    children = {"a": {"class": "x:y", "data": {"loads": 1}}, "b": {"data": {"loads": 2}}}
    made.observe({"children": children}, 0)
    for name, value in (("a", 1), ("b", 2)):
        labels = {"model_name": "m", "engine": "0", "connector": name}
        assert registry.get_sample_value("example_total", labels) == value


def test_statistics_that_raise_hurt_neither_the_engine_nor_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    statistics._logged.clear()
    broken = stats()
    broken.children["broken"] = BrokenStats()
    other = stats()
    other.children["broken"] = BrokenStats()
    broken.aggregate(other)
    assert not broken.is_empty()
    assert broken.reduce()["tiers: kvtier_stored_tokens"] == 2
    assert list(broken.to_dict()["children"]) == ["tiers"]
    made, registry = prometheus()
    for data in ({"children": {"tiers": {}, "unknown": {}}}, {"own": {"multi_loads": {"a": 3}}}):
        made.observe(data, 0)
    made.observe(stats(4).to_dict(), 0)
    made.observe(stats(4).to_dict(), 9)
    assert sample(registry, "stored_tokens", "0", connector="tiers") == 4
    wrong = {"children": {"x": {"class": "no.module:X", "data": {}}}}
    assert WeightedMultiConnector.build_kv_connector_stats(wrong).is_empty()  # type: ignore[union-attr]
