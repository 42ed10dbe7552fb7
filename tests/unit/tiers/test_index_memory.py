"""What the index of a directory takes in memory."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from kvtier.tiers.filesystem.index import Index

pytestmark = pytest.mark.slow

OBJECTS = 200_000
NAMESPACE = "a" * 32


def test_an_object_with_a_predecessor_takes_at_most_120_bytes() -> None:
    draw = random.Random(1)
    tracemalloc.start()
    index, previous = Index(1 << 60), b""
    for number in range(OBJECTS):
        key = b"\0" + draw.randbytes(32)
        index.reserve(4096)
        index.publish(NAMESPACE, key, 4096, previous if number % 40 else b"")
        previous = key
    del key, previous
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held / OBJECTS <= 120
