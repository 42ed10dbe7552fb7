"""Keys of objects and the digest that keeps engines apart."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ProtocolError
from kvtier.keys import MAX_HASH_BYTES, group_prefix, object_key, split_key
from kvtier.namespace import canonical_json, derive_namespace


@given(st.integers(0, 255), st.binary(min_size=1, max_size=MAX_HASH_BYTES))
def test_a_key_splits_into_what_it_was_joined_from(group: int, block_hash: bytes) -> None:
    key = object_key(group, block_hash)
    assert split_key(key) == (group, block_hash)
    assert key == group_prefix(group) + block_hash


@pytest.mark.parametrize(("group", "length"), [(-1, 32), (256, 32), (0, 0), (0, 64)])
def test_a_group_or_hash_that_no_engine_has_is_refused(group: int, length: int) -> None:
    with pytest.raises(ProtocolError):
        object_key(group, b"h" * length)


@pytest.mark.parametrize("key", [b"", b"\0", b"k" * 65])
def test_an_invalid_key_is_not_split(key: bytes) -> None:
    with pytest.raises(ProtocolError):
        split_key(key)


def test_a_namespace_is_32_hex_digits_and_does_not_depend_on_the_spelling() -> None:
    one, text = derive_namespace('{"a": 1, "b": {"c": [1, 2]}}', ["layout"])
    other, _ = derive_namespace('{"b":{"c":[1,2]},"a":1}', ["layout"])
    assert one == other
    assert len(one) == 32
    assert int(one, 16) >= 0
    assert json.loads(text)["engine"]["b"] == {"c": [1, 2]}


def test_any_difference_in_identity_or_layout_is_another_namespace() -> None:
    texts = [
        ("{}", ["x"]),
        ('{"a":1}', ["x"]),
        ('{"a":"1"}', ["x"]),
        ('{"a":1}', ["y"]),
        ('{"a":1}', ["x", "x"]),
        ('{"a":1}', ["x", "y"]),
    ]
    assert len({derive_namespace(identity, codecs)[0] for identity, codecs in texts}) == len(texts)


def test_the_order_of_ranks_matters() -> None:
    assert derive_namespace("{}", ["x", "y"])[0] != derive_namespace("{}", ["y", "x"])[0]


def test_ranks_with_one_layout_are_written_once() -> None:
    _, text = derive_namespace("{}", ['{"block":32}'] * 8 + ["other"])
    assert json.loads(text)["layout"] == [
        {"codec": {"block": 32}, "ranks": "0-7"},
        {"codec": "other", "ranks": "8"},
    ]


@pytest.mark.parametrize("identity", ["", "[]", "3", "{"])
def test_an_identity_that_is_no_object_is_refused(identity: str) -> None:
    with pytest.raises(ProtocolError):
        derive_namespace(identity, [])


@pytest.mark.parametrize("value", [object(), float("nan"), {1, 2}])
def test_what_has_no_canonical_spelling_is_refused(value: object) -> None:
    with pytest.raises(ProtocolError):
        canonical_json({"value": value})
