"""Writes every generated file."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.monitoring import alerts, dashboards, metrics_page

REPOSITORY = Path(__file__).resolve().parents[2]


def files() -> dict[str, str]:
    """Paths in the repository, and contents."""
    return {metrics_page.FILE: metrics_page.text(), **alerts.files(), **dashboards.files()}


def main() -> int:
    for name, content in files().items():
        path = REPOSITORY / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
