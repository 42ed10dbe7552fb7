"""One call on an I/O thread, which its owner can take back for as long as no thread has begun it.

Whether a slot may be touched by a call is decided here: a job that was revoked never touches anything, a job that has
begun owns its memory until it returns.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtier.store.contract import Clock, IoExecutor

_SKIPPED = object()

Finished = Callable[[object, BaseException | None], None]


class Job:
    """A submitted call. ``started_at`` and ``finished_at`` are written by the thread that makes it, and only read
    elsewhere."""

    __slots__ = ("_clock", "_finished", "_right_to_begin", "finished_at", "started_at", "submitted_at", "work")

    def __init__(self, clock: Clock, work: Callable[[], object], finished: Finished) -> None:
        self.submitted_at = clock()
        self.started_at: float | None = None
        self.finished_at: float | None = None
        self._clock = clock
        self.work = work
        self._finished = finished
        # list.pop is atomic: of the thread that wants to begin and the owner that wants to revoke, exactly one gets the
        # item.
        self._right_to_begin = [True]

    def submit(self, io: IoExecutor, lane: str) -> Job:
        """Hands the call to ``lane``. Owner's thread."""
        io.submit(lane, self, self._done)
        return self

    def begin(self) -> bool:
        """The thread that makes the call: whether it may. Executors call the job itself; only tests that let a call
        hang in the middle begin it separately."""
        if not self._take():
            return False
        self.started_at = self._clock()
        return True

    def revoke(self) -> bool:
        """Owner's thread: True if the call had not begun; then it never will, and ``finished`` is not called."""
        return self._take()

    def _take(self) -> bool:
        try:
            self._right_to_begin.pop()
        except IndexError:
            return False
        return True

    def __call__(self) -> object:
        """Makes the call, unless it was revoked."""
        if self.started_at is None and not self.begin():
            return _SKIPPED
        try:
            return self.work()
        finally:
            self.finished_at = self._clock()

    def _done(self, result: object, error: BaseException | None) -> None:
        if result is _SKIPPED:
            return
        if self.started_at is None and not self._take():
            return
        self._finished(result, error)

    def seconds(self, now: float) -> float:
        """How long the call has been running, or ran; 0 if it has not begun."""
        if self.started_at is None:
            return 0.0
        return (now if self.finished_at is None else self.finished_at) - self.started_at
