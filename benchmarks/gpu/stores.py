"""What stores cost where nothing is reused: time of a long prompt, and throughput.

Three engines, one after the other: without a connector, with a memory tier, and with a memory tier
and files in ``--directory`` (default: in shared memory, a medium without latency). All prompts are
new. Beside the times: which share of the whole chunks is in RAM, or in files, once the engine has
answered, and how long the tiers go on writing then. The ratio is the smallest throughput of an
engine with tiers by that of the one without.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.common import options, progress, report
from benchmarks.gpu import engines

from kvtier.config.models import FileSystemTierDocument

LENGTHS = (4096, 16_384, 65_536)
REQUESTS, PROMPT_TOKENS, ANSWER_TOKENS = 32, 8192, 64
MODES = ("none", "kvtier", "files")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where the files are, and how often everything is repeated."""
    parser.add_argument(
        "--directory", default="/dev/shm/kvtier-benchmark-files", help="of the files; emptied"
    )
    parser.add_argument("--repetitions", type=int, default=3, help="prompts and batches")


def measure(mode: str, chosen: argparse.Namespace) -> None:
    """One engine."""
    import numpy as np
    from vllm import SamplingParams

    scratch = Path(chosen.scratch)
    if mode == "files":
        tier = FileSystemTierDocument(name="files", path=chosen.directory, sharing="Node")
        engines.make_topology(scratch / "topology", chosen, tier=tier)
    connector = "none" if mode == "none" else "kvtier"
    llm, run_directory = engines.make_engine(connector, chosen, scratch)
    generator = np.random.default_rng(1)

    def new(count: int) -> list[int]:
        return [int(each) for each in generator.integers(1000, 127_000, size=count)]

    def ask(prompts: list[list[int]], tokens: int = 1) -> float:
        sampling = SamplingParams(
            max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False
        )
        begin = time.perf_counter()
        requests = [{"prompt_token_ids": each} for each in prompts]
        llm.generate(requests, sampling, use_tqdm=False)
        return time.perf_counter() - begin

    def step() -> None:
        ask([new(33)])

    def objects() -> dict[str, int]:
        tiers = engines.status(run_directory).get("tiers", []) if run_directory else []
        return {each["name"]: each["objects"] for each in tiers}

    def drain() -> float:
        return engines.drain(run_directory, step)

    engines.wait_attached(run_directory, step, chosen.tensor_parallel)
    prompt_tokens = engines.scaled(chosen, PROMPT_TOKENS)
    for length in (4097, 8193):
        ask([new(engines.scaled(chosen, length))])
    ask([new(prompt_tokens) for _ in range(4)], ANSWER_TOKENS)
    drain()
    repetitions = 1 if chosen.quick else chosen.repetitions
    result: dict[str, Any] = {"cold": {}, "stored": {}, "drain": [], "throughput": []}
    for length in LENGTHS:
        times = []
        before = objects()
        for _ in range(repetitions):
            times.append(ask([new(engines.scaled(chosen, length) + 1)]) * 1e3)
            drain()
        chunks = repetitions * (engines.scaled(chosen, length) // chosen.chunk_tokens)
        result["cold"][length] = statistics.median(times)
        result["stored"][length] = {
            name: (count - before.get(name, 0)) / chunks for name, count in objects().items()
        }
        engines.leave(chosen.scratch, mode, result)
    for _ in range(repetitions):
        seconds = ask([new(prompt_tokens) for _ in range(REQUESTS)], ANSWER_TOKENS)
        result["throughput"].append(REQUESTS * (prompt_tokens + ANSWER_TOKENS) / seconds)
        result["drain"].append(drain())
    if run_directory is not None:
        counters = engines.status(run_directory).get("counters", [])
        result["dropped"] = sum(each["value"] for each in counters if "drop" in each["name"])
    engines.finish(chosen.scratch, mode, result, llm)


def main() -> None:
    """Measures the three and prints the table."""
    chosen = options(__doc__ or "", engines.add_options, add_options)
    if chosen.child:
        measure(chosen.child, chosen)
        return
    passed = [each for each in sys.argv[1:] if each != "--json"]
    found: dict[str, dict[str, Any]] = {}
    for mode in MODES:
        progress(f"measuring {mode}")
        shutil.rmtree(chosen.directory, ignore_errors=True)
        with engines.scratch_directory(chosen, mode) as scratch:
            found[mode] = engines.run_child(__file__, mode, scratch, passed)
    shutil.rmtree(chosen.directory, ignore_errors=True)
    rates = {mode: statistics.median(each["throughput"]) for mode, each in found.items()}
    table: list[list[object]] = []
    measured: dict[str, float] = {}
    for mode, result in found.items():
        times = [f"{result['cold'][str(length)]:.0f}" for length in LENGTHS]
        stored = result["stored"][str(LENGTHS[-1])]
        for length in LENGTHS:
            cold = result["cold"][str(length)] / found["none"]["cold"][str(length)]
            measured[f"{mode}.{length}.cold"] = cold
        measured |= {f"{mode}.stored.{name}": share for name, share in stored.items()}
        measured[f"{mode}.throughput"] = rates[mode] / rates["none"]
        measured[f"{mode}.drain"] = statistics.median(result["drain"])
        measured[f"{mode}.dropped"] = result.get("dropped", 0)
        shares = ", ".join(f"{name} {share:.3f}" for name, share in stored.items()) or "-"
        table.append(
            [
                mode,
                *times,
                shares,
                f"{rates[mode]:.0f}",
                f"{rates[mode] / rates['none']:.4f}",
                f"{statistics.median(result['drain']):.2f}",
                result.get("dropped", "-"),
            ]
        )
    report(
        chosen.json,
        f"new prompts, TP={chosen.tensor_parallel}, {chosen.runner}",
        [
            "engine",
            *(f"{length} tokens, ms" for length in LENGTHS),
            f"stored of {LENGTHS[-1]}",
            "tokens/s",
            "by none",
            "writes after, s",
            "dropped",
        ],
        table,
        min(rates[mode] / rates["none"] for mode in MODES[1:]),
        "throughput with tiers by that without; at least 0.995 with RAM and 0.99 with files",
        measured,
    )


if __name__ == "__main__":
    main()
