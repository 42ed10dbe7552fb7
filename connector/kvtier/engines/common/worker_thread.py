"""The copies of one rank: submitted by the hooks of the engine's thread, drained by a thread.

The hooks submit copies and ask for their ends; no other thread stands between a job and its copy,
because handing a job over means waiting for the interpreter lock. The transfer thread has what may
take time: the session with tierd, the pool, and draining. It also does what the hooks do while the
engine is idle, that is, when no hook has run for ``IDLE_HOOK_SECONDS``.

One lock, ``_copies``, guards the copy engine, the loads, the stores and the outbox. No thread waits
for the device or for another process while it holds the lock.

After an unexpected error of a copy nothing is copied for a while (``rearming``).

When tierd is lost, the epoch is cleared under that lock, so that nothing more is submitted. Then
the thread waits for the copies without the lock, ends the loads and drops the stores. Only then
does it tell the client to reattach, because from that moment on a slot may hold another object.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from kvtier.engines.common.jobs import ArrivedKeys, LoadJob, StoreJob
from kvtier.engines.common.pool_attachment import PoolAttachment
from kvtier.engines.common.rearming import CopyFailures, OpenCopies
from kvtier.engines.common.worker_loads import WorkerLoads
from kvtier.engines.common.worker_pool import HostPoolMapper, PoolReady
from kvtier.engines.common.worker_state import RankContext, WorkerClient, WorkerOutbox
from kvtier.engines.common.worker_stores import WorkerStores
from kvtier.tierd.wire import LoadPinned, Message, Ready, SessionRefused, Welcome

logger = logging.getLogger(__name__)

IDLE_HOOK_SECONDS = 0.02
"""Longer than a step of an engine that decodes: until then the hooks poll."""
IDLE_POLL_SECONDS = 0.002
"""How often the thread polls running copies of an idle engine."""
RESEND_SECONDS = 0.01
IDLE_SECONDS = 1.0
MAX_PINS = 1024
"""Messages of tierd that no hook has looked at. Of more, the oldest are dropped, and those loads
are reported when their copies have ended."""
DRAIN_SHARE = 0.75
"""The share of ``close``'s timeout that draining may take; the rest is for detaching."""

WorkerConnect = Callable[[Callable[[Message], None], Callable[[str], None]], WorkerClient]
"""(sink, on_lost) -> client."""


@dataclass(frozen=True, slots=True)
class _ClientLost:
    reason: str


_Input = _ClientLost | Message | PoolReady
"""Bounded by tierd: a welcome or a refusal per session, and one answer of the mapper for each."""


