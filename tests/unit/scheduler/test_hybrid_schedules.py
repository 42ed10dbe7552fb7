"""Random schedules of vLLM's own scheduler with KVTier's scheduler side and worker side.

The KV of every token says which prefix, group, layer and rank it belongs to, and is checked before
each step that reads it: no wrong byte, no forgotten request, no leaked block, whatever fails.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from random import Random

import pytest
from tests.support.hybrid_world import CHUNK, LAYOUTS, World, WorldOptions

from kvtier.config.models import Selection

SCHEDULES = 500
BATCHES = 20


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    logging.getLogger("vllm").setLevel(logging.ERROR)
    return tmp_path_factory.mktemp("model")


def _prompt(random: Random, families: int, longest: int) -> list[int]:
    """A prompt that may share a beginning with others."""
    family, length = random.randrange(families), random.randrange(2, longest)
    shared = random.choice((length, random.randrange(length + 1)))
    tokens = [family * 1_000 + position + 10 for position in range(shared)]
    return tokens + [random.randrange(40_000, 50_000) for _ in range(length - shared)]


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_prompt_is_reloaded_in_every_layout(layout: str, ranks: int, directory: Path) -> None:
    world = World(WorldOptions(layout, directory, ranks), Random(1))
    tokens = list(range(10, 10 + 5 * CHUNK + 9))
    world.add("first", tokens, 5)
    world.drain()
    assert world.scheduler.reset_prefix_cache()
    world.add("second", [*tokens, 7, 8], 5)
    world.drain()
    assert world.finished == {"first", "second"}
    assert sum(world.kvtier.loads.loaded_tokens.values()) >= 4 * CHUNK
    assert not world.kvtier.loads.counts.failures
    assert world.connector._off_reason == ""
