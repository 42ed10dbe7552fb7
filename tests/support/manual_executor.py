"""An executor and a clock that tests control: calls run in any order, or never."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvtier.store.executor import IoCall


class ManualClock:
    """A clock for tests: call it for the time, ``advance`` it for later."""

    def __init__(self, now: float = 1_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Lets time pass."""
        self.now += seconds


@dataclass(eq=False, slots=True)
class ManualCall:
    """One submitted call."""

    lane: str
    call: Callable[[], object]
    done: Callable[[object, BaseException | None], None]
    started: bool = False
    result: object = None
    error: BaseException | None = None


class ManualExecutor:
    """The ``IoExecutor`` of tests.

    ``run(call)`` makes a call at once and queues its completion for ``collect``. ``hold(call)``
    occupies it as a thread that hangs would: counted as running, its effect delayed until ``run``.
    """

    def __init__(self) -> None:
        self.pending: list[ManualCall] = []
        self._finished: list[ManualCall] = []

    def submit(
        self,
        lane: str,
        call: Callable[[], object],
        done: Callable[[object, BaseException | None], None],
    ) -> None:
        """Keeps the call for the test to run."""
        self.pending.append(ManualCall(lane, call, done))

    def hold(self, call: ManualCall) -> None:
        """The call has started and does not come back until ``run``, as on a thread that hangs."""
        call.started = True
        if isinstance(call.call, IoCall):
            call.call.begin()

    def run(self, call: ManualCall) -> None:
        """Makes the call. Its completion is seen by the next ``collect``."""
        self.pending.remove(call)
        try:
            call.result = call.call()
        except BaseException as error:
            call.error = error
        self._finished.append(call)

    def run_all(self, lane_prefix: str = "") -> int:
        """Makes all pending calls of the lanes with this prefix, in order; returns how many."""
        calls = [call for call in self.pending if call.lane.startswith(lane_prefix)]
        for call in calls:
            self.run(call)
        return len(calls)

    def collect(self) -> int:
        """Hands over what has finished, in the order it finished."""
        finished, self._finished = self._finished, []
        for call in finished:
            call.done(call.result, call.error)
        return len(finished)

    def running(self, lane: str) -> int:
        """Calls that the test holds."""
        return sum(call.started for call in self.pending if call.lane == lane)

    def queued(self, lane: str) -> int:
        """Calls that wait."""
        return sum(not call.started for call in self.pending if call.lane == lane)
