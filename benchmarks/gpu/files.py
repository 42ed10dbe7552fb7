"""Reloads from files: time to first token beside reading the same bytes, and beside recomputing.

The memory tier is small. Prompts are computed, written to files in ``--directory``, pushed out of
the memory tier by others and out of the GPU's cache by a reset, and sent again. Where reading a
prompt's bytes raw takes less time than computing it, the ratio is the median time by the raw read
(or the copy to the GPU, whichever is longer) plus a hit in the GPU's cache. Elsewhere a reload
cannot be worth it, and the ratio is the longest single time by the median of recomputing.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.common import options, progress, report
from benchmarks.gpu import engines

from kvtier.config.models import FileSystemTierDocument

LENGTHS = (4096, 16_384, 32_768)
FILL_TOKENS = 16_384
READERS = 8
READ_BYTES = 4 << 30
"""At most so much is read to measure the raw rate."""
SMALLEST_BYTES = 64 << 10
"""A smaller file is no object."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where the files are, and how often everything is repeated."""
    parser.add_argument(
        "--directory", default="/dev/shm/kvtier-benchmark-files", help="of the files; emptied"
    )
    parser.add_argument("--repetitions", type=int, default=3, help="prompts of each length")
    parser.set_defaults(ram_gib=6)


def raw_bytes_per_second(directory: Path, smallest: int = SMALLEST_BYTES) -> float:
    """The rate at which ``READERS`` threads read the objects, past the page cache where the file
    system allows it."""
    files = [each for each in directory.rglob("*") if each.is_file()]
    sizes = {each: each.stat().st_size for each in files}
    chosen, total = [], 0
    for each in files:
        if sizes[each] >= smallest and total < READ_BYTES:
            chosen.append(each)
            total += sizes[each]
    if not chosen:
        raise SystemExit(f"no objects in {directory}")
    largest = max(sizes[each] for each in chosen)
    buffers = [mmap.mmap(-1, largest + mmap.PAGESIZE) for _ in range(READERS)]
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))

    def read(reader: int) -> int:
        done = 0
        for each in chosen[reader::READERS]:
            descriptor = _open_for_reading(each)
            try:
                done += os.preadv(descriptor, [buffers[reader]], 0)
            finally:
                os.close(descriptor)
        return done

    with ThreadPoolExecutor(READERS) as executor:
        begin = time.perf_counter()
        done = sum(executor.map(read, range(READERS)))
        return done / (time.perf_counter() - begin)


def _open_for_reading(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # tmpfs before Linux 6.6
        return os.open(path, os.O_RDONLY)


def measure(chosen: argparse.Namespace) -> None:
    """The engine."""
    import numpy as np
    from vllm import SamplingParams

    scratch = Path(chosen.scratch)
    tier = FileSystemTierDocument(name="files", path=chosen.directory, sharing="Node")
    engines.make_topology(scratch / "topology", chosen, tier=tier)
    llm, run_directory = engines.make_engine("kvtier", chosen, scratch)
    generator = np.random.default_rng(1)
    one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)

    def new(length: int) -> list[int]:
        return [int(each) for each in generator.integers(1000, 127_000, size=length)]

    def ask(tokens: list[int]) -> tuple[float, int]:
        begin = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": tokens}], one, use_tqdm=False)
        return (time.perf_counter() - begin) * 1e3, int(output.num_cached_tokens or 0)

    def step() -> None:
        ask(new(33))

    def reset() -> None:
        engines.reset_prefix_cache(llm, step)

    engines.wait_attached(run_directory, step, chosen.tensor_parallel)
    fill = engines.scaled(chosen, FILL_TOKENS)
    fills = engines.ram_bytes(chosen) // (engines.bytes_per_token(chosen) * fill) + 1
    repetitions = 2 if chosen.quick else chosen.repetitions
    smallest = 0 if chosen.cpu else SMALLEST_BYTES
    raw = 0.0
    rows: list[dict[str, Any]] = []
    for length in (FILL_TOKENS // 2, *LENGTHS):
        prompts = [new(engines.scaled(chosen, length) + 1) for _ in range(repetitions)]
        row: dict[str, Any] = {"length": length, "computed": [], "hit": [], "again": []}
        for prompt in prompts:
            row["computed"].append(ask(prompt)[0])
            engines.settle(run_directory, step)
            row["hit"].append(ask(prompt)[0])
        engines.drain(run_directory, step)
        for _ in range(fills):
            ask(new(fill))
            engines.drain(run_directory, step)
        for prompt in prompts:
            reset()
            step()
            row["again"].append(ask(prompt))
            engines.drain(run_directory, step)
        rows.append(row)
        if len(rows) == 1:
            raw = raw_bytes_per_second(Path(chosen.directory), smallest)
        engines.leave(chosen.scratch, "kvtier", {"rows": rows[1:], "raw": raw})
    result = {
        "rows": rows[1:],
        "raw": raw_bytes_per_second(Path(chosen.directory), smallest),
        "status": engines.status(run_directory) if run_directory else {},
    }
    engines.finish(chosen.scratch, "kvtier", result, llm)


def main() -> None:
    """Measures and prints the table."""
    chosen = options(__doc__ or "", engines.add_options, add_options)
    if chosen.child:
        measure(chosen)
        return
    passed = [each for each in sys.argv[1:] if each != "--json"]
    link = engines.link_bytes_per_second(chosen)
    shutil.rmtree(chosen.directory, ignore_errors=True)
    progress(f"measuring files in {chosen.directory}")
    try:
        with engines.scratch_directory(chosen) as scratch:
            found = engines.run_child(__file__, "kvtier", scratch, passed)
    finally:
        shutil.rmtree(chosen.directory, ignore_errors=True)
    raw = found["raw"]
    table: list[list[object]] = []
    measured: dict[str, float] = {"raw": raw}
    worst = 0.0
    for row in found["rows"]:
        size = engines.bytes_per_token(chosen) * engines.scaled(chosen, row["length"])
        computed, hit = statistics.median(row["computed"]), statistics.median(row["hit"])
        read = max(size / raw, size / chosen.tensor_parallel / link) * 1e3
        times = [milliseconds for milliseconds, _ in row["again"]]
        worth = read + hit < computed
        if worth:
            ratio, limit = statistics.median(times) / (read + hit), 1.15
        else:
            ratio, limit = max(times) / computed, 1.05
        worst = max(worst, ratio / limit)
        kind = "by_read" if worth else "by_computed"
        measured[f"{row['length']}.{kind}"] = ratio
        table.append(
            [
                row["length"],
                f"{computed:.1f}",
                f"{hit:.1f}",
                f"{read:.1f}",
                " ".join(f"{each:.1f}" for each in times),
                " ".join(str(cached) for _, cached in row["again"]),
                "read" if worth else "recomputing",
                f"{ratio:.3f}",
            ]
        )
    report(
        chosen.json,
        f"reload from files, {chosen.runner}, raw read {raw / 1e9:.1f} GB/s, "
        f"link {link / 1e9:.1f} GB/s",
        ["tokens", "computed", "hit", "read or copy", "again, ms", "reused", "beside", "ratio"],
        table,
        worst,
        "the worst row by its limit (1.15 beside the read, 1.05 beside recomputing); at most 1",
        measured,
    )


if __name__ == "__main__":
    main()
