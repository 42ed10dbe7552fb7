"""Stores on one rank: from a job to ``Deliver`` or ``Abort`` for tierd and one report for the scheduler side.

The scheduler side holds a reference on the source blocks until the report, so every job is reported, whatever becomes
of it, and none before the GPU has stopped reading its blocks.

All methods are called by the transfer thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvtier.engines.vllm.metadata import StoreJob
from kvtier.engines.vllm.worker_state import Counters, Reports
from kvtier.tierd.wire import Abort, Deliver, Message
from kvtier.transfer.base import Copy, CopyEngine, CopyError, CopyHandle, Direction

BATCH_BYTES = 32 << 20
"""Copied per submission; a load that arrives waits for no more than this where copies are not asynchronous."""


@dataclass(slots=True)
class _Pending:
    job: StoreJob
    fence: object | None


class Stores:
    """All stores of this rank. ``shard_offsets[g]``: where this rank's shard of group g begins in a slot."""

    def __init__(
        self,
        engine: CopyEngine,
        shard_offsets: tuple[int, ...],
        send: Callable[[Message], None],
        reports: Reports,
        counters: Counters,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        self._engine = engine
        self._shard_offsets = shard_offsets
        self._send = send
        self._reports = reports
        self._counters = counters
        self._batch_bytes = batch_bytes
        self._pending: deque[_Pending] = deque()
        self._in_flight: deque[tuple[CopyHandle, tuple[int, ...]]] = deque()
        self._open: set[int] = set()
        self._delivered: list[int] = []
        self._aborted: list[int] = []

    @property
    def copying(self) -> bool:
        """Whether a submitted copy has not been seen done."""
        return bool(self._in_flight)

    def add(self, jobs: Iterable[StoreJob], fence: object | None, epoch: int) -> None:
        """Takes jobs whose blocks may be read after ``fence``. ``epoch``: of the tierd this rank can copy for, 0 if
        none.
        """
        for job in jobs:
            if job.reservation in self._open:
                self._counters.add("duplicate_stores")
                continue
            self._open.add(job.reservation)
            if not epoch or job.epoch != epoch:
                self._counters.add("stores_stale")
                self._finish((job.reservation,), delivered=False)
                continue
            self._pending.append(_Pending(job, fence))

    def drop_all(self) -> None:
        """Ends everything undelivered; nothing may be in flight on the device. tierd needs no word: it forgot, or
        will.
        """
        rest = [number for _, numbers in self._in_flight for number in numbers]
        rest += [pending.job.reservation for pending in self._pending]
        self._in_flight.clear()
        self._pending.clear()
        self._counters.add("stores_dropped", len(rest))
        self._finish(rest, delivered=False)
        self._delivered.clear()
        self._aborted.clear()

    def advance(self) -> bool:
        """Collects what is done, submits at most one batch, tells tierd; whether anything happened. Raises
        ``CopyError`` as ``Loads.advance``.
        """
        happened = self._collect()
        happened |= self._submit()
        happened |= self._collect()
        self._tell()
        return happened

    def _tell(self) -> None:
        if self._delivered:
            self._counters.add("stores_delivered", len(self._delivered))
            self._send(Deliver(reservations=tuple(self._delivered)))
            self._delivered.clear()
        if self._aborted:
            self._send(Abort(reservations=tuple(self._aborted)))
            self._aborted.clear()

    def _collect(self) -> bool:
        happened = False
        while self._in_flight:
            handle, numbers = self._in_flight[0]
            delivered = True
            try:
                if not self._engine.done(handle):
                    break
                self._counters.add("stored_bytes", handle.total_bytes)
            except CopyError:
                self._failed()
                delivered = False
            self._in_flight.popleft()
            self._finish(numbers, delivered)
            happened = True
        return happened

    def _submit(self) -> bool:
        copies: list[Copy] = []
        numbers: list[int] = []
        total = 0
        fence: object | None = None
        happened = False
        while self._pending and total < self._batch_bytes:
            pending = self._pending[0]
            copy = self._copy(pending.job)
            if self._engine.check(copy):
                self._pending.popleft()
                self._counters.add("bad_addresses")
                self._finish((pending.job.reservation,), delivered=False)
                happened = True
                continue
            more = self._engine.copy_bytes(copy)
            if not self._engine.has_room(Direction.TO_HOST, total + more, alone=not copies):
                break
            if copies and pending.fence is not fence:
                break
            fence = pending.fence
            self._pending.popleft()
            copies.append(copy)
            numbers.append(pending.job.reservation)
            total += more
        if not copies:
            return happened
        try:
            self._in_flight.append((self._engine.submit(copies, Direction.TO_HOST, fence), tuple(numbers)))
        except CopyError:
            self._failed()
            self._finish(numbers, delivered=False)
        return True

    def _copy(self, job: StoreJob) -> Copy:
        run = job.run
        offset = self._shard_offsets[run.group] if 0 <= run.group < len(self._shard_offsets) else 0
        return Copy(run.group, job.slot + offset if job.slot >= 0 else -1, run.first, run.blocks)

    def _failed(self) -> None:
        self._counters.add("copy_errors")
        self._engine.synchronise()

    def _finish(self, numbers: Iterable[int], delivered: bool) -> None:
        numbers = tuple(numbers)
        if not delivered:
            self._counters.add("stores_aborted", len(numbers))
        (self._delivered if delivered else self._aborted).extend(numbers)
        self._open.difference_update(numbers)
        self._reports.stores_done(numbers)
