"""The transfer thread of one rank: everything that touches slots happens here, one step at a time.

Inputs come from the engine's thread (jobs, each with a fence of the compute stream), from the
client's I/O thread (messages, loss of tierd), and from the thread that maps the pool. The transfer
thread waits for none of them, and none of them waits for it, except ``close`` for a bounded time.

When tierd is lost, the thread drains: it synchronizes the copies, ends the loads, drops the stores
and forgets announcements. Only then does it tell the client to reattach, because from that moment
on a slot may hold another object.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtier.engines.vllm.metadata import LoadJob, StoreJob
from kvtier.engines.vllm.worker_pool import HostPoolMapper, PoolReady
from kvtier.engines.vllm.worker_state import RankContext, WorkerClient, WorkerOutbox
from kvtier.engines.vllm.worker_transfers import WorkerLoads, WorkerStores
from kvtier.tierd.wire import LoadReady, Message, Ready, SessionRefused, Welcome

logger = logging.getLogger(__name__)

MAX_QUEUED = 8192
"""Inputs that wait for the thread. One step adds at most two, one load one message."""
COPY_POLL_SECONDS = 0.0005
"""How often running copies are polled: a 32 MiB transfer takes 0.6 ms."""
RESEND_SECONDS = 0.01
IDLE_SECONDS = 1.0
DRAIN_SHARE = 0.75
"""The share of ``close``'s timeout that draining may take; the rest is for detaching."""

WorkerConnect = Callable[[Callable[[Message], None], Callable[[str], None]], WorkerClient]
"""(sink, on_lost) -> client."""


@dataclass(frozen=True, slots=True)
class _LoadInput:
    jobs: tuple[LoadJob, ...]
    cancelled: tuple[int, ...]
    fence: object | None
    received_at: float


@dataclass(frozen=True, slots=True)
class _StoreInput:
    jobs: tuple[StoreJob, ...]
    fence: object | None


@dataclass(frozen=True, slots=True)
class _ClientLost:
    reason: str


_Input = _LoadInput | _StoreInput | _ClientLost | Message | PoolReady


