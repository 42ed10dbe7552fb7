"""Sequences that are aborted while they are parked: when ATOM frees their blocks, none is saved."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.atom_schedules import Bench
from tests.support.atom_tiers import DISK, RAM, RankFaults

from kvtier.engines.atom.token_keys import chain
from kvtier.keys import group_prefix
from kvtier.testing.atom_sequence import Status

CHUNK = 8
PROMPT = list(range(41))
"""Five chunks and a token."""


@pytest.mark.parametrize("fails", [0.0, 1.0])
def test_nothing_is_saved_from_blocks_that_are_about_to_be_freed(fails: float) -> None:
    bench = Bench.make()
    tierd, loads = bench.tiers.tierd, bench.tiers.connector.loads
    bench.add(PROMPT, number=1)
    bench.run()
    bench.forget_gpu()
    # The first chunk is in GPU memory again, and then no tier has it.
    limits, loads._limits = loads._limits, replace(loads._limits, min_load_tokens=1_000)
    bench.add(PROMPT[: CHUNK + 1], number=2)
    bench.run()
    loads._limits = limits
    first = group_prefix(0) + chain(PROMPT, CHUNK)[0]
    tierd._free.append(tierd.ram.pop(first))
    del tierd.disk[first]
    tierd._delta(removed={first: RAM | DISK})
    bench.tiers.clock.now += 10

    bench.tiers.ranks.faults = RankFaults(progress=0.0)
    seq = bench.add(PROMPT, number=3)
    bench.engine.step()
    assert seq.status is Status.WAITING_FOR_REMOTE_KVS
    assert seq.offload_load_start_tokens == CHUNK
    bench.engine.scheduler.abort(seq)
    bench.engine.step()
    assert seq.awaits_aborted_load
    stored = tierd.stored
    bench.tiers.ranks.faults = RankFaults(progress=1.0, load_fails=fails)
    bench.run()
    assert not seq.block_table
    assert tierd.stored == stored
    bench.check()
    bench.check_end()
