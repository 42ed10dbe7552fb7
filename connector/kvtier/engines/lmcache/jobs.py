"""Runs loads and stores of one rank through its LMCache engine, on a thread for each direction.

The engine's thread submits and polls, and never waits for LMCache. Every job is reported once: when
LMCache is done with it, or when its time is up. In the latter case its gate is closed first, so
that whatever LMCache still does touches no block, and the direction takes no further job until
LMCache has come back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier.engines.common.jobs import BlockRun, LoadJob, LoadResult
from kvtier.engines.common.worker_state import CompletionQueue, Counters, LoadEnd
from kvtier.engines.lmcache.transfers import LoadTransfer, StoreTransfer

MAX_QUEUED = 256
"""Jobs per direction that wait for LMCache."""
STORE_SECONDS = 30.0
Items = Sequence[tuple[bytes, int]]
_log = logging.getLogger("kvtier.lmcache")


class ChunkCache(Protocol):
    """The part of ``RankCache`` that jobs use. Calls may block for any time."""

    def store(self, transfer: StoreTransfer) -> str: ...

    def load(self, transfer: LoadTransfer) -> None: ...

    def close(self) -> None: ...


class Reports(Protocol):
    """The part of ``LookupClient`` that a rank uses."""

    def stored(self, items: Items) -> bool: ...

    def lost(self, items: Items) -> bool: ...


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """``keys[i]`` and ``stores[i]`` belong to ``job.runs[i]``."""

    job: LoadJob
    keys: tuple[bytes, ...]
    stores: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """A whole chunk, to be stored under ``key`` as ``store``."""

    reservation: int
    key: bytes
    store: int
    run: BlockRun


@dataclass(slots=True, eq=False)
class _Load:
    request: LoadRequest
    transfer: LoadTransfer
    began: float
    until: float
    reported: bool = False


@dataclass(slots=True, eq=False)
class _Store:
    request: StoreRequest
    transfer: StoreTransfer
    until: float
    reported: bool = False


class CacheJobs:
    """The jobs of one rank. ``cache`` is called on the thread for loads and on that for stores."""

    def __init__(
        self,
        cache: ChunkCache,
        completions: CompletionQueue,
        reports: Reports,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._completions = completions
        self._reports = reports
        self._counters = counters
        self._clock = clock
        self._condition = threading.Condition()
        """Guards what follows. Never held while LMCache works or a gate is closed."""
        self._loads: deque[_Load] = deque()
        self._stores: deque[_Store] = deque()
        self._load: _Load | None = None
        self._store: _Store | None = None
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run_loads, name="kvtier-lmcache-loads", daemon=True),
            threading.Thread(target=self._run_stores, name="kvtier-lmcache-stores", daemon=True),
        ]

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    # The engine's thread.

    def submit_loads(self, requests: Iterable[LoadRequest], fence: object | None) -> None:
        """Queues loads. One that cannot be started is reported as failed."""
        now = self._clock()
        for request in requests:
            transfer = LoadTransfer(request.keys, request.stores, request.job.runs, fence)
            load = _Load(request, transfer, now, now + request.job.timeout_seconds)
            with self._condition:
                reason = self._blocked(self._load, self._loads)
                if not reason:
                    self._loads.append(load)
                    self._condition.notify_all()
            if reason:
                self._end_load(load, reason)

    def submit_stores(self, requests: Iterable[StoreRequest], fence: object | None) -> None:
        """Queues stores. One that cannot be started is dropped, and reported as ended."""
        for request in requests:
            transfer = StoreTransfer(request.key, request.store, request.run, fence)
            store = _Store(request, transfer, self._clock() + STORE_SECONDS)
            with self._condition:
                reason = self._blocked(self._store, self._stores)
                if not reason:
                    self._stores.append(store)
                    self._condition.notify_all()
            if reason:
                self._end_store(store, reason)

    def _blocked(self, active: _Load | _Store | None, queued: Sequence[object]) -> str:
        """Why a direction takes no job. Callers hold the condition."""
        if self._closing:
            return "off"
        if active is not None and self._clock() > active.until:
            return "hung"
        return "queue_full" if len(queued) >= MAX_QUEUED else ""

    def cancel(self, loads: Iterable[int]) -> None:
        """Ends loads whose sequences were aborted."""
        wanted = set(loads)
        for load in self._all_loads():
            if load.request.job.load in wanted:
                self._end_load(load, "cancelled")

    def poll(self) -> None:
        """Ends what is out of time. Waits at most for a copy of one shard on the device."""
        now = self._clock()
        for load in self._all_loads():
            if now > load.until:
                self._end_load(load, "timeout")
        with self._condition:
            stores = [*self._stores, *([self._store] if self._store is not None else [])]
        for store in stores:
            if now > store.until:
                self._end_store(store, "timeout")

    def _all_loads(self) -> list[_Load]:
        with self._condition:
            return [*self._loads, *([self._load] if self._load is not None else [])]

    def close(self, timeout_seconds: float) -> bool:
        """Ends all jobs; returns False if LMCache hangs and a thread is left behind."""
        with self._condition:
            self._closing = True
            stores = [*self._stores, *([self._store] if self._store is not None else [])]
            self._condition.notify_all()
        for load in self._all_loads():
            self._end_load(load, "off")
        for store in stores:
            self._end_store(store, "off")
        until = self._clock() + timeout_seconds
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, until - self._clock()))
        if any(thread.is_alive() for thread in self._threads):
            return False
        self._cache.close()
        return True

    # Ends.

    def _end_load(self, load: _Load, reason: str) -> None:
        """Reports a load once. No copy of it runs after its gate was closed."""
        load.transfer.gate.close()
        with self._condition:
            if load.reported:
                return
            load.reported = True
            if load in self._loads:
                self._loads.remove(load)
        job, transfer = load.request.job, load.transfer
        loaded = 0 if reason else transfer.loaded
        if reason or loaded < len(load.request.keys):
            reason = reason or transfer.failure or "missing"
        result = LoadResult(
            job.load, job.request_id, loaded, reason, seconds=self._clock() - load.began
        )
        self._counters.add(f"loads_{reason or 'whole'}")
        self._completions.add_load(LoadEnd.of(job, result))

    def _end_store(self, store: _Store, reason: str) -> None:
        store.transfer.gate.close()
        with self._condition:
            if store.reported:
                return
            store.reported = True
            if store in self._stores:
                self._stores.remove(store)
        self._counters.add(f"stores_{reason or 'whole'}")
        self._completions.add_stores([store.request.reservation])

    # The threads of LMCache's calls.

    def _run_loads(self) -> None:
        while True:
            with self._condition:
                while not self._loads and not self._closing:
                    self._condition.wait()
                if self._closing:
                    return
                load = self._load = self._loads.popleft()
            transfer = load.transfer
            if not load.reported:
                self._cache.load(transfer)
            lost = [(transfer.keys[each], transfer.stores[each]) for each in transfer.missing]
            if lost:
                # All at once: otherwise each chunk that was lost costs a failed load.
                self._reports.lost(lost)
            self._end_load(load, "")
            with self._condition:
                self._load = None

    def _run_stores(self) -> None:
        while True:
            with self._condition:
                while not self._stores and not self._closing:
                    self._condition.wait()
                if self._closing:
                    return
                store = self._store = self._stores.popleft()
            request = store.request
            reason = "" if store.reported else self._cache.store(store.transfer)
            if (
                not reason
                and not store.reported
                and not self._reports.stored([(request.key, request.store)])
            ):
                reason = "not_reported"
            self._end_store(store, reason)
            with self._condition:
                self._store = None
