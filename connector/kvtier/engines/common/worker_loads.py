"""Loads of one rank, as state machines that the hooks of the engine's thread advance.

A load's job names the slots of its keys, with the generation word of each. The words are compared
when a copy is submitted and again after it has ended; from the first key on whose word differs, the
load has failed. A load ends once: when everything is copied, or at its deadline, a cancellation, a
failure, or the loss of tierd. In the latter cases no further copy is submitted, and the report
waits for the submitted ones, because until then the GPU writes into blocks that the report gives
back to vLLM.

docs/datapath.md has the rules. Callers hold the lock of the copies (``worker_thread``).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kvtier.engines.common.jobs import ArrivedKeys, LoadJob, LoadResult
from kvtier.engines.common.worker_state import SUBMIT_SECONDS, LoadEnd, RankContext
from kvtier.transfer.engine import Copy, CopyError, CopyHandle, Direction

IDENTITY_CHANGED = "identity"
"""Reason of loads that ended because the weights may have changed: nothing of them is used."""
FINGERPRINT_SECONDS = 30.0
"""How long after its limit a load waits for the fingerprint of the weights."""
MAX_EARLY_PINS = 1024
"""Loads that tierd has pinned before their jobs came. Beyond it the oldest one is forgotten, and is
reported when its copies have ended."""
MAX_ENDED_LOADS = 4096
"""Ended loads that are remembered, so that a job that comes twice does not start twice."""


@dataclass(slots=True, eq=False)
class _RankLoad:
    job: LoadJob
    fence: object | None
    started_at: float
    deadline: float
    available_keys: int
    """Keys whose slots are known and still hold them."""
    assumed_weights: str = ""
    """The fingerprint of the weights that the keys belong to, if the job was made before it was
    known whether the engine still has them."""
    submitted_keys: int = 0
    copied_keys: int = 0
    copied_bytes: int = 0
    copy_seconds: float = 0.0
    arriving: bool = False
    """Whether more keys may become available."""
    stop_reason: str = ""
    pinned: bool = False
    """Whether tierd keeps every key in its slot."""
    reported: bool = False
    """Whether it was reported while its last copies run."""
    in_flight: deque[tuple[CopyHandle, int]] = field(default_factory=deque)
    """Submissions, with the number of keys that are copied once each is done."""

    @property
    def fully_submitted(self) -> bool:
        """Whether nothing is left to submit."""
        return self.submitted_keys >= self.available_keys


class WorkerLoads:
    """All loads of this rank."""

    def __init__(self, context: RankContext, batch_bytes: int | None = None) -> None:
        self._context = context
        self._engine = context.engine
        self._counters = context.counters
        self._batch_bytes = batch_bytes or context.engine.batch_bytes
        self._active: dict[int, _RankLoad] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._early_pins: OrderedDict[int, int] = OrderedDict()
        """Keys that tierd keeps for loads whose jobs have not come."""
        self._weights: str | None = None
        """The fingerprint of the engine's weights; None while it is being taken."""

    def __len__(self) -> int:
        return len(self._active)

    def __contains__(self, number: object) -> bool:
        return number in self._active

    def add(
        self,
        jobs: Iterable[LoadJob],
        fence: object | None,
        received_at: float,
        epoch: int,
        assumed_weights: str = "",
    ) -> None:
        """Adds jobs, whose target blocks may be written after ``fence``.

        ``epoch``: the tierd epoch in which this rank can copy, 0 if it cannot. With
        ``assumed_weights`` the loads end once the fingerprint is known, and fail if it is another.
        """
        requests = {load.job.request_id for load in self._active.values() if not load.reported}
        for job in jobs:
            if job.load in self._active or job.load in self._ended:
                self._counters.add("duplicate_loads")
            elif job.request_id in requests:
                # vLLM waits for one report per request, and a second one ends the engine.
                self._counters.add("duplicate_requests")
                end = LoadEnd.rejected(job, "duplicate", report_expected=False)
                self._context.completions.add_load(end)
            else:
                requests.add(job.request_id)
                keys = min(len(job.slots), len(job.generations), len(job.runs))
                deadline = received_at + job.timeout_seconds
                load = _RankLoad(job, fence, received_at, deadline, keys, assumed_weights)
                load.arriving = job.arriving and keys < len(job.runs)
                load.pinned = self._early_pins.pop(job.load, -1) == len(job.runs)
                if not epoch or job.epoch != epoch:
                    load.stop_reason = "epoch" if epoch else "lost"
                self._active[job.load] = load
        self._compare_weights()

    def extend(self, arrived: Iterable[ArrivedKeys]) -> None:
        """Keys of loads that are arriving are in RAM. Not for loads that have ended, or of which an
        earlier key has been lost: they fail from there on."""
        for keys in arrived:
            load = self._active.get(keys.load)
            if load is None or not load.arriving:
                continue
            slots = load.job.slots + keys.slots
            generations = load.job.generations + keys.generations
            load.job = replace(load.job, slots=slots, generations=generations)
            load.available_keys = min(len(slots), len(generations), len(load.job.runs))
            load.arriving = not keys.last and load.available_keys < len(load.job.runs)

    def cancel(self, loads: Iterable[int]) -> None:
        """Stops loads whose requests were aborted."""
        for number in loads:
            load = self._active.get(number)
            if load is None:
                self._counters.add("unknown_cancels")
            elif not load.stop_reason and not load.reported:
                load.stop_reason = "cancelled"

    def stop_all(self, reason: str) -> None:
        """Stops every load. Those whose copies are done end in the next ``advance``.

        A load that waits for the fingerprint must not wait any longer: nothing of it is used.
        """
        for load in self._active.values():
            if load.reported:
                # It has ended for the engine; its copies are complete and run to their end.
                continue
            if reason == IDENTITY_CHANGED or self._waits_for_weights(load):
                load.stop_reason = IDENTITY_CHANGED
            elif not load.stop_reason:
                load.stop_reason = reason

    def weights_may_have_changed(self) -> None:
        """Fails every load. Those with assumed weights that are added later wait."""
        self.stop_all(IDENTITY_CHANGED)
        self._weights = None

    def weights_known(self, fingerprint: str) -> None:
        """Ends or fails what waited for the fingerprint; empty if the weights are unknown."""
        self._weights = fingerprint
        self._compare_weights()

    def _compare_weights(self) -> None:
        if self._weights is None:
            return
        for load in self._active.values():
            if load.assumed_weights and load.assumed_weights != self._weights:
                load.stop_reason = IDENTITY_CHANGED

    def _waits_for_weights(self, load: _RankLoad) -> bool:
        return bool(load.assumed_weights) and self._weights is None

    def pin(self, number: int, keys: int) -> None:
        """tierd has confirmed that the first ``keys`` keys of this load stay in their slots until
        the load is released."""
        load = self._active.get(number)
        if load is not None:
            load.pinned = keys == len(load.job.runs)
        elif number not in self._ended:
            self._early_pins[number] = keys
            if len(self._early_pins) > MAX_EARLY_PINS:
                self._early_pins.popitem(last=False)

    def forget_pins(self) -> None:
        """The session in which tierd has pinned loads has ended. Loads that were reported run to
        their end."""
        self._early_pins.clear()
        for load in self._active.values():
            load.pinned = False

    def awaits_word(self, limit_bytes: int) -> bool:
        """Whether a load could be reported now, or earlier than its copies end, if tierd had pinned
        it and the fingerprint were known: both take a few milliseconds.

        ``limit_bytes``: as for ``report_early``.
        """
        return (
            any(
                not load.reported
                and not load.stop_reason
                and load.submitted_keys == len(load.job.runs)
                and (
                    self._waits_for_weights(load)
                    if not load.in_flight
                    else self._engine.can_order_kernels
                    and (not load.pinned or self._waits_for_weights(load))
                )
                for load in self._active.values()
            )
            and self._engine.in_flight_bytes(Direction.TO_DEVICE) <= limit_bytes
        )

    def report_early(self, limit_bytes: int) -> None:
        """Reports loads whose remaining copies are at most ``limit_bytes``, all submitted.

        Their slots are pinned and held the right objects after that, so the copies cannot copy
        anything else. From now on kernels must not be launched without ``order_kernels``.
        """
        if not self._engine.can_order_kernels:
            return
        generations = self._context.generations
        for load in self._active.values():
            job = load.job
            if (
                load.pinned
                and not load.reported
                and not load.stop_reason
                and load.in_flight
                and load.submitted_keys == len(job.runs)
                and not self._waits_for_weights(load)
                and self._engine.in_flight_bytes(Direction.TO_DEVICE) <= limit_bytes
                and generations.unchanged(job.slots, job.generations) == len(job.runs)
            ):
                load.reported = True
                self._counters.add("loads_reported_early")
                result = LoadResult(
                    load=job.load,
                    request_id=job.request_id,
                    keys_loaded=len(job.runs),
                    seconds=self._context.clock() - load.started_at,
                    copying=True,
                )
                self._context.completions.add_load(LoadEnd.of(job, result))

    def order_kernels(self) -> None:
        """Makes kernels that are launched from now on wait for the copies of reported loads.

        Raises ``CopyError`` if the device failed.
        """
        handles = [
            handle
            for load in self._active.values()
            if load.reported
            for handle, _ in load.in_flight
        ]
        if handles:
            self._engine.order_kernels(handles)

    def abandon(self, reason: str) -> None:
        """Ends every load without waiting for its copies: the device is lost or idle."""
        self.stop_all(reason)
        for load in list(self._active.values()):
            load.in_flight.clear()
            try:
                self._end(load)
            except Exception:  # noqa: BLE001 - this one and the others must be reported
                self._counters.add("step_errors")
                self._active.pop(load.job.load, None)
                end = LoadEnd.rejected(load.job, "error", report_expected=not load.reported)
                self._context.completions.add_load(end)

    def advance(self, before_kernels: bool = False) -> bool:
        """Collects what has ended and submits what there is room for; returns whether anything
        changed.

        It submits for ``SUBMIT_SECONDS`` at most. One batch where ``submit`` itself copies, and
        ``before_kernels``, when the step of all other requests waits for this call: a batch keeps
        the link busy for longer than it takes to launch the step. The rest follows in the next
        call.
        """
        changed = False
        may_submit = True
        until = self._context.clock() + SUBMIT_SECONDS
        for load in list(self._active.values()):
            changed |= self._collect(load)
            while may_submit and not load.stop_reason and not load.fully_submitted:
                if self._context.clock() >= load.deadline or not self._submit(load):
                    # A later load must not overtake this one.
                    may_submit = False
                else:
                    changed = True
                    self._collect(load)
                    one = before_kernels or self._engine.synchronous
                    may_submit = not one and self._context.clock() < until
            now = self._context.clock()
            if now >= load.deadline and (load.arriving or not load.fully_submitted):
                load.stop_reason = load.stop_reason or "limit"
            if now >= load.deadline + FINGERPRINT_SECONDS and self._waits_for_weights(load):
                load.stop_reason = IDENTITY_CHANGED
            if self._may_end(load):
                self._end(load)
                changed = True
        return changed

    def _may_end(self, load: _RankLoad) -> bool:
        if load.in_flight or not (load.stop_reason or load.fully_submitted):
            return False
        if load.arriving and not load.stop_reason:
            return False
        return load.stop_reason == IDENTITY_CHANGED or not self._waits_for_weights(load)

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
                self._counters.add("copy_errors")
                load.stop_reason = "copy"
            load.in_flight.popleft()
            changed = True
        return changed

    def _submit(self, load: _RankLoad) -> bool:
        """Submits the load's next batch; returns False if there is no room for it."""
        job, first = load.job, load.submitted_keys
        copies: list[Copy] = []
        total_bytes = 0
        keys = first
        while keys < load.available_keys and (not copies or total_bytes < self._batch_bytes):
            copy = self._context.copy(job.runs[keys], job.slots[keys])
            copies.append(copy)
            total_bytes += self._engine.copy_bytes(copy)
            keys += 1
        invalid = self._engine.first_invalid(copies)
        if invalid is not None:
            self._counters.add("bad_addresses")
            load.stop_reason = f"address: {invalid[1]}"
            load.available_keys = keys = first + invalid[0]
            load.arriving = False
            del copies[invalid[0] :]
            total_bytes = sum(map(self._engine.copy_bytes, copies))
        unchanged = self._context.generations.unchanged(
            job.slots[first:keys], job.generations[first:keys]
        )
        if unchanged < len(copies):
            self._counters.add("slots_reused", len(copies) - unchanged)
            load.available_keys = keys = first + unchanged
            load.arriving = False
            total_bytes = sum(map(self._engine.copy_bytes, copies[:unchanged]))
            del copies[unchanged:]
        if not copies:
            return True
        if not self._engine.has_room(Direction.TO_DEVICE, total_bytes):
            return False
        try:
            handle = self._engine.submit(copies, Direction.TO_DEVICE, load.fence, checked=True)
            load.in_flight.append((handle, keys))
            load.submitted_keys = keys
        except CopyError:
            self._counters.add("copy_errors")
            load.stop_reason = "copy"
        return True

    def _end(self, load: _RankLoad) -> None:
        job = load.job
        del self._active[job.load]
        # A copy that ran while its slot was reused has copied anything.
        keys = self._context.generations.unchanged(
            job.slots[: load.copied_keys], job.generations[: load.copied_keys]
        )
        if keys < load.copied_keys:
            self._counters.add("slots_reused", load.copied_keys - keys)
        if load.stop_reason == IDENTITY_CHANGED:
            keys = 0
        complete = keys == len(job.runs)
        awaited = job.arriving and keys == load.copied_keys == min(len(job.slots), len(job.runs))
        result = LoadResult(
            load=job.load,
            request_id=job.request_id,
            keys_loaded=keys,
            reason="" if complete else load.stop_reason or ("not_arrived" if awaited else "gone"),
            seconds=self._context.clock() - load.started_at,
            copy_seconds=load.copy_seconds,
            copied_bytes=load.copied_bytes,
            follows=load.reported,
        )
        if load.reported and not complete:
            # Only a tierd that breaks its word, or a device that has failed, can cause this.
            self._counters.add("pins_broken")
        self._counters.add(
            "loads_whole" if complete else "loads_partial" if keys else "loads_failed"
        )
        self._counters.add("loaded_bytes", load.copied_bytes)
        self._context.completions.add_load(LoadEnd.of(job, result))
        self._ended[job.load] = None
        if len(self._ended) > MAX_ENDED_LOADS:
            self._ended.popitem(last=False)
