"""Fixtures of tests with a lookup server: a directory for sockets, and no end that is silent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.run_directories import short_directory

from kvtier.lookup import client, server

NO_SILENCE_SECONDS = 600.0


@pytest.fixture(autouse=True)
def no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine neither end takes the other for silent, and lookups end."""
    for module in (client, server):
        monkeypatch.setattr(module, "SILENCE_SECONDS", NO_SILENCE_SECONDS)
    monkeypatch.setattr(server, "MAX_ASK_SECONDS", NO_SILENCE_SECONDS)


@pytest.fixture
def run_directory() -> Iterator[Path]:
    """A private directory whose path is short enough for a socket."""
    with short_directory() as directory:
        yield directory
