"""Errors that nobody raises on purpose: bugs, in a tier or below it. They cost a miss like every other error, and must be seen."""

from __future__ import annotations

import logging

from kvtier.errors import TierError
from kvtier.store.contract import Clock

REPEAT_SECONDS = 600.0
MAX_KINDS = 64
"""Kinds that are told apart; what comes after that many is only counted."""

_log = logging.getLogger("kvtier.store")


class UnexpectedErrors:
    """Logs each kind (where, type) once with its traceback, and again after ten minutes with how often it came since. Owner's thread
    only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kinds: dict[tuple[str, type[BaseException]], tuple[float, int]] = {}

    def note(self, where: str, error: BaseException) -> None:
        """Logs the error unless it is one of ours, or its kind was logged lately."""
        if isinstance(error, TierError):
            return
        kind, now = (where, type(error)), self._clock()
        known = self._kinds.get(kind)
        if known is None and len(self._kinds) >= MAX_KINDS:
            return
        if known is not None and now - known[0] < REPEAT_SECONDS:
            self._kinds[kind] = (known[0], known[1] + 1)
            return
        since = "" if known is None else f" ({known[1]} more since it was logged last)"
        self._kinds[kind] = (now, 0)
        _log.error("%s: unexpected %s%s", where, type(error).__name__, since, exc_info=error)
