"""Memory and longest pause of a replica while it is built, compared with 60 MB and 5 ms.

A snapshot of 750,000 keys arrives, as tierd sends it; a part of the keys is in RAM. Memory is that
of the process before and after, without the messages. Pauses are processor seconds of one message,
because pauses of a busy machine are not the code's: the engine's scheduler waits for the
interpreter lock that long. The peer is a dictionary with the same content. The ratio is the
allowed memory divided by what is used.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from kvtier.store.types import MEMORY_BIT
from kvtier.tierd.replication import SNAPSHOT_KEYS, Replica
from kvtier.tierd.wire import Delta

sys.path.insert(0, str(Path(__file__).parent))
from common import options, progress, report

ALLOWED_MB = 60.0
ALLOWED_SECONDS = 0.005
DISK_BIT = MEMORY_BIT << 1
LOCATION = 5 << 32 | 7
Apply = Callable[[Delta], object]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Command line."""
    parser.add_argument("--keys", type=int, default=750_000, help="in the replica")
    parser.add_argument("--in-ram", type=int, default=30_000, help="of them")
    parser.add_argument("--repeat", type=int, default=3, help="runs; the medians count")


def dictionary() -> tuple[Apply, object]:
    """What a replica would be as one dictionary."""
    values: dict[bytes, int] = {}

    def apply(message: Delta) -> None:
        for key, bits, location in message.added:
            values[key] = values.get(key, 0) | bits | location << 20

    return apply, values


def replica() -> tuple[Apply, object]:
    """The replica itself."""
    made = Replica()
    return made.apply, made


STRUCTURES = {"dictionary": dictionary, "replica": replica}


def measure(name: str, keys: int, in_ram: int) -> tuple[float, float]:
    """Megabytes, and the processor seconds of the longest message. For a process of its own, which
    has no memory to use again."""
    apply, _held = STRUCTURES[name]()
    process = psutil.Process()
    gc.disable()
    before, longest = process.memory_info().rss, 0.0
    for sequence, start in enumerate(range(0, keys, SNAPSHOT_KEYS), 1):
        added = tuple(
            (b"\0" + os.urandom(32), DISK_BIT | MEMORY_BIT, LOCATION)
            if number < in_ram
            else (b"\0" + os.urandom(32), DISK_BIT, 0)
            for number in range(start, min(start + SNAPSHOT_KEYS, keys))
        )
        message = Delta(sequence=sequence, added=added, snapshot=sequence == 1)
        began = time.thread_time()
        apply(message)
        longest = max(longest, time.thread_time() - began)
    return (process.memory_info().rss - before) / 1e6, longest


def main() -> None:
    """Runs the benchmark."""
    given = options(__doc__ or "", add_options)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in STRUCTURES}
    for run in range(given.repeat):
        progress(f"run {run + 1} of {given.repeat}")
        for name, runs in found.items():
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                runs.append(pool.apply(measure, (name, given.keys, given.in_ram)))
    rows = [
        (
            name,
            f"{statistics.median(size for size, _ in runs):.1f}",
            f"{statistics.median(pause for _, pause in runs) * 1e3:.2f}",
        )
        for name, runs in found.items()
    ]
    used = statistics.median(size for size, _ in found["replica"])
    report(
        given.json,
        f"replica of {given.keys} keys, {given.in_ram} of them in RAM",
        ("structure", "MB", "longest message ms"),
        rows,
        ALLOWED_MB / used,
        f"allowed: {ALLOWED_MB:g} MB and {ALLOWED_SECONDS * 1e3:g} ms",
    )


if __name__ == "__main__":
    main()
