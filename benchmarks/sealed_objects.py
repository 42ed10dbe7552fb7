"""What a keyed tag and encryption cost, compared with the checksum alone.

"memory": one thread verifies an object that has been read: its checksum, with a keyed BLAKE3 tag
(one thread, and BLAKE3's own threads), or decrypted with AES-256-GCM. "pause" is the longest time
for which another thread of the process did not run meanwhile. "write" and "read": the file tier
with all its threads. All variants alternate several times and the medians are compared. The ratio
is the worst, over all sizes, of the tier's reads with a tag to those without.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from blake3 import blake3

from kvtier.config.models import FileSystemTierDocument
from kvtier.tiers.base import ObjectMeta, ObjectRef, TierLimits
from kvtier.tiers.checksum import preferred
from kvtier.tiers.filesystem import FileSystemTier
from kvtier.tiers.filesystem.format import HEADER_BYTES, write_header
from kvtier.tiers.filesystem.seal import Encryptor, Sealing, open_object, write_tagged
from kvtier.tiers.isolation_keys import KeySet, make_key_set

sys.path.insert(0, str(Path(__file__).parent))
from common import options, progress, report

MIB = 1 << 20
NAMESPACE = "c" * 32
VARIANTS = ("checksum", "tag", "AES256GCM")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Command line."""
    parser.add_argument(
        "--directory", type=Path, default=Path("/var/tmp"), help="where to make the files"
    )
    parser.add_argument("--sizes-mib", type=int, nargs="+", default=[2, 8, 32], help="object sizes")
    parser.add_argument("--total-mib", type=int, default=256, help="bytes per run")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each; medians are compared")
    parser.add_argument("--threads", type=int, default=4, help="threads of the tier")


def some_keys() -> KeySet:
    """One key."""
    keys = make_key_set({"key": os.urandom(32)})
    if keys is None:
        raise LookupError("no key")
    return keys


