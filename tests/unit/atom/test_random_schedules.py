"""Random schedules of the ATOM stand-in, with evictions, aborts, lost sessions, late reports.

In each of them every token is the one that an engine without tiers samples, every object has the
bytes of its key, no chunk that a tier holds is saved again, no copy accesses a block that was given
away, no block is lost, and every sequence ends.
"""

from __future__ import annotations

from collections import Counter

import pytest
from tests.support.atom_schedules import run_schedule

SCHEDULES = 500
PARTS = 5


@pytest.mark.parametrize("part", range(PARTS))
def test_random_schedules_keep_tokens_blocks_and_sequences(part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(part, SCHEDULES, PARTS):
        seen.update(run_schedule(seed))
    # Otherwise the schedules would say little.
    for name, least in (
        ("stored", 500),
        ("loads_whole", 50),
        ("loads_failed", 20),
        ("preempted", 100),
        ("tails_requested", 100),
        ("unaligned", 2),
        ("successors", 3),
        ("late_report", 100),
        ("standstills_ended", 5),
    ):
        assert seen[name] >= least, (name, dict(seen))
