"""JSON patches (RFC 6902): what has to be done to one document to make it another. Pure.

Only what differs is touched, so that a patch says what was injected and nothing else. Elements of lists keep their
order and are told apart by ``name`` where they have one, as containers, volumes and variables do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

Operation = dict[str, Any]
MATCHED_ITEMS = 256
"""Items of a list that are matched with one another. Matching takes the square of their number where they look alike, and a pod may
have a hundred thousand; among more the place alone tells which item became which."""


def between(original: Any, desired: Any, path: str = "") -> Iterator[Operation]:
    """The operations, in the order in which they have to be applied, that make ``original`` into ``desired``."""
    if isinstance(original, Mapping) and isinstance(desired, Mapping):
        yield from _mappings(original, desired, path)
    elif isinstance(original, list) and isinstance(desired, list):
        yield from _lists(original, desired, path)
    elif not _same(original, desired):
        yield {"op": "replace", "path": path, "value": desired}


def escaped(key: str) -> str:
    """A key as a part of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def _mappings(
    original: Mapping[str, Any], desired: Mapping[str, Any], path: str
) -> Iterator[Operation]:
    for key in original:
        if key not in desired:
            yield {"op": "remove", "path": f"{path}/{escaped(key)}"}
    for key, value in desired.items():
        place = f"{path}/{escaped(key)}"
        if key in original:
            yield from between(original[key], value, place)
        else:
            yield {"op": "add", "path": place, "value": value}


def _lists(original: Sequence[Any], desired: Sequence[Any], path: str) -> Iterator[Operation]:
    """Operations from the front to the back: what stands before the place at hand is as desired already."""
    before, after = [_identity(item) for item in original], [_identity(item) for item in desired]
    for first, end, start, stop in _stretches(before, after):
        paired = min(end - first, stop - start)
        for step in range(paired):
            yield from between(
                original[first + step], desired[start + step], f"{path}/{start + step}"
            )
        for _ in range(end - first - paired):
            yield {"op": "remove", "path": f"{path}/{start + paired}"}
        for place in range(start + paired, stop):
            yield {"op": "add", "path": f"{path}/{place}", "value": desired[place]}


def _stretches(before: Sequence[str], after: Sequence[str]) -> Iterator[tuple[int, int, int, int]]:
    """Where ``before[first:end]`` became ``after[start:stop]``, all of both, from the front to the back."""
    shorter = min(len(before), len(after))
    head = next((place for place in range(shorter) if before[place] != after[place]), shorter)
    left = range(1, shorter - head + 1)
    tail = next((place - 1 for place in left if before[-place] != after[-place]), shorter - head)
    end, stop = len(before) - tail, len(after) - tail
    yield 0, head, 0, head
    if max(end - head, stop - head) > MATCHED_ITEMS:
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


def _same(left: Any, right: Any) -> bool:
    """Equality as JSON has it: Python holds true and 1 for the same."""
    return type(left) is type(right) and left == right
