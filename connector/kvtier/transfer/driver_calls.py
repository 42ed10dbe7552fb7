"""Calls of a device's driver, none of which is waited for without a deadline.

A driver that hangs in one call must hang neither the threads that wait for it nor the end of the
process, which waits for the threads of ``concurrent.futures``. Any thread.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from queue import Empty, SimpleQueue
from typing import ParamSpec, TypeVar

from kvtier.errors import KVTierError

STALL_SECONDS = 60.0
"""A driver of which no call ends for so long hangs. A call registers or unregisters 1 GiB at most,
which takes a fraction of a second."""
T = TypeVar("T")
P = ParamSpec("P")
_Queued = tuple[Future[object], Callable[[], object]] | None
_used_by_driver: list[object] = []


class DriverHangsError(KVTierError):
    """The driver does not answer. What it was asked for may still happen, at any time."""


class DriverCalls:
    """Runs calls on at most ``threads`` daemon threads, in the order in which they come."""

    def __init__(self, threads: int, name: str) -> None:
        self._most = threads
        self._name = name
        self._lock = threading.Lock()
        self._threads = 0
        self._closed = False
        self._queue: SimpleQueue[_Queued] = SimpleQueue()

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queues a call. Raises ``RuntimeError`` after ``close``, or without any thread."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("no further calls of the driver are made")
            if self._threads < self._most:
                self._start()
            self._queue.put((future, functools.partial(call, *args, **kwargs)))  # type: ignore[arg-type]
        return future

    def close(self, *, cancel: bool = False) -> None:
        """Ends the threads once they have made their calls; with ``cancel`` those that have not
        started are not made. Waits for nothing. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if cancel:
                self._cancel()
            for _ in range(self._threads):
                self._queue.put(None)

    def _start(self) -> None:
        name = f"{self._name}-{self._threads + 1}"
        try:
            threading.Thread(target=self._run, name=name, daemon=True).start()
        except RuntimeError:
            if not self._threads:
                raise
            return
        self._threads += 1

    def _cancel(self) -> None:
        while True:
            try:
                item = self._queue.get_nowait()
            except Empty:
                return
            if item is not None:
                item[0].cancel()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - it belongs to who asked
                future.set_exception(error)


def wait_for_calls(calls: Collection[Future[T]]) -> None:
    """Waits until all calls have ended, however they ended.

    Raises ``DriverHangsError`` if none of them ends for ``STALL_SECONDS``.
    """
    left = set(calls)
    while left:
        ended, left = wait(left, STALL_SECONDS, FIRST_COMPLETED)
        if not ended:
            raise DriverHangsError(
                f"the device's driver hangs: {len(left)} of {len(calls)} calls have not ended, and "
                f"none did within {STALL_SECONDS:g} s"
            )


def keep_for_driver(memory: object) -> None:
    """Keeps what a call that hangs may still use, for as long as the process lives."""
    _used_by_driver.append(memory)
