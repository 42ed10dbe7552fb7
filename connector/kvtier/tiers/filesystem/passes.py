"""When the directory is walked, how fast, and what follows from it.

A janitor's passes count. A count in which anything could not be read is thrown away: what it missed would be missing in the books.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Container
from pathlib import Path

from kvtier.tiers.base import OnChange, TierLimits
from kvtier.tiers.filesystem.election import BEAT_SECONDS
from kvtier.tiers.filesystem.index import Index
from kvtier.tiers.filesystem.janitor import Janitor, LeadershipLostError
from kvtier.tiers.filesystem.walker import ABANDONED_SECONDS, Pass

_log = logging.getLogger("kvtier.tiers.filesystem")

REFRESH_SECONDS = 10.0
"""Between two refreshes of a directory that other processes write, and between two counts that are wanted. A pass takes at most a quarter of
the time."""
RECOUNT_SECONDS = 3600.0
"""Between two counts of a directory that only this process writes."""
ENTRIES_PER_SECOND = 5_000
"""Pace of a refresh: a few per cent of one core on a local disk, and what an NFS server answers beside its work."""
_STEP_ENTRIES = 2_000
TOUCH_SECONDS = 3600.0
"""A hit refreshes a file's time at most this often: enough for the order of eviction to outlive a restart, cheap enough for NFS."""
MIN_RETENTION_SECONDS = 2 * TOUCH_SECONDS
"""Use is noted no more often than ``TOUCH_SECONDS``: a shorter retention would remove what is in use."""


class Passes:
    """One directory's passes, one at a time; the keeper's. Methods raise ``OSError``.

    ``janitor``: the janitor if it is this process, at the moment of asking. ``server_time``: the file system's clock, 0 if not known.
    ``in_use``: namespaces of engines of this process.
    """

    def __init__(
        self,
        root: Path,
        index: Index,
        limits: Callable[[], TierLimits],
        on_change: OnChange,
        clock: Callable[[], float],
        *,
        shared: bool,
        janitor: Callable[[], Janitor | None],
        server_time: Callable[[], float],
        in_use: Callable[[], Container[str]] = frozenset,
    ) -> None:
        self._root = root
        self._index = index
        self._limits = limits
        self._on_change = on_change
        self._clock = clock
        self._shared = shared
        self._janitor = janitor
        self._server_time = server_time
        self._in_use = in_use
        self._current: Pass | None = None
        self._counter: Janitor | None = None
        self._due_at = self._recount_at = float("-inf")
        self._paced_at = self._started_at = 0.0
        self._previous_at = float("inf")

    def whole(self, meanwhile: Callable[[], None]) -> Pass:
        """A whole pass at full speed. ``meanwhile`` is called about every ``BEAT_SECONDS``."""
        current = self._begin()
        last = self._clock()
        while not self._step(current, _STEP_ENTRIES):
            if self._clock() - last >= BEAT_SECONDS:
                last = self._clock()
                meanwhile()
                if self._counter is not self._janitor():
                    current = self._begin()
        return current

    def some(self, now: float) -> None:
        """The part of a pass that is due at ``now``, if any."""
        janitor = self._janitor()
        if self._current is None or self._counter is not janitor:
            wanted = janitor is not None and (janitor.recount_wanted or self._index.wants_pass)
            due = now >= (self._recount_at if wanted else self._due_at)
            if due and (self._shared or janitor is not None):
                self._begin()
            return
        budget = int((now - self._paced_at) * ENTRIES_PER_SECOND)
        if budget > 0:
            self._paced_at = now
            self._step(self._current, min(budget, ENTRIES_PER_SECOND))

    def _begin(self) -> Pass:
        self._abort()
        janitor = self._counter = self._janitor()
        if janitor is not None:
            janitor.begin_count()
        now = self._server_time() or time.time()
        counted = None if janitor is None else self._counted
        self._current = Pass(
            self._root, self._index, self._on_change, now, counted, self._previous_at, self._shared
        )
        self._previous_at = now
        self._started_at = self._paced_at = self._clock()
        return self._current

    def _abort(self) -> None:
        if self._current is not None and self._counter is not None:
            self._counter.abort_count()
        self._current = None

    def _counted(self, size_bytes: int, position: tuple[str, str, str]) -> None:
        if self._counter is not None:
            self._counter.ledger.saw(size_bytes)
            self._counter.position = position

    def _step(self, current: Pass, budget: int) -> bool:
        try:
            ended = current.step(budget)
        except OSError:
            self._abort()
            raise
        if not ended:
            return False
        now = self._clock()
        took = now - self._started_at
        self._recount_at = now + max(REFRESH_SECONDS, 3 * took)
        self._due_at = now + max(REFRESH_SECONDS if self._shared else RECOUNT_SECONDS, 3 * took)
        self._index.set_extra(current.result.other_bytes)
        janitor, unreadable = self._counter, current.result.report.unreadable
        if not unreadable:
            self._index.end_pass()
        if janitor is not None and unreadable:
            _log.warning(
                "%s: %d names could not be read; the count does not hold", self._root, unreadable
            )
            self._abort()
            janitor.counted_at = now
        elif janitor is not None:
            janitor.end_count(now)
        self._current = None
        if janitor is not None and not unreadable:
            self._retire(janitor, current)
        return True

    def _retire(self, janitor: Janitor, current: Pass) -> None:
        """Removes namespaces that no engine has used for the retention, and what killed processes left of their probes."""
        horizon = current.began_at - max(self._limits().retention_seconds, MIN_RETENTION_SECONDS)
        for namespace, newest in current.result.newest.items():
            # Whatever the clocks say: one that jumps ahead by days must not take with it what an engine here is using.
            if newest < horizon and namespace not in self._in_use():
                _log.info(
                    "%s: namespace %s was not used since its retention", self._root, namespace
                )
                try:
                    janitor.remove_namespace(namespace)
                except LeadershipLostError:
                    # The keeper finds out when it serves next; what is left is the successor's.
                    return
        with contextlib.suppress(OSError), os.scandir(self._root) as entries:
            for entry in entries:
                old = current.began_at - ABANDONED_SECONDS
                if entry.name.startswith(".probe-") and entry.stat().st_mtime < old:
                    os.unlink(entry.path)
