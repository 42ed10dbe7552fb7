"""Copies between KV tensors and a pool.

Whole chunks, parts, invalid addresses, bytes in flight, and the pure parts of the CUDA engine.
"""

from __future__ import annotations

import ctypes
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.transfer import cpu, selftest
from kvtier.transfer.codec import Codec, build_codec
from kvtier.transfer.copy_ranges import block_runs, rows_of, split_ranges
from kvtier.transfer.cpu import CpuCopyEngine
from kvtier.transfer.cuda_runtime import registration_ranges, relax_capture
from kvtier.transfer.engine import Copy, CopyError, CopyHandle, Direction
from kvtier.transfer.factory import make_engine
from kvtier.transfer.host_pool import HostPool, file_identity, open_pool
from kvtier.transfer.startup_check import RoundTripError, pageable_scratch, verify_round_trip
from kvtier.transfer.strided_views import gather, scatter, segment_views, word_dtype
from kvtier.transfer.synthetic_layouts import (
    SyntheticCache,
    SyntheticGroup,
    SyntheticSpec,
    make_every_cache,
)


@pytest.fixture
def layout() -> SyntheticCache:
    return next(iter(make_every_cache()))


@pytest.fixture
def codec(layout: SyntheticCache) -> Codec:
    return build_codec(layout.caches, layout, 64)


@pytest.fixture
def engine(layout: SyntheticCache, codec: Codec) -> CpuCopyEngine:
    engine = CpuCopyEngine(layout.caches, codec)
    engine.attach(pageable_scratch(3 * codec.shard_bytes[0]))
    return engine


def test_the_self_test_passes_on_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert selftest.main(["--pool-dir", str(tmp_path)]) == 0
    assert '"ok": true' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("copy", "problem"),
    [
        (Copy(1, 0, 0, (1,)), "group 1"),
        (Copy(0, 0, 0, ()), "within a chunk"),
        (Copy(0, 0, 1, (1, 2, 3, 4)), "within a chunk"),
        (Copy(0, 0, -1, (1,)), "within a chunk"),
        (Copy(0, 0, 0, (0,)), "outside"),
        (Copy(0, 0, 0, (12,)), "outside"),
        (Copy(0, 0, 0, (3, 3)), "twice"),
        (Copy(0, 10**9, 0, (1,)), "within a pool"),
        (Copy(0, -8, 0, (1,)), "within a pool"),
        (Copy(0, 4, 0, (1,)), "aligned"),
    ],
)
def test_addresses_outside_the_cache_or_pool_are_rejected(
    engine: CpuCopyEngine, copy: Copy, problem: str
) -> None:
    with pytest.raises(CopyError, match=problem):
        engine.submit([Copy(0, 0, 0, (1,)), copy], Direction.TO_DEVICE)
    assert engine.in_flight_bytes(Direction.TO_DEVICE) == 0


def test_nothing_is_copied_without_a_pool(layout: SyntheticCache, codec: Codec) -> None:
    with pytest.raises(CopyError, match="no pool"):
        CpuCopyEngine(layout.caches, codec).submit([Copy(0, 0, 0, (1,))], Direction.TO_HOST)


def test_the_in_flight_bound_lets_one_oversized_copy_go_alone(
    layout: SyntheticCache, codec: Codec
) -> None:
    engine = CpuCopyEngine(layout.caches, codec, in_flight_bytes=100)
    engine.attach(pageable_scratch(codec.shard_bytes[0]))
    assert engine.has_room(Direction.TO_HOST, 1000)
    handle = engine.submit([Copy(0, 0, 0, (1,))], Direction.TO_HOST)
    assert not engine.has_room(Direction.TO_HOST, 1)
    assert engine.has_room(Direction.TO_DEVICE, 1)
    assert engine.done(handle)
    assert engine.has_room(Direction.TO_HOST, 1)


def test_synchronizing_ends_every_handle(engine: CpuCopyEngine) -> None:
    handle = engine.submit([Copy(0, 0, 0, (1,))], Direction.TO_HOST)
    engine.synchronize()
    assert handle.finished
    assert engine.in_flight_bytes(Direction.TO_HOST) == 0


