"""Loads on one rank: from a job and the slots that tierd announces for it to one report.

A load needs both its ``LoadJob`` (from the scheduler, through vLLM) and its ``LoadReady`` (from tierd); either may come
first. It ends exactly once: when everything that could be copied is copied, or at its limit, a cancellation, a failure
or the loss of tierd. In the latter cases nothing further is submitted, and the report waits until what was submitted is
done, because until then the GPU writes into blocks that the report would give away (DATAPATH 5).

All methods are called by the transfer thread.

Stores on one rank: from a job to ``Deliver`` or ``Abort`` for tierd and one report for the scheduler side.

The scheduler side holds a reference on the source blocks until the report, so every job is reported, whatever becomes
of it, and none before the GPU has stopped reading its blocks.

All methods are called by the transfer thread.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvtier.engines.vllm.metadata import BlockRun, LoadJob, LoadResult, StoreJob
from kvtier.engines.vllm.worker_state import (
    Clock,
    CompletionQueue,
    Counters,
    LoadEnd,
    missing_blocks,
    refused,
)
from kvtier.tierd.wire import Abort, Deliver, LoadReady, LoadReleased, Message
from kvtier.transfer.engine import Copy, CopyEngine, CopyError, CopyHandle, Direction

STASH_LOADS = 256
"""Announcements kept without a job. A job follows within one engine step, and 32 requests at most wait for promotion
at a time.
"""
ENDED_LOADS = 4096
"""Ended loads remembered while their announcement may still come."""
BATCH_BYTES = 32 << 20
"""Copied per submission; between two of them limits and cancellations are looked at."""


@dataclass(slots=True, eq=False)
class _Load:
    job: LoadJob
    fence: object | None
    begun: float
    deadline: float
    owed: bool = True
    slots: LoadReady | None = None
    submitted: int = 0
    copied: int = 0
    copied_bytes: int = 0
    stopped: str = ""
    in_flight: deque[tuple[CopyHandle, int]] = field(default_factory=deque)

    @property
    def usable(self) -> int:
        """Keys that can be copied at all: those that tierd announced."""
        return 0 if self.slots is None else min(len(self.slots.slots), len(self.job.runs))

    @property
    def complete(self) -> bool:
        """Whether nothing is left to submit, ever."""
        return self.slots is not None and self.submitted == self.usable


class WorkerLoads:
    """All loads of this rank.

    ``shard_offsets[g]``: where this rank's shard of group g begins in a slot.
    """

    def __init__(
        self,
        engine: CopyEngine,
        shard_offsets: tuple[int, ...],
        send: Callable[[Message], None],
        reports: CompletionQueue,
        counters: Counters,
        clock: Clock,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        self._engine = engine
        self._shard_offsets = shard_offsets
        self._send = send
        self._reports = reports
        self._counters = counters
        self._clock = clock
        self._batch_bytes = batch_bytes
        self._active: dict[int, _Load] = {}
        self._stash: OrderedDict[int, LoadReady] = OrderedDict()
        self._ended: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._active)

    @property
    def copying(self) -> bool:
        """Whether a submitted copy has not been seen done."""
        return any(load.in_flight for load in self._active.values())

    def next_deadline(self) -> float | None:
        """The earliest limit of a load that still waits to submit."""
        waiting = (
            load.deadline
            for load in self._active.values()
            if not load.stopped and not load.complete
        )
        return min(waiting, default=None)

    def add(self, jobs: Iterable[LoadJob], fence: object | None, received: float) -> None:
        """Takes jobs that the engine's thread received at ``received``; their target blocks may be written after
        ``fence``.
        """
        requests = {load.job.request_id for load in self._active.values()}
        for job in jobs:
            if job.load in self._active or job.load in self._ended:
                self._counters.add("duplicate_loads")
                continue
            owed = job.request_id not in requests
            if (
                not owed
            ):  # vLLM waits for one report per request and takes a second one for an error
                self._counters.add("duplicate_requests")
                self._reports.load_ended(refused(job, "duplicate", owed=False))
                self._end_of(job.load, self._stash.pop(job.load, None))
                continue
            requests.add(job.request_id)
            load = _Load(job, fence, received, received + job.limit_seconds)
            load.slots = self._stash.pop(job.load, None)
            self._active[job.load] = load

    def announced(self, slots: LoadReady) -> None:
        """Tierd says where a load's keys lie."""
        load = self._active.get(slots.load)
        if load is not None and load.slots is None:
            load.slots = slots
        elif load is not None or slots.load in self._stash:
            self._counters.add("duplicate_slots")
        elif slots.load in self._ended:
            self._ended.pop(slots.load)
            self._counters.add("late_slots")
            self._send(LoadReleased(load=slots.load))
        else:
            self._stash[slots.load] = slots
            if len(self._stash) > STASH_LOADS:
                dropped, _ = self._stash.popitem(last=False)
                self._counters.add("stash_dropped")
                self._send(LoadReleased(load=dropped))

    def cancel(self, loads: Iterable[int]) -> None:
        """The requests of these loads were aborted."""
        for number in loads:
            load = self._active.get(number)
            if load is None:
                self._counters.add("unknown_cancels")
            elif not load.stopped:
                load.stopped = "cancelled"

    def stop_all(self, reason: str) -> None:
        """No load submits any more. Those whose copies are done end in the next ``advance``."""
        for load in self._active.values():
            load.stopped = load.stopped or reason

    def forget(self) -> None:
        """Tierd is another one: announcements and memories of the old one mean nothing. Call it when no load is
        active.
        """
        self._stash.clear()
        self._ended.clear()

    def abandon(self, reason: str) -> None:
        """Ends every load at once, as far as its copies were seen done: the device is lost or idle."""
        for load in list(self._active.values()):
            load.stopped = load.stopped or reason
            load.in_flight.clear()
            self._end(load)

    def advance(self, can_copy: bool) -> bool:
        """Looks at every load once and submits at most one batch of each; whether anything happened.

        ``can_copy``: a pool is attached. Raises ``CopyError`` only when the device cannot be synchronised after a
        failure.
        """
        happened = False
        for load in list(self._active.values()):
            happened |= self._collect(load)
            if not load.stopped and not load.complete and self._clock() >= load.deadline:
                load.stopped = "limit"
            if can_copy and not load.stopped and not load.complete and load.slots is not None:
                happened |= self._submit(load)
                happened |= self._collect(load)
            if (load.stopped or load.complete) and not load.in_flight:
                self._end(load)
                happened = True
        return happened

    def _collect(self, load: _Load) -> bool:
        happened = False
        while load.in_flight:
            handle, keys = load.in_flight[0]
            try:
                if not self._engine.done(handle):
                    break
                if load.stopped != "copy":
                    load.copied, load.copied_bytes = keys, load.copied_bytes + handle.total_bytes
            except CopyError:
                self._failed(load)
            load.in_flight.popleft()
            happened = True
        return happened

    def _submit(self, load: _Load) -> bool:
        copies: list[Copy] = []
        total = 0
        keys = load.submitted
        while (
            keys < load.usable
            and load.slots is not None
            and (not copies or total < self._batch_bytes)
        ):
            run = load.job.runs[keys]
            copy = self._copy(run, load.slots.slots[keys])
            problem = self._engine.check(copy)
            if problem:
                self._counters.add("bad_addresses")
                load.stopped = f"address: {problem}"
                break
            total += self._engine.copy_bytes(copy)
            copies.append(copy)
            keys += 1
        if not copies or not self._engine.has_room(Direction.TO_DEVICE, total):
            return bool(load.stopped)
        try:
            load.in_flight.append(
                (self._engine.submit(copies, Direction.TO_DEVICE, load.fence), keys)
            )
            load.submitted = keys
        except CopyError:
            self._failed(load)
        return True

    def _copy(self, run: BlockRun, slot: int) -> Copy:
        offset = self._shard_offsets[run.group] if 0 <= run.group < len(self._shard_offsets) else 0
        return Copy(run.group, slot + offset if slot >= 0 else -1, run.first, run.blocks)

    def _failed(self, load: _Load) -> None:
        """A copy failed: some of it may still run, so nothing of it may be reported before the device is idle."""
        self._counters.add("copy_errors")
        load.stopped = "copy"
        self._engine.synchronise()

    def _end(self, load: _Load) -> None:
        del self._active[load.job.load]
        keys, wanted = load.copied, len(load.job.runs)
        tiers = load.slots.tiers[:keys] if load.slots is not None else ()
        reason = "" if keys == wanted else load.stopped or "gone"
        result = LoadResult(
            load=load.job.load,
            request_id=load.job.request_id,
            keys_loaded=keys,
            tiers=tiers + (0,) * (keys - len(tiers)),
            reason=reason,
            seconds=self._clock() - load.begun,
            copied_bytes=load.copied_bytes,
        )
        self._counters.add(
            "loads_whole" if keys == wanted else "loads_partial" if keys else "loads_failed"
        )
        self._counters.add("loaded_bytes", load.copied_bytes)
        self._reports.load_ended(
            LoadEnd(result, missing_blocks(load.job, keys), whole=keys == wanted)
        )
        self._end_of(load.job.load, load.slots)

    def _end_of(self, number: int, slots: LoadReady | None) -> None:
        if slots is not None:
            self._send(LoadReleased(load=number))
            return
        self._ended[number] = None
        if len(self._ended) > ENDED_LOADS:
            self._ended.popitem(last=False)


@dataclass(slots=True)
class _Pending:
    job: StoreJob
    fence: object | None


class WorkerStores:
    """All stores of this rank. ``shard_offsets[g]``: where this rank's shard of group g begins in a slot."""

    def __init__(
        self,
        engine: CopyEngine,
        shard_offsets: tuple[int, ...],
        send: Callable[[Message], None],
        reports: CompletionQueue,
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
            self._in_flight.append(
                (self._engine.submit(copies, Direction.TO_HOST, fence), tuple(numbers))
            )
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
