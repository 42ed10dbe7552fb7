"""Atomic file replacement, and the size of file systems."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def replace_file(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replaces ``path`` by a file with ``content`` and exactly ``mode``, whatever the umask.

    The content is written to a temporary file in the same directory, which is then renamed: a
    reader sees the old file or the new one. Does not call fsync: a power failure may lose the file.
    Raises ``OSError``; the old file is then unchanged.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), mode)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def volume_bytes(path: Path) -> tuple[int, int] | None:
    """Size and free bytes of the file system of ``path``; None if it cannot be read."""
    try:
        volume = os.statvfs(path)
    except OSError:
        return None
    return volume.f_blocks * volume.f_frsize, volume.f_bavail * volume.f_frsize
