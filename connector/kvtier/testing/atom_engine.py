"""The engine of the ATOM stand-in: scheduler, model and ranks, driven one step at a time.

The model's KV of a token is a number that depends on the whole prefix, and is computed from the
number in the slot before it. So bytes that are wrong or missing anywhere change every later token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.testing.atom_scheduler import StandInBatch, StandInScheduler
from kvtier.testing.atom_sequence import StandInSequence

Cells = npt.NDArray[np.uint64]
_MASK = (1 << 64) - 1
ROOT_CELL = 0x9E3779B97F4A7C15
VOCABULARY = 50_021


class Ranks(Protocol):
    """The workers of an engine, with completions aggregated over ranks."""

    def start(self, metadata: Any) -> None: ...

    def finished(self) -> Any: ...


def next_cell(previous: int, token: int, rank: int) -> int:
    """The KV of a token after a prefix whose last KV is ``previous``."""
    mixed = (previous ^ (token + 1) * 0xBF58476D1CE4E5B9 ^ (rank << 7)) & _MASK
    mixed = (mixed ^ (mixed >> 29)) * 0x94D049BB133111EB & _MASK
    return mixed ^ (mixed >> 32)


def cells_of(tokens: Iterable[int], rank: int) -> list[int]:
    """The KV of all tokens of a sequence."""
    cells, cell = [], ROOT_CELL
    for token in tokens:
        cell = next_cell(cell, token, rank)
        cells.append(cell)
    return cells


def sample(cell: int) -> int:
    """The token that follows a prefix."""
    return cell % VOCABULARY


def expected_output(prompt: Sequence[int], count: int) -> list[int]:
    """What an engine without any cache samples."""
    tokens = list(prompt)
    cell = cells_of(tokens, 0)[-1]
    output = []
    for _ in range(count):
        output.append(sample(cell))
        cell = next_cell(cell, output[-1], 0)
    return output


class StandInEngine:
    """One engine. ``caches[r]``: rank r's KV, one row per block."""

    def __init__(self, scheduler: StandInScheduler, ranks: Ranks, caches: Sequence[Cells]) -> None:
        self.scheduler = scheduler
        self.finished: list[StandInSequence] = []
        self.steps = 0
        self._ranks = ranks
        self._caches = caches
        self._block_size = scheduler.block_manager.block_size

    def step(self) -> None:
        """One turn of ATOM's loop, of a step or of the idle kind."""
        self.steps += 1
        scheduler = self.scheduler
        batch = None if scheduler.is_finished() else scheduler.schedule()
        self.finished += scheduler.rejected
        scheduler.rejected = []
        if batch is None:
            self._advance_idle()
            return
        if batch.connector_meta_output is not None:
            self._ranks.start(batch.connector_meta_output)
        sampled = self._forward(batch)
        scheduler.update_from_completions(self._ranks.finished())
        if batch.sequences:
            self.finished += scheduler.postprocess(batch, sampled)

    def _advance_idle(self) -> None:
        connector = self.scheduler.kv_connector
        if connector is None:
            return
        metadata = connector.build_connector_meta()
        if metadata.requests:
            self._ranks.start(metadata)
        self.scheduler.update_from_completions(self._ranks.finished())

    @property
    def idle(self) -> bool:
        """Whether ATOM's loop has nothing left to do, copies included."""
        connector = self.scheduler.kv_connector
        pending = connector is not None and connector.has_pending_work()
        return self.scheduler.is_finished() and not pending

    def _forward(self, batch: StandInBatch) -> dict[int, int]:
        sampled = {}
        for seq, tokens, start in zip(batch.sequences, batch.tokens, batch.starts, strict=True):
            for rank, cache in enumerate(self._caches):
                cell = self._compute(seq, cache, rank, (start, start + tokens))
                if rank == 0:
                    sampled[id(seq)] = sample(cell)
        return sampled

    def _compute(self, seq: StandInSequence, cache: Cells, rank: int, span: tuple[int, int]) -> int:
        start, end = span
        table, size = seq.block_table, self._block_size
        cell = ROOT_CELL
        if start:
            cell = int(cache[table[(start - 1) // size], (start - 1) % size])
        for position in range(start, end):
            cell = next_cell(cell, seq.token_ids[position], rank)
            cache[table[position // size], position % size] = cell
        return cell
