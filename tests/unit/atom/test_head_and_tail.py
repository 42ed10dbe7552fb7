"""The head of a prompt is computed while its tail comes from a slow tier, in simulated time."""

from __future__ import annotations

import pytest
from tests.support.atom_handoff_simulation import CHUNK, HandoffSimulation
from tests.support.simulated_tier import SimulatedTier

from kvtier.engines.atom.head_split import Tail, first_step, split
from kvtier.store.cost_model import Prefill

ENGINE = Prefill(31.2e-6, 2.95e-10)
"""64K tokens take 3.3 s, as measured for an 8B model on one GPU."""
CHUNK_BYTES = 9_380 * 4_096
"""Loading 64K tokens at 2 GB/s takes 4.9 s."""
TOKENS = 65_536


def warm(bytes_per_second: float) -> HandoffSimulation:
    """An engine that has measured its prefill, and the disk, with other prompts."""
    disk = SimulatedTier("disk", bytes_per_second, latency_seconds=1e-4)
    simulation = HandoffSimulation(ENGINE, disk, CHUNK_BYTES)
    for number in range(1, 4):
        simulation.prefill_seconds(simulation.new(number, 32_769))
    for number in range(4, 8):
        simulation.prefill_seconds(simulation.on_disk(number, TOKENS + 1))
    return simulation


def test_64k_tokens_from_a_2_gb_per_second_disk_take_at_most_0_7_of_recomputing() -> None:
    simulation = warm(2e9)
    recomputing = simulation.prefill_seconds(simulation.new(20, TOKENS + 1))
    taken = simulation.prefill_seconds(simulation.on_disk(21, TOKENS + 1))
    loading_alone = TOKENS // CHUNK * CHUNK_BYTES / 2e9
    assert loading_alone > 1.4 * recomputing
    assert taken <= 0.7 * recomputing, (taken, recomputing)
    assert "loads_failed" not in simulation.connector.get_statistics()


@pytest.mark.parametrize("bytes_per_second", [1e6, 2e8, 1e9, 2e9, 8e9, 3e10])
@pytest.mark.parametrize("tokens", [4_097, 16_385, 65_537])
def test_no_disk_makes_a_prompt_slower_than_recomputing(
    bytes_per_second: float, tokens: int
) -> None:
    simulation = warm(bytes_per_second)
    recomputing = simulation.prefill_seconds(simulation.new(30, tokens))
    taken = simulation.prefill_seconds(simulation.on_disk(31, tokens))
    assert taken <= 1.01 * recomputing


def test_the_boundary_is_where_head_and_tail_end_together() -> None:
    prefill = Prefill(1e-3, 0.0)
    tail = Tail(0, 0, 100, [0.1] * 10)
    # Computing and reading are equally fast: half each, and the tail a little earlier.
    assert split(tail, prefill) == 6
    assert split(Tail(0, 0, 100, [0.001] * 10), prefill) == 1
    assert split(Tail(0, 0, 100, [10.0] * 10), prefill) is None


def test_the_first_step_makes_a_later_one_end_at_the_boundary() -> None:
    assert first_step(0, 46_080, 8_192) == 46_080 % 8_192
    assert first_step(0, 16_384, 8_192) == 8_192
    assert first_step(100, 300, 8_192) == 200