class Heartbeat:
    """A thread that measures the longest time for which it did not run."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        last = time.perf_counter()
        while not self._stop.wait(0.0005):
            now = time.perf_counter()
            self.longest = max(self.longest, now - last)
            last = now


def in_memory(size: int, repeat: int) -> list[tuple[str, float, float]]:
    """GB/s and longest pause in milliseconds of each way to verify an object in memory."""
    keys = some_keys()
    payload = memoryview(mmap.mmap(-1, size))
    payload[:] = os.urandom(size)
    checksum = preferred()
    meta = ObjectMeta((size,), checksum.kind, (checksum.digest(payload),))
    ref = ObjectRef(NAMESPACE, b"\0" * 33)
    plain, tagged = (memoryview(bytearray(HEADER_BYTES)) for _ in range(2))
    write_header(plain, ref, meta)
    write_tagged(tagged, payload, ref, meta, keys.current)
    sealed, cipher_header = memoryview(mmap.mmap(-1, size)), memoryview(bytearray(HEADER_BYTES))
    encryptor = Encryptor(cipher_header, ref, meta, keys.current)
    encryptor.piece(payload, sealed)
    encryptor.finish()
    copy, header = memoryview(mmap.mmap(-1, size)), memoryview(bytearray(HEADER_BYTES))

    def decrypt() -> float:
        copy[:], header[:] = sealed, cipher_header
        started = time.perf_counter()
        open_object(header, copy, ref, keys)
        return time.perf_counter() - started

    def timed(call: Callable[[], object]) -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    many = blake3.AUTO
    calls: dict[str, Callable[[], float]] = {
        "checksum": lambda: timed(lambda: open_object(plain, payload, ref, None)),
        "tag": lambda: timed(lambda: open_object(tagged, payload, ref, keys)),
        "AES256GCM": decrypt,
        "BLAKE3, 1 thread": lambda: timed(
            lambda: blake3(payload, key=keys.current.tag_key).digest()
        ),
        "BLAKE3, all threads": lambda: timed(
            lambda: blake3(payload, key=keys.current.tag_key, max_threads=many).digest()
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    pauses = dict.fromkeys(calls, 0.0)
    for turn in range(repeat + 1):
        for name, call in calls.items():
            with Heartbeat() as beat:
                spent = call()
            if turn:
                seconds[name].append(spent)
                pauses[name] = max(pauses[name], beat.longest)
    return [
        (name, size / statistics.median(values) / 1e9, 1000 * pauses[name])
        for name, values in seconds.items()
    ]


def in_files(
    directory: Path, size: int, total: int, repeat: int, threads: int
) -> dict[tuple[str, str], float]:
    """Median GB/s of the tier's writes and reads, by direction and variant."""
    count = max(total // size, threads)
    slots = [memoryview(mmap.mmap(-1, size)) for _ in range(min(count, 2 * threads))]
    for slot in slots:
        slot[:] = os.urandom(size)
    checksum = preferred()
    metas = [ObjectMeta((size,), checksum.kind, (checksum.digest(slot),)) for slot in slots]
    refs = [
        ObjectRef(NAMESPACE, bytes([0]) + number.to_bytes(32, "big")) for number in range(count)
    ]
    keys = some_keys()
    tiers = {}
    for name in VARIANTS:
        document = FileSystemTierDocument(name=name, path=str(directory / name), sharing="Pod")
        sealing = None if name == "checksum" else Sealing(lambda: keys, name == "AES256GCM")
        limits = TierLimits(capacity_bytes=4 * count * (size + HEADER_BYTES))
        tiers[name] = FileSystemTier(document, limits, sealing=sealing)
        tiers[name].open(lambda *_: None)
    seconds: dict[tuple[str, str], list[float]] = {}
    local = threading.local()
    with ThreadPoolExecutor(threads) as pool:

        def own_slot() -> memoryview:
            # Never two reads into one slot, as in tierd: decryption in place would fail.
            if not hasattr(local, "slot"):
                local.slot = memoryview(mmap.mmap(-1, size))
            return local.slot

        def run(direction: str, name: str, call: Callable[[int], object], turn: int) -> None:
            progress(f"{size // MIB} MiB, turn {turn}, {direction}, {name}")
            started = time.perf_counter()
            list(pool.map(call, range(count)))
            if turn:
                spent = time.perf_counter() - started
                seconds.setdefault((direction, name), []).append(spent)

        for turn in range(repeat + 1):
            order = list(tiers)[turn % 3 :] + list(tiers)[: turn % 3]
            for name in order:
                tier = tiers[name]
                run(
                    "write",
                    name,
                    lambda n, tier=tier: tier.write(
                        refs[n], slots[n % len(slots)], metas[n % len(slots)]
                    ),
                    turn,
                )
                run(
                    "read",
                    name,
                    lambda n, tier=tier: tier.read(refs[n], own_slot()),
                    turn,
                )
                for ref in refs:
                    tier.delete(ref)
    for tier in tiers.values():
        tier.close()
    return {key: count * size / statistics.median(values) / 1e9 for key, values in seconds.items()}


def main() -> None:
    """Runs all sizes."""
    chosen = options(__doc__ or "", add_options)
    rows: list[tuple[object, ...]] = []
    ratios = []
    for size in chosen.sizes_mib:
        for name, speed, pause in in_memory(size * MIB, chosen.repeat):
            rows.append((size, "memory", name, f"{speed:.2f}", f"{pause:.1f}"))
        directory = Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=chosen.directory))
        try:
            found = in_files(
                directory, size * MIB, chosen.total_mib * MIB, chosen.repeat, chosen.threads
            )
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        for direction in ("write", "read"):
            for name in VARIANTS:
                rows.append((size, direction, name, f"{found[direction, name]:.2f}", ""))
        ratios.append(found["read", "tag"] / found["read", "checksum"])
    progress("")
    report(
        chosen.json,
        f"Sealed objects, {chosen.threads} threads, checksums {preferred().kind}",
        ("MiB", "where", "what", "GB/s", "pause, ms"),
        rows,
        min(ratios),
        "worst of the tier's reads with a tag to those with a checksum alone",
    )


if __name__ == "__main__":
    main()
