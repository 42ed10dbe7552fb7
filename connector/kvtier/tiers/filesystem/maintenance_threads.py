"""The threads of directory maintenance, and who does which of its work.

Three threads per tier, so that a call of the file system that hangs stops no other work than its
own: one renews leases and answers grants, one evicts, one scans. None of them holds a lock while
it does I/O. A ``Turn`` says who does one kind of work; a thread that stores takes none, and only
waits for its bytes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Protocol

from kvtier.errors import TierError

_log = logging.getLogger("kvtier.tiers.filesystem")
_STOP_SECONDS = 2.0


class Turn:
    """One kind of work, which one thread does at a time. Its lock guards the owner only."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken = False

    def take(self, seconds: float | None) -> bool:
        """Takes the turn, after at most ``seconds`` (None: however long it takes)."""
        end = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while self._taken:
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(left)
            self._taken = True
            return True

    def give(self) -> None:
        """Ends the turn."""
        with self._changed:
            self._taken = False
            self._changed.notify()

    @contextlib.contextmanager
    def taken(self, seconds: float | None) -> Iterator[bool]:
        """Takes the turn for the block; False if it could not."""
        if not self.take(seconds):
            yield False
            return
        try:
            yield True
        finally:
            self.give()


class MaintenanceWork(Protocol):
    """What the threads do. Every method may block and raises ``TierError``."""

    @property
    def stopping(self) -> bool:
        """Whether the tier was closed."""
        ...

    def pause_seconds(self, kind: str) -> float:
        """How long a kind of work may wait for its next round."""
        ...

    def run_leases(self) -> None:
        """Renews leases, requests and answers grants."""
        ...

    def run_evictions(self) -> None:
        """Evicts what grants wait for, and down to the watermarks."""
        ...

    def run_scans(self) -> None:
        """Scans what is due."""
        ...

    def release(self) -> None:
        """Returns grants and leadership."""
        ...

    def note_failure(self, error: TierError) -> None:
        """A round has failed."""
        ...


_KINDS = ("leases", "evictions", "scans")


class MaintenanceThreads:
    """The threads of one directory's maintenance. They keep it not alive: when a tier was dropped
    without being closed, they end."""

    def __init__(self, work: MaintenanceWork) -> None:
        self._work = weakref.ref(work)
        self._wake = {kind: threading.Event() for kind in _KINDS}
        self._threads: dict[str, threading.Thread] = {}

    @property
    def running(self) -> bool:
        """Whether the threads do the work."""
        thread = self._threads.get("leases")
        return thread is not None and thread.is_alive()

    def start(self) -> None:
        """Starts the threads that do not run."""
        for kind in _KINDS:
            thread = self._threads.get(kind)
            if thread is not None and thread.is_alive():
                continue
            name = "kvtier-file-tier" if kind == "leases" else f"kvtier-file-tier-{kind}"
            self._threads[kind] = threading.Thread(
                target=_loop, args=(self._work, kind, self._wake[kind]), name=name, daemon=True
            )
            self._threads[kind].start()

    def wake(self, *kinds: str) -> None:
        """Makes threads run at once."""
        for kind in kinds:
            self._wake[kind].set()

    def stop(self) -> None:
        """The work is stopping. Waits for the leases, for a limited time."""
        self.wake(*_KINDS)
        if "leases" in self._threads:
            self._threads["leases"].join(_STOP_SECONDS)


def _loop(reference: weakref.ref[MaintenanceWork], kind: str, wake: threading.Event) -> None:
    last_error = ""
    while True:
        work = reference()
        if work is None:
            return
        pause = work.pause_seconds(kind)
        del work
        wake.wait(pause)
        wake.clear()
        work = reference()
        if work is None:
            return
        try:
            if work.stopping:
                if kind == "leases":
                    work.release()
                return
            _run(work, kind)
            last_error = ""
        except TierError as error:
            work.note_failure(error)
            if str(error) != last_error:
                _log.warning("%s", error)
            last_error = str(error)
        except Exception as error:  # noqa: BLE001
            # A bug must not end the thread that renews the leases: other processes would consider
            # this one dead.
            if repr(error) != last_error:
                _log.exception("directory maintenance failed and will be retried")
            last_error = repr(error)
        del work


def _run(work: MaintenanceWork, kind: str) -> None:
    if kind == "leases":
        work.run_leases()
    elif kind == "evictions":
        work.run_evictions()
    else:
        work.run_scans()
