"""Chunks through LMCache's engine to and from a GPU: identical bytes first, then rates.

One rank of the CacheEngine path with the KV of a Llama 3.1 8B in ATOM's form. Chunks are stored,
the cache is overwritten, and they are loaded into other blocks; every byte is compared on the
device. Kernels that write and read the blocks run right before each copy. The rates are those of
``CacheEngine.store`` and ``retrieve``, with checksums, verification and the copy to LMCache's
memory. The ratio is the rate of loads and the raw copy of page-locked memory.

Needs a CUDA device and lmcache 0.5.6, and neither vLLM nor a network. ``--device cpu`` is a trial
of the program.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.common import options, progress, report

from kvtier.engines.atom.layout import byte_layout
from kvtier.engines.common.jobs import BlockRun
from kvtier.engines.lmcache.block_copier import BlockCopier
from kvtier.engines.lmcache.config import require_lmcache
from kvtier.engines.lmcache.transfers import LoadTransfer, StoreTransfer
from kvtier.errors import KVTierError
from kvtier.transfer.calibration import SCRATCH_BYTES, calibrate
from kvtier.transfer.factory import make_engine
from kvtier.transfer.startup_check import pageable_scratch, pinned_scratch, verify_round_trip

if TYPE_CHECKING:
    from kvtier.engines.lmcache.cache import RankCache

BLOCK_TOKENS, CHUNK_TOKENS = 16, 256
BLOCKS_PER_CHUNK = CHUNK_TOKENS // BLOCK_TOKENS
NAMESPACE = "c" * 32


@dataclass(slots=True)
class Layer:
    """As ATOM's ``KVCacheTensor``."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor


@dataclass(slots=True)
class Rank:
    """One rank. ``rows``: its KV as bytes by block."""

    device: torch.device
    rows: list[torch.Tensor]
    copier: BlockCopier
    cache: RankCache

    def fill(self, seed: int, blocks: slice) -> None:
        """Launches kernels that write random bytes; they are the same for each seed."""
        generator = torch.Generator(self.device).manual_seed(seed)
        for each in self.rows:
            each[blocks].random_(0, 256, generator=generator)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--device", default="cuda", help="cpu: a trial of the program")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--chunks", type=int, default=32, help="of 256 tokens, per repetition")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")


def require(device: str) -> None:
    """Ends the program with what is missing."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("cache_engine.py needs a CUDA device; --device cpu is a trial without one")
    try:
        require_lmcache()
    except KVTierError as error:
        raise SystemExit(f"cache_engine.py: {error}; install lmcache 0.5.6") from error


def open_rank(chosen: argparse.Namespace, scratch: Path) -> Rank:
    """Makes the KV of ``2 * chunks`` chunks and LMCache's engine for it, in memory alone."""
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    from kvtier.engines.lmcache.cache import open_cache

    device = torch.device(chosen.device)
    blocks = 2 * chosen.chunks * BLOCKS_PER_CHUNK
    shape_k, shape_v = (blocks, 8, 16, BLOCK_TOKENS, 8), (blocks, 8, 128, BLOCK_TOKENS)
    layers = {
        layer: Layer(
            torch.zeros(shape_k, dtype=torch.bfloat16, device=device),
            torch.zeros(shape_v, dtype=torch.bfloat16, device=device),
        )
        for layer in range(chosen.layers)
    }
    layout = byte_layout(dict(layers), blocks, BLOCK_TOKENS, CHUNK_TOKENS)
    engine = make_engine(layout.tensors, layout.codec)
    host = pageable_scratch if device.type == "cpu" else pinned_scratch
    verify_round_trip(layout.tensors, layout.codec, engine, host)
    if device.type == "cuda":
        calibrate(engine, host(SCRATCH_BYTES))
    print(f"copy engine: {engine.kind or 'cpu'}", file=sys.stderr)
    copier = BlockCopier(engine, host)
    gigabytes = 2 * chosen.chunks * (copier.shard_bytes + (1 << 20)) / (1 << 30)
    config = scratch / "lmcache.yaml"
    config.write_text(
        f"chunk_size: {CHUNK_TOKENS}\nlocal_cpu: true\nmax_local_cpu_size: {gigabytes:.3f}\n"
    )
    cache = open_cache(config, NAMESPACE, 1, 0, copier, CHUNK_TOKENS)
    return Rank(device, list(layout.tensors.values()), copier, cache)


