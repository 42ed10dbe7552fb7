"""Metrics on their way from the connector to the engine's /metrics."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from tests.unit.scheduler.scheduler_testbed import CHUNK, SchedulerTestbed, topology

from kvtier.config.writer import write
from kvtier.engines.common.worker_transfers import IDENTITY_CHANGED
from kvtier.engines.vllm import counters
from kvtier.engines.vllm.connector import tier_names
from kvtier.engines.vllm.metrics import MAX_OBSERVATIONS, KVTierPromMetrics, KVTierStats
from kvtier.store.types import PromotionOutcome


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
    return KVTierPromMetrics(
        config,  # type: ignore[arg-type]
        types.types(),
        ["model_name", "engine"],
        labels,
        ("ram", "disk"),
    )


def test_metrics_have_the_engines_labels() -> None:
    types = _Types()
    metrics = _metrics(types)
    metrics.observe(_stats().data, 1)
    metrics.observe(_stats().data, 1)
    text = types.text()
    assert 'vllm:kvtier_loaded_tokens_total{engine="1",model_name="m",tier="disk"} 128.0' in text
    assert 'vllm:kvtier_offered_tokens_total{engine="1",model_name="m"} 512.0' in text
    assert 'vllm:kvtier_load_duration_seconds_count{engine="1",model_name="m"} 4.0' in text


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
    metrics = _metrics(types)
    before = types.text()
    metrics.observe(_stats().data, 9)
    assert types.text() == before


def test_every_label_set_exists_from_the_start_at_0() -> None:
    types = _Types()
    metrics = _metrics(types)
    before = types.text()
    stats = _stats()
    for metric in counters.COUNTERS:
        for value in ("ram", "disk") if metric.label == counters.TIER else metric.values:
            stats.add(metric.name, 1, value)
    metrics.observe(stats.data, 1)
    after = types.text()
    assert _series(before) == _series(after)
    assert 'vllm:kvtier_load_failures_total{engine="1",model_name="m",reason="limit"} 0.0' in before
    assert 'vllm:kvtier_load_failures_total{engine="1",model_name="m",reason="limit"} 1.0' in after


def test_processes_without_tiers_go_up_and_down() -> None:
    types = _Types()
    metrics = _metrics(types)

    def shown(engine: int) -> float | None:
        labels = {"model_name": "m", "engine": str(engine)}
        return types.registry.get_sample_value("vllm:kvtier_processes_without_tiers", labels)

    assert (shown(0), shown(1)) == (0, 0)
    reports = [KVTierStats(), KVTierStats()]
    for report in reports:
        report.add(counters.WITHOUT_TIERS[0])
    # The scheduler's and a rank's.
    metrics.observe(reports[0].aggregate(reports[1]).data, 1)
    assert (shown(0), shown(1)) == (0, 2)
    again = KVTierStats()
    again.add(counters.WITHOUT_TIERS[0], -1)
    metrics.observe(again.data, 1)
    assert (shown(0), shown(1)) == (0, 1)


def _series(text: str) -> list[str]:
    return [
        line.rpartition(" ")[0]
        for line in text.splitlines()
        if not line.startswith("#") and "_created{" not in line
    ]


def test_the_tiers_of_the_metrics_are_those_of_the_topology(tmp_path: Path) -> None:
    written = topology()
    write(tmp_path, written)
    transfer = SimpleNamespace(kv_connector_extra_config={"topology": str(tmp_path)})
    names = tuple(tier.name for tier in written.structural.tiers)
    assert len(names) > 1
    assert tier_names(transfer) == names  # type: ignore[arg-type]
    assert tier_names(None) == ()


def test_an_unregistered_counter_fails_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("new", ""), ("load_failures", "new"), ("stored_tokens", "new")):
        monkeypatch.setattr(counters, "strict", True)
        with pytest.raises(LookupError, match="is not registered"):
            KVTierStats().add(name, 1, value)
        monkeypatch.setattr(counters, "strict", False)
        stats = KVTierStats()
        stats.add(name, 1, value)
        assert stats.data == {name: {value: 1}}


def test_every_label_value_in_the_code_is_registered() -> None:
    found = set(counted())
    assert len(found) > 60
    registered = {
        (metric.name, value)
        for metric in counters.COUNTERS
        if metric.label != counters.TIER
        for value in metric.values
    }
    outcomes = {("promotions", str(outcome.value)) for outcome in PromotionOutcome}
    assert found - registered == set()
    # The class of an error is computed.
    assert {each for each in registered - found - outcomes if each[0] != "off"} == set()


SOURCES = {
    # What takes a value: the counter, and the position of the value among the arguments.
    "reject_loads": ("load_failures", 1),
    "rejected": ("load_failures", 1),
    "stop_all": ("load_failures", 0),
    "abandon": ("load_failures", 0),
    "_drain": ("load_failures", 0),
    "_reject": ("rejected_hints", 1),
    "_drop": ("dropped_stores", 1),
    "_drop_held": ("dropped_stores", 1),
    "_drop_planned": ("dropped_stores", 0),
    "_guarded": ("errors", 0),
}
ATTRIBUTES = {
    "failures": "load_failures",
    "promotions": "promotions",
    "dropped": "dropped_stores",
    "outcomes": "prefetch_hints",
}
NAMES = {"hook": "errors", "reason": "load_failures"}
NOT_EVENTS = ("loaded_bytes", "stored_bytes", "loads_whole", "stores_delivered")


def counted() -> Iterator[tuple[str, str]]:
    """Counter and label value of each place in the connector that counts."""
    folder = Path(counters.__file__).parent
    for path in sorted([*folder.glob("*.py"), *folder.with_name("common").glob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            yield from _counted_by(node)


def _counted_by(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "InvalidHintError":
        yield from (("rejected_hints", value) for value in _strings(node.args[0]))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner = ast.unparse(node.func.value)
        if node.func.attr in SOURCES:
            counter, position = SOURCES[node.func.attr]
            yield from ((counter, value) for value in _strings(node.args[position]))
        elif node.func.attr == "add" and owner.endswith("_counters"):
            for value in _strings(node.args[0]):
                if value not in NOT_EVENTS:
                    yield "worker_events", value
                else:
                    yield from ((value, "") for _ in (1,) if value.endswith("_bytes"))
        elif node.func.attr == "add" and owner.endswith("stats"):
            for name in _strings(node.args[0]):
                values = _strings(node.args[2]) if len(node.args) > 2 else [""]
                yield from ((name, value) for value in values)
    elif isinstance(node, ast.Assign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Attribute) and target.attr == "stop_reason":
                yield from (("load_failures", value) for value in _strings(node.value))
            elif isinstance(target, ast.Name) and target.id in NAMES:
                yield from ((NAMES[target.id], value) for value in _strings(node.value))
            elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Attribute):
                counter = ATTRIBUTES.get(target.value.attr, "")
                if counter:
                    yield from ((counter, value) for value in _strings(target.slice))
    elif isinstance(node, ast.keyword) and node.arg == "reason":
        yield from (("load_failures", value) for value in _strings(node.value))
    elif isinstance(node, ast.FunctionDef) and node.name in (
        "_cannot_reference",
        "_store_blocked_reason",
    ):
        for each in ast.walk(node):
            if isinstance(each, ast.Return) and each.value is not None:
                yield from (("dropped_stores", value) for value in _strings(each.value))


def _strings(node: ast.AST) -> list[str]:
    """The values that an expression can have, as far as they are written in it."""
    if isinstance(node, ast.JoinedStr):
        return _strings(node.values[0])
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        value = node.value.split(":")[0]
        return [value] if value and " " not in value else []
    if isinstance(node, ast.IfExp):
        return [*_strings(node.body), *_strings(node.orelse)]
    if isinstance(node, ast.BoolOp):
        return [value for each in node.values for value in _strings(each)]
    if isinstance(node, ast.Name) and node.id == "IDENTITY_CHANGED":
        return [IDENTITY_CHANGED]
    return []


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
