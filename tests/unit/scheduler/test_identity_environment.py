"""Every environment variable of vLLM is part of the identity, or does not shape KV."""

from __future__ import annotations

from collections import Counter
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.vllm_settings import World, make_world
from vllm import envs

from kvtier.engines.vllm.identity_environment import (
    SHAPING,
    SHAPING_MEDIA,
    SHAPING_OF_OTHERS,
    UNUSED,
    environment_settings,
    listed,
    plugin_versions,
)

TEXT_MODEL = SimpleNamespace(is_multimodal_model=False)
VALUES = {
    "VLLM_FLOAT32_MATMUL_PRECISION": "medium",
    "VLLM_MARLIN_INPUT_DTYPE": "int8",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": '{"dtype": "int4"}',
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": '{"dtype": "int8"}',
    "VLLM_DISABLED_KERNELS": "MarlinLinearKernel",
    "VLLM_XPU_INC_WNA16_BACKEND": "ark",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random",
    "VLLM_ROCM_USE_AITER_MOE_SITUV2": "a8w4",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "INT4",
    "VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB": "17",
    "VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB": "17",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB": "17",
    "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
    "VLLM_VIDEO_LOADER_BACKEND": "opencv_dynamic",
    "VLLM_MEDIA_CONNECTOR": "own",
    **dict.fromkeys(SHAPING_OF_OTHERS, "1"),
}
"""Another value than the default; of variables that are not here, 0 or 1."""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    for name in listed():
        if name.startswith("VLLM_") or name in SHAPING_OF_OTHERS:
            monkeypatch.delenv(name, raising=False)
    return make_world(tmp_path)


def _value(name: str) -> str:
    if name in VALUES:
        return VALUES[name]
    return "0" if envs.environment_variables[name]() else "1"


def test_every_variable_of_the_installed_vllm_is_listed() -> None:
    assert sorted(set(envs.environment_variables) - listed()) == []


def test_no_variable_is_listed_twice() -> None:
    counts = Counter([*SHAPING, *SHAPING_MEDIA, *SHAPING_OF_OTHERS])
    counts.update(" ".join(UNUSED.values()).split())
    assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("name", sorted(SHAPING | SHAPING_MEDIA | SHAPING_OF_OTHERS))
def test_a_variable_that_shapes_kv_changes_the_namespace(
    world: World, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before = world.text()
    monkeypatch.setenv(name, _value(name))
    assert world.text() != before
    assert world.reasons == []


@pytest.mark.parametrize(
    "name", sorted(name for names in UNUSED.values() for name in names.split())
)
def test_a_variable_that_does_not_shape_kv_does_not_change_the_namespace(
    world: World, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before = world.text()
    monkeypatch.setenv(name, "17")
    assert world.text() == before
    assert world.reasons == []


def test_the_default_of_a_variable_does_not_change_the_namespace_if_it_is_set(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = world.text()
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    monkeypatch.setenv("VLLM_FLOAT32_MATMUL_PRECISION", "highest")
    assert world.text() == before


def test_variables_for_media_do_not_change_the_namespace_of_a_model_for_text() -> None:
    assert not SHAPING_MEDIA & environment_settings(TEXT_MODEL, []).keys()


def test_a_variable_of_a_newer_vllm_is_part_of_the_identity_once_it_is_set() -> None:
    variables = {"VLLM_ROTATE_KEYS": lambda: False}
    unset = environment_settings(TEXT_MODEL, [], variables=variables, environment={})
    texts = [
        environment_settings(
            TEXT_MODEL, [], variables=variables, environment={"VLLM_ROTATE_KEYS": value}
        )
        for value in ("1", "2")
    ]
    assert unset == {}
    assert [each["VLLM_ROTATE_KEYS"] for each in texts] == ["1", "2"]


def test_a_variable_of_others_is_not_part_of_the_identity() -> None:
    """Kubernetes sets VLLM_SERVICE_HOST in a namespace with a Service named vllm."""
    environment = {"VLLM_SERVICE_HOST": "10.0.0.1", "HOME": "/root"}
    assert environment_settings(TEXT_MODEL, [], variables={}, environment=environment) == {}


def _plugin(name: str, value: str, version: str | None = "1") -> Any:
    package = None if version is None else SimpleNamespace(name=f"{name}-package", version=version)
    return SimpleNamespace(name=name, value=value, dist=package)


def test_the_versions_of_plugins_are_part_of_the_identity(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may bring a model's code, which has the same weights in each version."""
    texts = set()
    for version in ("1", "2"):
        plugins = [_plugin("own", "own_models:register", version)]
        monkeypatch.setattr(metadata, "entry_points", lambda group, found=plugins: found)
        texts.add(world.text())
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    texts.add(world.text())
    assert len(texts) == 3
    assert world.reasons == []


def test_plugins_of_kvtier_and_of_vllm_are_not_part_of_the_identity() -> None:
    found = [_plugin("kvtier", "kvtier.engines.vllm.plugin:register"), _plugin("lora", "vllm.x:y")]
    assert plugin_versions(found, None, []) == {}


def test_objects_stay_in_ram_with_a_plugin_of_unknown_version() -> None:
    reasons: list[str] = []
    assert plugin_versions([_plugin("own", "own:register", None)], None, reasons) == {}
    assert "plugin own" in reasons[0]
    reasons.clear()
    assert plugin_versions([_plugin("own", "own:register", None)], ["kvtier"], reasons) == {}
    assert reasons == []


def test_a_value_that_vllm_rejects_is_part_of_the_identity_as_it_is(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = world.text()
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "no such type")
    assert world.text() != before
    assert world.reasons == []
