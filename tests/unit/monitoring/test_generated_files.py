"""The generated files are current."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.monitoring import files

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(("name", "content"), files().items(), ids=files().keys())
def test_a_generated_file_has_not_drifted(name: str, content: str) -> None:
    assert (REPOSITORY / name).read_text() == content, "run: make generate"
