"""Slots are reused under running copies, by a tierd without answers: no wrong byte is loaded.

The reader neither acknowledges evictions nor tells tierd of its loads, so only the generation words
protect it. The control shows that without them the same run loads wrong bytes.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.harness.stub_engine import StubEngine
from kvtier.harness.stub_worker import StubEngineOptions
from kvtier.harness.tierd_testbed import TierdOptions, TierdTestbed

LIMIT_SECONDS = 60.0
KEYS = 64
"""More than the pool holds, so that every store evicts."""


def _until(condition: Callable[[], bool], step: Callable[[], object]) -> None:
    """Only a failing test reaches the limit."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the situation did not occur"
        step()


@pytest.mark.parametrize("compares", [True, False])
def test_a_slot_that_is_reused_during_a_copy_is_noticed_by_its_generation(
    tmp_path: Path, compares: bool
) -> None:
    testbed = TierdTestbed(tmp_path, TierdOptions(memory_bytes=2 << 20))
    try:
        testbed.start_tierd()
        writer = StubEngine(StubEngineOptions(run_directory=testbed.run_directory))
        reader = StubEngine(
            StubEngineOptions(
                run_directory=testbed.run_directory,
                copy_seconds=0.02,
                courteous=False,
                compares=compares,
            )
        )
        stop = threading.Event()
        dice = random.Random(1)

        def write() -> None:
            while not stop.is_set():
                writer.store(dice.randrange(KEYS))

        for engine in (writer, reader):
            engine.start()
            assert engine.wait("usable", LIMIT_SECONDS)
        thread = threading.Thread(target=write)
        thread.start()
        try:
            numbers = random.Random(2)
            _until(
                lambda: reader.seen.reused >= 3 and (compares or reader.seen.wrong > 0),
                lambda: reader.load([numbers.randrange(KEYS)]),
            )
        finally:
            stop.set()
            thread.join()
            writer.close()
            reader.close()
        assert (reader.seen.wrong == 0) is compares
        assert reader.seen.reused >= 3
    finally:
        testbed.close()
