"""Metrics on their way from the connector to the engine's /metrics."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.scheduler.metric_types import MetricTypes, made_metrics
from tests.unit.scheduler.scheduler_testbed import (
    CHUNK,
    DISK,
    NFS,
    RAM,
    SLOT_BYTES,
    SchedulerTestbed,
    topology,
)

from kvtier.config.writer import write
from kvtier.engines.common.worker_loads import IDENTITY_CHANGED
from kvtier.engines.vllm import counters
from kvtier.engines.vllm.load_records import MAX_DURATIONS, LoadCounts
from kvtier.engines.vllm.metrics import (
    MAX_OBSERVATIONS,
    KVTierStats,
    add_worker_counts,
    tier_names,
)
from kvtier.store.types import PromotionOutcome
from kvtier.tierd.wire import LiveSettings, Promote, Usable


def _stats() -> KVTierStats:
    stats = KVTierStats()
    stats.add("loaded_tokens", 128, "ram")
    stats.add("loaded_tokens", 64, "disk")
    stats.add("offered_tokens", 256)
    stats.observe("load_duration_seconds", [0.25, 0.75], "disk")
    return stats


def test_stats_are_plain_data() -> None:
    data = _stats().data
    assert json.loads(json.dumps(data)) == data


def test_stats_of_ranks_and_scheduler_are_aggregated() -> None:
    joined = _stats().aggregate(_stats())
    assert joined.data["loaded_tokens"] == {"ram": 256, "disk": 128}
    assert joined.data["load_duration_seconds"] == {"disk": [0.25, 0.75, 0.25, 0.75]}


def test_the_log_line_shows_totals() -> None:
    assert _stats().reduce() == {
        "kvtier_loaded_tokens": 192,
        "kvtier_offered_tokens": 256,
        "kvtier_load_duration_seconds_mean": 0.5,
    }


def test_stats_without_counts_are_empty() -> None:
    stats = KVTierStats()
    stats.add("offered_tokens", 0)
    stats.observe("load_duration_seconds", [])
    assert stats.is_empty()
    filled = _stats()
    filled.reset()
    assert filled.is_empty()


def test_load_durations_are_bounded() -> None:
    stats = KVTierStats()
    for _ in range(3):
        stats.observe("wait_seconds", [0.1] * MAX_OBSERVATIONS)
    assert len(stats.data["wait_seconds"][""]) == MAX_OBSERVATIONS


def test_metrics_have_the_engines_labels() -> None:
    types = MetricTypes()
    metrics = made_metrics(types)
    metrics.observe(_stats().data, 1)
    metrics.observe(_stats().data, 1)
    text = types.text()
    assert 'vllm:kvtier_loaded_tokens_total{engine="1",model_name="m",tier="disk"} 128.0' in text
    assert 'vllm:kvtier_offered_tokens_total{engine="1",model_name="m"} 512.0' in text
    assert (
        'vllm:kvtier_load_duration_seconds_count{engine="1",model_name="m",tier="disk"} 4.0' in text
    )


@pytest.mark.parametrize(
    "data",
    [
        {"unheard": {"": 1}},
        {"loaded_tokens": 3},
        {"load_duration_seconds": {"": ["x"]}},
        {"gauges": {"unheard": {"": 1}}},
        {"offered_tokens": {"": -1}},
    ],
)
def test_invalid_stats_do_not_end_the_server(data: dict[str, Any]) -> None:
    made_metrics(MetricTypes()).observe(data, 0)


def test_stats_of_an_unknown_engine_are_ignored() -> None:
    types = MetricTypes()
    metrics = made_metrics(types)
    before = types.text()
    metrics.observe(_stats().data, 9)
    assert types.text() == before


def test_every_label_set_exists_from_the_start_at_0() -> None:
    types = MetricTypes()
    metrics = made_metrics(types)
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
    types = MetricTypes()
    metrics = made_metrics(types)

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


def test_only_one_rank_counts_the_chunks_that_all_store_together() -> None:
    counts = {"stores_delivered": 3, "stored_bytes": 30, "loads_whole": 2, "refused": 1}
    ranks = [KVTierStats(), KVTierStats()]
    for stats, chunk_tokens in zip(ranks, (64, 0), strict=True):
        add_worker_counts(stats, counts, chunk_tokens)
    assert ranks[0].aggregate(ranks[1]).data == {
        "stored_chunks": {"": 3},
        "stored_tokens": {"": 192},
        "stored_bytes": {"": 60},
        "worker_events": {"refused": 2},
    }


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
    "_count_query": ("decisions", 1),
    "_drop": ("dropped_stores", 1),
    "_drop_waiting": ("dropped_stores", 1),
    "_drop_planned": ("dropped_stores", 0),
    "_guarded": ("errors", 0),
    "guarded": ("errors", 0),
    "_results": ("errors", 0),
}
ATTRIBUTES = {
    "failures": "load_failures",
    "promotions": "promotions",
    "dropped": "dropped_stores",
    "skipped": "skipped_requests",
    "outcomes": "prefetch_hints",
    "unannounced": "dropped_kv_events",
    "counts": "kv_events",
}
RETURNS = {
    "cannot_reference": "dropped_stores",
    "blocked_reason": "dropped_stores",
    "_request_blocked_reason": "dropped_stores",
    "initial_skip_reason": "skipped_requests",
    "_skip_reason": "decisions",
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
            # Other classes have methods of these names without a reason.
            for argument in node.args[position : position + 1]:
                yield from ((counter, value) for value in _strings(argument))
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
            elif isinstance(target, ast.Attribute) and target.attr == "skip_reason":
                yield from (("skipped_requests", value) for value in _strings(node.value))
            elif isinstance(target, ast.Attribute) and target.attr == "decision":
                yield from (("decisions", value) for value in _strings(node.value))
            elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for each, value in zip(target.elts, node.value.elts, strict=False):
                    if isinstance(each, ast.Attribute) and each.attr == "decision":
                        yield from (("decisions", text) for text in _strings(value))
            elif isinstance(target, ast.Name) and target.id in NAMES:
                yield from ((NAMES[target.id], value) for value in _strings(node.value))
            elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Attribute):
                counter = ATTRIBUTES.get(target.value.attr, "")
                if counter:
                    yield from ((counter, value) for value in _strings(target.slice))
    elif isinstance(node, ast.keyword) and node.arg == "reason":
        yield from (("load_failures", value) for value in _strings(node.value))
    elif isinstance(node, ast.FunctionDef) and node.name in RETURNS:
        for each in ast.walk(node):
            if isinstance(each, ast.Return) and each.value is not None:
                yield from ((RETURNS[node.name], value) for value in _strings(each.value))


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


def _collected(testbed: SchedulerTestbed) -> KVTierStats:
    stats = KVTierStats()
    testbed.scheduler.collect_stats(stats)
    testbed.scheduler.report_gauges(stats)
    return stats


def test_each_admission_is_one_query_with_one_decision(testbed: SchedulerTestbed) -> None:
    loaded, absent, short, unread = (
        testbed.request(300, name, seed) for seed, name in enumerate(("load", "no", "short", "un"))
    )
    testbed.hold(loaded.keys(0, 4))
    testbed.client.sink(LiveSettings(settings=_live(min_load_tokens=3 * CHUNK)))
    testbed.hold(short.keys(0, 2))
    unread.skip_reading_prefix_cache = True
    for request in (loaded, absent, short, unread):
        for _ in range(3):
            testbed.ask(request)
    hinted = testbed.request(300, "hint", 9, kv_transfer_params={"kvtier.skip_load": True})
    embedded = testbed.request(300, "embedded", 9, prompt_embeds=object())
    testbed.ask(hinted)
    testbed.ask(embedded)
    stats = _collected(testbed)
    assert stats.data["queries"] == {"": 6}
    assert stats.data["queried_tokens"] == {"": 6 * 300}
    assert stats.data["decisions"] == {
        "load": 1, "not_held": 1, "too_short": 1, "not_read": 1, "skip_load": 1, "skipped": 1
    }  # fmt: skip
    # The second admission, after a preemption, is another query.
    testbed.run({"load": 300})
    testbed.preempt(loaded)
    testbed.build(preempted=["load"])
    testbed.ask(loaded)
    assert _collected(testbed).data["queries"] == {"": 1}


def _live(**changes: Any) -> str:
    return topology().live.model_copy(update=changes).model_dump_json(by_alias=True)


def test_a_lookup_without_tierd_is_a_decision() -> None:
    testbed = SchedulerTestbed(attach=False)
    testbed.ask(testbed.request(300))
    stats = _collected(testbed)
    assert stats.data["decisions"] == {"not_ready": 1}
    assert stats.data["gauges"]["tier_usable"] == {"ram": 0, "disk": 0, "nfs": 0}


def test_the_time_that_a_request_waits_for_a_tier_is_observed(testbed: SchedulerTestbed) -> None:
    request = testbed.request(300)
    testbed.hold(request.keys(0, 4), DISK)
    assert testbed.ask(request) is None
    assert _collected(testbed).data["gauges"]["waiting_requests"] == {"": 1}
    (promote,) = testbed.client.take(Promote)
    testbed.now += 0.25
    testbed.client.promoted(promote.promotion, 4)
    assert testbed.ask(request)
    stats = _collected(testbed)
    assert stats.data["wait_seconds"] == {"": [0.25]}
    assert stats.data["gauges"]["waiting_requests"] == {"": 0}


def test_a_promotion_that_brings_nothing_is_a_decision(testbed: SchedulerTestbed) -> None:
    request = testbed.request(300)
    testbed.hold(request.keys(0, 4), DISK)
    assert testbed.ask(request) is None
    (promote,) = testbed.client.take(Promote)
    testbed.client.promoted(promote.promotion, 0, "failed")
    assert testbed.ask(request) == 0
    assert _collected(testbed).data["decisions"] == {"not_in_time": 1}


def test_loads_are_measured_by_tier(testbed: SchedulerTestbed) -> None:
    request = testbed.request(300)
    job = testbed.promoted_load(request, (0, 1, 1, 2))
    assert _collected(testbed).data["gauges"]["loads_in_flight"] == {"": 1}
    testbed.report(loads=[testbed.result(job.load, 4)])
    stats = _collected(testbed)
    assert list(stats.data["load_duration_seconds"]) == ["nfs"]
    assert stats.data["tier_loaded_bytes"] == {
        "ram": SLOT_BYTES, "disk": 2 * SLOT_BYTES, "nfs": SLOT_BYTES
    }  # fmt: skip
    assert stats.data["gauges"]["loads_in_flight"] == {"": 0}


def test_stores_are_measured(testbed: SchedulerTestbed) -> None:
    testbed.client.credit(8)
    request = testbed.request(300)
    testbed.ask(request)
    testbed.run({"r": 300})
    testbed.run({"r": 1})
    stats = _collected(testbed)
    assert stats.data["gauges"]["stores_in_flight"][""] > 0
    testbed.now += 0.5
    stores = testbed.scheduler.stores
    testbed.report(done=dict.fromkeys(stores._open, 1))
    stats = _collected(testbed)
    assert stats.data["store_duration_seconds"] == {"": [0.5] * 4}
    assert stats.data["gauges"]["stores_in_flight"] == {"": 0}


def test_the_state_of_breakers_and_the_applied_generation_are_gauges(
    testbed: SchedulerTestbed,
) -> None:
    testbed.build()
    assert _collected(testbed).data["gauges"]["tier_usable"] == {"ram": 1, "disk": 1, "nfs": 1}
    testbed.client.sink(Usable(bits=RAM | NFS))
    testbed.client.sink(LiveSettings(settings=_live(generation=7)))
    testbed.build()
    stats = _collected(testbed)
    # Only what has changed is reported.
    assert stats.data["gauges"] == {"tier_usable": {"disk": 0}, "applied_generation": {"": 7}}
    types = MetricTypes()
    metrics = made_metrics(types)
    metrics.observe(stats.data, 1)
    text = types.text()
    assert 'vllm:kvtier_applied_generation{engine="1",model_name="m"} 7.0' in text
    assert 'vllm:kvtier_tier_usable{engine="1",model_name="m",tier="disk"} 0.0' in text
    assert "gauges" not in _collected(testbed).data


def test_counters_go_on_over_restarts_of_tierd(testbed: SchedulerTestbed) -> None:
    types = MetricTypes()
    metrics = made_metrics(types)
    before: dict[str, float] = {}
    for epoch in range(2, 5):
        request = testbed.request(300, f"r{epoch}", epoch)
        testbed.hold(request.keys(0, 4))
        testbed.admit(request, 0, testbed.ask(request) or 0)
        (job,) = testbed.build().loads
        testbed.report(loads=[testbed.result(job.load, 4, request.request_id)])
        metrics.observe(_collected(testbed).data, 1)
        after = _totals(types.text())
        assert {name for name in before if after[name] < before[name]} == set()
        assert after["vllm:kvtier_loaded_tokens_total"] == (epoch - 1) * 4 * CHUNK
        before = after
        testbed.client.lose()
        testbed.client.welcome(epoch=epoch)
        testbed.client.ready()
        testbed.build()


def _totals(text: str) -> dict[str, float]:
    totals: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0]
        if name.endswith(("_total", "_count", "_sum")) and not line.startswith("#"):
            totals[name] = totals.get(name, 0) + float(line.rpartition(" ")[2])
    return totals


def test_durations_are_bounded_until_they_are_collected() -> None:
    counts = LoadCounts()
    for _ in range(MAX_DURATIONS + 10):
        counts.note_wait(0.1)
        counts.note_load("disk", 0.2)
    assert len(counts.wait_seconds) == MAX_DURATIONS
    assert {tier: len(each) for tier, each in counts.load_seconds.items()} == {
        "disk": MAX_DURATIONS
    }
