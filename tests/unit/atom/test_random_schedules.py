"""Random schedules of the ATOM stand-in, with evictions, aborts, lost sessions, late reports.

In each of them every token is the one that an engine without tiers samples, every object has the
bytes of its key, no chunk that a tier holds is saved again, no copy accesses a block that was given
away, no block is lost, and every sequence ends.
"""

from __future__ import annotations

from collections import Counter

from tests.support.atom_schedules import run_schedule

SCHEDULES = 500


def test_random_schedules_keep_tokens_blocks_and_sequences() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        seen.update(run_schedule(seed))
    # Otherwise the schedules would say little.
    for name, least in (
        ("stored", 2_500),
        ("loads_whole", 250),
        ("loads_failed", 100),
        ("preempted", 500),
        ("tails_requested", 500),
        ("unaligned", 10),
        ("successors", 10),
        ("late_report", 500),
        ("standstills_ended", 20),
    ):
        assert seen[name] >= least, (name, dict(seen))
