"""What a lookup finds in the replica, read in batches, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.python_calls import python_calls, python_lines
from tests.unit.scheduler.scheduler_testbed import DISK, RAM, SchedulerTestbed

from kvtier import planner as planner_module
from kvtier.engines.common import held_chunks as held_chunks_module
from kvtier.engines.common.held_chunks import HeldChunks
from kvtier.engines.common.request_state import RequestState
from kvtier.engines.vllm.load_records import source_tier, source_tier_bits
from kvtier.planner import FIRST_BATCH, FURTHER_BATCH, GroupKind, KVCacheGroup, Planner
from kvtier.tierd.replication import Replica
from kvtier.tierd.wire import Delta

CHUNK, BLOCK = 64, 32
HYBRID = Planner.build(
    [
        KVCacheGroup(GroupKind.FULL, BLOCK),
        KVCacheGroup(GroupKind.SLIDING, BLOCK, "window", 1024),
        KVCacheGroup(GroupKind.STATE, CHUNK, "state"),
    ],
    CHUNK,
    BLOCK,
)


def _state(chunks: int) -> RequestState:
    request: Any = SimpleNamespace(
        request_id="r", block_hashes=[number.to_bytes(32, "big") for number in range(chunks)]
    )
    return RequestState(request)


def _replica(bits: dict[int, list[int]]) -> Replica:
    """``bits``: by group, of each chunk."""
    replica = Replica()
    added = tuple(
        (bytes([group]) + number.to_bytes(32, "big"), held, 7 if held & RAM else 0)
        for group, chunks in bits.items()
        for number, held in enumerate(chunks)
        if held
    )
    replica.apply(Delta(sequence=1, added=added, snapshot=True))
    return replica


@given(
    bits=st.lists(st.sampled_from([0, RAM, DISK, DISK, DISK | RAM]), min_size=1, max_size=200),
    begin=st.integers(0, 40),
    tiers=st.sampled_from([-1, RAM, DISK]),
    group=st.integers(0, 1),
)
def test_every_object_is_found_where_the_replica_has_it(
    bits: list[int], begin: int, tiers: int, group: int
) -> None:
    state = _state(len(bits))
    state.tier_bits = tiers
    held = HeldChunks(state, _replica({group: bits}), 1, len(bits))
    seen = [state.visible(each) if tiers != -1 else each for each in bits]
    begin = min(begin, len(bits))

    def first(chunks: list[int]) -> int:
        return next((n for n, each in enumerate(chunks) if n >= begin and not each), len(bits))

    assert held.first_missing(group, begin, len(bits)) == first(seen)
    assert held.bits(group, begin, len(bits)).tolist() == seen[begin:]
    in_ram = held.only_bits(RAM)
    assert in_ram.first_missing(group, begin, len(bits)) == first([each & RAM for each in seen])
    in_ram_from_begin = [bool(each & RAM) for each in seen[begin:]]
    assert in_ram.held(group, begin, len(bits)).tolist() == in_ram_from_begin


HYBRIDS = (
    HYBRID,
    Planner.build([KVCacheGroup(GroupKind.FULL, BLOCK), *HYBRID.groups[1:]], 2 * CHUNK, BLOCK),
    Planner.build([KVCacheGroup(GroupKind.SLIDING, BLOCK, "w", 300)], CHUNK, BLOCK),
    Planner.build(
        [KVCacheGroup(GroupKind.CHUNKED, BLOCK, "c", 1024), KVCacheGroup(GroupKind.STATE, CHUNK)],
        CHUNK,
        BLOCK,
    ),
)
PATTERNS = st.one_of(
    st.tuples(st.just("every"), st.integers(1, 4), st.integers(0, 3)),
    st.tuples(st.just("except"), st.integers(0, 320), st.integers(1, 40)),
    st.tuples(st.just("up to"), st.integers(0, 320), st.just(0)),
)


def _pattern(kind: str, first: int, second: int, chunks: int, bits: int) -> list[int]:
    """Bits of a group's chunks."""
    if kind == "every":
        return [bits if number % first == second % first else 0 for number in range(chunks)]
    if kind == "except":
        return [0 if first <= number < first + second else bits for number in range(chunks)]
    return [bits if number < first else 0 for number in range(chunks)]


