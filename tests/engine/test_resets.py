"""Pauses, sleep and updates of weights in a running engine, as trainers do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.config.models import Daemon
from kvtier.harness.engine_process import EngineProcessError
from kvtier.harness.engine_requests import ReferenceEngine
from kvtier.harness.engine_testbed import (
    CHUNK_TOKENS,
    EngineOptions,
    EngineTestbed,
    running_reference,
)
from kvtier.harness.tiny_model import prompt, write_llama

CHUNKS = 4
SUPPORT = Path(__file__).parent.parent / "support" / "engine_control.py"


@pytest.fixture(scope="module")
def other(scratch: Path) -> Path:
    """The same model with other weights."""
    return write_llama(scratch / "other-weights", seed=7)


@pytest.fixture(scope="module")
def plain_other(other: Path, payload: Path, scratch: Path) -> Iterator[ReferenceEngine]:
    with running_reference(other, payload, scratch / "plain-other.log") as engine:
        yield engine


@pytest.fixture(scope="module")
def case(model: Path, payload: Path, scratch: Path) -> Iterator[EngineTestbed]:
    case = EngineTestbed(scratch / "resets", model, payload, EngineOptions(daemon=Daemon.SIDECAR))
    try:
        case.start_daemon()
        case.start(kvtier_hooks=[f"{SUPPORT}:install"])
        case.wait_attached()
        yield case
    finally:
        case.close()


def _control(case: EngineTestbed, action: str, argument: str = "") -> object:
    """Does something to the engine between two steps."""
    case.drive("set", variables={"CONTROL_ARGUMENT": argument})
    return case.drive("call", function=f"{SUPPORT}:{action}")


def _tokens(number: int) -> list[int]:
    return prompt(CHUNKS * CHUNK_TOKENS + 5, 970 + number)


def _reload(case: EngineTestbed, tokens: list[int], expected: list[int]) -> int:
    """Runs a prompt whose objects are in a tier; returns how many tokens were loaded."""
    with case.loads() as loads:
        assert case.requests().run(tokens) == expected
    return loads.tokens


@pytest.mark.parametrize("action", ["pause_and_clear", "sleep"])
def test_a_pause_right_after_a_request_returns_and_the_tiers_stay(
    case: EngineTestbed, plain: ReferenceEngine, action: str
) -> None:
    """Nothing steps the engine after the request, so its stores are still in flight."""
    namespace = case.drive("connector")["namespace"]
    for number in range(3):
        tokens = _tokens(number + (10 if action == "sleep" else 0))
        assert case.requests().run(tokens) == plain.tokens(tokens)
        _control(case, action)
        _control(case, "resume")
        # The second time the stores are left to end.
        assert case.requests().run(tokens) == plain.tokens(tokens)
        case.settle_stores()
        _control(case, action)
        _control(case, "resume")
        assert _reload(case, tokens, plain.tokens(tokens)) == CHUNKS * CHUNK_TOKENS
    case.settle_stores()
    assert case.drive("connector")["namespace"] == namespace
    assert (case.files_root / namespace).is_dir()


def test_updated_weights_have_their_own_objects_and_the_old_ones_come_back(
    case: EngineTestbed,
    model: Path,
    other: Path,
    plain: ReferenceEngine,
    plain_other: ReferenceEngine,
) -> None:
    """Generate, update, generate: from A to B to A, resetting the prefix cache only."""
    tokens = _tokens(20)
    namespaces = []
    for weights, expected in ((model, plain), (other, plain_other), (model, plain)):
        if namespaces:
            _control(case, "update_weights", str(weights))
            assert _control(case, "reset_prefix_cache")
        assert case.requests().run(tokens) == expected.tokens(tokens)
        case.settle_stores()
        case.empty_gpu_cache()
        assert _reload(case, tokens, expected.tokens(tokens)) == CHUNKS * CHUNK_TOKENS
        namespaces.append(case.drive("connector")["namespace"])
    assert namespaces[0] == namespaces[2] != namespaces[1]
    assert all((case.files_root / each).is_dir() for each in namespaces)


def test_after_a_failed_update_the_same_weights_have_their_objects_again(
    case: EngineTestbed, model: Path, plain: ReferenceEngine
) -> None:
    """vLLM cannot compute with what a failed update has left, until another one succeeds."""
    tokens = _tokens(22)
    assert case.requests().run(tokens) == plain.tokens(tokens)
    case.settle_stores()
    namespace = case.drive("connector")["namespace"]
    with pytest.raises(EngineProcessError):
        _control(case, "update_weights", str(model / "absent"))
    _control(case, "update_weights", str(model))
    assert _control(case, "reset_prefix_cache")
    assert _reload(case, tokens, plain.tokens(tokens)) == CHUNKS * CHUNK_TOKENS
    assert case.drive("connector")["namespace"] == namespace


def test_an_update_that_keeps_the_cache_stores_nothing_until_the_next_reset(
    case: EngineTestbed, model: Path, other: Path, plain_other: ReferenceEngine
) -> None:
    tokens = _tokens(21)
    _control(case, "update_weights", str(other))
    before = case.daemon_events("stores_committed")
    assert case.requests().run(tokens) == plain_other.tokens(tokens)
    case.drive("settle")
    assert case.drive("connector")["usable"] is False
    assert case.daemon_events("stores_committed") == before
    case.empty_gpu_cache()
    assert case.requests().run(tokens) == plain_other.tokens(tokens)
    case.settle_stores()
    case.empty_gpu_cache()
    assert _reload(case, tokens, plain_other.tokens(tokens)) == CHUNKS * CHUNK_TOKENS
    _control(case, "update_weights", str(model))
    case.empty_gpu_cache()
