"""Stores of one rank, as state machines that the hooks of the engine's thread advance.

A store ends with ``Deliver`` or ``Abort`` for tierd and one report for the scheduler side, which
references the source blocks until then. So every job is reported, and only after the GPU has
stopped reading its blocks.

docs/datapath.md has the rules. Callers hold the lock of the copies (``worker_thread``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from kvtier.engines.common.jobs import StoreJob
from kvtier.engines.common.worker_state import SUBMIT_SECONDS, RankContext
from kvtier.tierd.wire import Abort, Deliver, Message
from kvtier.transfer.engine import Copy, CopyError, CopyHandle, Direction


class WorkerStores:
    """All stores of this rank."""

    def __init__(
        self,
        context: RankContext,
        send: Callable[[Message], None],
        batch_bytes: int | None = None,
    ) -> None:
        self._context = context
        self._engine = context.engine
        self._counters = context.counters
        self._send = send
        self._batch_bytes = batch_bytes or context.engine.batch_bytes
        self._open: dict[int, int] = {}
        """Reservations that have not ended, with their groups."""
        self._pending: deque[tuple[StoreJob, object | None]] = deque()
        """Jobs to submit, each with its fence."""
        self._in_flight: deque[tuple[CopyHandle, tuple[int, ...]]] = deque()
        self._voided: set[int] = set()
        """Open stores that must not be delivered."""
        self._delivered: list[int] = []
        self._aborted: list[int] = []

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, reservation: object) -> bool:
        return reservation in self._open

    def add(self, jobs: Iterable[StoreJob], fence: object | None, epoch: int) -> None:
        """Adds jobs, whose blocks may be read after ``fence``.

        ``epoch``: the tierd epoch in which this rank can copy, 0 if it cannot.
        """
        for job in jobs:
            if job.reservation in self._open:
                self._counters.add("duplicate_stores")
                continue
            if epoch and not self._context.shards.writes(job.run.group):
                # Another rank holds the same bytes and writes them, or this one has none.
                if job.run.group == self._context.counted_group:
                    self._counters.add("stores_delivered")
                self._context.completions.add_stores((job.reservation,))
                continue
            self._open[job.reservation] = job.run.group
            if epoch and job.epoch == epoch:
                self._pending.append((job, fence))
            else:
                self._counters.add("stores_stale")
                self._finish((job.reservation,), delivered=False)

    def void(self, reservations: Sequence[int] | None) -> None:
        """Ends these stores (None: all) without a delivery: their blocks may be overwritten.

        What was copied completely before this call is not in ``_open`` any longer, and is right.
        """
        voided = self._open.keys() & set(self._open if reservations is None else reservations)
        if not voided:
            return
        pending = [job.reservation for job, _ in self._pending if job.reservation in voided]
        self._pending = deque(each for each in self._pending if each[0].reservation not in voided)
        self._counters.add("stores_voided", len(voided))
        self._voided |= voided.difference(pending)
        self._finish(pending, delivered=False)

    def drop_pending(self) -> None:
        """Ends the stores that are not submitted."""
        dropped = [job.reservation for job, _ in self._pending]
        self._pending.clear()
        self._counters.add("stores_dropped", len(dropped))
        self._finish(dropped, delivered=False)

    def drop_all(self) -> None:
        """Ends every store after the loss of tierd, without a message to it. No copy may run."""
        self.drop_pending()
        # Also those that an error has left neither pending nor in flight.
        dropped = list(self._open)
        self._in_flight.clear()
        self._counters.add("stores_dropped", len(dropped))
        self._finish(dropped, delivered=False)
        self._delivered.clear()
        self._aborted.clear()

    def abort_lost(self, reservations: Iterable[int]) -> None:
        """tierd hears with the next ``advance`` that these stores, which an error has lost, are
        not delivered by this rank."""
        lost = [number for number in reservations if number not in self._open]
        self._counters.add("stores_aborted", len(lost))
        self._aborted.extend(lost)

    def advance(self) -> bool:
        """Collects what has ended, submits as ``WorkerLoads.advance`` does, and reports to tierd.

        Returns whether anything changed.
        """
        changed = self._collect()
        until = self._context.clock() + SUBMIT_SECONDS
        while self._submit():
            changed = True
            self._collect()
            if self._engine.synchronous or self._context.clock() >= until:
                break
        if self._delivered:
            self._send(Deliver(reservations=tuple(self._delivered)))
            self._delivered.clear()
        if self._aborted:
            self._send(Abort(reservations=tuple(self._aborted)))
            self._aborted.clear()
        return changed

    def _collect(self) -> bool:
        changed = False
        while self._in_flight:
            handle, numbers = self._in_flight[0]
            delivered = True
            try:
                if not self._engine.done(handle):
                    break
                self._counters.add("stored_bytes", handle.total_bytes)
            except CopyError:
                self._counters.add("copy_errors")
                delivered = False
            self._in_flight.popleft()
            intact = [number for number in numbers if delivered and number not in self._voided]
            self._finish(intact, delivered=True)
            self._finish([each for each in numbers if each not in intact], delivered=False)
            changed = True
        return changed

    def _submit(self) -> bool:
        copies: list[Copy] = []
        numbers: list[int] = []
        total_bytes = 0
        batch_fence: object | None = None
        changed = False
        while self._pending and total_bytes < self._batch_bytes:
            job, fence = self._pending[0]
            copy = self._context.copy(job.run, job.slot)
            if self._engine.check(copy):
                self._pending.popleft()
                self._counters.add("bad_addresses")
                self._finish((job.reservation,), delivered=False)
                changed = True
                continue
            size = self._engine.copy_bytes(copy)
            if not self._engine.has_room(Direction.TO_HOST, total_bytes + size, alone=not copies):
                break
            if copies and fence is not batch_fence:
                break
            batch_fence = fence
            self._pending.popleft()
            copies.append(copy)
            numbers.append(job.reservation)
            total_bytes += size
        if not copies:
            return changed
        try:
            handle = self._engine.submit(copies, Direction.TO_HOST, batch_fence, checked=True)
            self._in_flight.append((handle, tuple(numbers)))
        except CopyError:
            self._counters.add("copy_errors")
            self._finish(numbers, delivered=False)
        return True

    def _finish(self, numbers: Sequence[int], delivered: bool) -> None:
        if not delivered:
            self._counters.add("stores_aborted", len(numbers))
        else:
            counted = self._context.counted_group
            chunks = sum(self._open.get(number) == counted for number in numbers)
            self._counters.add("stores_delivered", chunks)
        (self._delivered if delivered else self._aborted).extend(numbers)
        for number in numbers:
            self._open.pop(number, None)
        self._voided.difference_update(numbers)
        self._context.completions.add_stores(numbers)
