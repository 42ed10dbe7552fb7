"""What a load's start gives to the workers and to tierd, whatever the groups of the engine.

The parts of a load are handled together. Here each is looked at by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.scheduler.scheduler_testbed import BLOCK, CHUNK, DISK, RAM, SchedulerTestbed

from kvtier.engines.common.jobs import BlockRun
from kvtier.engines.common.request_state import PendingPromotion, RequestState
from kvtier.engines.vllm.loads_in_flight import (
    LOAD_GRACE_SECONDS,
    MIN_COPY_BYTES_PER_SECOND,
    MIN_LOAD_TIMEOUT_SECONDS,
    LoadsInFlight,
)
from kvtier.planner import GroupKind, KVCacheGroup, Part, Planner
from kvtier.store.generations import pack_location, unpack_location
from kvtier.tierd.wire import Arriving, Load, Ready

CHUNKS = 9
SIZES = (1 << 20, 3 << 20, 5 << 20, 7 << 20)
KINDS = {
    "full": KVCacheGroup(GroupKind.FULL, BLOCK),
    "coarse": KVCacheGroup(GroupKind.FULL, CHUNK),
    "window": KVCacheGroup(GroupKind.SLIDING, BLOCK, "w", BLOCK + 1),
    "long window": KVCacheGroup(GroupKind.SLIDING, BLOCK, "l", 3 * CHUNK),
    "local": KVCacheGroup(GroupKind.CHUNKED, BLOCK, "c", 4 * CHUNK),
    "state": KVCacheGroup(GroupKind.STATE, CHUNK, "s"),
}


class Side(NamedTuple):
    """A scheduler side that may load a request with ``CHUNKS`` chunks."""

    testbed: SchedulerTestbed
    planner: Planner
    loads: LoadsInFlight
    state: RequestState

    def key(self, part: Part) -> bytes:
        hashes = self.state.request.block_hashes
        found: bytes = hashes[(part.chunk + 1) * self.planner.hashes_per_chunk - 1]
        return bytes([part.group]) + found


def side(kinds: Sequence[str], computed: int) -> Side:
    planner = Planner.build([KINDS[kind] for kind in kinds], CHUNK, BLOCK)
    testbed = SchedulerTestbed(planner=planner)
    sizes = SIZES[: len(kinds)]
    testbed.client.sink(
        Ready(namespace="a" * 32, slot_bytes=sizes, persistent=True, weights=("w",))
    )
    testbed.client.delta(snapshot=True)
    testbed.build()
    request: Any = testbed.request(CHUNKS * CHUNK + 1)
    state = RequestState(request)
    state.keys(planner.hashes_per_chunk)
    state.computed_tokens = computed
    found: LoadsInFlight = testbed.scheduler.loads.in_flight
    return Side(testbed, planner, found, state)


def tables_of(planner: Planner) -> list[list[int]]:
    """Block tables of the whole request, whose numbers differ."""
    return [
        [1 + 1000 * number + index for index in range(CHUNKS * CHUNK // group.block_tokens)]
        for number, group in enumerate(planner.groups)
    ]


def expected_runs(parts: Sequence[Part], tables: Sequence[Sequence[int]]) -> list[BlockRun]:
    return [
        BlockRun(part.group, part.first, tuple(tables[part.group][part.block :][: part.blocks]))
        for part in parts
    ]


kinds_of_an_engine = st.one_of(
    st.just(["full"]),
    st.lists(st.sampled_from(["full", "coarse", "window", "long window", "state"]), max_size=3).map(
        lambda more: ["full", *more]
    ),
    st.permutations(["local", "window", "full"]),
    st.just(["window", "state"]),
    st.just(["state"]),
)


@settings(max_examples=50)
@given(data=st.data(), kinds=kinds_of_an_engine)
def test_a_load_from_ram_is_made_of_its_parts(data: st.DataObject, kinds: list[str]) -> None:
    start, end = sorted(data.draw(st.sets(st.integers(0, CHUNKS), min_size=2, max_size=2)))
    inside = data.draw(st.booleans()) if kinds == ["full"] else False
    computed, end_tokens = start * CHUNK + inside * BLOCK, end * CHUNK
    own = side(kinds, computed)
    parts = own.planner.needed(computed, end_tokens)
    missing = data.draw(st.sets(st.sampled_from(parts), max_size=2) if parts else st.just(set()))
    own.testbed.hold([own.key(part) for part in parts if part not in missing], RAM)
    own.testbed.hold([own.key(part) for part in parts if part in missing], DISK)
    tables = tables_of(own.planner)
    own.loads.start(own.state, end_tokens - computed, tables, None, 0.0)
    ((job,), _) = own.loads.take_jobs()
    assert list(job.runs) == expected_runs(parts, tables)
    present = parts[: min((parts.index(part) for part in missing), default=len(parts))]
    replica = own.testbed.scheduler.session.replica
    where = [unpack_location(replica.location(own.key(part))) for part in present]
    assert list(zip(job.slots, job.generations, strict=True)) == where
    assert {type(each) for each in (*job.slots, *job.generations)} <= {int}
    assert not job.arriving
    sizes = [SIZES[part.group] for part in parts]
    assert job.timeout_seconds == pytest.approx(
        MIN_LOAD_TIMEOUT_SECONDS + sum(sizes) / MIN_COPY_BYTES_PER_SECOND
    )
    (message,) = own.testbed.client.take(Load)
    assert [bytes([group]) + key for group, key in message.keys] == list(map(own.key, parts))
    active = own.loads._active[job.load]
    assert active.chunk_tokens == tuple(part.tokens for part in parts)
    assert active.object_bytes == tuple(sizes)
    assert (active.keys_loaded, active.keys_named) == (len(parts), len(present))


@settings(max_examples=50)
@given(kinds=kinds_of_an_engine, broken=st.integers(0, 1 << 16), gone=st.booleans())
def test_a_load_with_a_block_that_is_not_allocated_names_no_slot(
    kinds: list[str], broken: int, gone: bool
) -> None:
    own = side(kinds, 0)
    parts = own.planner.needed(0, CHUNKS * CHUNK)
    own.testbed.hold([own.key(part) for part in parts], RAM)
    tables = tables_of(own.planner)
    part = parts[broken % len(parts)]
    if gone:
        del tables[part.group][part.block :]
    else:
        tables[part.group][part.block + broken % part.blocks] = 0
    own.loads.start(own.state, CHUNKS * CHUNK, tables, None, 0.0)
    ((job,), _) = own.loads.take_jobs()
    assert (job.slots, job.generations, job.arriving) == ((), (), False)
    assert [run.group for run in job.runs] == [part.group for part in parts]
    assert own.loads._active[job.load].failure == "block_table"


@settings(max_examples=50)
@given(kinds=kinds_of_an_engine, usable=st.integers(0, 40), further=st.integers(0, 40))
def test_the_slots_of_a_promotion_come_with_the_load_and_after_it(
    kinds: list[str], usable: int, further: int
) -> None:
    own = side(kinds, 0)
    parts = own.planner.needed(0, CHUNKS * CHUNK)
    named = [(4096 * number, 2 * number) for number in range(1, len(parts) + 1)]
    locations = tuple(pack_location(*each) for each in named)
    usable, further = min(usable, len(parts)), min(further, len(parts))
    prefix_only = own.planner.prefix_only
    promotion = PendingPromotion(
        promotion_id=7,
        first_chunk=0,
        keys=len(parts),
        deadline=own.testbed.now + 3,
        epoch=1,
        usable_keys=usable,
        tiers=(1,) * usable,
        locations=locations[:usable],
        end_tokens=0 if prefix_only else CHUNKS * CHUNK,
        arriving=True,
    )
    own.loads.start(
        own.state, CHUNKS * CHUNK, tables_of(own.planner), promotion, own.testbed.now + 3
    )
    ((job,), _) = own.loads.take_jobs()
    assert list(zip(job.slots, job.generations, strict=True)) == named[:usable]
    assert job.arriving == (usable < len(parts))
    assert job.timeout_seconds >= 3 + LOAD_GRACE_SECONDS
    message = Arriving(
        promotion=7,
        first=0,
        tiers=(1,) * further,
        locations=locations[:further],
        predicted=len(parts),
    )
    assert own.loads.on_arriving(message) == job.arriving
    arrived = [
        each
        for keys in own.loads.take_arrived()
        for each in zip(keys.slots, keys.generations, strict=True)
    ]
    assert arrived == (named[usable:further] if job.arriving else [])


def test_a_request_without_the_hashes_of_its_chunks_is_an_error() -> None:
    own = side(["full"], 0)
    with pytest.raises(ValueError, match="zip"):
        own.state.wire_keys_of(own.planner.needed_runs(0, (CHUNKS + 1) * CHUNK))
