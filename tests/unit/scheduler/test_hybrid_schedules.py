"""Random schedules of vLLM's own scheduler with KVTier's scheduler side and worker side.

The KV of every token says which prefix, group, layer and rank it belongs to, and is checked before
each step that reads it: no wrong byte, no forgotten request, no leaked block, whatever fails.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from tests.support.hybrid_world import (
    CHUNK,
    LAYOUTS,
    World,
    WorldOptions,
    WrongByteError,
    blocks_for,
)

from kvtier.config.models import Selection
from kvtier.engines.common.worker_state import SlotGenerations
from kvtier.planner import GroupKind, KVCacheGroup
from kvtier.transfer.codec import Codec
from kvtier.transfer.engine import CopyEngine

SCHEDULES = 500
BATCHES = 5
MAX_STEPS = 400
MAX_NEW_TOKENS = 60
EVERY_BATCH = {
    "a load failed",
    "a load lost one group's object",
    "a load lost one rank's shard",
    "a request was aborted",
    "a request was preempted",
    "a reset was asked for",
    "one group's file was lost",
    "one group's object was evicted",
    "one rank's shard failed",
    "tierd was found again",
    "tierd was killed",
    "tierd was killed during a load",
}
"""What the schedules of each batch go through at least once."""
LOAD_FAILURES = ("copy", "gone", "lost")
"""Why loads fail, as the engine's metrics count it: in each batch several times."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    logging.getLogger("vllm").setLevel(logging.ERROR)
    return tmp_path_factory.mktemp("model")


def _prompt(random: Random, families: int, longest: int) -> list[int]:
    """A prompt that may share a beginning with others."""
    family, length = random.randrange(families), random.randrange(CHUNK, longest)
    shared = random.choice((length, length, random.randrange(length + 1)))
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
    assert sum(world.kvtier.loads.in_flight.loaded_tokens.values()) >= 4 * CHUNK
    assert not world.failures
    assert world.connector._guard.off_reason == ""


def _missing(layout: str, ranks: int, random: Random) -> frozenset[tuple[int, int]]:
    """Pairs of a rank and a group without layers on it. Every rank has layers, and every group."""
    groups = list(range(len(LAYOUTS[layout]())))
    if ranks < 2 or len(groups) < 2 or random.random() < 0.5:
        return frozenset()
    without = random.sample(groups, random.randrange(1, len(groups)))
    stages = [0, 1] if random.random() < 0.5 else [1, 0]
    missing = {(stages[0], group) for group in without}
    if random.random() < 0.5:
        missing.add((stages[1], random.choice([each for each in groups if each not in without])))
    return frozenset(missing)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("layout", [name for name in sorted(LAYOUTS) if len(LAYOUTS[name]()) > 1])
def test_a_prompt_is_reloaded_where_a_stage_has_no_layer_of_a_group(
    layout: str, rank: int, directory: Path
) -> None:
    for group in range(len(LAYOUTS[layout]())):
        missing = frozenset({(rank, group)})
        world = World(WorldOptions(layout, directory, 2, missing=missing), Random(1))
        tokens = list(range(10, 10 + 5 * CHUNK + 9))
        world.add("first", tokens, 5)
        world.drain()
        assert world.scheduler.reset_prefix_cache()
        world.add("second", [*tokens, 7, 8], 5)
        world.drain()
        assert sum(world.kvtier.loads.in_flight.loaded_tokens.values()) >= 4 * CHUNK
        assert not world.failures
        assert not any(
            copy.group == group
            for _, copies, _ in world.ranks[rank].copies.submitted
            for copy in copies
        )


def run_schedule(seed: int, directory: Path) -> World:
    """Runs one random schedule to its end. Raises ``AssertionError``."""
    random = Random(seed)
    layouts = sorted(LAYOUTS)
    layout, ranks = layouts[seed % len(layouts)], random.choice((1, 1, 2))
    longest = random.choice((2, 7, 7)) * CHUNK
    options = WorldOptions(
        layout,
        directory,
        ranks=ranks,
        # With few blocks requests preempt one another.
        blocks=int(
            blocks_for(layout, longest + MAX_NEW_TOKENS) * random.choice((1.1, 1.1, 1.4, 3.0))
        ),
        slots=random.choice((6, 20, 60)),
        step_tokens=random.choice((64, 128, 256)),
        seqs=random.choice((2, 4, 8)),
        selection=random.choice(list(Selection)),
        missing=_missing(layout, ranks, Random(seed)),
    )
    world = World(options, random)
    move = random.choice((0.2, 0.5, 1.0))
    troubles = random.choice((0.0, 0.1, 0.3))
    arrivals = random.choice((0.2, 0.8))
    # Requests come in waves, each of which finds the GPU cache empty, or at any time.
    waves = random.random() < 0.7
    wave, left, number = 0, random.randrange(8, 16), 0
    prompts: list[list[int]] = []

    def disturb_loads() -> None:
        if random.random() < 0.5:
            _trouble(world, random, COPY_TROUBLES)

    world.on_loads = disturb_loads if troubles else None
    for _ in range(MAX_STEPS):
        idle = not world.scheduler.has_unfinished_requests()
        if idle:
            # What follows is not in GPU memory.
            world.scheduler.reset_prefix_cache()
            wave = random.randrange(1, 6)
        may_come = left and (wave or not waves)
        if may_come and random.random() < (0.9 if idle else arrivals):
            wave, left, number = max(0, wave - 1), left - 1, number + 1
            if prompts and random.random() < 0.6:
                prompt = _continued(random, random.choice(prompts))
            else:
                prompt = _prompt(random, 2, longest)
            prompts.append(prompt)
            world.add(f"r{number}", prompt, random.choice((1, 3, 20, MAX_NEW_TOKENS)))
        if random.random() < 0.6:
            world.deliver()
        if random.random() < 0.5:
            world.tierd.promote()
        if not world.tierd.attached and random.random() < 0.2:
            _trouble(world, random, ("tierd comes back",))
        loading = bool(world.kvtier.loads.in_flight)
        if troubles and random.random() < (0.4 if loading else troubles):
            _trouble(world, random, LOAD_TROUBLES if loading else TROUBLES)
        world.step(move)
        if not left and idle:
            break
    if not world.tierd.attached:
        world.attach()
    world.drain()
    assert len(world.finished) == number
    assert world.connector._guard.off_reason == ""
    return world


