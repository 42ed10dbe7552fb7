"""Arithmetic over chunks, and which models are served."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvtier.planner import (
    GroupKind,
    KVCacheGroup,
    Part,
    Planner,
    UnsupportedGeometryError,
    effective_chunk_tokens,
)

FULL = KVCacheGroup(GroupKind.FULL, 32, "FullAttentionSpec")


def _planner(block: int = 32, chunk: int = 64, hashed: int = 32) -> Planner:
    return Planner.build([KVCacheGroup(GroupKind.FULL, block)], chunk, hashed)


@pytest.mark.parametrize(
    ("blocks", "requested", "effective"),
    [([16], 256, 256), ([32], 250, 256), ([48], 256, 288), ([16, 24], 100, 144), ([512], 256, 512)],
)
def test_the_effective_chunk_is_the_smallest_common_multiple_that_is_large_enough(
    blocks: list[int], requested: int, effective: int
) -> None:
    assert (
        effective_chunk_tokens([KVCacheGroup(GroupKind.FULL, size) for size in blocks], requested)
        == effective
    )


@pytest.mark.parametrize("sizes", [[], [0], [16, -1], [1021, 1031, 1033]])
def test_block_sizes_without_a_usable_multiple_are_rejected_with_the_numbers(
    sizes: list[int],
) -> None:
    with pytest.raises(UnsupportedGeometryError) as refused:
        effective_chunk_tokens([KVCacheGroup(GroupKind.FULL, size) for size in sizes], 256)
    assert all(str(size) in str(refused.value) for size in sizes)


LOCAL = KVCacheGroup(GroupKind.CHUNKED, 32, "ChunkedLocalAttentionSpec", 256)
WINDOW = KVCacheGroup(GroupKind.SLIDING, 32, "SlidingWindowSpec", 128)
STATE = KVCacheGroup(GroupKind.STATE, 64, "MambaSpec")


@pytest.mark.parametrize(
    ("groups", "chunk", "nearest"),
    [
        ([], 256, "must be at least one"),
        ([FULL, KVCacheGroup(GroupKind.OTHER, 16, "CrossAttentionSpec")], 256, "must be full att"),
        ([KVCacheGroup(GroupKind.SLIDING, 32, "SlidingWindowSpec", 1)], 256, "at least 2 tokens"),
        ([FULL, LOCAL], 256, "set chunkTokens to a divisor of 256 that is a multiple of 32"),
        ([FULL, LOCAL], 96, "set chunkTokens to a divisor of 256 that is a multiple of 32"),
        ([LOCAL], 64, "must have a group that is not chunked local attention"),
    ],
)
def test_unsupported_models_are_named_with_their_groups_and_the_nearest_that_is_served(
    groups: list[KVCacheGroup], chunk: int, nearest: str
) -> None:
    with pytest.raises(UnsupportedGeometryError) as refused:
        Planner.build(groups, chunk, 16)
    assert nearest in str(refused.value)
    odd = [group for group in groups if group.kind is not GroupKind.FULL]
    assert all(group.name in str(refused.value) for group in odd)
    assert all(str(group.block_tokens) in str(refused.value) for group in odd)


@st.composite
def _hybrids(draw: st.DrawFn) -> Planner:
    """Planners with one to four groups of different kinds, block sizes and windows."""
    common = draw(st.sampled_from([64, 96, 192]))
    groups = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from([GroupKind.FULL, GroupKind.SLIDING, GroupKind.STATE]))
        block = draw(st.sampled_from([16, 32, common]))
        window = draw(st.integers(2, 5 * common)) if kind is GroupKind.SLIDING else 0
        groups.append(KVCacheGroup(kind, block, kind.value, window))
    if draw(st.booleans()):
        chunks = draw(st.integers(2, 4))
        local = KVCacheGroup(GroupKind.CHUNKED, 16, "local", chunks * common)
        groups.insert(draw(st.integers(0, len(groups))), local)
    return Planner.build(groups, common, 16)


def _reads(group: KVCacheGroup, end: int) -> set[int]:
    """The tokens whose KV the engine reads when it computes token ``end`` and later ones, by
    vLLM's ``get_num_skipped_tokens``; of a state only its last token has one."""
    skipped = {
        GroupKind.FULL: 0,
        GroupKind.SLIDING: max(0, end - group.window_tokens + 1),
        GroupKind.CHUNKED: end // max(1, group.window_tokens) * group.window_tokens,
        GroupKind.STATE: end - 1,
    }[group.kind]
    return set(range(skipped, end))


