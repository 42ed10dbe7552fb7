"""File tier reads and writes with verification, compared with raw O_DIRECT.

Both sides move the same objects from and to the same page-aligned memory, in the same directories
and with the same number of threads, which is the queue depth. They take short turns, one after the
other, and each pair of turns gives a ratio, because a machine that does other work as well is
disturbed for longer than a turn. The median of these ratios counts. With several directories,
objects are spread over them, each with a tier of its own. The last ratio is the worst over all
sizes, depths and directions.

A third reader reads raw and computes the checksum of what it has read, on the same threads: what
this machine allows to anything that verifies. "of checked raw" is the tier's ratio to that. (Writes
have none: tierd computes checksums before it writes.)
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvtier.config.models import FileSystemTierDocument
from kvtier.tiers.base import ObjectMeta, ObjectRef, TierLimits
from kvtier.tiers.checksum import preferred
from kvtier.tiers.filesystem import FileSystemTier
from kvtier.tiers.filesystem.format import HEADER_BYTES

sys.path.insert(0, str(Path(__file__).parent))
from common import options, progress, report

MIB = 1 << 20
MIN_CAPACITY = 64 << 30
"""As of a real tier: nothing is evicted, and grants are as large as they become."""
NAMESPACE = "b" * 32
Job = tuple[ObjectRef, memoryview, ObjectMeta]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Command line."""
    parser.add_argument(
        "--directory",
        type=Path,
        nargs="+",
        default=[Path("/var/tmp")],
        help="where to make the files; several for several devices",
    )
    parser.add_argument(
        "--sizes-kib", type=int, nargs="+", default=[256, 2_048, 16_384, 65_536], help="of objects"
    )
    parser.add_argument("--total-mib", type=int, default=128, help="bytes per turn")
    parser.add_argument("--repeat", type=int, default=15, help="pairs of turns; the median counts")
    parser.add_argument(
        "--depths", type=int, nargs="+", default=[1, 8, 32], help="threads, for both"
    )


def raw_write(path: str, payload: memoryview) -> None:
    """One object's bytes, nothing else."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
    try:
        done = 0
        while done < payload.nbytes:
            done += os.pwrite(descriptor, payload[done:], done)
    finally:
        os.close(descriptor)


def raw_read(path: str, into: memoryview) -> None:
    """One object's bytes, nothing else."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        done = 0
        while done < into.nbytes:
            done += os.preadv(descriptor, [into[done:]], done)
    finally:
        os.close(descriptor)


def check_read(path: str, into: memoryview) -> None:
    """``raw_read``, and a checksum."""
    raw_read(path, into)
    preferred().digest(into)


def timed(pool: ThreadPoolExecutor, call: Callable[[int], None], count: int) -> float:
    """Seconds for ``call(0..count-1)`` on the pool."""
    started = time.perf_counter()
    list(pool.map(call, range(count)))
    return time.perf_counter() - started


def measure(
    directories: list[Path], size: int, total: int, repeat: int, threads: int
) -> dict[str, list[float]]:
    """GB/s of the tier and of raw I/O in each turn, both directions."""
    count = max(total // size, threads)
    slots = [memoryview(mmap.mmap(-1, size)) for _ in range(min(count, 2 * threads))]
    for slot in slots:
        slot[:] = os.urandom(size)
    metas = [ObjectMeta((size,), preferred().kind, (preferred().digest(slot),)) for slot in slots]
    refs = [
        ObjectRef(NAMESPACE, bytes([0]) + number.to_bytes(32, "big")) for number in range(count)
    ]
    limits = TierLimits(capacity_bytes=max(4 * count * (size + HEADER_BYTES), MIN_CAPACITY))
    tiers, raws = [], []
    for directory in directories:
        document = FileSystemTierDocument(
            name="bench", path=str(directory / "tier"), sharing="Pod", direct_io="Always"
        )
        tiers.append(FileSystemTier(document, limits))
        tiers[-1].open(lambda *_: None)
        raws.append(directory / "raw")
        raws[-1].mkdir()
    places = len(directories)
    seconds: dict[str, list[float]] = {
        "raw write": [],
        "tier write": [],
        "raw read": [],
        "checked read": [],
        "tier read": [],
    }
    with ThreadPoolExecutor(threads) as pool:

        def clear() -> None:
            for number, ref in enumerate(refs):
                tiers[number % places].delete(ref)
            for raw in raws:
                for file in raw.iterdir():
                    file.unlink()

        calls: dict[str, Callable[[int], None]] = {
            "raw write": lambda n: raw_write(f"{raws[n % places]}/{n}", slots[n % len(slots)]),
            "tier write": lambda n: tiers[n % places].write(
                refs[n], slots[n % len(slots)], metas[n % len(slots)]
            ),
            "raw read": lambda n: raw_read(f"{raws[n % places]}/{n}", slots[n % len(slots)]),
            "checked read": lambda n: check_read(f"{raws[n % places]}/{n}", slots[n % len(slots)]),
            "tier read": lambda n: (
                tiers[n % places].read(refs[n], slots[n % len(slots)]),
                None,
            )[1],
        }
        for turn in range(repeat + 1):
            for order in (("raw write", "tier write"), ("raw read", "checked read", "tier read")):
                # Alternate who goes first, so that neither side always finds the quieter disk.
                for name in order if turn % 2 else order[::-1]:
                    progress(f"{size >> 10} KiB, {threads} threads, turn {turn}, {name}")
                    # Each read fills slots that the next write uses again, so bytes match.
                    spent = timed(pool, calls[name], count)
                    if turn:
                        seconds[name].append(spent)
            clear()
    for tier, raw in zip(tiers, raws, strict=True):
        shutil.rmtree(raw)
        tier.close()
    return {
        name: [count * size / spent / 1e9 for spent in values] for name, values in seconds.items()
    }


def main() -> None:
    """Runs all sizes and depths."""
    chosen = options(__doc__ or "", add_options)
    rows, ratios = [], []
    for size, depth in ((size, depth) for size in chosen.sizes_kib for depth in chosen.depths):
        made = [
            Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=each)) for each in chosen.directory
        ]
        try:
            got = measure(made, size << 10, chosen.total_mib * MIB, chosen.repeat, depth)
        finally:
            for each in made:
                shutil.rmtree(each, ignore_errors=True)
        for direction in ("write", "read"):
            raw, tier = got[f"raw {direction}"], got[f"tier {direction}"]
            pairs = [ours / theirs for ours, theirs in zip(tier, raw, strict=True)]
            low, ratio, high = statistics.quantiles(pairs, n=4)
            checked = got[f"checked {direction}"] if direction == "read" else []
            beside = [ours / theirs for ours, theirs in zip(tier, checked, strict=False)]
            ratios.append(ratio)
            rows.append(
                (
                    size,
                    depth,
                    direction,
                    f"{statistics.median(raw):.2f}",
                    f"{statistics.median(tier):.2f}",
                    f"{ratio:.3f}",
                    f"{low:.2f} to {high:.2f}",
                    f"{statistics.median(beside):.3f}" if beside else "-",
                )
            )
    progress("")
    report(
        chosen.json,
        f"File tier against raw O_DIRECT, {len(chosen.directory)} directories, "
        f"checksums {preferred().kind}",
        (
            "KiB",
            "depth",
            "direction",
            "raw GB/s",
            "tier GB/s",
            "ratio",
            "half of the pairs",
            "of checked raw",
        ),
        rows,
        min(ratios),
        "worst of tier / raw; at least 0.95 is wanted",
    )


if __name__ == "__main__":
    main()
