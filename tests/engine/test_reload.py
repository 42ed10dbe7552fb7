"""An engine with its own tierd: prompts are reloaded from RAM, and nothing wrong is stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.harness.engine_requests import ReferenceEngine, Requests
from kvtier.harness.engine_testbed import BLOCK_TOKENS, CHUNK_TOKENS, EngineTestbed
from kvtier.harness.tiny_model import prompt

BATCHED_TOKENS = 256
"""Less than the prompts have, so that each is computed in several steps."""


@pytest.fixture(scope="module")
def case(model: Path, payload: Path, scratch: Path) -> Iterator[EngineTestbed]:
    case = EngineTestbed(scratch / "reload", model, payload)
    try:
        case.start(max_num_batched_tokens=BATCHED_TOKENS)
        case.wait_attached()
        yield case
    finally:
        case.close()


@pytest.fixture(scope="module")
def requests(case: EngineTestbed) -> Requests:
    return case.requests()


def test_a_prompt_prefilled_in_chunks_is_reloaded_from_ram_after_the_gpu_cache_is_emptied(
    case: EngineTestbed, requests: Requests, plain: ReferenceEngine
) -> None:
    tokens = prompt(700, 101)
    name = requests.add(tokens)
    answer = requests.finish([name])
    assert answer["steps"] >= 700 // BATCHED_TOKENS + 12
    assert answer[name]["tokens"] == plain.tokens(tokens)
    case.settle_stores()
    case.empty_gpu_cache()
    with case.loads("ram") as loads:
        again = requests.add(tokens)
        answer = requests.finish([again])
    assert answer[again]["tokens"] == plain.tokens(tokens)
    assert loads.tokens == 700 // CHUNK_TOKENS * CHUNK_TOKENS
    assert answer["steps"] == 1 + 12, "one step submits the copies and reports the load"


@pytest.mark.parametrize(
    "length",
    [CHUNK_TOKENS, 5 * CHUNK_TOKENS, 5 * CHUNK_TOKENS + 1, 5 * CHUNK_TOKENS + BLOCK_TOKENS],
)
def test_prompts_that_end_at_a_boundary_are_reloaded_from_ram(
    case: EngineTestbed, requests: Requests, plain: ReferenceEngine, length: int
) -> None:
    tokens = prompt(length, 110 + length)
    assert requests.run(tokens) == plain.tokens(tokens)
    case.settle_stores()
    case.empty_gpu_cache()
    with case.loads("ram") as loads:
        assert requests.run(tokens) == plain.tokens(tokens)
    assert loads.tokens >= (length - 1) // CHUNK_TOKENS * CHUNK_TOKENS


def test_a_gpu_hit_that_ends_inside_a_chunk_loads_only_the_blocks_that_miss(
    case: EngineTestbed, requests: Requests, plain: ReferenceEngine
) -> None:
    tokens = prompt(10 * CHUNK_TOKENS + 7, 120)
    start = tokens[: CHUNK_TOKENS + BLOCK_TOKENS] + prompt(5, 121)
    assert requests.run(tokens) == plain.tokens(tokens)
    case.settle_stores()
    case.empty_gpu_cache()
    assert requests.run(start) == plain.tokens(start)
    with case.loads("ram") as loads:
        assert requests.run(tokens) == plain.tokens(tokens)
    assert loads.tokens == 9 * CHUNK_TOKENS - BLOCK_TOKENS


def test_generated_tokens_are_reloaded_as_part_of_a_longer_prompt(
    case: EngineTestbed, requests: Requests, plain: ReferenceEngine
) -> None:
    tokens = prompt(3 * CHUNK_TOKENS - 20, 130)
    answer = requests.run(tokens, 100)
    assert answer == plain.tokens(tokens, 100)
    conversation = tokens + answer + prompt(30, 131)
    case.settle_stores()
    case.empty_gpu_cache()
    with case.loads("ram") as loads:
        assert requests.run(conversation) == plain.tokens(conversation)
    assert loads.tokens == (len(tokens) + 99) // CHUNK_TOKENS * CHUNK_TOKENS


def test_eight_concurrent_requests_share_a_prefix(
    case: EngineTestbed, requests: Requests, plain: ReferenceEngine
) -> None:
    prefix = prompt(6 * CHUNK_TOKENS, 140)
    prompts = [prefix + prompt(70 + 10 * index, 141 + index) for index in range(8)]
    for _ in range(2):
        case.empty_gpu_cache()
        with case.loads("ram") as loads:
            assert requests.run_together(prompts) == plain.together(prompts)
        case.settle_stores()
    assert loads.tokens >= len(prefix) + 8 * CHUNK_TOKENS


def test_requests_with_different_cache_salts_do_not_share(
    case: EngineTestbed, requests: Requests, plain: ReferenceEngine
) -> None:
    tokens = prompt(5 * CHUNK_TOKENS + 3, 160)
    with case.loads() as loads:
        for salt in ("", "one", "two"):
            case.empty_gpu_cache()
            assert requests.run(tokens, salt=salt) == plain.tokens(tokens)
            case.settle_stores()
    assert loads.tokens == 0
    case.empty_gpu_cache()
    with case.loads("ram") as loads:
        assert requests.run(tokens, salt="one") == plain.tokens(tokens)
    assert loads.tokens == 5 * CHUNK_TOKENS


def test_a_request_aborted_during_its_store_causes_no_wrong_token(
    case: EngineTestbed, requests: Requests, plain: ReferenceEngine
) -> None:
    tokens = prompt(12 * CHUNK_TOKENS, 170)
    name = requests.add(tokens, 200)
    requests.engine.call("step", count=4)
    requests.abort(name)
    others = [prompt(15 * CHUNK_TOKENS, 171 + index) for index in range(4)]
    assert requests.run_together(others) == plain.together(others)
    case.settle_stores()
    case.empty_gpu_cache()
    with case.loads("ram") as loads:
        assert requests.run(tokens) == plain.tokens(tokens)
    assert loads.tokens > 0


def test_a_request_aborted_during_its_load_causes_no_wrong_token(
    case: EngineTestbed, requests: Requests, plain: ReferenceEngine
) -> None:
    tokens = prompt(12 * CHUNK_TOKENS, 180)
    assert requests.run(tokens) == plain.tokens(tokens)
    case.settle_stores()
    case.empty_gpu_cache()
    name = requests.add(tokens)
    case.step_until(name, "WAITING_FOR_REMOTE_KVS")
    requests.abort(name)
    others = [prompt(15 * CHUNK_TOKENS, 181 + index) for index in range(4)]
    assert requests.run_together(others) == plain.together(others)
    case.empty_gpu_cache()
    with case.loads("ram") as loads:
        assert requests.run(tokens) == plain.tokens(tokens)
    assert loads.tokens > 0
