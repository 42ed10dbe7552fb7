"""Keys of objects and the digest that keeps engines apart."""

from __future__ import annotations

import json

import pytest

from kvtier.errors import ProtocolError
from kvtier.keys import group_prefix
from kvtier.namespace import canonical_json, derive_namespace


def test_the_prefix_of_a_key_is_the_group_as_one_byte() -> None:
    assert [group_prefix(group) for group in (0, 7, 255)] == [b"\0", b"\x07", b"\xff"]


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
def test_an_identity_that_is_not_an_object_is_rejected(identity: str) -> None:
    with pytest.raises(ProtocolError):
        derive_namespace(identity, [])


@pytest.mark.parametrize("value", [object(), float("nan"), {1, 2}])
def test_a_value_without_a_canonical_form_is_rejected(value: object) -> None:
    with pytest.raises(ProtocolError):
        canonical_json({"value": value})


def test_the_weights_of_each_rank_are_part_of_the_namespace() -> None:
    namespaces = {
        derive_namespace("{}", ["x", "x"], weights)[0]
        for weights in (["a", "b"], ["b", "a"], ["a", "a"], ["a", "c"])
    }
    assert len(namespaces) == 4
    text = derive_namespace("{}", ["x", "x"], ["a", "b"])[1]
    assert json.loads(text)["weights"] == ["a", "b"]
