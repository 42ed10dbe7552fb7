"""Cost model: what recomputing costs and what a tier delivers, as measured while serving.

``PrefillModel`` estimates how long the engine takes to compute a span of a prompt, ``TierModel``
how long a tier takes to deliver a number of objects. Both use their last ``WINDOW`` measurements,
recent ones with more weight, and return None before they have enough; a load is then limited by its
timeout alone. Time is passed in. No locks: one owner per object.

``fit_coefficients`` fits two non-negative coefficients to noisy measurements, ``y = a u + b v``. Of
all solutions that two samples give, or one sample with a single coefficient, it takes the one with
the least weighted sum of ``|log(expected / measured)|``, each capped at ``CAP``. So the weighted
majority decides: a single stall changes nothing, and a lasting change is followed as soon as the
samples since then outweigh those before, however large it is. Exact data are fitted exactly. Least
squares would let a single sample that is off by a factor of a hundred decide.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
GAIN = 0.8
"""A second coefficient must explain at least a fifth of the deviations. Otherwise the noise of
samples of nearly one shape is explained by coefficients that are absurd for other shapes."""
CAP = 0.4
"""Deviations beyond this count alike."""
EXACT = 1e-9
TINY = 1e-300


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement ``y`` (positive) at ``u`` and ``v`` (not negative, not both 0) of a positive
    ``weight``."""

    u: float
    v: float
    y: float
    weight: float


@dataclass(frozen=True, slots=True)
class Fit:
    """``a`` and ``b`` are at least 0; ``spread``: weighted mean of the relative deviations of the
    samples."""

    a: float
    b: float
    spread: float


