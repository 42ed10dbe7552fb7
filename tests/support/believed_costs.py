"""Lets a real engine believe costs that do not depend on the machine.

The functions run in the process of the engine (``EngineTestbed.drive("call", ...)``).
"""

from __future__ import annotations

from kvtier.engines.vllm.cost_estimates import CopyEstimator, PrefillEstimator
from kvtier.store.cost_model import Prefill

BELIEVE, MEASURE = f"{__file__}:believe", f"{__file__}:measure"
RECOMPUTE_SECONDS, COPY_SECONDS = 1.0, 0.05
"""For each token."""
_measured = (
    PrefillEstimator.estimate,
    CopyEstimator.seconds_per_token,
    CopyEstimator.beats_recompute,
)


def believe() -> None:
    """Recomputing takes very long, and copies take a good while."""
    PrefillEstimator.estimate = (  # type: ignore[method-assign]
        lambda self: Prefill(RECOMPUTE_SECONDS, 0.0)
    )
    CopyEstimator.seconds_per_token = (  # type: ignore[method-assign]
        lambda self, now: COPY_SECONDS
    )
    CopyEstimator.beats_recompute = (  # type: ignore[method-assign]
        lambda self, tokens, recompute_seconds, now: True
    )


def measure() -> None:
    """The engine measures again."""
    (
        PrefillEstimator.estimate,  # type: ignore[method-assign]
        CopyEstimator.seconds_per_token,  # type: ignore[method-assign]
        CopyEstimator.beats_recompute,  # type: ignore[method-assign]
    ) = _measured
