"""A file tier on two loop devices, compared with one.

Each loop device has a file system of its own, and its rate is limited by a cgroup, so that the
device is the limit, as a disk is, and not the processor. The same objects are written and read,
verified, with as many threads for each volume. Raw O_DIRECT on the same devices shows what two
devices add without a tier. One and two devices alternate, and medians are compared. Needs root and
the blkio controller of cgroup v1 or the io controller of v2.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvtier.config.models import FileSystemTierDocument
from kvtier.tiers.base import ObjectMeta, ObjectRef, TierLimits
from kvtier.tiers.checksum import preferred
from kvtier.tiers.filesystem import FileSystemTier
from kvtier.tiers.volume_set import VolumeSet

sys.path.insert(0, str(Path(__file__).parent))
from common import options, progress, report

MIB = 1 << 20
NAMESPACE = "b" * 32
DIRECTIONS = ("write", "read")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Command line."""
    parser.add_argument(
        "--directory", type=Path, default=Path("/dev/shm"), help="where the devices' files are"
    )
    parser.add_argument(
        "--device-mbps", type=int, default=250, help="rate of a device in MB/s; 0: no limit"
    )
    parser.add_argument("--size-mib", type=int, default=2, help="object size")
    parser.add_argument("--total-mib", type=int, default=256, help="bytes per run")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each; medians are compared")
    parser.add_argument("--threads", type=int, default=4, help="threads for each volume")


@contextlib.contextmanager
def limited(mounts: Sequence[Path], rate: int) -> Iterator[None]:
    """Limits this process to ``rate`` bytes per second on each device, in each direction."""
    devices = [os.stat(mount).st_dev for mount in mounts]
    names = [f"{os.major(device)}:{os.minor(device)}" for device in devices]
    top = Path("/sys/fs/cgroup")
    v1 = top / "blkio"
    group = (v1 if v1.is_dir() else top) / f"kvtier-bench-{os.getpid()}"
    if v1.is_dir():
        files = [f"blkio.throttle.{way}_bps_device" for way in DIRECTIONS]
        lines = {file: [f"{name} {rate}" for name in names] for file in files}
    else:
        (top / "cgroup.subtree_control").write_text("+io")
        lines = {"io.max": [f"{name} rbps={rate} wbps={rate}" for name in names]}
    kind = "blkio" if v1.is_dir() else ""
    lines_of_groups = Path("/proc/self/cgroup").read_text().splitlines()
    own = next(line for line in lines_of_groups if kind in line.split(":")[1].split(","))
    before = group.parent / own.split(":", 2)[2].lstrip("/")
    group.mkdir()
    try:
        for file, limits in lines.items():
            for line in limits:
                (group / file).write_text(line)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (before / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


@contextlib.contextmanager
def loop_mounts(directory: Path, number: int, size_bytes: int) -> Iterator[list[Path]]:
    """Mounted file systems, each on a loop device of its own."""
    base = Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=directory))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, base, ignore_errors=True)
        mounts = []
        for each in range(number):
            image, mount = base / f"disk{each}.img", base / f"disk{each}"
            mount.mkdir()
            with image.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size_bytes)
            attach = ["losetup", "--find", "--show", str(image)]
            device = subprocess.run(attach, check=True, capture_output=True, text=True)
            name = device.stdout.strip()
            stack.callback(subprocess.run, ["losetup", "--detach", name], check=False)
            subprocess.run(["mkfs.ext4", "-q", name], check=True)
            subprocess.run(["mount", name, str(mount)], check=True)
            stack.callback(subprocess.run, ["umount", str(mount)], check=False)
            mounts.append(mount)
        yield mounts


class Objects:
    """What is written and read: ``count`` objects of one size, in a few buffers."""

    def __init__(self, size: int, count: int, buffers: int) -> None:
        self.size, self.count = size, count
        self._slots = [memoryview(mmap.mmap(-1, size)) for _ in range(buffers)]
        for slot in self._slots:
            slot[:] = os.urandom(size)
        kind, digest = preferred().kind, preferred().digest
        self._metas = [ObjectMeta((size,), kind, (digest(slot),)) for slot in self._slots]
        # As block hashes are.
        self.refs = [ObjectRef(NAMESPACE, os.urandom(33)) for _ in range(count)]

    def slot(self, number: int) -> memoryview:
        """The memory of an object."""
        return self._slots[number % len(self._slots)]

    def meta(self, number: int) -> ObjectMeta:
        """Its checksums."""
        return self._metas[number % len(self._metas)]


