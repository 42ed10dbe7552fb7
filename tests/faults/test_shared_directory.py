"""Many processes write to one directory. It never exceeds its capacity, even if some are killed."""

import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
from tests.support.tier_files import files_below

from kvtier.harness.file_writers import (
    OBJECT_BYTES,
    PAYLOAD_BYTES,
    bytes_at_once,
    make,
    open_tier,
    start,
    temporaries,
)
from kvtier.testing.objects import buffer
from kvtier.tiers.base import ObjectRef
from kvtier.tiers.filesystem.election import current_term, read_ledger

DEADLINE_SECONDS = 200.0


class Sampler:
    """Looks at the size of a directory all the time, in a thread of its own."""

    def __init__(self, root: Path) -> None:
        self.peak_bytes = 0
        self.samples = 0
        self._root = root
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(DEADLINE_SECONDS)

    def _look(self) -> None:
        while not self._stop.wait(0.02):
            self.peak_bytes = max(self.peak_bytes, bytes_at_once(self._root))
            self.samples += 1


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A directory in memory where there is one: these tests are about order, not about disks."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    directory = Path(tempfile.mkdtemp(prefix="kvtier-files-", dir=place))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def finish(processes: list["subprocess.Popen[str]"]) -> list[dict[str, int]]:
    """What each process has counted; those that were killed are left out."""
    results = []
    for process in processes:
        out, errors = process.communicate(timeout=DEADLINE_SECONDS)
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0, errors
            results.append(json.loads(out))
    return results


def verify_all(root: Path, capacity_bytes: int) -> int:
    """Opens the directory, reads and compares every object. Returns their number."""
    tier = open_tier(root, capacity_bytes)
    try:
        into, count = buffer(PAYLOAD_BYTES), 0
        for path in root.rglob("*.kv"):
            key = bytes.fromhex(path.stem)
            ref, payload, meta = make(int.from_bytes(key[3:], "big"))
            assert ref == ObjectRef(path.relative_to(root).parts[0], key)
            assert tier.read(ref, into) == meta
            assert into == payload
            count += 1
        return count
    finally:
        tier.close()


@pytest.mark.parametrize(("writers", "objects"), [(2, 2_000), (8, 10_000)])
def test_concurrent_writers_never_exceed_the_capacity(
    in_memory: Path, writers: int, objects: int
) -> None:
    root, capacity = in_memory / "tier", objects * OBJECT_BYTES // 10
    each = objects // writers
    with Sampler(root) as sampler:
        results = finish(
            [start(root, capacity, number * each, each, objects) for number in range(writers)]
        )
    assert sampler.samples > 10
    assert capacity // 4 < sampler.peak_bytes <= capacity
    assert sum(result["wrong"] for result in results) == 0
    assert sum(result["errors"] for result in results) == 0
    assert sum(result["read"] for result in results) > objects // 10
    assert sum(result["stored"] for result in results) > objects // 2
    assert temporaries(root) == []
    assert os.listdir(root / ".kvtier" / "writers") == []
    assert verify_all(root, capacity) > objects // 40


def janitor_of(
    root: Path, processes: list["subprocess.Popen[str]"]
) -> "subprocess.Popen[str] | None":
    """The process that is the janitor at this moment."""
    try:
        ledger = read_ledger(root, current_term(root, uncached=False))
    except OSError:
        return None
    holder = "" if ledger is None else str(ledger["holder"])
    return next((each for each in processes if f"-{each.pid}-" in holder), None)


def test_killed_writers_never_exceed_the_capacity_and_leave_no_partial_file(
    in_memory: Path,
) -> None:
    chance = random.Random(os.urandom(8))
    root, objects = in_memory / "tier", 6_000
    capacity = objects * OBJECT_BYTES // 10
    processes = [start(root, capacity, number * 750, 1_500, objects) for number in range(8)]
    running, killed, janitors = list(processes), 0, 0
    until = time.monotonic() + DEADLINE_SECONDS
    with Sampler(root) as sampler:
        while any(each.poll() is None for each in running) and time.monotonic() < until:
            time.sleep(chance.uniform(0.05, 0.5))
            if not files_below(root, ".kv"):
                continue
            living = [each for each in running if each.poll() is None]
            if killed >= 12 or not living:
                continue
            janitor = janitor_of(root, living) if killed % 2 else None
            victim = janitor or chance.choice(living)
            janitors += janitor is not None
            victim.kill()
            killed += 1
            if killed <= 6:
                another = start(root, capacity, chance.randrange(objects - 300), 300, objects)
                processes.append(another)
                running.append(another)
        results = finish(processes)
        # The next process cleans up.
        assert verify_all(root, capacity) > 0
    assert killed >= 8
    assert janitors >= 2
    assert sampler.peak_bytes <= capacity
    assert sum(result["wrong"] for result in results) == 0
    assert temporaries(root) == []
    assert os.listdir(root / ".kvtier" / "writers") == []
    assert len(os.listdir(root / ".kvtier")) == 2
