"""What the engine's own work costs, measured while it serves: prefill steps, and copies from RAM (DATAPATH 3)."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from kvtier.engines.vllm.tierd_session import Clock
from kvtier.store.cost_model import Prefill, PrefillModel, Sample, fit_coefficients

MAX_STEPS = 64
"""Steps that are built and not reported; vLLM has a handful."""
MOSTLY = 10
"""A step is mostly prefill with this many times more prompt tokens than others: those cost about as much each."""
COPIES = 16
MIN_COPIES = 8
COPY_TRIAL_SECONDS = 30.0


@dataclass(slots=True)
class StepWork:
    """What one step computes: spans of tokens that are known, and how many others (decoding)."""

    spans: list[tuple[int, int]] = field(default_factory=list)
    others: int = 0
    built_at: float = 0.0

    def add(self, start_tokens: int, scheduled: int, known_tokens: int) -> None:
        """A request's part. ``known_tokens``: tokens it has; all but the last of them were not sampled in this step."""
        if start_tokens < known_tokens - 1:
            self.spans.append((start_tokens, start_tokens + scheduled))
        else:
            self.others += scheduled


class PrefillSpeed:
    """Feeds ``PrefillModel`` with the time from when a step could begin to its report. The scheduler's thread only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._model = PrefillModel()
        self._steps: deque[tuple[int, StepWork]] = deque(maxlen=MAX_STEPS)
        self._reported_at = -math.inf

    def built(self, step: int, work: StepWork) -> None:
        """A step is handed to the workers."""
        work.built_at = self._clock()
        self._steps.append((step, work))

    def reported(self, step: int) -> None:
        """All workers have executed this step. With asynchronous scheduling it was built while the one before still ran."""
        now = self._clock()
        done = []
        while self._steps and self._steps[0][0] <= step:
            done.append(self._steps.popleft()[1])
        if len(done) == 1:
            (work,) = done
            prefill = sum(end - start for start, end in work.spans)
            if prefill and prefill >= MOSTLY * work.others:
                self._model.observe(work.spans, now - max(work.built_at, self._reported_at))
        self._reported_at = now

    def forget(self) -> None:
        """Steps are not reported any more."""
        self._steps.clear()

    def estimate(self) -> Prefill | None:
        """The engine's prefill speed; None before there is one."""
        return self._model.estimate()


class CopySpeed:
    """Whether loading from RAM beats recomputing. It does, unless copies themselves are measured to take longer: what grows
    with the tokens counts, not what a load waits for beside (the step that runs, the daemon's word)."""

    def __init__(self) -> None:
        self._loads: deque[tuple[float, float]] = deque(maxlen=COPIES)
        self._seconds_per_token: float | None = 0.0
        self._tried_at = -math.inf

    def observe(self, tokens: int, seconds: float) -> None:
        """One load from RAM, from the worker's receipt of it to its end."""
        if tokens > 0 and 0 < seconds < math.inf:
            self._loads.append((float(tokens), seconds))
            self._seconds_per_token = None

    def beats(self, tokens: int, recompute_seconds: float, now: float) -> bool:
        """Whether to load this many tokens. Where copies are too slow, True every 30 s, so that they are measured again."""
        if self._seconds_per_token is None:
            self._seconds_per_token = self._fit()
        if self._seconds_per_token * tokens <= recompute_seconds:
            return True
        if now - self._tried_at < COPY_TRIAL_SECONDS:
            return False
        self._tried_at = now
        return True

    def _fit(self) -> float:
        if len(self._loads) < MIN_COPIES:
            return 0.0
        return fit_coefficients(
            [Sample(1.0, tokens, seconds, 1.0) for tokens, seconds in self._loads], "u"
        ).b
