"""LMCache's real ``CacheEngine.store()`` and ``retrieve()`` with KVTier's bytes, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.cache_engine import (
    BLOCKS,
    CHUNK,
    NAMESPACE,
    Rank,
    config_file,
    kv_tensors,
    lmcache_in_process,
    open_rank,
    wait,
)
from tests.support.lmcache_backends import require_lmcache

from kvtier.engines.common.jobs import BlockRun
from kvtier.engines.lmcache.objects import ObjectShape, chunk_hash
from kvtier.engines.lmcache.transfers import LoadTransfer, StoreTransfer
from kvtier.tiers.filesystem.format import HEADER_BYTES

A, B, C, D = (b"\0" + bytes([number]) * 32 for number in range(1, 5))


@pytest.fixture(autouse=True)
def lmcache() -> Iterator[None]:
    require_lmcache()
    with lmcache_in_process():
        yield


@pytest.fixture
def rank(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rank]:
    dtype = getattr(request, "param", torch.bfloat16)
    rank = open_rank(config_file(tmp_path, {}), tensors=kv_tensors(dtype))
    yield rank
    rank.cache.close()


every_type = pytest.mark.parametrize(
    "rank", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8], ids=str, indirect=True
)


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    """LMCache's configuration with a directory that outlives its engine."""
    (tmp_path / "remote").mkdir()
    url = f"fs://localhost:0{tmp_path / 'remote'}"
    return config_file(tmp_path, {"local_cpu": False, "remote_url": url})


@every_type
def test_opaque_bytes_come_back_as_they_were_block_zero_included(rank: Rank) -> None:
    before = [rank.block(number) for number in range(4)]
    assert rank.store(A, 5, 0, 1) == ""
    assert rank.store(B, 6, 3, 2) == ""
    rank.wipe()
    done = rank.load((A, 5, (7, 8)), (B, 6, (0, 9)))
    assert (done.loaded, done.failure) == (2, "")
    assert [rank.block(number) for number in (7, 8, 9, 0)] == before
    untouched = rank.block(5)
    assert untouched == [bytes(len(each)) for each in untouched]