def _continued(random: Random, prompt: list[int]) -> list[int]:
    """A prompt that came before, the beginning of one, or the next turn of a conversation."""
    kept = random.choice((len(prompt), len(prompt), random.randrange(CHUNK, len(prompt) + 1)))
    return prompt[:kept] + [random.randrange(40_000, 50_000) for _ in range(random.choice((1, 9)))]


TROUBLES = (
    "an object is evicted",
    "an object is evicted",
    "an object is evicted",
    "a file is lost",
    "tierd dies",
    "a client leaves",
    "a copy fails",
    "a reset",
)
LOAD_TROUBLES = (
    "an object is evicted",
    "an object is evicted",
    "tierd dies",
    "a client leaves",
    "a copy fails",
    "a copy fails",
    "a reset",
)
"""While a load is in flight."""
COPY_TROUBLES = ("an object of the load is evicted", "tierd dies", "a copy fails")
"""Between the scheduler's decision and the workers' copies."""


def _trouble(world: World, random: Random, troubles: Sequence[str]) -> None:
    what = random.choice(troubles)
    tierd, happened = world.tierd, world.happened
    groups = len(world.planner.groups)
    if what.endswith("is evicted"):
        objects = len(tierd.ram)
        tierd.evict(announce=what == "an object is evicted" and random.random() < 0.5)
        if len(tierd.ram) < objects and groups > 1:
            happened["one group's object was evicted"] += 1
    elif what == "a file is lost":
        if tierd.disk and groups > 1:
            happened["one group's file was lost"] += 1
        tierd.lose_file()
    elif what == "tierd dies" and tierd.attached:
        happened["tierd was killed during a load"] += bool(world.kvtier.loads.in_flight)
        world.lose_tierd(keep_ram=random.random() < 0.5)
        happened["tierd was killed"] += 1
    elif what == "tierd comes back":
        world.attach()
        happened["tierd was found again"] += 1
    elif what == "a client leaves" and world.requests:
        world.abort(random.choice(sorted(world.requests)))
    elif what == "a copy fails":
        # A copy of one rank fails. The device runs nothing of it afterwards.
        copies = random.choice(world.ranks).copies
        copies.move()
        copies.fail("the device says so")
        happened["one rank's shard failed"] += len(world.ranks) > 1
    elif what == "a reset":
        world.scheduler.reset_prefix_cache()
        happened["a reset was asked for"] += 1


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_schedules_read_no_wrong_byte_and_forget_and_leak_nothing(
    batch: int, directory: Path
) -> None:
    loaded = 0
    happened: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for seed in range(batch, SCHEDULES, BATCHES):
        try:
            world = run_schedule(seed, directory)
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {type(error).__name__}: {error}") from error
        loaded += sum(world.kvtier.loads.in_flight.loaded_tokens.values())
        happened.update(world.happened)
        failures.update(world.failures)
    assert {name for name, count in happened.items() if count} >= EVERY_BATCH
    assert min(failures[reason] for reason in LOAD_FAILURES) >= 4, failures
    # Most loads still succeed, so the bytes that they bring are checked.
    assert loaded > 100 * CHUNK


def test_a_schedule_is_the_same_each_time(directory: Path) -> None:
    for seed in (0, 20, 135):
        first, second = (run_schedule(seed, directory) for _ in range(2))
        assert first.happened["a load failed"], "choose another seed"
        assert (first.happened, first.failures) == (second.happened, second.failures)
        assert first.checked_tokens == second.checked_tokens


@pytest.mark.parametrize(
    "fault",
    ["generations are not compared", "a block is not loaded", "a stage copies no group at all"],
)
def test_the_schedules_find_wrong_bytes(
    fault: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "a block is not loaded":
        original = KVCacheGroup.first_needed_block

        def later(self: KVCacheGroup, end_tokens: int) -> int:
            return original(self, end_tokens) + (self.kind is GroupKind.SLIDING)

        monkeypatch.setattr(KVCacheGroup, "first_needed_block", later)
    elif fault == "a stage copies no group at all":
        prepare = CopyEngine.__init__

        def without_groups(self: CopyEngine, codec: Codec, *arguments: int) -> None:
            prepare(self, codec, *arguments)
            if self._empty_groups:
                self._empty_groups = frozenset(range(len(codec.groups)))

        monkeypatch.setattr(CopyEngine, "__init__", without_groups)
    else:
        monkeypatch.setattr(SlotGenerations, "unchanged", lambda _, slots, found: len(slots))
    with pytest.raises(WrongByteError):
        _run_all(directory)


def _run_all(directory: Path) -> None:
    for seed in range(SCHEDULES):
        run_schedule(seed, directory)
