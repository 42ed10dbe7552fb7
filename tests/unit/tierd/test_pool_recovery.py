"""What a tierd leaves in the run directory, and what the next one takes of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.namespace import derive_namespace
from kvtier.store.slot_table import SlotRecord, SlotTable
from kvtier.tierd.host_pool import PoolFile, describe_namespace, open_table

NAMESPACE, TEXT = derive_namespace('{"model": "m"}', ("codec",))
MIB = 1 << 20


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[PoolFile]:
    pool = PoolFile(tmp_path / "pool", 2 * MIB)
    yield pool
    pool.close()


def opened(pool: PoolFile, topology: str = "t", persists: bool = True) -> SlotTable:
    table = open_table(pool.path.parent, 0o600, pool, topology, persists)
    assert table is not None
    return table


def with_one_object(pool: PoolFile, namespace: str = NAMESPACE) -> None:
    table = opened(pool)
    describe_namespace(pool.path.parent, 0o600, NAMESPACE, TEXT)
    table.add(SlotRecord(namespace, b"\0" * 33, 4096, 4096, 0, 32, 1, "blake3", b"d" * 16))
    table.close()


def test_objects_whose_namespace_is_described_are_recovered(pool: PoolFile) -> None:
    with_one_object(pool)
    assert [record.offset for record in opened(pool).recovered] == [4096]


@pytest.mark.parametrize(
    "text", [None, TEXT.replace('"m"', '"n"'), "\xff"], ids=["gone", "another", "no text"]
)
def test_a_namespace_without_its_own_text_gives_nothing(pool: PoolFile, text: str | None) -> None:
    with_one_object(pool)
    path = pool.path.parent / "namespaces" / f"{NAMESPACE}.json"
    path.unlink()
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    table = opened(pool)
    assert table.recovered == []
    assert table.rejected == {"namespace": 1}


def test_texts_of_empty_namespaces_are_removed(pool: PoolFile) -> None:
    with_one_object(pool, "f" * 32)
    opened(pool)
    assert list((pool.path.parent / "namespaces").iterdir()) == []


def test_a_replaced_pool_file_gives_nothing(pool: PoolFile) -> None:
    with_one_object(pool)
    os.rename(pool.path, pool.path.with_suffix(".old"))
    other = PoolFile(pool.path, 2 * MIB)
    assert opened(other).rejected == {"pool_file": 1}
    other.close()


def test_without_persistence_there_is_no_table_and_an_old_one_is_removed(pool: PoolFile) -> None:
    with_one_object(pool)
    assert open_table(pool.path.parent, 0o600, pool, "t", persists=False) is None
    assert sorted(path.name for path in pool.path.parent.iterdir()) == [
        "generations",
        "namespaces",
        "pool",
    ]
    assert opened(pool).recovered == []


def test_a_table_that_cannot_be_opened_leaves_tierd_working_without_one(pool: PoolFile) -> None:
    (pool.path.parent / "slots").mkdir()
    assert open_table(pool.path.parent, 0o600, pool, "t", persists=True) is None


def test_an_invalid_table_is_rejected_and_reinitialized(pool: PoolFile) -> None:
    (pool.path.parent / "slots").write_bytes(os.urandom(9000))
    table = opened(pool)
    assert table.recovered == []
    assert set(table.rejected) == {"header"}
    with_one_object(pool)
    assert len(opened(pool).recovered) == 1
