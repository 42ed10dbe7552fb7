"""Writes what the chart renders into tests/unit/chart/golden, for review.

``golden/CASE.yaml`` has the values of a case, and the directory ``golden/CASE`` what each template
renders. A case other than ``default`` has only the files that differ from those of ``default``; an
empty file stands for a template that renders nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parent.parent
CHART = REPOSITORY / "charts" / "kvtier"
GOLDEN = REPOSITORY / "tests" / "unit" / "chart" / "golden"
COPIED = frozenset({"crd.yaml", "NOTES.txt"})
"""Left out: the definition is generated and has tests of its own."""


def cases() -> dict[str, dict[str, Any]]:
    """The values of each case, by name."""
    return {path.stem: yaml.safe_load(path.read_text()) or {} for path in GOLDEN.glob("*.yaml")}


def rendered(values: dict[str, Any]) -> dict[str, str]:
    """The text of each template, by the name of its file."""
    import helm_python as helm

    with helm.Chart.load(CHART) as chart:
        texts = chart.render(values, name="kvtier", namespace="kvtier-system")
    named = {name.rpartition("/")[2]: text.strip() for name, text in texts.items()}
    return {name: f"{text}\n" for name, text in named.items() if text and name not in COPIED}


def files(case: str, default: dict[str, str]) -> dict[str, str]:
    """What the directory of a case has. ``default``: what the chart renders without values."""
    if case == "default":
        return default
    found = rendered(cases()[case])
    every = {**dict.fromkeys(default, ""), **found}
    return {name: text for name, text in every.items() if default.get(name) != text}


def main() -> int:
    default = rendered({})
    for case in sorted(cases()):
        directory = GOLDEN / case
        directory.mkdir(exist_ok=True)
        for path in directory.iterdir():
            path.unlink()
        for name, text in files(case, default).items():
            (directory / name).write_text(text, encoding="utf-8")
        print(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
