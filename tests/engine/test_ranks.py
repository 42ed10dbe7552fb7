"""Engines with several ranks, each a process of its own: every token equals that of the same engine
without KVTier, with prompts reloaded from RAM, and from files after a restart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.hybrid_models import FULL, MODELS, SLIDING

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 1800
"""Only engines that hang take as long."""
RELOADED_CHUNKS = {False: 7 + 3 + 2 + 5, True: 7 + 2 + 2 + 4}
"""Of the four prompts of ``hybrid_run``, without and with several groups: a hybrid model cannot
load a prompt to its last token."""
NO_LAYER = "hybrid, a stage without full attention"

SPECIFICATIONS: dict[str, dict[str, Any]] = {
    "four ranks of tensor parallelism": {
        "model": "llama",
        "options": {"tensor_parallel_size": 4},
        "deferred": True,
    },
    "hybrid, tensor parallelism": {"model": "gemma3", "options": {"tensor_parallel_size": 2}},
    "hybrid, stages of unequal size": {
        "model": "gpt-oss",
        "options": {"pipeline_parallel_size": 2},
        "changes": {"num_hidden_layers": 6, "layer_types": [SLIDING, FULL] * 3},
        "environment": {"VLLM_PP_LAYER_PARTITION": "4,2"},
    },
    NO_LAYER: {
        "model": "gemma3",
        "options": {"pipeline_parallel_size": 2},
        "changes": {
            "num_hidden_layers": 6,
            "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, SLIDING],
        },
        "environment": {"VLLM_PP_LAYER_PARTITION": "4,2"},
    },
    "tensor, pipeline and data parallelism, stages of unequal size": {
        "model": "llama",
        "layers": 3,
        "engines": 2,
        "options": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        "environment": {"VLLM_PP_LAYER_PARTITION": "2,1"},
    },
}
TENSOR_PARALLEL = {"model": "llama", "options": {"tensor_parallel_size": 2}}
UPDATES, FAULTS, LORA = "updates of weights", "a rank that hangs, and dies", "adapters"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the engines of each specification computed. One process, because importing vLLM takes
    longer than all that follows."""
    directory = tmp_path_factory.mktemp("ranks")
    paths = [ROOT / "connector", ROOT, *filter(None, [os.environ.get("PYTHONPATH", "")])]
    log = directory / "engines.log"
    specifications = {
        **SPECIFICATIONS,
        UPDATES: {**TENSOR_PARALLEL, "updates": True},
        FAULTS: {**TENSOR_PARALLEL, "faults": True},
        LORA: {**TENSOR_PARALLEL, "lora": True},
    }
    with log.open("wb") as errors:
        done = subprocess.run(
            [
                sys.executable,
                str(ROOT / "tests" / "support" / "ranks_run.py"),
                json.dumps(list(specifications.values())),
                str(directory / "cases"),
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
            stdout=subprocess.PIPE,
            stderr=errors,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode:
        pytest.fail(f"exit status {done.returncode}:\n{log.read_text()[-6000:]}")
    return dict(zip(specifications, lines, strict=True))


@pytest.mark.parametrize("name", SPECIFICATIONS)
def test_prompts_are_reloaded_from_ram_and_from_files_with_the_same_tokens(
    name: str, results: dict[str, Any]
) -> None:
    specification = SPECIFICATIONS[name]
    options = specification["options"]
    engines = results[name]
    assert isinstance(engines, list), engines
    assert len(engines) == specification.get("engines", 1)
    hybrid = specification["model"] != "llama"
    chunk = MODELS[specification["model"]].chunk_tokens if hybrid else 64
    expected = RELOADED_CHUNKS[hybrid] * chunk
    for result in engines:
        ranks = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
        assert result["ranks"] == ranks
        assert (len(result["groups"]) > 1) == hybrid
        plain = result["plain"]["tokens"]
        assert all(len(set(tokens)) > 3 for tokens in plain), "this output would hide wrong KV"
        for engine in ("first", "ram", "restarted"):
            assert result[engine]["tokens"] == plain, engine
        assert result["ram"]["loaded"] == {"0": expected}
        if "pipeline_parallel_size" not in options:
            # One step submits the copies, and reports the load on every rank.
            assert result["ram"]["steps"] == [1 + each for each in result["plain"]["steps"]]
        if specification.get("deferred"):
            # In the first pass one prompt begins as another one.
            assert result["reported_early"] == [1 + len(plain)] * ranks
        assert sum(result["restarted"]["loaded"].values()) == expected
        assert result["failures"] == result["failures_restarted"] == {}
    # Engines of one data parallel deployment share a namespace.
    assert len({result["namespace"] for result in engines}) == 1


def test_updated_weights_have_their_own_objects_on_every_rank(results: dict[str, Any]) -> None:
    """By reload and by transfer, after a sleep, and after an update that keeps vLLM's cache."""
    assert "error" not in results[UPDATES], results[UPDATES]
    plain, kvtier = results[UPDATES]["plain"], results[UPDATES]["kvtier"]
    assert [each["name"] for each in plain] == [each["name"] for each in kvtier]
    namespaces: dict[str, set[str]] = {"A": set(), "B": set()}
    for expected, found in zip(plain, kvtier, strict=True):
        name = found["name"]
        assert found["tokens"] == expected["tokens"], name
        if "usable" in found:
            assert not found["usable"], "vLLM's own cache is stale"
            continue
        assert found["again"] == expected["tokens"], name
        assert found["loaded"] == 7 * 64, name
        namespaces[name[0]].add(found["namespace"])
    answers = {tuple(each["tokens"]) for each in plain if "usable" not in each}
    assert len(answers) == 2, "the weights differ"
    assert [len(each) for each in namespaces.values()] == [1, 1]
    assert namespaces["A"] != namespaces["B"]


def test_a_stage_without_a_layer_of_a_group_has_0_bytes_of_its_objects(
    results: dict[str, Any],
) -> None:
    (engine,) = results[NO_LAYER]
    assert engine["groups"][-1].startswith("full attention")
    first, second = engine["shard_bytes"]
    assert all(first)
    assert [size > 0 for size in second] == [True] * (len(second) - 1) + [False]


def test_adapters_have_their_own_objects_on_every_rank(results: dict[str, Any]) -> None:
    found = results[LORA]
    assert "error" not in found, found
    plain, kvtier = found["plain"]["answers"], found["kvtier"]["answers"]
    assert len({tuple(each["tokens"]) for each in plain}) == 3, "the base model and two adapters"
    for expected, answer in zip(plain, kvtier, strict=True):
        assert answer["tokens"] == answer["again"] == expected["tokens"] == expected["again"]
        assert (answer["tokens_loaded"], answer["again_loaded"]) == (0, 7 * 64)
    assert found["kvtier"]["failures"] == {}
    assert found["kvtier"]["persistent"]
    # An engine without adapters reuses what the base model has stored.
    namespaces = {each["namespace"] for each in results[UPDATES]["kvtier"] if "namespace" in each}
    assert found["kvtier"]["namespace"] in namespaces


def test_a_request_ends_although_a_rank_hangs_and_no_load_waits_for_a_dead_one(
    results: dict[str, Any],
) -> None:
    found = results[FAULTS]
    assert "error" not in found, found
    assert found["hangs"] == found["tokens"]
    assert (found["referenced"], found["loads_left"]) == (0, 0)
    # vLLM ends an engine of which a rank has died.
    assert found["death_offered"] == 7 * 64
    assert not found["death"].startswith("TimeoutError"), found["death"]
    assert found["restarted"]["tokens"][0] == found["tokens"]
    # The next engine has the objects, and another prompt begins with four of them.
    assert sum(found["restarted"]["loaded"].values()) == (7 + 4) * 64
