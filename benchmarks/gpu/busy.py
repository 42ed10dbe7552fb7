"""Reloads while others decode: time to first token of a prompt that left the GPU's cache, and the
latency between the tokens of others beside it.

A number of streams decode all the time. For each length, prompts are computed, sent again at once
(hits in the GPU's cache), pushed out of it by others, and sent once more (reloads from the memory
tier). Latencies between tokens are those of the streams within the windows of these requests. A
request with a long context slows one step of all others down even when nothing is moved; the hits
show how much. The peer is vLLM's OffloadingConnector. The ratio is the largest one of KVTier's time
to first token and the peer's.

vLLM hashes a prompt in a thread that keeps the interpreter for up to 5 ms at a time; 32,768 tokens
take 4.8 ms on one processor. ``--set sys:switchinterval=0.0005`` shows whether that is what the
streams wait for.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.common import options, progress, report
from benchmarks.gpu import engines, step_trace

LENGTHS = (4096, 16_384, 32_768)
FILL_TOKENS, FILLS = 16_384, 6
"""Others that push a prompt out of the GPU's cache."""
STREAM_TOKENS = 512
QUIET_SECONDS = 3.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """How much runs beside the reloads."""
    parser.add_argument("--streams", type=int, default=32, help="requests that decode")
    parser.add_argument("--repetitions", type=int, default=4, help="prompts of each length")
    parser.add_argument("--gpu-blocks", type=int, default=8192, help="blocks of 16 tokens")
    parser.add_argument(
        "--set",
        nargs="+",
        default=(),
        metavar="MODULE:NAME=NUMBER",
        help="constants of the engines' processes; sys:switchinterval is one",
    )


def percentile(values: list[float], share: float) -> float:
    """In milliseconds; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1e3 if ordered else 0.0


class Load:
    """An engine, its streams, and the latencies between their tokens."""

    def __init__(self, engine: Any, chosen: argparse.Namespace) -> None:
        import numpy as np

        self._engine = engine
        self._chosen = chosen
        self._generator = np.random.default_rng(1)
        self._sent = 0
        self.latencies: list[tuple[float, float]] = []
        """When a token came, and how long after the one before it."""

    def prompt(self, tokens: int) -> list[int]:
        """One that no other request has."""
        return [int(each) for each in self._generator.integers(1000, 127_000, size=tokens)]

    async def ask(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds to the first token, and tokens reused."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        one = SamplingParams(
            max_tokens=1,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._sent += 1
        begin, first, cached = time.perf_counter(), 0.0, 0
        name = f"r{self._sent}"
        async for output in self._engine.generate({"prompt_token_ids": prompt}, one, name):
            first = first or time.perf_counter() - begin
            cached = cached or int(output.num_cached_tokens or 0)
        return first, cached

    async def stream(self, name: str) -> None:
        """Decodes until it is cancelled. Short answers, so that all hold a bounded share."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        many = SamplingParams(
            max_tokens=engines.scaled(self._chosen, STREAM_TOKENS),
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        turn = 0
        while True:
            turn, last = turn + 1, 0.0
            request = {"prompt_token_ids": self.prompt(engines.scaled(self._chosen, 64))}
            async for _ in self._engine.generate(request, many, f"{name}-{turn}"):
                now = time.perf_counter()
                if last:
                    self.latencies.append((now, now - last))
                last = now

    async def windows(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Sends prompts one after the other: median time, tokens reused, latencies beside them."""
        found, spans = [], []
        for prompt in prompts:
            begin = time.perf_counter()
            found.append(await self.ask(prompt))
            spans.append((begin, time.perf_counter()))
            await asyncio.sleep(0.4)
        beside = [
            latency
            for at, latency in self.latencies
            if any(begin <= at <= end for begin, end in spans)
        ]
        return {
            "milliseconds": statistics.median(seconds for seconds, _ in found) * 1e3,
            "cached": min(cached for _, cached in found),
            "p50": percentile(beside, 0.5),
            "p99": percentile(beside, 0.99),
        }


async def measure(mode: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """One engine."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments, run_directory = engines.engine_arguments(mode, chosen, Path(chosen.scratch))
    arguments |= engines.cache_arguments(chosen, 34_816)
    load = Load(AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments)), chosen)
    await load.ask(load.prompt(engines.scaled(chosen, 8193)))
    deadline = time.monotonic() + engines.ATTACH_SECONDS
    while run_directory is not None and time.monotonic() < deadline:
        sessions = engines.status(run_directory).get("sessions", [])
        ready = [each for each in sessions if each["role"] == "worker" and each["ready"]]
        if len(ready) >= chosen.tensor_parallel:
            break
        await load.ask(load.prompt(engines.scaled(chosen, 33)))
        await asyncio.sleep(0.05)
    streams = [asyncio.create_task(load.stream(f"s{n}")) for n in range(chosen.streams)]
    await asyncio.sleep(QUIET_SECONDS)
    begin = time.perf_counter()
    await asyncio.sleep(QUIET_SECONDS)
    quiet = [latency for at, latency in load.latencies if at > begin]
    rows: dict[str, Any] = {
        "quiet": {"p50": percentile(quiet, 0.5), "p99": percentile(quiet, 0.99)}
    }
    for length in LENGTHS:
        prompts = [
            load.prompt(engines.scaled(chosen, length) + 1)
            for _ in range(2 if chosen.quick else chosen.repetitions)
        ]
        row = {"computed": await load.windows(prompts[:2])}
        for prompt in prompts[2:]:
            await load.ask(prompt)
        row["hit"] = await load.windows(prompts[-2:])
        for _ in range(FILLS):
            await load.ask(load.prompt(engines.scaled(chosen, FILL_TOKENS)))
        await asyncio.sleep(1.0)
        row["again"] = await load.windows(prompts)
        rows[str(length)] = row
        engines.leave(chosen.scratch, mode, rows)
    for each in streams:
        each.cancel()
    return rows


