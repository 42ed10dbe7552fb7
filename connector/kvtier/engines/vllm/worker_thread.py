"""The transfer thread of one worker rank: everything that touches slots happens here, one thing after another.

It is fed by the engine's thread (jobs, with a fence of the compute stream), by the client's I/O thread (messages, loss
of tierd) and by the thread that maps the pool. It never waits for any of them, and none of them waits for it, except
``close`` for a bounded time.

When tierd is lost: synchronise the copies, end the loads, drop the stores, forget announcements, and
only then tell tierd (``reattach``). From that word on a slot may hold another object's bytes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from kvtier.engines.vllm.metadata import LoadJob, StoreJob
from kvtier.engines.vllm.worker_pool import HostPoolMapper, PoolReady
from kvtier.engines.vllm.worker_state import (
    Clock,
    CompletionQueue,
    Counters,
    WorkerClient,
    WorkerOutbox,
)
from kvtier.engines.vllm.worker_transfers import WorkerLoads, WorkerStores
from kvtier.tierd.wire import LoadReady, Message, Refused, Welcome
from kvtier.transfer.engine import CopyEngine

logger = logging.getLogger(__name__)

MAX_QUEUED = 8192
"""Items that wait for the thread. One step brings at most three, one load one message."""
POLL_SECONDS = 0.0005
"""How often running copies are looked at: a 32 MiB transfer takes 0.6 ms."""
UNSENT_SECONDS = 0.01
IDLE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _LoadItem:
    jobs: tuple[LoadJob, ...]
    cancelled: tuple[int, ...]
    fence: object | None
    received: float


@dataclass(frozen=True, slots=True)
class _StoreItem:
    jobs: tuple[StoreJob, ...]
    fence: object | None


@dataclass(frozen=True, slots=True)
class _Lost:
    reason: str


_Item = _LoadItem | _StoreItem | _Lost | Message | PoolReady


class TransferThread:
    """Owns the copy engine from ``start`` on. ``keeper`` maps and registers the pool.

    ``put_*``, ``message`` and ``lost`` may be called from any thread and return at once.
    """

    def __init__(
        self,
        engine: CopyEngine,
        shard_offsets: tuple[int, ...],
        client: WorkerClient,
        reports: CompletionQueue,
        counters: Counters,
        keeper: HostPoolMapper,
        clock: Clock = time.monotonic,
    ) -> None:
        self._engine = engine
        self._client = client
        self._reports = reports
        self._counters = counters
        self._keeper = keeper
        self._clock = clock
        self._outbox = WorkerOutbox(client, counters)
        self._loads = WorkerLoads(
            engine, shard_offsets, self._outbox.send, reports, counters, clock
        )
        self._stores = WorkerStores(engine, shard_offsets, self._outbox.send, reports, counters)
        self._wake = threading.Condition()
        self._items: deque[_Item] = deque()
        self._closing = False
        self._closed = False
        self._ended = threading.Event()
        self._drained = False
        self._welcome: Welcome | None = None
        self._drained_epoch = 0
        self._thread = threading.Thread(target=self._run, name="kvtier-transfer", daemon=True)

    @property
    def drained_epoch(self) -> int:
        """Every epoch up to this one is behind this rank. Any thread."""
        return self._drained_epoch

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def fence(self) -> object | None:
        """Marks this point in the engine's kernels. Engine's thread; ``None`` where there is nothing to wait for."""
        return self._engine.fence()

    def put_loads(
        self, jobs: tuple[LoadJob, ...], cancelled: tuple[int, ...], fence: object | None
    ) -> None:
        """New loads and cancellations of one step. Loads for which there is no room end at once."""
        if not self._put(_LoadItem(jobs, cancelled, fence, self._clock())):
            for job in jobs:
                self._reports.load_refused(job, "off" if self._closed or self._closing else "queue")

    def put_stores(self, jobs: tuple[StoreJob, ...], fence: object | None) -> None:
        """New stores of one step. Those for which there is no room are done at once, and never delivered."""
        if not self._put(_StoreItem(jobs, fence)):
            self._counters.add("stores_aborted", len(jobs))
            self._reports.stores_done(job.reservation for job in jobs)

    def message(self, message: Message) -> None:
        """The client's sink."""
        if isinstance(message, LoadReady | Welcome | Refused):
            self._put(message, always=not isinstance(message, LoadReady))

    def lost(self, reason: str) -> None:
        """The client's word that tierd is gone; it does not attach again before this thread has drained."""
        self._put(_Lost(reason), always=True)

    def pool_ready(self, ready: PoolReady) -> None:
        """The keeper's word that a pool is mapped, or that it cannot be."""
        self._put(ready, always=True)

    def close(self, timeout_seconds: float) -> bool:
        """Drains and ends the thread; whether every copy is known to be over within ``timeout_seconds``."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        return self._ended.wait(timeout_seconds) and self._drained

    def _put(self, item: _Item, always: bool = False) -> bool:
        with self._wake:
            if self._closed or self._closing:
                return False
            if len(self._items) >= MAX_QUEUED and not always:
                self._counters.add("queue_full")
                return False
            self._items.append(item)
            self._wake.notify_all()
            return True

    def _run(self) -> None:
        try:
            self._engine.enter_thread()
            while self._turn():
                pass
            self._let_go("closing")
            self._drained = True
        except Exception as error:  # the last resort: the engine serves on, whatever broke here
            self._counters.add("thread_failures")
            logger.exception(
                "KVTier: the transfer thread failed; this engine serves without tiers (%s)", error
            )
        finally:
            self._end()

    def _turn(self) -> bool:
        """Handles what arrived, moves copies on, waits; ``False`` when the thread is to end."""
        with self._wake:
            if self._closing:
                return False
            items = list(self._items)
            self._items.clear()
        for item in items:
            self._handle(item)
        happened = self._loads.advance(self._engine.pool is not None)
        happened |= self._stores.advance()
        self._outbox.flush()
        with self._wake:
            if not happened and not self._items and not self._closing:
                self._wake.wait(self._patience())
        return True

    def _patience(self) -> float:
        waits = [IDLE_SECONDS]
        if self._loads.copying or self._stores.copying:
            waits.append(POLL_SECONDS)
        if len(self._outbox):
            waits.append(UNSENT_SECONDS)
        deadline = self._loads.next_deadline()
        if deadline is not None:
            waits.append(max(0.0, deadline - self._clock()))
        return min(waits)

    def _handle(self, item: _Item) -> None:
        match item:
            case _LoadItem():
                self._loads.add(item.jobs, item.fence, item.received)
                self._loads.cancel(item.cancelled)
            case _StoreItem():
                self._stores.add(item.jobs, item.fence, self._reports.epoch)
            case LoadReady():
                self._loads.announced(item)
            case Welcome():
                self._welcomed(item)
            case PoolReady():
                self._pool(item)
            case _Lost():
                self._lost(item.reason)
            case Refused():
                self._counters.add("refused")
                self._reports.epoch = 0
                logger.warning(
                    "KVTier: this engine serves without tiers, tierd refused it: %s", item.reason
                )

    def _welcomed(self, welcome: Welcome) -> None:
        self._welcome = welcome
        if not self._attach_pool(welcome):
            if self._engine.pool is not None:
                self._let_go("lost")
                self._engine.detach()
            self._keeper.fetch(Path(welcome.pool_path), welcome.pool_bytes, self.pool_ready)

    def _attach_pool(self, welcome: Welcome) -> bool:
        """Uses the mapping that the keeper holds, if it is of this tierd's pool."""
        pool = self._keeper.held(Path(welcome.pool_path), welcome.pool_bytes)
        if pool is None:
            return False
        if self._engine.pool is not pool:
            self._engine.attach(pool)
        self._reports.epoch = welcome.epoch
        return True

    def _pool(self, ready: PoolReady) -> None:
        if ready.problem:
            self._counters.add("pool_failures")
            logger.warning(
                "KVTier: this engine serves without tiers, the host pool cannot be used: %s",
                ready.problem,
            )
        welcome = self._welcome
        if welcome is None or self._attach_pool(welcome):
            return
        path, nbytes = Path(welcome.pool_path), welcome.pool_bytes
        if not ready.problem or (ready.path, ready.nbytes) != (
            path,
            nbytes,
        ):  # asked for before tierd changed
            self._keeper.fetch(path, nbytes, self.pool_ready)

    def _lost(self, reason: str) -> None:
        self._counters.add("lost")
        self._reports.epoch = 0
        logger.warning(
            "KVTier: tierd is gone (%s); serving without tiers until another one answers", reason
        )
        self._let_go("lost")
        self._outbox.clear()
        if self._welcome is not None:
            self._drained_epoch = max(self._drained_epoch, self._welcome.epoch)
        self._welcome = None
        self._client.reattach(self._drained_epoch)

    def _let_go(self, reason: str) -> None:
        """Afterwards no copy runs, no load or store is open, and nothing tierd announced is remembered. Raises
        ``CopyError``.
        """
        self._engine.synchronise()
        self._loads.stop_all(reason)
        while len(self._loads):
            self._loads.advance(can_copy=False)
        self._stores.drop_all()
        self._loads.forget()

    def _end(self) -> None:
        with self._wake:
            self._closed = True
            items = list(self._items)
            self._items.clear()
        self._reports.epoch = 0
        for item in items:
            if isinstance(item, _LoadItem):
                for job in item.jobs:
                    self._reports.load_refused(job, "off")
            elif isinstance(item, _StoreItem):
                self._reports.stores_done(job.reservation for job in item.jobs)
        if not self._drained:
            self._abandon()
        self._ended.set()
        if self._drained:
            self._engine.close()
            self._keeper.close()

    def _abandon(self) -> None:
        """After a failure: what is open must still be reported, or its requests wait for ever. Copies may run; if so,
        the device has failed.
        """
        try:
            self._engine.synchronise()
        except Exception as error:  # whatever it is, the reports below must go out
            self._counters.add("copy_errors")
            logger.exception("KVTier: the device could not be synchronised (%s)", error)
        self._loads.abandon("off")
        self._stores.drop_all()
