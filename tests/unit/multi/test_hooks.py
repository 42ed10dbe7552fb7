"""Every hook of vLLM's connector base class: passed to the children, and none of them can hurt the
others by raising."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support import recording_connector as recording
from tests.support.multi_world import Clock, engine_config, kv_cache_config, transfer_config
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput

from kvtier.engines.vllm.multi.connector import WeightedMultiConnector
from kvtier.engines.vllm.multi.messages import (
    LoadOrder,
    MultiHandshake,
    MultiKVEvents,
    MultiStepMetadata,
    MultiWorkerReport,
)

OWN = {
    "role": "the role of the parent is that of the children",
    "has_connector_metadata": "the parent has metadata if and only if the children have",
}
"""What the base class answers, with the reason."""
MODULE = "tests.support.recording_connector"
SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER


@pytest.fixture(autouse=True)
def _no_calls() -> Iterator[None]:
    recording.CALLS.clear()
    recording.ANSWERS.clear()
    yield
    recording.CALLS.clear()
    recording.ANSWERS.clear()


def child(name: str, kind: str = "RecordingConnector", **fields: Any) -> dict[str, Any]:
    return {
        "kv_connector": kind,
        "kv_connector_module_path": MODULE,
        "name": name,
        "kv_connector_extra_config": {"name": name},
        **fields,
    }


def multi(directory: Path, role: KVConnectorRole, *children: dict[str, Any]) -> Any:
    transfer = transfer_config(children or (child("one"), child("two")))
    WeightedMultiConnector._clock = staticmethod(Clock())  # type: ignore[method-assign]
    made = WeightedMultiConnector(engine_config(directory, transfer), role, kv_cache_config(50))
    recording.CALLS.clear()
    return made


def calls(hook: str) -> list[tuple[str, tuple[Any, ...]]]:
    return [(name, arguments) for name, called, arguments in recording.CALLS if called == hook]


class _Blocks:
    def get_block_ids(self) -> tuple[list[int], ...]:
        return ([1, 2, 3, 4],)


def request(name: str = "r", tokens: int = 64) -> Any:
    return SimpleNamespace(request_id=name, num_tokens=tokens)


REQUEST = request()
BLOCKS = _Blocks()
STEP = SimpleNamespace(preempted_req_ids={"p"})
ARGUMENTS: dict[str, tuple[KVConnectorRole, tuple[Any, ...]]] = {
    "bind_gpu_block_pool": (SCHEDULER, ("pool",)),
    "bind_kv_cache_manager": (SCHEDULER, ("manager",)),
    "build_connector_meta": (SCHEDULER, (STEP,)),
    "build_connector_worker_meta": (WORKER, ()),
    "clear_connector_metadata": (WORKER, ()),
    "finish_forward": (WORKER, ()),
    "get_block_ids_with_load_errors": (WORKER, ()),
    "get_handshake_metadata": (WORKER, ()),
    "get_kv_connector_kv_cache_events": (WORKER, ()),
    "get_kv_connector_stats": (WORKER, ()),
    "get_mem_pool_context": (WORKER, ()),
    "get_num_new_matched_tokens": (SCHEDULER, (REQUEST, 0)),
    "get_transfer_results": (WORKER, ({"done"},)),
    "has_pending_block_frees": (SCHEDULER, ()),
    "has_pending_push_work": (SCHEDULER, ()),
    "on_new_request": (SCHEDULER, (REQUEST,)),
    "register_cross_layers_kv_cache": (WORKER, ("tensor", "backend")),
    "register_finished_partial_tail": (SCHEDULER, (REQUEST, ([1],), [(0, 1, 2)])),
    "register_kv_caches": (WORKER, ({"layer": "tensor"},)),
    "request_finished_all_groups": (SCHEDULER, (REQUEST, ([1],))),
    "reset_cache": (SCHEDULER, ()),
    "reset_capture_state": (WORKER, ()),
    "restore_kv_caches": (WORKER, ()),
    "save_kv_layer": (WORKER, ("layer", "tensor", "attention")),
    "set_host_xfer_buffer_ops": (WORKER, ("copy",)),
    "shutdown": (WORKER, ()),
    "start_load_kv": (WORKER, ("context",)),
    "take_events": (SCHEDULER, ()),
    "unregister_kv_caches": (WORKER, ()),
    "wait_for_layer_load": (WORKER, ("layer",)),
    "wait_for_save": (WORKER, ()),
}
"""Hooks that every child gets with the same arguments."""
OTHERWISE = {
    "bind_connector_metadata", "handle_preemptions", "request_finished", "get_finished",
    "get_finished_count", "get_loaded_kv_cache_group_ids", "get_external_cache_hit_sources",
    "update_state_after_alloc", "update_connector_output", "set_xfer_handshake_metadata",
    "set_xfer_handshake_metadata_pp_aware",
}  # fmt: skip
"""Hooks with a test of their own below."""


def test_no_hook_of_any_supported_release_is_forgotten() -> None:
    ours = vars(WeightedMultiConnector)
    missing = [hook for hook in recording.hooks() if hook not in ours and hook not in OWN]
    assert missing == []
    assert not set(OWN) & set(ours)
    tested = set(ARGUMENTS) | OTHERWISE | set(recording.CLASS_HOOKS) | set(recording.PROPERTIES)
    assert set(recording.hooks()) - set(OWN) == tested


@pytest.mark.parametrize("hook", sorted(set(vars(KVConnectorBase_V1)) & set(ARGUMENTS)))
def test_every_hook_can_be_called_as_the_base_class_says(hook: str) -> None:
    wanted = inspect.signature(getattr(KVConnectorBase_V1, hook)).parameters
    offered = inspect.signature(getattr(WeightedMultiConnector, hook)).parameters
    assert list(offered) == list(wanted)


def _made_for(directory: Path, hook: str) -> Any:
    """A connector of the side that has the hook, within a step."""
    role, _ = ARGUMENTS[hook]
    made = multi(directory, role)
    if role is WORKER:
        made.bind_connector_metadata(_step())
    return made


def _ask(made: Any, hook: str) -> Any:
    """Calls the hook, or the one that asks the children for its answer."""
    if hook == "get_block_ids_with_load_errors":
        return made.get_transfer_results({"done"})
    return getattr(made, hook)(*ARGUMENTS[hook][1])


@pytest.mark.parametrize("hook", sorted(ARGUMENTS))
def test_every_child_gets_a_hook(hook: str, directory: Path) -> None:
    arguments = ARGUMENTS[hook][1]
    made = _made_for(directory, hook)
    _ask(made, hook)
    assert [(name, args) for name, args in calls(hook) if args == arguments] == [
        ("one", arguments),
        ("two", arguments),
    ]


@pytest.mark.parametrize("hook", sorted(ARGUMENTS))
def test_a_child_that_raises_hurts_neither_the_engine_nor_the_others(
    hook: str, directory: Path
) -> None:
    arguments = ARGUMENTS[hook][1]
    made = _made_for(directory, hook)
    recording.ANSWERS[("one", hook)] = RuntimeError("no")
    answer = _ask(made, hook)
    assert [name for name, args in calls(hook) if args == arguments] == ["one", "two"]
    recording.ANSWERS.clear()
    stats = answer if hook == "get_kv_connector_stats" else made.get_kv_connector_stats()
    assert stats.own["multi_errors"] == {"one": {hook: 1}}


@pytest.mark.parametrize("hook", sorted(ARGUMENTS))
def test_a_child_with_an_answer_of_another_type_hurts_neither_the_engine_nor_the_others(
    hook: str, directory: Path
) -> None:
    arguments = ARGUMENTS[hook][1]
    made = _made_for(directory, hook)
    recording.ANSWERS[("one", hook)] = object()
    _ask(made, hook)
    assert [name for name, args in calls(hook) if args == arguments] == ["one", "two"]


def test_a_required_child_that_does_not_start_ends_the_start(directory: Path) -> None:
    recording.ANSWERS[("one", "__init__")] = RuntimeError("no")
    multi(directory, WORKER)
    with pytest.raises(RuntimeError, match="no"):
        multi(directory, WORKER, child("one", required=True), child("two"))
    recording.ANSWERS.clear()
    made = multi(directory, WORKER, child("one", required=True), child("two"))
    recording.ANSWERS[("one", "register_kv_caches")] = RuntimeError("no memory")
    with pytest.raises(RuntimeError, match="no memory"):
        made.register_kv_caches({})


def test_a_child_that_a_worker_cannot_start_loads_nothing(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker, scheduler = multi(directory, WORKER), multi(directory, SCHEDULER)
    recording.ANSWERS[("one", "register_kv_caches")] = RuntimeError("no memory")
    worker.register_kv_caches({})
    assert calls("shutdown") == [("one", ())]
    worker.bind_connector_metadata(_step(LoadOrder(0, True, frozenset({1}))))
    results = worker.get_transfer_results(set())
    assert results.finished_recving == results.failed_recving == {"r"}
    report = worker.build_connector_worker_meta()
    assert report.dead == {0}
    scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
    assert "connector one is off until the engine restarts" in caplog.text
    assert "loads nothing for 10 s" not in caplog.text
    recording.ANSWERS[("one", "get_num_new_matched_tokens")] = (32, True)
    recording.ANSWERS[("two", "get_num_new_matched_tokens")] = (16, True)
    assert scheduler.get_num_new_matched_tokens(REQUEST, 0) == (16, True)
    worker.bind_connector_metadata(_step())
    assert worker.build_connector_worker_meta() is None


def _step(order: LoadOrder | None = None, **fields: Any) -> MultiStepMetadata:
    messages = (base.KVConnectorMetadata(), base.KVConnectorMetadata())
    return MultiStepMetadata(messages, {"r": order} if order is not None else {}, **fields)


def test_each_child_gets_its_own_message_of_a_step(directory: Path) -> None:
    made = multi(directory, WORKER)
    step = _step()
    made.handle_preemptions(step)
    made.bind_connector_metadata(step)
    assert made.has_connector_metadata()
    for hook in ("handle_preemptions", "bind_connector_metadata"):
        found = calls(hook)
        assert [name for name, _ in found] == ["one", "two"]
        assert [args[0] is step.children[index] for index, (_, args) in enumerate(found)] == [
            True,
            True,
        ]
    made.clear_connector_metadata()
    assert not made.has_connector_metadata()
    made.wait_for_save()
    assert calls("wait_for_save") == []


def test_children_get_preemptions_in_the_form_that_they_expect(directory: Path) -> None:
    made = multi(directory, WORKER, child("one"), child("two", "OldPreemptionConnector"))
    step = _step(preempted=frozenset({"p"}))
    made.handle_preemptions(step)
    assert calls("handle_preemptions") == [("one", (step.children[0],)), ("two", ({"p"},))]
    recording.CALLS.clear()
    made.handle_preemptions(_step())
    assert [name for name, _ in calls("handle_preemptions")] == ["one"]


def test_an_engine_that_tells_preempted_requests_reaches_children_of_both_forms(
    directory: Path,
) -> None:
    made = multi(directory, WORKER, child("one"), child("two", "OldPreemptionConnector"))
    step = _step(preempted=frozenset({"p"}))
    made.handle_preemptions({"p"})
    made.bind_connector_metadata(step)
    assert calls("handle_preemptions") == [("two", ({"p"},)), ("one", (step.children[0],))]
    order = [hook for name, hook, _ in recording.CALLS if name == "one"]
    assert order == ["handle_preemptions", "bind_connector_metadata"]
    recording.CALLS.clear()
    made.bind_connector_metadata(_step())
    assert calls("handle_preemptions") == []


def test_a_child_without_hybrid_support_gets_the_blocks_of_one_group(directory: Path) -> None:
    made = multi(directory, SCHEDULER, child("one", "PlainConnector"), child("two"))
    made.request_finished(REQUEST, [1, 2])
    assert calls("request_finished") == [("one", (REQUEST, [1, 2]))]
    assert calls("request_finished_all_groups") == [("two", (REQUEST, ([1, 2],)))]


def test_what_was_sent_is_reported_once_all_children_and_ranks_have_sent_it(
    directory: Path,
) -> None:
    transfer = transfer_config([child("one"), child("two"), child("three")])
    made = WeightedMultiConnector(
        engine_config(directory, transfer, ranks=2), SCHEDULER, kv_cache_config(50)
    )
    recording.ANSWERS[("one", "register_finished_partial_tail")] = True
    recording.ANSWERS[("two", "request_finished_all_groups")] = (True, {"a": 1, "b": 2})
    recording.ANSWERS[("three", "request_finished_all_groups")] = (False, {"b": 3, "c": 4})
    assert made.register_finished_partial_tail(REQUEST, ([1],), [(0, 1, 2)])
    assert made.request_finished_all_groups(REQUEST, ([1],)) == (True, {"a": 1, "b": 2, "c": 4})
    steps: list[tuple[dict[str, int], ...]] = [
        ({"r": 1}, {}, {"r": 2, "unknown": 2}),
        ({}, {"r": 2}, {}),
        ({"r": 1}, {}, {}),
        ({"r": 2}, {}, {}),
    ]
    found = []
    for sent in steps:
        output = KVConnectorOutput(
            kv_connector_worker_meta=MultiWorkerReport((None, None, None), sent)
        )
        made.update_connector_output(output)
        found.append(output.finished_sending)
    assert found == [None, None, {"r"}, None]
    views = [args[0] for name, args in calls("update_connector_output") if name == "two"]
    assert [view.finished_sending for view in views] == [None, {"r"}, None, None]
    assert made.get_kv_connector_stats().own["multi_unexpected_reports"] == {
        "three": {"transfer_params": 1, "sent": 4},
        "one": {"sent": 2},
    }


def test_an_aborted_request_that_is_loaded_and_sent_is_released_once(directory: Path) -> None:
    for first in ("load", "send"):
        made = multi(directory, SCHEDULER)
        recording.ANSWERS[("one", "get_num_new_matched_tokens")] = (32, True)
        recording.ANSWERS[("two", "request_finished_all_groups")] = (True, None)
        assert made.get_num_new_matched_tokens(REQUEST, 0) == (32, True)
        made.update_state_after_alloc(REQUEST, BLOCKS, 32)
        made.request_finished_all_groups(REQUEST, ([1, 2],))
        load = KVConnectorOutput(finished_recving={"r"})
        send = KVConnectorOutput(
            kv_connector_worker_meta=MultiWorkerReport((None, None), ({}, {"r": 1}))
        )
        outputs = [load, send] if first == "load" else [send, load]
        for output in outputs:
            made.update_connector_output(output)
        released = [each for o in outputs for each in (o.finished_recving, o.finished_sending)]
        assert [each for each in released if each] == [{"r"}]
        assert outputs[0].finished_recving is outputs[0].finished_sending is None
        assert not any(made._scheduler_side.pending.values())


def test_reports_of_loads_that_vllm_does_not_wait_for_are_dropped(directory: Path) -> None:
    made = multi(directory, SCHEDULER)
    output = KVConnectorOutput(finished_recving={"unknown"})
    made.update_connector_output(output)
    assert output.finished_recving is None
    worker = multi(directory, WORKER)
    worker.bind_connector_metadata(_step(LoadOrder(0, True, frozenset({1}))))
    recording.ANSWERS[("two", "get_transfer_results")] = base.KVConnectorTransferResults(
        finished_recving={"r"}
    )
    assert not worker.get_transfer_results(set()).finished_recving
    recording.ANSWERS[("one", "get_transfer_results")] = base.KVConnectorTransferResults(
        finished_recving={"r"}
    )
    assert worker.get_finished(set()) == (None, {"r"})
    assert worker.get_kv_connector_stats().own["multi_unexpected_reports"] == {
        "two": {"received": 2}
    }


def test_each_child_sees_its_own_part_of_a_report(directory: Path) -> None:
    made = multi(directory, SCHEDULER)
    recording.ANSWERS[("two", "get_num_new_matched_tokens")] = (32, True)
    made.get_num_new_matched_tokens(REQUEST, 16)
    made.update_state_after_alloc(REQUEST, BLOCKS, 32)
    assert [args[2] for _, args in calls("update_state_after_alloc")] == [0, 32]
    metadata = made.build_connector_meta(STEP)
    assert metadata.loads == {"r": LoadOrder(1, True, frozenset({2, 3}))}
    assert metadata.preempted == {"p"}
    mine = base.KVConnectorMetadata()
    output = KVConnectorOutput(
        finished_recving={"r"},
        failed_recving={"r"},
        invalid_block_ids={3, 40},
        kv_connector_worker_meta=MultiWorkerReport((None, mine), ({}, {})),  # type: ignore[arg-type]
    )
    made.update_connector_output(output)
    (_, (one,)), (_, (two,)) = calls("update_connector_output")
    assert (one.finished_recving, one.failed_recving, one.invalid_block_ids) == (None, set(), set())
    assert two.finished_recving == two.failed_recving == {"r"}
    assert two.invalid_block_ids == {3}
    assert one.kv_connector_worker_meta is None
    assert two.kv_connector_worker_meta is mine
    assert output.finished_recving == {"r"}
    # It has failed, so it is not asked for this request again.
    recording.CALLS.clear()
    assert made.get_num_new_matched_tokens(REQUEST, 0) == (0, False)
    assert [name for name, _ in calls("get_num_new_matched_tokens")] == ["one"]


def test_the_loading_child_answers_for_its_load(directory: Path) -> None:
    made = multi(directory, SCHEDULER)
    assert made.get_loaded_kv_cache_group_ids(REQUEST) == ()
    recording.ANSWERS[("two", "get_num_new_matched_tokens")] = (32, True)
    recording.ANSWERS[("two", "get_external_cache_hit_sources")] = {"disk": 32}
    made.get_num_new_matched_tokens(REQUEST, 0)
    assert made.get_loaded_kv_cache_group_ids(REQUEST) == (0,)
    assert made.get_external_cache_hit_sources(REQUEST, 32) == {"disk": 32}
    assert {name for name, _ in calls("get_external_cache_hit_sources")} == {"two"}
    recording.ANSWERS[("two", "get_external_cache_hit_sources")] = RuntimeError("no")
    assert sum(made.get_external_cache_hit_sources(REQUEST, 32).values()) == 32
    assert made.get_external_cache_hit_sources(REQUEST, 0) == {}
    assert made.get_finished_count() is None


@pytest.mark.parametrize("hook", recording.PROPERTIES)
def test_properties_combine_those_of_the_children(hook: str, directory: Path) -> None:
    made = multi(directory, SCHEDULER)
    found = [getattr(made, hook)]
    for name in ("one", "two"):
        recording.ANSWERS[(name, hook)] = True
        found.append(getattr(made, hook))
    # Blocks are kept for a delivery if one child delivers; the others need every child.
    expected = [False, True, True] if hook == "requires_kv_delivery" else [False, False, True]
    assert found == expected


def test_what_the_class_is_asked_goes_to_the_classes_of_the_children(directory: Path) -> None:
    transfer = transfer_config([child("one"), child("two", "PlainConnector")])
    config = engine_config(directory, transfer)
    extra = transfer.kv_connector_extra_config
    multi_class = WeightedMultiConnector
    assert not multi_class.requires_piecewise_for_cudagraph(extra)
    assert multi_class.get_required_kvcache_layout(config) is None
    assert multi_class.supports_sleep_mode(transfer)
    recording.ANSWERS[("PlainConnector", "requires_piecewise_for_cudagraph")] = True
    recording.ANSWERS[("PlainConnector", "get_required_kvcache_layout")] = "HND"
    recording.ANSWERS[("PlainConnector", "supports_sleep_mode")] = False
    assert multi_class.requires_piecewise_for_cudagraph(extra)
    assert multi_class.get_required_kvcache_layout(config) == "HND"
    assert not multi_class.supports_sleep_mode(transfer)
    recording.ANSWERS[("RecordingConnector", "get_required_kvcache_layout")] = "NHD"
    with pytest.raises(Exception, match="one requires NHD, two requires HND"):
        multi_class.get_required_kvcache_layout(config)


def test_one_child_may_provide_the_memory_of_the_kv_cache(directory: Path) -> None:
    made = multi(directory, WORKER)
    recording.ANSWERS[("two", "get_mem_pool_context")] = "pool"
    assert made.get_mem_pool_context() == "pool"
    recording.ANSWERS[("one", "get_mem_pool_context")] = "other"
    with pytest.raises(Exception, match="at most one connector"):
        made.get_mem_pool_context()


def test_handshakes_reach_the_child_that_made_them(directory: Path) -> None:
    worker, scheduler = multi(directory, WORKER), multi(directory, SCHEDULER)
    assert worker.get_handshake_metadata() is None
    recording.ANSWERS[("two", "get_handshake_metadata")] = "two's"
    made = worker.get_handshake_metadata()
    assert made == MultiHandshake((None, "two's"))
    scheduler.set_xfer_handshake_metadata({0: made})
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 1): made})
    assert calls("set_xfer_handshake_metadata") == [("two", ({0: "two's"},))]
    assert calls("set_xfer_handshake_metadata_pp_aware") == [("two", ({(0, 1): "two's"},))]


def test_kv_events_of_workers_reach_the_child_that_made_them(directory: Path) -> None:
    class Events:
        def __init__(self, *events: str) -> None:
            self.events, self.workers = list(events), 1

        def add_events(self, events: list[str]) -> None:
            self.events += events

        def get_all_events(self) -> list[str]:
            return self.events

        def increment_workers(self, count: int = 1) -> None:
            self.workers += count

        def get_number_of_workers(self) -> int:
            return self.workers

    worker, scheduler = multi(directory, WORKER), multi(directory, SCHEDULER)
    assert worker.get_kv_connector_kv_cache_events() is None
    found = []
    for rank in range(2):
        recording.ANSWERS[("one", "get_kv_connector_kv_cache_events")] = (
            Events("only on rank 1") if rank else None
        )
        recording.ANSWERS[("two", "get_kv_connector_kv_cache_events")] = Events(f"rank {rank}")
        found.append(worker.get_kv_connector_kv_cache_events())
    combined, other = found
    combined.add_events(other.get_all_events())
    combined.increment_workers(1)
    assert isinstance(combined, MultiKVEvents)
    assert combined.get_number_of_workers() == 2
    scheduler.update_connector_output(KVConnectorOutput(kv_cache_events=combined))
    (_, (one,)), (_, (two,)) = calls("update_connector_output")
    assert (one.kv_cache_events.events, one.kv_cache_events.workers) == (["only on rank 1"], 1)
    assert (two.kv_cache_events.events, two.kv_cache_events.workers) == (["rank 0", "rank 1"], 2)
    recording.ANSWERS[("one", "take_events")] = iter(["a", "b"])
    recording.ANSWERS[("two", "take_events")] = (x for x in [1 / 1, 1 / 2])
    assert list(scheduler.take_events()) == ["a", "b", 1.0, 0.5]
    assert scheduler.take_events() == []


class _Uncombinable(base.KVConnectorWorkerMetadata):
    def aggregate(self, other: object) -> _Uncombinable:
        raise RuntimeError("planted")


class _Combinable(base.KVConnectorWorkerMetadata):
    def __init__(self, ranks: int = 1) -> None:
        self.ranks = ranks

    def aggregate(self, other: Any) -> _Combinable:
        return _Combinable(self.ranks + other.ranks)


def test_a_child_whose_reports_cannot_be_combined_gets_none_and_loads_nothing(
    directory: Path,
) -> None:
    """vLLM combines the reports of the ranks outside of any hook."""
    made = multi(directory, SCHEDULER)
    recording.ANSWERS[("one", "get_num_new_matched_tokens")] = (32, True)
    reports = [MultiWorkerReport((_Uncombinable(), _Combinable()), ({}, {})) for _ in range(3)]
    combined = reports[0].aggregate(reports[1]).aggregate(reports[2])
    assert combined.errors == {0: 1}
    made.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=combined))
    (_, (one,)), (_, (two,)) = calls("update_connector_output")
    assert one.kv_connector_worker_meta is None
    assert two.kv_connector_worker_meta.ranks == 3
    assert not made._children[0].may_load
    assert made._children[1].may_load


def test_events_of_a_child_that_cannot_be_combined_do_not_end_the_engine() -> None:
    class Events:
        def get_all_events(self) -> list[str]:
            raise RuntimeError("planted")

    one, other = MultiKVEvents([Events()]), MultiKVEvents([Events()])  # type: ignore[list-item]
    one.add_events(other.get_all_events())
    assert len(one.get_all_events()) == 1


def test_a_child_whose_reset_fails_loads_nothing_until_a_reset_succeeds(directory: Path) -> None:
    made = multi(directory, SCHEDULER)
    recording.ANSWERS[("one", "get_num_new_matched_tokens")] = (32, True)
    assert made.reset_cache() is True
    for failure in (False, RuntimeError("no")):
        recording.ANSWERS[("one", "reset_cache")] = failure
        assert made.reset_cache() is False
        assert made.get_num_new_matched_tokens(REQUEST, 0) == (0, False)
        recording.ANSWERS[("one", "reset_cache")] = True
        assert made.reset_cache() is True
        assert made.get_num_new_matched_tokens(REQUEST, 0) == (32, True)
