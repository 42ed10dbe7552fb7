"""The identity of an ATOM engine: which settings and variables are part of it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.atom_tiers import topology

from kvtier.engines.atom import identity
from kvtier.engines.atom.config import planner_for
from kvtier.engines.atom.identity_environment import initial_environment, shaping_variables
from kvtier.engines.atom.identity_settings import shaping_settings

SETTINGS: dict[str, Any] = {
    "model": "some/model",
    "hf_config": SimpleNamespace(to_dict=lambda: {"hidden_size": 64}),
    "torch_dtype": "bfloat16",
    "kv_cache_dtype": "auto",
    "max_model_len": 4_096,
    "kv_transfer_config": {"kv_connector": "kvtier", "topology": "/nowhere"},
    "tensor_parallel_size": 2,
    "kv_cache_block_size": 16,
    "num_kvcache_blocks": 100,
    "max_num_batched_tokens": 10_000,
}


def describe(environment: dict[str, str], **changes: Any) -> dict[str, object]:
    config = SimpleNamespace(**(SETTINGS | changes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(identity, "initial_environment", lambda: environment)
        found, _ = identity.describe(config, planner_for(config, 32), topology(512).structural)
    return found


@pytest.mark.parametrize(
    "name",
    [
        "ATOM_USE_TRITON_MLA_SHUFFLE_KV",
        "ATOM_MLA_PAGE_SIZE",
        "ATOM_FP8_BLOCKSCALE_USE_E8M0_SCALE",
        "ATOM_MORI_FP4_DISPATCH",
        "ATOM_OF_A_LATER_VERSION",
        "AITER_QUICK_REDUCE_QUANTIZATION",
        "FLA_TRIL_PRECISION",
        "V4_FORCE_UE8M0_QUANT",
        "VLLM_PP_LAYER_PARTITION",
    ],
)
def test_a_variable_that_may_shape_kv_changes_the_identity(name: str) -> None:
    without, with_one, with_another = describe({}), describe({name: "1"}), describe({name: "2"})
    assert without != with_one
    assert with_one != with_another


@pytest.mark.parametrize(
    "name",
    [
        "ATOM_DP_RANK",
        "ATOM_KV_OFFLOAD_EXTRA_CONFIG",
        "ATOM_PROCESS_NAME_PREFIX",
        "ATOM_NUMA_NODE",
        "AITER_LOG_LEVEL",
        "KVTIER_TOPOLOGY",
        "AITER_JIT_DIR",
        "ATOM_SERVICE_HOST",
        "ATOM_SERVICE_PORT",
        "ATOM_SERVICE_PORT_HTTP",
        "ATOM_PORT",
        "ATOM_PORT_8000_TCP",
        "ATOM_PORT_8000_TCP_ADDR",
        "ATOM_CHAT_SERVICE_HOST",
        "PATH",
    ],
)
def test_a_variable_that_does_not_shape_kv_leaves_the_identity(name: str) -> None:
    assert describe({name: "1"}) == describe({})


@pytest.mark.parametrize(
    "changes",
    [
        {"torch_dtype": "float16"},
        {"kv_cache_dtype": "fp8"},
        {"index_cache_dtype": "fp8"},
        {"tensor_parallel_size": 4},
        {"enable_expert_parallel": True},
        {"online_quant_config": {"layers": "fp8"}},
        {"hf_overrides": {"rope_theta": 2}},
        {"hf_config": SimpleNamespace(to_dict=lambda: {"hidden_size": 128})},
        {"speculative_config": SimpleNamespace(method="mtp", model="draft")},
        {"load_dummy": "zero"},
        {"fake_eplb": True},
        {"moe_backend": "mega"},
        {"enable_low_latency": True},
        {"a_field_of_a_later_version": {"precision": "fp4"}},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_a_setting_that_shapes_kv_changes_the_identity(changes: dict[str, Any]) -> None:
    assert describe({}, **changes) != describe({})


def test_kinds_of_dummy_weights_differ() -> None:
    assert describe({}, load_dummy="zero") != describe({}, load_dummy="xavier")


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_seqs": 7},
        {"port": 9_999},
        {"disagg_d2p_addr": "ipc:///tmp/1"},
        {"eplb_config": object()},
        {"num_kvcache_blocks": 7},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_a_setting_that_does_not_shape_kv_leaves_the_identity(changes: dict[str, Any]) -> None:
    assert describe({}, **changes) == describe({})


@dataclass
class Nested:
    precision: str = "bf16"


@dataclass
class Fields:
    """As ATOM's ``Config``, with some of its fields."""

    max_num_seqs: int = 512
    fake_eplb: bool = False
    moe_backend: str = "standard"
    index_cache_dtype: str | None = None
    nested: Nested | None = None


def test_of_a_dataclass_only_values_that_are_not_the_defaults_are_part() -> None:
    reasons: list[str] = []
    assert shaping_settings(Fields(max_num_seqs=1), reasons) == {}
    assert shaping_settings(Fields(fake_eplb=True), reasons) == {"fake_eplb": True}
    nested = shaping_settings(Fields(nested=Nested("fp4")), reasons)
    assert nested == {"nested": {"precision": "fp4"}}
    assert reasons == []


def test_what_an_engine_sets_in_the_process_of_a_rank_leaves_the_identity() -> None:
    program = (
        "import os; os.environ['AITER_QUICK_REDUCE_QUANTIZATION'] = 'INT4'\n"
        "from kvtier.engines.atom.identity_environment import *\n"
        "print(shaping_variables(initial_environment()))"
    )
    environment = {
        name: value for name, value in os.environ.items() if not shaping_variables({name: value})
    } | {"ATOM_MLA_PAGE_SIZE": "64", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.stdout.strip() == "{'ATOM_MLA_PAGE_SIZE': '64'}", result.stderr


def test_where_the_system_does_not_tell_the_current_environment_counts(tmp_path: Path) -> None:
    assert initial_environment(tmp_path / "absent") == dict(os.environ)
