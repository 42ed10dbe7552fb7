"""Requests with LoRA adapters share objects only with requests whose KV is the same.

One request at a time: the CPU engine itself mixes up adapters within one batch.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.harness.engine_requests import ReferenceEngine
from kvtier.harness.engine_testbed import CHUNK_TOKENS, EngineTestbed, running_reference
from kvtier.harness.tiny_model import prompt, write_lora

SUPPORT = Path(__file__).parent.parent / "support" / "engine_control.py"
OPTIONS: dict[str, object] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}


@pytest.fixture(scope="module")
def adapters(scratch: Path) -> dict[str, object]:
    return {
        name: str(write_lora(scratch / name, seed=seed))
        for seed, name in enumerate(("first", "second"))
    }


@pytest.fixture(scope="module")
def plain_lora(model: Path, payload: Path, scratch: Path) -> Iterator[ReferenceEngine]:
    with running_reference(model, payload, scratch / "plain-lora.log", **OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def case(model: Path, payload: Path, scratch: Path) -> Iterator[EngineTestbed]:
    case = EngineTestbed(scratch / "lora", model, payload)
    try:
        case.start(kvtier_hooks=[f"{SUPPORT}:install"], **OPTIONS)
        case.wait_attached()
        yield case
    finally:
        case.close()


def test_adapters_share_neither_with_the_base_model_nor_with_each_other(
    case: EngineTestbed, plain_lora: ReferenceEngine, adapters: dict[str, object]
) -> None:
    tokens = prompt(5 * CHUNK_TOKENS + 5, 500)
    requests = case.requests()
    kinds: list[dict[str, object]] = [{}]
    kinds += [
        {"lora": {"name": name, "number": number, "path": path}}
        for number, (name, path) in enumerate(adapters.items(), 1)
    ]
    expected = [plain_lora.tokens(tokens, **kind) for kind in kinds]
    assert len({tuple(answer) for answer in expected}) == 3
    with case.loads() as loads:
        for kind, answer in zip(kinds, expected, strict=True):
            case.empty_gpu_cache()
            assert requests.run(tokens, **kind) == answer
            case.settle_stores()
    assert loads.tokens == 0
    for kind, answer in zip(kinds, expected, strict=True):
        case.empty_gpu_cache()
        with case.loads("ram") as loads:
            assert requests.run(tokens, **kind) == answer
        assert loads.tokens == 5 * CHUNK_TOKENS


def test_an_adapter_replaced_in_place_neither_loads_nor_stores(
    case: EngineTestbed, plain_lora: ReferenceEngine, adapters: dict[str, object]
) -> None:
    tokens = prompt(5 * CHUNK_TOKENS + 5, 501)
    requests = case.requests()
    before = {"lora": {"name": "moving", "number": 3, "path": adapters["first"]}}
    after = {"lora": {"name": "moving", "number": 3, "path": adapters["second"], "inplace": True}}
    expected = plain_lora.tokens(
        tokens, lora={"name": "second", "number": 2, "path": adapters["second"]}
    )
    case.empty_gpu_cache()
    requests.run(tokens, **before)
    case.settle_stores()
    with case.loads() as loads:
        for _ in range(2):
            case.empty_gpu_cache()
            assert requests.run(tokens, **after) == expected
            case.settle_stores()
    assert loads.tokens == 0


def test_an_adapter_of_the_same_name_with_other_weights_does_not_share(
    case: EngineTestbed, plain_lora: ReferenceEngine, adapters: dict[str, object]
) -> None:
    """vLLM's block hashes know an adapter by its name alone."""
    tokens = prompt(5 * CHUNK_TOKENS + 5, 502)
    requests = case.requests()
    with case.loads() as loads:
        for number, name in enumerate(("first", "second"), 4):
            expected = plain_lora.tokens(
                tokens, lora={"name": name, "number": number - 3, "path": adapters[name]}
            )
            case.empty_gpu_cache()
            assert (
                requests.run(
                    tokens, lora={"name": "same", "number": number, "path": adapters[name]}
                )
                == expected
            )
            case.settle_stores()
    assert loads.tokens == 0


def test_an_adapter_removed_and_loaded_again_from_other_files_takes_no_part(
    case: EngineTestbed, plain_lora: ReferenceEngine, adapters: dict[str, object], scratch: Path
) -> None:
    """As trainers do that write each version of an adapter to the same directory."""
    tokens = prompt(5 * CHUNK_TOKENS + 5, 503)
    requests = case.requests()
    path = scratch / "rewritten"
    expected = [
        plain_lora.tokens(tokens, lora={"name": name, "number": number, "path": adapters[name]})
        for number, name in enumerate(("first", "second"), 1)
    ]
    with case.loads() as loads:
        for name, answer in zip(("first", "second"), expected, strict=True):
            shutil.copytree(str(adapters[name]), path, dirs_exist_ok=True)
            case.empty_gpu_cache()
            lora = {"name": "rewritten", "number": 8, "path": str(path)}
            assert requests.run(tokens, lora=lora) == answer
            case.settle_stores()
            case.drive("set", variables={"CONTROL_ARGUMENT": "8"})
            assert case.drive("call", function=f"{SUPPORT}:remove_adapter")
    assert loads.tokens == 0
