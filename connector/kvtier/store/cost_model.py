"""Two non-negative coefficients from noisy measurements: ``y = a u + b v``.

Of all solutions that two samples give, or one with a single coefficient, the one with the least weighted sum of
``|log(expected / measured)|``, each counted up to ``CAP``. So what the weighted majority says counts: a single stall moves nothing, while a change that
lasts is followed as soon as the samples since then weigh more than those before, be they ten times faster or slower. Exact
data are hit exactly. (Least squares would let one sample that is a hundred times off decide.)

What recomputing costs and what a tier delivers, as measured while serving (DATAPATH 3).

``PrefillModel`` says how long the engine takes to compute a span of a prompt, ``TierModel`` how long a tier takes to deliver
a number of objects. Both look at their last ``WINDOW`` measurements, newer ones weighing more, and answer None before they
have seen enough: a load then has its time limit alone.

Time is passed in; no lock: one owner per object.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
GAIN = 0.8
"""A second coefficient must explain at least a fifth of the deviations: samples of nearly one shape would otherwise have
their noise explained by coefficients that are absurd for every other shape."""
CAP = 0.4
"""A sample that is off by half is off; by how much more does not matter."""
EXACT = 1e-9
TINY = 1e-300


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement ``y`` (positive) at ``u`` and ``v`` (not negative, not both 0) of a positive ``weight``."""

    u: float
    v: float
    y: float
    weight: float


@dataclass(frozen=True, slots=True)
class Fit:
    """``a`` and ``b`` are at least 0; ``spread``: weighted mean of the relative deviations of the samples."""

    a: float
    b: float
    spread: float


def fit_coefficients(samples: Sequence[Sample], alone: str) -> Fit:
    """Fits at least one sample. ``alone`` ("u" or "v"): which of the two explains samples that cannot tell them apart.

    About 0.2 ms for 32 samples.
    """
    table = np.array([(s.u, s.v, s.y, s.weight) for s in samples], dtype=np.float64)
    u, v, y, weight = table.T
    weight = weight / weight.sum()
    none = np.zeros_like(y)
    singles = {"u": (_ratios(y, u), none), "v": (none, _ratios(y, v))}
    preferred = singles.pop(alone)
    best = _best(*preferred, u, v, y, weight)
    for rival in (*singles.values(), _pairs(u, v, y)):
        found = _best(*rival, u, v, y, weight)
        if found is not None and (best is None or found.spread < GAIN * best.spread - EXACT):
            best = found
    return best if best is not None else Fit(0.0, 0.0, 0.0)


def _ratios(y: Floats, x: Floats) -> Floats:
    return np.divide(y, x, out=np.full_like(y, -1.0), where=x > 0)


def _pairs(u: Floats, v: Floats, y: Floats) -> tuple[Floats, Floats]:
    """The solutions through two samples each; -1 where there is none."""
    first, second = _indexes(len(y))
    # In relative terms, so that the size of the samples does not matter for what counts as singular.
    u1, v1, u2, v2 = (
        u[first] / y[first],
        v[first] / y[first],
        u[second] / y[second],
        v[second] / y[second],
    )
    determinant = u1 * v2 - u2 * v1
    solvable = np.abs(determinant) > EXACT * (u1 * v2 + u2 * v1)
    missing = np.full_like(determinant, -1.0)
    a = np.divide(v2 - v1, determinant, out=missing.copy(), where=solvable)
    b = np.divide(u1 - u2, determinant, out=missing, where=solvable)
    return a, b


