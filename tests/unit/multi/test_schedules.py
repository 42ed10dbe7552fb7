"""Random schedules of vLLM's own scheduler with several connectors.

Whatever the children do, aborts and preemptions among it: no request reads KV that is not its own,
none is forgotten, no block leaks, and no block that a child keeps changes.
"""

from __future__ import annotations

import logging
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.support.multi_world import BLOCK, MultiWorld
from tests.support.scripted_connector import Script

from kvtier.engines.vllm.multi import worker_side
from kvtier.engines.vllm.multi.scheduler_side import MultiSchedulerSide

SCHEDULES = 60
BATCHES = 3
MAX_STEPS = 300
RAISING = (
    "bind_connector_metadata", "build_connector_meta", "get_block_ids_with_load_errors",
    "get_num_new_matched_tokens", "get_transfer_results", "handle_preemptions",
    "request_finished_all_groups", "save_kv_layer", "start_load_kv", "update_state_after_alloc",
    "wait_for_layer_load", "wait_for_save",
)  # fmt: skip


def _script(random: Random, *, raises: bool) -> Script:
    hooks = random.sample(RAISING, 3) if raises else []
    return Script(
        random,
        synchronous=random.random() < 0.25,
        not_yet=random.choice((0.0, 0.0, 0.5, 0.95)),
        fails=random.choice((0.0, 0.3, 1.0)),
        fails_by_block=random.random() < 0.5,
        keeps=random.choice((0.3, 0.9)),
        moves=random.choice((0.5, 0.9)),
        stray=random.choice((0.0, 0.3)),
        raises=dict.fromkeys(hooks, random.choice((0.02, 0.2))),
        late=random.random() < 0.5,
    )


def _prompt(random: Random) -> list[int]:
    family, length = random.randrange(3), random.randrange(BLOCK, 9 * BLOCK)
    shared = random.choice((length, length, random.randrange(length + 1)))
    tokens = [family * 1_000 + position + 10 for position in range(shared)]
    return tokens + [random.randrange(40_000, 50_000) for _ in range(length - shared)]


def run_schedule(seed: int, directory: Path) -> MultiWorld:
    """Runs one random schedule to its end. Raises ``AssertionError``."""
    random = Random(seed)
    trouble = seed % 3 == 0
    scripts = {
        f"child-{index}": _script(random, raises=trouble and random.random() < 0.6)
        for index in range(random.choice((1, 2, 3)))
    }
    world = MultiWorld(
        directory,
        scripts,
        random,
        fields={name: {"weight": random.choice((0, 50, 100, 100))} for name in scripts},
        extra={"max_wait_seconds": random.choice((0.0, 2.0))},
        ranks=random.choice((1, 1, 2)),
        blocks=random.choice((24, 40, 90)),
        step_tokens=random.choice((48, 128)),
        seqs=random.choice((2, 5)),
        prefix_caching=random.random() < 0.4,
    )
    left, number = random.randrange(8, 20), 0
    for _ in range(MAX_STEPS):
        busy = len(world.scheduler.running) + len(world.scheduler.waiting) > 1
        if left and random.random() < (0.05 if busy else 0.5):
            left, number = left - 1, number + 1
            world.add(f"r{number}", _prompt(random), random.choice((1, 3, 20)))
        if not world.scheduler.running and random.random() < 0.5:
            # What follows is not in GPU memory.
            world.scheduler.reset_prefix_cache()
        if world.requests and random.random() < 0.05:
            world.abort(random.choice(sorted(world.requests)))
        world.step(random.choice((0.5, 0.5, 20.0)))
        if not left and not world.scheduler.requests:
            break
    world.drain()
    assert len(world.finished) == number
    return world


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_schedules_read_no_wrong_byte_and_forget_and_leak_nothing(
    batch: int, directory: Path
) -> None:
    logging.getLogger("kvtier").setLevel(logging.CRITICAL)
    loaded = sent = raised = recomputed = 0
    for seed in range(batch, SCHEDULES, BATCHES):
        try:
            world = run_schedule(seed, directory)
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {type(error).__name__}: {error}") from error
        loaded += sum(script.loaded for script in world.scripts.values())
        sent += sum(script.sent for script in world.scripts.values())
        raised += sum(script.raised for script in world.scripts.values())
        recomputed += world.recomputed
    assert loaded > 20
    assert sent > 20
    assert raised > 5 or batch % 3


@pytest.mark.parametrize("fault", ["the first child releases the blocks", "any report counts"])
def test_the_schedules_find_faults(
    fault: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.getLogger("kvtier").setLevel(logging.CRITICAL)
    if fault == "any report counts":
        results, reported = worker_side._results, set()

        def of_all(child: Any, finished: set[str]) -> Any:
            sent, received, failed = results(child, finished)
            reported.update(received)
            return sent, set(reported), failed

        monkeypatch.setattr(worker_side, "_results", of_all)
    else:
        original = MultiSchedulerSide.request_finished

        def forgets(self: Any, request: Any, block_ids: Any) -> Any:
            answer = original(self, request, block_ids)
            kept = self._sending.get(request.request_id, {})
            for child in list(kept)[1:]:
                del kept[child]
            return answer

        monkeypatch.setattr(MultiSchedulerSide, "request_finished", forgets)
    with pytest.raises(AssertionError):
        _run_all(directory)


def _run_all(directory: Path) -> None:
    for seed in range(SCHEDULES):
        run_schedule(seed, directory)
