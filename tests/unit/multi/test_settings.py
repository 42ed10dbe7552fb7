"""The configuration of several connectors: what is accepted, and what a person is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.multi_world import engine_config, kv_cache_config, transfer_config
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from kvtier.engines.vllm import plugin
from kvtier.engines.vllm.multi.connector import WeightedMultiConnector
from kvtier.engines.vllm.multi.settings import (
    check_engine,
    check_hybrid,
    resolve,
    resolve_extra,
)
from kvtier.errors import ConfigurationError

EXAMPLE = {"kv_connector": "ExampleConnector"}
OFFLOADING = {"kv_connector": "OffloadingConnector"}
KVTIER = {"kv_connector": "KVTierConnector"}
FIELD = "kv_connector_extra_config"


def test_a_child_inherits_from_the_engine_and_has_defaults() -> None:
    parent = transfer_config([EXAMPLE, {**KVTIER, "weight": 60, "kv_role": "kv_consumer"}])
    first, second = resolve(parent).children
    assert (first.name, first.weight, first.required) == ("ExampleConnector", 100, False)
    assert first.transfer.kv_role == "kv_both"
    assert first.transfer.engine_id == second.transfer.engine_id == parent.engine_id
    assert first.transfer.kv_load_failure_policy == "recompute"
    assert (second.weight, second.transfer.kv_role) == (60, "kv_consumer")
    assert second.connector_class.__name__ == "KVTierConnector"


def test_children_of_one_kind_have_names_and_engine_ids_of_their_own() -> None:
    parent = transfer_config(
        [OFFLOADING, OFFLOADING, {**OFFLOADING, "name": "third", "engine_id": "mine"}]
    )
    children = resolve(parent).children
    names = ["OffloadingConnector", "OffloadingConnector-2", "third"]
    assert [child.name for child in children] == names
    ids = [child.transfer.engine_id for child in children]
    assert ids == [parent.engine_id, f"{parent.engine_id}-OffloadingConnector-2", "mine"]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, f"{FIELD}.connectors: Invalid value: {{}}: field required"),
        ({"connectors": []}, f"{FIELD}.connectors: Invalid value: []: "),
        ({"connectors": "x"}, f"{FIELD}.connectors: Invalid value: 'x': input must be"),
        ({"connectors": [3]}, f"{FIELD}.connectors[0]: Invalid value: 3: input must be"),
        (
            {"connectors": [EXAMPLE], "weights": {}},
            f"{FIELD}.weights: Invalid value: {{}}: must be one of: connectors, max_wait_seconds",
        ),
        (
            {"connectors": [EXAMPLE], "max_wait_seconds": -1},
            f"{FIELD}.max_wait_seconds: Invalid value: -1: input must be greater than or equal",
        ),
        (
            {"connectors": [EXAMPLE, {**EXAMPLE, "weight": -1}]},
            f"{FIELD}.connectors[1].weight: Invalid value: -1: input must be greater",
        ),
        (
            {"connectors": [{**EXAMPLE, "weight": "50"}]},
            "connectors[0].weight: Invalid value: '50'",
        ),
        ({"connectors": [{**EXAMPLE, "name": "a b"}]}, "connectors[0].name: Invalid value: 'a b'"),
        (
            {"connectors": [{**EXAMPLE, "stores": True}]},
            "connectors[0].stores: Invalid value: True",
        ),
        ({"connectors": [{"weight": 1}]}, "connectors[0].kv_connector: Invalid value: None: must"),
        (
            {"connectors": [{"kv_connector": "NoConnector"}]},
            "connectors[0].kv_connector: Invalid value: 'NoConnector': must be a KV connector that",
        ),
        (
            {"connectors": [{**EXAMPLE, "kv_connector_module_path": "no.module"}]},
            "must be a KV connector that can be imported from no.module: ModuleNotFoundError",
        ),
        ({"connectors": [{**EXAMPLE, "kv_role": "both"}]}, "connectors[0].kv_role"),
        (
            {"connectors": [{"kv_connector": "MultiConnector"}]},
            "Invalid value: 'MultiConnector': must not have children: list those here",
        ),
        ({"connectors": [{"kv_connector": "WeightedMultiConnector"}]}, "must not have children"),
        ({"connectors": [{"kv_connector": "HiSparseConnector"}]}, "must be used alone"),
        (
            {"connectors": [{**EXAMPLE, "kv_load_failure_policy": "fail"}]},
            "connectors[0].kv_load_failure_policy: Invalid value: 'fail': must be 'recompute'",
        ),
        (
            {"connectors": [{**EXAMPLE, "name": "x"}, {**OFFLOADING, "name": "x"}]},
            "connectors[1].name: Invalid value: 'x': must differ",
        ),
        ({"connectors": [KVTIER, KVTIER]}, "connectors[1].kv_connector: Invalid value: 'KVTier"),
    ],
)
def test_an_error_names_the_field_and_what_is_allowed(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        resolve_extra(extra)
    assert message in str(error.value)


def test_an_engine_that_fails_requests_is_rejected() -> None:
    transfer = KVTransferConfig(kv_connector="WeightedMultiConnector", kv_role="kv_both")
    with pytest.raises(ConfigurationError, match="kv_load_failure_policy: Invalid value: 'fail'"):
        check_engine(transfer)
    check_engine(transfer_config([EXAMPLE]))


def _spec(kind: Any, **more: Any) -> Any:
    return kind(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32, **more)


@pytest.mark.parametrize(
    ("groups", "disabled", "accepted"),
    [
        ([_spec(FullAttentionSpec)], False, True),
        ([_spec(SlidingWindowSpec, sliding_window=32)], False, False),
        ([_spec(FullAttentionSpec), _spec(SlidingWindowSpec, sliding_window=32)], False, False),
        ([_spec(SlidingWindowSpec, sliding_window=32)], True, True),
    ],
)
def test_a_child_without_hybrid_support_is_rejected_for_models_that_need_it(
    groups: list[Any], disabled: bool, accepted: bool, directory: Path
) -> None:
    config = engine_config(directory, transfer_config([OFFLOADING, EXAMPLE]))
    config.scheduler_config.disable_hybrid_kv_cache_manager = disabled
    cache = kv_cache_config(50, groups)
    if accepted:
        check_hybrid(resolve(config.kv_transfer_config), config, cache)
    else:
        with pytest.raises(ConfigurationError) as error:
            check_hybrid(resolve(config.kv_transfer_config), config, cache)
        assert f"{FIELD}.connectors[1].kv_connector" in str(error.value)
        assert "SlidingWindowSpec" in str(error.value)
    supporting = resolve(transfer_config([OFFLOADING, KVTIER]))
    check_hybrid(supporting, config, cache)


def test_several_groups_are_rejected_where_vllm_cannot_recompute_a_load(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    monkeypatch.delattr(base, "KVConnectorTransferResults")
    config = engine_config(directory, transfer_config([OFFLOADING]))
    groups = [_spec(FullAttentionSpec), _spec(SlidingWindowSpec, sliding_window=32)]
    with pytest.raises(ConfigurationError, match=r"use vLLM 0\.32 or later"):
        check_hybrid(resolve(config.kv_transfer_config), config, kv_cache_config(50, groups))


def test_the_plugin_registers_both_connectors_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.TOPOLOGY_VARIABLE, raising=False)
    for _ in range(2):
        plugin.register()
    found = KVConnectorFactory.get_connector_class_by_name("WeightedMultiConnector")
    assert found is WeightedMultiConnector
    by_name = KVConnectorFactory.get_connector_class_by_name("KVTierConnector")
    assert by_name.__module__ == plugin.CONNECTOR_MODULE


def test_kvtier_among_other_connectors_starts_tierd_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from types import SimpleNamespace

    from kvtier.engines.vllm import early_start

    noted: list[str] = []
    monkeypatch.setattr(early_start, "note_attached", lambda where, _: noted.append(where))
    for extra in ({}, {"topology": "/t"}, {"topology": "/other"}):
        child = {**KVTIER, FIELD: extra}
        arguments = SimpleNamespace(kv_transfer_config=transfer_config([EXAMPLE, child]))
        plugin._note_attached(arguments, "/t")
    assert noted == ["/t", "/t"]
    plugin._note_attached(SimpleNamespace(kv_transfer_config=transfer_config([EXAMPLE])), "/t")
    assert noted == ["/t", "/t"]
