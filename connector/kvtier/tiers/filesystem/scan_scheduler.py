"""When a directory is scanned, at which pace, and what follows from a scan.

The leader's scans also count the directory. A count in which some names could not be read is
discarded, because the ledger would lack what it missed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable

from kvtier.tiers.filesystem.directory import TierDirectory
from kvtier.tiers.filesystem.election import HEARTBEAT_SECONDS, LeadershipLostError
from kvtier.tiers.filesystem.janitor import BucketName, Janitor
from kvtier.tiers.filesystem.walker import ABANDONED_SECONDS, DirectoryScan

_log = logging.getLogger("kvtier.tiers.filesystem")

REFRESH_SECONDS = 10.0
"""Between two scans of a shared directory by its leader, or by a process to which not everything is
announced, and between two requested counts. A scan takes at most a quarter of the time."""
RECOUNT_SECONDS = 3600.0
"""Between two counts of a directory that only this process writes, and between two scans of one
whose changes are announced."""
ENTRIES_PER_SECOND = 5_000
"""Pace of a scan in the background: a few per cent of one core on a local disk, and what an NFS
server answers beside its other work."""
VERIFY_ENTRIES_PER_SECOND = 20_000
"""Pace of the scan that verifies a saved index: most of a core would delay tierd's loop."""
_STEP_ENTRIES = 2_000
TOUCH_SECONDS = 3600.0
"""A hit refreshes a file's time at most this often: enough for the order of eviction to survive a
restart, and cheap enough for NFS."""
MIN_RETENTION_SECONDS = 2 * TOUCH_SECONDS
"""Use is recorded no more often than ``TOUCH_SECONDS``. A shorter retention would remove namespaces
that are in use."""


class ScanScheduler:
    """The scans of one directory, one at a time. One thread at a time; methods raise ``OSError``.

    ``janitor``: returns the janitor if this process is the leader now. ``server_time``: returns the
    file system's clock, 0 if it is not known.
    """

    def __init__(
        self,
        directory: TierDirectory,
        janitor: Callable[[], Janitor | None],
        server_time: Callable[[], float],
    ) -> None:
        self._directory = directory
        self._index = directory.index
        self._clock = directory.clock
        self._janitor = janitor
        self._server_time = server_time
        self._scan: DirectoryScan | None = None
        self._counter: Janitor | None = None
        """The janitor for which the current scan counts."""
        self.verifying = False
        """Whether the index was restored from a saved one, and no scan has ended since."""
        self._losses = 0
        self._scan_due_at = self._recount_due_at = float("-inf")
        self._paced_at = self._started_at = 0.0
        self._previous_at = float("inf")

    def scan_completely(self, on_heartbeat: Callable[[], None]) -> DirectoryScan:
        """A complete scan at full speed. ``on_heartbeat`` is called about every
        ``HEARTBEAT_SECONDS``.
        """
        scan = self._begin()
        last = self._clock()
        while not self._step(scan, _STEP_ENTRIES):
            if self._clock() - last >= HEARTBEAT_SECONDS:
                last = self._clock()
                on_heartbeat()
                if self._counter is not self._janitor():
                    scan = self._begin()
        return scan

    def scan_due(self, now: float) -> None:
        """The part of a scan that is due at ``now``, if any."""
        janitor = self._janitor()
        if self._scan is None or self._counter is not janitor:
            if janitor is not None:
                early = (
                    self._directory.shared or janitor.recount_requested or self._index.wants_scan
                )
            else:
                # What announcements tell needs no scan.
                early = not self._directory.announcements.complete
            due = now >= (self._recount_due_at if early else self._scan_due_at)
            if due and (self._directory.shared or janitor is not None):
                self._begin()
            return
        pace = VERIFY_ENTRIES_PER_SECOND if self.verifying else ENTRIES_PER_SECOND
        budget = int((now - self._paced_at) * pace)
        if budget > 0:
            self._paced_at = now
            self._step(self._scan, min(budget, ENTRIES_PER_SECOND))

    def _begin(self) -> DirectoryScan:
        self._abort()
        janitor = self._counter = self._janitor()
        if janitor is not None:
            janitor.begin_count()
        self._losses = self._directory.announcements.losses
        now = self._server_time() or time.time()
        on_counted = None if janitor is None else self._count
        self._scan = DirectoryScan(self._directory, now, self._previous_at, on_counted)
        self._previous_at = now
        self._started_at = self._paced_at = self._clock()
        return self._scan

    def _abort(self) -> None:
        if self._scan is not None and self._counter is not None:
            self._counter.abort_count()
        self._scan = None

    def _count(self, size_bytes: int, bucket: BucketName) -> None:
        if self._counter is not None:
            self._counter.count_bucket(size_bytes, bucket)

    def _step(self, scan: DirectoryScan, budget: int) -> bool:
        try:
            ended = scan.step(budget)
        except OSError:
            self._abort()
            raise
        if ended:
            self._end(scan)
        return ended

    def _end(self, scan: DirectoryScan) -> None:
        now = self._clock()
        took = now - self._started_at
        self._recount_due_at = now + max(REFRESH_SECONDS, 3 * took)
        self._scan_due_at = now + max(RECOUNT_SECONDS, 3 * took)
        self._index.set_extra(scan.result.other_bytes)
        self._scan = None
        self.verifying = False
        janitor, unreadable = self._counter, scan.result.report.unreadable
        if not unreadable:
            self._index.end_scan()
            self._directory.announcements.repaired(self._losses)
        if janitor is not None and unreadable:
            _log.warning(
                "%s: discarded the count of the directory: cannot read %d names",
                self._directory.root,
                unreadable,
            )
            janitor.discard_count(now)
        elif janitor is not None:
            janitor.end_count(now)
            self._remove_expired(janitor, scan)

    def _remove_expired(self, janitor: Janitor, scan: DirectoryScan) -> None:
        """Removes namespaces whose retention has passed, and probe files of killed processes."""
        root = self._directory.root
        retention = max(self._directory.limits().retention_seconds, MIN_RETENTION_SECONDS)
        for namespace, newest in scan.result.newest.items():
            # A clock that jumps ahead by days must not remove what an engine of this process uses.
            expired = newest < scan.started_at - retention
            if expired and namespace not in self._directory.in_use():
                _log.info(
                    "%s: removing namespace %s: not used within its retention", root, namespace
                )
                try:
                    janitor.remove_namespace(namespace)
                except LeadershipLostError:
                    # The next round of maintenance notices; the successor removes the rest.
                    return
        with contextlib.suppress(OSError), os.scandir(root) as entries:
            for entry in entries:
                abandoned_before = scan.started_at - ABANDONED_SECONDS
                if entry.name.startswith(".probe-") and entry.stat().st_mtime < abandoned_before:
                    os.unlink(entry.path)
