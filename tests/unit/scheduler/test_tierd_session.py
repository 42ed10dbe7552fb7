"""Attaching to tierd, losing it, and the engine's cache being reset."""

from __future__ import annotations

import pytest
from tests.unit.scheduler.scheduler_testbed import CHUNK, DISK, RAM, SchedulerTestbed, topology

from kvtier.engines.vllm.tierd_session import RESET_REASON
from kvtier.tierd.wire import (
    EvictionAck,
    LiveSettings,
    Promote,
    Reserve,
    ResetCache,
    Resync,
    SessionRefused,
)


def test_the_handshake_names_the_writer_ranks(testbed: SchedulerTestbed) -> None:
    hello = SchedulerTestbed(ranks=4).client.hello()
    assert (hello.role, hello.engine, hello.ranks, hello.shard_writers) == (
        "scheduler",
        "engine/dp0",
        4,
        ((0, 1, 2, 3),),
    )
    assert hello.identity == "{}"
    assert hello.ephemeral_reason == ""


def test_eviction_notices_are_acknowledged_on_the_clients_thread(testbed: SchedulerTestbed) -> None:
    request = testbed.request(300)
    testbed.hold(request.keys(0, 4))
    testbed.client.leaving(request.keys(0, 1), token=11)
    assert [ack.token for ack in testbed.client.take(EvictionAck)] == [11]


def test_a_missing_delta_requests_one_resync(testbed: SchedulerTestbed) -> None:
    testbed.client._sequence += 3
    testbed.client.delta()
    testbed.client.delta()
    assert len(testbed.client.take(Resync)) == 1


def test_a_rejection_is_logged_once_and_disables_tiers(
    testbed: SchedulerTestbed, caplog: pytest.LogCaptureFixture
) -> None:
    testbed = SchedulerTestbed(attach=False)
    for _ in range(3):
        testbed.client.sink(SessionRefused(reason="another version"))
        assert testbed.ask(testbed.request(300)) == 0
    assert caplog.text.count("another version") == 1
    assert testbed.scheduler.session.counters["refused"] == 3


def test_a_new_tierd_is_used_once_its_namespace_is_open(testbed: SchedulerTestbed) -> None:
    request = testbed.request(300)
    testbed.client.lose()
    assert testbed.ask(request) == 0
    testbed.client.welcome(epoch=2)
    assert testbed.ask(request) == 0
    testbed.client.ready()
    testbed.hold(request.keys(0, 4))
    testbed.now += 1
    assert testbed.ask(request) == 4 * CHUNK


def test_live_settings_are_validated_value_by_value(testbed: SchedulerTestbed) -> None:
    request = testbed.request(300)
    testbed.hold(request.keys(0, 4))
    testbed.client.sink(
        LiveSettings(settings='{"minLoadTokens": 100000, "tiers": {"disk": {"loadWeight": -3}}}')
    )
    assert testbed.ask(request) == 0
    assert testbed.scheduler.session.live.tiers["disk"].load_weight == 100
    assert testbed.scheduler.session.counters["settings_refused"] == 1


def test_a_changed_timeout_applies_to_the_next_promotion(testbed: SchedulerTestbed) -> None:
    changed = topology().live.model_copy(update={"tiers": {**topology().live.tiers}})
    text = changed.model_dump_json(by_alias=True).replace(
        '"loadTimeoutSeconds":4', '"loadTimeoutSeconds":40'
    )
    testbed.client.sink(LiveSettings(settings=text))
    request = testbed.request(300)
    testbed.hold(request.keys(0, 4), DISK)
    assert testbed.ask(request) is None
    assert testbed.client.take(Promote)[0].budget_seconds == 40


def test_after_a_reset_older_objects_do_not_match(testbed: SchedulerTestbed) -> None:
    before = testbed.request(300, "before")
    testbed.hold(before.keys(0, 4))
    assert testbed.scheduler.reset_cache()
    assert len(testbed.client.take(ResetCache)) == 1
    assert testbed.ask(testbed.request(300, "after")) == 0
    # Deltas of the old namespace that were under way do not count.
    testbed.client.delta(added=dict.fromkeys(before.keys(0, 4), RAM))
    assert testbed.ask(testbed.request(300, "after2")) == 0
    testbed.client.ready("b" * 32)
    after = testbed.request(300, "after3")
    assert testbed.ask(after) == 0
    testbed.hold(after.keys(0, 2))
    testbed.now += 1
    assert testbed.ask(after) == 2 * CHUNK


