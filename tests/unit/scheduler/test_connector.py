"""The connector as vLLM sees it: no hook raises, and every expected report is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.scheduler.connector_configs import (
    Blocks,
    cache_config,
    connector_config,
    empty_step,
    full_spec,
    write_topology,
)
from tests.unit.scheduler.scheduler_testbed import BLOCK, CHUNK, SchedulerTestbed
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, supports_hma
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvtier.engines.common.rearming import REARM_SECONDS
from kvtier.engines.vllm import connector as connector_module
from kvtier.engines.vllm.config import engine_name, group_of, planner_for
from kvtier.engines.vllm.connector import KVTierConnector
from kvtier.engines.vllm.counters import WITHOUT_TIERS
from kvtier.engines.vllm.metadata import StepMetadata
from kvtier.planner import GroupKind, UnsupportedGeometryError


def _sliding(block: int = BLOCK) -> SlidingWindowSpec:
    import torch

    return SlidingWindowSpec(
        block_size=block, num_kv_heads=1, head_size=32, dtype=torch.float32, sliding_window=128
    )


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_topology(tmp_path)
    return tmp_path


@pytest.fixture
def connector(directory: Path) -> Iterator[KVTierConnector]:
    """A scheduler-role connector over a testbed's scheduler side."""
    made = KVTierConnector(
        connector_config(directory), KVConnectorRole.SCHEDULER, cache_config(full_spec())
    )
    assert made._guard.off_reason == ""
    scheduler = made._scheduler
    assert scheduler is not None
    yield made
    made.shutdown()
    scheduler.shutdown()  # tests replace it


def _attached(connector: KVTierConnector) -> SchedulerTestbed:
    testbed = SchedulerTestbed()
    connector._scheduler = testbed.scheduler
    return testbed


