"""Attaching to tierd, losing it, and the engine's cache being reset."""

from __future__ import annotations

import pytest
from tests.unit.scheduler.scheduler_testbed import CHUNK, DISK, SchedulerTestbed, topology

from kvtier.tierd.wire import (
    EvictionAck,
    LiveSettings,
    Promote,
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
