"""Time to first token of a long prompt in files, with and without an answer before the promotion
has ended, in simulated time.

The benchmark runs the real store with a tier of constant speed, an engine of known prefill rate and
a link of constant speed between host and GPU; nothing else takes time. A prompt of 64K tokens of an
8B model is 8 GiB. The ratio is the time with early answers divided by the time without.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "connector"))

# The repository's tests, and not a package of that name that another distribution has installed.
sys.modules["tests"] = ModuleType("tests")
sys.modules["tests"].__path__ = [str(Path(__file__).resolve().parents[1] / "tests")]
from tests.support.simulated_request import (  # noqa: E402
    Choice,
    SimulatedRequest,
    Simulation,
)
from tests.support.simulated_tier import SimulatedTier  # noqa: E402

from common import options, report  # noqa: E402
from kvtier.store.cost_model import Prefill  # noqa: E402

ENGINE = Prefill(22.3e-6, 2.1e-10)
"""An 8B model on one H200."""
CHUNK_TOKENS, CHUNK_BYTES = 256, 32 << 20
TIERS = (
    ("one NVMe, 6.5 GB/s", 6.5e9),
    ("two, 13 GB/s", 13e9),
    ("four, 26 GB/s", 26e9),
    ("NFS, 3 GB/s", 3e9),
)
LINKS = (("8 GB/s", 8e9), ("PCIe 4, 25 GB/s", 25e9), ("PCIe 5, 50 GB/s", 50e9))
WARM_UP = (4_096, 2_048, 8_192, 16_384)


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=65_536, help="of the prompt")
    parser.add_argument("--in-ram", type=float, default=0.0, help="part of the prompt in RAM")


def first_token(
    tokens: int, in_ram: float, bandwidth: float, link: float, early: bool
) -> SimulatedRequest:
    """One request after a few that train the estimates."""
    tier = SimulatedTier("disk", bandwidth, latency_seconds=1e-4)
    simulation = Simulation(
        ENGINE,
        [tier],
        chunk_bytes=CHUNK_BYTES,
        threads=16,
        copy_bytes_per_second=link,
        early=early,
    )
    for warm_up in WARM_UP:
        simulation.run(simulation.prompt(warm_up), choice=Choice.RECOMPUTE)
    for warm_up in WARM_UP:
        simulation.run(simulation.prompt(warm_up))
        simulation.quiet()
    keys = simulation.prompt(tokens)
    head = keys[: int(in_ram * len(keys))]
    if head:
        simulation.run(head)
        simulation.quiet()
    return simulation.run(keys, prompt_tokens=tokens + CHUNK_TOKENS)


def main() -> None:
    """Runs every tier with every link."""
    chosen = options("Early answers in simulated time.", _more)
    rows: list[tuple[str, ...]] = []
    worst, best = 0.0, 1.0
    for tier, bandwidth in TIERS:
        for link, speed in LINKS:
            found = [
                first_token(chosen.tokens, chosen.in_ram, bandwidth, speed, early)
                for early in (False, True)
            ]
            plain, early = (request.first_token_seconds for request in found)
            ratio = early / plain
            worst, best = max(worst, ratio), min(best, ratio)
            loaded = found[1].usable * CHUNK_TOKENS
            rows.append((tier, link, f"{loaded}", f"{plain:.3f}", f"{early:.3f}", f"{ratio:.3f}"))
    report(
        chosen.json,
        f"{chosen.tokens} tokens, {chosen.in_ram:.0%} in RAM, simulated time",
        ("files on", "link", "tokens loaded", "without (s)", "early (s)", "ratio"),
        rows,
        worst,
        f"worst time to first token with / without early answers, never above 1; best {best:.3f}",
    )


if __name__ == "__main__":
    main()