class TransferThread:
    """Owns the copy engine, the client and the pool's mapping from ``start`` on.

    ``put_*`` and ``receive`` may be called from any thread and return at once.
    """

    def __init__(
        self, context: RankContext, connect: WorkerConnect, mapper: HostPoolMapper
    ) -> None:
        self._context = context
        self._engine = context.engine
        self._completions = context.completions
        self._counters = context.counters
        self._mapper = mapper
        self._client = connect(self.receive, self.on_client_lost)
        self._outbox = WorkerOutbox(self._client, context.counters)
        self._loads = WorkerLoads(context, self._outbox.send)
        self._stores = WorkerStores(context, self._outbox.send)
        self._wake = threading.Condition()
        self._inputs: deque[_Input] = deque()
        self._closing = False
        self._closed = False
        self._ended = threading.Event()
        self._drained = False
        self._welcome: Welcome | None = None
        self._shards_refused = False
        self._drained_epoch = 0
        self._thread = threading.Thread(target=self._run, name="kvtier-transfer", daemon=True)

    # Any thread.

    @property
    def drained_epoch(self) -> int:
        """The last epoch of which no copy runs and no announcement is remembered."""
        return self._drained_epoch

    def start(self) -> None:
        """Starts the thread, and to attach to tierd."""
        self._thread.start()
        self._client.start()

    def close(self, timeout_seconds: float) -> None:
        """Drains, ends the thread and detaches from tierd within ``timeout_seconds``.

        Without proof that the copies have ended it does not detach: tierd then waits until this
        process has exited.
        """
        started_at = time.monotonic()
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._ended.wait(timeout_seconds * DRAIN_SHARE) and self._drained:
            self._client.close(max(0.1, timeout_seconds - (time.monotonic() - started_at)))

    def fence(self) -> object | None:
        """Returns a mark in the stream of the engine's kernels. The engine's thread only."""
        return self._engine.fence()

    def put_loads(
        self, jobs: tuple[LoadJob, ...], cancelled: tuple[int, ...], fence: object | None
    ) -> None:
        """Queues the loads and cancellations of a step. Without room the loads end at once."""
        if not self._put(_LoadInput(jobs, cancelled, fence, self._context.clock())):
            reason = "off" if self._closed or self._closing else "queue"
            self._completions.reject_loads(jobs, reason)

    def put_stores(self, jobs: tuple[StoreJob, ...], fence: object | None) -> None:
        """Queues the stores of a step. Without room they end at once, undelivered."""
        if not self._put(_StoreInput(jobs, fence)):
            self._counters.add("stores_aborted", len(jobs))
            self._completions.add_stores(job.reservation for job in jobs)

    def receive(self, message: Message) -> None:
        """Queues a message of tierd. The client's sink."""
        if isinstance(message, LoadReady | Welcome | Ready | SessionRefused):
            self._put(message, always=not isinstance(message, LoadReady))

    def on_client_lost(self, reason: str) -> None:
        """Queues the loss of tierd. The client does not reattach before this thread has drained."""
        self._put(_ClientLost(reason), always=True)

    def on_pool_ready(self, ready: PoolReady) -> None:
        """Queues the result of the mapper."""
        self._put(ready, always=True)

    def _put(self, item: _Input, always: bool = False) -> bool:
        with self._wake:
            if self._closed or self._closing:
                return False
            if len(self._inputs) >= MAX_QUEUED and not always:
                self._counters.add("queue_full")
                return False
            self._inputs.append(item)
            self._wake.notify_all()
            return True

    # The transfer thread.

    def _run(self) -> None:
        try:
            self._engine.enter_thread()
            while self._run_once():
                pass
            self._drain("closing")
            self._drained = True
        except Exception as error:  # the last resort: the engine serves on
            self._counters.add("thread_failures")
            logger.exception("KVTier: serving without tiers: transfer thread failed: %s", error)
        finally:
            self._finish()

    def _run_once(self) -> bool:
        """Handles inputs, advances copies and waits; returns False when the thread must end."""
        with self._wake:
            if self._closing:
                return False
            inputs = list(self._inputs)
            self._inputs.clear()
        for item in inputs:
            self._handle(item)
        if self._shards_refused:
            self._loads.stop_all("shards")
        changed = self._loads.advance(can_copy=self._can_copy)
        changed |= self._stores.advance()
        self._outbox.flush()
        with self._wake:
            if not changed and not self._inputs and not self._closing:
                self._wake.wait(self._poll_timeout())
        return True

    def _poll_timeout(self) -> float:
        timeouts = [IDLE_SECONDS]
        if self._loads.copying or self._stores.copying:
            timeouts.append(COPY_POLL_SECONDS)
        if len(self._outbox):
            timeouts.append(RESEND_SECONDS)
        deadline = self._loads.next_deadline()
        if deadline is not None:
            timeouts.append(max(0.0, deadline - self._context.clock()))
        return min(timeouts)

    def _handle(self, item: _Input) -> None:
        match item:
            case _LoadInput():
                self._loads.add(item.jobs, item.fence, item.received_at)
                self._loads.cancel(item.cancelled)
            case _StoreInput():
                self._stores.add(item.jobs, item.fence, self._completions.epoch)
            case LoadReady():
                self._loads.on_announcement(item)
            case Welcome():
                self._on_welcome(item)
            case Ready():
                self._on_ready(item)
            case PoolReady():
                self._on_pool(item)
            case _ClientLost():
                self._on_lost(item.reason)
            case SessionRefused():
                self._counters.add("refused")
                self._completions.epoch = 0
                logger.warning(
                    "KVTier: serving without tiers: tierd refused the session: %s", item.reason
                )

    def _on_welcome(self, welcome: Welcome) -> None:
        self._welcome = welcome
        if not self._attach_pool(welcome):
            if self._engine.pool is not None:
                self._drain("lost")
                self._engine.detach()
            self._map_pool(welcome)

    def _on_ready(self, ready: Ready) -> None:
        """The engine's namespace opened: tierd says where this rank's shards lie in a slot."""
        shards = self._context.shards
        problem = shards.set(ready)
        self._shards_refused = bool(problem)
        if problem:
            self._counters.add("shards_refused")
            logger.warning("KVTier: serving without tiers: invalid slot layout: %s", problem)
        self._update_epoch()

    @property
    def _can_copy(self) -> bool:
        """Whether slots can be addressed: a pool is attached, and the layout of slots is known."""
        return self._engine.pool is not None and self._context.shards.known

    def _update_epoch(self) -> None:
        welcome = self._welcome
        self._completions.epoch = welcome.epoch if welcome and self._can_copy else 0

    def _map_pool(self, welcome: Welcome) -> None:
        self._mapper.map(Path(welcome.pool_path), welcome.pool_bytes, self.on_pool_ready)

    def _attach_pool(self, welcome: Welcome) -> bool:
        """Uses the mapped pool if it is the one of this tierd."""
        pool = self._mapper.get(Path(welcome.pool_path), welcome.pool_bytes)
        if pool is None:
            return False
        if self._engine.pool is not pool:
            self._engine.attach(pool)
        self._update_epoch()
        return True

    def _on_pool(self, ready: PoolReady) -> None:
        if ready.problem:
            self._counters.add("pool_failures")
            logger.warning(
                "KVTier: serving without tiers: the host pool cannot be used: %s", ready.problem
            )
        welcome = self._welcome
        if welcome is None or self._attach_pool(welcome):
            return
        requested = (ready.path, ready.nbytes)
        if not ready.problem or requested != (Path(welcome.pool_path), welcome.pool_bytes):
            # It was requested for a previous tierd.
            self._map_pool(welcome)

    def _on_lost(self, reason: str) -> None:
        self._counters.add("lost")
        self._completions.epoch = 0
        logger.warning("KVTier: serving without tiers until tierd is available again: %s", reason)
        self._drain("lost")
        self._outbox.clear()
        if self._welcome is not None:
            self._drained_epoch = max(self._drained_epoch, self._welcome.epoch)
        self._welcome = None
        self._context.shards.clear()
        self._shards_refused = False
        self._client.reattach(self._drained_epoch)

    def _drain(self, reason: str) -> None:
        """Afterwards no copy runs, and no load, store or announcement is left.

        Raises ``CopyError`` if the device cannot be synchronized.
        """
        self._engine.synchronize()
        self._loads.stop_all(reason)
        while len(self._loads):
            self._loads.advance(can_copy=False)
        self._stores.drop_all()
        self._loads.forget_announcements()

    def _finish(self) -> None:
        with self._wake:
            self._closed = True
            inputs = list(self._inputs)
            self._inputs.clear()
        self._completions.epoch = 0
        for item in inputs:
            if isinstance(item, _LoadInput):
                self._completions.reject_loads(item.jobs, "off")
            elif isinstance(item, _StoreInput):
                self._completions.add_stores(job.reservation for job in item.jobs)
        if not self._drained:
            self._abandon()
        self._ended.set()
        if self._drained:
            self._engine.close()
            self._mapper.close()

    def _abandon(self) -> None:
        """Reports what is open after a failure: vLLM waits for it without a time limit.

        If copies still run, the device has failed.
        """
        try:
            self._engine.synchronize()
        except Exception as error:  # the reports below must go out in any case
            self._counters.add("copy_errors")
            logger.exception("KVTier: cannot synchronize the device: %s", error)
        self._loads.abandon("off")
        self._stores.drop_all()
