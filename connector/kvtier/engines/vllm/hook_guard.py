"""Keeps the exceptions of hooks from vLLM, which ends the engine if one raises.

An exception turns KVTier off for this engine, for a while and a few times (``RearmTimes``), since
what KVTier knows about requests may be wrong then. The thread that calls the hooks only.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from kvtier.engines.common.rearming import RearmTimes

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")


class HookGuard:
    """The guard around every hook of one connector.

    ``count_error`` is called with the name of a hook that has raised. ``clock``: seconds,
    monotonic.
    """

    def __init__(self, count_error: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._count_error = count_error
        self._clock = clock
        self._times = RearmTimes()
        self.off_reason = ""
        """Why KVTier is off, for a while or until restart; empty while it is in use."""
        self.rearm_at = math.inf
        """When it may be used again."""
        self.errors = 0
        """Exceptions of hooks so far."""

    def guarded(
        self, hook: str, fallback: T, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Returns the result of ``call``, or ``fallback`` if it raises.

        This is the one place that keeps exceptions from vLLM.
        """
        try:
            return call(*args, **kwargs)
        except Exception as error:
            self.errors += 1
            self._count_error(hook)
            if not self.off_reason:
                self.off_reason = f"{hook}: {type(error).__name__}: {error}"
                seconds = self._times.next()
                self.rearm_at = math.inf if seconds is None else self._clock() + seconds
                logger.exception(
                    "KVTier: unexpected error in %s; serving without tiers %s",
                    hook,
                    RearmTimes.describe(seconds),
                )
            return fallback

    def rearm(self, start_over: Callable[[], None]) -> bool:
        """Uses KVTier again some time after an error, without what it was doing then; returns
        whether it is in use again by this call."""
        if not self.off_reason or self._clock() < self.rearm_at:
            return False
        self.rearm_at = math.inf
        self.off_reason = ""
        self.guarded("rearm", None, start_over)
        if self.off_reason:
            return False
        logger.info("KVTier: in use again after an unexpected error")
        return True
