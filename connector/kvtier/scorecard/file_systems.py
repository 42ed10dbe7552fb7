"""The file systems that the faults of file tiers run on.

ext4 and xfs are made on loop devices, and tmpfs is mounted, which needs root. For NFS the variable
``NFS_MOUNT`` names a directory on a mount.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.scorecard.small_disks import DiskUnavailableError, mounted, unmount
from kvtier.tiers.filesystem.record import is_nfs

KINDS = ("ext4", "xfs", "tmpfs", "nfs")
NFS_VARIABLE = "NFS_MOUNT"
SIZE_BYTES = 1 << 30
"""The images are sparse."""


@contextmanager
def provided(kind: str, home: Path) -> Iterator[Path]:
    """A directory on a file system of this kind, empty and removed afterwards. ``home``: an empty
    directory for what is needed. With an empty ``kind``, ``home`` itself.

    Raises ``DiskUnavailableError``: such a file system cannot be had here.
    """
    home.mkdir(parents=True)
    if not kind:
        yield home
    elif kind == "nfs":
        with _on_nfs() as path:
            yield path
    elif kind == "tmpfs":
        with tmpfs(home / "tmpfs", SIZE_BYTES) as path:
            yield path
    else:
        with mounted(home, kind, SIZE_BYTES) as disk:
            yield disk.path


@contextmanager
def tmpfs(path: Path, size_bytes: int) -> Iterator[Path]:
    """A tmpfs of that size, mounted during the block. Raises ``DiskUnavailableError``."""
    if os.geteuid() != 0:
        raise DiskUnavailableError("mounting a tmpfs needs root")
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "kvtier-faults", str(path)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode != 0:
        raise DiskUnavailableError(f"mount: {done.stderr.decode(errors='replace').strip()}")
    try:
        yield path
    finally:
        unmount(path)


@contextmanager
def _on_nfs() -> Iterator[Path]:
    mount = os.environ.get(NFS_VARIABLE, "")
    if not mount:
        raise DiskUnavailableError(f"no NFS: {NFS_VARIABLE} names no directory on an NFS mount")
    if not _is_nfs(Path(mount)):
        raise DiskUnavailableError(f"{NFS_VARIABLE}: {mount} is not on an NFS mount")
    try:
        path = Path(tempfile.mkdtemp(prefix="kvtier-faults-", dir=mount))
    except OSError as error:
        raise DiskUnavailableError(f"{mount}: {error.strerror}") from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _is_nfs(path: Path) -> bool:
    try:
        return is_nfs(path.stat().st_dev)
    except OSError:
        return False
