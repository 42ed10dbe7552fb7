"""Variables of the engine's container."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support import pod_objects
from tests.support.pod_objects import container, variables

from kvtier_operator.injection.decision import Injected
from kvtier_operator.injection.inject import inject
from kvtier_operator.settings import Settings

PAYLOAD = "/opt/kvtier/payload"
FROM_MAP = {"configMapKeyRef": {"name": "settings", "key": "value"}}
ENV_FROM = [{"configMapRef": {"name": "settings"}}]


def engine_of(
    env: list[dict[str, Any]], engine: dict[str, Any] | None = None, **fields: Any
) -> Injected:
    policy = pod_objects.policy(engine=engine or {})
    found = inject(
        policy,
        pod_objects.pod(pod_objects.engine(env=env, **fields)),
        pod_objects.context(),
        Settings(),
    )
    assert isinstance(found, Injected)
    return found


def env_of(decision: Injected) -> list[dict[str, Any]]:
    return list(container(decision.pod, "vllm")["env"])


@pytest.mark.parametrize(
    ("env", "engine", "expected"),
    [
        ([], None, PAYLOAD),
        ([], {"pythonPath": "/image/lib"}, f"{PAYLOAD}:/image/lib"),
        (
            [{"name": "PYTHONPATH", "value": "/own"}],
            {"pythonPath": "/image/lib"},
            f"{PAYLOAD}:/own",
        ),
        ([{"name": "PYTHONPATH", "value": ""}], None, PAYLOAD),
        ([{"name": "PYTHONPATH"}], None, PAYLOAD),
        (
            [{"name": "A", "value": "/a"}, {"name": "PYTHONPATH", "value": "$(A):/b"}],
            None,
            f"{PAYLOAD}:$(A):/b",
        ),
        (
            [{"name": "PYTHONPATH", "value": "/1"}, {"name": "PYTHONPATH", "value": "/2"}],
            None,
            f"{PAYLOAD}:/2",
        ),
    ],
)
def test_the_payload_is_prepended_to_the_python_path(
    env: list[dict[str, Any]], engine: dict[str, Any] | None, expected: str
) -> None:
    assert variables(container(engine_of(env, engine).pod, "vllm"))["PYTHONPATH"] == expected


def test_a_python_path_with_value_from_is_renamed_and_referenced() -> None:
    env = env_of(
        engine_of([{"name": "X", "value": "1"}, {"name": "PYTHONPATH", "valueFrom": FROM_MAP}])
    )
    assert env[1:3] == [
        {"name": "KVTIER_INHERITED_PYTHONPATH", "valueFrom": FROM_MAP},
        {"name": "PYTHONPATH", "value": f"{PAYLOAD}:$(KVTIER_INHERITED_PYTHONPATH)"},
    ]


def test_a_python_path_from_env_from_is_referenced() -> None:
    found = engine_of([], envFrom=ENV_FROM)
    assert variables(container(found.pod, "vllm"))["PYTHONPATH"] == f"{PAYLOAD}:$(PYTHONPATH)"


@pytest.mark.parametrize(
    ("given", "expected"),
    [("a,b", "a,b,kvtier"), ("a,kvtier", "a,kvtier"), ("", "kvtier"), ("kvtier", "kvtier")],
)
def test_a_list_of_plugins_is_extended(given: str, expected: str) -> None:
    found = variables(container(engine_of([{"name": "VLLM_PLUGINS", "value": given}]).pod, "vllm"))
    assert found["VLLM_PLUGINS"] == expected


def test_no_list_of_plugins_is_added() -> None:
    assert "VLLM_PLUGINS" not in variables(container(engine_of([]).pod, "vllm"))
    maybe = engine_of([], envFrom=ENV_FROM)
    assert "VLLM_PLUGINS" not in variables(container(maybe.pod, "vllm"))
    assert any("VLLM_PLUGINS" in note for note in maybe.notes)


def test_plugins_with_value_from_are_extended() -> None:
    found = variables(
        container(engine_of([{"name": "VLLM_PLUGINS", "valueFrom": FROM_MAP}]).pod, "vllm")
    )
    assert found["KVTIER_INHERITED_VLLM_PLUGINS"] == FROM_MAP
    assert found["VLLM_PLUGINS"] == "$(KVTIER_INHERITED_VLLM_PLUGINS),kvtier"


@pytest.mark.parametrize(
    ("env", "seed", "noted"),
    [
        ([], "7", False),
        ([{"name": "PYTHONHASHSEED", "value": "7"}], "7", False),
        ([{"name": "PYTHONHASHSEED", "value": ""}], "7", False),
        ([{"name": "PYTHONHASHSEED", "value": "3"}], "3", True),
        ([{"name": "PYTHONHASHSEED", "valueFrom": FROM_MAP}], FROM_MAP, True),
    ],
)
def test_an_absent_hash_seed_is_set_and_a_conflict_is_noted(
    env: list[dict[str, Any]], seed: Any, noted: bool
) -> None:
    found = engine_of(env, {"hashSeed": "7"})
    assert variables(container(found.pod, "vllm"))["PYTHONHASHSEED"] == seed
    assert any("PYTHONHASHSEED" in note for note in found.notes) == noted


@pytest.mark.parametrize(
    ("command", "gpus", "ranks"),
    [
        (["vllm", "serve", "m", "--tensor-parallel-size", "2"], 0, "2"),
        (["vllm", "serve", "m", "-tp=4", "-pp", "2"], 8, "8"),
        (["vllm", "serve", "m", "--tensor_parallel_size=2", "-dp", "4"], 8, "8"),
        (["sh", "-c", "exec vllm serve m --tensor-parallel-size ${TP:-2}"], 0, "2"),
        (["vllm", "serve", "m", "-tp", "$(TP)"], 0, None),
        (["vllm", "serve", "m"], 4, "4"),
        (["vllm", "serve", "m"], 0, None),
    ],
)
def test_the_ranks_of_the_pod_are_derived_from_options_or_gpus(
    command: list[str], gpus: int, ranks: str | None
) -> None:
    resources = {"limits": {"nvidia.com/gpu": gpus}} if gpus else None
    found = variables(container(engine_of([], command=command, resources=resources).pod, "vllm"))
    assert found.get("KVTIER_LOCAL_RANKS") == ranks


@pytest.mark.parametrize(
    ("env", "ranks"),
    [
        ([{"name": "TP", "value": "4"}], "4"),
        ([{"name": "TENSOR_PARALLEL_SIZE", "value": "8"}, {"name": "TP", "value": "x"}], "8"),
        (
            [{"name": "VLLM_ARGS", "value": "--tensor-parallel-size 2 --pipeline-parallel-size 2"}],
            "4",
        ),
    ],
)
def test_sizes_are_found_in_variables(env: list[dict[str, Any]], ranks: str) -> None:
    command = ["vllm", "serve", "m", *(["-tp", "$(TP)"] if env[-1]["name"] == "TP" else [])]
    assert (
        variables(container(engine_of(env, command=command).pod, "vllm"))["KVTIER_LOCAL_RANKS"]
        == ranks
    )


@pytest.mark.parametrize(
    "command",
    [
        ["python3", "-I", "-m", "vllm.entrypoints.openai.api_server"],
        ["bash", "-c", "PYTHONPATH=/src python -m vllm.entrypoints.openai.api_server"],
        ["sh", "-c", "export PYTHONPATH=/src; vllm serve m"],
    ],
)
def test_a_command_that_hides_the_plugin_is_noted(command: list[str]) -> None:
    assert any("PYTHONPATH" in note for note in engine_of([], command=command).notes)
    assert not any(
        "PYTHONPATH" in note for note in engine_of([], {"delivery": "Image"}, command=command).notes
    )


def test_a_command_that_extends_the_path_is_not_noted() -> None:
    command = ["sh", "-c", "export PYTHONPATH=/src:$PYTHONPATH; vllm serve m"]
    assert engine_of([], command=command).notes == ()


@pytest.mark.parametrize(
    ("limits", "ranks"),
    [
        ({"nvidia.com/gpu": 2, "nvidia.com/gpumem": 30_000}, "2"),
        ({"gpu.intel.com/xe": 2, "gpu.intel.com/memory.max": "16G"}, "2"),
        ({"nvidia.com/mig-3g.40gb": 1}, "1"),
        ({"aliyun.com/gpu-mem": 8}, None),
    ],
)
def test_only_resources_that_count_devices_are_counted(
    limits: dict[str, Any], ranks: str | None
) -> None:
    found = variables(container(engine_of([], resources={"limits": limits}).pod, "vllm"))
    assert found.get("KVTIER_LOCAL_RANKS") == ranks
