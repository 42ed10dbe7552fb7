"""Being the janitor of a directory: a numbered directory whose existence is the office.

Making ``janitor-<n + 1>`` is atomic, so one of those who try gets it; removing ``janitor-<n>`` is what deposes its holder, who can neither
announce nor offer anything any more. The number is the fencing number; the highest directory always stays, so none is used twice.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.tiers.filesystem import record
from kvtier.tiers.filesystem.layout import (
    CONTROL,
    LEDGER,
    PREVIOUS,
    RECORD,
    Modes,
    grants_among,
    make_directory,
    seat_fences,
    seat_path,
    writers_path,
)
from kvtier.tiers.filesystem.lease import BROKEN, Watch, fresh_names, in_this_process, remove_fenced, surely_gone
from kvtier.tiers.filesystem.shapes import is_ledger, is_writer


@dataclass(frozen=True, slots=True)
class Inherited:
    """What a new janitor finds. ``base_bytes``: None if the predecessor's books cannot be read. ``grants``: of every writer."""

    fence: int
    base_bytes: int | None
    grants: dict[str, dict[int, int]]


def make_control(root: Path, modes: Modes) -> None:
    """Makes the directories below ``root``, which must be there. Raises ``OSError``."""
    make_directory(root / CONTROL, modes)
    make_directory(writers_path(root), modes)


def top_fence(root: Path, *, fresh: bool) -> int:
    """The janitor's fencing number, 0 if there never was one. Raises ``OSError``."""
    control = root / CONTROL
    names = fresh_names(control) if fresh else os.listdir(control)
    return max(seat_fences(names), default=0)


def read_ledger(root: Path, fence: int) -> dict[str, Any] | None:
    """The janitor's record; None if there is none that is whole and understood. Raises ``OSError``."""
    try:
        found = record.read(seat_path(root, fence) / LEDGER)
    except OSError as error:
        if error.errno in BROKEN:
            return None
        raise
    return found if found is not None and is_ledger(found) else None


def vacant(ledger: dict[str, Any] | None, fence: int, watch: Watch, now: float, *, supersede: bool) -> bool:
    """Whether the office may be taken. ``supersede``: also from another tier of this process."""
    if not fence:
        return True
    beat = None if ledger is None else ledger.get("beat")
    if watch.expired((fence, beat), now):
        return True
    if ledger is None:
        return False
    holder = str(ledger.get("holder"))
    return bool(ledger.get("released")) or surely_gone(holder) or (supersede and in_this_process(holder))


def claim(root: Path, above: int, holder: str, modes: Modes) -> Inherited | None:
    """Takes the office above fencing number ``above``; None if somebody else did. Raises ``OSError``."""
    fence = above + 1
    mine = seat_path(root, fence)
    if not make_directory(mine, modes):
        return None
    if top_fence(root, fresh=True) != fence:
        remove_fenced(mine)
        return None
    record.create(mine / LEDGER, first_record(fence, holder), modes)
    try:
        # The predecessor cannot announce anything from here on.
        os.rename(seat_path(root, above) / LEDGER, mine / PREVIOUS)
    except OSError as error:
        if error.errno not in BROKEN:
            raise
    for lower in seat_fences(os.listdir(root / CONTROL)):
        if lower < fence and not remove_fenced(seat_path(root, lower)):
            raise OSError(f"{seat_path(root, lower)} cannot be removed")
    grants = {writer: grants_among(_names(writers_path(root) / writer)) for writer in fresh_names(writers_path(root))}
    # Read after the grants: one that the predecessor had struck off by then is in what it wrote before it did so.
    return Inherited(fence, _base(mine / PREVIOUS), grants)


def first_record(fence: int, holder: str) -> dict[str, Any]:
    """A janitor's record before it knows anything."""
    return {"fence": fence, "holder": holder, "beat": 0, "released": False, "base": None, "recall": 0, "writers": {}}


def _names(directory: Path) -> list[str]:
    try:
        return fresh_names(directory)
    except OSError as error:
        if error.errno in BROKEN:
            return []
        raise


def _base(previous: Path) -> int | None:
    try:
        found = record.read(previous)
        os.unlink(previous)
    except OSError as error:
        if error.errno in BROKEN:
            return None
        raise
    base = None if found is None else found.get("base")
    return base if isinstance(base, int) and not isinstance(base, bool) and base >= 0 else None


def read_writer(root: Path, writer: str) -> dict[str, Any] | None:
    """A writer's record; None if there is none that is whole and understood. Raises ``OSError``."""
    try:
        found = record.read(writers_path(root) / writer / RECORD)
    except OSError as error:
        if error.errno in BROKEN:
            return None
        raise
    return found if found is not None and is_writer(found) else None