def fit_coefficients(samples: Sequence[Sample], alone: str) -> Fit:
    """Fits one or more samples. ``alone``: "u" or "v", the one that explains samples which do not
    distinguish them.

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
    # Relative, so that the test for a singular matrix does not depend on the size of the samples.
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
"""The cost of a smaller step is dominated by the step, not by its tokens."""
STEPS_HALF_LIFE = 8
"""In steps. An engine's speed changes rarely, while single steps are often disturbed."""
MIN_LOADS = 3
UNKNOWN_SECONDS = 1.0
"""Without an estimate for the tier, a load in progress counts with its age after this long."""
LOADS_HALF_LIFE = 3
"""In loads. After three slow loads a tier counts as slow."""
AGE_HALF_LIFE_SECONDS = 30.0
MAX_AGE_FACTOR = 0.25
"""Lower bound for the weight of old loads: a single recent load never outweighs all of them."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """Seconds to compute tokens a to b of a prompt: ``alpha (b - a) + beta (b^2 - a^2)``.

    The second term is attention: on one H200 with an 8B model a token costs 24 us at 4K and 50 us
    at 64K.
    """

    alpha: float
    beta: float

    def seconds(self, start_tokens: int, end_tokens: int) -> float:
        """Estimated seconds for tokens ``start_tokens`` to ``end_tokens``."""
        return (end_tokens - start_tokens) * (self.alpha + self.beta * (end_tokens + start_tokens))

    @property
    def usable(self) -> bool:
        """Whether both are finite, not negative and not both zero."""
        finite = math.isfinite(self.alpha) and math.isfinite(self.beta)
        return finite and self.alpha >= 0 and self.beta >= 0 and self.alpha + self.beta > 0


@dataclass(frozen=True, slots=True)
class PrefixCost:
    """Where the keys of a promotion lie in their prompt, and what computing them costs.

    ``ends[i]``: tokens of the prompt up to the end of key i; the first key begins at
    ``start_tokens``. ``prefill``: None without an estimate. ``waited_seconds``: time since the
    request's first lookup. ``whole``: the keys are of use together only. ``copy_seconds``: how
    long the engine takes to copy one key to its GPU; 0 if it must not load keys before all have
    arrived.
    """

    start_tokens: int
    ends: tuple[int, ...]
    prefill: Prefill | None = None
    waited_seconds: float = 0.0
    whole: bool = False
    copy_seconds: float = 0.0

    def is_valid(self, keys: int) -> bool:
        """Whether this describes ``keys`` keys. It comes from an engine, and is not trusted."""
        if len(self.ends) != keys or (self.prefill is not None and not self.prefill.usable):
            return False
        rising = all(a < b for a, b in pairwise((self.start_tokens, *self.ends)))
        times = (self.waited_seconds, self.copy_seconds)
        return rising and self.start_tokens >= 0 and all(0 <= each < math.inf for each in times)


class PrefillModel:
    """Fits ``Prefill`` to engine steps. The first estimate after a step takes about 0.3 ms."""

    __slots__ = ("_current", "_steps")

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=WINDOW)
        self._current: Prefill | None = None

    def observe(self, spans: Sequence[tuple[int, int]], seconds: float) -> None:
        """One engine step that took ``seconds`` to compute these (start, end) token spans and
        little else."""
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
            # Larger steps weigh more: the fixed cost of a step is a smaller part of them.
            samples = [
                Sample(linear, quadratic, seconds, linear * 0.5 ** (age / STEPS_HALF_LIFE))
                for age, (linear, quadratic, seconds) in enumerate(reversed(self._steps))
            ]
            found = fit_coefficients(samples, "u")
            self._current = Prefill(found.a, found.b)
        return self._current


@dataclass(frozen=True, slots=True)
class TierEstimate:
    """``latency_seconds``: per round of parallel reads. ``bytes_per_second``: of the tier as a
    whole. ``spread``: mean relative deviation of the measurements from the estimate."""

    latency_seconds: float
    bytes_per_second: float
    spread: float = 0.0

    def seconds(self, rounds: int, size_bytes: float) -> float:
        """Time for ``size_bytes`` in ``rounds`` rounds of parallel reads."""
        return self.latency_seconds * rounds + size_bytes / self.bytes_per_second


IMMEDIATE = TierEstimate(0.0, math.inf)
"""A tier that costs nothing: RAM, and a tier without measurements."""


class Batch:
    """Reads of one tier that were requested together, at most ``parallel`` at a time. ``open``: in
    progress."""

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
        """Reads and bytes that the tier had delivered when the batch started."""
        self.last = delivered
        """The same when its latest read ended."""
        self.reads = 0
        self.bytes = 0
        self.open = 0
        self.open_bytes = 0


class TierModel:
    """Fits ``TierEstimate`` to batches of reads: the time until a batch was complete, and what the
    tier delivered in that time, reads of other batches included.

    A read that was given up counts with its actual end, however late. A batch that takes longer
    than expected counts with its age while it is in progress, so a tier that hangs looks slower
    every second; one that returns nothing at all does so at once.
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

    # Measurements.

    def begin(self, now: float, parallel: int = 0) -> Batch:
        """Starts a batch of reads, at most ``parallel`` at a time (0: as many as the tier has
        threads)."""
        batch = Batch(now, min(parallel, self.threads) or self.threads, self._delivered)
        self._batches.append(batch)
        self.last_began_at = now
        return batch

    def submitted(self, batch: Batch, size_bytes: int) -> None:
        """Adds a read to the batch, when it is submitted."""
        batch.reads += 1
        batch.bytes += size_bytes
        batch.open += 1
        batch.open_bytes += size_bytes
        self.queued_reads += 1
        self.queued_bytes += size_bytes

    def mark_hung(self, size_bytes: int) -> None:
        """A read hangs: no other read waits behind it.

        Its batch continues to count with its age.
        """
        self.queued_reads -= 1
        self.queued_bytes -= size_bytes

    def ended(
        self, batch: Batch, now: float, size_bytes: int, good: bool, hung: bool = False
    ) -> None:
        """A read has returned. A failure counts as a measurement only if it took long."""
        if hung:
            self.queued_reads += 1
            self.queued_bytes += size_bytes
        if not good and not self._is_late(batch, now):
            self.withdrawn(batch, size_bytes)
            return
        self._close_read(batch, size_bytes)
        self._delivered = (self._delivered[0] + 1, self._delivered[1] + size_bytes)
        batch.ended_at, batch.last = now, self._delivered
        self._last_ended_at = max(self._last_ended_at, now)

    def withdrawn(self, batch: Batch, size_bytes: int) -> None:
        """A read was revoked before it started."""
        self._close_read(batch, size_bytes)
        batch.reads -= 1
        batch.bytes -= size_bytes

    def _close_read(self, batch: Batch, size_bytes: int) -> None:
        batch.open -= 1
        batch.open_bytes -= size_bytes
        self.queued_reads -= 1
        self.queued_bytes -= size_bytes
        if batch.open == 0:
            self._stale = True

    # Estimates.

    def settled(self, now: float) -> TierEstimate | None:
        """The estimate from completed batches; None before ``MIN_LOADS`` of them. Takes 0.3 ms
        after a batch has ended."""
        if self._stale:
            self._settled, self._stale = self._fit(now, ()), False
        return self._settled

    def estimate(self, now: float) -> TierEstimate | None:
        """The same, including batches that are late at ``now``."""
        self.settled(now)
        late = [batch for batch in self._batches if batch.open and self._is_late(batch, now)]
        if not late:
            return self._settled
        idle_seconds = now - max(late[0].began_at, self._last_ended_at)
        if idle_seconds <= self._allowed(late[0]):
            return self._fit(now, late)
        # No read has ended since then. The next read is expected to wait as long again.
        if self._settled is None:
            return TierEstimate(idle_seconds, math.inf)
        return replace(
            self._settled, latency_seconds=max(self._settled.latency_seconds, idle_seconds)
        )

    def _is_late(self, batch: Batch, now: float) -> bool:
        return now - batch.began_at > self._allowed(batch)

    def _allowed(self, batch: Batch) -> float:
        """How long a batch may take before it is late."""
        return (
            UNKNOWN_SECONDS if self._settled is None else self._settled.seconds(*self._work(batch))
        )

    def _work(self, batch: Batch) -> tuple[int, int]:
        """Rounds and bytes that the tier delivers from the start of the batch to its end."""
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
