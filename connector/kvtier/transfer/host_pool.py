"""The host pool as a worker sees it: a shared mapping of the file that tierd has allocated.

tierd allocates the file with ``fallocate`` before it publishes the size, and never shrinks it, so
touching a byte below that size cannot raise SIGBUS.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class HostPool:
    """A writable mapping, which lives as long as an array over it.

    ``begin``: offset of the mapping in the file. All other offsets are relative to it.
    ``identity``: device, inode and size of the file, to detect that it was replaced.
    ``boundaries``: offsets between ranges that were registered separately; one DMA transfer must
    not cross them.
    """

    memory: Bytes
    identity: tuple[int, int, int] = (0, 0, 0)
    boundaries: tuple[int, ...] = ()
    begin: int = 0

    @property
    def span(self) -> tuple[int, int]:
        """Begin and end of the mapping in the file."""
        return self.begin, self.begin + self.nbytes

    @property
    def nbytes(self) -> int:
        """Size of the mapping in bytes."""
        return int(self.memory.nbytes)


def file_identity(path: Path) -> tuple[int, int, int]:
    """Returns device, inode and size of ``path``. Raises ``OSError``."""
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size


def open_pool(path: Path, nbytes: int, begin: int = 0) -> HostPool:
    """Maps ``nbytes`` of ``path`` from ``begin``, a multiple of the page size; shared, writable.

    Raises ``OSError`` if it cannot be opened or mapped, ``ValueError`` if the file is smaller.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if nbytes <= 0 or begin < 0 or status.st_size < begin + nbytes:
            raise ValueError(f"{path}: {status.st_size} bytes, must be at least {begin + nbytes}")
        access = mmap.PROT_READ | mmap.PROT_WRITE
        mapping = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, access, offset=begin)
    finally:
        os.close(descriptor)
    identity = (status.st_dev, status.st_ino, status.st_size)
    return HostPool(np.frombuffer(mapping, dtype=np.uint8), identity, begin=begin)
