"""Measures prefill steps and reads of secondary tiers, on the scheduler side of ATOM.

ATOM runs one step at a time: it asks for metadata right before the forward pass, and passes on
completions right after it. Prefill and decode never share a step, so the time between the two
belongs to the prompt tokens by which the sequences have advanced at the next step.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence

from kvtier.engines.atom.sequence_state import SequenceState
from kvtier.store.cost_model import Prefill, PrefillModel

READ_SAMPLES = 8
SAMPLE_SECONDS = 60.0


class StepTimer:
    """Estimates the prefill rate. ``states`` of one step must stay the same objects."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._model = PrefillModel()
        self._before: dict[SequenceState, int] = {}
        self._began_at: float | None = None
        self._seconds: float | None = None

    def step_begins(self, states: Sequence[SequenceState]) -> None:
        """A step is about to run. Evaluates the previous one."""
        if self._seconds is not None:
            spans = [
                (before, state.computed_tokens_now)
                for state, before in self._before.items()
                if state.load is None and state.computed_tokens_now > before
            ]
            if spans:
                self._model.observe(spans, self._seconds)
        self._before = {
            state: state.computed_tokens_now
            for state in states
            if state.load is None and not state.finished and state.seq.block_table
        }
        self._began_at, self._seconds = self._clock(), None

    def step_ended(self) -> None:
        """The step has run; the sequences have not advanced yet."""
        if self._began_at is not None:
            self._seconds = self._clock() - self._began_at
            self._began_at = None

    def forget(self, state: SequenceState) -> None:
        """The sequence is about to advance by a load, or its blocks are gone."""
        self._before.pop(state, None)

    def estimate(self) -> Prefill | None:
        """The engine's prefill cost; None before there are enough samples."""
        return self._model.estimate()


class ReadTimes:
    """Seconds per chunk from each secondary tier, as promotions measure it.

    A promotion that was given up counts with its age: the tier takes at least that long. Samples
    are forgotten after ``SAMPLE_SECONDS``, so that a tier that was too slow is tried again.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._samples: dict[int, deque[tuple[float, float]]] = {}
        """(When, seconds per chunk), by tier."""

    def observe(self, tiers: Sequence[int], seconds: float) -> None:
        """Adds a promotion. ``tiers[i]``: the tier that its i-th chunk came from, 0 for RAM."""
        read = [tier for tier in tiers if tier]
        if not read or seconds <= 0:
            return
        # Tiers are read at the same time; the one with most chunks decides.
        tier = max(set(read), key=read.count)
        samples = self._samples.setdefault(tier, deque(maxlen=READ_SAMPLES))
        samples.append((self._clock(), seconds / read.count(tier)))

    def seconds(self, tier: int) -> float | None:
        """Median seconds per chunk; None without a measurement."""
        samples = self._samples.get(tier)
        while samples and self._clock() - samples[0][0] > SAMPLE_SECONDS:
            samples.popleft()
        return statistics.median(seconds for _, seconds in samples) if samples else None
