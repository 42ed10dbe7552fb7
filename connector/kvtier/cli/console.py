"""Printing. What programs read goes out untouched; rich is for people's eyes, and never interprets what a file
holds.
"""

from __future__ import annotations

import json
import sys

from rich.console import Console


def console() -> Console:
    """Standard output. Made anew each time: tests and callers may have replaced the stream."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=True)


def error_console() -> Console:
    """Standard error."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def printed(text: str) -> None:
    """Text as it is, with one line end."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def printed_json(document: object) -> None:
    """A document as JSON; what the stream cannot encode is escaped."""
    text = json.dumps(document, indent=2, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(document, indent=2)
    printed(text)
