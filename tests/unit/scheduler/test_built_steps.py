"""What the report of a step proves about the requests that were in it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvtier.engines.common.request_state import RequestState
from kvtier.engines.vllm import built_steps
from kvtier.engines.vllm.built_steps import BuiltStep, BuiltSteps


def _state(request_id: str = "a") -> RequestState:
    request = SimpleNamespace(request_id=request_id, num_computed_tokens=0, num_prompt_tokens=64)
    return RequestState(request)  # type: ignore[arg-type]


def _add(steps: BuiltSteps, number: int, state: RequestState, tokens: int) -> int:
    return steps.add(BuiltStep(number, [(state, state.frontier.generation, tokens)]))


def test_a_report_covers_the_steps_before_it_and_none_after() -> None:
    steps, state = BuiltSteps(), _state()
    for number in (1, 2, 3):
        _add(steps, number, state, 16 * number)
    assert state.frontier.executed_tokens == 0
    steps.executed(2)
    assert state.frontier.executed_tokens == 32
    steps.executed(1)
    assert state.frontier.executed_tokens == 32
    steps.executed(3)
    assert state.frontier.executed_tokens == 48


def test_a_request_that_lost_its_blocks_gains_nothing_from_older_steps() -> None:
    steps, state = BuiltSteps(), _state()
    _add(steps, 1, state, 16)
    state.frontier.lose_blocks()
    steps.executed(1)
    assert state.frontier.executed_tokens == 0


def test_the_end_of_a_request_proves_the_oldest_unreported_step_only() -> None:
    steps, state, other = BuiltSteps(), _state(), _state("b")
    steps.request_ended(state)
    _add(steps, 1, state, 16)
    _add(steps, 2, state, 32)
    steps.request_ended(other)
    assert (state.frontier.executed_tokens, other.frontier.executed_tokens) == (0, 0)
    steps.request_ended(state)
    assert state.frontier.executed_tokens == 16


def test_nothing_of_a_request_that_was_turned_back_counts() -> None:
    steps, turned, other = BuiltSteps(), _state(), _state("b")
    _add(steps, 1, turned, 32)
    _add(steps, 2, other, 32)
    other.request.num_computed_tokens = 32
    turned.request.num_computed_tokens = 16
    steps.drop_turned_back()
    steps.executed(2)
    assert (turned.frontier.executed_tokens, other.frontier.executed_tokens) == (0, 32)


def test_steps_that_are_never_reported_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(built_steps, "MAX_UNREPORTED_STEPS", 3)
    steps, state = BuiltSteps(), _state()
    assert [_add(steps, number, state, 16 * number) for number in range(1, 6)] == [0, 0, 0, 1, 2]
    steps.clear()
    steps.executed(5)
    assert state.frontier.executed_tokens == 0
