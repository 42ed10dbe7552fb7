from __future__ import annotations

import logging
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a tiny model is."""
    logging.getLogger("vllm").setLevel(logging.ERROR)
    return tmp_path_factory.mktemp("model")
