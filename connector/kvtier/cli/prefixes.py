"""``kvtier inspect --prefixes`` and ``--tenants``: what a file tier holds, by prefix and age, what
goes next, and whom it belongs to."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from kvtier.cli.console import console, print_table
from kvtier.cli.directory import age_text, inspect, inspect_json, show_inspect, size_text
from kvtier.tiers.filesystem.inspect import Survey, TenantSurvey, survey_tenants, tier_root
from kvtier.tiers.filesystem.prefixes import AGES, NamespacePrefixes, PrefixSurvey, survey_prefixes

MAX_TREES = 10
"""Prefixes that are listed for each namespace."""
_KEY_DIGITS = 16
MAX_TENANTS = 50
"""Tenants that are listed in text."""


def inspect_prefixes(directory: Path) -> tuple[PrefixSurvey, float]:
    """Reads every header. Returns the survey and its time (Unix time).

    Raises ``ConfigurationError`` and ``OSError``.
    """
    now = time.time()
    return survey_prefixes(tier_root(directory), now), now


class Inspected(NamedTuple):
    """What is in a directory, its prefixes and tenants if they were asked for, and the time (Unix
    time)."""

    survey: Survey
    prefixes: tuple[PrefixSurvey, float] | None
    tenants: TenantSurvey | None
    now: float


def inspect_all(directory: Path, prefixes: bool, tenants: bool) -> Inspected:
    """Surveys a directory. Raises ``ConfigurationError`` and ``OSError``."""
    survey, now = inspect(directory)
    return Inspected(
        survey,
        inspect_prefixes(directory) if prefixes else None,
        survey_tenants(tier_root(directory), now) if tenants else None,
        now,
    )


def inspected_json(found: Inspected) -> dict[str, Any]:
    """The output of ``kvtier inspect --json``."""
    document = inspect_json(found.survey, found.now)
    if found.prefixes is not None:
        document |= prefixes_json(*found.prefixes)
    if found.tenants is not None:
        document |= tenants_json(found.tenants)
    return document


def show_inspected(found: Inspected) -> None:
    """Prints a survey."""
    show_inspect(found.survey, found.now)
    if found.prefixes is not None:
        show_prefixes(*found.prefixes)
    if found.tenants is not None:
        capacity = (found.survey.ledger or {}).get("capacity")
        show_tenants(found.tenants, capacity if isinstance(capacity, int) else 0)


def tenants_json(found: TenantSurvey) -> dict[str, Any]:
    """What ``--tenants`` adds to the output of ``kvtier inspect --json``."""
    return {
        "tenants": [
            {"tenant": each.tenant or None, "objects": each.objects, "bytes": each.size_bytes}
            for each in found.tenants
        ],
        "objectsOfUnknownTenant": found.unknown,
    }


def show_tenants(found: TenantSurvey, capacity_bytes: int) -> None:
    """Prints what tenants hold. ``capacity_bytes``: of the directory; 0 if it is unknown."""
    table = _table("tenant", "objects", "size", "of capacity")
    for each in found.tenants[:MAX_TENANTS]:
        share = f"{100 * each.size_bytes / capacity_bytes:.1f}%" if capacity_bytes else "-"
        table.add_row(
            Text(each.tenant or "none"), f"{each.objects:,}", size_text(each.size_bytes), share
        )
    out = console()
    out.print()
    print_table(table)
    if len(found.tenants) > MAX_TENANTS:
        out.print(Text(f"and {len(found.tenants) - MAX_TENANTS:,} that hold less"))
    if found.unknown:
        out.print(Text(f"of {found.unknown:,} objects the tenant is unknown", style="yellow"))


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
                "usesCountedAgeSeconds": None
                if space.uses_counted_at is None
                else round(now - space.uses_counted_at, 3),
                "largest": [
                    {
                        "beginning": tree.beginning.hex(),
                        "complete": tree.complete,
                        "objects": tree.objects,
                        "depth": tree.depth,
                        "bytes": tree.size_bytes,
                        "newestUseAgeSeconds": round(now - tree.newest, 3),
                        "uses": None if space.uses_counted_at is None else tree.uses,
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
    if space.uses_counted_at is None:
        out.print(Text(f"how often prefixes were used is not known: {space.uses_unknown_reason}"))
    else:
        age = age_text(now - space.uses_counted_at)
        out.print(Text(f"uses: by the process that leads the directory, saved {age} ago"))
    table = _table("beginning", "objects", "longest", "size", "newest use", "uses per object")
    for tree in space.trees[:MAX_TREES]:
        beginning = tree.beginning.hex()[:_KEY_DIGITS]
        table.add_row(
            Text(beginning if tree.complete else f"{beginning} (incomplete)"),
            f"{tree.objects:,}",
            f"{tree.depth:,}",
            size_text(tree.size_bytes),
            age_text(now - tree.newest),
            "-" if space.uses_counted_at is None else f"{tree.uses / tree.objects:.1f}",
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
