"""Each metric of the engine's ``/metrics`` moves when what it counts happens.

A scenario runs the scheduler side or the worker side, and says at some points what its metrics
show. It adds to no counter itself. A metric without a scenario fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.scheduler.connector_configs import connector_config, empty_step, full_spec
from tests.unit.scheduler.metered_engine import MeteredEngine
from tests.unit.scheduler.scheduler_testbed import (
    CHUNK,
    DISK,
    NFS,
    RAM,
    SLOT_BYTES,
    FakeRequest,
    SchedulerTestbed,
    topology,
)
from tests.unit.scheduler.test_hint_effects import computed, hinted, prefetching
from tests.unit.scheduler.test_kv_events import publishing, run
from tests.unit.worker.worker_testbeds import WorkerTestbed, load_job, store_job, wait_until
from vllm.v1.kv_cache_interface import CrossAttentionSpec

from kvtier.engines.common.jobs import LoadJob, StoreJob
from kvtier.engines.common.rearming import REARM_SECONDS
from kvtier.engines.vllm import connector as connector_module
from kvtier.engines.vllm import counters, kv_events
from kvtier.engines.vllm.counters import COUNTERS, GAUGES, HISTOGRAMS, UNEXPECTED, WITHOUT_TIERS
from kvtier.engines.vllm.queued_prefixes import KEPT_SECONDS, MAX_KEPT
from kvtier.tierd.wire import LiveSettings, Promote, Usable

A, B, C, D = (1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12), (13, 14, 15, 16)
Shown = dict[str, dict[str, float]]
"""By metric and label value, without zeros."""
Scenario = Callable[[MeteredEngine, pytest.MonkeyPatch], Iterator[Shown]]


def _apply(testbed: SchedulerTestbed, **changes: Any) -> None:
    """tierd sends other live values."""
    live = topology().live.model_copy(update=changes)
    testbed.client.sink(LiveSettings(settings=live.model_dump_json(by_alias=True)))


def _waiting(testbed: SchedulerTestbed, name: str, seed: int) -> tuple[FakeRequest, int]:
    """A request that waits for a promotion of its four chunks."""
    request = testbed.request(300, name, seed)
    testbed.hold(request.keys(0, 4), DISK)
    assert testbed.ask(request) is None
    (promote,) = testbed.client.take(Promote)
    return request, promote.promotion


def lookups(engine: MeteredEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    testbed = engine.testbed
    loaded, absent, short, unread = (
        testbed.request(300, name, seed) for seed, name in enumerate(("load", "no", "short", "un"))
    )
    testbed.hold(loaded.keys(0, 4))
    _apply(testbed, min_load_tokens=3 * CHUNK)
    testbed.hold(short.keys(0, 2))
    unread.skip_reading_prefix_cache = True
    for request in (loaded, absent, short, unread, loaded):
        testbed.ask(request)
    decisions = {"load": 1, "not_held": 1, "too_short": 1, "not_read": 1}
    yield {"queries": {"": 4}, "queried_tokens": {"": 4 * 300}, "decisions": decisions}
    testbed.ask(hinted(testbed, "hint", 5, skip_load=True))
    testbed.ask(testbed.request(300, "embedded", 6, prompt_embeds=object()))
    late, promotion = _waiting(testbed, "late", 7)
    testbed.client.promoted(promotion, 0, "failed")
    assert testbed.ask(late) == 0
    testbed.client.lose()
    testbed.ask(testbed.request(300, "lost", 8))
    decisions |= {"skip_load": 1, "skipped": 1, "not_in_time": 1, "not_ready": 1}
    yield {"queries": {"": 8}, "queried_tokens": {"": 8 * 300}, "decisions": decisions}


def loads(engine: MeteredEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    testbed = engine.testbed
    job = testbed.promoted_load(testbed.request(300), (0, 1, 1, 2))
    offered = {"offered_tokens": {"": 4 * CHUNK}}
    yield {
        **offered,
        "loads_in_flight": {"": 1},
        "loaded_tokens": {},
        "tier_loaded_bytes": {},
        "load_duration_seconds": {},
    }
    testbed.report(loads=[testbed.result(job.load, 4)])
    yield {
        **offered,
        "loads_in_flight": {},
        "loaded_tokens": {"ram": CHUNK, "disk": 2 * CHUNK, "nfs": CHUNK},
        "tier_loaded_bytes": {"ram": SLOT_BYTES, "disk": 2 * SLOT_BYTES, "nfs": SLOT_BYTES},
        "load_duration_seconds": {"nfs": 1},
    }


def failed_loads(engine: MeteredEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    testbed = engine.testbed
    reasons = ("gone", "limit", "address: 5 is outside", "epoch")
    for seed, reason in enumerate(reasons):
        request = testbed.request(300, reason, seed)
        testbed.hold(request.keys(0, 4))
        testbed.admit(request, 0, testbed.ask(request) or 0)
        (job,) = testbed.build().loads
        testbed.report(loads=[testbed.result(job.load, seed, reason, reason)])
    yield {"load_failures": {reason.split(":")[0]: 1 for reason in reasons}}


def promotions(engine: MeteredEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    testbed = engine.testbed
    for seed, (usable, outcome) in enumerate(((4, "whole"), (2, "partial"), (0, "failed"))):
        request, promotion = _waiting(testbed, outcome, seed)
        testbed.client.promoted(promotion, usable, outcome)
        assert testbed.ask(request) == usable * CHUNK
    yield {"promotions": {"whole": 1, "partial": 1, "failed": 1}}
    slow, _ = _waiting(testbed, "slow", 4)
    testbed.now += 5
    assert testbed.ask(slow) == 0
    _waiting(testbed, "lost", 5)
    testbed.client.lose()
    testbed.build()
    yield {"promotions": {"whole": 1, "partial": 1, "failed": 1, "out_of_time": 1, "lost": 1}}


def waits(engine: MeteredEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    testbed = engine.testbed
    yield {"waiting_requests": {}, "wait_seconds": {}}
    request, promotion = _waiting(testbed, "r", 0)
    yield {"waiting_requests": {"": 1}, "wait_seconds": {}}
    testbed.now += 0.25
    testbed.client.promoted(promotion, 4)
    assert testbed.ask(request) == 4 * CHUNK
    yield {"waiting_requests": {}, "wait_seconds": {"": 1}}


def stores(engine: MeteredEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    testbed = engine.testbed
    testbed.client.credit(8)
    request = testbed.request(300)
    testbed.ask(request)
    testbed.run({"r": 300})
    request.append(1)
    planned = testbed.build({"r": 1}).stores
    yield {"stores_in_flight": {"": 4}, "store_duration_seconds": {}}
    testbed.now += 0.5
    testbed.report(done={store.reservation: 1 for store in planned})
    yield {"stores_in_flight": {}, "store_duration_seconds": {"": 4}}


def dropped_stores(engine: MeteredEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    testbed = engine.testbed
    computed(testbed, "skipped", 1, skip_store=True)
    computed(testbed, "invalid", 2, tiers=["tape"])
    testbed.build()
    dropped = {"skip_store": 4, "invalid_hints": 4}
    yield {"dropped_stores": dropped}
    _apply(testbed, min_store_tokens=301)
    computed(testbed, "short", 3)
    testbed.build()
    dropped |= {"short_prompt": 4}
    yield {"dropped_stores": dropped}
    _apply(testbed, min_store_tokens=0)
    # tierd grants no slots, and is lost while they are waited for.
    computed(testbed, "lost", 4)
    testbed.build()
    testbed.client.lose()
    testbed.build()
    yield {"dropped_stores": dropped | {"lost": 4}}


def skipped_requests(engine: MeteredEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    testbed = engine.testbed
    requests = [
        hinted(testbed, "hint", 1, skip_load=True),
        testbed.request(300, "embedded", 2, prompt_embeds=object()),
        testbed.request(300, "session", 3, resumable=True),
        testbed.request(300, "unread", 4, skip_reading_prefix_cache=True),
    ]
    for request in requests:
        testbed.ask(request)
    yield {"skipped_requests": {}}
    for request in requests:
        testbed.finish(request)
    yield {
        "skipped_requests": {
            "skip_load": 1,
            "prompt_embeds": 1,
            "streaming_session": 1,
            "not_read": 1,
        }
    }


def rejected_hints(engine: MeteredEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    testbed = engine.testbed
    invalid: tuple[dict[str, Any], ...] = (
        {"no_such_hint": 1},
        {"skip_store": "yes"},
        {"max_load_tokens": -1},
        {"tiers": ["tape"]},
    )
    for seed, hints in enumerate(invalid):
        testbed.ask(hinted(testbed, f"r{seed}", seed, **hints))
    yield {"rejected_hints": {"unknown": 1, "type": 1, "range": 1, "unknown_tier": 1}}


def prefetch_hints(engine: MeteredEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    testbed = engine.testbed
    testbed.build()
    held = hinted(testbed, "held", 1, prefetch=True)
    testbed.hold(held.keys(0, 4))
    engine.connector.on_new_request(held)  # type: ignore[arg-type]
    yield {"prefetch_hints": {"nothing_missing": 1}}
    testbed.client.accepts = False
    prefetching(testbed, "refused", 2)
    testbed.now += KEPT_SECONDS
    testbed.build()
    yield {"prefetch_hints": {"nothing_missing": 1, "not_ready": 1}}
    testbed.client.accepts = True
    for number in range(MAX_KEPT + 2):
        prefetching(testbed, f"p{number}", 10 + number)
    outcomes = {"nothing_missing": 1, "not_ready": 1, "started": MAX_KEPT, "too_many": 2}
    yield {"prefetch_hints": outcomes}


def events(engine: MeteredEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    testbed = SchedulerTestbed(attach=False)
    published = publishing(testbed)
    engine.use(testbed)
    testbed.client.welcome()
    testbed.client.ready()
    testbed.build()
    first = run(testbed)
    testbed.hold(first.keys(0, 4))
    assert len(list(engine.connector.take_events())) == 4
    yield {"kv_events": {"stored": 4}, "dropped_kv_events": {}}
    testbed.client.leaving(first.keys(3, 1))
    assert len(list(engine.connector.take_events())) == 1
    yield {"kv_events": {"stored": 4, "removed": 1}, "dropped_kv_events": {}}
    # No room to describe two requests: the chunks of the first one leave, and are announced so.
    monkeypatch.setattr(kv_events, "MAX_DESCRIPTION_BYTES", published._bytes)
    run(testbed, 300, "second", 1)
    assert len(list(engine.connector.take_events())) == 3
    yield {"kv_events": {"stored": 4, "removed": 4}, "dropped_kv_events": {"table_full": 3}}

    def broken(*_: object, **__: object) -> None:
        raise TypeError("of another vLLM")

    monkeypatch.setattr(published, "_types", published._types._replace(stored=broken))
    testbed.hold(testbed.requests["second"].keys(0, 4))
    assert list(engine.connector.take_events()) == []
    yield {
        "kv_events": {"stored": 4, "removed": 4},
        "dropped_kv_events": {"table_full": 3, "error": 1},
    }


def hook_errors(engine: MeteredEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    testbed, connector = engine.testbed, engine.connector
    request = testbed.request(300)
    yield {"errors": {}, "rearms": {}, WITHOUT_TIERS[0]: {}}

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken on purpose")

    hooks = ("get_num_new_matched_tokens", "update_connector_output", "request_finished")
    with monkeypatch.context() as patch:
        for hook in hooks:
            patch.setattr(testbed.scheduler, hook, broken)
        assert connector.get_num_new_matched_tokens(request, 0) == (0, False)  # type: ignore[arg-type]
        connector.update_connector_output(SimpleNamespace(kv_connector_worker_meta=None))  # type: ignore[arg-type]
        connector.request_finished_all_groups(request, ([],))  # type: ignore[arg-type]
    yield {"errors": dict.fromkeys(hooks, 1), "rearms": {}, WITHOUT_TIERS[0]: {"": 1}}
    testbed.now += REARM_SECONDS[0]
    connector.build_connector_meta(empty_step())  # type: ignore[arg-type]
    yield {"errors": dict.fromkeys(hooks, 1), "rearms": {"": 1}, WITHOUT_TIERS[0]: {}}


def starts_without_tiers(engine: MeteredEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    import torch

    engine.start(connector_config(engine.directory / "absent"))
    yield {"off": {"ConfigurationError": 1}}
    other = CrossAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)
    engine.start(None, full_spec(), other, rank=True)

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(connector_module, "planner_for", broken)
    engine.start()
    yield {"off": {"ConfigurationError": 1, "UnsupportedGeometryError": 1, UNEXPECTED: 1}}


def settings(engine: MeteredEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    testbed = engine.testbed
    every = {"ram": 1, "disk": 1, "nfs": 1}
    _apply(testbed, generation=1)
    testbed.build()
    yield {"tier_usable": every, "applied_generation": {"": 1}}
    testbed.client.sink(Usable(bits=RAM | NFS))
    _apply(testbed, generation=7)
    testbed.build()
    yield {"tier_usable": {"ram": 1, "nfs": 1}, "applied_generation": {"": 7}}
    testbed.client.lose()
    testbed.build()
    yield {"tier_usable": {}, "applied_generation": {"": 7}}
    testbed.client.welcome(epoch=2)
    testbed.client.ready()
    _apply(testbed, generation=8)
    testbed.build()
    yield {"tier_usable": every, "applied_generation": {"": 8}}


def _end(rank: WorkerTestbed, loads: list[LoadJob], stores: list[StoreJob]) -> None:
    """Runs steps until these jobs have been reported."""
    ended: set[int] = set()

    def reported(*jobs: Any) -> bool:
        report = rank.step(*jobs)
        ended.update(each.load for each in report.loads)
        ended.update(report.stores_done)
        return ended >= {*(job.load for job in loads), *(job.reservation for job in stores)}

    if not reported(loads, stores):
        wait_until(reported)


def copies(engine: MeteredEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    rank = engine.start_rank()
    _end(
        rank,
        [load_job(1, A, slots=rank.slots(1))],
        [store_job(2, rank.slot(5), B), store_job(3, rank.slot(6), C)],
    )
    copied = {
        "loaded_bytes": {"": rank.slot_bytes},
        "stored_bytes": {"": 2 * rank.slot_bytes},
        "stored_chunks": {"": 2},
        "stored_tokens": {"": 2 * CHUNK},
    }
    yield {**copied, "worker_events": {}}
    rank.reuse(2)
    _end(rank, [load_job(4, A, slots=rank.slots(2))], [store_job(5, 1 << 60, B)])
    events: dict[str, float] = {
        "slots_reused": 1,
        "loads_failed": 1,
        "bad_addresses": 1,
        "stores_aborted": 1,
    }
    yield {**copied, "worker_events": events}
    rank.engine.fail("device error")
    _end(rank, [], [store_job(6, rank.slot(7), D)])
    events |= {"copy_errors": 1, "stores_aborted": 2}
    yield {**copied, "worker_events": events}


SCENARIOS: dict[str, Scenario] = {
    "queries": lookups,
    "queried_tokens": lookups,
    "decisions": lookups,
    "loaded_tokens": loads,
    "offered_tokens": loads,
    "stored_tokens": copies,
    "stored_chunks": copies,
    "load_failures": failed_loads,
    "promotions": promotions,
    "dropped_stores": dropped_stores,
    "skipped_requests": skipped_requests,
    "loaded_bytes": copies,
    "tier_loaded_bytes": loads,
    "stored_bytes": copies,
    "worker_events": copies,
    "errors": hook_errors,
    "rejected_hints": rejected_hints,
    "prefetch_hints": prefetch_hints,
    "kv_events": events,
    "dropped_kv_events": events,
    "rearms": hook_errors,
    "off": starts_without_tiers,
    "load_duration_seconds": loads,
    "store_duration_seconds": stores,
    "wait_seconds": waits,
    "loads_in_flight": loads,
    "stores_in_flight": stores,
    "waiting_requests": waits,
    "tier_usable": settings,
    "applied_generation": settings,
    WITHOUT_TIERS[0]: hook_errors,
}
METRICS = {
    metric.name: metric
    for metric in (*COUNTERS, *HISTOGRAMS, *GAUGES, counters.Metric(*WITHOUT_TIERS))
}
RETURNING = {metric.name for metric in GAUGES} - {"applied_generation"} | {WITHOUT_TIERS[0]}
"""Gauges that are at the end what they were at the start."""
LABEL_VALUES = {"decisions": 3, "load_failures": 3, "dropped_stores": 3, "promotions": 3}
"""How many label values a scenario moves at least."""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[MeteredEngine]:
    made = MeteredEngine(tmp_path)
    yield made
    made.close()


def test_every_metric_has_a_scenario_and_every_scenario_a_metric() -> None:
    assert SCENARIOS.keys() == METRICS.keys()


@pytest.mark.parametrize("name", METRICS)
def test_the_metric_shows_what_happened(
    engine: MeteredEngine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    metric = METRICS[name]
    seen = [engine.shown(metric)]
    for expected in SCENARIOS[name](engine, monkeypatch):
        seen.append(engine.shown(metric))
        assert seen[-1] == expected[name]
    assert any(values != seen[0] for values in seen), "it has moved"
    if name in RETURNING:
        assert seen[-1] == seen[0]
    elif metric not in GAUGES:
        assert seen[0] == {}
        assert sum(seen[-1].values()) > 0
    assert len(seen[-1]) >= LABEL_VALUES.get(name, 0)
