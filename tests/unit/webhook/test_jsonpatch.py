"""A patch transforms any document into any other."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_operator.webhook import jsonpatch
from kvtier_operator.webhook.jsonpatch import MAX_MATCHED_ITEMS, diff


def applied(document: Any, operations: list[dict[str, Any]]) -> Any:
    """RFC 6902 as an API server applies it, for add, remove and replace."""
    document = copy.deepcopy(document)
    for operation in operations:
        parts = [
            part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]
        ]
        if not parts:
            document = copy.deepcopy(operation["value"])
            continue
        place = document
        for part in parts[:-1]:
            place = place[int(part)] if isinstance(place, list) else place[part]
        last: Any = parts[-1]
        if isinstance(place, list):
            index = int(last)
            if operation["op"] == "add":
                assert 0 <= index <= len(place)
                place.insert(index, copy.deepcopy(operation["value"]))
                continue
            assert 0 <= index < len(place)
            last = index
        elif operation["op"] != "add":
            assert last in place
        if operation["op"] == "remove":
            del place[last]
        else:
            place[last] = copy.deepcopy(operation["value"])
    return document


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from(["", "a", "b/c", "~0", "ü"])
)
KEYS = st.sampled_from(["a", "b", "a/b", "~", "~1", "name", ""])
DOCUMENTS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(KEYS, inner, max_size=5)),
    max_leaves=20,
)
NAMED = st.lists(
    st.fixed_dictionaries({"name": st.sampled_from("abcdef"), "value": st.integers(0, 2)}),
    max_size=6,
)


@settings(deadline=None, max_examples=300)
@given(DOCUMENTS, DOCUMENTS)
def test_any_document_becomes_any_other(original: Any, desired: Any) -> None:
    operations = list(diff(original, desired))
    assert json.dumps(applied(original, operations), sort_keys=True) == json.dumps(
        desired, sort_keys=True
    )


@settings(deadline=None, max_examples=300)
@given(NAMED, NAMED)
def test_lists_of_named_things_keep_the_desired_order(original: Any, desired: Any) -> None:
    assert applied({"l": original}, list(diff({"l": original}, {"l": desired}))) == {"l": desired}


@settings(deadline=None, max_examples=300)
@given(NAMED, NAMED)
def test_lists_that_are_not_matched_become_any_other_as_well(original: Any, desired: Any) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(jsonpatch, "MAX_MATCHED_ITEMS", 0)
        assert applied({"l": original}, list(diff({"l": original}, {"l": desired}))) == {
            "l": desired
        }


SAME = {"name": "A", "value": ""}


@pytest.mark.parametrize(
    ("original", "desired"),
    [
        ([SAME] * 100_000, [*[SAME] * 100_000, {"name": "B"}]),
        ([SAME] * 100_000, [{"name": "B"}, *[SAME] * 100_000]),
        (["x"] * 100_000, ["x"] * 100_000),
        ([SAME] * 100_000, [*[SAME] * 50_000, {"name": "B"}, *[SAME] * 50_000]),
        ([SAME] * (MAX_MATCHED_ITEMS + 1), ["x", *[SAME] * MAX_MATCHED_ITEMS, "y"]),
    ],
    ids=["one more", "one before", "the same", "one between", "both ends differ"],
)
def test_items_that_are_all_alike_are_not_matched_with_one_another(
    monkeypatch: pytest.MonkeyPatch, original: list[Any], desired: list[Any]
) -> None:
    """A hundred thousand of them fit into a pod, and their square would keep a thread for hours."""
    sizes: list[int] = []

    class Counted(jsonpatch.SequenceMatcher):  # type: ignore[type-arg,name-defined]
        def __init__(self, junk: Any, before: list[str], after: list[str], autojunk: bool) -> None:
            sizes.append(max(len(before), len(after)))
            super().__init__(junk, before, after, autojunk=autojunk)

    monkeypatch.setattr(jsonpatch, "SequenceMatcher", Counted)
    operations = list(diff({"l": original}, {"l": desired}))
    assert len(operations) <= abs(len(desired) - len(original)) + 2
    assert max(sizes, default=0) <= MAX_MATCHED_ITEMS
    if len(operations) < 10:
        assert applied({"l": original}, operations) == {"l": desired}


def test_equal_documents_need_nothing() -> None:
    pod = {"spec": {"containers": [{"name": "a", "env": [{"name": "X", "value": "1"}]}]}}
    assert list(diff(pod, copy.deepcopy(pod))) == []


def test_only_what_differs_is_touched() -> None:
    original: dict[str, Any] = {
        "metadata": {"annotations": {"a": "1"}},
        "spec": {
            "containers": [{"name": "mesh"}, {"name": "vllm", "env": [{"name": "X", "value": "1"}]}]
        },
    }
    desired = copy.deepcopy(original)
    desired["metadata"]["annotations"]["kvtier.io/policy"] = "p"
    desired["spec"]["containers"][1]["env"].append({"name": "Y", "value": "2"})
    desired["spec"]["initContainers"] = [{"name": "kvtier-tierd"}]
    assert list(diff(original, desired)) == [
        {"op": "add", "path": "/metadata/annotations/kvtier.io~1policy", "value": "p"},
        {"op": "add", "path": "/spec/containers/1/env/1", "value": {"name": "Y", "value": "2"}},
        {"op": "add", "path": "/spec/initContainers", "value": [{"name": "kvtier-tierd"}]},
    ]


def test_true_is_not_one() -> None:
    assert list(diff({"a": 1}, {"a": True})) == [{"op": "replace", "path": "/a", "value": True}]
