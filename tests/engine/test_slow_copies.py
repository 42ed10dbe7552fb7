"""Copies that take as long as a GPU's: the rules that protect blocks and slots meanwhile.

Each test runs with the rule in force and with the rule switched off. Wrong tokens in the second
case prove that the first one tests something.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.slow_copies import (
    CUT_SLOTS,
    INSTALL,
    SECONDS,
    UNDRAINED,
    UNREFERENCED,
    running_copies,
)

from kvtier.harness.engine_requests import ReferenceEngine, Requests
from kvtier.harness.engine_testbed import CHUNK_TOKENS, EngineTestbed
from kvtier.harness.tiny_model import prompt
from kvtier.transfer.engine import Direction

CHUNKS = 8
"""A quarter of the cache below: no more is stored at a time."""
STORE, LOAD = SECONDS[Direction.TO_HOST], SECONDS[Direction.TO_DEVICE]
FOR_EVER = "3600"

with_and_without = pytest.mark.parametrize(
    "kept", [True, False], ids=["with the rule", "without it"]
)


@pytest.fixture(scope="module")
def case(model: Path, payload: Path, scratch: Path) -> Iterator[EngineTestbed]:
    case = EngineTestbed(scratch / "slow", model, payload)
    try:
        # 64 blocks of 32 tokens: three other prompts of 900 tokens have used every one of them.
        case.start(
            kvtier_hooks=[INSTALL],
            kv_cache_memory_bytes=4 << 20,
            max_model_len=1024,
        )
        case.wait_attached()
        yield case
    finally:
        case.close()


@pytest.fixture
def requests(case: EngineTestbed) -> Iterator[Requests]:
    yield case.requests()
    case.drive(
        "set", variables={STORE: "0", LOAD: "0", UNDRAINED: "", UNREFERENCED: "", CUT_SLOTS: ""}
    )
    case.settle_stores()


def _others(seed: int) -> list[list[int]]:
    return [prompt(900, seed + index) for index in range(3)]


def _wait_copying(case: EngineTestbed, direction: Direction) -> None:
    case.wait_for(lambda: running_copies(case)[direction.value] > 0, "no copy has started")


@with_and_without
def test_source_blocks_of_a_store_stay_until_they_are_copied(
    case: EngineTestbed, requests: Requests, plain: ReferenceEngine, kept: bool
) -> None:
    tokens = prompt(CHUNKS * CHUNK_TOKENS + 5, 700 + kept)
    # Stored beforehand: they shall take the free blocks, and hold none for stores of their own.
    for other in _others(710 + 10 * kept):
        assert requests.run(other) == plain.tokens(other)
        case.settle_stores()
    case.drive("set", variables={STORE: FOR_EVER, UNREFERENCED: "" if kept else "1"})
    assert requests.run(tokens) == plain.tokens(tokens)
    _wait_copying(case, Direction.TO_HOST)
    for other in _others(710 + 10 * kept):
        assert requests.run(other) == plain.tokens(other)
    case.drive("set", variables={STORE: "0"})
    case.settle_stores()
    case.empty_gpu_cache()
    with case.loads("ram") as loads:
        answer = requests.run(tokens)
    assert loads.tokens == CHUNKS * CHUNK_TOKENS
    assert (answer == plain.tokens(tokens)) is kept


@with_and_without
def test_a_load_ends_when_its_copies_end(
    case: EngineTestbed, requests: Requests, plain: ReferenceEngine, kept: bool
) -> None:
    tokens = prompt(CHUNKS * CHUNK_TOKENS + 5, 730 + kept)
    assert requests.run(tokens) == plain.tokens(tokens)
    case.settle_stores()
    for other in _others(740 + 10 * kept):
        requests.run(other)
    case.empty_gpu_cache()
    case.drive("set", variables={LOAD: FOR_EVER, UNDRAINED: "" if kept else "1"})
    with case.loads("ram") as loads:
        name = requests.add(tokens)
        case.step_until(name, "WAITING_FOR_REMOTE_KVS")
        _wait_copying(case, Direction.TO_DEVICE)
        requests.engine.call("step", count=5)
        assert (
            requests.engine.call("state")["requests"][name].endswith("WAITING_FOR_REMOTE_KVS")
            is kept
        )
        if kept:
            case.drive("set", variables={LOAD: "0"})
        answer = requests.finish([name])[name]["tokens"]
        case.drive("set", variables={LOAD: "0"})
        running_copies(case)  # runs the copies that are due
    assert loads.tokens == CHUNKS * CHUNK_TOKENS
    assert (answer == plain.tokens(tokens)) is kept


@with_and_without
def test_target_blocks_of_an_aborted_load_are_not_reused_before_its_copies_end(
    case: EngineTestbed, requests: Requests, plain: ReferenceEngine, kept: bool
) -> None:
    tokens = prompt(CHUNKS * CHUNK_TOKENS + 5, 760 + kept)
    others = _others(770 + 10 * kept)[:2]
    assert requests.run(tokens) == plain.tokens(tokens)
    case.settle_stores()
    case.empty_gpu_cache()
    case.drive("set", variables={LOAD: FOR_EVER, UNDRAINED: "" if kept else "1"})
    name = requests.add(tokens)
    case.step_until(name, "WAITING_FOR_REMOTE_KVS")
    _wait_copying(case, Direction.TO_DEVICE)
    requests.abort(name)
    names = [requests.add(other, 40) for other in others]
    requests.engine.call("step", count=20)
    case.drive("set", variables={LOAD: "0"})
    running_copies(case)  # runs the copies that are due
    answers = requests.finish(names)
    assert ([answers[name]["tokens"] for name in names] == plain.together(others, 40)) is kept


@pytest.mark.parametrize("left", [0, 1, 4], ids=lambda left: f"{left} chunks left")
def test_a_load_with_evicted_keys_loads_the_rest_and_is_not_repeated(
    case: EngineTestbed, requests: Requests, plain: ReferenceEngine, left: int
) -> None:
    tokens = prompt(CHUNKS * CHUNK_TOKENS + 5, 790 + left)
    assert requests.run(tokens) == plain.tokens(tokens)
    case.settle_stores()
    case.empty_gpu_cache()
    failures = case.load_failures()
    case.drive("set", variables={CUT_SLOTS: str(left)})
    name = requests.add(tokens)
    with case.loads("ram") as loads:
        answer = requests.finish([name])[name]["tokens"]
    assert answer == plain.tokens(tokens)
    assert loads.tokens == left * CHUNK_TOKENS
    assert case.load_failures() == failures + 1
    assert requests.engine.call("lookup_counts")[name] <= 3
