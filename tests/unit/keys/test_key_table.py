"""The map from keys to numbers."""

from __future__ import annotations

import os
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.key_table import KeyTable

KEYS = st.binary(min_size=1, max_size=3) | st.integers(0, 40).map(lambda n: b"%033d" % n)


@given(steps=st.lists(st.tuples(st.booleans(), KEYS, st.integers(1, 2**32 - 1)), max_size=80))
def test_it_is_a_map(steps: list[tuple[bool, bytes, int]]) -> None:
    table, model = KeyTable(), dict[bytes, int]()
    for sets, key, value in steps:
        if sets:
            table.set(key, value)
            model[key] = value
        else:
            assert table.pop(key) == model.pop(key, 0)
        assert table.get(key) == model.get(key, 0)
        assert len(table) == len(model)
    assert dict(pair for part in table.parts() for pair in part) == model
    for key, value in model.items():
        if list(model.values()).count(value) == 1:
            assert table.key_at(*table.place(key), value) == key


@given(steps=st.lists(st.tuples(st.booleans(), KEYS, st.sampled_from((1, 2, 4))), max_size=80))
def test_bits_are_set_and_cleared(steps: list[tuple[bool, bytes, int]]) -> None:
    table, model = KeyTable(), dict[bytes, int]()
    for present, key, bit in steps:
        before = model.get(key, 0)
        after = before | bit if present else before & ~bit
        assert table.change_bits(key, bit, present) == (after != before)
        model[key] = after
        assert table.get(key) == after
        assert len(table) == sum(bool(value) for value in model.values())


def test_a_table_is_freed_in_parts() -> None:
    table = KeyTable()
    for number in range(1, 100):
        table.set(b"%d" % number, number)
    calls = 1
    while table.clear_part(1 << 14):
        calls += 1
    # Keys of one digit and of two have buckets of their own, four parts each, and a call that ends
    # with the first begins with the second.
    assert calls == 7
    assert len(table) == 0
    assert table.get(b"7") == 0


def test_a_key_within_the_records_of_others_is_not_found() -> None:
    # With two-byte keys, records of six bytes: "ab" and 25185 hold "ba" between them.
    table = KeyTable()
    for first in range(256):
        table.set(bytes((first, 98)), 0x61626162)
    for first in range(256):
        assert table.get(bytes((first, 98))) == 0x61626162
        assert table.get(bytes((first, 97))) == 0


def test_a_number_without_a_key_has_none() -> None:
    table = KeyTable()
    table.set(b"k", 7)
    with pytest.raises(KeyError):
        table.key_at(*table.place(b"k"), 8)


def test_keys_that_stay_are_returned_once_while_others_come_and_go() -> None:
    table = KeyTable()
    stay = [os.urandom(33) for _ in range(100)]
    for number, key in enumerate(stay, 1):
        table.set(key, number)
        table.set(b"gone" + key[4:], number)
    seen = []
    for turn, part in enumerate(table.parts()):
        seen += [key for key, _ in part]
        table.pop(b"gone" + stay[turn % 100][4:])
        table.set(b"more" + os.urandom(29), 1)
    assert len(seen) == len(set(seen))
    assert set(stay) <= set(seen)


def test_a_key_takes_half_of_what_it_takes_in_a_dictionary() -> None:
    keys = [os.urandom(33) for _ in range(200_000)]

    def held(fill: object) -> int:
        tracemalloc.start()
        fill()  # type: ignore[operator]
        held_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return held_bytes

    table, dictionary = KeyTable(), dict[bytes, int]()

    def fill_table() -> None:
        for number, key in enumerate(keys, 1000):
            table.set(bytes(bytearray(key)), number)

    def fill_dictionary() -> None:
        for number, key in enumerate(keys, 1000):
            dictionary[bytes(bytearray(key))] = number

    assert held(fill_table) < held(fill_dictionary) / 2