def key(seed: int, chunk: int) -> bytes:
    """The key of a chunk: group 0 and 32 bytes."""
    return b"\0" + seed.to_bytes(16, "big") + chunk.to_bytes(16, "big")


def run_of(chunk: int) -> BlockRun:
    """The blocks of a chunk, in reverse, so that nothing is in one piece."""
    first = chunk * BLOCKS_PER_CHUNK
    return BlockRun(0, 0, tuple(reversed(range(first, first + BLOCKS_PER_CHUNK))))


def turn(rank: Rank, seed: int, chunks: int) -> tuple[float, float]:
    """Stores the lower half of the cache and loads it into the upper half; returns the seconds of
    both. Ends the program if a byte differs."""
    half = chunks * BLOCKS_PER_CHUNK
    rank.fill(seed, slice(0, half))
    fence, began = rank.copier.fence(), time.perf_counter()
    for chunk in range(chunks):
        problem = rank.cache.store(StoreTransfer(key(seed, chunk), 1, run_of(chunk), fence))
        if problem:
            raise SystemExit(f"chunk {chunk} was not stored: {problem}")
    stored = time.perf_counter() - began
    expected = [each[:half].clone() for each in rank.rows]
    rank.fill(seed + 1, slice(0, 2 * half))
    # Kernels that still read the blocks: the load must come after them.
    noise = [each[half:].clone() for each in rank.rows]
    transfer = LoadTransfer(
        tuple(key(seed, chunk) for chunk in range(chunks)),
        (1,) * chunks,
        tuple(run_of(chunks + chunk) for chunk in range(chunks)),
        rank.copier.fence(),
    )
    began = time.perf_counter()
    rank.cache.load(transfer)
    loaded = time.perf_counter() - began
    if transfer.loaded != chunks:
        raise SystemExit(f"{transfer.loaded} of {chunks} chunks loaded: {transfer.failure}")
    for index, rows in enumerate(rank.rows):
        if not torch.equal(rows[half:], expected[index]):
            raise SystemExit(f"tensor {index}: bytes that were loaded differ from those stored")
    rank.fill(seed + 1, slice(0, 2 * half))
    for index, rows in enumerate(rank.rows):
        if not torch.equal(rows[half:], noise[index]):
            raise SystemExit(f"tensor {index}: a block was loaded while a kernel still read it")
    return stored, loaded


def link_bytes_per_second(device: torch.device, size: int) -> float:
    """The raw copy of page-locked memory to the device, the best of five."""
    cuda = device.type == "cuda"
    host = torch.ones(size, dtype=torch.uint8, pin_memory=cuda)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(host, non_blocking=True)
        if cuda:
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return size / best


def measure(chosen: argparse.Namespace) -> tuple[list[list[object]], float]:
    """Returns the table's rows and the ratio."""
    with tempfile.TemporaryDirectory() as directory:
        rank = open_rank(chosen, Path(directory))
        try:
            times: list[tuple[float, float]] = []
            for number in range(2 if chosen.quick else 6):
                progress(f"repetition {number}")
                times.append(turn(rank, 2 * number, chosen.chunks))
            size = chosen.chunks * rank.copier.shard_bytes
            link = link_bytes_per_second(rank.device, size)
        finally:
            rank.cache.close()
            rank.copier.close()
    store, load = (size / statistics.median(each[way] for each in times[1:]) for way in (0, 1))
    rows: list[list[object]] = [
        ["raw link", size >> 20, f"{link / 1e9:.2f}"],
        ["store", size >> 20, f"{store / 1e9:.2f}"],
        ["retrieve", size >> 20, f"{load / 1e9:.2f}"],
    ]
    return rows, load / link


def main() -> None:
    """Compares, measures, and prints the table."""
    chosen = options(__doc__ or "", add_options)
    require(chosen.device)
    rows, ratio = measure(chosen)
    device: Any = torch.cuda.get_device_name() if chosen.device.startswith("cuda") else "cpu"
    report(
        chosen.json,
        f"CacheEngine path, {device}, {chosen.chunks} chunks, bytes identical",
        ["", "MiB", "GB/s"],
        rows,
        ratio,
        "retrieve by the raw link; there is no limit, because LMCache's memory sets it",
    )


if __name__ == "__main__":
    main()
