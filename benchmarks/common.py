"""What the benchmarks share: options, tables, the one ratio at the end."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvtier.tiers.filesystem.index import Index

NAMESPACE = "e" * 32


def options(
    description: str, *more: Callable[[argparse.ArgumentParser], object]
) -> argparse.Namespace:
    """Command line with ``--json`` and whatever ``more`` adds."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )
    for add in more:
        add(parser)
    return parser.parse_args()


def machine() -> str:
    """What the numbers were measured on, without naming the host."""
    kernel = platform.release().split("-")[0]
    python = platform.python_version()
    return f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {kernel}, Python {python}"


def report(
    as_json: bool,
    title: str,
    head: Sequence[str],
    rows: Iterable[Sequence[object]],
    ratio: float,
    judged: str,
    measured: Mapping[str, float] | None = None,
) -> None:
    """Prints the table and, last, the ratio with what it is judged by.

    ``measured``: single values by name, for programs that read the JSON object.
    """
    table = [[str(cell) for cell in row] for row in rows]
    if as_json:
        json.dump(
            {
                "title": title,
                "machine": machine(),
                "head": list(head),
                "rows": table,
                "ratio": ratio,
                "judged": judged,
                "measured": dict(measured or {}),
            },
            sys.stdout,
        )
        print()
        return
    widths = [max(len(row[column]) for row in [list(head), *table]) for column in range(len(head))]
    print(f"{title} ({machine()})")
    for row in [list(head), *table]:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print(f"ratio {ratio:.3f} ({judged})")


def progress(text: str) -> None:
    """One line on a terminal, nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def bytes_per_object(objects: int) -> float:
    """Memory of an index that holds this many objects in prompts of 32."""
    tracemalloc.start()
    index = Index(1 << 60, objects)
    random_bytes = random.Random(2).randbytes
    previous = b""
    for number in range(objects):
        key = b"\0" + random_bytes(32)
        index.reserve(4096)
        index.publish(NAMESPACE, key, 4096, previous if number % 32 else b"")
        previous = key
    held = tracemalloc.get_traced_memory()[0] / objects
    tracemalloc.stop()
    return held
