"""A patch makes one document into another, whatever the two are."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_operator.webhook.patch import between


def applied(document: Any, operations: list[dict[str, Any]]) -> Any:
    """RFC 6902 as an API server applies it, for add, remove and replace."""
    document = copy.deepcopy(document)
    for operation in operations:
        parts = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
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


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from(["", "a", "b/c", "~0", "ü"]))
KEYS = st.sampled_from(["a", "b", "a/b", "~", "~1", "name", ""])
DOCUMENTS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(KEYS, inner, max_size=5)),
    max_leaves=20,
)
NAMED = st.lists(st.fixed_dictionaries({"name": st.sampled_from("abcdef"), "value": st.integers(0, 2)}), max_size=6)


@settings(deadline=None, max_examples=300)
@given(DOCUMENTS, DOCUMENTS)
def test_any_document_becomes_any_other(original: Any, desired: Any) -> None:
    operations = list(between(original, desired))
    assert json.dumps(applied(original, operations), sort_keys=True) == json.dumps(desired, sort_keys=True)


@settings(deadline=None, max_examples=300)
@given(NAMED, NAMED)
def test_lists_of_named_things_keep_the_desired_order(original: Any, desired: Any) -> None:
    assert applied({"l": original}, list(between({"l": original}, {"l": desired}))) == {"l": desired}


def test_equal_documents_need_nothing() -> None:
    pod = {"spec": {"containers": [{"name": "a", "env": [{"name": "X", "value": "1"}]}]}}
    assert list(between(pod, copy.deepcopy(pod))) == []


def test_only_what_differs_is_touched() -> None:
    original = {
        "metadata": {"annotations": {"a": "1"}},
        "spec": {"containers": [{"name": "mesh"}, {"name": "vllm", "env": [{"name": "X", "value": "1"}]}]},
    }
    desired = copy.deepcopy(original)
    desired["metadata"]["annotations"]["kvtier.io/policy"] = "p"  # type: ignore[index]
    desired["spec"]["containers"][1]["env"].append({"name": "Y", "value": "2"})  # type: ignore[index]
    desired["spec"]["initContainers"] = [{"name": "kvtier-tierd"}]
    assert list(between(original, desired)) == [
        {"op": "add", "path": "/metadata/annotations/kvtier.io~1policy", "value": "p"},
        {"op": "add", "path": "/spec/containers/1/env/1", "value": {"name": "Y", "value": "2"}},
        {"op": "add", "path": "/spec/initContainers", "value": [{"name": "kvtier-tierd"}]},
    ]


def test_true_is_not_one() -> None:
    assert list(between({"a": 1}, {"a": True})) == [{"op": "replace", "path": "/a", "value": True}]
