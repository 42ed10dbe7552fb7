"""A file system of a chosen size for a directory: what ``statvfs`` reports is computed from the
files in it and from what others are said to use.
"""

import os
from pathlib import Path

import pytest
from tests.support.tier_files import bytes_below

BLOCK = 4096


class SimulatedDisk:
    """``others``: bytes that something else uses. ``calls``: how often the free space was read."""

    def __init__(self, root: Path, size_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.size = size_bytes
        self.others = 0
        self.calls = 0
        self.error: OSError | None = None
        self._real = os.statvfs
        monkeypatch.setattr(os, "statvfs", self._statvfs)

    @property
    def used(self) -> int:
        """Bytes of the directory's files."""
        return bytes_below(self.root)

    @property
    def free(self) -> int:
        return max(self.size - self.used - self.others, 0)

    def _statvfs(self, path: object) -> os.statvfs_result:
        if not str(path).startswith(str(self.root)):
            return self._real(path)  # type: ignore[arg-type]
        self.calls += 1
        if self.error is not None:
            raise self.error
        blocks, free = self.size // BLOCK, self.free // BLOCK
        return os.statvfs_result((BLOCK, BLOCK, blocks, free, free, 0, 0, 0, 0, 255))
