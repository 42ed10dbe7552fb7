"""`kvtier inspect`, `kvtier verify` and `kvtier gc`: a file tier's directory, from outside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kvtier.cli.console import console, error_console
from kvtier.errors import ConfigurationError, TierError
from kvtier.tiers.filesystem.gc import CollectReport, collect
from kvtier.tiers.filesystem.inspect import (
    HolderStatus,
    Survey,
    VerifyReport,
    objects_of,
    survey,
    tier_root,
)
from kvtier.tiers.filesystem.inspect import verify as verify_objects
from kvtier_operator.api.quantity import Quantity, QuantityError

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_AGES = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"))


def size_text(size_bytes: float) -> str:
    """1536 is 1.5 KiB."""
    for unit in _UNITS:
        if abs(size_bytes) < 1024 or unit == _UNITS[-1]:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return ""


def age_text(seconds: float | None) -> str:
    """5400 seconds are 1.5 h."""
    if seconds is None:
        return "-"
    for length, unit in _AGES:
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"


# inspect


def inspect(directory: Path) -> tuple[Survey, float]:
    """What is there, and when it was looked at. Raises ``ConfigurationError`` and ``OSError``."""
    now = time.time()
    return survey(tier_root(directory), now), now


def inspect_json(found: Survey, now: float) -> dict[str, Any]:
    """For programs. Ages in seconds."""
    ledger = found.ledger or {}
    return {
        "directory": found.root,
        "totalBytes": found.total_bytes,
        "otherBytes": found.other_bytes,
        "temporaries": {"files": found.temporaries, "bytes": found.temporary_bytes},
        "namespaces": [
            {
                "namespace": each.name,
                "identity": each.identity,
                "objects": each.objects,
                "bytes": each.size_bytes,
                "oldestUseAgeSeconds": None if each.oldest is None else round(now - each.oldest, 3),
                "newestUseAgeSeconds": None if each.newest is None else round(now - each.newest, 3),
            }
            for each in found.namespaces
        ],
        "janitor": None
        if found.janitor is None
        else {
            "fence": found.term,
            "holder": found.janitor.name,
            "state": found.janitor.state,
            "capacityBytes": ledger.get("capacity"),
            "chargedBytes": ledger.get("charge"),
            "grantBytes": ledger.get("quantum"),
        },
        "writers": [
            {
                "writer": each.name,
                "state": each.state,
                "grants": len(each.grants),
                "grantedBytes": sum(each.grants.values()),
                "temporaries": {"files": each.writing, "bytes": each.writing_bytes},
            }
            for each in found.writers
        ],
    }


def show_inspect(found: Survey, now: float) -> None:
    """For people."""
    table = Table(title=None, box=None, pad_edge=False)
    for head, justify in (
        ("namespace", "left"),
        ("belongs to", "left"),
        ("objects", "right"),
        ("bytes", "right"),
    ):
        table.add_column(head, justify="right" if justify == "right" else "left", overflow="fold")
    table.add_column("last used", justify="right")
    table.add_column("oldest", justify="right")
    for each in found.namespaces:
        table.add_row(
            Text(each.name[:12]),
            Text(", ".join(_identity_words(each.identity)) or "not described"),
            f"{each.objects:,}",
            size_text(each.size_bytes),
            age_text(None if each.newest is None else now - each.newest),
            age_text(None if each.oldest is None else now - each.oldest),
        )
    console().print(table)
    capacity = (found.ledger or {}).get("capacity")
    of = f" of {size_text(capacity)}" if isinstance(capacity, int) else ""
    console().print(Text(f"\n{found.root}: {size_text(found.total_bytes)}{of}"))
    console().print(
        Text(
            f"being written or left behind: {found.temporaries}, {size_text(found.temporary_bytes)}"
        )
    )
    if found.janitor is None:
        console().print("no janitor yet")
    else:
        charge = (found.ledger or {}).get("charge")
        charged = "not known yet" if charge is None else size_text(charge)
        line = f"janitor {found.term}: {_holder_words(found.janitor)}, charged {charged}"
        console().print(
            Text(line, style="" if found.janitor.state in ("Alive", "Elsewhere") else "yellow")
        )
    for writer in found.writers:
        granted = size_text(sum(writer.grants.values()))
        console().print(
            Text(f"writer {_holder_words(writer)}: {len(writer.grants)} grants, {granted}")
        )


def _identity_words(identity: dict[str, str]) -> Iterator[str]:
    for key, value in identity.items():
        yield value if key in ("model", "engine", "dtype") else f"{key} {value}"


def _holder_words(holder: HolderStatus) -> str:
    parts = holder.name.split("-")
    pid = parts[2] if len(parts) == 5 else "?"
    states = {
        "Alive": f"process {pid}, alive",
        "Gone": f"process {pid}, gone",
        "Released": "given back in order",
        "Elsewhere": f"process {pid} of another host or container",
    }
    return states.get(holder.state, holder.state)


# verify


@contextmanager
def _bar(total: int, shown: bool) -> Iterator[Callable[[int, str], None]]:
    """A progress bar on standard error, where that is a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,}/{task.total:,}"),
    )
    with Progress(
        *columns, TimeRemainingColumn(), console=error_console(), transient=True, disable=not shown
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, text: bar.update(task, completed=done, description=text)


def verify(directory: Path, *, delete: bool) -> VerifyReport:
    """Reads every object. Raises ``ConfigurationError`` and ``OSError``."""
    root = tier_root(directory)
    objects = objects_of(root, time.time())
    with _bar(len(objects), error_console().is_terminal) as update:

        def progress(done: VerifyReport) -> None:
            update(
                done.objects + done.vanished + done.unverifiable + len(done.bad),
                f"corrupt: {done.corrupt}",
            )

        return verify_objects(root, objects, delete=delete, progress=progress)


def verify_json(done: VerifyReport) -> dict[str, Any]:
    """For programs."""
    return {
        "verified": done.objects,
        "bytes": done.size_bytes,
        "vanished": done.vanished,
        "unverifiable": done.unverifiable,
        "corrupt": done.corrupt,
        "bad": [
            {
                "path": each.path,
                "reason": each.reason,
                "corrupt": each.corrupt,
                "deleted": each.deleted,
            }
            for each in done.bad
        ],
    }


def show_verify(done: VerifyReport) -> None:
    """For people: bad objects to standard error."""
    for each in done.bad:
        line = Text(f"{each.path}: ")
        line.append("corrupt" if each.corrupt else "not readable", style="red")
        error_console().print(line.append(f": {each.reason}{', deleted' if each.deleted else ''}"))
    words = [
        f"{done.objects:,} objects verified ({size_text(done.size_bytes)})",
        f"{done.corrupt} corrupt",
    ]
    if len(done.bad) > done.corrupt:
        words.append(f"{len(done.bad) - done.corrupt} not readable")
    if done.unverifiable:
        words.append(f"{done.unverifiable} with a checksum that needs the package xxhash")
    if done.vanished:
        words.append(f"{done.vanished} were removed meanwhile")
    console().print(Text(", ".join(words)))


# gc


def parse_size(text: str) -> int:
    """Bytes. Raises ``ConfigurationError``."""
    accepted = "a size above zero, such as 500Gi, 2T or 4096"
    try:
        size = Quantity.parse(text).size_bytes
    except QuantityError as error:
        raise ConfigurationError("--capacity", text, f"{error}; accepted is {accepted}") from error
    if size <= 0:
        raise ConfigurationError("--capacity", text, f"accepted is {accepted}")
    return size


def gc(
    directory: Path, capacity: str, retention_seconds: float | None, *, dry_run: bool
) -> CollectReport:
    """Enforces limits. Raises ``ConfigurationError`` and ``OSError``."""
    size = parse_size(capacity)
    root = tier_root(directory)
    try:
        with error_console().status("") as status:
            return collect(
                root,
                size,
                retention_seconds,
                dry_run=dry_run,
                progress=lambda text: status.update(text),
            )
    except TierError as error:
        raise OSError(str(error)) from error


def gc_json(done: CollectReport) -> dict[str, Any]:
    """For programs."""
    return {
        "dryRun": done.dry_run,
        "janitor": done.janitor,
        "beforeBytes": done.before_bytes,
        "afterBytes": done.after_bytes,
        "namespaces": done.namespaces,
        "objects": done.objects,
        "bytes": done.size_bytes,
    }


def show_gc(done: CollectReport) -> None:
    """For people."""
    verb = "would remove" if done.dry_run else "removed"
    line = f"{verb} {done.objects:,} objects ({size_text(done.size_bytes)})"
    if done.namespaces:
        line += f" and {len(done.namespaces)} namespaces: {', '.join(name[:12] for name in done.namespaces)}"
    console().print(Text(line))
    after = "would be" if done.dry_run else "now"
    console().print(
        Text(f"{size_text(done.before_bytes)} before, {after} {size_text(done.after_bytes)}")
    )
    if not done.dry_run and not done.janitor:
        console().print("a janitor is at work here; it counts the directory anew")
