"""Models with several KV cache groups on the scheduler side: what is referenced, stored, matched
and loaded by group."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import pytest
from tests.unit.scheduler.groups_testbed import FULL, GROUPS, STATE, WINDOW, GroupsTestbed
from tests.unit.scheduler.scheduler_testbed import (
    CHUNK,
    DISK,
    RAM,
    SLOT_BYTES,
    FakeRequest,
)

from kvtier.engines.common.jobs import LoadJob, StoreJob
from kvtier.store.generations import pack_location
from kvtier.tierd.wire import Cancel, Load, Prefetch, Promote, Promoted, Reserve


@pytest.fixture
def testbed() -> GroupsTestbed:
    return GroupsTestbed()


def _by_group(stores: Iterable[StoreJob]) -> dict[int, list[tuple[int, ...]]]:
    found: dict[int, list[tuple[int, ...]]] = {}
    for store in stores:
        found.setdefault(store.run.group, []).append(store.run.blocks)
    return found


def _prefilled(testbed: GroupsTestbed, chunks: int = 4) -> FakeRequest:
    """A prompt that is computed in one step, which is not reported."""
    tokens = chunks * CHUNK + 5
    request = testbed.request(tokens)
    assert testbed.ask(request) == 0
    offer = (STATE, 2000 + chunks - 1, chunks * CHUNK)
    testbed.compute(request, tokens, testbed.tables_of(tokens), [offer])
    return request


def test_the_blocks_of_windows_and_states_are_referenced_in_the_step_that_computes_them(
    testbed: GroupsTestbed,
) -> None:
    request = _prefilled(testbed)
    assert testbed.pool.referenced() == [*range(1000, 1008), 2003]
    request.append(7)
    testbed.report()
    # vLLM has taken the blocks before the window from the request.
    stores = testbed.compute(request, 1, testbed.tables_of(262, first_window_block=6)).stores
    assert _by_group(stores) == {
        FULL: [(1, 2), (3, 4), (5, 6), (7, 8)],
        WINDOW: [(1000, 1001), (1002, 1003), (1004, 1005), (1006, 1007)],
        STATE: [(2003,)],
    }
    (reserve,) = testbed.client.take(Reserve)
    previous = {(group, key): before for _, group, key, _, before in reserve.items}
    hashes = [key[1:] for key in request.keys(0, 4)]
    assert [previous[FULL, each] for each in hashes] == [b"", *hashes[:3]]
    # A window or a state needs no other one.
    assert {before for (group, _), before in previous.items() if group != FULL} == {b""}
    testbed.report(done={store.reservation: 1 for store in stores})
    assert testbed.pool.referenced() == []
    assert testbed.scheduler.stores.referenced_blocks == 0


def test_a_request_that_ends_with_the_step_is_stored_whole(testbed: GroupsTestbed) -> None:
    request = _prefilled(testbed)
    request.append(7)
    request.status = SimpleNamespace(name="FINISHED_LENGTH_CAPPED")
    testbed.scheduler.request_finished(request, testbed.tables_of(261))  # type: ignore[arg-type]
    testbed.report()
    stores = testbed.compute(testbed.request(5, "other", seed=9), 0, ([], [], [])).stores
    assert {group: len(runs) for group, runs in _by_group(stores).items()} == {
        FULL: 4,
        WINDOW: 4,
        STATE: 1,
    }


@pytest.mark.parametrize("how", ["preempted", "reset", "lost", "off", "blocks given back"])
def test_references_end_without_a_store_if_the_step_does_not_count(
    testbed: GroupsTestbed, how: str
) -> None:
    request = _prefilled(testbed)
    scheduler = testbed.scheduler
    if how == "preempted":
        request.num_computed_tokens = 0
        testbed.ask(request)
    elif how == "reset":
        scheduler.on_engine_signal("reload_weights")
    elif how == "lost":
        testbed.client.lose()
        scheduler.has_pending_work()
    elif how == "off":
        scheduler.build_load_meta()
    else:
        assert testbed.pool.reset_prefix_cache() is True
    request.append(7)
    testbed.report()
    assert testbed.pool.referenced() == []
    assert scheduler.stores.referenced_blocks == 0
    assert testbed.client.take(Reserve) == []


def test_what_is_stored_already_is_not_referenced(testbed: GroupsTestbed) -> None:
    request = testbed.request(4 * CHUNK + 5)
    testbed.hold_groups(request, {FULL: range(4), WINDOW: (0, 2, 3)}, RAM)
    testbed.ask(request)
    tables = testbed.tables_of(4 * CHUNK + 5)
    testbed.compute(request, 4 * CHUNK + 5, tables, [(STATE, 2003, 4 * CHUNK)])
    assert testbed.pool.referenced() == [1002, 1003, 2003]


def test_a_state_that_is_not_at_the_end_of_a_chunk_is_not_referenced(
    testbed: GroupsTestbed,
) -> None:
    request = testbed.request(CHUNK + 40)
    testbed.ask(request)
    offers = [(STATE, 2001, CHUNK + 32), (STATE, 2002, 4 * CHUNK), (FULL, 5, CHUNK)]
    testbed.compute(request, CHUNK + 40, testbed.tables_of(CHUNK + 40), offers)
    assert testbed.pool.referenced() == [1000, 1001]


def test_references_take_at_most_a_quarter_of_the_cache(testbed: GroupsTestbed) -> None:
    testbed.pool.blocks[:] = testbed.pool.blocks[:2010]
    request = testbed.request(600 * CHUNK)
    testbed.ask(request)
    tables = tuple([1 + i % 2000 for i in range(1200)] for _ in GROUPS)
    testbed.compute(request, 600 * CHUNK, tables)
    assert testbed.scheduler.stores.referenced_blocks == 2010 // 4 // 2 * 2
    assert testbed.scheduler.stores.dropped["in_flight_blocks"] == 600 - 2010 // 4 // 2


def test_without_a_slot_a_window_is_held_for_a_moment_and_delays_nothing(
    testbed: GroupsTestbed,
) -> None:
    request = _prefilled(testbed)
    testbed.scheduler.session.credits[WINDOW].clear()
    request.append(7)
    testbed.report()
    stores = testbed.compute(request, 1, testbed.tables_of(262, first_window_block=6)).stores
    assert sorted(_by_group(stores)) == [FULL, STATE]
    testbed.report(done={store.reservation: 1 for store in stores})
    for _ in range(3):
        testbed.now += 1
        testbed.compute(request, 1, testbed.tables_of(262, first_window_block=6))
        testbed.report()
    assert testbed.pool.referenced() == []
    assert testbed.scheduler.stores.dropped == {"no_credit": 4}


def test_a_prefix_ends_where_every_group_has_what_it_needs(testbed: GroupsTestbed) -> None:
    request = testbed.request(6 * CHUNK)
    testbed.hold_groups(request, {FULL: range(6), WINDOW: (1, 3, 4, 5), STATE: (1, 3)}, RAM)
    assert testbed.ask(request) == 4 * CHUNK
    testbed.client.delta(removed={bytes([WINDOW]) + request.key(3)[1:]: RAM})
    assert testbed.ask(request) == 2 * CHUNK


def test_a_prompt_of_whole_chunks_leaves_the_last_one_to_compute(testbed: GroupsTestbed) -> None:
    request = testbed.request(3 * CHUNK)
    testbed.hold_groups(request, {FULL: range(3), WINDOW: range(3), STATE: range(3)}, RAM)
    assert testbed.ask(request) == 2 * CHUNK


def _load(testbed: GroupsTestbed, chunks: int = 4) -> tuple[FakeRequest, LoadJob]:
    request = testbed.request(chunks * CHUNK + 5)
    held = {FULL: range(chunks), WINDOW: range(chunks), STATE: range(chunks)}
    testbed.hold_groups(request, held, RAM)
    tokens = testbed.ask(request)
    assert tokens == chunks * CHUNK
    tables = testbed.tables_of(tokens, first_window_block=2 * chunks - 2)
    testbed.scheduler.update_state_after_alloc(request, tables, tokens)  # type: ignore[arg-type]
    (job,) = testbed.compute(request, 0, tables).loads
    return request, job


def test_a_load_moves_only_what_the_prefix_needs(testbed: GroupsTestbed) -> None:
    request, job = _load(testbed)
    assert [(run.group, run.first, run.blocks) for run in job.runs] == [
        *((FULL, 0, (2 * chunk + 1, 2 * chunk + 2)) for chunk in range(4)),
        (WINDOW, 0, (1006, 1007)),
        (STATE, 0, (2003,)),
    ]
    assert len(job.slots) == len(job.runs)
    (message,) = testbed.client.take(Load)
    hashes = [key[1:] for key in request.keys(0, 4)]
    wanted = [*((FULL, each) for each in hashes), (WINDOW, hashes[3]), (STATE, hashes[3])]
    assert list(message.keys) == wanted
    testbed.report(loads=[testbed.result(job.load, len(job.runs))])
    assert testbed.scheduler.loads.in_flight.loaded_tokens == {0: 4 * CHUNK}


@pytest.mark.parametrize(("chunks", "again"), [(7, 3), (4, 1), (2, 0)])
def test_after_a_failed_load_less_than_half_is_offered_once(
    testbed: GroupsTestbed, chunks: int, again: int
) -> None:
    request, job = _load(testbed, chunks)
    testbed.report(loads=[testbed.result(job.load, len(job.runs) - 1, reason="gone")])
    assert testbed.scheduler.loads.in_flight.loaded_tokens == {}
    assert testbed.scheduler.loads.in_flight.counts.failures == {"gone": 1}
    assert testbed.ask(request) == again * CHUNK
    if not again:
        return
    tables = testbed.tables_of(again * CHUNK, first_window_block=2 * again - 2)
    tokens = again * CHUNK
    testbed.scheduler.update_state_after_alloc(request, tables, tokens)  # type: ignore[arg-type]
    (job,) = testbed.compute(request, 0, tables).loads
    testbed.report(loads=[testbed.result(job.load, 0, reason="gone")])
    assert testbed.ask(request) == 0


def test_nothing_is_copied_to_blocks_that_the_engine_has_not_allocated(
    testbed: GroupsTestbed,
) -> None:
    request = testbed.request(4 * CHUNK + 5)
    testbed.hold_groups(request, {FULL: range(4), WINDOW: range(4), STATE: range(4)}, RAM)
    tokens = testbed.ask(request)
    assert tokens == 4 * CHUNK
    tables = testbed.tables_of(tokens, first_window_block=7)
    testbed.scheduler.update_state_after_alloc(request, tables, tokens)  # type: ignore[arg-type]
    (job,) = testbed.compute(request, 0, tables).loads
    assert job.slots == ()
    testbed.report(loads=[testbed.result(job.load, 0, reason="gone")])
    assert testbed.scheduler.loads.in_flight.counts.failures == {"block_table": 1}


def _promoted(testbed: GroupsTestbed, usable: int) -> tuple[FakeRequest, Promote]:
    request = testbed.request(4 * CHUNK + 5)
    testbed.hold_groups(request, {FULL: range(4), WINDOW: range(4), STATE: (1, 3)}, DISK)
    assert testbed.ask(request) is None
    (promote,) = testbed.client.take(Promote)
    assert promote.whole
    assert [group for group, _ in promote.keys] == [FULL] * 4 + [WINDOW, STATE]
    locations = tuple(pack_location(number * SLOT_BYTES, 6) for number in range(usable))
    testbed.client.sink(
        Promoted(
            promotion=promote.promotion,
            usable=usable,
            outcome="whole" if usable == 6 else "partial",
            tiers=(1,) * usable,
            locations=locations,
        )
    )
    return request, promote


def test_a_promotion_brings_what_the_prefix_needs_from_files(testbed: GroupsTestbed) -> None:
    request, _ = _promoted(testbed, 6)
    assert testbed.ask(request) == 4 * CHUNK
    tables = testbed.tables_of(4 * CHUNK, first_window_block=6)
    testbed.scheduler.update_state_after_alloc(request, tables, 4 * CHUNK)  # type: ignore[arg-type]
    (job,) = testbed.compute(request, 0, tables).loads
    assert job.slots == tuple(number * SLOT_BYTES for number in range(6))
    testbed.report(loads=[testbed.result(job.load, 6)])
    assert testbed.scheduler.loads.in_flight.loaded_tokens == {1: 4 * CHUNK}


def test_a_promotion_that_brings_a_part_only_is_cancelled_and_ram_is_used(
    testbed: GroupsTestbed,
) -> None:
    request, promote = _promoted(testbed, 5)
    testbed.hold_groups(request, {FULL: range(3), WINDOW: (1,), STATE: (1,)}, RAM | DISK)
    assert testbed.ask(request) == 2 * CHUNK
    assert [each.promotion for each in testbed.client.take(Cancel)] == [promote.promotion]


def test_with_weights_a_shorter_prefix_in_ram_may_be_better_than_a_longer_one_in_files() -> None:
    testbed = GroupsTestbed()
    live = testbed.scheduler.session.live
    tiers = {**live.tiers, "disk": live.tiers["disk"].model_copy(update={"load_weight": 40})}
    testbed.scheduler.session.live = live.model_copy(update={"tiers": tiers})
    request = testbed.request(4 * CHUNK + 5)
    testbed.hold_groups(request, {FULL: range(4), WINDOW: (1, 3), STATE: (1, 3)}, DISK)
    testbed.hold_groups(request, {FULL: range(2), WINDOW: (1,), STATE: (1,)}, RAM | DISK)
    assert testbed.ask(request) == 2 * CHUNK
    assert testbed.client.take(Promote) == []


def test_what_a_waiting_request_needs_is_prefetched_by_group(testbed: GroupsTestbed) -> None:
    request = testbed.request(4 * CHUNK + 5)
    held = {FULL: range(4), WINDOW: range(4), STATE: (0, 2)}
    testbed.hold_groups(request, held, DISK)
    testbed.scheduler.on_new_request(request)  # type: ignore[arg-type]
    testbed.compute(testbed.request(5, "other", seed=9), 0, ([], [], []))
    (prefetch,) = testbed.client.take(Prefetch)
    hashes = [key[1:] for key in request.keys(0, 3)]
    wanted = [*((FULL, each) for each in hashes), (WINDOW, hashes[2]), (STATE, hashes[2])]
    assert list(prefetch.keys) == wanted