def test_kv_computed_before_a_reset_is_not_stored_after_it(testbed: SchedulerTestbed) -> None:
    testbed.client.credit(16)
    running, done = testbed.request(300, "running"), testbed.request(300, "done", seed=1)
    for request in (running, done):
        testbed.ask(request)
    testbed.run({"running": 300, "done": 300})
    running.append(1)
    done.append(1)
    testbed.finish(done)
    assert testbed.pool.referenced()
    testbed.scheduler.reset_cache()
    assert testbed.pool.referenced() == []
    testbed.client.ready("b" * 32)
    assert testbed.build({"running": 1}).stores == []
    testbed.finish(running)
    assert testbed.build().stores == []
    assert testbed.client.take(Reserve) == []


def test_slots_of_stores_dropped_by_a_reset_are_reused(testbed: SchedulerTestbed) -> None:
    testbed.client.credit(4)
    first = testbed.request(300, "first")
    testbed.ask(first)
    testbed.run({"first": 300})
    first.append(1)
    testbed.finish(first)
    testbed.scheduler.reset_cache()
    testbed.client.ready("b" * 32)
    second = testbed.request(300, "second")
    testbed.ask(second)
    testbed.run({"second": 300})
    second.append(1)
    assert len(testbed.build({"second": 1}).stores) == 4


def test_a_reset_before_the_namespace_opens_is_sent_when_it_opens() -> None:
    testbed = SchedulerTestbed(attach=False)
    testbed.client.welcome()
    assert testbed.scheduler.reset_cache()
    testbed.client.ready()
    request = testbed.request(300)
    testbed.hold(request.keys(0, 4))
    assert testbed.ask(request) == 0
    assert len(testbed.client.take(ResetCache)) == 1
    testbed.client.ready("b" * 32)
    testbed.hold(request.keys(0, 4))
    testbed.now += 1
    assert testbed.ask(request) == 4 * CHUNK


def test_after_a_reset_every_later_session_is_ephemeral(testbed: SchedulerTestbed) -> None:
    testbed.scheduler.reset_cache()
    assert len(testbed.client.take(ResetCache)) == 1
    testbed.client.lose()
    assert testbed.client.hello().ephemeral_reason == RESET_REASON
    testbed.client.welcome(epoch=2)
    testbed.client.ready("c" * 32)
    request = testbed.request(300)
    testbed.hold(request.keys(0, 4))
    assert testbed.ask(request) == 4 * CHUNK
    assert testbed.client.take(ResetCache) == []


def test_a_reset_without_tierd_is_not_forgotten(testbed: SchedulerTestbed) -> None:
    testbed.client.lose()
    testbed.scheduler.reset_cache()
    assert testbed.client.hello().ephemeral_reason == RESET_REASON


def test_a_reset_that_races_with_the_next_hello_is_sent_later(
    testbed: SchedulerTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str] = []

    def meanwhile() -> None:
        testbed.client.lose()
        reasons.append(testbed.client.hello().ephemeral_reason)

    monkeypatch.setattr(testbed.scheduler.loads, "reset", meanwhile)
    assert testbed.scheduler.reset_cache()
    assert reasons == [""]
    testbed.client.welcome(epoch=2)
    testbed.client.ready()
    request = testbed.request(300)
    testbed.hold(request.keys(0, 4))
    assert testbed.ask(request) == 0
    assert len(testbed.client.take(ResetCache)) >= 1
    testbed.client.ready("b" * 32)
    testbed.hold(request.keys(0, 4))
    testbed.now += 1
    assert testbed.ask(request) == 4 * CHUNK


def test_shutdown_closes_the_client(testbed: SchedulerTestbed) -> None:
    testbed.scheduler.shutdown()
    assert testbed.client.closed
