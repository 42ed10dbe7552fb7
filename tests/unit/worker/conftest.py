"""Fixtures: a rank's state machines without threads, and a worker with a scripted tierd."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.worker.worker_testbeds import (
    RankTestbed,
    WorkerTestbed,
    make_rank_testbed,
    make_worker_testbed,
)


@pytest.fixture
def rank_testbed() -> RankTestbed:
    return make_rank_testbed()


@pytest.fixture
def testbed(tmp_path: Path) -> Iterator[WorkerTestbed]:
    made = make_worker_testbed(tmp_path)
    yield made
    made.engine.move()
    made.worker.shutdown()
