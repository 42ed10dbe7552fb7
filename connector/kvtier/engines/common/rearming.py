"""What KVTier does after an unexpected error: it is off for a while, a few times at most.

``RearmTimes`` says for how long. The connector's guard asks it for errors of hooks, and
``CopyFailures`` for errors of a rank's copies. After one of those nothing is copied, and the
session is given up, so that tierd closes the engine, and no other rank and no scheduler side counts
on this one. Then the transfer thread attaches as after a loss of tierd. If the device cannot be
synchronized, or the errors go on, nothing is copied until the engine restarts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.engines.common.worker_loads import WorkerLoads
from kvtier.engines.common.worker_state import RankContext, WorkerOutbox
from kvtier.engines.common.worker_stores import WorkerStores

logger = logging.getLogger(__name__)

REARM_SECONDS = (10.0, 60.0, 360.0)
"""How long KVTier is off after each unexpected error. After one more it is off until restart."""


class RearmTimes:
    """Counts the errors of one side of an engine. For one thread."""

    def __init__(self) -> None:
        self._errors = 0

    def next(self) -> float | None:
        """Counts an error; returns for how many seconds KVTier is off, None: until restart."""
        times = REARM_SECONDS
        seconds = times[self._errors] if self._errors < len(times) else None
        self._errors += 1
        return seconds

    @staticmethod
    def describe(seconds: float | None) -> str:
        """Returns ``seconds``, as ``next`` returned them, for a log line."""
        return "until restart" if seconds is None else f"for {seconds:g} s"


@dataclass(frozen=True, slots=True)
class OpenCopies:
    """The copies of a rank that have not ended.

    ``lock`` guards ``loads``, ``stores``, ``outbox`` and the context's ``engine`` and ``shards``.
    """

    context: RankContext
    lock: threading.Lock
    loads: WorkerLoads
    stores: WorkerStores
    outbox: WorkerOutbox


class CopyFailures:
    """The unexpected errors of a rank's copies.

    ``fail`` and ``error``: any thread. The rest: the transfer thread, without the lock.
    ``drop_session`` gives up the session with tierd, for a reason. ``sleep`` waits for so many
    seconds, and returns True at once when the thread must end.
    """

    def __init__(
        self,
        copies: OpenCopies,
        drop_session: Callable[[str], None],
        sleep: Callable[[float], bool],
    ) -> None:
        self._copies = copies
        self._context = copies.context
        self._counters = copies.context.counters
        self._drop_session = drop_session
        self._sleep = sleep
        self._times = RearmTimes()
        self.error: Exception | None = None
        """The last error, while it keeps the rank from copying."""

    @property
    def reason(self) -> str:
        """Why nothing is copied, for a while or until restart; empty if copies are possible."""
        error = self.error
        return "" if error is None else f"copies failed: {error}"

    def fail(self, error: Exception) -> None:
        """No hook submits anything from now on. The caller holds the lock."""
        self.error = error
        self._context.completions.epoch = 0

    def rearm(self, error: Exception) -> bool:
        """Ends what is open, and waits until copies are possible again.

        Returns False if they are not: until restart, or because the device cannot be synchronized.
        When the thread must end it returns True at once.
        """
        self._counters.add("thread_failures")
        seconds = self._times.next()
        logger.error(
            "KVTier: serving without tiers %s: copies failed: %s",
            RearmTimes.describe(seconds),
            error,
            exc_info=error,
        )
        self._give_up(error)
        if seconds is None or not self._end_open():
            return False
        ends = self._sleep(seconds)
        with self._copies.lock:
            self.error = None
        if not ends:
            self._counters.add("thread_rearms")
            logger.info("KVTier: in use again after copies failed")
        return True

    def stop(self, error: Exception) -> None:
        """Nothing is copied until restart: ``error`` came from where none was expected."""
        self._counters.add("thread_failures")
        logger.error("KVTier: serving without tiers until restart: %s", error, exc_info=error)
        self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        with self._copies.lock:
            self.fail(error)
        self._drop_session(f"copies failed: {error}")

    def _end_open(self) -> bool:
        """Ends what is open, as failed; returns False if the device cannot be synchronized."""
        copies = self._copies
        try:
            self._context.engine.wait_idle()
            with copies.lock:
                self._context.engine.synchronize()
                copies.loads.abandon("off")
                copies.stores.drop_all()
                copies.outbox.clear()
                self._context.shards.clear()
        except Exception as error:  # ``abandon`` reports what is open
            self._counters.add("copy_errors")
            logger.exception("KVTier: cannot end copies: %s", error)
            return False
        return True

    def abandon(self) -> None:
        """Reports what is open when the thread ends: the engine waits for it without a time limit.

        If copies still run, the device has failed.
        """
        copies = self._copies
        try:
            self._context.engine.wait_idle()
        except Exception as error:  # the reports below must go out in any case
            self._counters.add("copy_errors")
            logger.exception("KVTier: cannot synchronize the device: %s", error)
        with copies.lock:
            try:
                copies.loads.abandon("off")
            finally:
                copies.stores.drop_all()
