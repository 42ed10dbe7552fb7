"""Registers the host pool with the device while tierd fills it and the engine loads its weights.

Registering takes 1 s for 8 to 20 GiB, and filling the file 1 s for 4 GiB. Side by side, and before
the engine is up, neither is waited for. Ranges are registered once tierd has filled them: a page
that this process touched first would be charged to its own memory limit. tierd neither replaces nor
shrinks what it has filled (``kvtier.tierd.host_pool``), so the registration holds if the file that
tierd publishes has the same identity; otherwise it is undone.

Where the driver hangs, nothing more is registered or undone, and the engine serves without tiers.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvtier.errors import KVTierError
from kvtier.transfer.driver_calls import (
    DriverCalls,
    DriverHangsError,
    keep_for_driver,
    wait_for_calls,
)
from kvtier.transfer.host_pool import HostPool, file_identity, open_pool

REGISTER_THREADS = 8
POLL_SECONDS = 0.05
"""How often the file is looked at."""
DEADLINE_SECONDS = 3_600.0
"""A connector that does not take the registration by then will not come."""
logger = logging.getLogger(__name__)
Span = tuple[int, int]


def filled_end(path: Path, begin: int) -> int:
    """Returns where the first hole of a file on tmpfs behind ``begin`` is. Raises ``OSError``.

    A page that was allocated but never touched counts as a hole. tierd touches those that it
    allocates (``MADV_POPULATE_WRITE``).
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.lseek(descriptor, begin, os.SEEK_HOLE)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Device:
    """How ranges of a pool are registered. ``ranges``: of a pool of so many bytes. ``register``
    raises ``KVTierError``."""

    ranges: Callable[[int], tuple[Span, ...]]
    register: Callable[[HostPool, Span], None]
    unregister: Callable[[HostPool, tuple[int, ...]], None]


@dataclass(slots=True)
class _Registration:
    """``due``: not yet started."""

    pool: HostPool
    due: list[Span]
    started: dict[Span, Future[None]] = field(default_factory=dict)


