"""The garbage collector of tierd's process never stops its loop for long."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.tierd import __main__ as command
from kvtier.tierd.daemon import DaemonOptions
from kvtier.tierd.garbage import (
    IDLE_PERIOD_SECONDS,
    LONGEST_PERIOD_SECONDS,
    YOUNG_COLLECTIONS,
    YOUNG_OBJECTS,
    BoundedCollections,
)


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    threshold = gc.get_threshold()
    yield
    gc.set_threshold(*threshold)
    gc.unfreeze()


class Node:
    """A part of a cycle."""

    def __init__(self) -> None:
        self.self = self


def full_collections() -> int:
    return int(gc.get_stats()[2]["collections"])


def test_no_number_of_objects_causes_a_full_collection() -> None:
    BoundedCollections(0.0)
    assert gc.get_freeze_count() > 0
    before, held = full_collections(), []
    for _ in range(20 * YOUNG_OBJECTS * YOUNG_COLLECTIONS):
        held.append([held])
    assert full_collections() == before


def test_cycles_that_die_young_are_collected_at_once() -> None:
    BoundedCollections(0.0)
    node = weakref.ref(Node())
    held = [[] for _ in range(2 * YOUNG_OBJECTS)]  # type: ignore[var-annotated]
    assert node() is None
    assert len(held) == 2 * YOUNG_OBJECTS


def test_older_cycles_are_collected_while_nothing_is_in_use_or_after_hours() -> None:
    collections = BoundedCollections(0.0)
    for period, idle in ((IDLE_PERIOD_SECONDS, True), (LONGEST_PERIOD_SECONDS, False)):
        start = collections._collected_at
        node = Node()
        # It grows old while it is in use.
        gc.collect(1)
        gc.collect(1)
        found = weakref.ref(node)
        del node
        gc.collect(1)
        assert found() is not None
        assert not collections.run(start + period - 1, idle)
        assert found() is not None
        assert collections.run(start + period, idle)
        assert found() is None


def test_the_command_bounds_the_collector_of_its_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    taken: list[DaemonOptions] = []
    monkeypatch.setattr(command, "run", lambda options: taken.append(options) or 0)
    assert command.main(["--topology", str(tmp_path)]) == 0
    assert taken[0].owns_process
