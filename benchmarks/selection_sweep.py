"""Selection by cost in simulated time, compared with the better of the two pure choices.

The benchmark runs the real store with a tier of constant speed and an engine of known prefill
rate; nothing else takes time. For each bandwidth, a few prompts train the estimates. Then each
prompt length is requested once with ``Cost`` and once with loading forced; the time to recompute
everything is known. The ratio is the worst time to first token divided by that of the better pure
choice.
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
from tests.support.simulated_request import Choice, Simulation  # noqa: E402
from tests.support.simulated_tier import SimulatedTier  # noqa: E402

from common import options, progress, report  # noqa: E402
from kvtier.store.cost_model import Prefill  # noqa: E402

MIB = 1 << 20
ENGINES = {
    "8B, one H200, 128 KiB a token": (Prefill(22.3e-6, 2.1e-10), 32 * MIB),
    "slow, 16 KiB a token": (Prefill(400e-6, 4e-9), 4 * MIB),
}
"""Prefill rate and bytes per 256-token chunk. The second recomputes as slowly as 40 MB/s."""
PROMPTS = (512, 1_024, 2_048, 8_192, 32_768)
WARM_UP = (4_096, 512, 8_192, 16_384)
DECADES = range(6, 10)
TARGET = 1.05


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps", type=int, default=5, help="bandwidths per decade, from 1 MB/s to 10 GB/s"
    )
    parser.add_argument("--latency-milliseconds", type=float, default=0.1, help="of each read")


def main() -> None:
    """Runs the sweep."""
    chosen = options(
        "Selection by cost against loading everything and recomputing everything.", _more
    )
    bandwidths = [
        10 ** (decade + i / chosen.steps) for decade in DECADES for i in range(chosen.steps)
    ] + [1e10]
    rows: list[tuple[str, ...]] = []
    worst = 0.0
    for name, (engine, chunk_bytes) in ENGINES.items():
        for in_order in (False, True):
            ratios = dict.fromkeys(PROMPTS, 0.0)
            loaded = dict.fromkeys(PROMPTS, 0)
            for bandwidth in bandwidths:
                progress(
                    f"{name}, {'in order' if in_order else 'shared'}, {bandwidth / 1e6:.0f} MB/s"
                )
                tier = SimulatedTier(
                    "disk",
                    bandwidth,
                    latency_seconds=chosen.latency_milliseconds / 1e3,
                    in_order=in_order,
                )
                simulation = Simulation(engine, [tier], chunk_bytes=chunk_bytes)
                for tokens in WARM_UP:
                    simulation.run(simulation.prompt(tokens), choice=Choice.RECOMPUTE)
                for tokens in WARM_UP:
                    simulation.run(simulation.prompt(tokens))
                    simulation.quiet()
                for tokens in PROMPTS:
                    cost = simulation.run(simulation.prompt(tokens))
                    simulation.quiet()
                    load = simulation.run(simulation.prompt(tokens), choice=Choice.LOAD)
                    simulation.quiet()
                    best = min(load.first_token_seconds, cost.recompute_seconds)
                    ratios[tokens] = max(ratios[tokens], cost.first_token_seconds / best)
                    loaded[tokens] += cost.usable > 0
            for tokens in PROMPTS:
                worst = max(worst, ratios[tokens])
                way = "in order" if in_order else "shared"
                rows.append(
                    (
                        name,
                        way,
                        str(tokens),
                        f"{loaded[tokens]}/{len(bandwidths)}",
                        f"{ratios[tokens]:.3f}",
                    )
                )
    progress("")
    report(
        chosen.json,
        f"{len(bandwidths)} bandwidths, latency {chosen.latency_milliseconds:g} ms, simulated time",
        ("engine", "reads", "prompt", "loaded at", "worst ratio"),
        rows,
        worst,
        f"worst time to first token / better of loading and recomputing; target {TARGET}",
    )


if __name__ == "__main__":
    main()
