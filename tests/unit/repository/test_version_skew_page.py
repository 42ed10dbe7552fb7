"""Every cell of the page about version skew names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
PAGE = REPOSITORY / "docs" / "skew.md"
LINES = PAGE.read_text().splitlines()
ROWS = [line for line in LINES if line.startswith("| ") and "what happens" not in line]


def _tests(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_the_page_has_rows() -> None:
    assert len(ROWS) >= 12


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_a_row_names_a_test_that_exists(row: str) -> None:
    (reference,) = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)
    path, name = reference
    assert name in _tests(REPOSITORY / path)
