"""Keeps the mapping of the host pool: maps and registers it on a thread of its own, and notices when tierd made another
file.

Registering 64 GiB takes about 3 s; the engine serves meanwhile, without tiers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvtier.transfer.host_pool import HostPool, file_identity, open_pool


class Pin(Protocol):
    """Makes a pool fit for the device; returns it with its seams, and what ``unpin`` needs. Raises ``KVTierError``."""

    def __call__(
        self, pool: HostPool, cancelled: Callable[[], bool]
    ) -> tuple[HostPool, tuple[int, ...]]: ...


@dataclass(frozen=True, slots=True)
class PoolReady:
    """The keeper holds the pool at ``path``; or ``problem`` says why not."""

    path: Path
    nbytes: int
    problem: str = ""


class HostPoolMapper:
    """At most one mapping at a time. All methods are called by the transfer thread; ``done`` is called by the keeper's
    own.
    """

    def __init__(self, pin: Pin, unpin: Callable[[HostPool, tuple[int, ...]], None]) -> None:
        self._pin = pin
        self._unpin = unpin
        self._lock = threading.Lock()
        self._held: tuple[HostPool, tuple[int, ...], Path, int] | None = None
        self._busy = False
        self._closed = False

    def held(self, path: Path, nbytes: int) -> HostPool | None:
        """The mapping, if it is of the file that ``path`` names at this moment."""
        with self._lock:
            held, busy = self._held, self._busy
        if held is None or busy or (held[2], held[3]) != (path, nbytes):
            return None
        try:
            return held[0] if file_identity(path) == held[0].identity else None
        except OSError:
            return None

    def fetch(self, path: Path, nbytes: int, done: Callable[[PoolReady], None]) -> None:
        """Replaces the mapping by one of ``path``; calls ``done`` once. Ignored while one is under way: its ``done``
        comes first.
        """
        with self._lock:
            if self._busy or self._closed:
                return
            self._busy = True
            old, self._held = self._held, None
        threading.Thread(
            target=self._work, args=(old, path, nbytes, done), name="kvtier-pool", daemon=True
        ).start()

    def close(self) -> None:
        """Gives the registration back. No copy may run."""
        with self._lock:
            self._closed = True
            held, self._held = self._held, None
        if held is not None:
            self._unpin(held[0], held[1])

    def _work(
        self,
        old: tuple[HostPool, tuple[int, ...], Path, int] | None,
        path: Path,
        nbytes: int,
        done: Callable[[PoolReady], None],
    ) -> None:
        ready: PoolReady
        held: tuple[HostPool, tuple[int, ...], Path, int] | None = None
        try:
            if old is not None:
                self._unpin(old[0], old[1])
            pool, begins = self._pin(open_pool(path, nbytes), lambda: self._closed)
            held = (pool, begins, path, nbytes)
            ready = PoolReady(path, nbytes)
        except Exception as error:  # noqa: BLE001
            # Whatever it is: without an answer the transfer thread would never ask again.
            ready = PoolReady(path, nbytes, f"{type(error).__name__}: {error}")
        with self._lock:
            self._busy = False
            late = self._closed
            if not late:
                self._held = held
        if late and held is not None:
            self._unpin(held[0], held[1])
        done(ready)