@cache
def _indexes(number: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    first, second = np.triu_indices(number, 1)
    return first, second


def _best(a: Floats, b: Floats, u: Floats, v: Floats, y: Floats, weight: Floats) -> Fit | None:
    good = (a >= 0) & (b >= 0) & (a + b > 0)
    if not good.any():
        return None
    a, b = a[good], b[good]
    expected = np.maximum(np.outer(a, u) + np.outer(b, v), TINY)
    deviation = np.minimum(np.abs(np.log(expected / y)), CAP) @ weight
    at = int(deviation.argmin())
    return Fit(float(a[at]), float(b[at]), float(deviation[at]))


WINDOW = 32
MIN_STEPS = 4
MIN_STEP_TOKENS = 64
"""A smaller step costs what a step costs, not what its tokens cost."""
STEPS_HALF_LIFE = 8
"""In steps: an engine's speed changes seldom, a single step is often disturbed."""
MIN_LOADS = 3
UNKNOWN_SECONDS = 1.0
"""A load under way counts with its age after this long where nothing is known of the tier."""
LOADS_HALF_LIFE = 3
"""In loads: after three that are slow, a tier is slow."""
AGE_HALF_LIFE_SECONDS = 30.0
MAX_AGE_FACTOR = 0.25
"""Age makes old loads weigh less, but a row of them is never outweighed by a single one."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """Seconds to compute tokens a to b of a prompt: ``alpha (b - a) + beta (b^2 - a^2)``.

    The second term is attention: on one H200 with an 8B model a token costs 24 us at 4K and 50 us at 64K.
    """

    alpha: float
    beta: float

    def seconds(self, start_tokens: int, end_tokens: int) -> float:
        """Estimated seconds for tokens ``start_tokens`` to ``end_tokens``."""
        return (end_tokens - start_tokens) * (self.alpha + self.beta * (end_tokens + start_tokens))

    @property
    def usable(self) -> bool:
        """Whether these are numbers that anything can be derived from."""
        finite = math.isfinite(self.alpha) and math.isfinite(self.beta)
        return finite and self.alpha >= 0 and self.beta >= 0 and self.alpha + self.beta > 0


@dataclass(frozen=True, slots=True)
class PrefixCost:
    """Where the keys of a promotion lie in their prompt, and what computing them costs.

    ``ends[i]``: tokens of the prompt that are there once keys 0 to i are; the first key begins at ``start_tokens``.
    ``prefill``: None before there is an estimate. ``waited_seconds``: how long the request's clock has been running.
    """

    start_tokens: int
    ends: tuple[int, ...]
    prefill: Prefill | None = None
    waited_seconds: float = 0.0


class PrefillModel:
    """Fits ``Prefill`` to engine steps. About 0.3 ms for the first question after a step."""

    __slots__ = ("_current", "_steps")

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=WINDOW)
        self._current: Prefill | None = None

    def observe(self, spans: Sequence[tuple[int, int]], seconds: float) -> None:
        """One engine step that took ``seconds`` to compute these (start, end) token spans and little else."""
        linear = float(sum(end - start for start, end in spans))
        if linear < MIN_STEP_TOKENS or not math.isfinite(seconds) or seconds <= 0:
            return
        self._steps.append(
            (linear, float(sum(end * end - start * start for start, end in spans)), seconds)
        )
        self._current = None

    def estimate(self) -> Prefill | None:
        """The engine's speed; None before there are ``MIN_STEPS`` steps."""
        if self._current is None and len(self._steps) >= MIN_STEPS:
            # Larger steps tell more: what a step costs beside its tokens is a smaller part of them.
            samples = [
                Sample(linear, quadratic, seconds, linear * 0.5 ** (age / STEPS_HALF_LIFE))
                for age, (linear, quadratic, seconds) in enumerate(reversed(self._steps))
            ]
            found = fit_coefficients(samples, "u")
            self._current = Prefill(found.a, found.b)
        return self._current


@dataclass(frozen=True, slots=True)
class TierEstimate:
    """``latency_seconds`` of each round of reads, ``bytes_per_second`` of the tier as a whole (both may explain anything
    that scales alike), ``spread``: relative deviation of what was measured from what these two say."""

    latency_seconds: float
    bytes_per_second: float
    spread: float = 0.0

    def seconds(self, rounds: int, size_bytes: float) -> float:
        """Time for ``size_bytes`` in ``rounds`` rounds of parallel reads."""
        return self.latency_seconds * rounds + size_bytes / self.bytes_per_second


IMMEDIATE = TierEstimate(0.0, math.inf)
"""A tier that costs nothing: RAM, and one that nothing is known of yet."""


class Batch:
    """Reads of one tier that somebody asked for together, at most ``parallel`` at a time. ``open``: still running."""

    __slots__ = (
        "began_at",
        "bytes",
        "ended_at",
        "first",
        "last",
        "open",
        "open_bytes",
        "parallel",
        "reads",
    )

    def __init__(self, began_at: float, parallel: int, delivered: tuple[int, int]) -> None:
        self.began_at = began_at
        self.ended_at = began_at
        self.parallel = parallel
        self.first = delivered
        """Reads and bytes that the tier had delivered when the batch began."""
        self.last = delivered
        """And when its last read so far ended."""
        self.reads = 0
        self.bytes = 0
        self.open = 0
        self.open_bytes = 0


class TierModel:
    """Fits ``TierEstimate`` to loads: how long it took until a batch of reads was there, and what the tier delivered
    meanwhile, other batches' reads included.

    A read that was given up counts with its true end, however late. A batch that takes longer than expected counts with its
    age while it is under way, so a tier that gets stuck looks slower every second; one that answers nothing at all, at once.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.queued_reads = 0
        self.queued_bytes = 0
        self.last_began_at = -math.inf
        self._batches: deque[Batch] = deque(maxlen=WINDOW)
        self._delivered = (0, 0)
        self._last_ended_at = -math.inf
        self._settled: TierEstimate | None = None
        self._stale = False

    # What happens.

    def begin(self, now: float, parallel: int = 0) -> Batch:
        """Reads are about to be submitted together, at most ``parallel`` at a time (0: as many as there are threads)."""
        batch = Batch(now, min(parallel, self.threads) or self.threads, self._delivered)
        self._batches.append(batch)
        self.last_began_at = now
        return batch

    def submitted(self, batch: Batch, size_bytes: int) -> None:
        """One read of the batch waits for a thread or has one."""
        batch.reads += 1
        batch.bytes += size_bytes
        batch.open += 1
        batch.open_bytes += size_bytes
        self.queued_reads += 1
        self.queued_bytes += size_bytes

    def hangs(self, size_bytes: int) -> None:
        """One read is not expected to end any more: nothing waits behind it. Its batch goes on counting with its age."""
        self.queued_reads -= 1
        self.queued_bytes -= size_bytes

    def ended(
        self, batch: Batch, now: float, size_bytes: int, good: bool, hung: bool = False
    ) -> None:
        """One read has returned. One that failed soon says nothing about speed; one that failed late does."""
        if hung:
            self.queued_reads += 1
            self.queued_bytes += size_bytes
        if not good and not self._is_late(batch, now):
            self.withdrawn(batch, size_bytes)
            return
        self._leave(batch, size_bytes)
        self._delivered = (self._delivered[0] + 1, self._delivered[1] + size_bytes)
        batch.ended_at, batch.last = now, self._delivered
        self._last_ended_at = max(self._last_ended_at, now)

    def withdrawn(self, batch: Batch, size_bytes: int) -> None:
        """One read was taken back before it began."""
        self._leave(batch, size_bytes)
        batch.reads -= 1
        batch.bytes -= size_bytes

    def _leave(self, batch: Batch, size_bytes: int) -> None:
        batch.open -= 1
        batch.open_bytes -= size_bytes
        self.queued_reads -= 1
        self.queued_bytes -= size_bytes
        if batch.open == 0:
            self._stale = True

    # What is expected.

    def settled(self, now: float) -> TierEstimate | None:
        """What the tier has done so far; None before ``MIN_LOADS`` loads. 0.3 ms after a load has ended."""
        if self._stale:
            self._settled, self._stale = self._fit(now, ()), False
        return self._settled

    def estimate(self, now: float) -> TierEstimate | None:
        """The same, with what is late at ``now`` taken into account."""
        self.settled(now)
        late = [batch for batch in self._batches if batch.open and self._is_late(batch, now)]
        if not late:
            return self._settled
        silent = now - max(late[0].began_at, self._last_ended_at)
        if silent <= self._allowed(late[0]):
            return self._fit(now, late)
        # Not one read has ended since: whoever comes next waits as long again, for all that is known.
        if self._settled is None:
            return TierEstimate(silent, math.inf)
        return replace(self._settled, latency_seconds=max(self._settled.latency_seconds, silent))

    def _is_late(self, batch: Batch, now: float) -> bool:
        return now - batch.began_at > self._allowed(batch)

    def _allowed(self, batch: Batch) -> float:
        """How long a batch may take before it is late."""
        return (
            UNKNOWN_SECONDS if self._settled is None else self._settled.seconds(*self._work(batch))
        )

    def _work(self, batch: Batch) -> tuple[int, int]:
        """Rounds and bytes that the tier was, or has to be, through with since the batch began for it to be there."""
        reads, size_bytes = self._delivered if batch.open else batch.last
        reads += batch.open - batch.first[0]
        size_bytes += batch.open_bytes - batch.first[1]
        if reads <= batch.reads:
            return -(-batch.reads // batch.parallel), batch.bytes
        return -(-reads // self.threads), size_bytes

    def _fit(self, now: float, late: Sequence[Batch]) -> TierEstimate | None:
        samples: list[Sample] = []
        for batch in reversed(self._batches):
            if batch.reads and (not batch.open or batch in late):
                seconds = (now if batch.open else batch.ended_at) - batch.began_at
                age = 0.5 ** ((now - batch.began_at) / AGE_HALF_LIFE_SECONDS)
                weight = max(age, MAX_AGE_FACTOR) * 0.5 ** (len(samples) / LOADS_HALF_LIFE)
                rounds, size_bytes = self._work(batch)
                samples.append(Sample(rounds, size_bytes, max(seconds, 1e-9), weight))
        if len(samples) < MIN_LOADS:
            return None
        found = fit_coefficients(samples, "v")
        return TierEstimate(found.a, 1 / found.b if found.b > 0 else math.inf, found.spread)
