"""Attaching to tierd, losing it, and the engine's cache being reset."""

from __future__ import annotations

import pytest
from tests.unit.scheduler.scheduler_rig import CHUNK, DISK, RAM, Rig, topology

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


def test_the_handshake_says_who_writes(rig: Rig) -> None:
    hello = Rig(ranks=4).client.hello()
    assert (hello.role, hello.engine, hello.ranks, hello.writer_ranks) == (
        "scheduler",
        "engine/dp0",
        4,
        (0, 1, 2, 3),
    )
    assert hello.identity == "{}"
    assert hello.ephemeral_reason == ""


def test_keys_that_leave_are_acknowledged_at_once_by_the_clients_thread(rig: Rig) -> None:
    request = rig.request(300)
    rig.hold(request.keys(0, 4))
    rig.client.leaving(request.keys(0, 1), token=11)
    assert [ack.token for ack in rig.client.take(EvictionAck)] == [11]


def test_a_missing_delta_is_asked_for_once(rig: Rig) -> None:
    rig.client._sequence += 3
    rig.client.delta()
    rig.client.delta()
    assert len(rig.client.take(Resync)) == 1


def test_a_refusal_is_said_once_and_means_no_tiers(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(attach=False)
    for _ in range(3):
        rig.client.sink(SessionRefused(reason="another version"))
        assert rig.ask(rig.request(300)) == 0
    assert caplog.text.count("another version") == 1
    assert rig.scheduler.session.counters["refused"] == 3


def test_a_new_tierd_is_used_once_it_is_ready(rig: Rig) -> None:
    request = rig.request(300)
    rig.client.lose()
    assert rig.ask(request) == 0
    rig.client.welcome(epoch=2)
    assert rig.ask(request) == 0
    rig.client.ready()
    rig.hold(request.keys(0, 4))
    rig.now += 1
    assert rig.ask(request) == 4 * CHUNK


def test_live_settings_are_taken_and_bad_ones_refused_value_by_value(rig: Rig) -> None:
    request = rig.request(300)
    rig.hold(request.keys(0, 4))
    rig.client.sink(
        LiveSettings(settings='{"minLoadTokens": 100000, "tiers": {"disk": {"loadWeight": -3}}}')
    )
    assert rig.ask(request) == 0
    assert rig.scheduler.session.live.tiers["disk"].load_weight == 100
    assert rig.scheduler.session.counters["settings_refused"] == 1


def test_a_raised_limit_holds_for_the_next_promotion(rig: Rig) -> None:
    changed = topology().live.model_copy(update={"tiers": {**topology().live.tiers}})
    text = changed.model_dump_json(by_alias=True).replace(
        '"loadTimeoutSeconds":4', '"loadTimeoutSeconds":40'
    )
    rig.client.sink(LiveSettings(settings=text))
    request = rig.request(300)
    rig.hold(request.keys(0, 4), DISK)
    assert rig.ask(request) is None
    assert rig.client.take(Promote)[0].budget_seconds == 40


def test_after_a_reset_nothing_of_before_is_offered(rig: Rig) -> None:
    before = rig.request(300, "before")
    rig.hold(before.keys(0, 4))
    assert rig.scheduler.reset_cache()
    assert len(rig.client.take(ResetCache)) == 1
    assert rig.ask(rig.request(300, "after")) == 0
    # Deltas of the old namespace that were under way do not count.
    rig.client.delta(added=dict.fromkeys(before.keys(0, 4), RAM))
    assert rig.ask(rig.request(300, "after2")) == 0
    rig.client.ready("b" * 32)
    after = rig.request(300, "after3")
    assert rig.ask(after) == 0
    rig.hold(after.keys(0, 2))
    rig.now += 1
    assert rig.ask(after) == 2 * CHUNK


def test_what_was_computed_before_a_reset_is_not_stored_after_it(rig: Rig) -> None:
    rig.client.credit(16)
    running, done = rig.request(300, "running"), rig.request(300, "done", seed=1)
    for request in (running, done):
        rig.ask(request)
    rig.run({"running": 300, "done": 300})
    running.append(1)
    done.append(1)
    rig.finish(done)
    assert rig.pool.referenced()
    rig.scheduler.reset_cache()
    assert rig.pool.referenced() == []
    rig.client.ready("b" * 32)
    assert rig.build({"running": 1}).stores == []
    rig.finish(running)
    assert rig.build().stores == []
    assert rig.client.take(Reserve) == []


def test_slots_of_stores_that_a_reset_dropped_are_used_again(rig: Rig) -> None:
    rig.client.credit(4)
    first = rig.request(300, "first")
    rig.ask(first)
    rig.run({"first": 300})
    first.append(1)
    rig.finish(first)
    rig.scheduler.reset_cache()
    rig.client.ready("b" * 32)
    second = rig.request(300, "second")
    rig.ask(second)
    rig.run({"second": 300})
    second.append(1)
    assert len(rig.build({"second": 1}).stores) == 4


def test_a_reset_before_the_namespace_is_open_is_made_good_when_it_opens() -> None:
    rig = Rig(attach=False)
    rig.client.welcome()
    assert rig.scheduler.reset_cache()
    rig.client.ready()
    request = rig.request(300)
    rig.hold(request.keys(0, 4))
    assert rig.ask(request) == 0
    assert len(rig.client.take(ResetCache)) == 1
    rig.client.ready("b" * 32)
    rig.hold(request.keys(0, 4))
    rig.now += 1
    assert rig.ask(request) == 4 * CHUNK


def test_after_a_reset_every_later_session_is_for_this_engine_alone(rig: Rig) -> None:
    rig.scheduler.reset_cache()
    assert len(rig.client.take(ResetCache)) == 1
    rig.client.lose()
    assert rig.client.hello().ephemeral_reason == RESET_REASON
    rig.client.welcome(epoch=2)
    rig.client.ready("c" * 32)
    request = rig.request(300)
    rig.hold(request.keys(0, 4))
    assert rig.ask(request) == 4 * CHUNK
    assert rig.client.take(ResetCache) == []


def test_a_reset_without_tierd_is_not_forgotten(rig: Rig) -> None:
    rig.client.lose()
    rig.scheduler.reset_cache()
    assert rig.client.hello().ephemeral_reason == RESET_REASON


def test_a_reset_that_crosses_with_the_hello_of_the_next_session_is_made_good(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str] = []

    def meanwhile() -> None:
        rig.client.lose()
        reasons.append(rig.client.hello().ephemeral_reason)

    monkeypatch.setattr(rig.scheduler.loads, "reset", meanwhile)
    assert rig.scheduler.reset_cache()
    assert reasons == [""]
    rig.client.welcome(epoch=2)
    rig.client.ready()
    request = rig.request(300)
    rig.hold(request.keys(0, 4))
    assert rig.ask(request) == 0
    assert len(rig.client.take(ResetCache)) >= 1
    rig.client.ready("b" * 32)
    rig.hold(request.keys(0, 4))
    rig.now += 1
    assert rig.ask(request) == 4 * CHUNK


def test_closing_says_goodbye(rig: Rig) -> None:
    rig.scheduler.shutdown()
    assert rig.client.closed
