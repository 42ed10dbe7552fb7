"""Costs that the scheduler side measures while it serves: prefill steps, and copies from RAM.

Both estimators belong to the scheduler's thread. docs/datapath.md says how the numbers are used.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier.store.cost_model import Prefill, PrefillModel

MAX_UNREPORTED_STEPS = 64
"""vLLM has a handful of steps in flight; older ones are dropped."""
PREFILL_TO_DECODE_RATIO = 10
"""A step is a prefill sample only if it has this many times more prompt tokens than decode tokens,
which cost about as much each."""
COPY_SAMPLES = 16
MIN_COPY_SAMPLES = 4
"""A tier in RAM is not given up on fewer loads than this."""
COPY_SAMPLE_SECONDS = 5.0
"""Older loads are forgotten, so one bad stretch costs seconds."""


@dataclass(slots=True)
class StepTokens:
    """What one step computes: spans of prompt tokens, and a number of decode tokens."""

    prompt_spans: list[tuple[int, int]] = field(default_factory=list)
    decode_tokens: int = 0
    built_at: float = 0.0


class PrefillEstimator:
    """Estimates the prefill rate from the time between a step's earliest start and its report."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._model = PrefillModel()
        self._steps: deque[tuple[int, StepTokens]] = deque(maxlen=MAX_UNREPORTED_STEPS)
        self._reported_at = -math.inf

    def step_built(self, step: int, tokens: StepTokens) -> None:
        """Records that a step was handed to the workers."""
        tokens.built_at = self._clock()
        self._steps.append((step, tokens))

    def step_executed(self, step: int) -> None:
        """Records that every worker has executed ``step``.

        With asynchronous scheduling a step is built while the previous one runs, so it starts at
        the later of its own construction and the previous report.
        """
        now = self._clock()
        executed = []
        while self._steps and self._steps[0][0] <= step:
            executed.append(self._steps.popleft()[1])
        if len(executed) == 1:
            (tokens,) = executed
            prefill = sum(end - start for start, end in tokens.prompt_spans)
            if prefill and prefill >= PREFILL_TO_DECODE_RATIO * tokens.decode_tokens:
                started_at = max(tokens.built_at, self._reported_at)
                self._model.observe(tokens.prompt_spans, now - started_at)
        self._reported_at = now

    def clear(self) -> None:
        """Drops the steps in flight: they will not be reported."""
        self._steps.clear()

    def estimate(self) -> Prefill | None:
        """Returns the engine's prefill cost, or None before there are enough samples."""
        return self._model.estimate()


class CopyEstimator:
    """Decides whether a load from RAM beats recomputation.

    It does, unless the copies themselves are measured to be slower: the time on the device from
    the first to the last byte of a load. The wall time of a load is no measure, because loads that
    wait for each other or for a step of the engine take long on a fast link.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=COPY_SAMPLES)
        """When each load ended, and its seconds per token."""

    def observe(self, tokens: int, copy_seconds: float, now: float) -> None:
        """Adds one load from RAM. ``copy_seconds``: on the device; 0 if it is not known."""
        if tokens > 0 and 0 < copy_seconds < math.inf:
            self._samples.append((now, copy_seconds / tokens))

    def seconds_per_token(self, now: float) -> float:
        """How long copies take; 0 before there are enough samples."""
        while self._samples and now - self._samples[0][0] > COPY_SAMPLE_SECONDS:
            self._samples.popleft()
        if len(self._samples) < MIN_COPY_SAMPLES:
            return 0.0
        return statistics.median(seconds for _, seconds in self._samples)

    def beats_recompute(self, tokens: int, recompute_seconds: float, now: float) -> bool:
        """Returns whether to load ``tokens`` tokens."""
        return self.seconds_per_token(now) * tokens <= recompute_seconds
