"""Many processes store into one directory with a tenth of the capacity they need, and some are
killed: the capacity must never be exceeded.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import TierError
from kvtier.harness.file_writers import (
    OBJECT_BYTES,
    PAYLOAD_BYTES,
    bytes_at_once,
    open_tier,
    start,
    temporaries,
)
from kvtier.testing.objects import buffer
from kvtier.tiers.base import ObjectRef

COUNTS = (2, 8, 16)
MIN_CAPACITY = 4 << 20
"""The records and directories of sixteen writers need room as well."""


@dataclass(slots=True)
class WritersResult:
    """The sums over all writers, and what was found in the directory."""

    stored: int = 0
    dropped: int = 0
    read: int = 0
    wrong: int = 0
    failed: int = 0
    killed: int = 0
    over_bytes: int = 0
    temporaries: int = 0
    unverified: int = 0
    cleaned_seconds: float = 0.0


def run(root: Path, count: int, objects: int, limit_seconds: float = 600.0) -> WritersResult:
    """``count`` processes store ``objects`` together; half of them are killed at random moments."""
    root.mkdir(parents=True)
    capacity = max(objects * OBJECT_BYTES // 10, MIN_CAPACITY)
    each = objects // count
    processes = [start(root, capacity, number * each, each, objects) for number in range(count)]
    found, generator = WritersResult(), random.Random(count)
    victims = processes[: count // 2]
    deadline = time.monotonic() + limit_seconds
    kill_at = time.monotonic() + 1.0
    while any(process.poll() is None for process in processes):
        found.over_bytes = max(found.over_bytes, bytes_at_once(root) - capacity)
        if victims and time.monotonic() > kill_at:
            victim = victims.pop()
            if victim.poll() is None:
                victim.kill()
                found.killed += 1
            kill_at = time.monotonic() + generator.uniform(0.3, 1.5)
        if time.monotonic() > deadline:
            for process in processes:
                process.kill()
            found.failed += 1
            break
        time.sleep(0.02)
    for process in processes:
        output, errors = process.communicate()
        if process.returncode == 0:
            counts = json.loads(output.splitlines()[-1])
            for name in ("stored", "dropped", "read"):
                setattr(found, name, getattr(found, name) + counts[name])
            found.wrong += counts["wrong"] + counts["errors"]
        elif process.returncode > 0 or "Traceback" in errors:
            found.failed += 1
    _reopen(root, capacity, found)
    return found


def _reopen(root: Path, capacity: int, found: WritersResult) -> None:
    """Opens the directory again: all temporary files are removed, and every file verifies."""
    started = time.monotonic()
    tier = open_tier(root, capacity)
    while temporaries(root) and time.monotonic() - started < 60:
        tier.maintain()
        time.sleep(0.2)
    found.cleaned_seconds = time.monotonic() - started
    found.temporaries = len(temporaries(root))
    into = buffer(PAYLOAD_BYTES)
    for path in root.rglob("*.kv"):
        try:
            tier.read(ObjectRef(path.parents[2].name, bytes.fromhex(path.stem)), into)
        except TierError:
            found.unverified += path.exists()
    tier.close()
