"""One call on an I/O thread, which its owner can take back for as long as no thread has begun it.

Whether a slot may be touched by a call is decided here: a job that was revoked never touches anything, a job that has
begun owns its memory until it returns.

The executor of real life: daemon threads, a pool per lane.

A call that hangs keeps its thread, and nothing else: other lanes have their own, the owner never waits, and a process
exits without joining. Threads start when there is something to do, up to the lane's number, and end with the executor.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue

from kvtier.errors import TierUnavailableError
from kvtier.store.types import Clock, IoExecutor

_SKIPPED = object()
Finished = Callable[[object, BaseException | None], None]


class IoCall:
    """A submitted call. ``started_at`` and ``finished_at`` are written by the thread that makes it, and only read
    elsewhere."""

    __slots__ = (
        "_clock",
        "_finished",
        "_right_to_begin",
        "finished_at",
        "started_at",
        "submitted_at",
        "work",
    )

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

    def submit(self, io: IoExecutor, lane: str) -> IoCall:
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


MAX_QUEUED = 65_536
"""Calls that wait per lane. The store keeps far below: each call has a slot, and each lane its own bound."""
Call = Callable[[], object]
Done = Callable[[object, BaseException | None], None]


class _Lane:
    """One pool. ``ready`` guards everything here."""

    def __init__(self, name: str, threads: int) -> None:
        self.name = name
        self.max_threads = threads
        self.ready = threading.Condition()
        self.queue: deque[tuple[Call, Done]] = deque()
        self.threads = 0
        self.idle = 0
        self.running = 0
        self.closed = False


class ThreadExecutor:
    """Runs calls on threads and hands their results to the owner.

    ``lanes``: how many threads each may have; a lane that is not named has one. ``wake``: called on an I/O thread when
    something has finished since the last ``collect``; without it, ``fileno`` can be polled instead.
    """

    def __init__(self, lanes: Mapping[str, int], wake: Callable[[], None] | None = None) -> None:
        self._sizes = dict(lanes)
        self._lanes: dict[str, _Lane] = {}
        self._finished: SimpleQueue[tuple[Done, object, BaseException | None]] = SimpleQueue()
        self._woken = threading.Event()
        self._wake = wake
        self._closed = False
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Readable while something waits for ``collect``."""
        return self._event_fd

    def submit(self, lane: str, call: Call, done: Done) -> None:
        """Runs ``call`` on a thread of ``lane``. Owner's thread."""
        pool = self._lane(lane)
        with pool.ready:
            if self._closed or len(pool.queue) >= MAX_QUEUED:
                reason = (
                    "the executor is closed" if self._closed else f"{MAX_QUEUED} calls are waiting"
                )
                self._complete(done, None, TierUnavailableError(f"{lane}: {reason}"))
                return
            pool.queue.append((call, done))
            pool.ready.notify()
            # A thread that was notified counts as idle until it runs, so what waits is compared with all that are idle: a call must
            # not wait behind another one, which may hang, while the lane has threads left.
            if len(pool.queue) > pool.idle and pool.threads < pool.max_threads:
                self._start_thread(pool)

    def _start_thread(self, pool: _Lane) -> None:
        """``pool.ready`` is held. Where the system has no thread left, those there are do the work, and without any nobody can."""
        name = f"kvtier-{pool.name}-{pool.threads + 1}"
        try:
            threading.Thread(target=self._serve, args=(pool,), name=name, daemon=True).start()
        except RuntimeError as error:
            if pool.threads:
                return
            while pool.queue:
                _, done = pool.queue.popleft()
                self._complete(done, None, TierUnavailableError(f"{pool.name}: {error}"))
            return
        pool.threads += 1

    def _lane(self, name: str) -> _Lane:
        pool = self._lanes.get(name)
        if pool is None:
            pool = self._lanes[name] = _Lane(name, max(1, self._sizes.get(name, 1)))
        return pool

    def _serve(self, pool: _Lane) -> None:
        while True:
            with pool.ready:
                pool.idle += 1
                while not pool.queue and not pool.closed:
                    pool.ready.wait()
                pool.idle -= 1
                if pool.closed:
                    pool.threads -= 1
                    return
                call, done = pool.queue.popleft()
                pool.running += 1
            result: object = None
            failure: BaseException | None = None
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001
                # A thread of the pool outlives whatever its call raises; the owner judges it.
                failure = error
            with pool.ready:
                pool.running -= 1
            self._complete(done, result, failure)
            # A thread that waits for its next call must not keep the last one's memory alive.
            del call, done, result, failure

    def _complete(self, done: Done, result: object, error: BaseException | None) -> None:
        self._finished.put((done, result, error))
        if not self._woken.is_set():
            self._woken.set()
            if self._wake is not None:
                self._wake()
            os.eventfd_write(self._event_fd, 1)

    def collect(self) -> int:
        """Calls ``done`` of everything that has finished; returns how many. Owner's thread only."""
        if self._woken.is_set():
            # Cleared before the queue is emptied: what comes in meanwhile wakes the owner once more.
            self._woken.clear()
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event_fd)
        count = 0
        for _ in range(self._finished.qsize()):
            try:
                done, result, error = self._finished.get_nowait()
            except Empty:
                break
            done(result, error)
            count += 1
        return count

    def running(self, lane: str) -> int:
        """Calls of a lane that have begun and not returned, hung ones included."""
        pool = self._lanes.get(lane)
        return 0 if pool is None else pool.running

    def queued(self, lane: str) -> int:
        """Calls of a lane that wait for a thread."""
        pool = self._lanes.get(lane)
        return 0 if pool is None else len(pool.queue)

    def close(self) -> None:
        """Begins no further call and lets idle threads end. Does not wait for those that run; their results are
        dropped."""
        self._closed = True
        for pool in self._lanes.values():
            with pool.ready:
                pool.closed = True
                pool.queue.clear()
                pool.ready.notify_all()
