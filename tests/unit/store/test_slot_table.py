"""The slot table."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.store.slot_table import (
    HEADER_BYTES,
    RECORD_BYTES,
    SlotRecord,
    SlotTable,
    TableIdentity,
    decode_record,
    encode_record,
    slot_table_bytes,
)

IDENTITY = TableIdentity(pool_bytes=1 << 30, pool_inode=7, topology="t")
Open = Callable[..., SlotTable]


def record(number: int = 0, **changes: object) -> SlotRecord:
    values: dict[str, object] = {
        "namespace": "0123456789abcdef" * 2,
        "key": b"\0" + bytes([number]) * 32,
        "offset": number * 8192,
        "slot_bytes": 8192,
        "segment_start": 0,
        "segment_slots": 300,
        "shards": 2,
        "checksum_kind": "xxh3-128",
        "digest": bytes([number]) * 16,
    }
    return SlotRecord(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = os.memfd_create("slots")
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def reopen(file: int) -> Open:
    """Opens the table again, as the next process would."""

    def reopen(identity: TableIdentity = IDENTITY, namespaces: set[str] | None = None) -> SlotTable:
        return SlotTable(os.dup(file), identity, namespaces)

    return reopen


def test_reopening_returns_the_records_added_and_not_erased_oldest_first(reopen: Open) -> None:
    table = reopen()
    for number in (5, 3, 9, 1):
        assert table.add(record(number)) == ""
    table.erase(3 * 8192)
    table.erase(100 * 8192)
    found = reopen()
    assert [each.offset // 8192 for each in found.recovered] == [5, 9, 1]
    assert replace(found.recovered[0], sequence=0) == record(5)
    assert not found.rejected


def test_sequence_numbers_increase_across_restarts(reopen: Open) -> None:
    for life in range(3):
        reopen().add(record(life))
    assert all(a.sequence < b.sequence for a, b in pairwise(reopen().recovered))


def test_erased_positions_are_reused(reopen: Open, file: int) -> None:
    table = reopen()
    for number in range(200):
        table.add(record(number % 250))
        table.erase(number * 8192)
    assert os.fstat(file).st_size == HEADER_BYTES + RECORD_BYTES


@pytest.mark.parametrize(
    ("identity", "reason"),
    [
        (replace(IDENTITY, pool_inode=8), "pool_file"),
        (replace(IDENTITY, topology="other"), "topology"),
        (replace(IDENTITY, pool_bytes=1 << 29), "pool_size"),
    ],
    ids=["another pool file", "another topology", "a smaller pool"],
)
def test_a_table_with_another_identity_is_rejected_as_a_whole(
    reopen: Open, identity: TableIdentity, reason: str
) -> None:
    table = reopen()
    for number in range(3):
        table.add(record(number))
    found = reopen(identity)
    assert found.recovered == []
    assert found.rejected == {reason: 3}
    # And the table is the new pool's from now on.
    found.add(record(9))
    assert [each.offset for each in reopen(identity).recovered] == [9 * 8192]


def test_a_pool_that_has_grown_is_recovered(reopen: Open) -> None:
    reopen().add(record(1))
    grown = replace(IDENTITY, pool_bytes=2 << 30)
    assert len(reopen(grown).recovered) == 1
    assert reopen().rejected == {"pool_size": 1}


def test_objects_of_a_namespace_without_its_text_are_rejected(reopen: Open) -> None:
    table = reopen()
    table.add(record(1))
    table.add(record(2, namespace="f" * 32))
    found = reopen(IDENTITY, {"f" * 32})
    assert [each.offset // 8192 for each in found.recovered] == [2]
    assert found.rejected == {"namespace": 1}
    assert reopen(IDENTITY, {"f" * 32}).rejected == {}


def test_of_two_records_of_one_slot_only_one_is_recovered(reopen: Open, file: int) -> None:
    table = reopen()
    table.add(record(1))
    os.pwrite(
        file, encode_record(record(1, key=b"\0" * 33), table._word), HEADER_BYTES + RECORD_BYTES
    )
    found = reopen()
    assert len(found.recovered) == 1
    assert found.rejected == {"overlap": 1}


def test_a_full_table_reports_it_and_stays_usable(reopen: Open) -> None:
    small = replace(IDENTITY, pool_bytes=1 << 20)
    table = reopen(small)
    table._max_records = 3
    assert [table.add(record(number)) for number in range(4)] == ["", "", "", "full"]
    table.erase(0)
    assert table.add(record(5)) == ""


def test_a_table_that_cannot_grow_is_no_error() -> None:
    reader = os.memfd_create("slots")
    table = SlotTable(reader, IDENTITY)
    table._descriptor = os.open(f"/proc/self/fd/{reader}", os.O_RDONLY)
    assert table.add(record(1)) == "no_space"
    table.close()
    os.close(reader)


@given(position=st.integers(0, 3 * RECORD_BYTES - 1), bit=st.integers(0, 7))
@settings(max_examples=60, deadline=None)
def test_a_flipped_bit_invalidates_only_its_record(position: int, bit: int) -> None:
    file = os.memfd_create("slots")
    try:
        table = SlotTable(os.dup(file), IDENTITY)
        for number in range(3):
            table.add(record(number))
        table.close()
        (byte,) = os.pread(file, 1, HEADER_BYTES + position)
        os.pwrite(file, bytes([byte ^ 1 << bit]), HEADER_BYTES + position)
        found = SlotTable(os.dup(file), IDENTITY)
        assert {each.offset // 8192 for each in found.recovered} == {0, 1, 2} - {
            position // RECORD_BYTES
        }
        assert found.rejected == {"damaged": 1}
        found.close()
    finally:
        os.close(file)


@given(cut=st.integers(0, HEADER_BYTES + 3 * RECORD_BYTES))
@settings(max_examples=60, deadline=None)
def test_a_truncated_table_gives_its_complete_records(cut: int) -> None:
    file = os.memfd_create("slots")
    try:
        table = SlotTable(os.dup(file), IDENTITY)
        for number in range(3):
            table.add(record(number))
        table.close()
        os.ftruncate(file, cut)
        found = SlotTable(os.dup(file), IDENTITY)
        whole = max(0, cut - HEADER_BYTES) // RECORD_BYTES
        assert len(found.recovered) in (whole, 0 if cut < HEADER_BYTES else whole)
        found.close()
    finally:
        os.close(file)


def test_a_record_of_another_table_proves_nothing() -> None:
    assert decode_record(encode_record(record(1), b"a" * 16), b"b" * 16) is None
    assert decode_record(encode_record(record(1), b"a" * 16), b"a" * 16) == record(1)


def test_a_table_takes_a_thousandth_of_the_pool_within_limits() -> None:
    assert slot_table_bytes(1 << 20) == 256 << 10
    assert slot_table_bytes(16 << 30) == 16 << 20
    assert slot_table_bytes(1 << 40) == 64 << 20