@pytest.mark.parametrize("index", range(len(make_every_cache())))
def test_copies_of_few_and_of_many_bytes_are_the_same(
    index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = make_every_cache()[index]
    codec = build_codec(layout.caches, layout, 64)
    found = []
    for limit in (cpu.SLICE_BYTES, 0):
        monkeypatch.setattr(cpu, "SLICE_BYTES", limit)
        engine = CpuCopyEngine(layout.caches, codec)
        engine.attach(pool := pageable_scratch(codec.groups[0].shard_bytes))
        engine.submit([Copy(0, 0, 0, (9, 2, 7, 4))], Direction.TO_HOST)
        engine.submit([Copy(0, 0, 0, (1, 3, 5, 6))], Direction.TO_DEVICE)
        found.append((pool.memory.tobytes(), [tensor.clone() for tensor in layout.caches.values()]))
    assert found[0][0] == found[1][0]
    for few, many in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(few.view(torch.int16), many.view(torch.int16))


@pytest.mark.parametrize("index", range(len(make_every_cache())))
def test_gather_and_scatter_use_the_same_bytes_as_the_plain_copies(index: int) -> None:
    """The kernels of the CUDA engine, run by torch on the CPU."""
    layout = make_every_cache()[index]
    codec = build_codec(layout.caches, layout, 64)
    group, word = codec.groups[0], codec.word_bytes
    plain = CpuCopyEngine(layout.caches, codec)
    pool = pageable_scratch(group.shard_bytes)
    plain.attach(pool)
    plain.submit([Copy(0, 0, 0, (9, 2, 7, 4))], Direction.TO_HOST)
    staging = torch.zeros(group.shard_bytes // word, dtype=word_dtype(word))
    views = segment_views(layout.caches, codec)[0]
    gather(views, torch.tensor([9, 2, 7, 4]), staging, group.block_bytes // word)
    assert np.array_equal(staging.view(torch.uint8).numpy(), pool.memory)
    scatter(views, torch.tensor([1, 3, 5, 6]), staging, group.block_bytes // word)
    again = pageable_scratch(group.shard_bytes)
    plain.attach(again)
    plain.submit([Copy(0, 0, 0, (1, 3, 5, 6))], Direction.TO_HOST)
    assert np.array_equal(again.memory, pool.memory)


def test_rows_name_every_block_and_its_place_in_the_pool(codec: Codec) -> None:
    block = codec.groups[0].block_bytes
    (rows,) = rows_of([Copy(0, 4096, 1, (5, 6, 7)), Copy(0, 65536, 0, (2,))], codec)
    assert rows.blocks.tolist() == [5, 6, 7, 2]
    assert rows.offsets.tolist() == [4096 + block, 4096 + 2 * block, 4096 + 3 * block, 65536]


def test_the_runs_of_a_block_are_its_bytes_in_the_order_of_the_object() -> None:
    for layout in make_every_cache():
        codec = build_codec(layout.caches, layout, 64)
        runs = block_runs(layout.caches, codec, 0)
        begins = [start for _, _, start, _ in runs.table]
        ends = [start + words * runs.word_bytes for _, _, start, words in runs.table]
        assert begins[0] == 0
        assert begins[1:] == ends[:-1]
        assert ends[-1] == codec.groups[0].block_bytes
        expected = pageable_scratch(codec.shard_bytes[0])
        engine = CpuCopyEngine(layout.caches, codec)
        engine.attach(expected)
        engine.submit([Copy(0, 0, 0, (3,))], Direction.TO_HOST)
        block = b"".join(
            ctypes.string_at(base + 3 * stride, words * runs.word_bytes)
            for base, stride, _, words in runs.table
        )
        assert block == expected.memory[: len(block)].tobytes()


@given(
    ranges=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), min_size=1, max_size=4),
    boundaries=st.sets(st.integers(1, 600), max_size=6),
)
def test_no_transfer_crosses_a_boundary_and_none_is_lost(
    ranges: list[tuple[int, int]], boundaries: set[int]
) -> None:
    address, device = 1 << 30, 7000
    host = np.array([address + begin for begin, _ in ranges], dtype=np.uint64)
    sizes = np.array([size for _, size in ranges], dtype=np.uint64)
    target = np.array([device * (number + 1) for number in range(len(ranges))], dtype=np.uint64)
    parts = split_ranges(host, target, sizes, address, sorted(boundaries))
    moved = [
        (at + offset, to + offset)
        for at, to, size in zip(*(part.tolist() for part in parts), strict=True)
        for offset in range(size)
    ]
    assert moved == [
        (address + begin + offset, device * (number + 1) + offset)
        for number, (begin, size) in enumerate(ranges)
        for offset in range(size)
    ]
    for at, size in zip(parts[0].tolist(), parts[2].tolist(), strict=True):
        assert not any(at < address + boundary < at + size for boundary in boundaries)


@given(nbytes=st.integers(1, 1 << 40))
def test_ranges_to_register_cover_the_pool_once(nbytes: int) -> None:
    ranges = registration_ranges(nbytes)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == nbytes
    assert all(left[1] == right[0] for left, right in pairwise(ranges))
    assert all(begin % 4096 == 0 and 0 < end - begin <= 1 << 30 for begin, end in ranges)


def test_without_a_loaded_cuda_runtime_the_capture_mode_cannot_be_set(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r--p 00000000 00:00 0 /usr/lib/libc.so.6\n")
    assert not relax_capture(maps)
    assert not relax_capture(tmp_path / "absent")


class _Careless(CpuCopyEngine):
    """Swaps two blocks on their way to the device."""

    def _move(self, copy: Copy, direction: Direction) -> None:
        if direction is Direction.TO_DEVICE:
            copy = Copy(copy.group, copy.shard, copy.first, tuple(reversed(copy.blocks)))
        super()._move(copy, direction)


class _Stuck(CpuCopyEngine):
    """Says done at once and copies nothing."""

    def _move(self, copy: Copy, direction: Direction) -> None:
        return None


class _Broken(CpuCopyEngine):
    """The device fails."""

    def _ready(self, handle: CopyHandle) -> bool:
        raise RuntimeError("device lost")


@pytest.mark.parametrize("kind", [_Careless, _Stuck])
def test_the_startup_check_finds_an_engine_that_copies_wrongly(
    layout: SyntheticCache, codec: Codec, kind: type[CpuCopyEngine]
) -> None:
    before = {name: tensor.clone() for name, tensor in layout.caches.items()}
    with pytest.raises(RoundTripError, match="not what was copied out"):
        verify_round_trip(layout.caches, codec, kind(layout.caches, codec))
    for name, tensor in layout.caches.items():
        assert torch.equal(before[name].view(torch.int16), tensor.view(torch.int16))


def test_the_startup_check_finds_layers_that_share_bytes() -> None:
    storage = torch.zeros(40, 16, dtype=torch.uint8)
    caches = {"a": storage[:20], "b": storage[2:22]}
    both = SyntheticCache("test", caches, 20, (SyntheticGroup(("a", "b"), SyntheticSpec(16, 16)),))
    codec = build_codec(caches, both, 64)
    with pytest.raises(RoundTripError, match="shares bytes"):
        verify_round_trip(caches, codec, make_engine(caches, codec))


def test_a_device_failure_is_a_copy_error_and_releases_the_bytes_in_flight(
    layout: SyntheticCache, codec: Codec
) -> None:
    engine = _Broken(layout.caches, codec)
    engine.attach(pageable_scratch(codec.shard_bytes[0]))
    handle = engine.submit([Copy(0, 0, 0, (1,))], Direction.TO_HOST)
    with pytest.raises(CopyError, match="device lost"):
        engine.done(handle)
    assert engine.in_flight_bytes(Direction.TO_HOST) == 0


def test_a_pool_is_shared_with_other_mappings_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    path.write_bytes(bytes(8192))
    pool = open_pool(path, 8192)
    pool.memory[5000] = 7
    assert path.read_bytes()[5000] == 7
    assert pool.identity == file_identity(path)


def test_a_pool_smaller_than_announced_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    path.write_bytes(bytes(4096))
    with pytest.raises(ValueError, match="must be at least 8192"):
        open_pool(path, 8192)


def test_a_replaced_pool_file_has_another_identity(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    path.write_bytes(bytes(4096))
    pool = open_pool(path, 4096)
    (tmp_path / "next").write_bytes(bytes(4096))
    (tmp_path / "next").rename(path)
    assert pool.identity != file_identity(path)
    assert isinstance(pool, HostPool)
