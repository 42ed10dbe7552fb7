"""``kvtier inspect``, ``verify`` and ``gc``: commands for the directory of a file tier.

All are safe beside running engines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kvtier.cli.console import console, error_console, print_table
from kvtier.cli.inputs import parse_size
from kvtier.errors import TierError
from kvtier.tiers.filesystem.gc import CollectHooks, CollectReport, collect
from kvtier.tiers.filesystem.inspect import (
    HolderStatus,
    Survey,
    survey,
    tier_root,
)
from kvtier.tiers.filesystem.verify import FailedObject, VerifyReport, objects_of
from kvtier.tiers.filesystem.verify import verify as verify_objects
from kvtier.tiers.isolation_keys import read_key_set

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_AGES = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"))


def size_text(size_bytes: float) -> str:
    """Formats a size: 1536 is 1.5 KiB."""
    for unit in _UNITS:
        if abs(size_bytes) < 1024 or unit == _UNITS[-1]:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return ""


def age_text(seconds: float | None) -> str:
    """Formats an age: 5400 seconds are 1.5 h."""
    if seconds is None:
        return "-"
    for length, unit in _AGES:
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"


# kvtier inspect


def inspect(directory: Path) -> tuple[Survey, float]:
    """Surveys the directory. Returns the survey and its time (Unix time).

    Raises ``ConfigurationError`` and ``OSError``.
    """
    now = time.time()
    return survey(tier_root(directory), now), now


def inspect_json(found: Survey, now: float) -> dict[str, Any]:
    """The output of ``kvtier inspect --json``. Ages are in seconds."""
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
                "sampledSeals": dict(each.seals),
            }
            for each in found.namespaces
        ],
        "janitor": None
        if found.janitor is None
        else {
            "term": found.term,
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
    """Prints the survey."""
    table = Table(box=None, pad_edge=False)
    table.add_column("namespace", overflow="fold")
    table.add_column("identity", overflow="fold")
    for heading in ("objects", "size", "newest use", "oldest use"):
        table.add_column(heading, justify="right", overflow="fold")
    for each in found.namespaces:
        table.add_row(
            Text(each.name[:12]),
            Text(", ".join(_identity_parts(each.identity)) or "unknown"),
            f"{each.objects:,}",
            size_text(each.size_bytes),
            age_text(None if each.newest is None else now - each.newest),
            age_text(None if each.oldest is None else now - each.oldest),
        )
    print_table(table)
    for each in found.namespaces:
        sealed = ", ".join(f"{count} {seal}" for seal, count in each.seals.most_common())
        if set(each.seals) - {"no tag"}:
            console().print(
                Text(
                    f"{each.name[:12]}: of the first {each.seals.total()} objects {sealed}; tags "
                    "are not checked here: kvtier verify --keys DIR"
                )
            )
    capacity = (found.ledger or {}).get("capacity")
    of = f" of {size_text(capacity)}" if isinstance(capacity, int) else ""
    out = console()
    out.print(Text(f"\n{found.root}: {size_text(found.total_bytes)}{of}"))
    temporary_size = size_text(found.temporary_bytes)
    out.print(Text(f"temporary files: {found.temporaries}, {temporary_size}"))
    if found.janitor is None:
        out.print("no janitor")
    else:
        charge = (found.ledger or {}).get("charge")
        charged = "unknown" if charge is None else size_text(charge)
        line = f"janitor, term {found.term}: {_holder_text(found.janitor)}, charged {charged}"
        active = found.janitor.state in ("Alive", "Elsewhere")
        out.print(Text(line, style="" if active else "yellow"))
    for writer in found.writers:
        granted = size_text(sum(writer.grants.values()))
        grants = f"{len(writer.grants)} grants, {granted}"
        out.print(Text(f"writer: {_holder_text(writer)}, {grants}"))


def _identity_parts(identity: dict[str, str]) -> Iterator[str]:
    for key, value in identity.items():
        yield value if key in ("model", "engine", "dtype") else f"{key} {value}"


def _holder_text(holder: HolderStatus) -> str:
    parts = holder.name.split("-")
    pid = parts[2] if len(parts) == 5 else "?"
    states = {
        "Alive": f"process {pid}, alive",
        "Gone": f"process {pid}, exited",
        "Released": "released",
        "Elsewhere": f"process {pid} on another host or in another container",
    }
    return states.get(holder.state, holder.state)


# kvtier verify


@contextmanager
def _progress_bar(total: int, shown: bool) -> Iterator[Callable[[int, str], None]]:
    """A progress bar on standard error. Yields a function that sets progress and description."""
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


def verify(directory: Path, keys: Path | None, *, delete: bool) -> VerifyReport:
    """Reads and verifies every object. ``keys``: directory with a file for each key, as a Secret is
    mounted. Raises ``ConfigurationError`` and ``OSError``."""
    root = tier_root(directory)
    key_set = None if keys is None else read_key_set(keys)
    objects = objects_of(root, time.time())
    with _progress_bar(len(objects), error_console().is_terminal) as update:

        def progress(done: VerifyReport) -> None:
            update(done.seen, f"corrupt: {done.corrupt}")

        return verify_objects(root, objects, key_set, delete=delete, progress=progress)


def verify_json(done: VerifyReport) -> dict[str, Any]:
    """The output of ``kvtier verify --json``."""
    return {
        "verified": done.objects,
        "bytes": done.size_bytes,
        "vanished": done.vanished,
        "unverifiable": done.not_verified["unverifiable"],
        "encrypted": done.not_verified["no_key"],
        "otherVersion": done.not_verified["other_version"],
        "tagNotChecked": done.unproven,
        "untrusted": done.untrusted,
        "corrupt": done.corrupt,
        "bad": [
            {
                "path": each.path,
                "reason": each.reason,
                "corrupt": each.corrupt,
                "untrusted": each.untrusted,
                "deleted": each.deleted,
            }
            for each in done.bad
        ],
    }


def show_verify(done: VerifyReport) -> None:
    """Prints the totals to standard output and bad objects to standard error."""
    for each in done.bad:
        line = Text(f"{each.path}: ")
        line.append(_failure(each), style="red")
        error_console().print(line.append(f": {each.reason}{', deleted' if each.deleted else ''}"))
    parts = [
        f"{done.objects:,} objects verified ({size_text(done.size_bytes)})",
        f"{done.corrupt} corrupt",
    ]
    unreadable = len(done.bad) - done.corrupt - done.untrusted
    if unreadable:
        parts.append(f"{unreadable} unreadable")
    if done.untrusted:
        parts.append(f"{done.untrusted} not proven by the keys")
    for reason, number in sorted(done.not_verified.items()):
        parts.append(f"{number} not verified: {_NOT_VERIFIED.get(reason, reason)}")
    if done.vanished:
        parts.append(f"{done.vanished} removed during verification")
    console().print(Text(", ".join(parts)))
    if done.unproven:
        console().print(
            Text(
                f"the tags of {done.unproven} objects were not checked, so anyone who can write to "
                "the directory may have stored them: check them with --keys DIR"
            )
        )


_NOT_VERIFIED = {
    "no_key": "encrypted; give the keys with --keys DIR",
    "other_version": "another format version",
    "unverifiable": "install the xxhash package",
}


def _failure(failed: FailedObject) -> str:
    if failed.corrupt:
        return "corrupt"
    return "not proven" if failed.untrusted else "unreadable"


# kvtier gc


def gc(
    directory: Path,
    capacity: str,
    retention_seconds: float | None,
    keys: Path | None = None,
    *,
    dry_run: bool,
) -> CollectReport:
    """Enforces the limits. ``keys``: as for ``verify``. Raises ``ConfigurationError`` and
    ``OSError``."""
    size = parse_size("--capacity", capacity)
    key_set = None if keys is None else read_key_set(keys)
    root = tier_root(directory)
    try:
        with error_console().status("") as status:
            return collect(
                root,
                size,
                retention_seconds,
                dry_run=dry_run,
                keys=key_set,
                hooks=CollectHooks(progress=lambda text: status.update(text)),
            )
    except TierError as error:
        raise OSError(str(error)) from error


def gc_json(done: CollectReport) -> dict[str, Any]:
    """The output of ``kvtier gc --json``."""
    return {
        "dryRun": done.dry_run,
        "janitor": done.janitor,
        "beforeBytes": done.before_bytes,
        "afterBytes": done.after_bytes,
        "namespaces": done.namespaces,
        "objects": done.objects,
        "bytes": done.size_bytes,
        "announced": done.announced,
    }


def show_gc(done: CollectReport) -> None:
    """Prints what was removed."""
    verb = "would remove" if done.dry_run else "removed"
    line = f"{verb} {done.objects:,} objects ({size_text(done.size_bytes)})"
    if done.namespaces:
        names = ", ".join(name[:12] for name in done.namespaces)
        line += f" and {len(done.namespaces)} namespaces: {names}"
    console().print(Text(line))
    after = "would be" if done.dry_run else "now"
    console().print(
        Text(f"{size_text(done.before_bytes)} before, {after} {size_text(done.after_bytes)}")
    )
    if not done.dry_run and not done.janitor:
        console().print("the janitor of this directory will update its count")
    if done.announced:
        console().print(f"announced {done.announced:,} removals to the processes that use it")