class EarlyRegistration:
    """Of the pool file at ``path``, which need not exist yet. ``take`` or ``abandon`` ends it.

    ``filled_end``: see the function of that name.
    """

    def __init__(
        self,
        path: Path,
        device: Device,
        filled_end: Callable[[Path, int], int] = filled_end,
        expect: Callable[[int], Span] | None = None,
    ) -> None:
        """``expect``: the range of a pool of so many bytes that is registered; None: all of it."""
        self._expect = expect
        self._path = path
        self._device = device
        self._filled_end = filled_end
        self._registration: _Registration | None = None
        self._failed = False
        self._stop = threading.Event()
        self._lock = threading.Lock()
        """Held during each look at the file, and while the registration is taken."""
        self._calls = DriverCalls(REGISTER_THREADS, "kvtier-register")
        self._hangs: DriverHangsError | None = None
        self._thread = threading.Thread(target=self._run, name="kvtier-early-pool", daemon=True)

    def start(self) -> None:
        """Starts the thread that looks at the file."""
        self._thread.start()

    def take(
        self, path: Path, nbytes: int, span: Span | None = None
    ) -> tuple[HostPool, tuple[int, ...]] | None:
        """Returns the range ``span`` of the pool (None: all of it) with its boundaries and what
        ``unregister`` needs, once all of it is registered; None if it is another file or range, or
        if registering failed. tierd has published ``nbytes`` of it, which are filled. Any thread;
        may take seconds. Once only.

        Raises ``DriverHangsError``: nothing can be registered.
        """
        self._stop.set()
        with self._lock:
            found = self._registration
            if found is None or self._path != path or not self._is_current(found, nbytes):
                self._undo()
                self._raise_if_hanging()
                return None
            if found.pool.span != (span or (0, nbytes)):
                logger.info("KVTier: the host pool is registered once more: for another range")
                self._undo()
                self._raise_if_hanging()
                return None
            self._begin(found, nbytes)
            problem = self._wait(found)
            self._raise_if_hanging()
            if problem:
                logger.info("KVTier: the host pool is registered once more: %s", problem)
                self._undo()
                self._raise_if_hanging()
                return None
            self._registration = None
            self._calls.close()
        begins = tuple(sorted(begin for begin, _ in found.started))
        return replace(found.pool, boundaries=begins[1:]), begins

    def abandon(self) -> None:
        """Undoes everything. Any thread; idempotent."""
        self._stop.set()
        with self._lock:
            self._undo()

    def _run(self) -> None:
        until = time.monotonic() + DEADLINE_SECONDS
        try:
            while time.monotonic() < until and not self._stop.wait(POLL_SECONDS):
                with self._lock:
                    if self._stop.is_set():
                        return
                    self.look()
            if not self._stop.is_set():
                self.abandon()
        except Exception as error:  # noqa: BLE001 - the connector registers the pool itself
            logger.warning("KVTier: the host pool is not registered early: %s", error)
            self.abandon()

    def look(self) -> None:
        """Begins to register what tierd has filled since the last look."""
        if self._failed or self._hangs is not None:
            return
        try:
            nbytes = file_identity(self._path)[2]
        except OSError:
            nbytes = 0
        found = self._registration
        if found is not None and not self._is_current(found, nbytes):
            self._undo_ranges()
            if self._hangs is not None:
                return
            found = None
        if found is None and nbytes:
            begin, end = (0, nbytes) if self._expect is None else self._expect(nbytes)
            pool = open_pool(self._path, end - begin, begin)
            due = list(self._device.ranges(pool.nbytes))
            found = self._registration = _Registration(pool, due)
        if found is None:
            return
        if any(each.done() and each.exception() for each in found.started.values()):
            # The connector tries once more, and reports.
            self._failed = True
            self._undo_ranges()
        elif found.due:
            begin = found.pool.begin + found.due[0][0]
            self._begin(found, self._filled_end(self._path, begin))

    def _is_current(self, found: _Registration, nbytes: int) -> bool:
        try:
            now = file_identity(self._path)
            return found.pool.identity == now and now[2] == nbytes
        except OSError:
            return False

    def _begin(self, found: _Registration, end: int) -> None:
        while found.due and found.pool.begin + found.due[0][1] <= end:
            span = found.due.pop(0)
            found.started[span] = self._calls.submit(self._device.register, found.pool, span)

    def _wait(self, found: _Registration) -> str:
        """Waits for all that was started; returns the first problem, empty if there is none."""
        try:
            wait_for_calls(found.started.values())
        except DriverHangsError as error:
            self._give_up(found, error)
            return str(error)
        problems = [each.exception() for each in found.started.values()]
        return next((str(problem) for problem in problems if problem is not None), "")

    def _undo_ranges(self) -> None:
        found, self._registration = self._registration, None
        if found is None:
            return
        self._wait(found)
        if self._hangs is not None:
            return
        done = [begin for (begin, _), each in found.started.items() if each.exception() is None]
        try:
            undone = [
                self._calls.submit(self._device.unregister, found.pool, (begin,)) for begin in done
            ]
            wait_for_calls(undone)
            for each in undone:
                each.result()
        except DriverHangsError as error:
            self._give_up(found, error)
        except (KVTierError, RuntimeError) as error:
            logger.warning("KVTier: cannot undo an early registration: %s", error)

    def _give_up(self, found: _Registration, error: DriverHangsError) -> None:
        """The driver may still use the pool: it stays mapped."""
        self._hangs = error
        self._registration = None
        self._calls.close(cancel=True)
        keep_for_driver(found)

    def _raise_if_hanging(self) -> None:
        if self._hangs is not None:
            raise self._hangs

    def _undo(self) -> None:
        self._undo_ranges()
        self._calls.close()
