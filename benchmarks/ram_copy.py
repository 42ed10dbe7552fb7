"""Copies between a KV cache in host memory and the host pool, compared with memcpy.

Both sides move the same chunks from and to the same memory-backed file, one chunk per call, and
alternate. A chunk consists of many pieces, one per block and layer or segment, at random places
of the cache. The peer is one C call that gathers (numpy's take) or scatters as many pieces of the
same size in the same order. One memcpy of the whole contiguous chunk is shown as well; no
scattered cache can reach it, because it touches pages in order. A ratio is the median over pairs
of runs that follow each other within a second, because the speed of shared memory varies by a
fifth from minute to minute.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from kvtier.transfer.codec import build_codec
from kvtier.transfer.engine import Copy, Direction
from kvtier.transfer.factory import make_engine
from kvtier.transfer.host_pool import open_pool
from kvtier.transfer.synthetic_layouts import LAYOUT_NAMES, CacheGeometry, make_cache

sys.path.insert(0, str(Path(__file__).parent))
from common import options, progress, report

MIB = 1 << 20


def add_options(parser: argparse.ArgumentParser) -> None:
    """Command line."""
    parser.add_argument(
        "--directory", type=Path, default=Path("/dev/shm"), help="a memory-backed directory"
    )
    parser.add_argument(
        "--chunk-tokens", type=int, nargs="+", default=[64, 256, 1024], help="object sizes"
    )
    parser.add_argument("--cache-mib", type=int, default=512, help="size of the KV cache")
    parser.add_argument(
        "--repeat", type=int, default=25, help="turns; the median of their ratios counts"
    )


def seconds(call: Callable[[int], None], count: int) -> float:
    """For ``call(0..count-1)``."""
    started = time.perf_counter()
    for number in range(count):
        call(number)
    return time.perf_counter() - started


def measure(
    name: str, tokens: int, cache_mib: int, repeat: int, directory: Path
) -> dict[str, float]:
    """Median GB/s of all ways, both directions' ratios, and the chunk's size."""
    geometry = CacheGeometry(layers=32, blocks=0, block=32, heads=8, head_dim=128)
    blocks = cache_mib * MIB // (geometry.layers * geometry.page_bytes)
    layout = make_cache(name, CacheGeometry(32, blocks, 32, 8, 128), "cpu")
    for tensor in layout.caches.values():
        tensor.view(torch.int16).random_(-30_000, 30_000)
    codec = build_codec(layout.caches, layout, tokens)
    per_chunk = tokens // 32
    ids = list(range(1, blocks))
    random.Random(7).shuffle(ids)
    count = len(ids) // per_chunk
    shard = codec.groups[0].shard_bytes
    engine = make_engine(layout.caches, codec)
    with tempfile.NamedTemporaryFile(dir=directory, prefix="kvtier-bench-") as file:
        file.truncate(shard * count)
        pool = open_pool(Path(file.name), shard * count)
    engine.attach(pool)
    segments = codec.groups[0].segments
    pieces = per_chunk * len(segments)
    piece = shard // pieces
    # From torch's allocator, like the KV cache: numpy's asks for huge pages.
    apart = torch.ones((pieces * count, piece), dtype=torch.uint8).numpy()
    plain = torch.ones(shard * count, dtype=torch.uint8).numpy()
    copies = [
        Copy(0, n * shard, 0, tuple(ids[n * per_chunk : (n + 1) * per_chunk])) for n in range(count)
    ]

    def slot(n: int) -> np.ndarray:
        return pool.memory[n * shard : (n + 1) * shard]

    # The tier's order: block by block, and of each block its segments, which lie a layer apart.
    order = [
        [
            block * len(segments) + segment
            for block in copy.blocks
            for segment in range(len(segments))
        ]
        for copy in copies
    ]
    if len(segments) > 1:
        order = [
            [
                piece % len(segments) * (pieces * count // len(segments)) + piece // len(segments)
                for piece in one
            ]
            for one in order
        ]
    places = [np.array(one) % (pieces * count) for one in order]

    def memcpy_to_host(n: int) -> None:
        np.take(apart, places[n], axis=0, out=slot(n).reshape(pieces, piece), mode="clip")

    def memcpy_to_device(n: int) -> None:
        apart[places[n]] = slot(n).reshape(pieces, piece)

    def whole_to_host(n: int) -> None:
        slot(n)[...] = plain[n * shard : (n + 1) * shard]

    def whole_to_device(n: int) -> None:
        plain[n * shard : (n + 1) * shard] = slot(n)

    calls: dict[str, Callable[[int], None]] = {
        "whole to_host": whole_to_host,
        "whole to_device": whole_to_device,
        "memcpy to_host": memcpy_to_host,
        "tier to_host": lambda n: (engine.submit([copies[n]], Direction.TO_HOST), None)[1],
        "memcpy to_device": memcpy_to_device,
        "tier to_device": lambda n: (engine.submit([copies[n]], Direction.TO_DEVICE), None)[1],
    }
    taken: dict[str, list[float]] = {each: [] for each in calls}
    for turn in range(repeat + 1):
        progress(f"{name}, {tokens} tokens, turn {turn}")
        for each in calls if turn % 2 else reversed(calls):
            spent = seconds(calls[each], count)
            engine.synchronize()
            if turn:
                taken[each].append(spent)
    engine.close()
    found = {
        each: shard * count / statistics.median(values) / 1e9 for each, values in taken.items()
    }
    for way in ("to_host", "to_device"):
        turns = zip(taken[f"memcpy {way}"], taken[f"tier {way}"], strict=True)
        found[f"ratio {way}"] = statistics.median(peer / ours for peer, ours in turns)
    return {**found, "MiB": shard / MIB, "KiB": piece / 1024}


def main() -> None:
    """Runs all layouts and sizes."""
    chosen = options(__doc__ or "", add_options)
    rows, ratios = [], []
    for name in (LAYOUT_NAMES[0], LAYOUT_NAMES[1], LAYOUT_NAMES[2]):
        for tokens in chosen.chunk_tokens:
            got = measure(name, tokens, chosen.cache_mib, chosen.repeat, chosen.directory)
            for direction in ("to_host", "to_device"):
                ratio = got[f"ratio {direction}"]
                ratios.append(ratio)
                rates = [f"{got[f'{way} {direction}']:.2f}" for way in ("whole", "memcpy", "tier")]
                rows.append(
                    (
                        name,
                        f"{got['MiB']:.0f}",
                        f"{got['KiB']:.0f}",
                        direction,
                        *rates,
                        f"{ratio:.3f}",
                    )
                )
    progress("")
    report(
        chosen.json,
        "RAM tier against memcpy",
        (
            "layout",
            "MiB",
            "piece KiB",
            "direction",
            "whole GB/s",
            "memcpy GB/s",
            "tier GB/s",
            "ratio",
        ),
        rows,
        min(ratios),
        "worst of tier / memcpy; at least 0.9 is wanted",
    )


if __name__ == "__main__":
    main()
