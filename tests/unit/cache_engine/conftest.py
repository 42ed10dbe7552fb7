"""A directory for sockets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.run_directories import short_directory


@pytest.fixture
def run_directory() -> Iterator[Path]:
    """A private directory whose path is short enough for a socket."""
    with short_directory() as directory:
        yield directory
