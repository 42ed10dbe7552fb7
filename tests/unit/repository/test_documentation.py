"""Documents point at what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")])
LINK = re.compile(r"(?<!!)\[[^\]\n]+\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
MAKE_TARGET = re.compile(r"`make ([a-z-]+)`")
NAMED_FILE = re.compile(
    r"`((?:connector|operator|tests|tools|examples|docs|benchmarks|crds)/[\w./-]+)`"
)


def anchors(page: Path) -> set[str]:
    """The anchors that its headings have."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_link_inside_the_repository_leads_somewhere(page: Path) -> None:
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{target} leads nowhere"
        assert there.is_relative_to(REPOSITORY), f"{target} leads out of the repository"
        if anchor:
            assert anchor in anchors(there), f"{target}: there is no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_file_that_is_named_exists(page: Path) -> None:
    for name in NAMED_FILE.findall(page.read_text()):
        assert (REPOSITORY / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_make_target_that_is_named_exists(page: Path) -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in MAKE_TARGET.findall(page.read_text()):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_first_page_names_the_two_commands_that_set_everything_up() -> None:
    text = (REPOSITORY / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text


def test_every_page_can_be_found_from_the_index() -> None:
    index = REPOSITORY / "docs" / "index.md"
    linked = {
        (index.parent / target.partition("#")[0]).resolve()
        for target in LINK.findall(index.read_text())
    }
    missing = [
        page for page in REPOSITORY.glob("docs/**/*.md") if page != index and page not in linked
    ]
    assert missing == []


def test_every_policy_shown_in_a_document_is_accepted() -> None:
    from kvtier_operator.api.documents import parse

    shown = 0
    for page in PAGES:
        for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            if "kind: KVTierPolicy" not in block:
                continue
            for checked in parse(block.encode()):
                assert checked.errors == (), f"{page.name}: {checked.errors}"
                shown += 1
    assert shown
