"""The random schedules notice faults: each fault here is put into the adapter, and must be found.

The faults are those that an offload connector must not have: bytes that are not those of their key,
a prefix that is saved again, a block that is given away or never freed, a parked sequence that is
forgotten, and a completion that a successor takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.support.atom_schedules import run_schedule

from kvtier.engines.atom import loads_in_flight as loads_module
from kvtier.engines.atom import scheduler as scheduler_module
from kvtier.engines.atom.loads import AtomLoads
from kvtier.engines.atom.scheduler import AtomScheduler
from kvtier.engines.atom.sequence_state import SequenceState
from kvtier.engines.common.scheduler_stores import SchedulerStores

SCHEDULES = 500
"""As many as run without a fault."""
Patch = pytest.MonkeyPatch
WRONG_TOKENS = "wrong tokens"
WRONG_BYTES = "an object has bytes that are not those of its key"
SAVED_AGAIN = "saved again"
SAVED_TWICE = "saved twice at the same time"
GIVEN_AWAY = "given away"
FORGOTTEN = "was forgotten"


def saves_run_ahead(patch: Patch) -> None:
    """A chunk is saved before it is computed."""
    computed = SequenceState.computed_tokens_now.fget
    assert computed is not None

    def ahead(state: SequenceState) -> int:
        found = computed(state)
        return found and min(found + 8, state.prompt_tokens)

    plan = AtomScheduler._plan_stores

    def planned(self: AtomScheduler, state: SequenceState, finished: bool) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(SequenceState, "computed_tokens_now", property(ahead))
            plan(self, state, finished)

    patch.setattr(AtomScheduler, "_plan_stores", planned)


def loads_are_announced_too_long(patch: Patch) -> None:
    """The engine resumes behind tokens that were not loaded."""
    announce = loads_module._announce
    patch.setattr(loads_module, "_announce", lambda seq, start, end: announce(seq, start, end + 4))


def loads_are_one_chunk_off(patch: Patch) -> None:
    """A load takes the objects of the chunks before its own."""
    locations = AtomLoads._locations

    def off(self: AtomLoads, state: Any, promotion: Any, first: int, count: int) -> list[int]:
        return locations(self, state, promotion, max(0, first - 1), count)

    patch.setattr(AtomLoads, "_locations", off)


def failed_loads_count_as_loaded(patch: Patch) -> None:
    """What one rank did not bring is used."""
    load_ended = AtomScheduler._load_ended
    patch.setattr(
        AtomScheduler,
        "_load_ended",
        lambda self, operation, _succeeded: load_ended(self, operation, True),
    )


def tiers_are_not_asked_before_a_save(patch: Patch) -> None:
    """A prefix that was loaded, or that a tier holds, is saved again."""
    plan = SchedulerStores.plan

    def blind(self: SchedulerStores, state: Any, *others: Any, **named: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self._session.replica, "usable_bits", 0)
            plan(self, state, *others, **named)

    patch.setattr(SchedulerStores, "plan", blind)


def saves_in_progress_are_not_known(patch: Patch) -> None:
    """Two sequences with one prefix save it at the same time."""
    plan = SchedulerStores.plan

    def forgetful(self: SchedulerStores, *others: Any, **named: Any) -> None:
        self._keys.clear()
        plan(self, *others, **named)

    patch.setattr(SchedulerStores, "plan", forgetful)


def blocks_are_freed_under_copies(patch: Patch) -> None:
    """Blocks are not kept until the copies have ended."""
    patch.setattr(AtomScheduler, "should_defer_free", lambda self, seq: False)


def aborted_waiters_are_saved(patch: Patch) -> None:
    """Chunks of an aborted sequence are saved when its blocks are about to be freed."""
    defer = AtomScheduler.should_defer_free

    def unfinished(self: AtomScheduler, seq: Any) -> bool:
        state = self._find(seq)
        finished = state is not None and state.finished
        found = defer(self, seq)
        if state is not None:
            state.finished = finished
        return found

    patch.setattr(AtomScheduler, "should_defer_free", unfinished)


def kept_blocks_are_never_released(patch: Patch) -> None:
    """The engine keeps blocks for copies and never learns that these have ended."""
    patch.setattr(
        AtomScheduler,
        "should_defer_free",
        lambda self, seq: (state := self._find(seq)) is not None and state.busy,
    )


def failed_loads_are_not_reported(patch: Patch) -> None:
    """A sequence whose load has failed stays parked."""
    load_ended = AtomScheduler._load_ended

    def silent(self: AtomScheduler, operation: object, succeeded: bool) -> None:
        if succeeded:
            load_ended(self, operation, succeeded)
        else:
            self.loads.ended(operation, succeeded)

    patch.setattr(AtomScheduler, "_load_ended", silent)


def standstills_are_not_ended(patch: Patch) -> None:
    """A loaded sequence behind one that does not fit holds its blocks indefinitely."""
    patch.setattr(AtomScheduler, "wake_holders", lambda self: None)


def loads_are_known_by_id_alone(patch: Patch) -> None:
    """A completion belongs to whichever sequence has the id now, as if it had no generation."""
    start, ended = AtomLoads._start, AtomLoads.ended

    def replacing(self: AtomLoads, state: SequenceState, first: int, chunks: int) -> bool:
        before = dict(self.in_flight._active)
        started = start(self, state, first, chunks)
        for load in before.values() if started else ():
            if load.state.seq.id == state.seq.id:
                del self.in_flight._active[load.load_id]
                load.state.load = None
        return started

    def by_id(self: AtomLoads, operation: Any, succeeded: bool) -> SequenceState | None:
        for load in self.in_flight._active.values():
            if load.state.seq.id == operation.req_id:
                operation = type(operation)(operation.req_id, load.load_id)
                break
        return ended(self, operation, succeeded)

    patch.setattr(AtomLoads, "_start", replacing)
    patch.setattr(AtomLoads, "ended", by_id)


def a_late_completion_is_passed_on(patch: Patch) -> None:
    """A report that is already known is reported to the engine once more."""
    load_ended = AtomScheduler._load_ended

    def repeated(self: AtomScheduler, operation: Any, succeeded: bool) -> None:
        if operation.generation not in self.loads.in_flight._active:
            end = scheduler_module._EndedLoad(operation.req_id, operation.generation, succeeded)
            self._held.append(end)
        load_ended(self, operation, succeeded)

    patch.setattr(AtomScheduler, "_load_ended", repeated)


FAULTS: dict[Callable[[Patch], None], tuple[str, int]] = {
    saves_run_ahead: (WRONG_BYTES, 11),
    loads_are_announced_too_long: (WRONG_TOKENS, 0),
    loads_are_one_chunk_off: (WRONG_TOKENS, 2),
    failed_loads_count_as_loaded: (WRONG_TOKENS, 25),
    tiers_are_not_asked_before_a_save: (SAVED_AGAIN, 0),
    saves_in_progress_are_not_known: (SAVED_TWICE, 4),
    blocks_are_freed_under_copies: (GIVEN_AWAY, 0),
    aborted_waiters_are_saved: (GIVEN_AWAY, 358),
    kept_blocks_are_never_released: (FORGOTTEN, 0),
    failed_loads_are_not_reported: (FORGOTTEN, 7),
    standstills_are_not_ended: (FORGOTTEN, 25),
    loads_are_known_by_id_alone: (FORGOTTEN, 7),
    a_late_completion_is_passed_on: (WRONG_TOKENS, 197),
}
"""What is said about it, and the first of the 500 schedules that finds it. That one is tried first,
and all of them if it no longer does."""


def run_schedules(first: int) -> None:
    for seed in (first, *range(SCHEDULES)):
        run_schedule(seed)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(
    fault: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    message, first = FAULTS[fault]
    run_schedule(first)
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=message):
        run_schedules(first)
