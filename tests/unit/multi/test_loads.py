"""Which connector loads a request, and what becomes of the others' answers."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.support.multi_world import BLOCK, MultiWorld
from tests.support.scripted_connector import Script, ScriptedConnector

from kvtier.engines.vllm.multi import child as child_module
from kvtier.engines.vllm.multi import scheduler_side
from kvtier.engines.vllm.multi.scheduler_side import SEND_GRACE_SECONDS
from kvtier.engines.vllm.multi.worker_side import GRACE_SECONDS

PROMPT = list(range(100, 100 + 5 * BLOCK + 3))
MAX_SECONDS = 2.0


def world_of(
    directory: Path, fields: dict[str, Any] | None = None, **scripts: Script
) -> MultiWorld:
    return MultiWorld(
        directory,
        scripts,
        Random(0),
        fields=fields or {},
        extra={"max_wait_seconds": MAX_SECONDS},
        prefix_caching=False,
    )


def script(**values: Any) -> Script:
    return Script(Random(0), moves=1.0, **values)


def fill(world: MultiWorld, **blocks: int) -> None:
    """Lets children hold the first blocks of ``PROMPT``."""
    keeps = {name: each.keeps for name, each in world.scripts.items()}
    raises = {name: each.raises for name, each in world.scripts.items()}
    for each in world.scripts.values():
        each.keeps, each.raises = 1.0, {}
    world.add("filling", PROMPT)
    hashes = list(world.requests["filling"].block_hashes)
    world.drain()
    for name, each in world.scripts.items():
        each.keeps, each.raises = keeps[name], raises[name]
        for block_hash in hashes[blocks.get(name, 0) :]:
            each.store.pop((0, block_hash), None)
        each.told.clear()
        each.loaded = 0
    world.stats.reset()


def told(world: MultiWorld, name: str) -> list[int]:
    return [tokens for _, tokens in world.scripts[name].told if tokens]


@pytest.mark.parametrize(
    ("blocks", "weights", "loader"),
    [
        ((2, 3), (100, 100), "b"),
        ((3, 3), (100, 100), "a"),
        ((4, 3), (50, 100), "b"),
        ((4, 2), (50, 100), "a"),
        ((5, 1), (0, 1), "b"),
        ((5, 0), (0, 100), ""),
        ((0, 0), (100, 100), ""),
    ],
)
def test_tokens_times_weight_decides_and_then_the_order(
    blocks: tuple[int, int], weights: tuple[int, int], loader: str, directory: Path
) -> None:
    fields = {name: {"weight": weight} for name, weight in zip("ab", weights, strict=True)}
    world = world_of(directory, fields, a=script(), b=script())
    fill(world, a=blocks[0], b=blocks[1])
    world.add("r", PROMPT)
    world.drain()
    expected = {"a": blocks[0] * BLOCK, "b": blocks[1] * BLOCK}
    for name in "ab":
        assert told(world, name) == ([expected[name]] if name == loader else [])
    loaded = {
        name: sum(values.values()) for name, values in world.counts("multi_loaded_tokens").items()
    }
    assert loaded == ({loader: expected[loader]} if loader else {})


def test_a_child_that_answers_not_yet_delays_no_request_that_another_can_load(
    directory: Path,
) -> None:
    world = world_of(directory, a=script(not_yet=1.0), b=script())
    fill(world, a=5, b=1)
    world.add("r", PROMPT)
    world.step()
    assert told(world, "b") == [BLOCK]
    world.drain()


def test_not_yet_is_waited_for_within_a_limit_if_no_other_child_has_anything(
    directory: Path,
) -> None:
    world = world_of(directory, a=script(), b=script())
    fill(world, a=5)
    world.scripts["a"].not_yet = 1.0
    world.add("waits", PROMPT)
    world.step(MAX_SECONDS / 2)
    assert world.scheduler.running == []
    world.scripts["a"].not_yet = 0.0
    world.step(0.1)
    assert told(world, "a") == [5 * BLOCK]
    world.scripts["a"].not_yet = 1.0
    world.add("in vain", PROMPT)
    for _ in range(2):
        world.step(0.1)
        assert "in vain" not in {each.request_id for each in world.scheduler.running}
    world.drain()
    assert world.counts("multi_lookups")["a"]["not_yet"] >= 1
    assert world.finished >= {"waits", "in vain"}


@pytest.mark.parametrize("by_block", [True, False])
@pytest.mark.parametrize("synchronous", [True, False])
def test_a_child_that_fails_is_not_asked_again_and_the_next_one_loads(
    by_block: bool, synchronous: bool, directory: Path
) -> None:
    a = script(fails=1.0, fails_by_block=by_block, synchronous=synchronous)
    world = world_of(directory, a=a, b=script())
    fill(world, a=5, b=4)
    world.add("r", PROMPT)
    world.drain()
    assert told(world, "a") == [5 * BLOCK]
    # What failed within a step is recomputed in place: nothing is looked up again.
    again = not synchronous
    assert told(world, "b") == ([4 * BLOCK] if again else [])
    assert world.counts("multi_loads")["a"] == {"failed": 1}


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ((5 * BLOCK + 4, True), "invalid"),
        ((5 * BLOCK + 3, False), "invalid"),
        ((-BLOCK, True), "nothing"),
        ("x", "error"),
        ((1, 2, 3), "error"),
        (("8", True), "error"),
        ((1.5 * BLOCK, True), "error"),
        (({}, True), "error"),
        (BLOCK, "error"),
        (None, "error"),
    ],
)
def test_an_answer_that_would_end_the_engine_is_not_used(
    answer: Any, outcome: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(directory, a=script(), b=script())
    fill(world, b=3)
    original = ScriptedConnector.get_num_new_matched_tokens

    def answers(self: ScriptedConnector, request: Any, computed: int) -> Any:
        found = original(self, request, computed)
        return answer if self.script is world.scripts["a"] else found

    monkeypatch.setattr(ScriptedConnector, "get_num_new_matched_tokens", answers)
    world.add("r", PROMPT)
    world.drain()
    assert told(world, "b") == [3 * BLOCK]
    assert world.counts("multi_lookups")["a"] == {outcome: 1}


def test_a_child_that_raises_loads_nothing_for_a_while_longer_each_time(directory: Path) -> None:
    world = world_of(directory, a=script(raises={"get_num_new_matched_tokens": 1.0}), b=script())
    fill(world, a=5, b=3)
    child = world.multi._children[0]
    for number, seconds in enumerate((*child_module.SUSPEND_SECONDS, 1e9)):
        world.add(f"r{number}", PROMPT)
        world.step(0.0)
        assert told(world, "b") == [3 * BLOCK] * (number + 1)
        assert not child.may_load
        world.clock.now += seconds - 0.1
        assert not child.may_load
        world.clock.now += 0.1
        assert child.may_load is (seconds < 1e9)
    world.drain()
    assert world.counts("multi_lookups")["a"] == {"error": 4}


@pytest.mark.parametrize(
    "hook", ["update_state_after_alloc", "build_connector_meta", "start_load_kv"]
)
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("synchronous", [True, False])
def test_a_load_of_a_child_that_raises_is_recomputed_in_bounded_time(
    hook: str, late: bool, synchronous: bool, directory: Path
) -> None:
    world = world_of(directory, a=script(late=late, synchronous=synchronous), b=script())
    fill(world, a=5, b=0)
    world.scripts["a"].raises = {hook: 1.0}
    started = world.clock.now
    world.add("r", PROMPT)
    while "r" not in world.finished:
        world.step(0.5)
        assert world.clock.now < started + GRACE_SECONDS + 10
    world.drain()
    assert world.counts("multi_loads")["a"] == {"failed": 1}


def test_blocks_that_a_child_keeps_are_released_some_time_after_it_has_raised(
    directory: Path,
) -> None:
    a = script(raises={"build_connector_meta": 1.0}, keeps=1.0, late=True)
    world = world_of(directory, a=a)
    world.add("r", PROMPT)
    while world.requests["r"].num_output_tokens < 3:
        world.step(0.5)
    for _ in range(int(SEND_GRACE_SECONDS / 20) - 2):
        world.step(20)
    assert "r" in world.scheduler.requests
    for _ in range(4):
        world.step(20)
    world.drain()
    assert a.sent == 0


def test_a_synchronous_hit_is_not_used_with_several_groups(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(directory, a=script(synchronous=True), b=script())
    fill(world, a=5, b=2)
    side = world.multi._scheduler_side
    monkeypatch.setattr(side, "_geometry", scheduler_side.SchedulerGeometry(BLOCK, 2, 1))
    world.add("r", PROMPT)
    monkeypatch.setattr(side, "_loaded_blocks", lambda *_: frozenset({1}))
    world.drain()
    assert told(world, "a") == []
    assert told(world, "b") == [2 * BLOCK]
    assert world.counts("multi_lookups")["a"] == {"synchronous": 1}


def test_block_errors_fail_the_request_with_several_groups(directory: Path) -> None:
    """vLLM ends the engine if it gets any there."""
    world = world_of(directory, a=script(fails=1.0, fails_by_block=True))
    fill(world, a=5)
    for worker in world.workers:
        worker._worker_side._several_groups = True
    world.add("r", PROMPT)
    world.drain()
    assert world.counts("multi_loads")["a"] == {"failed": 1}
