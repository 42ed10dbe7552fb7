"""Reading what is named on a command line."""

from __future__ import annotations

import sys
from pathlib import Path

from kvtier_operator.api.documents import MAX_FILE_BYTES

STANDARD_INPUT = "-"


def read(name: str) -> bytes:
    """A file's content, or standard input's for ``-``; at most one byte more than is accepted. Raises ``OSError``."""
    if name == STANDARD_INPUT:
        return sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
    with Path(name).open("rb") as file:
        return file.read(MAX_FILE_BYTES + 1)


def shown_name(name: str) -> str:
    """The file's name as messages show it."""
    return "standard input" if name == STANDARD_INPUT else name
