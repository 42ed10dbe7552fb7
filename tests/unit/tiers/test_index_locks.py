"""A use of an object waits for no pass over the whole index, whose lock is held for parts only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import pytest

from kvtier.prefix_order import PrefixOrder
from kvtier.tiers.base import ObjectFacts
from kvtier.tiers.filesystem import index as index_module
from kvtier.tiers.filesystem.index import Index

NAMESPACE = "a" * 32
PART, OBJECTS = 16, 400


class CountingLock:
    """A lock that knows how many objects were visited while it was held."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.visited = 0
        self.most = 0
        self.holds = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self.visited = 0

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.most = max(self.most, self.visited)
        self.holds += 1
        self._lock.release()


def list_entries(index: Index) -> None:
    assert len(list(index.entries())) == OBJECTS


def list_not_seen(index: Index) -> None:
    index.begin_scan()
    assert len(list(index.not_seen())) == OBJECTS


def order_discovered(index: Index) -> None:
    index.begin_ordering()
    for number in range(OBJECTS):
        key = b"found" + number.to_bytes(4, "big")
        index.add_discovered(NAMESPACE, key, 4096, 1_000.0 + number)
    index.order_discovered()


def find_expired(index: Index) -> None:
    assert len(index.expired(100.0, OBJECTS)) == OBJECTS


@pytest.mark.parametrize("visit", [list_entries, list_not_seen, order_discovered, find_expired])
def test_no_pass_holds_the_lock_for_more_than_a_part(
    visit: Callable[[Index], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "_PART_OBJECTS", PART)
    index = Index(1 << 60)
    for number in range(OBJECTS):
        index.reserve(4096)
        index.publish(NAMESPACE, number.to_bytes(4, "big"), 4096, facts=ObjectFacts(b"", 50))
    lock = CountingLock()
    monkeypatch.setattr(index, "_lock", lock)
    for owner, name in ((PrefixOrder, "is_present"), (PrefixOrder, "use"), (Index, "_name")):
        call = getattr(owner, name)

        def counted(*arguments: Any, _call: Callable[..., Any] = call, **more: Any) -> Any:
            lock.visited += 1
            return _call(*arguments, **more)

        monkeypatch.setattr(owner, name, counted)
    visit(index)
    assert lock.holds >= OBJECTS / PART
    assert 0 < lock.most <= 2 * PART + 2