class TransferThread:
    """Owns the copy engine, the client and the pool's mapping from ``start`` on.

    ``submit_loads``, ``submit_stores`` and ``poll`` are called by the engine's thread, and wait for
    nothing but the lock.
    """

    def __init__(
        self, context: RankContext, connect: WorkerConnect, mapper: HostPoolMapper
    ) -> None:
        self._context = context
        self._engine = context.engine
        self._completions = context.completions
        self._counters = context.counters
        self._client = connect(self.receive, self.on_client_lost)
        self._outbox = WorkerOutbox(self._client, context.counters)
        self._loads = WorkerLoads(context)
        self._stores = WorkerStores(context, self._outbox.send)
        self._copies = threading.Lock()
        self._pool = PoolAttachment(
            context,
            self._copies,
            mapper,
            self.on_pool_ready,
            lambda: self._drain("lost"),
            self._update_epoch,
        )
        self._hook_ran_at = context.clock()
        self._failures = CopyFailures(
            OpenCopies(context, self._copies, self._loads, self._stores, self._outbox),
            self._client.drop,
            self._sleep_unless_closing,
        )
        self._sleeping = False
        """Whether the thread waits without looking at copies."""
        self._wake = threading.Condition()
        self._inputs: deque[_Input] = deque()
        self._pins: deque[LoadPinned] = deque(maxlen=MAX_PINS)
        self._closing = False
        self._closed = False
        self._ended = threading.Event()
        self._drained = False
        self._welcome: Welcome | None = None
        self._suspended = False
        self._drained_epoch = 0
        self._thread = threading.Thread(target=self._run, name="kvtier-transfer", daemon=True)

    # Any thread.

    @property
    def drained_epoch(self) -> int:
        """The last epoch of which no copy runs and no announcement is remembered."""
        return self._drained_epoch

    @property
    def failure(self) -> str:
        """Why nothing is copied, for a while or until restart; empty if copies are possible."""
        return self._failures.reason or self._pool.hangs

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

    # The engine's thread.

    def submit_loads(
        self,
        jobs: tuple[LoadJob, ...],
        cancelled: tuple[int, ...],
        fence: object | None,
        assumed_weights: str = "",
        arrived: Sequence[ArrivedKeys] = (),
    ) -> None:
        """Takes the loads and cancellations of a step, and submits what there is room for.

        ``assumed_weights``, ``arrived``: see ``WorkerLoads.add`` and ``extend``.
        """
        with self._copies:
            if not self._is_open():
                self._completions.reject_loads(jobs, "off")
                return
            # All jobs are entered before the first one is touched: each is owed a report.
            self._loads.add(
                jobs, fence, self._context.clock(), self._completions.epoch, assumed_weights
            )
            self._loads.extend(arrived)
            self._loads.cancel(cancelled)
            self._advance(before_kernels=True)
        self._keep_awake()

    def submit_stores(self, jobs: tuple[StoreJob, ...], fence: object | None) -> None:
        """Takes the stores of a step, and submits what there is room for."""
        with self._copies:
            if not self._is_open():
                self._counters.add("stores_aborted", len(jobs))
                self._completions.add_stores(job.reservation for job in jobs)
                return
            self._stores.add(jobs, fence, self._completions.epoch)
            self._advance()
        self._keep_awake()

    def void_stores(self, reservations: Sequence[int] | None) -> None:
        """Does not deliver these stores. None: delivers no open store and fails every load, because
        the weights may have changed."""
        with self._copies:
            self._stores.void(reservations)
            if reservations is None:
                self._loads.weights_may_have_changed()

    def weights_known(self, fingerprint: str) -> None:
        """The fingerprint of the engine's weights is known; empty if it cannot be taken."""
        with self._copies:
            self._loads.weights_known(fingerprint)

    def suspend(self) -> None:
        """Ends all copies, and accepts none until ``resume``. Blocks until no copy runs."""
        with self._copies:
            self._suspended = True
            self._completions.epoch = 0
            self._loads.stop_all("asleep")
            self._stores.void(None)
        self._engine.wait_idle()
        with self._copies:
            if self._is_open():
                self._advance()

    def resume(self) -> None:
        """Accepts copies again."""
        with self._copies:
            self._suspended = False
            self._update_epoch()

    def order_kernels(self) -> None:
        """Makes the kernels of the next step wait for the copies of loads that were reported while
        they run. Raises ``CopyError`` if the device failed."""
        if len(self._loads):
            with self._copies:
                self._loads.order_kernels()

    def poll(self, early_bytes: int = 0) -> None:
        """Collects copies that have ended, and submits what waits for room. In each step.

        ``early_bytes``: see ``WorkerLoads.report_early``; 0: reports no load whose copies run.
        """
        self._hook_ran_at = self._context.clock()
        if not len(self._loads) and not len(self._stores):
            return
        with self._copies:
            if self._is_open():
                self._advance(early_bytes)

    def awaits_word(self, early_bytes: int) -> bool:
        """Whether a load will be reported as soon as tierd has pinned it, or the fingerprint of the
        weights is known, and nothing else is to be reported."""
        if not len(self._loads):
            return False
        with self._copies:
            return (
                self._is_open()
                and not self._completions.queued()[0]
                and self._loads.awaits_word(early_bytes)
            )

    def open_jobs(
        self, loads: AbstractSet[int], stores: AbstractSet[int]
    ) -> tuple[AbstractSet[int], AbstractSet[int]]:
        """Returns which of these loads and stores have not ended."""
        with self._copies:
            return (
                {number for number in loads if number in self._loads},
                {number for number in stores if number in self._stores},
            )

    def abort_lost_stores(self, reservations: Sequence[int]) -> None:
        """See ``WorkerStores.abort_lost``."""
        with self._copies:
            if self._is_open() and self._completions.epoch:
                self._stores.abort_lost(reservations)
                self._advance()

    def _is_open(self) -> bool:
        return not (self._closed or self._closing or self._failures.error)

    def _advance(self, early_bytes: int = 0, before_kernels: bool = False) -> None:
        """Advances loads, and stores unless it is ``before_kernels``, with the lock held. A failure
        is left to the thread."""
        try:
            while self._pins:
                pin = self._pins.popleft()
                self._loads.pin(pin.load, pin.keys)
            self._loads.advance(before_kernels)
            if not before_kernels:
                self._stores.advance()
            if early_bytes:
                self._loads.report_early(early_bytes)
        except Exception as error:  # noqa: BLE001 - the thread reports everything that is open
            self._failures.fail(error)
            with self._wake:
                self._wake.notify_all()

    def _keep_awake(self) -> None:
        """Lets the thread look after the copies if no further hook comes."""
        self._hook_ran_at = self._context.clock()
        if self._sleeping:
            with self._wake:
                self._wake.notify_all()

    # The client's I/O thread, and the mapper's.

    def receive(self, message: Message) -> None:
        """Queues a message of tierd. The client's sink."""
        if isinstance(message, LoadPinned):
            self._pins.append(message)
        elif isinstance(message, Welcome | Ready | SessionRefused):
            self._put(message)

    def on_client_lost(self, reason: str) -> None:
        """Ends submissions; queues the loss. The client does not reattach before this thread has
        drained."""
        try:
            with self._copies:
                self._completions.epoch = 0
                self._pins.clear()
                self._loads.forget_pins()
                self._loads.stop_all("lost")
                self._stores.drop_pending()
        finally:
            self._put(_ClientLost(reason))

    def on_pool_ready(self, ready: PoolReady) -> None:
        """Queues the result of the mapper."""
        self._put(ready)

    def _put(self, item: _Input) -> None:
        with self._wake:
            if self._closed or self._closing:
                return
            self._inputs.append(item)
            self._wake.notify_all()

    # The transfer thread.

    def _run(self) -> None:
        try:
            self._engine.enter_thread()
            while not self._drained and self._serve():
                pass
        except Exception as error:  # noqa: BLE001 - the last resort: the engine serves on
            self._failures.stop(error)
        finally:
            self._finish()

    def _serve(self) -> bool:
        """Runs until the end, or until an error; returns whether to go on after the error."""
        try:
            while self._run_once():
                pass
            self._drain("closing")
            self._drained = True
            return True
        except Exception as error:  # noqa: BLE001 - the engine serves on, without tiers for a while
            return self._failures.rearm(error)

    def _sleep_unless_closing(self, seconds: float) -> bool:
        """Waits for ``seconds``; returns True at once when the thread closes."""
        with self._wake:
            return self._wake.wait_for(lambda: self._closing, seconds)

    def _run_once(self) -> bool:
        """Handles inputs, looks after the copies of an idle engine, and waits; returns False when
        the thread must end."""
        # Also when it closes: an error is counted.
        self._raise_failure()
        with self._wake:
            if self._closing:
                return False
            inputs = list(self._inputs)
            self._inputs.clear()
        for item in inputs:
            self._handle(item)
        self._raise_failure()
        if self._hooks_are_idle() or len(self._outbox):
            with self._copies:
                if self._hooks_are_idle():
                    self._advance()
                self._outbox.flush()
        with self._wake:
            if not self._inputs and not self._closing and self._failures.error is None:
                # Set first: a hook that adds copies after the look at them finds it set.
                self._sleeping = True
                timeout = self._timeout()
                self._sleeping = timeout >= IDLE_SECONDS
                self._wake.wait(timeout)
                self._sleeping = False
        return True

    def _raise_failure(self) -> None:
        error = self._failures.error
        if error is not None:
            raise error

    def _hooks_are_idle(self) -> bool:
        busy = len(self._loads) or len(self._stores)
        return bool(busy) and self._context.clock() - self._hook_ran_at >= IDLE_HOOK_SECONDS

    def _timeout(self) -> float:
        if len(self._outbox):
            return RESEND_SECONDS
        if not len(self._loads) and not len(self._stores):
            return IDLE_SECONDS
        since = self._context.clock() - self._hook_ran_at
        return IDLE_POLL_SECONDS if since >= IDLE_HOOK_SECONDS else IDLE_HOOK_SECONDS - since

    def _handle(self, item: _Input) -> None:
        match item:
            case Welcome():
                self._welcome = item
                self._pool.use(item)
            case Ready():
                self._on_ready(item)
            case PoolReady():
                self._pool.on_pool(item, self._welcome)
            case _ClientLost():
                self._on_lost(item.reason)
            case SessionRefused():
                self._counters.add("refused")
                self._completions.epoch = 0
                logger.warning(
                    "KVTier: serving without tiers: tierd refused the session: %s", item.reason
                )

    def _on_ready(self, ready: Ready) -> None:
        """The engine's namespace opened: tierd says where this rank's shards lie."""
        welcome = self._welcome
        expected = None if welcome is None else self._pool.span(welcome.pool_bytes)
        with self._copies:
            problem = self._context.shards.set(ready)
            self._update_epoch()
        if problem:
            self._counters.add("shards_refused")
            logger.warning("KVTier: serving without tiers: invalid slot layout: %s", problem)
        elif welcome is not None and expected != self._pool.span(welcome.pool_bytes):
            self._pool.use(welcome)

    def _update_epoch(self) -> None:
        """Copies are possible once a pool is attached and the layout of its slots is known."""
        welcome = self._welcome
        epoch = 0
        if welcome is not None and self._pool.is_usable(welcome.pool_bytes):
            epoch = 0 if self._suspended else welcome.epoch
        self._completions.epoch = epoch

    def _on_lost(self, reason: str) -> None:
        self._counters.add("lost")
        logger.warning("KVTier: serving without tiers until tierd is available again: %s", reason)
        self._drain("lost")
        with self._copies:
            self._outbox.clear()
            self._context.shards.clear()
        if self._welcome is not None:
            self._drained_epoch = max(self._drained_epoch, self._welcome.epoch)
        self._welcome = None
        self._context.shards.clear()
        self._client.reattach(self._drained_epoch)

    def _drain(self, reason: str) -> None:
        """Afterwards no copy runs, and no load or store is left.

        Raises ``CopyError`` if the device cannot be synchronized.
        """
        with self._copies:
            self._completions.epoch = 0
            self._loads.stop_all(reason)
            self._stores.drop_pending()
        # Without the lock: the engine's thread must not wait for the device.
        self._engine.wait_idle()
        with self._copies:
            self._engine.synchronize()
            while len(self._loads):
                self._loads.advance()
            self._stores.drop_all()

    def _finish(self) -> None:
        with self._wake:
            self._closed = True
            self._inputs.clear()
        self._completions.epoch = 0
        try:
            if not self._drained:
                self._failures.abandon()
        except Exception as error:  # what is not reported here has ended, and is found missing
            logger.exception("KVTier: cannot end what was open: %s", error)
        self._ended.set()
        if self._drained:
            with self._copies:
                self._engine.close()
                self._context.generations.words = None
            self._pool.close()
