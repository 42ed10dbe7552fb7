"""Fixtures: a rank's state machines without threads, and a worker with a scripted tierd."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.worker.worker_rigs import Bench, Rig, make_bench, make_rig


@pytest.fixture
def bench() -> Bench:
    return make_bench()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = make_rig(tmp_path)
    yield made
    made.engine.move()
    made.worker.shutdown()