def main() -> None:
    """Measures both and prints the table."""
    chosen = options(__doc__ or "", engines.add_options, add_options)
    if chosen.child:
        result = asyncio.run(measure(chosen.child, chosen))
        engines.leave(chosen.scratch, chosen.child, result)
        sys.stdout.flush()
        os._exit(0)
    modes = [chosen.only] if chosen.only else ["kvtier", "peer"]
    passed = [each for each in sys.argv[1:] if each != "--json"]
    found: dict[str, dict[str, Any]] = {}
    with engines.scratch_directory(chosen) as scratch:
        if chosen.set:
            step_trace.deliver(scratch / "trace")
            os.environ[step_trace.CONSTANTS] = " ".join(chosen.set)
        for mode in modes:
            progress(f"measuring {mode}")
            found[mode] = engines.run_child(__file__, mode, scratch, passed)
    done = [each for each in map(str, LENGTHS) if all(each in rows for rows in found.values())]
    table: list[list[object]] = []
    measured: dict[str, float] = {}
    for mode, rows in found.items():
        table.append([mode, "-", "quiet", "-", "-", *_latencies(rows["quiet"])])
        for length in done:
            again = rows[length]["again"]
            measured[f"{mode}.{length}.ms"] = again["milliseconds"]
            quiet = rows["quiet"]["p99"] or 1
            measured[f"{mode}.{length}.p99_by_quiet"] = again["p99"] / quiet
            measured[f"{mode}.{length}.hit_p99_by_quiet"] = rows[length]["hit"]["p99"] / quiet
            for what, row in rows[length].items():
                taken = f"{row['milliseconds']:.1f}"
                table.append([mode, length, what, taken, row["cached"], *_latencies(row)])
    first, last = found[modes[0]], found[modes[-1]]
    report(
        chosen.json,
        f"beside {chosen.streams} streams, TP={chosen.tensor_parallel}, {chosen.runner}",
        ["engine", "tokens", "prompts", "first token ms", "reused", "p50 ms", "p99 ms"],
        table,
        max(
            first[each]["again"]["milliseconds"] / last[each]["again"]["milliseconds"]
            for each in done
        ),
        "time to first token of KVTier by the peer's, at the worst length; at most 1",
        measured,
    )


def _latencies(row: dict[str, Any]) -> list[object]:
    return [f"{row['p50']:.2f}", f"{row['p99']:.2f}"]


if __name__ == "__main__":
    main()
