"""The host pool as a worker sees it: one shared mapping of the file that tierd has allocated.

The file is ``fallocate``d before its size is published and never shrinks (DATAPATH 4), so touching any byte below
the published size cannot raise SIGBUS.
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
    """A writable mapping. ``identity``: device, inode and size of the file, so that a replaced file is noticed.

    ``seams``: offsets at which one copy must be split (boundaries between separately registered pieces).
    The mapping lives as long as an array over it does.
    """

    memory: Bytes
    identity: tuple[int, int, int] = (0, 0, 0)
    seams: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size of the mapping."""
        return int(self.memory.nbytes)


def file_identity(path: Path) -> tuple[int, int, int]:
    """Device, inode and size of ``path``. Raises ``OSError``."""
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size


def open_pool(path: Path, nbytes: int, seams: tuple[int, ...] = ()) -> HostPool:
    """Maps the first ``nbytes`` of ``path`` shared and writable.

    Raises ``OSError`` when it cannot be opened or mapped, ``ValueError`` when the file is smaller than announced.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if nbytes <= 0 or status.st_size < nbytes:
            raise ValueError(f"{path}: {status.st_size} bytes, announced were {nbytes}")
        mapping = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)
    identity = (status.st_dev, status.st_ino, status.st_size)
    return HostPool(np.frombuffer(mapping, dtype=np.uint8), identity, seams)