def _break(testbed: SchedulerTestbed, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def broken(*arguments: object, **named: object) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(testbed.scheduler, name, broken)


def test_the_connector_supports_hybrid_memory_and_requires_no_delivery(
    connector: KVTierConnector,
) -> None:
    assert supports_hma(connector)
    assert connector.requires_kv_delivery is False
    assert connector.get_finished_count() is None


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_unsupported_models_turn_kvtier_off_with_their_geometry(
    directory: Path, role: KVConnectorRole, caplog: pytest.LogCaptureFixture
) -> None:
    import torch

    other = CrossAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    made = KVTierConnector(connector_config(directory), role, cache_config(_sliding(), other))
    assert _newly_off(made) == 1
    assert _newly_off(made) == 0, "reported once"
    made = KVTierConnector(connector_config(directory), role, cache_config(_sliding(), other))
    assert "group 1: other (CrossAttentionSpec) with blocks of 32 tokens" in caplog.text
    assert "window 128" in caplog.text
    assert made.get_num_new_matched_tokens(SimpleNamespace(), 0) == (0, False)
    assert made.get_kv_connector_stats().data["off"] == {"UnsupportedGeometryError": 1}  # type: ignore[union-attr]


@pytest.mark.parametrize("change", ["directory", "policy", "topology"])
def test_invalid_configuration_turns_kvtier_off(
    tmp_path: Path, directory: Path, change: str
) -> None:
    config = connector_config(directory, policy="fail" if change == "policy" else "recompute")
    if change == "directory":
        config.kv_transfer_config.kv_connector_extra_config = {"topology": str(tmp_path / "absent")}
    if change == "topology":
        (directory / "structural.json").write_text("{")
    made = KVTierConnector(config, KVConnectorRole.SCHEDULER, cache_config(full_spec()))
    assert made._guard.off_reason


def test_unexpected_errors_in_the_constructor_turn_kvtier_off(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(connector_module, "planner_for", broken)
    made = KVTierConnector(
        connector_config(directory), KVConnectorRole.SCHEDULER, cache_config(full_spec())
    )
    assert "ZeroDivisionError" in made._guard.off_reason
    made.shutdown()


def test_a_connector_that_is_off_still_serves_every_hook(tmp_path: Path) -> None:
    made = KVTierConnector(
        connector_config(tmp_path / "absent"), KVConnectorRole.SCHEDULER, cache_config(full_spec())
    )
    made.bind_gpu_block_pool(SimpleNamespace())  # type: ignore[arg-type]
    made.update_state_after_alloc(SimpleNamespace(), Blocks([]), 0)  # type: ignore[arg-type]
    step = made.build_connector_meta(SimpleNamespace())  # type: ignore[arg-type]
    assert isinstance(step, StepMetadata)
    assert step.step == 1
    made.update_connector_output(SimpleNamespace(kv_connector_worker_meta=None))  # type: ignore[arg-type]
    assert made.request_finished_all_groups(SimpleNamespace(), ([],)) == (False, None)  # type: ignore[arg-type]
    assert made.has_pending_push_work() is False
    assert made.reset_cache() is True
    worker = KVTierConnector(
        connector_config(tmp_path / "absent"), KVConnectorRole.WORKER, cache_config(full_spec())
    )
    worker.register_kv_caches({})
    worker.bind_connector_metadata(step)
    worker.start_load_kv(None)
    worker.wait_for_save()
    assert worker.get_finished(set()) == (None, None)
    if hasattr(base, "KVConnectorTransferResults"):  # 0.32
        assert worker.get_transfer_results(set()).finished_recving == set()
    assert worker.get_block_ids_with_load_errors() == set()
    assert worker.build_connector_worker_meta() is None
    worker.shutdown()


def test_an_error_in_a_lookup_turns_kvtier_off(
    connector: KVTierConnector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    testbed = _attached(connector)
    request = testbed.request(300)
    testbed.hold(request.keys(0, 4))
    assert connector.get_num_new_matched_tokens(request, 0) == (4 * CHUNK, True)  # type: ignore[arg-type]
    _break(testbed, monkeypatch, "get_num_new_matched_tokens")
    for _ in range(3):
        assert connector.get_num_new_matched_tokens(request, 0) == (0, False)  # type: ignore[arg-type]
    monkeypatch.undo()
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)  # type: ignore[arg-type]
    assert caplog.text.count("unexpected error") == 1
    assert connector.get_kv_connector_stats().data["errors"] == {"get_num_new_matched_tokens": 1}  # type: ignore[union-attr]


def test_after_an_unexpected_exception_kvtier_rearms_with_back_off_a_few_times_and_counts_it(
    connector: KVTierConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One exception turns KVTier off, not until restart: it is used again 10, 60 and 360 seconds
    later. After the fourth one it stays off."""
    assert REARM_SECONDS == (10.0, 60.0, 360.0)
    now = 100.0
    monkeypatch.setattr(connector, "_clock", lambda: now)
    testbed = _attached(connector)
    old = testbed.request(300, "old")
    testbed.hold(old.keys(0, 4))

    def step_and_ask(request_id: str) -> int | None:
        if not connector._guard.off_reason or now >= connector._guard.rearm_at:
            testbed.built = connector.build_connector_meta(empty_step())  # type: ignore[arg-type, assignment]
        request = testbed.requests.get(request_id) or testbed.request(300, request_id)
        return connector.get_num_new_matched_tokens(request, 0)[0]  # type: ignore[arg-type]

    assert step_and_ask("old") == 4 * CHUNK
    assert _newly_off(connector) == 0
    rearms = 0
    for number, seconds in enumerate((*REARM_SECONDS, None)):
        with monkeypatch.context() as patch:
            _break(testbed, patch, "get_num_new_matched_tokens")
            assert step_and_ask("broken") == 0
        assert _newly_off(connector) == 1
        if seconds is None:
            now += 1e9
            assert step_and_ask("later") == 0, "it stays off"
            break
        now += seconds - 1
        assert step_and_ask("early") == 0
        now += 1
        assert step_and_ask(f"new{number}") == 4 * CHUNK
        assert step_and_ask("old") == 0, "what is known about it may be wrong"
        stats = connector.get_kv_connector_stats()
        assert stats is not None
        assert stats.data[WITHOUT_TIERS[0]] == {"": -1}
        rearms += stats.data["rearms"][""]
    assert rearms == len(REARM_SECONDS)
    assert _newly_off(connector) == 0


def _newly_off(connector: KVTierConnector) -> int:
    """The change of the number of processes without tiers that it reports."""
    stats = connector.get_kv_connector_stats()
    changes = stats.data.get(WITHOUT_TIERS[0], {}) if stats is not None else {}
    return sum(changes.values())


def test_a_load_that_fails_to_start_is_still_reported(
    connector: KVTierConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    testbed = _attached(connector)
    request = testbed.request(300)
    testbed.hold(request.keys(0, 4))
    connector.get_num_new_matched_tokens(request, 0)  # type: ignore[arg-type]
    _break(testbed, monkeypatch, "update_state_after_alloc")
    table = testbed.allocate(request, 256)
    connector.update_state_after_alloc(request, Blocks(table), 256)  # type: ignore[arg-type]
    step = connector.build_connector_meta(SimpleNamespace())  # type: ignore[arg-type]
    assert isinstance(step, StepMetadata)
    assert [(job.request_id, list(job.runs[0].blocks)) for job in step.loads] == [("r", table)]


def test_blocks_are_released_after_an_error(
    connector: KVTierConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    testbed = _attached(connector)
    testbed.client.credit(8)
    request = testbed.request(300)
    testbed.ask(request)
    testbed.run({"r": 300})
    request.append(1)
    stores = testbed.build({"r": 1}).stores
    testbed.request(300, "other", seed=3)
    _break(testbed, monkeypatch, "build_connector_meta")
    connector.build_connector_meta(SimpleNamespace())  # type: ignore[arg-type]
    assert testbed.pool.referenced()
    testbed.report(done={store.reservation: 1 for store in stores})
    connector.request_finished_all_groups(request, (testbed.tables["r"],))  # type: ignore[arg-type]
    assert testbed.pool.referenced() == []
    assert testbed.scheduler._states == {}


def test_errors_in_any_hook_do_not_end_the_engine(
    connector: KVTierConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    testbed = _attached(connector)
    for name in (
        "update_connector_output",
        "request_finished",
        "reset_cache",
        "shutdown",
        "collect_stats",
    ):
        _break(testbed, monkeypatch, name)
    connector.update_connector_output(SimpleNamespace(kv_connector_worker_meta=None))  # type: ignore[arg-type]
    assert connector.request_finished_all_groups(SimpleNamespace(), ([],)) == (False, None)  # type: ignore[arg-type]
    assert connector.reset_cache() is True
    assert connector.get_kv_connector_stats() is not None
    connector.shutdown()


def test_the_hooks_of_a_sleep_reach_the_workers_copies_and_never_raise(
    connector: KVTierConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert KVTierConnector.supports_sleep_mode(None)
    # The scheduler side has no memory of the KV cache.
    connector.unregister_kv_caches()
    connector.restore_kv_caches()
    calls: list[str] = []
    worker = SimpleNamespace(
        suspend_copies=lambda: calls.append("suspended"),
        resume_copies=lambda: calls.append("resumed"),
    )
    monkeypatch.setattr(connector, "_worker", worker)
    connector.unregister_kv_caches()
    connector.restore_kv_caches()
    assert calls == ["suspended", "resumed"]

    def broken() -> None:
        raise RuntimeError("no")

    worker.resume_copies = broken
    connector.restore_kv_caches()
    monkeypatch.setattr(connector, "_worker", None)
    assert connector.get_kv_connector_stats().data["errors"] == {"restore_kv_caches": 1}  # type: ignore[union-attr]


def test_hits_are_attributed_to_host_and_disk(connector: KVTierConnector) -> None:
    CacheHitSource = pytest.importorskip(
        "vllm.v1.metrics.cache_hit_source",
        reason="this vLLM does not tell where hits come from (0.32 does)",
    ).CacheHitSource
    testbed = _attached(connector)
    request = testbed.request(300)
    testbed.hold(request.keys(0, 4))
    testbed.admit(request, 0, testbed.ask(request) or 0)
    sources = connector.get_external_cache_hit_sources(request, 256)  # type: ignore[arg-type]
    assert sources == {CacheHitSource.HOST: 256}
    assert connector.get_external_cache_hit_sources(request, 100) == {
        CacheHitSource.EXTERNAL_UNSPECIFIED: 100
    }  # type: ignore[arg-type]
    assert connector.get_external_cache_hit_sources(request, 0) == {}  # type: ignore[arg-type]


def test_engine_names_distinguish_data_parallel_ranks(
    directory: Path,
) -> None:
    assert engine_name(connector_config(directory)) == "e/dp2"
    assert engine_name(connector_config(directory, data_parallel_index=0)) == "e/dp0"


def test_uniform_types_are_unwrapped_and_mixed_types_rejected() -> None:
    uniform = UniformTypeKVCacheSpecs(
        block_size=BLOCK, kv_cache_specs={"a": full_spec(), "b": full_spec()}
    )
    assert group_of(KVCacheGroupSpec(["a", "b"], uniform)).kind is GroupKind.FULL
    mixed = UniformTypeKVCacheSpecs(
        block_size=BLOCK, kv_cache_specs={"a": full_spec(), "b": _sliding()}
    )
    assert group_of(KVCacheGroupSpec(["a", "b"], mixed)).kind is GroupKind.OTHER


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({}, GroupKind.STATE, "MambaSpec"),
        ({"mamba_cache_mode": "all"}, GroupKind.OTHER, "set mamba_cache_mode to 'align'"),
        ({"num_speculative_blocks": 2}, GroupKind.OTHER, "speculative decoding: disable that"),
    ],
)
def test_linear_states_are_served_in_the_mode_in_which_vllm_names_their_blocks(
    changes: dict[str, Any], kind: GroupKind, text: str
) -> None:
    import torch

    values: dict[str, Any] = {
        "block_size": BLOCK,
        "shapes": ((3, 8), (4, 4)),
        "dtypes": (torch.float32, torch.float32),
        "mamba_cache_mode": "align",
        **changes,
    }
    group = group_of(KVCacheGroupSpec(["a"], MambaSpec(**values)))
    assert group.kind is kind
    assert text in group.name


def test_chunked_local_attention_is_served_with_its_attention_chunk() -> None:
    import torch

    spec = ChunkedLocalAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32,
        attention_chunk_size=256,
    )  # fmt: skip
    group = group_of(KVCacheGroupSpec(["a"], spec))
    assert (group.kind, group.window_tokens) == (GroupKind.CHUNKED, 256)


def test_subclasses_of_supported_specs_are_not_supported() -> None:
    class Special(FullAttentionSpec):
        pass

    import torch

    special = Special(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    assert group_of(KVCacheGroupSpec(["a"], special)).kind is GroupKind.OTHER


def test_context_parallelism_is_rejected(directory: Path) -> None:
    config = connector_config(directory, decode_context_parallel_size=2)
    with pytest.raises(
        UnsupportedGeometryError, match="decode_context_parallel_size: Invalid value: 2"
    ):
        planner_for(config, cache_config(full_spec()), CHUNK)


def _turned_off(config: Any, role: KVConnectorRole, caches: KVCacheConfig) -> str:
    made = KVTierConnector(config, role, caches)
    stats = made.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["off"] == {"UnsupportedGeometryError": 1}
    assert made.get_num_new_matched_tokens(SimpleNamespace(), 0) == (0, False)
    return made._guard.off_reason


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_without_prefix_caching_in_vllm_kvtier_is_off(
    directory: Path, role: KVConnectorRole, caplog: pytest.LogCaptureFixture
) -> None:
    config = connector_config(directory)
    config.cache_config.enable_prefix_caching = False
    assert "enable_prefix_caching: Invalid value: false" in _turned_off(
        config, role, cache_config(full_spec())
    )
    assert "enable_prefix_caching" in caplog.text


@pytest.mark.parametrize("role", list(KVConnectorRole))
@pytest.mark.parametrize("uniform", [False, True], ids=["plain", "uniform"])
def test_non_causal_attention_turns_kvtier_off(
    directory: Path, role: KVConnectorRole, uniform: bool
) -> None:
    """Also in a worker, whose configuration still says that prefix caching is on."""
    spec: Any = dataclasses.replace(full_spec(), non_causal=True)
    if uniform:
        spec = UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs={"a": spec})
    assert "non-causal" in _turned_off(connector_config(directory), role, cache_config(spec))


@pytest.mark.parametrize("position", [0, 1, 2])
def test_one_layer_that_is_not_causal_turns_kvtier_off(directory: Path, position: int) -> None:
    """vLLM asks whether any layer is, whichever comes first in a group."""
    layers = {name: full_spec() for name in "abc"}
    layers["abc"[position]] = dataclasses.replace(full_spec(), non_causal=True)
    spec: Any = UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=layers)
    reason = _turned_off(connector_config(directory), KVConnectorRole.WORKER, cache_config(spec))
    assert "non-causal" in reason


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_an_engine_over_several_nodes_is_refused_with_the_numbers(
    directory: Path, role: KVConnectorRole, caplog: pytest.LogCaptureFixture
) -> None:
    config = connector_config(
        directory,
        world_size=16,
        nnodes=4,
        nnodes_within_dp=2,
        tensor_parallel_size=8,
        pipeline_parallel_size=2,
    )
    reason = _turned_off(config, role, cache_config(full_spec()))
    assert reason.startswith("nnodes: Invalid value: 2: an engine's 16 ranks")
    assert "2 nodes with 8 ranks each" in caplog.text


def test_data_parallel_engines_may_run_on_several_nodes(directory: Path) -> None:
    config = connector_config(directory, nnodes=2, nnodes_within_dp=1)
    assert planner_for(config, cache_config(full_spec()), CHUNK).ranks == 1


def _latent(heads: int = 1) -> MLAAttentionSpec:
    import torch

    return MLAAttentionSpec(
        block_size=BLOCK, num_kv_heads=heads, head_size=576, dtype=torch.bfloat16
    )


@pytest.mark.parametrize("uniform", [False, True], ids=["plain", "uniform"])
def test_with_mla_the_first_rank_of_each_stage_writes(directory: Path, uniform: bool) -> None:
    config = connector_config(
        directory, world_size=4, tensor_parallel_size=2, pipeline_parallel_size=2
    )
    config.model_config.use_mla = True
    spec: Any = _latent()
    if uniform:
        spec = UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs={"a": spec, "b": spec})
    assert planner_for(config, cache_config(spec), CHUNK).shard_writers == ((0, 0, 2, 2),)


@pytest.mark.parametrize("spec", [full_spec(), _latent(heads=2)], ids=["full", "two heads"])
def test_every_rank_writes_heads_that_are_split(directory: Path, spec: Any) -> None:
    config = connector_config(directory, world_size=2, tensor_parallel_size=2)
    config.model_config.use_mla = True
    assert planner_for(config, cache_config(spec), CHUNK).shard_writers == ((0, 1),)


def test_every_rank_writes_unless_the_model_uses_mla(directory: Path) -> None:
    """An index of a model that splits its heads may have the same type."""
    config = connector_config(directory, world_size=2, tensor_parallel_size=2)
    assert planner_for(config, cache_config(_latent()), CHUNK).shard_writers == ((0, 1),)
