"""A real ext4 on a loop device that is smaller than the tier's capacity, or is remounted read-only
while it is in use. Needs root and loop devices.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtier.scorecard.testbed import KEYS, FaultTestbed, Measurements

MEANS = "ext4 on a loop device"
SIZE_BYTES = 16 << 20
NAMES = ("full-disk", "read-only-disk")


class DiskUnavailableError(Exception):
    """No such file system can be mounted here. The message says why."""


@dataclass(frozen=True, slots=True)
class Disk:
    """A mounted file system. ``path``: the directory in it that is used."""

    path: Path
    root: Path

    def remount(self, mode: str) -> None:
        """``ro`` or ``rw``."""
        for _ in range(40):
            done = subprocess.run(
                ["mount", "-o", f"remount,{mode}", str(self.root)], capture_output=True, check=False
            )
            if done.returncode == 0:
                return
            time.sleep(0.1)  # a file is open for writing
        raise OSError(f"remount,{mode}: {done.stderr.decode(errors='replace').strip()}")


@contextmanager
def mounted(directory: Path, kind: str = "ext4", size_bytes: int = SIZE_BYTES) -> Iterator[Disk]:
    """A small file system of ``kind`` (ext4 or xfs), mounted during the block.

    Raises ``DiskUnavailableError``.
    """
    maker = shutil.which(
        f"mkfs.{kind}",
        path=os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin")),
    )
    if maker is None:
        raise DiskUnavailableError(f"mkfs.{kind} is not installed")
    if os.geteuid() != 0:
        raise DiskUnavailableError("mounting a loop device needs root")
    image, path = directory / "disk.img", directory / "disk"
    with image.open("wb") as file:
        file.truncate(size_bytes)
    path.mkdir()
    for command in (
        [maker, "-q", *(["-F"] if kind == "ext4" else []), str(image)],
        ["mount", "-o", "loop", str(image), str(path)],
    ):
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode != 0:
            raise DiskUnavailableError(
                f"{command[0]}: {done.stderr.decode(errors='replace').strip()}"
            )
    try:
        yield Disk(path, path)
    finally:
        unmount(path)


def unmount(path: Path) -> None:
    """Unmounts a file system, later if it is busy."""
    for options in ([], ["-l"]):
        command = ["umount", *options, str(path)]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            break
        time.sleep(0.5)


XFS_BYTES = 320 << 20
"""xfs makes no smaller file system."""


@contextmanager
def small(directory: Path, kind: str) -> Iterator[Disk]:
    """A file system of ``kind`` with room for about ``SIZE_BYTES``.

    Raises ``DiskUnavailableError``.
    """
    if kind == "tmpfs":
        path = directory / "disk"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "kvtier-faults", str(path)]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode != 0:
            raise DiskUnavailableError(f"mount: {done.stderr.decode(errors='replace').strip()}")
        try:
            yield Disk(path, path)
        finally:
            unmount(path)
    elif kind == "nfs":
        raise DiskUnavailableError("an export cannot be made smaller or read-only from here")
    elif kind == "xfs":
        with mounted(directory, kind, XFS_BYTES) as disk:
            found = os.statvfs(disk.path)
            taken = found.f_bavail * found.f_frsize - SIZE_BYTES
            descriptor = os.open(disk.path / "filler", os.O_CREAT | os.O_WRONLY, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, taken)
            finally:
                os.close(descriptor)
            place = disk.path / "tier"
            place.mkdir()
            yield Disk(place, disk.root)
    else:
        with mounted(directory) as disk:
            yield disk


def full(testbed: FaultTestbed, _: Disk, seconds: float, measurements: Measurements) -> None:
    """The file system is smaller than the tier's capacity."""
    end = time.monotonic() + seconds
    number = KEYS
    while time.monotonic() < end:
        number += 1
        testbed.wait(lambda: testbed.engine.can_store, "a free slot", 1)
        testbed.store(number, 0.5)
    testbed.stream(seconds, measurements)
    # The disk stays full; eviction makes room.
    measurements.recovery_seconds = testbed.recover()


def read_only(
    testbed: FaultTestbed, disk: Disk, seconds: float, measurements: Measurements
) -> None:
    """The file system becomes read-only while in use, as after an error in the kernel."""
    for number in range(24):
        testbed.wait(lambda: testbed.engine.can_store, "a free slot", 1)
        testbed.store(number, 0.5)
    testbed.engine.wait_for(lambda: sum(testbed.in_file(number) for number in range(24)) > 8, 10)
    disk.remount("ro")
    try:
        testbed.stream(seconds, measurements)
    finally:
        disk.remount("rw")
    measurements.recovery_seconds = testbed.recover()


DISK_FAULTS: dict[str, Callable[[FaultTestbed, Disk, float, Measurements], None]] = {
    "full-disk": full,
    "read-only-disk": read_only,
}
