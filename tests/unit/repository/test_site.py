"""The site has every page once, and needs nothing of another host."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from tools import cli_reference, diagrams

REPOSITORY = Path(__file__).resolve().parents[3]
SITE = REPOSITORY / "mkdocs.yml"


class _Loader(yaml.SafeLoader):
    """Ignores the tags with which mkdocs names Python functions."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def pages(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    if isinstance(entry, list):
        return [page for each in entry for page in pages(each)]
    return [page for each in entry.values() for page in pages(each)]


@pytest.fixture(scope="module")
def configuration() -> dict[str, Any]:
    found: dict[str, Any] = yaml.load(SITE.read_text(), _Loader)
    return found


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hooks", REPOSITORY / "tools/docs_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation_once(configuration: dict[str, Any]) -> None:
    listed = pages(configuration["nav"])
    assert len(listed) == len(set(listed))
    written = {
        str(each.relative_to(REPOSITORY / "docs")) for each in REPOSITORY.glob("docs/**/*.md")
    }
    project = {"project-readme.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"}
    assert set(listed) == written | project


def test_broken_links_and_anchors_fail_the_build(configuration: dict[str, Any]) -> None:
    assert configuration["strict"] is True
    assert set(configuration["validation"]["links"].values()) == {"warn"}
    assert configuration["theme"]["font"] is False


def test_links_that_leave_the_documentation(hooks: ModuleType) -> None:
    class Page:
        class file:
            src_uri = "reference/page.md"

    markdown = "[a](../../README.md#try-it) [b](../../tests/x.py) [c](../index.md#d) [e](https://f)"
    assert hooks.on_page_markdown(markdown, Page) == (
        "[a](../project-readme.md#try-it) b (`tests/x.py`) [c](../index.md#d) [e](https://f)"
    )


def test_numbered_lists_keep_what_belongs_to_them(hooks: ModuleType) -> None:
    text = "1. a\n\n   ```\n   x\n     y\n   ```\n2. b\n\nafter\n\n   indented\n"
    assert hooks.indented(text) == (
        "1. a\n\n    ```\n    x\n      y\n    ```\n2. b\n\nafter\n\n   indented\n"
    )


def test_the_diagrams_are_what_the_code_draws() -> None:
    for name, content in diagrams.files().items():
        path = REPOSITORY / "docs/images" / name
        assert path.read_text(encoding="utf-8") == content, "run: make generate"


def test_the_reference_of_the_command_is_what_the_command_has() -> None:
    assert cli_reference.PAGE.read_text(encoding="utf-8") == cli_reference.page(), (
        "run: make generate"
    )
    for name in ("top", "why", "plan", "doctor", "validate"):
        assert f"\n## {name}\n" in cli_reference.page()
    assert r"`--output text\|json`, `-o text\|json`" in cli_reference.page()


def test_pictures_are_small_and_each_is_shown() -> None:
    shown = " ".join(each.read_text() for each in REPOSITORY.glob("docs/**/*.md"))
    found = sorted((REPOSITORY / "docs/images").glob("*"))
    assert len(found) >= 5
    for each in found:
        assert each.stat().st_size < 100_000
        assert f"images/{each.name}" in shown, each.name
        assert "/tmp/" not in each.read_text(), "the name of a directory of one machine"


def test_the_site_is_built(tmp_path: Path) -> None:
    """Where `make docs` has installed mkdocs: lists stay whole, nothing is loaded elsewhere."""
    program = REPOSITORY / "build/docs-venv/bin/mkdocs"
    if not program.is_file():
        pytest.skip("run: make docs")
    done = subprocess.run(
        [str(program), "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    page = (tmp_path / "site/quickstart/index.html").read_text()
    assert page.count("<ol>") <= 3, "a block breaks a numbered list"
    for each in (tmp_path / "site").rglob("*.html"):
        html = each.read_text()
        loaded = re.findall(r"<(?:script|img)[^>]+src=\"(https?://[^\"]+)", html)
        loaded += re.findall(r"<link rel=\"stylesheet\" href=\"(https?://[^\"]+)", html)
        assert loaded == [], each.name
    shutil.rmtree(tmp_path / "site")
