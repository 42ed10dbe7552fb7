"""Makes KVTier's words appear among the engine's: vLLM gives handlers to its own logger only."""

from __future__ import annotations

import logging


def adopt() -> None:
    """Lends vLLM's handlers and level to the ``kvtier`` logger, unless somebody configured that, or the root logger. Idempotent."""
    ours, theirs = logging.getLogger("kvtier"), logging.getLogger("vllm")
    if ours.handlers or logging.getLogger().handlers or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.getEffectiveLevel())
    ours.propagate = False