@given(planner=_hybrids(), end=st.integers(1, 12), start=st.integers(0, 11))
def test_what_is_loaded_is_what_the_engine_reads_and_allocates_and_no_more(
    planner: Planner, end: int, start: int
) -> None:
    end_tokens = planner.tokens(end)
    start_tokens = min(start, end - 1) * planner.chunk_tokens
    parts = planner.needed(start_tokens, end_tokens)
    for number, group in enumerate(planner.groups):
        block = group.block_tokens
        loaded = [
            part.block + index
            for part in parts
            if part.group == number
            for index in range(part.blocks)
        ]
        wanted = {token // block for token in _reads(group, end_tokens) if token >= start_tokens}
        assert loaded == sorted(wanted)
    assert sum(part.tokens for part in parts) == (end_tokens - start_tokens if parts else 0)
    chunks = planner.needed_chunks(start_tokens, end_tokens)
    assert [(part.group, part.chunk) for part in parts] == [
        (group, chunk) for group, begin, stop in chunks for chunk in range(begin, stop)
    ]


@given(planner=_hybrids(), end=st.integers(1, 12), start=st.integers(0, 11))
def test_parts_that_are_alike_are_together_and_each_is_that_of_its_chunk(
    planner: Planner, end: int, start: int
) -> None:
    end_tokens = planner.tokens(end)
    start_tokens = min(start, end - 1) * planner.chunk_tokens
    runs = planner.needed_runs(start_tokens, end_tokens)
    groups = [run.group for run in runs]
    assert groups == sorted(groups)
    assert all(groups.count(group) <= 3 for group in groups)
    found = [part for run in runs for part in run.parts()]
    assert found == planner.needed(start_tokens, end_tokens)
    for part in found:
        first, stop = planner.object_range(part.group, part.chunk)
        group = planner.groups[part.group]
        needed = max(start_tokens // group.block_tokens, group.first_needed_block(end_tokens))
        assert part.block == max(first, needed)
        assert part.first == part.block - first
        assert part.blocks == stop - part.block
    for run in runs:
        table = range(1, 1 + end_tokens)
        wanted = [table[part.block + index] for part in run.parts() for index in range(part.blocks)]
        assert list(run.table_blocks(table)) == wanted


@given(planner=_hybrids(), end=st.integers(1, 12))
def test_an_object_holds_every_block_that_is_loaded_from_it_and_one_is_stored_for_each(
    planner: Planner, end: int
) -> None:
    for part in planner.needed(0, planner.tokens(end)):
        first, stop = planner.object_range(part.group, part.chunk)
        assert stop - first == planner.object_blocks(part.group)
        assert first + part.first == part.block
        assert part.first + part.blocks <= planner.object_blocks(part.group)
        assert planner.is_needed(part.group, part.chunk)


class _Without:
    """Every object is there, except for these: (group, chunk)."""

    def __init__(self, missing: set[tuple[int, int]]) -> None:
        self._missing = missing

    def first_missing(self, group: int, begin: int, end: int) -> int:
        chunks = range(begin, end)
        return next((chunk for chunk in chunks if (group, chunk) in self._missing), end)

    def held(self, group: int, begin: int, end: int) -> NDArray[np.bool_]:
        held = [(group, chunk) not in self._missing for chunk in range(begin, end)]
        return np.array(held, np.bool_)


@given(data=st.data(), planner=_hybrids(), start=st.integers(0, 6), most=st.integers(0, 10))
def test_the_longest_prefix_is_the_longest_whose_objects_are_all_there(
    data: st.DataObject, planner: Planner, start: int, most: int
) -> None:
    groups, start_tokens = len(planner.groups), planner.tokens(start)
    objects = [(group, chunk) for group in range(groups) for chunk in range(most)]
    missing = data.draw(
        st.sets(st.sampled_from(objects), max_size=12) if objects else st.just(set())
    )

    def usable(end: int) -> bool:
        parts = planner.needed(start_tokens, planner.tokens(end))
        return not any((part.group, part.chunk) in missing for part in parts)

    found = planner.longest_prefix(start_tokens, most, _Without(missing))
    assert found == max((end for end in range(start + 1, most + 1) if usable(end)), default=0)


def test_a_hit_leaves_the_last_token_to_compute_unless_there_is_full_attention_only() -> None:
    assert Planner.build([FULL], 64, 32).max_hit_chunks(128) == 2
    assert Planner.build([FULL, STATE], 64, 32).max_hit_chunks(128) == 1
    assert Planner.build([FULL, STATE], 64, 32).max_hit_chunks(129) == 2


def test_objects_of_a_short_window_and_of_a_state_are_the_end_of_the_chunk() -> None:
    planner = Planner.build([FULL, WINDOW, STATE], 512, 32)
    assert planner.all_object_blocks == (16, 4, 1)
    assert planner.object_range(1, 1) == (28, 32)
    assert planner.object_range(2, 1) == (15, 16)


@pytest.mark.parametrize(("hashed", "ranks"), [(0, 1), (48, 1), (32, 0)])
def test_a_hash_size_that_does_not_divide_a_chunk_and_zero_ranks_are_rejected(
    hashed: int, ranks: int
) -> None:
    with pytest.raises(UnsupportedGeometryError):
        Planner.build([FULL], 64, hashed, ranks)


def test_a_hit_that_ends_inside_a_chunk_needs_only_the_missing_blocks() -> None:
    assert _planner().needed(32, 192) == [
        Part(0, 0, 1, 1, 1, 32),
        Part(0, 1, 0, 2, 2, 64),
        Part(0, 2, 0, 4, 2, 64),
    ]


def test_a_load_that_is_cut_short_ends_inside_a_chunk() -> None:
    assert _planner().needed(64, 96) == [Part(0, 1, 0, 2, 1, 32)]


@given(st.integers(1, 4), st.integers(1, 8), st.integers(0, 40), st.integers(0, 40))
def test_parts_cover_exactly_the_blocks_between_start_and_end(
    blocks: int, per_chunk: int, one: int, other: int
) -> None:
    block = 16 * blocks
    planner = Planner.build([KVCacheGroup(GroupKind.FULL, block)], block * per_chunk, block)
    start, end = sorted((one, other))
    covered = [
        block
        for part in planner.needed(start * block, end * block)
        for block in range(part.block, part.block + part.blocks)
        if part.block == part.chunk * per_chunk + part.first
    ]
    assert covered == list(range(start, end))


@given(st.integers(1, 1 << 16))
def test_tokens_and_chunks_convert_both_ways(tokens: int) -> None:
    planner = _planner()
    chunks = planner.chunks(tokens)
    assert planner.tokens(chunks) <= tokens < planner.tokens(chunks + 1)


def test_a_load_starts_at_block_boundaries_only() -> None:
    assert _planner().starts_at_block(96)
    assert not _planner().starts_at_block(90)
