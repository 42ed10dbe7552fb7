"""Panels as pictures for the documentation: SVG, drawn from the data that a Prometheus returned.

They show what each query returns and how it moves, not how Grafana looks. Colours suit light and
dark pages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from tools.monitoring.panels import Board, Panel

WIDTH, HEIGHT, GAP = 262, 180, 10
COLUMNS = 4
PLOT = (44, 34, 206, 96)
"""Left, top, width and height of the plot in a panel."""
COLOURS = ("#3274d9", "#e0752d", "#5aa64b", "#c4162a", "#8f3bb8", "#b08c00")
GREEN, RED, GREY = "#37872d", "#c4162a", "#8a8f98"
MAX_SERIES = 6
MAX_LEGENDS = 4
MAX_POINTS = 60
LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")


@dataclass(frozen=True, slots=True)
class Series:
    """One line: its name, and points of time in seconds and value."""

    name: str
    points: tuple[tuple[float, float], ...]


def legend(template: str, labels: Mapping[str, str]) -> str:
    """The name of a series, as Grafana makes it."""
    if not template:
        return ""
    return LABEL.sub(lambda match: _label(labels.get(match[1], "")), template).strip()


def _label(value: str) -> str:
    """A model that was loaded from a directory has its path as its name."""
    return value.rstrip("/").rpartition("/")[2] if value.startswith("/") else value


def picture(board: Board, data: Mapping[str, Sequence[Series]]) -> str:
    """All panels of a board that have data, in rows as on the board."""
    rows: list[tuple[str, list[Panel]]] = []
    for title, panels in board.rows.items():
        shown = [panel for panel in panels if data.get(panel.title)]
        for start in range(0, len(shown), COLUMNS):
            rows.append((title if start == 0 else "", shown[start : start + COLUMNS]))
    parts, top = [], GAP
    for title, panels in rows:
        if title:
            parts.append(_text((GAP, top + 12), title, 13, weight="600"))
            top += 22
        for column, panel in enumerate(panels):
            left = GAP + column * (WIDTH + GAP)
            parts.append(f'<g transform="translate({left},{top})">')
            parts.append(_panel(panel, data[panel.title]))
            parts.append("</g>")
        top += HEIGHT + GAP
    width = GAP + COLUMNS * (WIDTH + GAP)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" width="{width}" '
        f'height="{top}" font-family="sans-serif" role="img">'
        f"<title>{escape(board.title)}</title>"
    )
    return "\n".join([head, *parts, "</svg>", ""])


def _panel(panel: Panel, series: Sequence[Series]) -> str:
    frame = (
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="4" fill="none" stroke="{GREY}" '
        'stroke-opacity="0.5"/>'
    )
    body = _stat(panel, series) if panel.single else _graph(panel, series)
    return frame + _text((10, 20), panel.title, 12, weight="600") + body


def _stat(panel: Panel, series: Sequence[Series]) -> str:
    value = series[0].points[-1][1]
    bad = panel.bad is not None and value >= panel.bad
    colour = RED if bad else GREEN
    number = format_value(value, panel.unit)
    place = (WIDTH // 2, HEIGHT // 2 + 24)
    return _text(place, number, 40, colour=colour, anchor="middle")


def _graph(panel: Panel, series: Sequence[Series]) -> str:
    shown = series[:MAX_SERIES]
    if panel.stacked:
        shown = _stacked(shown)
    times = [time for each in shown for time, _ in each.points]
    first, last = min(times), max(times)
    top = max(max((value for each in shown for _, value in each.points), default=0.0), 0.0) or 1.0
    left, upper, width, height = PLOT
    span = (last - first) or 1.0
    parts = []
    for share in (0.0, 0.5, 1.0):
        line = round(upper + height * (1 - share), 1)
        parts.append(
            f'<path d="M{left} {line}h{width}" stroke="{GREY}" stroke-opacity="0.35" fill="none"/>'
        )
        text = format_value(top * share, panel.unit)
        parts.append(_text((left - 4, line + 3), text, 9, colour=GREY, anchor="end"))
    parts.append(_text((left, upper + height + 13), "0 s", 9, colour=GREY))
    end = (left + width, upper + height + 13)
    parts.append(_text(end, f"{last - first:.0f} s", 9, colour=GREY, anchor="end"))
    for index, each in enumerate(shown):
        path = "".join(
            f"{'M' if number == 0 else 'L'}{left + width * (time - first) / span:.1f} "
            f"{upper + height * (1 - max(value, 0.0) / top):.1f}"
            for number, (time, value) in enumerate(_thinned(each.points))
        )
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<path d="{path}" stroke="{colour}" stroke-width="1.6" fill="none"/>')
    return "".join([*parts, _legends(shown)])


def _legends(shown: Sequence[Series]) -> str:
    parts = []
    for index, each in enumerate(shown[:MAX_LEGENDS]):
        x = 12 + (index % 2) * (WIDTH // 2)
        y = HEIGHT - 22 + (index // 2) * 14
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<path d="M{x} {y - 3}h10" stroke="{colour}" stroke-width="3"/>')
        name = each.name if len(each.name) <= 21 else f"{each.name[:20]}…"
        parts.append(_text((x + 14, y), name, 9, colour=GREY))
    return "".join(parts)


def _stacked(series: Sequence[Series]) -> list[Series]:
    """Each line on top of those before it."""
    sums: dict[float, float] = {}
    found = []
    for each in series:
        points = []
        for time, value in each.points:
            sums[time] = sums.get(time, 0.0) + value
            points.append((time, sums[time]))
        found.append(Series(each.name, tuple(points)))
    return found


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    step = max(1, -(-len(points) // MAX_POINTS))
    kept = list(points[::step])
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def format_value(value: float, unit: str) -> str:
    """A value as Grafana writes it, roughly."""
    if unit == "percentunit":
        return f"{100 * value:.0f}%" if value >= 0.1 or value == 0 else f"{100 * value:.1f}%"
    if unit in ("bytes", "Bps"):
        suffix = "/s" if unit == "Bps" else ""
        for name in ("B", "KiB", "MiB", "GiB"):
            if abs(value) < 1024 or name == "GiB":
                return f"{_short(value)} {name}{suffix}"
            value /= 1024
    if unit == "s":
        if value == 0 or value >= 1:
            return f"{_short(value)} s"
        return f"{_short(value * 1e3)} ms" if value >= 1e-3 else f"{_short(value * 1e6)} µs"
    if unit == "cps":
        return f"{_short(value)}/s"
    return _short(value)


def _short(value: float) -> str:
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scale = {"G": 1e9, "M": 1e6, "k": 1e3}[suffix]
            return f"{value / scale:.1f}{suffix}"
    if value == round(value):
        return f"{value:.0f}"
    return f"{value:.2g}" if abs(value) < 10 else f"{value:.0f}"


def _text(
    place: tuple[float, float],
    text: str,
    size: int,
    *,
    colour: str = "currentColor",
    anchor: str = "start",
    weight: str = "400",
) -> str:
    fill = "#6e7681" if colour == "currentColor" else colour
    return (
        f'<text x="{place[0]}" y="{place[1]}" font-size="{size}" font-weight="{weight}" '
        f'fill="{fill}" text-anchor="{anchor}">{escape(text)}</text>'
    )
