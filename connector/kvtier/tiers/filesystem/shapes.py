"""Whether a record of another process is one of those that are understood here.

Its checksum shows that it is whole, not what it says: a process of another version may have written it, or whoever may write to the
directory. One that is not understood counts as not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MAX_NUMBER = (1 << 63) - 1
_MAX_DIGITS = 18
_WRITER_NUMBERS = ("beat", "ask", "bytes", "least", "full", "recount")


def is_writer(document: Mapping[str, Any]) -> bool:
    """A writer's record (writer.py)."""
    return (
        all(_number(document.get(name)) for name in _WRITER_NUMBERS)
        and isinstance(document.get("closed"), bool)
        and _by_grant(document.get("used"))
        and _by_grant(document.get("settled"))
    )


def is_ledger(document: Mapping[str, Any]) -> bool:
    """A janitor's record (janitor.py)."""
    writers = document.get("writers")
    return (
        _number(document.get("beat"))
        and _number(document.get("recall"))
        and _number(document.get("quantum", 0))
        and (document.get("base") is None or _number(document.get("base")))
        and isinstance(document.get("released"), bool)
        and isinstance(document.get("holder"), str)
        and isinstance(writers, dict)
        and all(map(_answered, writers.values()))
    )


def _answered(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    answer, grants = value.get("answer"), value.get("open")
    return (
        isinstance(answer, list)
        and len(answer) == 2
        and all(map(_number, answer))
        and isinstance(grants, list)
        and all(map(_number, grants))
    )


def _by_grant(value: object) -> bool:
    return isinstance(value, dict) and all(
        key.isascii() and key.isdigit() and len(key) <= _MAX_DIGITS and _number(size) for key, size in value.items()
    )


def _number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_NUMBER
