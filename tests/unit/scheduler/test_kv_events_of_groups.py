"""KV events of models with several KV cache groups: each event belongs to one group, and names the
blocks that its objects contain."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.unit.scheduler.groups_testbed import FULL, GROUPS, STATE, WINDOW, GroupsTestbed
from tests.unit.scheduler.scheduler_testbed import BLOCK, CHUNK, DISK, RAM, FakeRequest, topology
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvtier.engines.vllm.kv_events import EventGroupSpec, KVEvents, event_types, places_of

PER_CHUNK = CHUNK // BLOCK
CHUNKS = 4
SPECS = (
    EventGroupSpec("full_attention"),
    EventGroupSpec("sliding_window", CHUNK),
    EventGroupSpec("mamba"),
)
PLACES = {RAM: ("CPU", None), DISK: ("STORAGE", "disk")}


@pytest.fixture
def testbed() -> GroupsTestbed:
    testbed = GroupsTestbed()
    scheduler = testbed.scheduler
    scheduler.events = KVEvents(
        scheduler._planner, scheduler.session, places_of(topology()), SPECS, event_types()
    )
    return testbed


def _computed(testbed: GroupsTestbed, name: str = "r", seed: int = 0) -> FakeRequest:
    """A request whose chunks are known."""
    tokens = CHUNKS * CHUNK + 5
    request = testbed.request(tokens, name, seed, cache_salt=None)
    testbed.ask(request)
    testbed.compute(request, tokens, testbed.tables_of(tokens))
    return request


def _names(request: FakeRequest, group: int, chunk: int) -> list[Any]:
    """The blocks of one object: a linear state is one block, at the end of the chunk."""
    ends = range(chunk * PER_CHUNK, (chunk + 1) * PER_CHUNK)
    if group == STATE:
        ends = range(ends.stop - 1, ends.stop)
    return [maybe_convert_block_hash(BlockHash(request.block_hashes[each])) for each in ends]


def _take(testbed: GroupsTestbed) -> list[Any]:
    events: list[Any] = []
    while testbed.scheduler.events is not None and testbed.scheduler.events.pending:
        events += testbed.scheduler.take_events()
    return events


def test_an_object_of_each_group_is_announced_with_its_group_and_blocks(
    testbed: GroupsTestbed,
) -> None:
    request = _computed(testbed)
    assert _take(testbed) == []
    testbed.hold_groups(request, {FULL: [1], WINDOW: [1], STATE: [1]}, RAM)
    events = {event.group_idx: event for event in _take(testbed)}
    assert sorted(events) == [FULL, WINDOW, STATE]
    for group, event in events.items():
        assert isinstance(event, BlockStored)
        assert event.block_hashes == _names(request, group, 1)
        assert event.block_size == GROUPS[group].block_tokens
        assert event.kv_cache_spec_kind == SPECS[group].kind
        assert event.kv_cache_spec_sliding_window == SPECS[group].sliding_window
        assert event.token_ids == request.all_token_ids[CHUNK : 2 * CHUNK]


def test_the_loss_of_one_groups_object_is_announced_for_that_group_only(
    testbed: GroupsTestbed,
) -> None:
    request = _computed(testbed)
    testbed.hold_groups(request, {FULL: [0, 1], WINDOW: [1], STATE: [1]}, RAM)
    _take(testbed)
    key = bytes([WINDOW]) + request.key(1)[1:]
    testbed.client.delta(removed={key: RAM})
    (event,) = _take(testbed)
    assert isinstance(event, BlockRemoved)
    assert event.group_idx == WINDOW
    assert event.block_hashes == _names(request, WINDOW, 1)


@pytest.mark.parametrize("seed", range(10))
def test_the_events_of_groups_rebuild_what_the_tiers_hold(
    testbed: GroupsTestbed, seed: int
) -> None:
    chance = random.Random(seed)
    requests = [_computed(testbed, f"r{number}", number) for number in range(3)]
    objects = [
        (request, group, chunk)
        for request in requests
        for group in (FULL, WINDOW, STATE)
        for chunk in range(CHUNKS)
    ]
    held: dict[bytes, int] = {}
    known: dict[tuple[int, str, str | None], set[Any]] = {}

    def take() -> None:
        for event in testbed.scheduler.take_events():
            blocks = known.setdefault((event.group_idx, event.medium, event.ownership), set())
            if isinstance(event, BlockStored):
                blocks.update(event.block_hashes)
            else:
                assert blocks.issuperset(event.block_hashes)
                blocks.difference_update(event.block_hashes)

    for _ in range(300):
        request, group, chunk = chance.choice(objects)
        key, bits = bytes([group]) + request.key(chunk)[1:], chance.choice([RAM, DISK, RAM | DISK])
        action = chance.random()
        if action < 0.5:
            testbed.client.delta(added={key: bits})
            held[key] = held.get(key, 0) | bits
        elif action < 0.8:
            testbed.client.delta(removed={key: bits})
            held[key] = held.get(key, 0) & ~bits
        else:
            take()
    while testbed.scheduler.events is not None and testbed.scheduler.events.pending:
        take()
    for group in (FULL, WINDOW, STATE):
        for bit, place in PLACES.items():
            expected = {
                name
                for request, of, chunk in objects
                if of == group and held.get(bytes([of]) + request.key(chunk)[1:], 0) & bit
                for name in _names(request, of, chunk)
            }
            assert known.get((group, *place), set()) == expected
