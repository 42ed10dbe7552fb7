"""Random schedules with ATOM's own scheduler and block manager, from a copy of its source.

``python atom_own_scheduler.py FIRST LAST`` with that copy on ``PYTHONPATH`` runs the schedules with
these seeds, and prints what happened as JSON. It is a program of its own because the adapter takes
ATOM's types where ATOM can be imported.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
from tests.support.atom_schedules import BLOCK, prompt
from tests.support.atom_tiers import AtomTiers, RankFaults, TiersOptions

from kvtier.engines.atom.token_keys import chain
from kvtier.keys import group_prefix
from kvtier.testing.atom_engine import ROOT_CELL, expected_output, next_cell, sample

MAX_STEPS = 3_000


class _References:
    """ATOM's blocks with the attribute by which the simulated ranks check them."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    @property
    def blocks(self) -> _References:
        return self

    def __getitem__(self, number: int) -> SimpleNamespace:
        block = self._scheduler.block_manager.kv.block(number)
        return SimpleNamespace(references=block.ref_count)


class OwnEngine:
    """ATOM's loop around its own scheduler, with the stand-in's model and simulated tiers."""

    def __init__(self, seed: int) -> None:
        from atom.model_engine.scheduler import Scheduler

        random = Random(seed)
        options = TiersOptions(
            ranks=random.choice((1, 2)),
            slots=random.choice((16, 64)),
            min_tokens=random.choice((1, 8, 16)),
            num_blocks=random.choice((24, 40)),
            step_tokens=random.choice((64, 128)),
        )
        config = SimpleNamespace(
            kv_cache_block_size=BLOCK,
            num_kvcache_blocks=options.num_blocks,
            enable_prefix_caching=True,
            enable_chunked_prefill=True,
            max_num_seqs=random.choice((2, 4, 8)),
            max_num_batched_tokens=options.step_tokens,
            long_prefill_token_threshold=random.choice((0, 8)),
            decode_context_parallel_size=1,
            max_model_len=4_096,
            bos_token_id=1,
            eos_token_id=60_000,
            stop_token_ids=[],
            scheduler_delay_factor=0.0,
            speculative_config=None,
            hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"], sliding_window=128),
        )
        self.random = random
        self.scheduler: Any = Scheduler(config)
        references: Any = _References(self.scheduler)
        self.tiers = AtomTiers(options, references, random)
        connector: Any = self.tiers.connector
        # What ATOM reads of the classes in ``connector.py``.
        self.scheduler.kv_connector = _with_flags(connector)
        self.finished: list[Any] = []
        self.cut: set[Any] = set()
        """Preempted sequences of which ATOM computes the sampled tokens in part: after a step that
        ends between them and the prompt it takes the prefill for complete."""
        self.steps = 0

    def add(self, tokens: list[int], max_tokens: int) -> Any:
        """A request arrives."""
        from atom.model_engine.sequence import Sequence
        from atom.sampling_params import SamplingParams

        parameters = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        seq = Sequence(tokens, BLOCK, sampling_params=parameters)
        keys = [group_prefix(0) + each for each in chain(tokens, self.tiers.options.chunk_tokens)]
        self.tiers.expect(tokens, keys)
        self.scheduler.add(seq)
        return seq

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do, copies included."""
        return self.scheduler.is_finished() and not self.tiers.connector.has_pending_work()

    def step(self) -> None:
        """One turn of ATOM's loop."""
        self.steps += 1
        scheduler = self.scheduler
        result = None if scheduler.is_finished() else scheduler.schedule()
        self.finished += scheduler.take_rejected()
        if result is None:
            metadata = self.tiers.connector.build_connector_meta()
            if metadata.requests:
                self.tiers.ranks.start(metadata)
            scheduler._update_from_kv_xfer_finished(self.tiers.ranks.finished())
            return
        batch, seqs = result
        if batch.connector_meta_output is not None:
            self.tiers.ranks.start(batch.connector_meta_output)
        output = self._forward(batch, seqs)
        scheduler._update_from_kv_xfer_finished(self.tiers.ranks.finished())
        if batch.req_ids:
            self.finished += scheduler.postprocess(list(seqs.values()), output, batch=batch)

    def _forward(self, batch: Any, seqs: dict[int, Any]) -> Any:
        from atom.model_engine.scheduler import ScheduledBatchOutput

        tokens = []
        for index, request_id in enumerate(batch.req_ids):
            seq, count = seqs[request_id], int(batch.num_scheduled_tokens[index])
            prefill = index < batch.total_seqs_num_prefill
            start = int(batch.num_cached_tokens[index]) if prefill else seq.num_tokens - 1
            if prefill and seq.num_prompt_tokens <= start + count < seq.num_tokens:
                self.cut.add(seq.id)
            cells = [self._compute(seq, rank, start, start + count) for rank in self._ranks]
            tokens.append((sample(cells[0]),))
        zeros = np.zeros(len(tokens), dtype=np.int32)
        return ScheduledBatchOutput(
            req_ids=list(batch.req_ids),
            token_ids=tokens,
            num_rejected=zeros,
            num_bonus=zeros,
            draft_token_ids=None,
            is_deferred_out=False,
        )

    @property
    def _ranks(self) -> range:
        return range(self.tiers.options.ranks)

    def _compute(self, seq: Any, rank: int, start: int, end: int) -> int:
        cache, table = self.tiers.caches[rank], seq.block_table
        cell = ROOT_CELL
        if start:
            cell = int(cache[table[(start - 1) // BLOCK], (start - 1) % BLOCK])
        for position in range(start, end):
            cell = next_cell(cell, int(seq.token_ids[position]), rank)
            cache[table[position // BLOCK], position % BLOCK] = cell
        return cell

    def abort(self, seq: Any) -> None:
        """As ATOM's abort request."""
        from atom.model_engine.sequence import SequenceStatus

        if seq in self.scheduler.running or seq in self.scheduler.waiting:
            seq.status = SequenceStatus.ABORTED


def _with_flags(connector: Any) -> Any:
    """The scheduler side with the flags that ATOM's factory class has."""
    connector.is_offload, connector.is_producer = True, False
    return connector


def run_schedule(seed: int) -> dict[str, int]:
    """Runs one random schedule to its end. Raises ``AssertionError``."""
    engine = OwnEngine(seed)
    random, tiers = engine.random, engine.tiers
    tiers.ranks.faults = RankFaults(random.choice((0.2, 0.6, 1.0)), random.choice((0.0, 0.1)), 0.0)
    sequences: list[Any] = []
    for _ in range(random.randrange(8, 20)):
        longest = tiers.options.num_blocks * BLOCK - 24
        sequences.append(engine.add(prompt(random, 2, min(72, longest)), random.choice((1, 4, 12))))
        for _ in range(random.randrange(0, 10)):
            engine.step()
            tiers.clock.now += random.choice((0.001, 1.0))
            chance = random.random()
            if chance < 0.1:
                tiers.tierd.end_promotion(random)
            elif chance < 0.18:
                tiers.tierd.evict(random, everything=chance > 0.16)
            elif chance < 0.22:
                engine.abort(random.choice(sequences))
            elif chance < 0.40:
                engine.scheduler.block_manager.clear_cache()
    tiers.ranks.faults.progress = 1.0
    began = engine.steps
    while not engine.idle:
        engine.step()
        tiers.clock.now += 0.05
        tiers.tierd.end_promotion(random)
        if engine.steps - began > MAX_STEPS:
            waiting = [(s.id, s.status.name) for s in engine.scheduler.waiting]
            raise AssertionError(f"seed {seed}: not ended: {waiting}")
    for seq in sequences:
        given = [int(token) for token in seq.token_ids[: seq.num_prompt_tokens]]
        output = [int(token) for token in seq.token_ids[seq.num_prompt_tokens :]]
        if seq.id not in engine.cut and output != expected_output(given, len(output)):
            raise AssertionError(f"seed {seed}: sequence {seq.id} has wrong tokens")
    if tiers.tierd.violations:
        raise AssertionError(f"seed {seed}: {tiers.tierd.violations}")
    if engine.scheduler.block_manager.kv.num_used:
        raise AssertionError(f"seed {seed}: blocks leaked")
    if len(engine.finished) != len(sequences):
        raise AssertionError(f"seed {seed}: {len(sequences) - len(engine.finished)} not ended")
    return {
        "stored": tiers.tierd.stored,
        "cut": len(engine.cut),
        "preempted": engine.scheduler.total_preemptions,
        **tiers.connector.get_statistics(),
    }


def main() -> int:
    """Runs the seeds of the command line."""
    seen: Counter[str] = Counter()
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        seen.update(run_schedule(seed))
    print(json.dumps(seen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
