"""The host pool file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.harness.tierd_testbed import wait_for
from kvtier.tierd import host_pool as module
from kvtier.tierd.host_pool import PAGE_BYTES, PoolFile

MIB = 1 << 20


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Path]:
    """A memory-backed volume of 16 MiB."""
    if os.geteuid() != 0 or os.system(f"mount -t tmpfs -o size=16m tmpfs {tmp_path} 2>/dev/null"):
        pytest.skip("no right to mount a tmpfs")
    yield tmp_path
    os.system(f"umount -l {tmp_path}")


def test_every_byte_is_allocated_before_it_is_published(tmp_path: Path) -> None:
    pool = PoolFile(tmp_path / "pool", 4 * MIB + 100)
    status = os.stat(pool.path)
    assert pool.bytes == 4 * MIB
    assert status.st_size == 4 * MIB
    assert status.st_blocks * 512 >= 4 * MIB
    assert pool.size.condition == ""
    pool.close()


def test_bytes_that_workers_wrote_survive_for_the_next_tierd_even_after_touching(
    tmp_path: Path,
) -> None:
    first = PoolFile(tmp_path / "pool", 4 * MIB)
    first.memory[PAGE_BYTES : PAGE_BYTES + 4] = b"here"
    inode = os.stat(first.path).st_ino
    first.close()
    second = PoolFile(tmp_path / "pool", 4 * MIB)
    second.touch_in_background()
    wait_for(lambda: second.touched_bytes == second.bytes, "all pages are touched")
    assert os.stat(second.path).st_ino == inode
    assert bytes(second.memory[PAGE_BYTES : PAGE_BYTES + 4]) == b"here"
    second.close()


def test_touching_changes_nothing_where_the_kernel_cannot_populate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_populate", lambda *_: None)
    pool = PoolFile(tmp_path / "pool", 4 * MIB)
    pool.memory[-4:] = b"last"
    pool.touch_in_background()
    wait_for(lambda: pool.touched_bytes == pool.bytes, "all pages are touched")
    assert bytes(pool.memory[-4:]) == b"last"
    pool.close()


def test_the_file_never_shrinks(tmp_path: Path) -> None:
    PoolFile(tmp_path / "pool", 4 * MIB).close()
    pool = PoolFile(tmp_path / "pool", 2 * MIB)
    assert pool.bytes == 2 * MIB
    assert os.stat(pool.path).st_size == 4 * MIB
    pool.close()
    pool = PoolFile(tmp_path / "pool", 6 * MIB)
    assert pool.bytes == os.stat(pool.path).st_size == 6 * MIB
    pool.close()


def test_a_volume_that_is_too_small_gives_a_smaller_pool_and_a_message(small_volume: Path) -> None:
    pool = PoolFile(small_volume / "pool", 64 * MIB)
    assert 6 * MIB <= pool.bytes <= 8 * MIB
    assert str(64 * MIB) in pool.size.condition
    # What has to be written beside it still can be, and every published byte is there.
    (small_volume / "session").write_bytes(b"x" * 4096)
    pool.memory[-1] = 1
    pool.close()


@pytest.fixture
def memory_volume(tmp_path: Path) -> Iterator[Path]:
    """A memory-backed volume of 400 MiB."""
    if os.geteuid() != 0 or os.system(f"mount -t tmpfs -o size=400m tmpfs {tmp_path} 2>/dev/null"):
        pytest.skip("no right to mount a tmpfs")
    yield tmp_path
    os.system(f"umount -l {tmp_path}")


def test_several_threads_fill_a_file_in_memory(memory_volume: Path) -> None:
    first = PoolFile(memory_volume / "pool", 200 * MIB)
    status = os.stat(first.path)
    assert (first.bytes, status.st_size) == (200 * MIB, 200 * MIB)
    assert status.st_blocks * 512 >= 200 * MIB
    first.memory[5 * MIB] = 9
    second = PoolFile(memory_volume / "pool", 350 * MIB)
    assert second.bytes == 350 * MIB
    assert os.stat(second.path).st_blocks * 512 >= 350 * MIB
    assert second.memory[5 * MIB] == 9, "what an earlier tierd published is as it was"
    first.close()
    second.close()


@pytest.mark.parametrize("fails_at", [0, 64 * MIB, 128 * MIB])
def test_what_the_threads_could_not_fill_is_allocated_in_order(
    memory_volume: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    real = module._populate

    def failing(mapping: object, size: int) -> object:
        populate = real(mapping, size)  # type: ignore[arg-type]
        return lambda start, length: start != fails_at and populate(start, length)  # type: ignore[misc]

    monkeypatch.setattr(module, "_populate", failing)
    pool = PoolFile(memory_volume / "pool", 200 * MIB)
    assert pool.bytes == 200 * MIB
    assert os.stat(pool.path).st_blocks * 512 >= 200 * MIB
    pool.close()


def test_a_volume_that_fills_up_meanwhile_gives_a_smaller_pool(
    memory_volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module._populate

    def filling(mapping: object, size: int) -> object:
        (memory_volume / "other").write_bytes(b"x" * (250 * MIB))
        return real(mapping, size)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_populate", filling)
    pool = PoolFile(memory_volume / "pool", 300 * MIB)
    assert 100 * MIB <= pool.bytes <= 150 * MIB
    assert os.stat(pool.path).st_blocks * 512 >= pool.bytes, "no published byte can raise SIGBUS"
    pool.memory[-1] = 1
    pool.close()


def test_a_volume_without_room_is_an_error_and_no_empty_pool(small_volume: Path) -> None:
    (small_volume / "fill").write_bytes(b"x" * (15 * MIB))
    with pytest.raises(OSError, match="no room"):
        PoolFile(small_volume / "pool", 64 * MIB)
