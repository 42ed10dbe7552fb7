"""Draws the diagrams of docs/concepts.md: ``python -m tools.diagrams`` writes docs/images."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

IMAGES = Path(__file__).resolve().parents[1] / "docs/images"
BLUE, GREEN, ORANGE, PURPLE, RED, GREY = (
    "#3274d9",
    "#37872d",
    "#e0752d",
    "#8f3bb8",
    "#c4162a",
    "#6e7681",
)
MARKER = (
    '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    f'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="{GREY}"/></marker></defs>'
)
Place = tuple[float, float, float, float]
"""Left, top, width, height; or the ends of an arrow."""


def picture(width: int, height: int, title: str, body: Sequence[str]) -> str:
    """A whole SVG."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" role="img">'
    )
    return "\n".join([head, f"<title>{escape(title)}</title>", MARKER, *body, "</svg>", ""])


def text(x: float, y: float, content: str, *, size: int, bold: bool, colour: str = GREY) -> str:
    """A line of text, centred at x."""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{600 if bold else 400}" '
        f'fill="{colour}" text-anchor="middle">{escape(content)}</text>'
    )


def box(place: Place, lines: Sequence[str], colour: str = BLUE) -> str:
    """A box; the first line is its name."""
    left, top, width, height = place
    first = top + height / 2 - (len(lines) - 1) * 8 + 4
    parts = [_frame(place, colour, 0.12)]
    for number, line in enumerate(lines):
        size = 11 if number else 13
        place_y = first + 16 * number
        parts.append(text(left + width / 2, place_y, line, size=size, bold=not number))
    return "\n".join(parts)


def group(place: Place, name: str, colour: str) -> str:
    """A box around others."""
    left, top, width, _ = place
    label = text(left + width / 2, top + 20, name, size=13, bold=True, colour=colour)
    return _frame(place, colour, 0.05) + "\n" + label


def arrow(ends: Place, label: str = "", *, both: bool = False) -> str:
    """An arrow, and a word above its middle."""
    x1, y1, x2, y2 = ends
    start = ' marker-start="url(#a)"' if both else ""
    path = (
        f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke="{GREY}" stroke-width="1.4" fill="none" '
        f'marker-end="url(#a)"{start}/>'
    )
    if not label:
        return path
    return path + text((x1 + x2) / 2, (y1 + y2) / 2 - 6, label, size=11, bold=False)


def _frame(place: Place, colour: str, opacity: float) -> str:
    left, top, width, height = place
    return (
        f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" rx="6" '
        f'fill="{colour}" fill-opacity="{opacity}" stroke="{colour}"/>'
    )


def pod() -> str:
    """An engine pod, and the control plane."""
    body = [
        group((10, 10, 570, 300), "engine pod", GREY),
        group((25, 45, 240, 250), "engine container", BLUE),
        group((325, 45, 240, 250), "container kvtier-tierd", GREEN),
        box((45, 80, 200, 50), ["scheduler side", "decides, never waits"]),
        box((45, 155, 200, 50), ["worker side, one per GPU", "copies"]),
        box((45, 230, 200, 50), ["GPU memory", "KV blocks of the engine"], PURPLE),
        box((345, 80, 200, 50), ["tierd", "does all waiting and all I/O"], GREEN),
        box((345, 155, 200, 50), ["memory tier", "shared, pinned RAM"], ORANGE),
        box((345, 230, 200, 50), ["tier I/O threads", "read, verify, write"], GREEN),
        box((325, 335, 240, 50), ["file tiers", "node disk, NFS, claims"], ORANGE),
        box(
            (620, 45, 200, 90),
            ["webhook", "adds sidecar, volumes and", "variables to new pods"],
            RED,
        ),
        box((620, 165, 200, 90), ["controller", "live values, tokens, claims,", "status"], RED),
        box((620, 335, 200, 50), ["KVTierPolicy", "what people write"], GREY),
        arrow((245, 105, 345, 105), "index", both=True),
        arrow((245, 180, 345, 180), "copies", both=True),
        arrow((145, 205, 145, 230), both=True),
        arrow((445, 205, 445, 230), both=True),
        arrow((445, 280, 445, 335), both=True),
        arrow((620, 90, 580, 90)),
        arrow((620, 210, 580, 210)),
        arrow((720, 335, 720, 255)),
    ]
    return picture(830, 395, "An engine pod with tiers, and the control plane", body)


def request() -> str:
    """How a request is served."""
    steps = (
        ("1 look up", "which tiers hold a", "prefix of the prompt"),
        ("2 choose", "load, if that is faster", "than recomputing"),
        ("3 promote", "files to RAM,", "each object verified"),
        ("4 load", "RAM to GPU,", "copied and checked"),
        ("5 compute", "the rest of", "the prompt"),
    )
    body = []
    for number, lines in enumerate(steps):
        left = 10 + number * 165
        body.append(box((left, 20, 145, 70), lines))
        if number:
            body.append(arrow((left - 20, 55, left, 55)))
        if 0 < number < 4:
            body.append(arrow((left + 72, 90, left + 72, 145)))
    every = "late, damaged, missing, failing tier, dead daemon: every failure ends here"
    body.append(box((175, 145, 475, 46), ("recompute", every), RED))
    body.append(arrow((650, 168, 742, 90)))
    return picture(830, 205, "How a request is served from tiers", body)


def files() -> dict[str, str]:
    """Names and contents."""
    return {"pod.svg": pod(), "request.svg": request()}


if __name__ == "__main__":
    for name, content in files().items():
        (IMAGES / name).write_text(content, encoding="utf-8")
