"""Throughput while a file tier hangs, compared with an engine without KVTier.

A real vLLM on CPU, once without KVTier and once with it, receives the same requests at once: half
have a prefix in a tier whose reads all hang, half are fresh. The fresh requests alone and all
requests are timed. The ratio is the worse of the two throughputs, relative to the engine without
KVTier; 1 means that the hung tier costs nothing.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from kvtier import payload as payload_writer
from kvtier.config.models import Daemon, Selection
from kvtier.harness.engine_process import DrivenEngine
from kvtier.harness.engine_requests import Requests
from kvtier.harness.engine_testbed import (
    CHUNK_TOKENS,
    EngineOptions,
    EngineTestbed,
    start_reference_engine,
)
from kvtier.harness.tiny_model import TinyLlama, prompt, write_llama

sys.path.insert(0, str(Path(__file__).parent))
from common import options, progress, report

MODEL = TinyLlama(hidden=512, heads=8, kv_heads=2, head_dim=64, intermediate=2048)
"""136 bytes of KV per MFLOP of a token, 17 times that of an 8B model. With the 200 times of the
tests' model, storing costs more than computing."""
CHUNKS = 6
NEW_TOKENS = 16
SECONDS = 300
ENGINE = {"max_num_seqs": 64, "kv_cache_memory_bytes": 128 << 20}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Command line."""
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"), help="where to work")
    parser.add_argument("--requests", type=int, default=64, help="with hits, and as many without")
    parser.add_argument("--repeat", type=int, default=3, help="turns; medians are compared")


def timed(
    engine: DrivenEngine, hits: list[list[int]], fresh: list[list[int]]
) -> tuple[float, float, list[list[int]]]:
    """Seconds until all fresh requests, and until all requests have ended; the tokens of all."""
    requests = Requests(engine)
    requests._count = int(time.monotonic() * 1000)  # names that no earlier turn used
    names: list[str] = []
    late: list[str] = []
    for hit, new in zip(hits, fresh, strict=True):
        names.append(requests.add(hit, NEW_TOKENS))
        late.append(requests.add(new, NEW_TOKENS))
    started = time.perf_counter()
    answers = dict(requests.finish(late, SECONDS))
    first = time.perf_counter() - started
    answers.update(requests.finish(names, SECONDS))
    return (
        first,
        time.perf_counter() - started,
        [answers[name]["tokens"] for name in [*names, *late]],
    )


def main() -> None:
    """Runs both engines."""
    chosen = options(__doc__ or "", add_options)
    directory = Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=chosen.directory))
    tuning = EngineOptions(
        daemon=Daemon.SIDECAR,
        persistence="Process",
        load_timeout_seconds=3,
        memory_bytes=512 << 20,
        selection=Selection.COST,
    )
    model, payload = (
        write_llama(directory / "model", MODEL, seed=0),
        payload_writer.write(directory / "payload", include=("harness", "testing")),
    )
    case = EngineTestbed(directory / "case", model, payload, tuning)
    plain = start_reference_engine(model, payload, directory / "plain.log", **ENGINE)
    taken: dict[str, list[float]] = {
        "fresh, without": [],
        "fresh, hung": [],
        "all, without": [],
        "all, hung": [],
    }
    try:
        case.start_daemon()
        engine = case.start(**ENGINE)
        plain.wait_ready()
        hits = [prompt(CHUNKS * CHUNK_TOKENS + 5, 10_000 + n) for n in range(chosen.requests)]
        for number, tokens in enumerate(hits):
            progress(f"storing {number} of {len(hits)}")
            case.requests().run(tokens)
            if number % 8 == 7:
                case.settle_stores()
        case.settle_stores()
        if len(case.files()) < CHUNKS * len(hits):
            raise SystemExit(
                f"{len(case.files())} objects were stored, {CHUNKS * len(hits)} are needed"
            )
        for turn in range(chosen.repeat):
            progress(f"turn {turn}")
            fresh = [
                prompt(CHUNKS * CHUNK_TOKENS + 5, 20_000 + 1_000 * turn + n)
                for n in range(chosen.requests)
            ]
            case.set_faults()
            case.restart_daemon(signal.SIGKILL)
            case.wait_attached()
            case.empty_gpu_cache()
            plain.call("reset_prefix_cache")
            case.set_faults(read={"hang": True})
            # In turns, so that neither always meets the quieter machine.
            if turn % 2:
                without_fresh, without_all, tokens_without = timed(plain, hits, fresh)
            with_fresh, with_all, tokens_with = timed(engine, hits, fresh)
            if turn % 2 == 0:
                without_fresh, without_all, tokens_without = timed(plain, hits, fresh)
            if tokens_with != tokens_without:
                raise SystemExit("the tokens differ")
            for name, value in zip(
                taken, (without_fresh, with_fresh, without_all, with_all), strict=True
            ):
                taken[name].append(value)
    finally:
        case.set_faults()
        case.close()
        plain.kill()
        shutil.rmtree(directory, ignore_errors=True)
    progress("")
    median = {name: statistics.median(values) for name, values in taken.items()}
    ratios = [median[f"{what}, without"] / median[f"{what}, hung"] for what in ("fresh", "all")]
    rows = [
        (
            what,
            f"{median[f'{what}, without']:.2f}",
            f"{median[f'{what}, hung']:.2f}",
            f"{ratio:.3f}",
        )
        for what, ratio in zip(("fresh", "all"), ratios, strict=True)
    ]
    report(
        chosen.json,
        f"{chosen.requests} requests with hits in a hung tier, {chosen.requests} fresh ones",
        ("requests", "without KVTier s", "with, hung s", "ratio"),
        rows,
        min(ratios),
        "worse of the two speeds against no KVTier; at least 0.98 is wanted",
    )


if __name__ == "__main__":
    main()
