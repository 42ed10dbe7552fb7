"""Calls that may block: ``IoCall``, and the thread pools that run them.

Whether a call may touch its slot is decided here. A call that was revoked never runs; a call that
has started owns its memory until it returns.

A call that hangs occupies its thread and nothing else: other lanes have their own threads, the
owner never waits, and the process exits without joining them. Threads start on demand, up to the
size of the lane, and end with the executor.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue

from kvtier.errors import TierUnavailableError
from kvtier.store.types import Clock, IoExecutor

_SKIPPED = object()
Finished = Callable[[object, BaseException | None], None]


class IoCall:
    """A call on an I/O thread. The owner can revoke it until a thread has started it.

    ``started_at`` and ``finished_at`` are written by that thread and only read elsewhere.
    """

    __slots__ = (
        "_claim",
        "_clock",
        "_finished",
        "finished_at",
        "started_at",
        "work",
    )

    def __init__(self, clock: Clock, work: Callable[[], object], finished: Finished) -> None:
        self.started_at: float | None = None
        self.finished_at: float | None = None
        self._clock = clock
        self.work = work
        self._finished = finished
        # list.pop is atomic: of the thread that starts the call and the owner that revokes it,
        # exactly one gets the item.
        self._claim = [True]

    def submit(self, io: IoExecutor, lane: str) -> IoCall:
        """Submits the call to ``lane``. Owner's thread."""
        io.submit(lane, self, self._done)
        return self

    def begin(self) -> bool:
        """Claims the call for the calling thread; False if it was revoked. ``__call__`` does this;
        only executors that suspend a call in the middle do it separately."""
        if not self._take():
            return False
        self.started_at = self._clock()
        return True

    def revoke(self) -> bool:
        """True if the call has not started. It never starts then, and ``finished`` is not called.
        Owner's thread."""
        return self._take()

    def _take(self) -> bool:
        try:
            self._claim.pop()
        except IndexError:
            return False
        return True

    def __call__(self) -> object:
        """Runs the call, unless it was revoked."""
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
        """How long the call has been running, or ran; 0 if it has not started."""
        if self.started_at is None:
            return 0.0
        return (now if self.finished_at is None else self.finished_at) - self.started_at


MAX_QUEUED = 65_536
"""Queued calls per lane. The store stays far below: each call has a slot, and each lane a bound."""
Call = Callable[[], object]
Done = Callable[[object, BaseException | None], None]


class _ThreadLane:
    """One thread pool. ``ready`` guards all of it."""

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

    ``lanes``: threads per lane; other lanes have one. ``wake``: called on an I/O thread when a call
    has finished, at least once between two calls of ``collect``; the owner then calls ``collect``.
    """

    def __init__(self, lanes: Mapping[str, int], wake: Callable[[], None] | None = None) -> None:
        self._sizes = dict(lanes)
        self._lanes: dict[str, _ThreadLane] = {}
        self._finished: SimpleQueue[tuple[Done, object, BaseException | None]] = SimpleQueue()
        self._woken = threading.Event()
        self._wake = wake
        self._closed = False

    def submit(self, lane: str, call: Call, done: Done) -> None:
        """Runs ``call`` on a thread of ``lane``. Owner's thread."""
        pool = self._lane(lane)
        with pool.ready:
            if self._closed or len(pool.queue) >= MAX_QUEUED:
                reason = (
                    "the executor is closed" if self._closed else f"{MAX_QUEUED} calls are queued"
                )
                self._complete(done, None, TierUnavailableError(f"{lane}: {reason}"))
                return
            pool.queue.append((call, done))
            pool.ready.notify()
            # A notified thread counts as idle until it runs, so the queue is compared with the
            # number of idle threads. A call must not wait behind another one, which may hang, while
            # the lane may start further threads.
            if len(pool.queue) > pool.idle and pool.threads < pool.max_threads:
                self._start_thread(pool)

    def _start_thread(self, pool: _ThreadLane) -> None:
        """Call with ``pool.ready`` held. If the system has no thread left, the lane's other threads
        run the calls; without any, the calls fail."""
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

    def _lane(self, name: str) -> _ThreadLane:
        pool = self._lanes.get(name)
        if pool is None:
            pool = self._lanes[name] = _ThreadLane(name, max(1, self._sizes.get(name, 1)))
        return pool

    def _serve(self, pool: _ThreadLane) -> None:
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
                # A thread outlives whatever its call raises. The owner handles the error.
                failure = error
            with pool.ready:
                pool.running -= 1
            self._complete(done, result, failure)
            # A thread that waits for its next call must not keep the memory of the last one alive.
            del call, done, result, failure

    def _complete(self, done: Done, result: object, error: BaseException | None) -> None:
        self._finished.put((done, result, error))
        if not self._woken.is_set():
            self._woken.set()
            if self._wake is not None:
                self._wake()

    def collect(self) -> int:
        """Calls ``done`` of everything that has finished; returns how many. Owner's thread only."""
        if self._woken.is_set():
            # Before the queue is emptied, so that a call that finishes now wakes the owner once
            # more.
            self._woken.clear()
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
        """Calls of a lane that have started and not returned, hung ones included."""
        pool = self._lanes.get(lane)
        return 0 if pool is None else pool.running

    def queued(self, lane: str) -> int:
        """Calls of a lane that wait for a thread."""
        pool = self._lanes.get(lane)
        return 0 if pool is None else len(pool.queue)

    def close(self) -> None:
        """Starts no further call and ends idle threads. Does not wait for running calls; their
        results are dropped."""
        self._closed = True
        for pool in self._lanes.values():
            with pool.ready:
                pool.closed = True
                pool.queue.clear()
                pool.ready.notify_all()
