"""Follows ``live.json``: each value is taken or refused by itself, what was refused keeps its last good value.

Polling instead of notification, because what happens below a ConfigMap mount (a symlink ``..data`` is swapped) or on NFS is not
stamp by every notification mechanism, and one look a second costs nothing. On a thread of its own, because a look at a dead mount
does not come back.
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

    The attributes may be read by any thread: each is replaced as a whole. ``poll`` is called by the follower's thread, or
    by a test that has not started it.
    """

    def __init__(
        self, directory: Path, structural: Structural, watch_structural: bool = False
    ) -> None:
        self._structural_path = directory / STRUCTURAL_FILE if watch_structural else None
        self._structural_stamp: _Stamp = None
        self.structural_changed = ""
        """In what the structural document that is there at present is not the one in force; empty: in nothing."""
        self._path = directory / LIVE_FILE
        self._structural = structural
        self._stamp: _Stamp = None
        self._retry = False
        self._logged: set[RejectedValue] = set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.live: Live = structural.live
        """The values in force."""
        self.refusals: tuple[RejectedValue, ...] = ()
        """What the document that is there at present asks for and does not get."""
        self.refused_total = 0

    def start(self) -> None:
        """Begins to follow; what is there already has been read by ``poll``."""
        self._thread = threading.Thread(target=self._run, name="kvtier-live", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends following. Does not wait: the thread may be held by a dead mount."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            self.poll()

    def poll(self) -> bool:
        """Looks at the file, and reads it where it is another one than last time; True if values changed."""
        # The look comes before the reading: a file replaced in between is read again at the next look.
        self._poll_structural()
        stamp = self._stamp_of(self._path)
        if stamp == self._stamp and not self._retry:
            return False
        before = self.live
        live, refusals = load_live(self._path, before, self._structural)
        whole = live is before and any(refusal.field == LIVE_FILE for refusal in refusals)
        if not (whole and self._retry and stamp == self._stamp):
            self._report(refusals)
        # A file that could not be read at all may be readable without looking different.
        self._retry = whole and stamp is not None
        self._stamp = stamp
        self.live = live
        if live == before:
            return False
        _log.info("live values changed: generation %d", live.generation)
        return True

    def _poll_structural(self) -> None:
        """What is structural never changes in a pod's life: a document that does is not followed, and reported."""
        if self._structural_path is None:
            return
        stamp = self._stamp_of(self._structural_path)
        if stamp == self._structural_stamp or stamp is None:
            return
        self._structural_stamp = stamp
        changed = ""
        try:
            if load_structural(self._structural_path) != self._structural:
                changed = "the pod's structural document was changed and is ignored; what is structural comes with a new pod"
        except ConfigurationError as error:
            changed = f"the pod's structural document was changed and is ignored: {error}"
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
        # Bounded by what one document can hold.
        self._logged = set(refusals)
        self.refusals = tuple(refusals)
        self.refused_total += len(refusals)
