"""Steps that were built and not reported yet, and what their reports prove.

With asynchronous scheduling vLLM builds the next step before the output of the previous one
arrives. A token is computed once the workers have reported the step that was to compute it; only
then may it be stored. The scheduler's thread only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvtier.engines.common.request_state import RequestState

MAX_UNREPORTED_STEPS = 1_024
"""vLLM has a handful of steps in flight; beyond this the workers do not report at all."""


@dataclass(slots=True)
class BuiltStep:
    """One step: (request, generation of its frontier, computed tokens after the step) of the
    requests that complete a chunk in it."""

    number: int
    requests: list[tuple[RequestState, int, int]] = field(default_factory=list)


class BuiltSteps:
    """The unreported steps of an engine, oldest first."""

    def __init__(self) -> None:
        self._steps: deque[BuiltStep] = deque()

    def add(self, step: BuiltStep) -> int:
        """Adds the newest step; returns the number of the oldest one if there are too many, else
        0: no report of that one is expected."""
        self._steps.append(step)
        return self._steps.popleft().number if len(self._steps) > MAX_UNREPORTED_STEPS else 0

    def executed(self, number: int) -> None:
        """The workers have reported step ``number``, and with it those before."""
        while self._steps and self._steps[0].number <= number:
            for state, generation, tokens in self._steps.popleft().requests:
                # ``Frontier.executed`` without a call for each running request.
                frontier = state.frontier
                if generation == frontier.generation and tokens > frontier.executed_tokens:
                    frontier.executed_tokens = tokens

    def request_ended(self, state: RequestState) -> None:
        """The output of a step ended the request.

        vLLM finishes a request before it passes on the report of the step that ended it, and that
        is the oldest unreported step.
        """
        if self._steps:
            for other, generation, tokens in self._steps[0].requests:
                if other is state:
                    state.frontier.executed(generation, tokens)

    def drop_turned_back(self) -> None:
        """A connector beside KVTier has failed to load within a step, so what the step computed
        from these blocks is wrong: none of it is stored, and the request counts from the start."""
        for step in self._steps:
            for state, generation, tokens in step.requests:
                current = generation == state.frontier.generation
                if current and state.request.num_computed_tokens < tokens:
                    state.frontier.lose_blocks()

    def clear(self) -> None:
        """Forgets all: their reports prove nothing."""
        self._steps.clear()
