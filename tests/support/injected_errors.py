"""Raises an error in place of one call of a function of given files, for tests of what must go on.

The first run of a scenario finds the calls that this thread makes, and each further run raises at
another one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class InjectedError(Exception):
    """Raised in place of a call."""


class CallInjector:
    """``folders``: parts of the paths of the files whose functions count. ``spared``: functions
    that do not count. At first it only finds calls."""

    def __init__(self, *folders: str, spared: frozenset[str] = frozenset()) -> None:
        self._folders = folders
        self._spared = spared
        self._raise_at: int | None = 0
        self._calls = 0
        self.found: dict[tuple[str, str], int] = {}
        """By function and caller: the number of the first such call."""

    def raise_at(self, number: int | None) -> None:
        """Raises at the call with this number from now on, counted from 1; None: not at all."""
        self._calls, self._raise_at = 0, number

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts the calls within the block."""
        if self._raise_at is None:
            yield
            return
        previous = sys.gettrace()
        sys.settrace(self._on_event)
        try:
            yield
        finally:
            sys.settrace(previous)

    def _on_event(self, frame: FrameType, event: str, argument: object) -> None:
        code, caller = frame.f_code, frame.f_back
        if event != "call" or code.co_name.startswith("<") or caller is None:
            return
        if code.co_qualname in self._spared:
            return
        if not any(folder in code.co_filename for folder in self._folders):
            return
        self._calls += 1
        if self._raise_at == 0:
            place = (code.co_qualname, caller.f_code.co_qualname)
            self.found.setdefault(place, self._calls)
        elif self._calls == self._raise_at:
            raise InjectedError(code.co_qualname)
