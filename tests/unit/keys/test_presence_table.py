"""The map from keys to presence bits."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvtier.presence_table import PresenceTable, hash_many

STEPS = st.lists(
    st.tuples(st.integers(0, 3_000), st.sampled_from([1, 2, 4, 1 << 16]), st.booleans()),
    max_size=300,
)


def _key(number: int) -> bytes:
    """Of one of three groups."""
    return b"%c%032d" % (number % 3, number)


def _get_many(table: PresenceTable, keys: Sequence[bytes]) -> list[int]:
    """The bits of each key, of all keys of a group at once."""
    found: dict[bytes, int] = {}
    for group in {key[0] for key in keys}:
        some = [key for key in keys if key[0] == group]
        bits = table.get_hashed(group, hash_many([key[1:] for key in some]))
        found.update(zip(some, bits.tolist(), strict=True))
    return [found[key] for key in keys]


@given(steps=STEPS)
def test_it_is_a_map_of_bits(steps: list[tuple[int, int, bool]]) -> None:
    table, model = PresenceTable(), dict[bytes, int]()
    for number, bits, present in steps:
        key = _key(number)
        before = model.get(key, 0)
        model[key] = before | bits if present else before & ~bits
        assert table.change_bits(key, bits, present) == (model[key] != before)
        assert table.get(key) == model[key]
    assert len(table) == sum(map(bool, model.values()))
    assert _get_many(table, list(model)) == list(model.values())
    assert sorted(table.all_bits()) == sorted(filter(None, model.values()))


def test_it_grows_while_keys_come_and_go() -> None:
    """At every moment of a growth, each key has the bits that it was given last."""
    draw, table, model = random.Random(1), PresenceTable(), dict[bytes, int]()
    keys = [_key(number) for number in range(12_000)]
    for turn in range(40_000):
        key = keys[draw.randrange(min(len(keys), 200 + turn // 2))]
        bits, present = draw.choice((1, 2)), draw.random() < 0.7
        before = model.get(key, 0)
        model[key] = before | bits if present else before & ~bits
        assert table.change_bits(key, bits, present) == (model[key] != before)
        if turn % 500 == 0:
            assert _get_many(table, keys) == [model.get(key, 0) for key in keys]
    assert len(table) == sum(map(bool, model.values()))


def test_keys_that_come_and_go_do_not_fill_it() -> None:
    table = PresenceTable()
    for number in range(100_000):
        table.change_bits(_key(number), 1, True)
        if number >= 100:
            table.change_bits(_key(number - 100), 1, False)
    assert len(table) == 100
    assert max(slots.mask for slots in table._slots) < 1 << 12
    keys = [_key(number) for number in range(99_000, 100_000)]
    assert _get_many(table, keys) == [0] * 900 + [1] * 100


def test_few_and_many_keys_are_looked_up_alike() -> None:
    table = PresenceTable()
    names = [os.urandom(33) for _ in range(2_000)]
    for number, key in enumerate(names[::2]):
        table.change_bits(key, 1 + number % 7, True)
    for count in (0, 1, 47, 48, 300, 2_000):
        some = names[:count]
        assert _get_many(table, some) == [table.get(key) for key in some]


def test_no_change_moves_more_than_a_part_of_a_large_table() -> None:
    """The engine's scheduler waits for the interpreter while a message is applied."""
    table = PresenceTable()
    moved = []
    for number in range(30_000):
        before, arrays = table._slots[0].used, len(table._slots)
        table.change_bits(_key(number), 1, True)
        if len(table._slots) == arrays:
            moved.append(table._slots[0].used - before)
    assert 100 < max(moved) < 1_500


def test_a_lookup_reads_an_array_that_is_replaced_meanwhile() -> None:
    """Another thread may have finished the growth: what it took is still whole."""
    table = PresenceTable()
    for number in range(400):
        table.change_bits(_key(number), 1, True)
    taken = table._slots
    for number in range(400, 5_000):
        table.change_bits(_key(number), 1, True)
    table._slots, current = taken, table._slots
    assert _get_many(table, [_key(number) for number in range(400)]) == [1] * 400
    table._slots = current


def test_a_key_takes_less_than_100_bytes_while_the_table_grows() -> None:
    table = PresenceTable()
    for number in range(67_000):
        table.change_bits(_key(number), 1, True)
    assert len(table._slots) == 2
    assert sum(16 * (slots.mask + 1) for slots in table._slots) / 67_000 < 100
