"""Conversations that come back: every round sends each with its whole history and new tokens. The
GPU's cache holds a fraction of them.

KVTier and vLLM's OffloadingConnector run alternately. The ratio compares the medians of the time of
all rounds but the first. What can be reused of whole chunks is in the JSON object (``attainable``):
0.903 with chunks of 64 tokens and 0.894 with 256, in six rounds.
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

    start, added, answer = (engines.scaled(chosen, each) for each in (START, ADDED, ANSWER))
    llm, run_directory = engines.make_engine(
        mode,
        chosen,
        Path(chosen.scratch),
        **engines.cache_arguments(chosen, 32_768),
    )
    generator = np.random.default_rng(1)
    sampling = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True, detokenize=False)

    def new(count: int) -> list[int]:
        return [int(each) for each in generator.integers(1000, 127_000, size=count)]

    def ask(prompts: list[list[int]]) -> list[Any]:
        requests = [{"prompt_token_ids": each} for each in prompts]
        return list(llm.generate(requests, sampling, use_tqdm=False))

    engines.wait_attached(run_directory, lambda: ask([new(33)]), chosen.tensor_parallel)
    ask([new(engines.scaled(chosen, 8193))] * 2)
    ask([new(engines.scaled(chosen, 300)) for _ in range(chosen.conversations)])
    talks = [new(start) for _ in range(chosen.conversations)]
    attainable = [0] * len(talks)
    rows = []
    for _ in range(chosen.rounds):
        begin = time.perf_counter()
        outputs = ask(talks)
        seconds = time.perf_counter() - begin
        cached = sum(each.num_cached_tokens or 0 for each in outputs)
        rows.append(
            {
                "seconds": seconds,
                "cached": cached,
                "prompt": sum(map(len, talks)),
                "attainable": sum(attainable),
            }
        )
        engines.leave(chosen.scratch, mode, {"rows": rows})
        # The last token of an answer was never computed.
        attainable = [
            (len(talk) + answer - 1) // chosen.chunk_tokens * chosen.chunk_tokens for talk in talks
        ]
        talks = [
            talk + list(each.outputs[0].token_ids) + new(added)
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
    reused: dict[str, list[float]] = {mode: [] for mode in modes}
    table: list[list[object]] = []
    attainable = 0.0
    with engines.scratch_directory(chosen) as scratch:
        for number in range(1 if chosen.quick else chosen.repetitions):
            for mode in modes:
                progress(f"repetition {number + 1}: {mode}")
                rows = engines.run_child(__file__, mode, scratch, passed)["rows"]
                if len(rows) < chosen.rounds:
                    raise SystemExit(f"{mode}: {len(rows)} of {chosen.rounds} rounds: {rows}")
                seconds = sum(each["seconds"] for each in rows[1:])
                prompts = sum(each["prompt"] for each in rows[1:])
                reuse = sum(each["cached"] for each in rows[1:]) / prompts
                if mode == "kvtier":
                    attainable = sum(each["attainable"] for each in rows[1:]) / prompts
                later[mode].append(seconds)
                reused[mode].append(reuse)
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
        {f"{mode}.seconds": each for mode, each in medians.items()}
        | {f"{mode}.reused": statistics.median(each) for mode, each in reused.items()}
        | ({"ratio": ratio} if len(modes) > 1 else {})
        | ({"attainable": attainable} if attainable else {}),
    )


if __name__ == "__main__":
    main()
