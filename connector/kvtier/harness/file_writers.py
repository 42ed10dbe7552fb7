"""Processes that write and read one directory as file tiers, and functions that inspect it from
outside.

``python -m kvtier.harness.file_writers ROOT CAPACITY FIRST COUNT TOTAL`` stores objects FIRST to
FIRST + COUNT - 1, reads some of its own and of the TOTAL objects, and prints one line of counts.
Every read is compared with what was stored.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvtier.config.models import FileSystemTierDocument
from kvtier.errors import TierError, TierMissError, TierNoSpaceError
from kvtier.testing.objects import buffer, make_object
from kvtier.tiers.base import ObjectMeta, ObjectRef, TierLimits
from kvtier.tiers.checksum import preferred
from kvtier.tiers.filesystem import FileSystemTier
from kvtier.tiers.filesystem.layout import WORKING_PREFIX
from kvtier.tiers.filesystem.walker import TEMPORARY_PREFIX

PAYLOAD_BYTES = 4096
OBJECT_BYTES = PAYLOAD_BYTES + 4096
NAMESPACE = "ab" * 16


def make(seed: int) -> tuple[ObjectRef, memoryview, ObjectMeta]:
    """Object ``seed``. Its key starts like a hash, so that objects spread over 64 directories."""
    _, payload, _ = make_object(seed, (PAYLOAD_BYTES,))
    spread = bytes([0, seed * 37 % 8, seed * 11 % 8])
    meta = ObjectMeta((PAYLOAD_BYTES,), preferred().kind, (preferred().digest(payload),))
    return ObjectRef(NAMESPACE, spread + seed.to_bytes(8, "big")), payload, meta


def open_tier(root: Path, capacity_bytes: int, sharing: str = "Node") -> FileSystemTier:
    """A tier over ``root``."""
    document = FileSystemTierDocument.model_validate(
        {"name": "shared", "path": str(root), "sharing": sharing, "direct_io": "Never"}
    )
    tier = FileSystemTier(document, TierLimits(capacity_bytes))
    tier.open(lambda *_: None)
    return tier


def temporaries(root: Path) -> list[str]:
    """Files below ``root`` that are being written or were left behind."""
    prefixes = (WORKING_PREFIX, TEMPORARY_PREFIX, ".eye-", ".probe-")
    return sorted(
        str(path.relative_to(root)) for path in root.rglob("*") if path.name.startswith(prefixes)
    )


def directory_bytes(root: Path) -> int:
    """The size of all files and directories below ``root``. A walk takes time: where others write,
    it may count a file that goes beside the one that takes its place. See ``bytes_at_once``.
    """
    return sum(_walk(root).values())


def bytes_at_once(root: Path) -> int:
    """The size of what two walks below ``root`` have both found. All of it was there at the moment
    between them, however long they took.
    """
    first, second = _walk(root), _walk(root)
    return sum(min(size, second[found]) for found, size in first.items() if found in second)


def _walk(root: Path) -> dict[tuple[str, int], int]:
    """Sizes by path and inode."""
    found: dict[tuple[str, int], int] = {}
    pending = [str(root)]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    try:
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(entry.path)
                            size = 4096
                        else:
                            size = entry.stat(follow_symlinks=False).st_size
                        found[entry.path, entry.inode()] = size
                    except OSError:
                        continue
        except OSError:
            continue
    return found


def start(
    root: Path, capacity_bytes: int, first: int, count: int, total: int
) -> subprocess.Popen[str]:
    """Starts a writer process."""
    command = [sys.executable, "-m", "kvtier.harness.file_writers", str(root), str(capacity_bytes)]
    return subprocess.Popen(
        [*command, str(first), str(count), str(total)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def main(arguments: Sequence[str]) -> int:
    """Runs one writer."""
    root, capacity_bytes, first, count, total = (
        Path(arguments[0]),
        *(int(each) for each in arguments[1:5]),
    )
    counts = {"stored": 0, "dropped": 0, "read": 0, "missed": 0, "wrong": 0, "errors": 0}
    tier = open_tier(root, capacity_bytes)
    into, generator = buffer(PAYLOAD_BYTES), random.Random(first)
    started = time.monotonic()
    for seed in range(first, first + count):
        try:
            tier.write(*make(seed))
            counts["stored"] += 1
        except TierNoSpaceError:
            counts["dropped"] += 1
        except TierError as error:
            counts["errors"] += 1
            print(error, file=sys.stderr)
        ref, payload, _ = make(generator.choice((seed, generator.randrange(total))))
        try:
            if tier.contains(ref) or tier.probe(ref):
                tier.read(ref, into)
                counts["read" if into == payload else "wrong"] += 1
        except TierMissError:
            counts["missed"] += 1
        except TierError as error:
            counts["wrong"] += 1
            print(error, file=sys.stderr)
    tier.close()
    print(json.dumps(counts | {"seconds": round(time.monotonic() - started, 2)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