def timed(
    pools: Sequence[ThreadPoolExecutor], places: Sequence[int], call: Callable[[int], object]
) -> float:
    """Seconds for ``call`` of every object, on the threads of its volume."""
    started = time.perf_counter()
    futures = [pools[place].submit(call, number) for number, place in enumerate(places)]
    for future in futures:
        future.result()
    return time.perf_counter() - started


def raw(path: str, memory: memoryview, write: bool) -> None:
    """One object's bytes with O_DIRECT, nothing else."""
    flags = os.O_WRONLY | os.O_CREAT if write else os.O_RDONLY
    descriptor = os.open(path, flags | os.O_DIRECT, 0o600)
    try:
        done = 0
        while done < memory.nbytes:
            part = memory[done:]
            done += (
                os.pwrite(descriptor, part, done) if write else os.preadv(descriptor, [part], done)
            )
    finally:
        os.close(descriptor)


def measure(mounts: Sequence[Path], objects: Objects, threads: int) -> dict[str, float]:
    """GB/s of the tier and of raw I/O on these devices, in both directions."""
    moved = objects.count * objects.size
    volumes = [
        FileSystemTier(
            FileSystemTierDocument(
                name=mount.name, path=str(mount / "tier"), sharing="Pod", direct_io="Always"
            ),
            TierLimits(4 * moved),
        )
        for mount in mounts
    ]
    tier = VolumeSet("bench", volumes)
    tier.open(lambda *_: None)
    places = [tier.place(ref) for ref in objects.refs]
    names = [f"{mounts[place]}/raw-{number}" for number, place in enumerate(places)]
    found = {}
    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(ThreadPoolExecutor(threads)) for _ in mounts]
        calls: dict[str, Callable[[int], object]] = {
            "raw write": lambda n: raw(names[n], objects.slot(n), True),
            "raw read": lambda n: raw(names[n], objects.slot(n), False),
            "tier write": lambda n: tier.volumes[places[n]].write(
                objects.refs[n], objects.slot(n), objects.meta(n)
            ),
            "tier read": lambda n: tier.volumes[places[n]].read(objects.refs[n], objects.slot(n)),
        }
        for name, call in calls.items():
            found[name] = moved / timed(pools, places, call) / 1e9
            if name == "raw read":
                for path in names:
                    os.unlink(path)
    for ref in objects.refs:
        tier.delete(ref)
    tier.close()
    return found


def main() -> None:
    """Compares one device with two."""
    chosen = options(__doc__ or "", add_options)
    size, moved = chosen.size_mib * MIB, chosen.total_mib * MIB
    objects = Objects(size, moved // size, 4 * chosen.threads)
    results: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    rate = chosen.device_mbps * 1_000_000
    with contextlib.ExitStack() as stack:
        room = moved + moved // 2 + 256 * MIB
        mounts = stack.enter_context(loop_mounts(chosen.directory, 2, room))
        if rate:
            stack.enter_context(limited(mounts, rate))
        for turn in range(chosen.repeat + 1):
            for number in (1, 2) if turn % 2 else (2, 1):
                progress(f"turn {turn}, {number} devices")
                got = measure(mounts[:number], objects, chosen.threads)
                if turn:
                    results[number].append(got)
    progress("")
    rows, ratios = [], []
    for direction in DIRECTIONS:
        medians = {
            (kind, number): statistics.median(got[f"{kind} {direction}"] for got in results[number])
            for kind in ("raw", "tier")
            for number in (1, 2)
        }
        added = {kind: medians[kind, 2] / medians[kind, 1] for kind in ("raw", "tier")}
        ratios.append(added["tier"])
        rows.append(
            (
                direction,
                *(f"{medians['tier', number]:.2f}" for number in (1, 2)),
                f"{added['tier']:.2f}",
                *(f"{medians['raw', number]:.2f}" for number in (1, 2)),
                f"{added['raw']:.2f}",
            )
        )
    report(
        chosen.json,
        f"Two loop devices of {chosen.device_mbps or 'unlimited'} MB/s against one, "
        f"{chosen.size_mib} MiB, {chosen.threads} threads each",
        ("direction", "one GB/s", "two GB/s", "ratio", "raw one", "raw two", "raw ratio"),
        rows,
        min(ratios),
        "worst of two / one of the tier; 2 is ideal, and not less than raw is wanted",
    )


if __name__ == "__main__":
    main()
