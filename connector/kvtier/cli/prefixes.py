"""``kvtier inspect --prefixes``: what a file tier holds, by prefix and age, and what goes next."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from kvtier.cli.console import console, print_table
from kvtier.cli.directory import age_text, inspect, inspect_json, show_inspect, size_text
from kvtier.tiers.filesystem.inspect import Survey, tier_root
from kvtier.tiers.filesystem.prefixes import AGES, NamespacePrefixes, PrefixSurvey, survey_prefixes

MAX_TREES = 10
"""Prefixes that are listed for each namespace."""
_KEY_DIGITS = 16


def inspect_prefixes(directory: Path) -> tuple[PrefixSurvey, float]:
    """Reads every header. Returns the survey and its time (Unix time).

    Raises ``ConfigurationError`` and ``OSError``.
    """
    now = time.time()
    return survey_prefixes(tier_root(directory), now), now


Inspected = tuple[Survey, tuple[PrefixSurvey, float] | None, float]
"""What is in a directory, its prefixes if they were asked for, and the time (Unix time)."""


def inspect_all(directory: Path, prefixes: bool) -> Inspected:
    """Surveys a directory. Raises ``ConfigurationError`` and ``OSError``."""
    survey, now = inspect(directory)
    return survey, inspect_prefixes(directory) if prefixes else None, now


def inspected_json(found: Inspected) -> dict[str, Any]:
    """The output of ``kvtier inspect --json``."""
    survey, prefixes, now = found
    more = {} if prefixes is None else prefixes_json(*prefixes)
    return {**inspect_json(survey, now), **more}


def show_inspected(found: Inspected) -> None:
    """Prints a survey."""
    survey, prefixes, now = found
    show_inspect(survey, now)
    if prefixes is not None:
        show_prefixes(*prefixes)


def prefixes_json(found: PrefixSurvey, now: float) -> dict[str, Any]:
    """What ``--prefixes`` adds to the output of ``kvtier inspect --json``."""
    return {
        "prefixes": [
            {
                "namespace": space.name,
                "prefixes": len(space.trees),
                "deepest": max(space.depths, default=0),
                "unusableObjects": space.unusable,
                "unknownObjects": space.unreadable,
                "largest": [
                    {
                        "beginning": tree.beginning.hex(),
                        "complete": tree.complete,
                        "objects": tree.objects,
                        "depth": tree.depth,
                        "bytes": tree.size_bytes,
                        "newestUseAgeSeconds": round(now - tree.newest, 3),
                    }
                    for tree in space.trees[:MAX_TREES]
                ],
                "heat": [
                    {"maxAgeSeconds": bound, "objects": objects, "bytes": size}
                    for bound, objects, size in zip(
                        (*AGES, None), space.heat.objects, space.heat.size_bytes, strict=True
                    )
                ],
            }
            for space in found.namespaces
        ],
        "evictedNext": [
            {
                "namespace": each.namespace,
                "key": each.key.hex(),
                "depth": each.depth,
                "bytes": each.size_bytes,
                "useAgeSeconds": round(now - each.used_at, 3),
            }
            for each in found.evicted_next
        ],
    }


def show_prefixes(found: PrefixSurvey, now: float) -> None:
    """Prints the survey."""
    for space in found.namespaces:
        _show_namespace(space, now)
    if not found.evicted_next:
        return
    console().print(
        Text("\nevicted next, by recorded use (at most hourly), the end of a prefix first:")
    )
    table = _table("namespace", "key", "place in its prefix", "size", "last use")
    for each in found.evicted_next:
        table.add_row(
            Text(each.namespace[:12]),
            Text(each.key.hex()[:_KEY_DIGITS]),
            f"{each.depth:,}",
            size_text(each.size_bytes),
            age_text(now - each.used_at),
        )
    print_table(table)


def _show_namespace(space: NamespacePrefixes, now: float) -> None:
    out = console()
    deepest = max(space.depths, default=0)
    out.print(
        Text(
            f"\n{space.name[:12]}: {len(space.trees):,} prefixes, "
            f"the longest of {deepest:,} objects"
        )
    )
    if space.unusable:
        out.print(
            Text(
                f"{space.unusable:,} objects follow one that is not held, and cannot be used",
                style="yellow",
            )
        )
    if space.unreadable:
        out.print(
            Text(
                f"of {space.unreadable:,} objects it is not known what they follow: they are "
                "encrypted or of another version, and count as beginnings"
            )
        )
    ages = ", ".join(
        f"{_age_range(place)}: {objects:,} ({size_text(size)})"
        for place, (objects, size) in enumerate(
            zip(space.heat.objects, space.heat.size_bytes, strict=True)
        )
        if objects
    )
    out.print(Text(f"last use {ages}"))
    table = _table("beginning", "objects", "longest", "size", "newest use")
    for tree in space.trees[:MAX_TREES]:
        beginning = tree.beginning.hex()[:_KEY_DIGITS]
        table.add_row(
            Text(beginning if tree.complete else f"{beginning} (incomplete)"),
            f"{tree.objects:,}",
            f"{tree.depth:,}",
            size_text(tree.size_bytes),
            age_text(now - tree.newest),
        )
    print_table(table)
    if len(space.trees) > MAX_TREES:
        out.print(Text(f"and {len(space.trees) - MAX_TREES:,} smaller ones"))


def _age_range(place: int) -> str:
    return f"< {age_text(AGES[place])}" if place < len(AGES) else "older"


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(headings[0], overflow="fold")
    for heading in headings[1:]:
        table.add_column(heading, justify="right", overflow="fold")
    return table
