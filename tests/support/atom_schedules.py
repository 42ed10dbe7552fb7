"""Random schedules for the ATOM stand-in, and what must hold for each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.support.atom_tiers import AtomTiers, RankFaults, TiersOptions

from kvtier.engines.atom.token_keys import chain
from kvtier.keys import group_prefix
from kvtier.testing.atom_blocks import StandInBlocks
from kvtier.testing.atom_engine import StandInEngine, expected_output
from kvtier.testing.atom_scheduler import SchedulerOptions, StandInScheduler
from kvtier.testing.atom_sequence import StandInSequence

MAX_STEPS = 3_000
BLOCK = 4
SUCCESSOR_TOKENS = 40
"""Of a sequence that gets the id of an aborted one: it lives longer than the load of the other."""


@dataclass(slots=True)
class Bench:
    """One engine with its tiers."""

    random: Random
    blocks: StandInBlocks
    tiers: AtomTiers
    engine: StandInEngine

    @classmethod
    def make(
        cls,
        seed: int = 0,
        options: TiersOptions | None = None,
        scheduling: SchedulerOptions | None = None,
        connector: Any = None,
    ) -> Bench:
        """``connector``: in place of the scheduler side itself, for example a wrapper of it."""
        options = options or TiersOptions()
        scheduling = scheduling or SchedulerOptions(alignment=BLOCK)
        random = Random(seed)
        blocks = StandInBlocks(options.num_blocks, options.block_tokens)
        tiers = AtomTiers(options, blocks, random)
        tiers.ranks.faults = RankFaults(progress=1.0)
        scheduler = StandInScheduler(blocks, scheduling, connector or tiers.connector)
        engine = StandInEngine(scheduler, tiers.ranks, tiers.caches)
        return cls(random, blocks, tiers, engine)

    def add(
        self, tokens: list[int], max_tokens: int = 2, number: int | None = None
    ) -> StandInSequence:
        """A request arrives. ``number``: its id."""
        if number is None:
            number = len(self.engine.finished) * 1_000 + self.engine.steps
        seq = StandInSequence(number, list(tokens), self.tiers.options.block_tokens, max_tokens)
        size = self.tiers.options.chunk_tokens
        keys = [group_prefix(0) + each for each in chain(tokens, size)]
        self.tiers.expect(tokens, keys)
        self.engine.scheduler.add(seq)
        return seq

    def run(self, seq: StandInSequence | None = None) -> None:
        """Steps until the sequence has ended, or everything has."""
        started = self.engine.steps
        while not (self.engine.idle if seq is None else seq in self.engine.finished):
            self.engine.step()
            self.tiers.clock.now += 0.01
            if self.engine.steps - started > MAX_STEPS:
                raise TimeoutError(f"the engine does not end: {self.describe()}")

    def describe(self) -> str:
        """The state of the queues, for messages."""
        scheduler = self.engine.scheduler
        return (
            f"waiting {[(s.id, s.status.name) for s in scheduler.waiting]}, "
            f"running {[(s.id, s.status.name) for s in scheduler.running]}, "
            f"deferred {list(scheduler.deferred_free_blocks)}, "
            f"connector {self.tiers.connector.get_statistics()}"
        )

    def forget_gpu(self) -> None:
        """The prefix cache in GPU memory is lost, so that what follows can only be loaded."""
        self.blocks.clear_index()
        for cache in self.tiers.caches:
            cache[:] = 0

    def check(self, *sequences: StandInSequence) -> None:
        """Raises ``AssertionError`` if a token is wrong or anything must not have happened."""
        for seq in sequences:
            prompt = seq.token_ids[: seq.num_prompt_tokens]
            if seq.output != expected_output(prompt, len(seq.output)):
                raise AssertionError(f"sequence {seq.id} has wrong tokens")
        if self.tiers.tierd.violations:
            raise AssertionError(self.tiers.tierd.violations)

    def check_end(self) -> None:
        """Raises ``AssertionError`` if anything is left after the last sequence."""
        if self.blocks.free != self.blocks.num_blocks:
            raise AssertionError(f"{self.blocks.num_blocks - self.blocks.free} blocks leaked")
        scheduler = self.engine.scheduler
        if scheduler.parked or scheduler.deferred_free_blocks:
            raise AssertionError(f"a sequence was forgotten: {self.describe()}")
        self.engine.step()
        if scheduler.kv_connector is not self.tiers.connector:
            return  # It may have failed on purpose.
        statistics = self.tiers.connector.get_statistics()
        for name in ("loads_pending", "saves_pending", "sequences"):
            if statistics[name]:
                raise AssertionError(f"{name} is {statistics[name]}")


def prompt(random: Random, families: int, longest: int) -> list[int]:
    """A prompt that may share a beginning with others."""
    family = random.randrange(families)
    length = random.randrange(2, longest)
    shared = random.choice((length, random.randrange(length + 1)))
    tokens = [family * 1_000 + position for position in range(shared)]
    return tokens + [random.randrange(40_000, 50_000) for _ in range(length - shared)]


def run_schedule(seed: int, change: Callable[[Bench], None] | None = None) -> dict[str, int]:
    """Runs one random schedule to its end; returns what happened. Raises ``AssertionError``.

    ``change``: called before the first sequence.
    """
    random = Random(seed)
    options = TiersOptions(
        ranks=random.choice((1, 1, 2)),
        slots=random.choice((4, 16, 64)),
        min_tokens=random.choice((1, 8, 16)),
        num_blocks=random.choice((22, 30, 64)),
        step_tokens=random.choice((8, 16, 32)),
    )
    scheduling = SchedulerOptions(
        max_num_seqs=random.choice((2, 4, 8)),
        max_batched_tokens=options.step_tokens,
        long_prefill_threshold=random.choice((0, 0, 8)),
        alignment=random.choice((4, 8)),
    )
    bench = Bench.make(seed, options, scheduling)
    bench.tiers.ranks.faults = RankFaults(
        progress=random.choice((0.1, 0.3, 1.0)),
        load_fails=random.choice((0.0, 0.0, 0.1)),
        repeats=0.1,
        drains=random.choice((0.2, 1.0)),
    )
    if change is not None:
        change(bench)
    longest = min(72, options.num_blocks * BLOCK - SUCCESSOR_TOKENS)
    sequences: list[StandInSequence] = []
    successors = 0
    for number in range(random.randrange(10, 30)):
        prefix = prompt(random, 2, longest)
        seq = bench.add(prefix, random.choice((1, 2, 6, 24)), number)
        sequences.append(seq)
        for _ in range(random.randrange(0, 12)):
            bench.engine.step()
            bench.tiers.clock.now += random.choice((0.001, 0.2, 1.0))
            _disturb(bench, random, sequences)
        predecessor = _aborted_in_flight(bench, sequences)
        if predecessor is not None:
            successors += 1
            again = predecessor.token_ids[: predecessor.num_prompt_tokens]
            sequences.append(bench.add(again, SUCCESSOR_TOKENS, predecessor.id))
    bench.tiers.ranks.faults.progress = bench.tiers.ranks.faults.drains = 1.0
    if not bench.tiers.tierd.attached:
        bench.tiers.tierd.attach()
    steps = bench.engine.steps
    while not bench.engine.idle:
        bench.engine.step()
        bench.tiers.clock.now += 0.05
        bench.tiers.tierd.end_promotion(random)
        if bench.engine.steps - steps > MAX_STEPS:
            raise AssertionError(f"seed {seed}: a sequence was forgotten: {bench.describe()}")
    bench.check(*sequences)
    missing = [seq.id for seq in sequences if seq not in bench.engine.finished]
    if missing:  # an aborted sequence ends too
        raise AssertionError(f"seed {seed}: sequences {missing} have not ended")
    bench.check_end()
    return {
        "stored": bench.tiers.tierd.stored,
        "loaded": bench.tiers.ranks.loaded,
        "failed": bench.tiers.ranks.failed,
        "preempted": bench.engine.scheduler.preemptions,
        "successors": successors,
        **bench.tiers.connector.get_statistics(),
    }


def _disturb(bench: Bench, random: Random, sequences: list[StandInSequence]) -> None:
    tierd, chance = bench.tiers.tierd, random.random()
    if chance < 0.10:
        tierd.end_promotion(random)
    elif chance < 0.18:
        tierd.evict(random)
    elif chance < 0.20:
        tierd.evict(random, everything=True)
    elif chance < 0.26:
        parked = [seq for seq in bench.engine.scheduler.waiting if seq.counted_as_parked]
        # A successor is not aborted: two sequences with one id must not both wait for copies.
        victims = [seq for seq in parked or sequences if seq.max_tokens != SUCCESSOR_TOKENS]
        if victims:
            bench.engine.scheduler.abort(random.choice(victims))
    elif chance < 0.28:
        tierd.lose() if tierd.attached else tierd.attach()
    elif chance < 0.45:
        bench.blocks.clear_index()


def _aborted_in_flight(bench: Bench, sequences: list[StandInSequence]) -> StandInSequence | None:
    """A sequence that was aborted while its load runs, and whose id is not in use again."""
    used = [seq.id for seq in sequences]
    for seq in bench.engine.scheduler.deferred_free_blocks.values():
        if seq.awaits_aborted_load and used.count(seq.id) == 1:
            return seq
    return None
