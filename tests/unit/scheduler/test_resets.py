"""The weights may have changed: a reset of vLLM's prefix cache, RPCs, and what is used then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.scheduler.scheduler_testbed import CHUNK, DISK, RAM, SchedulerTestbed

from kvtier.engines.vllm import engine_signals
from kvtier.engines.vllm.metadata import WorkerReport
from kvtier.tierd.wire import Cancel, Identify, Promote, Reserve

TOKENS = 300
CHUNKS = TOKENS // CHUNK


def _filled(testbed: SchedulerTestbed, request_id: str = "first", seed: int = 0) -> None:
    """A request is computed and finished; its stores are planned, not yet in a step."""
    request = testbed.request(TOKENS, request_id, seed)
    testbed.ask(request)
    testbed.run({request_id: TOKENS})
    request.append(1)
    testbed.finish(request)


def _known(testbed: SchedulerTestbed) -> None:
    """The first step of an engine reports the weights that it started with."""
    testbed.run()
    assert testbed.scheduler.weights.weights == testbed.weights


def _request_of_unknown_weights(testbed: SchedulerTestbed) -> Any:
    """A request whose prefix is held in a namespace of weights without a fingerprint."""
    _known(testbed)
    testbed.unknown_weights = "a tensor is missing"
    testbed.pool.reset_prefix_cache()
    testbed.run()
    testbed.client.weights = ()
    testbed.client.ready("1" * 32, identity=1)
    request = testbed.request(TOKENS)
    testbed.hold(request.keys(0, CHUNKS))
    return request


def test_the_first_step_reports_the_weights_without_a_wait(testbed: SchedulerTestbed) -> None:
    request = testbed.request(TOKENS)
    testbed.hold(request.keys(0, CHUNKS))
    assert testbed.ask(request) == CHUNKS * CHUNK
    assert testbed.build().report_weights
    testbed.report()
    assert not testbed.build().report_weights
    assert testbed.client.take(Identify) == []


def test_after_a_reset_with_the_same_weights_the_namespace_opens_again(
    testbed: SchedulerTestbed,
) -> None:
    _known(testbed)
    before = testbed.request(TOKENS, "before")
    testbed.hold(before.keys(0, CHUNKS))
    assert testbed.pool.reset_prefix_cache()
    after = testbed.request(TOKENS, "after")
    assert testbed.ask(after) == CHUNKS * CHUNK, "the weights may be the same still"
    testbed.admit(after, 0, CHUNKS * CHUNK)
    step = testbed.build()
    assert (step.identity, step.report_weights) == (1, True)
    assert len(step.loads) == 1
    assert step.assumed_weights == testbed.weights, "the workers use nothing of other weights"
    testbed.report()
    assert testbed.build().assumed_weights == ()
    assert testbed.ask(testbed.request(TOKENS, "later")) == CHUNKS * CHUNK
    assert testbed.client.take(Identify) == []


def test_what_was_found_for_assumed_weights_is_forgotten_when_they_are_others(
    testbed: SchedulerTestbed,
) -> None:
    _known(testbed)
    in_ram, in_a_file = testbed.request(TOKENS, "ram"), testbed.request(TOKENS, "file", seed=1)
    testbed.hold(in_ram.keys(0, CHUNKS))
    testbed.hold(in_a_file.keys(0, CHUNKS), DISK)
    testbed.pool.reset_prefix_cache()
    assert testbed.ask(in_ram) == CHUNKS * CHUNK
    assert testbed.ask(in_a_file) is None
    (promote,) = testbed.client.take(Promote)
    testbed.weights = ("other",)
    testbed.run()
    assert testbed.client.take(Cancel) == [Cancel(promotion=promote.promotion)]
    assert [testbed.ask(each) for each in (in_ram, in_a_file)] == [0, 0]


def test_nothing_is_read_while_unknown_weights_may_have_changed(testbed: SchedulerTestbed) -> None:
    request = _request_of_unknown_weights(testbed)
    assert testbed.ask(request) == CHUNKS * CHUNK
    testbed.pool.reset_prefix_cache()
    assert testbed.ask(request) is None
    assert testbed.build().assumed_weights == ("unknown",)


def test_after_a_reset_with_other_weights_another_namespace_is_used(
    testbed: SchedulerTestbed,
) -> None:
    _known(testbed)
    request = testbed.request(TOKENS)
    testbed.hold(request.keys(0, CHUNKS))
    testbed.pool.reset_prefix_cache()
    testbed.weights = ("other",)
    testbed.run()
    assert testbed.client.take(Identify) == [Identify(number=1, weights=("other",))]
    assert testbed.ask(request) == 0
    # Deltas of the old namespace that were under way do not count.
    testbed.client.delta(added=dict.fromkeys(request.keys(0, CHUNKS), RAM))
    assert testbed.ask(request) == 0
    testbed.client.weights = ("other",)
    testbed.client.ready("b" * 32, identity=1)
    assert testbed.ask(request) == 0
    testbed.hold(request.keys(0, 2))
    testbed.now += 1
    assert testbed.ask(request) == 2 * CHUNK
    # And back: A to B to A.
    testbed.pool.reset_prefix_cache()
    testbed.weights = ("w",)
    testbed.run()
    assert testbed.client.take(Identify) == [Identify(number=2, weights=("w",))]


def test_a_report_of_an_earlier_number_does_not_count(testbed: SchedulerTestbed) -> None:
    """With asynchronous scheduling a step is in flight at the reset."""
    _known(testbed)
    testbed.build()
    in_flight = testbed.built
    testbed.pool.reset_prefix_cache()
    testbed.scheduler.update_connector_output(
        WorkerReport(step=in_flight.step, identity=0, weights=((0, "w", ""),))
    )
    assert not testbed.scheduler.weights.usable
    testbed.run()
    assert testbed.scheduler.weights.usable


def test_every_rank_must_report(testbed: SchedulerTestbed) -> None:
    made = SchedulerTestbed(ranks=2)
    made.client.weights = ("w", "w")
    made.client.ready()
    made.pool.reset_prefix_cache()
    made.build()
    made.scheduler.update_connector_output(
        WorkerReport(step=made.step, identity=1, weights=((1, "w", ""),))
    )
    assert not made.scheduler.weights.usable
    made.report()
    assert made.scheduler.weights.usable


def test_unknown_weights_get_a_random_namespace_at_each_number(testbed: SchedulerTestbed) -> None:
    _known(testbed)
    request = testbed.request(TOKENS)
    testbed.unknown_weights = "not loaded"
    for number in (1, 2):
        testbed.pool.reset_prefix_cache()
        testbed.run()
        wanted = Identify(number=number, weights=(), ephemeral_reason="not loaded")
        assert testbed.client.take(Identify) == [wanted]
        testbed.client.weights = ()
        testbed.client.ready(str(number) * 32, identity=number)
        testbed.hold(request.keys(0, number))
        testbed.now += 1
        assert testbed.ask(request) == number * CHUNK


def test_weights_that_change_without_a_reset_stop_loads_and_stores_until_a_reset(
    testbed: SchedulerTestbed,
) -> None:
    """As a trainer that keeps the cache. vLLM then answers from stale blocks itself."""
    testbed.client.credit(16)
    _known(testbed)
    request = testbed.request(TOKENS)
    testbed.hold(request.keys(0, CHUNKS))
    testbed.scheduler.on_engine_signal("update_weights")
    testbed.weights = ("other",)
    testbed.run()
    assert testbed.ask(request) == 0
    _filled(testbed, "stale", seed=1)
    assert testbed.build().stores == []
    assert testbed.scheduler.stores.dropped["weights_stale"]
    assert testbed.client.take(Identify) == []
    testbed.pool.reset_prefix_cache()
    testbed.run()
    assert testbed.client.take(Identify) == [Identify(number=2, weights=("other",))]


def test_an_update_of_the_same_weights_without_a_reset_changes_nothing(
    testbed: SchedulerTestbed,
) -> None:
    _known(testbed)
    request = testbed.request(TOKENS)
    testbed.hold(request.keys(0, CHUNKS))
    testbed.scheduler.on_engine_signal("reload_weights")
    assert testbed.ask(request) == CHUNKS * CHUNK
    assert testbed.build().assumed_weights == testbed.weights
    testbed.report()
    assert testbed.ask(request) == CHUNKS * CHUNK


def test_weights_that_are_updated_after_the_reset_and_before_a_step_are_used(
    testbed: SchedulerTestbed,
) -> None:
    """Sleep, and many trainers: reset, update, resume."""
    _known(testbed)
    testbed.pool.reset_prefix_cache()
    testbed.scheduler.on_engine_signal("update_weights")
    testbed.scheduler.on_engine_signal("resume_scheduler")
    testbed.weights = ("other",)
    testbed.run()
    (identify,) = testbed.client.take(Identify)
    assert identify.weights == ("other",)
    assert not testbed.scheduler.weights.stale


def test_requests_do_not_wait_for_ever_for_a_fingerprint(testbed: SchedulerTestbed) -> None:
    request = _request_of_unknown_weights(testbed)
    testbed.pool.reset_prefix_cache()
    assert testbed.ask(request) is None
    testbed.now += 2
    assert testbed.ask(request) == 0


def test_a_reset_gives_back_the_blocks_of_stores_in_flight(testbed: SchedulerTestbed) -> None:
    """vLLM refuses a reset while a block is referenced, before it calls the connector."""
    testbed.client.credit(16)
    _filled(testbed)
    stores = testbed.build().stores
    assert len(stores) == CHUNKS
    _filled(testbed, "planned")
    assert testbed.pool.referenced()
    assert testbed.pool.reset_prefix_cache()
    assert testbed.pool.referenced() == []
    step = testbed.build()
    assert set(step.voided_stores) == {store.reservation for store in stores}
    assert step.stores == []
    testbed.report(done=dict.fromkeys(step.voided_stores, 1))
    assert testbed.scheduler.stores.in_flight == 0
    assert testbed.pool.referenced() == []
    assert testbed.build().voided_stores == ()


def test_a_refused_reset_gives_back_blocks_and_keeps_the_identity(
    testbed: SchedulerTestbed,
) -> None:
    testbed.client.credit(16)
    _filled(testbed)
    stores = testbed.build().stores
    testbed.pool.blocks[4000].ref_cnt = 1
    assert not testbed.pool.reset_prefix_cache()
    step = testbed.build()
    assert set(step.voided_stores) == {store.reservation for store in stores}
    assert step.identity == 0


def test_an_idle_engine_does_not_step_for_voided_stores(testbed: SchedulerTestbed) -> None:
    testbed.client.credit(16)
    _filled(testbed)
    testbed.build()
    assert testbed.scheduler.has_pending_work()
    testbed.pool.reset_prefix_cache()
    assert not testbed.scheduler.has_pending_work()


def test_kv_computed_before_a_reset_is_not_stored_after_it(testbed: SchedulerTestbed) -> None:
    testbed.client.credit(16)
    running = testbed.request(TOKENS, "running")
    testbed.ask(running)
    testbed.run({"running": TOKENS})
    running.append(1)
    testbed.scheduler.on_engine_signal("update_weights")
    testbed.run()
    assert testbed.scheduler.weights.usable
    assert testbed.build({"running": 1}).stores == []
    testbed.finish(running)
    assert testbed.build().stores == []
    assert testbed.client.take(Reserve) == []


def test_slots_of_stores_dropped_by_a_reset_are_reused(testbed: SchedulerTestbed) -> None:
    testbed.client.credit(CHUNKS)
    _filled(testbed)
    testbed.scheduler.reset_cache()
    testbed.run()
    _filled(testbed, "second")
    assert len(testbed.build().stores) == CHUNKS


def test_the_identity_is_told_to_the_next_tierd(testbed: SchedulerTestbed) -> None:
    _known(testbed)
    testbed.client.lose()
    testbed.pool.reset_prefix_cache()
    testbed.weights = ("other",)
    testbed.run()
    assert testbed.client.take(Identify) == []
    testbed.client.welcome(epoch=2)
    testbed.client.ready()
    request = testbed.request(TOKENS)
    testbed.hold(request.keys(0, CHUNKS))
    assert testbed.ask(request) == 0
    assert testbed.client.take(Identify) == [Identify(number=1, weights=("other",))]
    testbed.client.weights = ("other",)
    testbed.client.ready("b" * 32, identity=1)
    testbed.hold(request.keys(0, CHUNKS))
    testbed.now += 1
    assert testbed.ask(request) == CHUNKS * CHUNK


def test_an_identity_that_cannot_be_sent_is_sent_later(testbed: SchedulerTestbed) -> None:
    _known(testbed)
    testbed.pool.reset_prefix_cache()
    testbed.weights = ("other",)
    testbed.client.accepts = False
    testbed.run()
    testbed.client.accepts = True
    testbed.client.credit(1)
    testbed.run()
    assert testbed.client.take(Identify) == [Identify(number=1, weights=("other",))]


class _Listener:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_engine_signal(self, name: str) -> None:
        self.seen.append(name)

    def on_adapter_removed(self) -> None:
        self.seen.append("an adapter was removed")


@pytest.mark.parametrize(
    ("method", "signals"),
    [
        ("reload_weights", ["reload_weights"]),
        ("a_function_of_a_trainer", ["a_function_of_a_trainer"]),
        (lambda worker: None, ["a function"]),
        ("remove_lora", ["an adapter was removed"]),
        ("add_lora", []),
        ("profile", []),
        ("compute_weight_checksums", []),
    ],
)
def test_rpcs_that_may_change_weights_are_signals(method: object, signals: list[str]) -> None:
    from vllm.v1.engine.core import EngineCore

    listener = _Listener()
    engine_signals.listen(listener)
    called: list[object] = []
    core = SimpleNamespace(
        model_executor=SimpleNamespace(collective_rpc=lambda *given: called.append(given[0]))
    )
    EngineCore.collective_rpc(core, method)  # type: ignore[arg-type]
    EngineCore.collective_rpc(core, method=method)  # type: ignore[arg-type]
    assert called == [method, method]
    assert listener.seen == signals * 2


def test_the_removal_of_an_adapter_is_a_signal() -> None:
    from vllm.v1.engine.core import EngineCore

    listener = _Listener()
    engine_signals.listen(listener)
    removed: list[int] = []
    core = SimpleNamespace(model_executor=SimpleNamespace(remove_lora=removed.append))
    EngineCore.remove_lora(core, 7)  # type: ignore[arg-type]
    assert removed == [7]
    assert listener.seen == ["an adapter was removed"]


def test_a_request_of_the_one_step_that_takes_the_fingerprint_is_stored(
    testbed: SchedulerTestbed,
) -> None:
    """As embeddings are, and requests for one token: they end before the report arrives."""
    _known(testbed)
    testbed.client.credit(8)
    testbed.pool.reset_prefix_cache()
    request = testbed.request(TOKENS)
    testbed.ask(request)
    assert testbed.build({"r": TOKENS}).report_weights
    testbed.finish(request)
    testbed.report()
    assert len(testbed.build().stores) == CHUNKS
    assert testbed.scheduler.stores.dropped == {}


def test_it_is_not_stored_if_the_engine_still_has_kv_of_other_weights(
    testbed: SchedulerTestbed,
) -> None:
    _known(testbed)
    testbed.client.credit(8)
    testbed.scheduler.on_engine_signal("reload_weights")
    request = testbed.request(TOKENS)
    testbed.ask(request)
    testbed.build({"r": TOKENS})
    testbed.finish(request)
    testbed.weights = ("other",)
    testbed.report()
    for _ in range(4):
        testbed.now += 0.2
        assert testbed.run().stores == []
    assert testbed.scheduler.stores.dropped == {"weights_stale": CHUNKS}
    assert testbed.pool.referenced() == []