@every_type
def test_chunk_accounting_is_that_of_the_real_bytes(rank: Rank) -> None:
    rank.store(A, 5, 0, 1)
    shape = ObjectShape(CHUNK, rank.copier.shard_bytes)
    storage = rank.cache._storage
    memory_obj = storage.get(rank.cache._database.key(chunk_hash(A)))
    try:
        assert memory_obj.tensor.dtype == torch.uint8
        assert tuple(memory_obj.tensor.shape) == (1, 1, CHUNK, shape.bytes_per_token)
        assert memory_obj.get_size() == shape.object_bytes
        padded = HEADER_BYTES + -(-shape.shard_bytes // 4096) * 4096
        assert padded <= shape.object_bytes < padded + CHUNK
    finally:
        memory_obj.ref_count_down()


def test_a_part_of_a_chunk_is_loaded_behind_a_local_hit(rank: Rank) -> None:
    before = rank.block(1)
    rank.store(A, 5, 0, 1)
    rank.wipe()
    transfer = LoadTransfer((A,), (5,), (BlockRun(0, 1, (7,)),))
    rank.cache.load(transfer)
    assert transfer.loaded == 1
    assert rank.block(7) == before


def test_what_is_not_there_ends_the_load(rank: Rank) -> None:
    before = rank.block(0)
    rank.store(A, 5, 0, 1)
    rank.store(C, 5, 2, 3)
    rank.wipe()
    done = rank.load((A, 5, (6, 7)), (B, 5, (8, 9)), (C, 5, (10, 11)), (D, 5, (4, 5)))
    assert (done.loaded, done.failure) == (1, "missing")
    assert done.missing == [1, 3], "all that is not there, so that it costs one failed load"
    assert rank.block(6) == before
    for number in (8, 9, 10, 11, 4, 5):
        assert not any(map(any, rank.block(number)))


def test_a_shard_of_another_store_or_key_is_not_loaded(rank: Rank) -> None:
    rank.store(A, 5, 0, 1)
    rank.wipe()
    done = rank.load((A, 6, (6, 7)))
    assert (done.loaded, done.failure, done.damaged) == (0, "damaged", [0])
    assert not any(map(any, rank.block(6)))
    assert rank.load((A, 5, (6, 7))).failure == "missing", "it was removed"


def test_a_chunk_that_is_stored_again_replaces_the_earlier_store(rank: Rank) -> None:
    rank.store(A, 5, 0, 1)
    assert rank.store(A, 6, 2, 3) == ""
    before = rank.block(2)
    rank.wipe()
    assert rank.load((A, 6, (6, 7))).loaded == 1
    assert rank.block(6) == before


def test_a_load_whose_time_is_up_touches_no_block(rank: Rank) -> None:
    rank.store(A, 5, 0, 1)
    rank.wipe()
    transfer = LoadTransfer((A,), (5,), (BlockRun(0, 0, (6, 7)),))
    transfer.gate.close()
    rank.cache.load(transfer)
    assert (transfer.loaded, transfer.failure) == (0, "out_of_time")
    assert not any(map(any, rank.block(6)))


def test_a_store_whose_time_is_up_leaves_nothing_behind(rank: Rank) -> None:
    transfer = StoreTransfer(A, 5, BlockRun(0, 0, (0, 1)))
    transfer.gate.close()
    assert rank.cache.store(transfer) == "out_of_time"
    assert not rank.cache.holds(A)
    assert rank.store(A, 6, 0, 1) == ""


def test_blocks_that_do_not_exist_are_refused_and_nothing_is_stored(rank: Rank) -> None:
    assert rank.store(A, 5, 0, BLOCKS) == "copy_failed"
    assert not rank.cache.holds(A)
    rank.store(A, 6, 0, 1)
    done = rank.load((A, 6, (0, BLOCKS)))
    assert (done.loaded, done.failure) == (0, "copy_failed")


def test_a_part_of_a_chunk_is_not_stored(rank: Rank) -> None:
    assert rank.store(A, 5, 0) == "copy_failed"
    assert not rank.cache.holds(A)
    assert rank.cache.store(StoreTransfer(A, 5, BlockRun(0, 1, (0, 1)))) == "copy_failed"
    assert not rank.cache.holds(A)


def test_without_room_the_store_is_dropped(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank.cache._storage, "allocate", lambda *_args, **_named: None)
    assert rank.store(A, 5, 0, 1) == "no_room"
    assert not rank.cache.write(A, 5)
    assert not rank.cache.holds(A)


def test_full_memory_evicts_and_stores_go_on(rank: Rank) -> None:
    shape = ObjectShape(CHUNK, rank.copier.shard_bytes)
    number = (32 << 20) // shape.object_bytes + 50
    keys = [b"\0" + index.to_bytes(32, "big") for index in range(number)]
    before = rank.block(0)
    assert [rank.store(key, 1, 0, 1) for key in keys[-3:]] == [""] * 3
    assert {rank.store(key, 1, 0, 1) for key in keys} <= {"", "no_room", "not_visible"}
    assert rank.cache.holds(keys[-1])
    assert not all(rank.cache.holds(key) for key in keys)
    rank.wipe()
    assert rank.load((keys[-1], 1, (6, 7))).loaded == 1
    assert rank.block(6) == before


def test_markers_are_objects_of_lmcache_and_verify_themselves(rank: Rank) -> None:
    assert rank.cache.read(A) == 0
    assert rank.cache.write(A, 7)
    assert rank.cache.read(A) == 7
    assert rank.cache.write(A, 8)
    assert rank.cache.read(A) == 8
    assert not rank.cache.holds(A), "a marker is no shard"
    rank.cache._namespace = "cd" * 16
    assert rank.cache.read(A) == 0, "the marker of another engine"
    rank.cache._namespace = NAMESPACE
    rank.cache.remove(A)
    assert rank.cache.read(A) == 0


def test_a_back_end_that_raises_is_a_failure_with_a_reason(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.store(A, 5, 0, 1)

    def broken(*_arguments: Any, **_named: Any) -> None:
        raise RuntimeError("the back end says no")

    for name in ("remove", "batched_get", "contains", "allocate"):
        monkeypatch.setattr(rank.cache._storage, name, broken)
    assert rank.store(B, 5, 0, 1) == "storage_failed"
    assert rank.load((A, 5, (6, 7))).loaded == 0
    with pytest.raises(OSError, match="the back end says no"):
        rank.cache.holds(A)
    with pytest.raises(OSError, match="the back end says no"):
        rank.cache.write(A, 5)


def test_what_a_remote_back_end_has_survives_a_restart_of_the_engine(remote: Path) -> None:
    first = open_rank(remote)
    before = first.block(0)
    assert first.store(A, 5, 0, 1) == ""
    assert first.cache.write(A, 5)
    wait(lambda: first.cache.read(A) == 5)
    first.cache.close()
    second = open_rank(remote)
    second.wipe()
    assert second.cache.read(A) == 5
    assert second.cache.holds(A)
    assert second.load((A, 5, (6, 7))).loaded == 1
    assert second.block(6) == before
    second.cache.close()


def test_a_byte_that_a_remote_back_end_has_changed_is_noticed(remote: Path) -> None:
    rank = open_rank(remote)
    assert rank.store(A, 5, 0, 1) == ""
    (path,) = (remote.parent / "remote").glob("*.data")
    content = bytearray(path.read_bytes())
    content[-HEADER_BYTES // 2 - 5000] ^= 1
    path.write_bytes(content)
    rank.wipe()
    done = rank.load((A, 5, (6, 7)))
    assert (done.loaded, done.failure) == (0, "damaged")
    assert not any(map(any, rank.block(6)))
    wait(lambda: not rank.cache.holds(A))
    rank.cache.close()
