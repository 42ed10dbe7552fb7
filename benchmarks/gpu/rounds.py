"""Conversations that come back: every round sends each with its whole history and new tokens. The
GPU's cache holds a fraction of them.

KVTier and vLLM's OffloadingConnector run alternately. The ratio compares the medians of the time of
all rounds but the first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.common import options, progress, report
from benchmarks.gpu import engines

START, ADDED, ANSWER = 4096, 512, 32
PAUSE_SECONDS = 1.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """How much there is to hold."""
    parser.add_argument("--conversations", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--gpu-blocks", type=int, default=4096, help="blocks of 16 tokens")
    parser.add_argument("--repetitions", type=int, default=2, help="engines of each kind")


def measure(mode: str, chosen: argparse.Namespace) -> None:
    """One engine, all rounds."""
    import numpy as np
    from vllm import SamplingParams

    llm, run_directory = engines.make_engine(
        mode,
        chosen,
        Path(chosen.scratch),
        num_gpu_blocks_override=chosen.gpu_blocks,
        max_model_len=32_768,
    )
    generator = np.random.default_rng(1)
    sampling = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True, detokenize=False)

    def new(count: int) -> list[int]:
        return [int(each) for each in generator.integers(1000, 127_000, size=count)]

    def ask(prompts: list[list[int]]) -> list[Any]:
        requests = [{"prompt_token_ids": each} for each in prompts]
        return list(llm.generate(requests, sampling, use_tqdm=False))

    engines.wait_attached(run_directory, lambda: ask([new(33)]), chosen.tensor_parallel)
    ask([new(8193)] * 2)
    ask([new(300) for _ in range(chosen.conversations)])
    talks = [new(START) for _ in range(chosen.conversations)]
    rows = []
    for _ in range(chosen.rounds):
        begin = time.perf_counter()
        outputs = ask(talks)
        seconds = time.perf_counter() - begin
        cached = sum(each.num_cached_tokens or 0 for each in outputs)
        rows.append({"seconds": seconds, "cached": cached, "prompt": sum(map(len, talks))})
        talks = [
            talk + list(each.outputs[0].token_ids) + new(ADDED)
            for talk, each in zip(talks, outputs, strict=True)
        ]
        time.sleep(PAUSE_SECONDS)
    engines.finish(chosen.scratch, mode, {"rows": rows}, llm)


def main() -> None:
    """Measures both alternately and prints the table."""
    chosen = options(__doc__ or "", engines.add_options, add_options)
    if chosen.child:
        measure(chosen.child, chosen)
        return
    modes = [chosen.only] if chosen.only else ["kvtier", "peer"]
    passed = [each for each in sys.argv[1:] if each != "--json"]
    later: dict[str, list[float]] = {mode: [] for mode in modes}
    table: list[list[object]] = []
    with engines.scratch_directory() as scratch:
        for number in range(1 if chosen.quick else chosen.repetitions):
            for mode in modes:
                progress(f"repetition {number + 1}: {mode}")
                rows = engines.run_child(__file__, mode, Path(scratch), passed)["rows"]
                seconds = sum(each["seconds"] for each in rows[1:])
                reuse = sum(r["cached"] for r in rows[1:]) / sum(r["prompt"] for r in rows[1:])
                later[mode].append(seconds)
                table.append([mode, f"{rows[0]['seconds']:.2f}", f"{seconds:.2f}", f"{reuse:.3f}"])
    medians = {mode: statistics.median(each) for mode, each in later.items()}
    ratio = medians[modes[0]] / medians[modes[-1]]
    report(
        chosen.json,
        f"{chosen.conversations} conversations, TP={chosen.tensor_parallel}, {chosen.runner}",
        ["engine", "first round s", "later rounds s", "reused"],
        table,
        ratio,
        "later rounds of KVTier by the peer's; at most 0.95",
    )


if __name__ == "__main__":
    main()
