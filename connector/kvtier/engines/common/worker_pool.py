"""Maps the host pool and registers it with the device, on a background thread.

Registering 64 GiB takes about 3 s; meanwhile the engine serves without tiers. The mapper also
notices when tierd has created another pool file. Where the device's driver hangs, no pool is mapped
until the engine restarts.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from kvtier.engines.common.early_registration import EarlyRegistration, Span
from kvtier.store.generations import generation_bytes
from kvtier.tierd.wire import GENERATIONS_NAME
from kvtier.transfer.driver_calls import (
    DriverCalls,
    DriverHangsError,
    keep_for_driver,
    wait_for_calls,
)
from kvtier.transfer.host_pool import HostPool, file_identity, open_pool

logger = logging.getLogger(__name__)


class RegisterPool(Protocol):
    """Registers a pool; returns it with its boundaries, and what ``unregister`` needs.

    Raises ``KVTierError``.
    """

    def __call__(
        self, pool: HostPool, cancelled: Callable[[], bool]
    ) -> tuple[HostPool, tuple[int, ...]]: ...


@dataclass(frozen=True, slots=True)
class PoolReady:
    """The bytes ``span`` (begin, end) of the pool of ``nbytes`` at ``path`` are mapped; or
    ``problem`` says why not."""

    path: Path
    nbytes: int
    span: Span
    problem: str = ""


@dataclass(frozen=True, slots=True)
class MappedPool:
    """A range of the pool, and the generation words of all of it: one 32-bit word per page."""

    pool: HostPool
    words: memoryview


@dataclass(frozen=True, slots=True)
class _Mapping:
    pool: HostPool
    words: memoryview
    registration: tuple[int, ...]
    path: Path
    nbytes: int
    span: Span


def open_generations(path: Path, pool_bytes: int) -> memoryview:
    """Maps the generation words of a pool, read only.

    Raises ``OSError`` if the file cannot be opened or mapped, ``ValueError`` if it is too small.
    """
    size = generation_bytes(pool_bytes)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor).st_size
        if found < size:
            raise ValueError(f"{path}: {found} bytes, must be at least {size}")
        # Both ends are processes of one machine, so the words have its byte order.
        return memoryview(mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ)).cast("I")
    finally:
        os.close(descriptor)


class HostPoolMapper:
    """At most one mapping at a time. The transfer thread calls it."""

    def __init__(
        self,
        register: RegisterPool,
        unregister: Callable[[HostPool, tuple[int, ...]], None],
        early: EarlyRegistration | None = None,
        expect: Callable[[int], Span] | None = None,
    ) -> None:
        """``early``: a registration that was started before, for the first mapping. ``expect``: the
        range of a pool of so many bytes that tierd will probably name; None: all of it."""
        self._register = register
        self._unregister = unregister
        self._early = early
        self._expect = expect
        self._lock = threading.Lock()
        self._mapping: _Mapping | None = None
        self._busy = False
        self._closed = False
        self.hangs = ""
        """Why no pool is mapped until the engine restarts; empty unless the driver hangs."""

    def expected(self, nbytes: int) -> Span:
        """The range to map before tierd has named one."""
        return (0, nbytes) if self._expect is None else self._expect(nbytes)

    def get(self, path: Path, nbytes: int, span: Span) -> MappedPool | None:
        """Returns the mapping of this range, if it is of the file that is at ``path`` now."""
        with self._lock:
            mapping, busy = self._mapping, self._busy
        if mapping is None or busy:
            return None
        if (mapping.path, mapping.nbytes, mapping.span) != (path, nbytes, span):
            return None
        try:
            if file_identity(path) != mapping.pool.identity:
                return None
        except OSError:
            return None
        return MappedPool(mapping.pool, mapping.words)

    def map(
        self, path: Path, nbytes: int, span: Span, on_ready: Callable[[PoolReady], None]
    ) -> None:
        """Replaces the mapping by one of the bytes ``span`` of ``path``; the background thread
        calls ``on_ready`` once.

        Does nothing while another mapping is in progress: its ``on_ready`` comes first; nor once
        the driver hangs.
        """
        with self._lock:
            if self._busy or self._closed or self.hangs:
                return
            self._busy = True
            previous, self._mapping = self._mapping, None
        threading.Thread(
            target=self._run,
            args=(previous, PoolReady(path, nbytes, span), on_ready),
            name="kvtier-pool",
            daemon=True,
        ).start()

    def close(self) -> None:
        """Unregisters the pool. No copy may run."""
        with self._lock:
            self._closed = True
            mapping, self._mapping = self._mapping, None
            early = self._early
        if early is not None:
            early.abandon()
        if mapping is not None:
            self._unregister(mapping.pool, mapping.registration)

    def _release(self, mapping: _Mapping) -> None:
        """Unregisters a pool. Raises ``DriverHangsError``."""
        calls = DriverCalls(1, "kvtier-unregister")
        try:
            ended = [
                calls.submit(self._unregister, mapping.pool, (begin,))
                for begin in mapping.registration
            ]
            wait_for_calls(ended)
        except DriverHangsError:
            keep_for_driver(mapping)
            raise
        finally:
            calls.close(cancel=True)
        for each in ended:
            each.result()

    def _run(
        self,
        previous: _Mapping | None,
        wanted: PoolReady,
        on_ready: Callable[[PoolReady], None],
    ) -> None:
        path, nbytes, (begin, end) = wanted.path, wanted.nbytes, wanted.span
        mapping: _Mapping | None = None
        problem = ""
        try:
            if previous is not None:
                self._release(previous)
            words = open_generations(path.with_name(GENERATIONS_NAME), nbytes)
            started_at = time.monotonic()
            early, self._early = self._early, None
            taken = early.take(path, nbytes, wanted.span) if early is not None else None
            if taken is None:
                taken = self._register(open_pool(path, end - begin, begin), lambda: self._closed)
            pool, registration = taken
            mapping = _Mapping(pool, words, registration, path, nbytes, wanted.span)
            logger.info(
                "KVTier: mapped %d of %d MB of the host pool in %.2f s",
                (end - begin) // 1_000_000,
                nbytes // 1_000_000,
                time.monotonic() - started_at,
            )
        except DriverHangsError as error:
            problem = self.hangs = str(error)
        except Exception as error:  # noqa: BLE001
            # Without an answer the transfer thread would never retry.
            problem = f"{type(error).__name__}: {error}"
        with self._lock:
            self._busy = False
            closed = self._closed
            if not closed:
                self._mapping = mapping
        if closed and mapping is not None:
            self._unregister(mapping.pool, mapping.registration)
        on_ready(replace(wanted, problem=problem))
