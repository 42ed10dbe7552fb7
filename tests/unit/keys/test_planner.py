"""Arithmetic over chunks, and which models are served."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize(
    "groups",
    [
        [],
        [FULL, FULL],
        [FULL, KVCacheGroup(GroupKind.SLIDING, 32, "SlidingWindowSpec", 128)],
        [KVCacheGroup(GroupKind.STATE, 64, "MambaSpec")],
        [KVCacheGroup(GroupKind.OTHER, 16, "ChunkedLocalAttentionSpec")],
    ],
)
def test_unsupported_models_are_named_with_their_groups(groups: list[KVCacheGroup]) -> None:
    with pytest.raises(UnsupportedGeometryError) as refused:
        Planner.build(groups, 256, 32)
    for group in groups:
        assert group.name in str(refused.value)
        assert str(group.block_tokens) in str(refused.value)


@pytest.mark.parametrize(("hashed", "ranks"), [(0, 1), (48, 1), (32, 0)])
def test_a_hash_size_that_does_not_divide_a_chunk_and_zero_ranks_are_rejected(
    hashed: int, ranks: int
) -> None:
    with pytest.raises(UnsupportedGeometryError):
        Planner.build([FULL], 64, hashed, ranks)


def test_a_hit_that_ends_inside_a_chunk_needs_only_the_missing_blocks() -> None:
    assert _planner().needed(32, 192) == [
        Part(0, 0, 1, 1, 1),
        Part(0, 1, 0, 2, 2),
        Part(0, 2, 0, 4, 2),
    ]


def test_a_load_that_is_cut_short_ends_inside_a_chunk() -> None:
    assert _planner().needed(64, 96) == [Part(0, 1, 0, 2, 1)]


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
