"""What stores cost an engine whose prompts never come back: tokens a second with and without it.

Real vLLM engines on the CPU, each in a process of its own with one thread: without a connector,
with a memory tier, and with a memory and a file tier. In each round all of them get the same
prompts, which no round repeats, one engine after the other; the order changes from round to round.
Every chunk is stored and none is found again.

The ratio is the worst median, over the rounds, of the tokens a second with KVTier divided by those
without in the same round. On a machine that other work keeps busy this shows the other work as
well. The processor time of the engine's process beside it shows what KVTier costs the engine; that
of tierd shows what it costs beside the engine, which matters where there is no core for it.

The model has a Llama's shape. The smaller it is, the less time there is to compute for each byte
that is stored: Llama 3.1 8B computes 120,000 operations for each byte of KV in bfloat16, the
default shape 23,000.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "connector"))

from common import options, progress, report
from kvtier import payload
from kvtier.harness.engine_process import DrivenEngine
from kvtier.harness.engine_requests import Requests
from kvtier.harness.engine_testbed import EngineOptions, EngineTestbed, start_reference_engine
from kvtier.harness.tiny_model import TinyLlama, prompt, write_llama

LEAST_RATIO = 0.97
BATCH_SECONDS = 580.0
PLAIN, RAM, FILES = "no connector", "RAM tier", "RAM and file tier"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The model, and what it computes."""
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--prompts", type=int, default=2, help="of each round")
    parser.add_argument("--tokens", type=int, default=512, help="of each prompt")
    parser.add_argument("--answer", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--chunk", type=int, default=128, help="tokens of a chunk")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="three short rounds")


@dataclass(frozen=True, slots=True)
class Cost:
    """One round on one engine: seconds, and processor seconds of the engine and of tierd.

    tierd's include what it does after the last token, until everything is stored.
    """

    wall: float
    engine: float
    tierd: float


def _cpu(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(each.cpu_times()[:2]) for each in processes)


class Contender:
    """One engine, with its tiers if it has any."""

    def __init__(self, engine: DrivenEngine, testbed: EngineTestbed | None) -> None:
        self._engine = engine
        self.testbed = testbed
        self._requests = Requests(engine)

    def run(self, prompts: Sequence[Sequence[int]], answer: int) -> Cost:
        """Computes all prompts at once, and waits until they are stored."""
        process = [psutil.Process(self._engine.pid)]
        tierd = [psutil.Process(self.testbed.daemon_pid())] if self.testbed is not None else []
        before, of_tierd, began = _cpu(process), _cpu(tierd), time.monotonic()
        names = [self._requests.add(list(each), answer) for each in prompts]
        answers = self._requests.finish(names, BATCH_SECONDS)
        wall, spent = time.monotonic() - began, _cpu(process) - before
        if any(answers[name]["cached"] for name in names):
            raise SystemExit("a prompt was found in a cache")
        if self.testbed is not None:
            self.testbed.settle_stores()
        return Cost(wall, spent, _cpu(tierd) - of_tierd)

    def stored_chunks(self) -> int:
        """Chunks that were stored so far."""
        return self.testbed.daemon_events("stores_committed") if self.testbed is not None else 0

    def close(self) -> None:
        """Ends the engine and what belongs to it."""
        if self.testbed is not None:
            self.testbed.close()
        else:
            self._engine.kill()


def start(name: str, scratch: Path, chosen: argparse.Namespace, bytes_per_token: int) -> Contender:
    """Starts one engine and waits until it is ready."""
    held = chosen.prompts * (chosen.tokens + chosen.answer + chosen.chunk) * 2
    engine: dict[str, object] = {
        "max_model_len": chosen.tokens + chosen.answer,
        "kv_cache_memory_bytes": held * bytes_per_token,
        "max_num_batched_tokens": chosen.tokens,
        "max_num_seqs": chosen.prompts,
    }
    model, written = scratch / "model", scratch / "payload"
    if name == PLAIN:
        log = scratch / "plain.log"
        plain = start_reference_engine(model, written, log, **engine)
        return Contender(plain.wait_ready(), None)
    tuning = EngineOptions(
        chunk_tokens=chosen.chunk,
        min_load_tokens=chosen.chunk,
        # Half of what one round stores: every store evicts.
        memory_bytes=2 * held * bytes_per_token,
        file_bytes=(1 << 30) if name == FILES else None,
    )
    directory = scratch / name.replace(" ", "-")
    testbed = EngineTestbed(directory, model, written, tuning)
    started = testbed.start(**engine)
    testbed.wait_attached()
    return Contender(started, testbed)


def measure(chosen: argparse.Namespace, scratch: Path) -> dict[str, list[Cost]]:
    """The rounds on each engine."""
    heads = chosen.hidden // 64
    shape = TinyLlama(
        layers=chosen.layers,
        hidden=chosen.hidden,
        heads=heads,
        kv_heads=max(1, heads // 8),
        head_dim=64,
        intermediate=3 * chosen.hidden,
    )
    bytes_per_token = shape.layers * 2 * shape.kv_heads * shape.head_dim * 4
    progress("writing the model")
    write_llama(scratch / "model", shape)
    payload.write(scratch / "payload", include=("harness", "testing"))
    found: dict[str, list[Cost]] = {PLAIN: [], RAM: [], FILES: []}
    contenders: dict[str, Contender] = {}
    try:
        for name in found:
            progress(f"starting: {name}")
            contenders[name] = start(name, scratch, chosen, bytes_per_token)
        order = list(found)
        for number in range(chosen.rounds + 1):
            prompts = [
                prompt(chosen.tokens, seed=number * chosen.prompts + each, vocabulary=512)
                for each in range(chosen.prompts)
            ]
            for name in order:
                progress(f"round {number} of {chosen.rounds}: {name}")
                cost = contenders[name].run(prompts, chosen.answer)
                if number:
                    # The first round warms up.
                    found[name].append(cost)
            order.append(order.pop(0))
        expected = (chosen.rounds + 1) * chosen.prompts * (chosen.tokens // chosen.chunk)
        for name, contender in contenders.items():
            stored = contender.stored_chunks()
            if name != PLAIN and stored < 0.98 * expected:
                raise SystemExit(f"{name}: {stored} of {expected} chunks were stored")
    finally:
        for contender in contenders.values():
            contender.close()
    return found


def main() -> None:
    """Runs the benchmark."""
    chosen = options(__doc__.splitlines()[0], add_options)
    if chosen.quick:
        chosen.rounds, chosen.tokens = 3, 256
    scratch = Path(tempfile.mkdtemp(prefix="kvtier-zero-reuse-"))
    try:
        found = measure(chosen, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    tokens = chosen.prompts * (chosen.tokens + chosen.answer)
    plain, rows, worst = found[PLAIN], [], float("inf")
    for name, costs in found.items():
        pairs = list(zip(plain, costs, strict=True))
        wall = statistics.median(base.wall / cost.wall for base, cost in pairs)
        engine = statistics.median(base.engine / cost.engine for base, cost in pairs)
        worst = min(worst, wall) if name != PLAIN else worst
        rows.append(
            (
                name,
                f"{tokens / statistics.median(cost.wall for cost in costs):.1f}",
                f"{wall:.3f}",
                f"{statistics.median(cost.engine for cost in costs) * 1e3 / tokens:.3f}",
                f"{engine:.3f}",
                f"{statistics.median(cost.tierd for cost in costs) * 1e3 / tokens:.4f}",
            )
        )
    progress("")
    report(
        chosen.json,
        f"{chosen.prompts} unique prompts of {chosen.tokens} tokens a round, {chosen.rounds} "
        f"rounds, Llama of {chosen.layers} layers and hidden size {chosen.hidden}, float32",
        ("engine", "tokens/s", "ratio", "engine CPU ms/token", "CPU ratio", "tierd CPU ms/token"),
        rows,
        worst,
        f"tokens/s with KVTier / without, worst median; at least {LEAST_RATIO:g}",
    )


if __name__ == "__main__":
    main()
