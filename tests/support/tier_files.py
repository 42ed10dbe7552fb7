"""What lies in the directory of a tier that is open: its threads remove files and directories while
a test lists them, so what disappears meanwhile is passed over."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def files_below(root: Path, suffix: str = "") -> dict[Path, int]:
    """The regular files below ``root`` whose names end with ``suffix``, and the bytes of each."""
    found: dict[Path, int] = {}
    for directory, _, names in os.walk(root):
        for name in names:
            path = Path(directory, name)
            if not name.endswith(suffix):
                continue
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                found[path] = status.st_size
    return found


def bytes_below(root: Path, suffix: str = "") -> int:
    """Bytes of the files below ``root`` whose names end with ``suffix``."""
    return sum(files_below(root, suffix).values())
