"""What the scheduler side knows about each load and promotion. The scheduler's thread only."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np

from kvtier.engines.common.jobs import LoadRuns, Shape
from kvtier.engines.common.request_state import RequestState
from kvtier.planner import PartRun
from kvtier.presence_table import Words
from kvtier.store.types import MEMORY_BIT, RAM_BITS


@dataclass(slots=True)
class ActiveLoad:
    """A load in flight.

    ``chunk_tokens[i]``: tokens that key i covers. ``source_tiers``: where the keys were before they
    were promoted; empty if nothing was. ``keys_loaded`` and ``failure`` come from the workers'
    reports. ``epoch``: of the session that was told of the load. ``expires_at``: when the workers
    have reported, unless something is wrong. ``end_chunk``: the first chunk that is not loaded. A
    rank may report before its copies have ended, so there are two counts of ranks.
    """

    load_id: int
    state: RequestState
    first_chunk: int
    end_chunk: int
    chunk_tokens: tuple[int, ...]
    source_tiers: tuple[int, ...]
    ranks_unreported: int
    ranks_copying: int
    keys_loaded: int
    epoch: int
    expires_at: float
    failure: str = ""
    object_bytes: tuple[int, ...] = ()
    """Of each key's object; empty if they are not known."""
    promotion_id: int = 0
    """The promotion whose keys still arrive; 0 if none do."""
    keys_named: int = 0
    """How many keys the workers were told of."""
    seconds: float = 0.0
    copy_seconds: float = 0.0
    """Both are of the slowest rank."""

    def tier(self, index: int) -> int:
        """The tier that key ``index`` came from."""
        return self.source_tiers[index] if index < len(self.source_tiers) else 0

    def by_tier(self, keys: int) -> dict[int, tuple[int, int]]:
        """Tokens and bytes of the first ``keys`` keys, by the tier that they came from."""
        tokens, sizes = self.chunk_tokens[:keys], self.object_bytes[:keys]
        found: dict[int, tuple[int, int]] = {}
        tiers = self.source_tiers[:keys]
        if any(tiers):
            for tier, count, size in zip_longest(tiers, tokens, sizes, fillvalue=0):
                before = found.get(tier, (0, 0))
                found[tier] = (before[0] + count, before[1] + size)
        elif tokens:
            found[0] = (sum(tokens), sum(sizes))
        return found


MAX_DURATIONS = 4_096
"""Of each kind since statistics were last collected. Further ones are counted, and not timed."""


@dataclass(slots=True)
class LoadCounts:
    """Counts for vLLM's statistics since they were last collected."""

    queries: int = 0
    queried_tokens: int = 0
    offered_tokens: int = 0
    decisions: Counter[str] = field(default_factory=Counter)
    wait_seconds: list[float] = field(default_factory=list)
    loaded_tokens: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    promotions: Counter[str] = field(default_factory=Counter)
    load_seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By the name of the slowest tier."""
    tier_bytes: Counter[str] = field(default_factory=Counter)

    def note_wait(self, seconds: float) -> None:
        """An admitted request has waited for secondary tiers."""
        if len(self.wait_seconds) < MAX_DURATIONS:
            self.wait_seconds.append(seconds)

    def note_load(self, tier: str, seconds: float) -> None:
        """Every rank has reported a load, whose slowest tier this is."""
        durations = self.load_seconds[tier]
        if len(durations) < MAX_DURATIONS:
            durations.append(seconds)


@dataclass(frozen=True, slots=True)
class LoadPrefix:
    """What to promote, for a request whose first ``computed_tokens`` tokens are in GPU memory.

    ``timeout_seconds``: of the tiers that hold it. ``chunks``: what a prefix needs that is usable
    as a whole only (``Planner.needed_chunks``), else empty. ``look_up``: the replica does not have
    the last keys. ``lookup_seconds`` and ``lookup_key``: if the request waits for a lookup only,
    for how long, and the first such key.
    """

    computed_tokens: int
    first_chunk: int
    keys: int
    end_tokens: int
    timeout_seconds: float
    chunks: tuple[tuple[int, int, int], ...] = ()
    look_up: bool = False
    lookup_seconds: float = 0.0
    lookup_key: bytes = b""


def source_tier(bits: int) -> int:
    """The tier that an object in the tiers ``bits`` is taken from."""
    return 0 if bits & RAM_BITS else (bits & -bits).bit_length() - 1


def source_tier_bits(bits: Words) -> Words:
    """The bit of ``source_tier`` of each object; 0 of an object that is in no tier."""
    return np.where(bits & RAM_BITS, MEMORY_BIT, bits & -bits)


def target_runs(wanted: Sequence[PartRun], block_tables: Sequence[Sequence[int]]) -> LoadRuns:
    """The blocks that are to be filled with ``wanted``, by the request's block tables."""
    shapes: list[Shape] = []
    blocks: list[int] = []
    for run in wanted:
        shapes += [(run.group, run.first, run.blocks)] * run.chunks
        blocks += run.table_blocks(block_tables[run.group])
    return LoadRuns(shapes, blocks)


def have_blocks(wanted: Sequence[PartRun], blocks: Sequence[int]) -> bool:
    """Whether vLLM has allocated every block that is to be filled."""
    expected = sum(run.chunks * run.blocks for run in wanted)
    # The null block is 0. To compare it with each of thousands takes longer.
    return len(blocks) == expected and all(blocks)
