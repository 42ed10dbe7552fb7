"""The layout stays one that a newcomer can read."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]


def tool(name: str) -> ModuleType:
    """A script of ``tools/`` as a module."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    return tool("figures")


def test_no_modules_import_each_other_in_a_cycle_at_run_time_or_for_typing(
    figures: ModuleType,
) -> None:
    assert figures.cycles() == []


def test_a_cycle_is_found(
    figures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "connector" / "kvtier"
    package.mkdir(parents=True)
    (package / "a.py").write_text("from kvtier.b import x\n")
    (package / "b.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvtier.a import y\n"
    )
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    assert figures.cycles() == [["kvtier.a", "kvtier.b"]]


@pytest.fixture(scope="module")
def static(figures: ModuleType) -> dict[str, Any]:
    found: dict[str, Any] = figures.static()
    return found


def test_a_class_name_is_unique_in_both_source_roots(static: dict[str, Any]) -> None:
    assert static["class_names_used_twice"] == []


def test_lines_of_code_and_prose_have_at_most_100_columns(figures: ModuleType) -> None:
    assert figures.long_lines() == []


def test_few_functions_have_more_than_six_parameters(static: dict[str, Any]) -> None:
    assert len(static["functions_with_more_than_6_parameters"]) < 10


def test_phrases_to_avoid_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    phrase = " ".join(("for", "ever"))
    page.write_text(f"The pod is gone {phrase}.\nThe pod restarts.\n")
    assert len(tool("prose").findings(page)) == 1
