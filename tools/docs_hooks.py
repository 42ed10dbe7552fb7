"""Hooks of mkdocs: the pages are written for GitHub, and the site reads them as GitHub does.

* Pages of the root of the repository (CONTRIBUTING.md, ...) are pages of the site. Other files are
  named instead of linked.
* Python-Markdown wants four columns before what belongs to an item of a numbered list.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROOT_PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\(([^)\s]+)\)")
ITEM = re.compile(r"^\d+\. ")
COMMENT = re.compile(r"^ *<!-- (?:run|needs: [a-z, ]+) -->\n", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages of the root."""
    from mkdocs.structure.files import File

    for name in ROOT_PAGES:
        page = "project-readme.md" if name == "README.md" else name
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=from_root(text)))
    return files


def from_root(text: str) -> str:
    """A page of the root with its links as they are in the site."""
    text = re.sub(r"\]\(docs/", "](", text)
    text = text.replace("[Apache License 2.0](LICENSE)", "Apache License 2.0 (`LICENSE`)")
    return text.replace("](README.md", "](project-readme.md")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page as Python-Markdown reads it."""
    directory = Path(page.file.src_uri).parent
    return COMMENT.sub("", indented(LINK.sub(lambda found: _link(found, directory), markdown)))


def _link(found: re.Match[str], directory: Path) -> str:
    text, target = found[1], found[2]
    if re.match(r"[a-z]+:|#", target):
        return found[0]
    path, separator, anchor = target.partition("#")
    parts: list[str] = []
    for part in (directory / path).parts:
        if part == ".." and parts and parts[-1] != "..":
            parts.pop()
        else:
            parts.append(part)
    if parts[:1] != [".."]:
        return found[0]
    name = "/".join(parts[1:])
    if name in ROOT_PAGES:
        page = "project-readme.md" if name == "README.md" else name
        up = "../" * len([part for part in directory.parts if part != "."])
        return f"[{text}]({up}{page}{separator}{anchor})"
    return f"{text} (`{name}`)"


def indented(markdown: str) -> str:
    """One more column before the continuation of numbered items."""
    lines, inside = [], False
    for line in markdown.split("\n"):
        if ITEM.match(line):
            inside = True
        elif inside and line and not line.startswith("   "):
            inside = False
        elif inside and line:
            line = f" {line}"
        lines.append(line)
    return "\n".join(lines)
