"""Run directories with short paths: that of a socket has at most 107 bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def short_directory() -> Iterator[Path]:
    """A private directory that ends with the context."""
    with tempfile.TemporaryDirectory(prefix="kvt-") as directory:
        yield Path(directory)
