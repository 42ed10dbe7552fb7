"""Time to first token of a prompt that left the GPU's cache and lies in the memory tier.

Floor: the bytes of a rank by the measured link, and the time of a hit in the GPU's cache. The peer
is vLLM's OffloadingConnector. The ratio is the largest one of KVTier's time and the floor. At the
end, texts after a reload are compared with those after a hit.
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

LENGTHS = (4096, 16_384, 32_768, 65_536)
COMPARED = (300, 1000, 4097, 9001)
"""Lengths of the prompts whose texts are compared."""
TEXT_TOKENS = 32


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which prompts."""
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=LENGTHS, help="of the prompts, in tokens"
    )


def measure(mode: str, chosen: argparse.Namespace) -> None:
    """One engine: prompts computed, hit in the GPU's cache, reloaded after a reset of it."""
    import numpy as np
    from vllm import SamplingParams

    scratch = Path(chosen.scratch)
    started_at = time.monotonic()
    llm, run_directory = engines.make_engine(mode, chosen, scratch)
    up = time.monotonic() - started_at
    generator = np.random.default_rng(1)
    one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)

    def prompt(length: int) -> list[int]:
        return [int(each) for each in generator.integers(1000, 127_000, size=length)]

    def ask(tokens: list[int]) -> tuple[float, int]:
        begin = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": tokens}], one, use_tqdm=False)
        return (time.perf_counter() - begin) * 1e3, int(output.num_cached_tokens or 0)

    def step() -> None:
        ask(prompt(33))

    def reset() -> None:
        engines.reset_prefix_cache(llm, step)

    step()
    attach = engines.wait_attached(run_directory, step, chosen.tensor_parallel)
    for length in (4096, 16_384):
        tokens = prompt(engines.scaled(chosen, length) + 1)
        for _ in range(2):
            ask(tokens)
            engines.settle(run_directory, step)
        reset()
        ask(tokens)
    rows: list[dict[str, Any]] = []
    for length in chosen.lengths:
        for _ in range(2 if chosen.quick else 4):
            tokens = prompt(engines.scaled(chosen, length) + 1)
            row: dict[str, Any] = {"length": length, "cold": ask(tokens)[0]}
            engines.settle(run_directory, step)
            row["hit"] = ask(tokens)[0]
            row["reload"], row["tokens"] = [], []
            for _ in range(2):
                engines.settle(run_directory, step)
                reset()
                milliseconds, cached = ask(tokens)
                row["reload"].append(milliseconds)
                row["tokens"].append(cached)
            rows.append(row)
        engines.leave(chosen.scratch, mode, {"rows": rows, "up": up, "attach": attach})
    text = SamplingParams(max_tokens=TEXT_TOKENS, temperature=0, ignore_eos=True, detokenize=False)

    def write(tokens: list[int]) -> list[int]:
        (output,) = llm.generate([{"prompt_token_ids": tokens}], text, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    equal = 0
    for length in COMPARED:
        tokens = prompt(engines.scaled(chosen, length))
        ask(tokens)
        engines.settle(run_directory, step)
        after_hit = write(tokens)
        engines.settle(run_directory, step)
        reset()
        equal += write(tokens) == after_hit
    result: dict[str, Any] = {
        "rows": rows,
        "up": up,
        "attach": attach,
        "stored": stored(run_directory),
        "texts": f"{equal} of {len(COMPARED)} texts of {TEXT_TOKENS} tokens are those after a hit",
        "equal": equal / len(COMPARED),
    }
    engines.finish(chosen.scratch, mode, result, llm)


def stored(run_directory: Path | None) -> dict[str, Any]:
    """Objects in the memory tier, and the counters of tierd."""
    found = engines.status(run_directory) if run_directory is not None else {}
    counters = {each["name"]: each["value"] for each in found.get("counters", [])}
    objects = sum(each["objects"] for each in found.get("tiers", []))
    return {"objects": objects, "counters": counters}


def main() -> None:
    """Measures both in turn and prints the table."""
    chosen = options(__doc__ or "", engines.add_options, add_options)
    if chosen.child:
        measure(chosen.child, chosen)
        return
    link = engines.link_bytes_per_second(chosen)
    results: dict[str, dict[str, Any]] = {}
    passed = [each for each in sys.argv[1:] if each != "--json"]
    with engines.scratch_directory(chosen) as scratch:
        for mode in [chosen.only] if chosen.only else ["kvtier", "peer"]:
            progress(f"measuring {mode}")
            results[mode] = engines.run_child(__file__, mode, scratch, passed)
    table, worst = [], 0.0
    measured: dict[str, float] = {"link": link}
    for length in chosen.lengths:
        tokens = engines.scaled(chosen, length)
        floor = engines.bytes_per_token(chosen) * tokens / chosen.tensor_parallel / link * 1e3
        cells: list[object] = [length, f"{floor:.1f}"]
        for mode, result in results.items():
            rows = [row for row in result["rows"] if row["length"] == length]
            if not rows:
                cells += ["-"] * 4
                continue
            hit = statistics.median(row["hit"] for row in rows)
            times = statistics.median(each for row in rows for each in row["reload"])
            fewest = min(each for row in rows for each in row["tokens"])
            cold = statistics.median(row["cold"] for row in rows)
            cells += [f"{cold:.1f}", f"{hit:.1f}", f"{times:.1f}", fewest]
            measured[f"{mode}.{length}.ms"] = times
            measured[f"{mode}.{length}.by_floor"] = times / (floor + hit)
            whole = tokens // chosen.chunk_tokens * chosen.chunk_tokens
            measured[f"{mode}.{length}.reused"] = fewest / whole
            if mode == "kvtier" or chosen.only:
                worst = max(worst, times / (floor + hit))
        table.append(cells)
    head = ["tokens", "link ms"]
    for mode in results:
        head += [f"{mode} cold", "GPU hit", "reload ms", "reused"]
    for mode, result in results.items():
        measured |= {f"{mode}.attach": result["attach"], f"{mode}.equal": result.get("equal", 0.0)}
        if not chosen.json:
            up, attach = result["up"], result["attach"]
            print(f"{mode}: up {up:.1f} s, attached {attach:.1f} s later,", end=" ")
            print(result.get("stored", "cut"), result.get("texts", ""), sep="; ")
    report(
        chosen.json,
        f"reload, TP={chosen.tensor_parallel}, {chosen.runner}"
        f"{', in process' if chosen.in_process else ''}, link {link / 1e9:.1f} GB/s",
        head,
        table,
        worst,
        "reload by link and GPU hit, the worst length; at most 1.05",
        measured,
    )


if __name__ == "__main__":
    main()
