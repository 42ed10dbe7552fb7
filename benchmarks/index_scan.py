"""Building the index of a file tier's directory, compared with walking it.

The peer walks the same directory and reads each file's size and time without keeping anything,
which no index can beat. Files are empty and written once per run. The third row is a start from
the index that the tier has saved, after which it serves; the scan that verifies the index runs in
the background. The ratio is the time of the walk divided by the time of the scan. Bytes per object
are those of an index in which every object but the first of a prompt of 32 follows another one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from kvtier.config.models import FileSystemTierDocument
from kvtier.tiers.base import TierLimits
from kvtier.tiers.filesystem import FileSystemTier
from kvtier.tiers.filesystem.layout import SAVED_INDEX
from kvtier.tiers.filesystem.walker import object_path

sys.path.insert(0, str(Path(__file__).parent))
from common import bytes_per_object, options, progress, report

NAMESPACE = "c" * 32
SIZE = 2 * 4096


def add_options(parser: argparse.ArgumentParser) -> None:
    """Command line."""
    parser.add_argument(
        "--directory", type=Path, default=Path("/var/tmp"), help="where to make the files"
    )
    parser.add_argument("--objects", type=int, default=1_000_000, help="how many")
    parser.add_argument("--repeat", type=int, default=3, help="scans; the median counts")


def fill(root: Path, objects: int) -> None:
    """Makes files of the right names and sizes."""
    for number in range(objects):
        path = object_path(str(root), NAMESPACE, b"\0" + os.urandom(32))
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        os.ftruncate(descriptor, SIZE)
        os.close(descriptor)
        if number % 5_000 == 0:
            progress(f"making files: {number} of {objects}")


def walk(directory: str) -> int:
    """Counts files and asks for the status of each. The tier's own records are left out."""
    count = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                count += walk(entry.path)
            else:
                entry.stat(follow_symlinks=False)
                count += 1
    return count


def open_tier(root: Path, objects: int, *, saved: bool = False) -> FileSystemTier:
    """A tier that has scanned, or restored its ``saved`` index."""
    if not saved:
        (root / NAMESPACE / SAVED_INDEX).unlink(missing_ok=True)
    document = FileSystemTierDocument(name="bench", path=str(root), sharing="Pod")
    tier = FileSystemTier(document, TierLimits(capacity_bytes=1 << 50), max_objects=objects)
    tier.open(lambda *_: None)
    return tier


class Stopwatch:
    """Seconds since it was made: ``wall``, and ``cpu`` of this thread."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.thread_time()

    def stop(self) -> tuple[float, float]:
        """Wall and CPU seconds."""
        return time.perf_counter() - self._wall, time.thread_time() - self._cpu


def median(times: list[tuple[float, float]]) -> tuple[float, float]:
    """Of each kind of seconds."""
    return statistics.median(each[0] for each in times), statistics.median(
        each[1] for each in times
    )


def main() -> None:
    """Makes the files, then walks and scans in turns."""
    chosen = options(__doc__ or "", add_options)
    root = Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=chosen.directory))
    walks, scans, restores = [], [], []
    try:
        fill(root, chosen.objects)
        walk(str(root))
        for turn in range(chosen.repeat):
            progress(f"turn {turn}")
            watch = Stopwatch()
            found = walk(str(root))
            walks.append(watch.stop())
            watch = Stopwatch()
            tier = open_tier(root, chosen.objects)
            scans.append(watch.stop())
            if tier.usage().objects != chosen.objects or found != chosen.objects:
                raise SystemExit(
                    f"found {tier.usage().objects} objects and {found} files of {chosen.objects}"
                )
            tier.close()
        progress("saving the index")
        tier = open_tier(root, chosen.objects)
        watch = Stopwatch()
        tier.maintain()
        saving = watch.stop()
        tier.close()
        for turn in range(chosen.repeat):
            progress(f"restoring, turn {turn}")
            watch = Stopwatch()
            tier = open_tier(root, chosen.objects, saved=True)
            restores.append(watch.stop())
            if not tier.maintenance.verifying or tier.usage().objects != chosen.objects:
                raise SystemExit("the saved index was not used")
            tier.close()
    finally:
        progress("removing files")
        shutil.rmtree(root, ignore_errors=True)
    progress("")
    walked, scanned = median(walks), median(scans)
    restored = median(restores)
    progress("memory")
    held = bytes_per_object(chosen.objects)
    progress("")
    report(
        chosen.json,
        f"Scan of {chosen.objects} objects",
        ("what", "seconds", "CPU seconds", "objects/s", "bytes/object"),
        [
            (name, f"{wall:.2f}", f"{cpu:.2f}", f"{chosen.objects / wall:,.0f}", size)
            for name, (wall, cpu), size in (
                ("walk alone", walked, "-"),
                ("tier scan", scanned, f"{held:.0f}"),
                ("saved index", restored, f"{held:.0f}"),
                ("saving it", saving, "-"),
            )
        ],
        walked[0] / scanned[0],
        "walk / scan in time; a start in 10 s and at most 120 bytes per object are wanted",
    )


if __name__ == "__main__":
    main()
