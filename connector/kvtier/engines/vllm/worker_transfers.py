"""Loads and stores of one rank, as state machines that the transfer thread advances.

A load needs its ``LoadJob`` (from the scheduler, through vLLM) and its ``LoadReady`` (from tierd);
either may arrive first. It ends once: when everything available is copied, or at its deadline, a
cancellation, a failure, or the loss of tierd. In the latter cases no further copy is submitted, and
the report waits for the submitted ones, because until then the GPU writes into blocks that the
report gives back to vLLM.

A store ends with ``Deliver`` or ``Abort`` for tierd and one report for the scheduler side, which
references the source blocks until then. So every job is reported, and only after the GPU has
stopped reading its blocks.

docs/datapath.md has the rules. All methods are called by the transfer thread.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvtier.engines.vllm.metadata import LoadJob, LoadResult, StoreJob
from kvtier.engines.vllm.worker_state import LoadEnd, RankContext
from kvtier.tierd.wire import Abort, Deliver, LoadReady, LoadReleased, Message
from kvtier.transfer.engine import Copy, CopyError, CopyHandle, Direction

MAX_EARLY_ANNOUNCEMENTS = 256
"""Announcements without a job. A job follows within one engine step, and at most 32 requests wait
for a promotion at a time."""
MAX_ENDED_LOADS = 4096
"""Ended loads that are remembered because their announcement may still arrive."""


@dataclass(slots=True, eq=False)
class _RankLoad:
    job: LoadJob
    fence: object | None
    started_at: float
    deadline: float
    announcement: LoadReady | None = None
    submitted_keys: int = 0
    copied_keys: int = 0
    copied_bytes: int = 0
    copy_seconds: float = 0.0
    stop_reason: str = ""
    in_flight: deque[tuple[CopyHandle, int]] = field(default_factory=deque)
    """Submissions, with the number of keys that are copied once each is done."""

    @property
    def available_keys(self) -> int:
        """Keys that tierd announced."""
        if self.announcement is None:
            return 0
        return min(len(self.announcement.slots), len(self.job.runs))

    @property
    def fully_submitted(self) -> bool:
        """Whether nothing is left to submit."""
        return self.announcement is not None and self.submitted_keys == self.available_keys


class WorkerLoads:
    """All loads of this rank."""

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
        self._active: dict[int, _RankLoad] = {}
        self._early: OrderedDict[int, LoadReady] = OrderedDict()
        """Announcements whose job has not arrived."""
        self._ended: OrderedDict[int, None] = OrderedDict()
        """Loads that ended before their announcement arrived."""

    def __len__(self) -> int:
        return len(self._active)

    @property
    def copying(self) -> bool:
        """Whether a submitted copy may still run."""
        return any(load.in_flight for load in self._active.values())

    def next_deadline(self) -> float | None:
        """Returns the earliest deadline of a load that has something left to submit."""
        deadlines = (
            load.deadline
            for load in self._active.values()
            if not load.stop_reason and not load.fully_submitted
        )
        return min(deadlines, default=None)

    def add(self, jobs: Iterable[LoadJob], fence: object | None, received_at: float) -> None:
        """Adds jobs, whose target blocks may be written after ``fence``."""
        requests = {load.job.request_id for load in self._active.values()}
        for job in jobs:
            if job.load in self._active or job.load in self._ended:
                self._counters.add("duplicate_loads")
            elif job.request_id in requests:
                # vLLM waits for one report per request, and a second one ends the engine.
                self._counters.add("duplicate_requests")
                end = LoadEnd.rejected(job, "duplicate", report_expected=False)
                self._context.completions.add_load(end)
                self._release(job.load, self._early.pop(job.load, None))
            else:
                requests.add(job.request_id)
                load = _RankLoad(job, fence, received_at, received_at + job.timeout_seconds)
                load.announcement = self._early.pop(job.load, None)
                self._active[job.load] = load

    def on_announcement(self, announcement: LoadReady) -> None:
        """tierd announced the slots of a load."""
        number = announcement.load
        load = self._active.get(number)
        if load is not None and load.announcement is None:
            load.announcement = announcement
        elif load is not None or number in self._early:
            self._counters.add("duplicate_slots")
        elif number in self._ended:
            self._ended.pop(number)
            self._counters.add("late_slots")
            self._send(LoadReleased(load=number))
        else:
            self._early[number] = announcement
            if len(self._early) > MAX_EARLY_ANNOUNCEMENTS:
                dropped, _ = self._early.popitem(last=False)
                self._counters.add("stash_dropped")
                self._send(LoadReleased(load=dropped))

    def cancel(self, loads: Iterable[int]) -> None:
        """Stops loads whose requests were aborted."""
        for number in loads:
            load = self._active.get(number)
            if load is None:
                self._counters.add("unknown_cancels")
            elif not load.stop_reason:
                load.stop_reason = "cancelled"

    def stop_all(self, reason: str) -> None:
        """Stops every load. Those whose copies are done end in the next ``advance``."""
        for load in self._active.values():
            load.stop_reason = load.stop_reason or reason

    def forget_announcements(self) -> None:
        """Drops what the previous tierd announced. Call it while no load is active."""
        self._early.clear()
        self._ended.clear()

    def abandon(self, reason: str) -> None:
        """Ends every load without waiting for its copies: the device is lost or idle."""
        for load in list(self._active.values()):
            load.stop_reason = load.stop_reason or reason
            load.in_flight.clear()
            self._end(load)

    def advance(self, can_copy: bool) -> bool:
        """Collects and submits at most one batch of each load; returns whether anything changed.

        ``can_copy``: a pool is attached. Raises ``CopyError`` if the device cannot be synchronized
        after a failure.
        """
        changed = False
        for load in list(self._active.values()):
            changed |= self._collect(load)
            if not load.stop_reason and not load.fully_submitted:
                if self._context.clock() >= load.deadline:
                    load.stop_reason = "limit"
                elif can_copy and load.announcement is not None:
                    changed |= self._submit(load, load.announcement.slots)
                    changed |= self._collect(load)
            if (load.stop_reason or load.fully_submitted) and not load.in_flight:
                self._end(load)
                changed = True
        return changed

    def _collect(self, load: _RankLoad) -> bool:
        changed = False
        while load.in_flight:
            handle, keys = load.in_flight[0]
            try:
                if not self._engine.done(handle):
                    break
                if load.stop_reason != "copy":
                    load.copied_keys = keys
                    load.copied_bytes += handle.total_bytes
                    load.copy_seconds += handle.seconds
            except CopyError:
                self._on_copy_error(load)
            load.in_flight.popleft()
            changed = True
        return changed

    def _submit(self, load: _RankLoad, slots: Sequence[int]) -> bool:
        copies: list[Copy] = []
        total_bytes = 0
        keys = load.submitted_keys
        while keys < load.available_keys and (not copies or total_bytes < self._batch_bytes):
            copy = self._context.copy(load.job.runs[keys], slots[keys])
            problem = self._engine.check(copy)
            if problem:
                self._counters.add("bad_addresses")
                load.stop_reason = f"address: {problem}"
                break
            total_bytes += self._engine.copy_bytes(copy)
            copies.append(copy)
            keys += 1
        if not copies or not self._engine.has_room(Direction.TO_DEVICE, total_bytes):
            return bool(load.stop_reason)
        try:
            handle = self._engine.submit(copies, Direction.TO_DEVICE, load.fence)
            load.in_flight.append((handle, keys))
            load.submitted_keys = keys
        except CopyError:
            self._on_copy_error(load)
        return True

    def _on_copy_error(self, load: _RankLoad) -> None:
        # Part of the copy may still run; nothing may be reported before the device is idle.
        self._counters.add("copy_errors")
        load.stop_reason = "copy"
        self._engine.synchronize()

    def _end(self, load: _RankLoad) -> None:
        job, keys = load.job, load.copied_keys
        del self._active[job.load]
        complete = keys == len(job.runs)
        tiers = load.announcement.tiers[:keys] if load.announcement is not None else ()
        result = LoadResult(
            load=job.load,
            request_id=job.request_id,
            keys_loaded=keys,
            tiers=tiers + (0,) * (keys - len(tiers)),
            reason="" if complete else load.stop_reason or "gone",
            seconds=self._context.clock() - load.started_at,
            copy_seconds=load.copy_seconds,
            copied_bytes=load.copied_bytes,
        )
        self._counters.add(
            "loads_whole" if complete else "loads_partial" if keys else "loads_failed"
        )
        self._counters.add("loaded_bytes", load.copied_bytes)
        self._context.completions.add_load(LoadEnd.of(job, result))
        self._release(job.load, load.announcement)

    def _release(self, number: int, announcement: LoadReady | None) -> None:
        if announcement is not None:
            self._send(LoadReleased(load=number))
            return
        self._ended[number] = None
        if len(self._ended) > MAX_ENDED_LOADS:
            self._ended.popitem(last=False)


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
        self._open: set[int] = set()
        """Reservations that have not ended."""
        self._pending: deque[tuple[StoreJob, object | None]] = deque()
        """Jobs to submit, each with its fence."""
        self._in_flight: deque[tuple[CopyHandle, tuple[int, ...]]] = deque()
        self._delivered: list[int] = []
        self._aborted: list[int] = []

    @property
    def copying(self) -> bool:
        """Whether a submitted copy may still run."""
        return bool(self._in_flight)

    def add(self, jobs: Iterable[StoreJob], fence: object | None, epoch: int) -> None:
        """Adds jobs, whose blocks may be read after ``fence``.

        ``epoch``: the tierd epoch in which this rank can copy, 0 if it cannot.
        """
        for job in jobs:
            if job.reservation in self._open:
                self._counters.add("duplicate_stores")
                continue
            self._open.add(job.reservation)
            if epoch and job.epoch == epoch:
                self._pending.append((job, fence))
            else:
                self._counters.add("stores_stale")
                self._finish((job.reservation,), delivered=False)

    def drop_all(self) -> None:
        """Ends every store after the loss of tierd, without a message to it. No copy may run."""
        dropped = [number for _, numbers in self._in_flight for number in numbers]
        dropped += [job.reservation for job, _ in self._pending]
        self._in_flight.clear()
        self._pending.clear()
        self._counters.add("stores_dropped", len(dropped))
        self._finish(dropped, delivered=False)
        self._delivered.clear()
        self._aborted.clear()

    def advance(self) -> bool:
        """Collects, submits at most one batch, and reports to tierd.

        Returns whether anything changed. Raises ``CopyError`` as ``WorkerLoads.advance`` does.
        """
        changed = self._collect()
        changed |= self._submit()
        changed |= self._collect()
        if self._delivered:
            self._counters.add("stores_delivered", len(self._delivered))
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
                self._on_copy_error()
                delivered = False
            self._in_flight.popleft()
            self._finish(numbers, delivered)
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
            handle = self._engine.submit(copies, Direction.TO_HOST, batch_fence)
            self._in_flight.append((handle, tuple(numbers)))
        except CopyError:
            self._on_copy_error()
            self._finish(numbers, delivered=False)
        return True

    def _on_copy_error(self) -> None:
        self._counters.add("copy_errors")
        self._engine.synchronize()

    def _finish(self, numbers: Sequence[int], delivered: bool) -> None:
        if not delivered:
            self._counters.add("stores_aborted", len(numbers))
        (self._delivered if delivered else self._aborted).extend(numbers)
        self._open.difference_update(numbers)
        self._context.completions.add_stores(numbers)
