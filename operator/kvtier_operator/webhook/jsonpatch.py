"""JSON Patch (RFC 6902): the operations that turn one document into another. Pure.

A patch touches only what differs. The elements of a list keep their order and are matched by
``name`` where they have one, as containers, volumes and environment variables do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

Operation = dict[str, Any]
MAX_MATCHED_ITEMS = 256
"""List items that are matched by content. The worst case is quadratic and a pod may hold 100,000
items. In a longer list, items are matched by position."""


def diff(original: Any, desired: Any, path: str = "") -> Iterator[Operation]:
    """The operations, in the order in which they apply, that turn ``original`` into ``desired``."""
    if isinstance(original, Mapping) and isinstance(desired, Mapping):
        yield from _diff_mappings(original, desired, path)
    elif isinstance(original, list) and isinstance(desired, list):
        yield from _diff_lists(original, desired, path)
    elif not _equal(original, desired):
        yield {"op": "replace", "path": path, "value": desired}


def escape(key: str) -> str:
    """A key as one reference token of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")


def _diff_mappings(
    original: Mapping[str, Any], desired: Mapping[str, Any], path: str
) -> Iterator[Operation]:
    for key in original:
        if key not in desired:
            yield {"op": "remove", "path": f"{path}/{escape(key)}"}
    for key, value in desired.items():
        pointer = f"{path}/{escape(key)}"
        if key in original:
            yield from diff(original[key], value, pointer)
        else:
            yield {"op": "add", "path": pointer, "value": value}


def _diff_lists(original: Sequence[Any], desired: Sequence[Any], path: str) -> Iterator[Operation]:
    """Operations from front to back: everything before the current index is already as desired."""
    before, after = [_identity(item) for item in original], [_identity(item) for item in desired]
    for first, end, start, stop in _matching_ranges(before, after):
        paired = min(end - first, stop - start)
        for step in range(paired):
            yield from diff(original[first + step], desired[start + step], f"{path}/{start + step}")
        for _ in range(end - first - paired):
            yield {"op": "remove", "path": f"{path}/{start + paired}"}
        for index in range(start + paired, stop):
            yield {"op": "add", "path": f"{path}/{index}", "value": desired[index]}


def _matching_ranges(
    before: Sequence[str], after: Sequence[str]
) -> Iterator[tuple[int, int, int, int]]:
    """Ranges ``before[first:end]`` and ``after[start:stop]`` that correspond, from front to back.
    They cover both.
    """
    shorter = min(len(before), len(after))
    head = next((index for index in range(shorter) if before[index] != after[index]), shorter)
    rest = range(1, shorter - head + 1)
    tail = next((index - 1 for index in rest if before[-index] != after[-index]), shorter - head)
    end, stop = len(before) - tail, len(after) - tail
    yield 0, head, 0, head
    if max(end - head, stop - head) > MAX_MATCHED_ITEMS:
        yield head, end, head, stop
    else:
        matcher = SequenceMatcher(None, before[head:end], after[head:stop], autojunk=False)
        for _, first, last, start, final in matcher.get_opcodes():
            yield head + first, head + last, head + start, head + final
    yield end, len(before), stop, len(after)


def _identity(item: Any) -> str:
    if isinstance(item, Mapping) and isinstance(item.get("name"), str):
        return "name " + str(item["name"])
    if isinstance(item, str):
        return "text " + item
    return "value " + json.dumps(item, sort_keys=True)


def _equal(left: Any, right: Any) -> bool:
    """Equality of JSON values. In Python, True == 1."""
    return type(left) is type(right) and left == right
