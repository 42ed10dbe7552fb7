"""Loads on one rank: from a job and the slots that tierd announces for it to one report.

A load needs both its ``LoadJob`` (from the scheduler, through vLLM) and its ``Slots`` (from tierd); either may come
first. It ends exactly once: when everything that could be copied is copied, or at its limit, a cancellation, a failure
or the loss of tierd. In the latter cases nothing further is submitted, and the report waits until what was submitted is
done, because until then the GPU writes into blocks that the report would give away (DATAPATH 5).

All methods are called by the transfer thread.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvtier.engines.vllm.metadata import BlockRun, LoadJob, LoadResult
from kvtier.engines.vllm.worker_state import Clock, Counters, LoadEnd, Reports, missing_blocks, refused
from kvtier.tierd.wire import Loaded, Message, Slots
from kvtier.transfer.base import Copy, CopyEngine, CopyError, CopyHandle, Direction

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
    slots: Slots | None = None
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


class Loads:
    """All loads of this rank.

    ``shard_offsets[g]``: where this rank's shard of group g begins in a slot.
    """

    def __init__(
        self,
        engine: CopyEngine,
        shard_offsets: tuple[int, ...],
        send: Callable[[Message], None],
        reports: Reports,
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
        self._stash: OrderedDict[int, Slots] = OrderedDict()
        self._ended: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._active)

    @property
    def copying(self) -> bool:
        """Whether a submitted copy has not been seen done."""
        return any(load.in_flight for load in self._active.values())

    def next_deadline(self) -> float | None:
        """The earliest limit of a load that still waits to submit."""
        waiting = (load.deadline for load in self._active.values() if not load.stopped and not load.complete)
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
            if not owed:  # vLLM waits for one report per request and takes a second one for an error
                self._counters.add("duplicate_requests")
                self._reports.load_ended(refused(job, "duplicate", owed=False))
                self._end_of(job.load, self._stash.pop(job.load, None))
                continue
            requests.add(job.request_id)
            load = _Load(job, fence, received, received + job.limit_seconds)
            load.slots = self._stash.pop(job.load, None)
            self._active[job.load] = load

    def announced(self, slots: Slots) -> None:
        """Tierd says where a load's keys lie."""
        load = self._active.get(slots.load)
        if load is not None and load.slots is None:
            load.slots = slots
        elif load is not None or slots.load in self._stash:
            self._counters.add("duplicate_slots")
        elif slots.load in self._ended:
            self._ended.pop(slots.load)
            self._counters.add("late_slots")
            self._send(Loaded(load=slots.load))
        else:
            self._stash[slots.load] = slots
            if len(self._stash) > STASH_LOADS:
                dropped, _ = self._stash.popitem(last=False)
                self._counters.add("stash_dropped")
                self._send(Loaded(load=dropped))

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
        while keys < load.usable and load.slots is not None and (not copies or total < self._batch_bytes):
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
            load.in_flight.append((self._engine.submit(copies, Direction.TO_DEVICE, load.fence), keys))
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
        self._counters.add("loads_whole" if keys == wanted else "loads_partial" if keys else "loads_failed")
        self._counters.add("loaded_bytes", load.copied_bytes)
        self._reports.load_ended(LoadEnd(result, missing_blocks(load.job, keys), whole=keys == wanted))
        self._end_of(load.job.load, load.slots)

    def _end_of(self, number: int, slots: Slots | None) -> None:
        if slots is not None:
            self._send(Loaded(load=number))
            return
        self._ended[number] = None
        if len(self._ended) > ENDED_LOADS:
            self._ended.popitem(last=False)
