"""Follows ``live.json``: each value is validated on its own, and a rejected one keeps its last
valid value.

The file is polled, because notification does not work on every file system: a ConfigMap mount swaps
the symlink ``..data``, and NFS reports no changes of other hosts. Polling runs on its own thread,
because a call into a dead mount does not return.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from kvtier.config.loader import (
    LIVE_FILE,
    STRUCTURAL_FILE,
    RejectedValue,
    load_live,
    load_structural,
)
from kvtier.config.models import Live, Structural
from kvtier.errors import ConfigurationError

POLL_SECONDS = 1.0
_log = logging.getLogger("kvtier.tierd")
_Stamp = tuple[int, int, int, int] | None


class LiveConfigWatcher:
    """The live document of one topology directory.

    Any thread may read the attributes: each is replaced as a whole. ``poll`` is called by the
    watcher's thread, or before ``start``.
    """

    def __init__(
        self, directory: Path, structural: Structural, watch_structural: bool = False
    ) -> None:
        self._structural_path = directory / STRUCTURAL_FILE if watch_structural else None
        self._structural_stamp: _Stamp = None
        self.structural_changed = ""
        """How the structural file differs from the document in effect; empty: it does not."""
        self._path = directory / LIVE_FILE
        self._structural = structural
        self._stamp: _Stamp = None
        self._retry = False
        self._logged: set[RejectedValue] = set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.live: Live = structural.live
        """The values in effect."""
        self.refusals: tuple[RejectedValue, ...] = ()
        """Values of the current file that were rejected."""
        self.refused_total = 0

    def start(self) -> None:
        """Starts polling."""
        self._thread = threading.Thread(target=self._run, name="kvtier-live", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops polling. Does not wait: the thread may hang in a dead mount."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            self.poll()

    def poll(self) -> bool:
        """Reads the file if it changed since the last call; True if values changed."""
        # The stamp is taken before reading: a file that is replaced in between is read again next
        # time.
        self._poll_structural()
        stamp = self._stamp_of(self._path)
        if stamp == self._stamp and not self._retry:
            return False
        before = self.live
        live, refusals = load_live(self._path, before, self._structural)
        whole = live is before and any(refusal.field == LIVE_FILE for refusal in refusals)
        if not (whole and self._retry and stamp == self._stamp):
            self._report(refusals)
        # A file that could not be read may become readable without a new stamp.
        self._retry = whole and stamp is not None
        self._stamp = stamp
        self.live = live
        if live == before:
            return False
        _log.info("applied live values, generation %d", live.generation)
        return True

    def _poll_structural(self) -> None:
        """Reports a changed structural document, which takes effect only in a new pod."""
        if self._structural_path is None:
            return
        stamp = self._stamp_of(self._structural_path)
        if stamp == self._structural_stamp or stamp is None:
            return
        self._structural_stamp = stamp
        changed = ""
        try:
            if load_structural(self._structural_path) != self._structural:
                changed = "the structural document has changed; the change applies to new pods only"
        except ConfigurationError as error:
            changed = f"the structural document has changed and is invalid: {error}"
        if changed and changed != self.structural_changed:
            _log.warning("%s", changed)
        self.structural_changed = changed

    @staticmethod
    def _stamp_of(path: Path) -> _Stamp:
        try:
            status = os.stat(path)
        except OSError:
            return None
        return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size

    def _report(self, refusals: list[RejectedValue]) -> None:
        for refusal in refusals:
            if refusal not in self._logged:
                _log.warning("%s: %s", self._path, refusal)
        # Bounded by the size of a document.
        self._logged = set(refusals)
        self.refusals = tuple(refusals)
        self.refused_total += len(refusals)
