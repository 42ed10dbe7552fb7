"""Counts what Python does: what a piece of code costs, without a clock."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def python_calls(work: Callable[[], object]) -> int:
    """How many functions in Python ``work`` calls. A few more if the interpreter collects garbage
    meanwhile."""
    count = 0

    def profile(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def python_lines(work: Callable[[], object], package: str = "kvtier") -> int:
    """How many lines of a package's functions ``work`` executes, each turn of a loop included."""
    count = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Callable[..., object] | None:
        nonlocal count
        if not frame.f_globals.get("__name__", "").startswith(package):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