@settings(max_examples=100)
@given(
    data=st.data(),
    planner=st.sampled_from(HYBRIDS),
    chunks=st.integers(0, 320),
    start=st.integers(0, 3 * CHUNK // BLOCK),
    tiers=st.sampled_from([-1, RAM, DISK, RAM | DISK]),
    batches=st.sampled_from([(2, 5), (FIRST_BATCH, FURTHER_BATCH)]),
)
def test_the_prefix_that_a_lookup_finds_is_that_of_a_search_chunk_by_chunk(
    data: st.DataObject,
    planner: Planner,
    chunks: int,
    start: int,
    tiers: int,
    batches: tuple[int, int],
) -> None:
    """Whatever is missing: every second chunk, all of a group, the end, or the middle."""
    start_tokens = start * BLOCK
    held: dict[int, list[int]] = {}
    for group in range(len(planner.groups)):
        bits = data.draw(st.sampled_from([RAM, DISK, RAM | DISK, DISK << 1 | DISK]))
        one, other = data.draw(PATTERNS), data.draw(PATTERNS)
        found = zip(_pattern(*one, chunks, bits), _pattern(*other, chunks, DISK), strict=True)
        both = data.draw(st.booleans())
        held[group] = [a | b if both else a & b or a for a, b in found]
    state, replica = _state(chunks), _replica(held)
    state.tier_bits = tiers

    def usable(end: int, among: int) -> bool:
        needed = planner.needed_chunks(start_tokens, planner.tokens(end))
        return all(
            state.visible(replica.get(bytes([group]) + number.to_bytes(32, "big"))) & among
            for group, begin, stop in needed
            for number in range(begin, stop)
        )

    first = planner.chunks(start_tokens)
    presence = HeldChunks(state, replica, 1, chunks)
    with pytest.MonkeyPatch.context() as patch:
        for module in (planner_module, held_chunks_module):
            patch.setattr(module, "FIRST_BATCH", batches[0])
            patch.setattr(module, "FURTHER_BATCH", batches[1])
        for among, view in ((-1, presence), (RAM, presence.only_bits(RAM))):
            # From the longest one on, as few prefixes are long.
            ends = range(chunks, first, -1)
            expected = next((end for end in ends if usable(end, among)), 0)
            assert planner.longest_prefix(start_tokens, chunks, view) == expected


@given(
    bits=st.lists(st.integers(0, 15).map(lambda n: n & 7 | n >> 3 << 16), min_size=1, max_size=20),
    tiers=st.integers(-1, 7),
)
def test_of_many_objects_a_request_sees_the_same_as_of_each(bits: list[int], tiers: int) -> None:
    state = _state(0)
    state.tier_bits = tiers
    many = np.array(bits, np.int64)
    assert state.visible_many(many).tolist() == [state.visible(each) for each in bits]
    sources = [1 << source_tier(each) if each else 0 for each in bits]
    assert source_tier_bits(many).tolist() == sources


def test_the_prefixes_that_one_lookup_compares_are_of_one_moment() -> None:
    """The session's thread applies deltas while the scheduler's thread looks keys up."""
    replica = _replica({0: [RAM] * 8})
    held = HeldChunks(_state(8), replica, 1, 8)
    assert held.first_missing(0, 0, 8) == 8
    replica.clear()
    assert held.only_bits(RAM).first_missing(0, 0, 8) == 8


def _cost(planner: Planner | None, chunks: int, others: int, bits: int) -> int:
    """Calls in Python of the first lookup of a prompt whose chunks are held in tiers ``bits``.
    ``others``: further keys of the replica, in a file tier."""
    testbed = SchedulerTestbed(planner=planner)
    request = testbed.request(chunks * CHUNK + 1)
    testbed.hold([b"\0" + b"other" + number.to_bytes(27, "big") for number in range(others)], DISK)
    for group in range(len(planner.groups) if planner else 1):
        keys = [bytes([group]) + key[1:] for key in request.keys(0, chunks)]
        testbed.hold(keys, bits)
    return python_calls(lambda: testbed.ask(request))


@pytest.mark.parametrize("planner", [None, HYBRID], ids=["one group", "three groups"])
@pytest.mark.parametrize("bits", [RAM, DISK], ids=["in RAM", "in files"])
def test_a_lookup_makes_hardly_more_calls_for_a_long_prompt_and_none_more_for_a_large_replica(
    planner: Planner | None, bits: int
) -> None:
    """A call for each chunk would be 512 of them, and the scheduler's thread serves all requests.
    ``benchmarks/scheduler_lookup.py`` has the times."""
    short = _cost(planner, 32, 0, bits)
    long = _cost(planner, 512, 0, bits)
    assert long - short < 200
    # A few keys of each batch are searched one by one, which depends on their hashes.
    assert _cost(planner, 512, 20_000, bits) < long + 200


@pytest.mark.parametrize(
    "missing",
    [
        lambda group, chunk: group == 1 and chunk % 2,
        lambda group, chunk: chunk % 2 == (group == 1) if group else False,
        lambda group, chunk: group == 1,
        lambda group, chunk: group == 2,
        lambda group, chunk: group == 1 and 340 <= chunk < 680,
        lambda group, chunk: group and (340 <= chunk < 680) == (group == 1),
        lambda group, chunk: group == 2 and chunk == 1023,
    ],
    ids=[
        "every second window",
        "every second window and the other states",
        "all windows",
        "all states",
        "windows of the middle",
        "windows of the middle and other states",
        "the last state",
    ],
)
def test_a_lookup_has_no_loop_over_chunks_whatever_is_missing(
    missing: Callable[[int, int], object],
) -> None:
    testbed = SchedulerTestbed(planner=HYBRID)
    request = testbed.request(1024 * CHUNK + 1)
    keys = request.keys(0, 1024)
    testbed.hold(
        [
            bytes([group]) + key[1:]
            for group in range(3)
            for chunk, key in enumerate(keys)
            if not missing(group, chunk)
        ],
        RAM,
    )
    lines = python_lines(lambda: testbed.ask(request))
    # The few keys that others have displaced are searched one by one. A loop over the 3,072 objects
    # takes several lines for each.
    assert lines < 4 * 1024


@pytest.mark.parametrize("planner", [None, HYBRID], ids=["one group", "three groups"])
def test_a_decode_step_makes_a_handful_of_calls_for_each_running_request(
    planner: Planner | None,
) -> None:
    """Each request has chunks that wait for a slot, and no slot is free.
    ``benchmarks/scheduler_step.py`` has the times."""
    cost = []
    for requests in (16, 80):
        testbed = SchedulerTestbed(planner=planner)
        scheduled = {f"r{number}": 2 * CHUNK for number in range(requests)}
        for name in scheduled:
            testbed.admit(testbed.request(2 * CHUNK, name), 0, 0)
        testbed.run(scheduled)
        scheduled = dict.fromkeys(scheduled, 1)
        cost.append(python_calls(partial(testbed.build, scheduled)))
    assert (cost[1] - cost[0]) / 64 < 3


@pytest.mark.parametrize("planner", [None, HYBRID], ids=["one group", "three groups"])
def test_a_request_that_has_not_changed_costs_a_step_the_same_however_much_of_it_waits(
    planner: Planner | None,
) -> None:
    """No slot is free. What is counted includes each turn of a loop."""
    cost = []
    for chunks in (2, 40):
        testbed = SchedulerTestbed(planner=planner)
        scheduled = {f"r{number}": chunks * CHUNK for number in range(8)}
        for name in scheduled:
            testbed.admit(testbed.request(chunks * CHUNK, name), 0, 0)
        testbed.run(scheduled)
        scheduled = dict.fromkeys(scheduled, 1)
        testbed.run(scheduled)
        cost.append(python_lines(partial(testbed.build, scheduled)))
    assert cost[1] <= cost[0] + 5
    assert cost[0] < 150 + 8 * 40
