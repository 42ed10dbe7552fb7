"""Names below a tier's directory.

<root>/<namespace>/identity.json              why this namespace is one of its own, for people
<root>/<namespace>/<2 hex>/<2 hex>/<key>.kv   one object (format.py)
<root>/.kvtier/janitor-<fence>/ledger         the janitor's record; the highest fence is the janitor
<root>/.kvtier/janitor-<fence>/offer-<writer>.<number>   a grant not yet taken up
<root>/.kvtier/writers/<writer>/record        a writer's record
<root>/.kvtier/writers/<writer>/grant-<number>-<bytes>   a grant it took up
<root>/.kvtier/writers/<writer>/t-<random>    a file being written, renamed to its place when whole

The highest fencing number is the janitor's.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

CONTROL = ".kvtier"
LEDGER = "ledger"
PREVIOUS = "previous"
RECORD = "record"
WRITERS = "writers"
IDENTITY = "identity.json"
WORKING_PREFIX = "t-"
DIRECTORY_BYTES = 4096
"""What a directory is charged: a block, as ext4 and xfs give it."""

_SEAT = re.compile(r"janitor-(\d{1,200})")
_GRANT = re.compile(r"grant-(\d{1,18})-(\d{1,18})")


@dataclass(frozen=True, slots=True)
class Modes:
    """Permissions and group of what is made. ``uid``: whose it is, where that is not this process's user."""

    file: int
    directory: int
    gid: int | None
    uid: int | None = None


def seat_path(root: Path, fence: int) -> Path:
    """Directory of the janitor with that fencing number."""
    return root / CONTROL / f"janitor-{fence}"


def seat_fences(names: list[str]) -> list[int]:
    """Fencing numbers among the names in the control directory, ascending."""
    return sorted(int(match[1]) for name in names if (match := _SEAT.fullmatch(name)))


def writers_path(root: Path) -> Path:
    """Where writers have their directories."""
    return root / CONTROL / WRITERS


def offer_name(writer: str, number: int) -> str:
    """Name of a grant in the janitor's directory."""
    return f"offer-{writer}.{number}"


def grant_name(number: int, size_bytes: int) -> str:
    """Name of a grant in its writer's directory."""
    return f"grant-{number}-{size_bytes}"


def grants_among(names: list[str]) -> dict[int, int]:
    """Grants by number, with their bytes."""
    return {int(match[1]): int(match[2]) for name in names if (match := _GRANT.fullmatch(name))}


def make_directory(path: Path, modes: Modes) -> bool:
    """Makes one directory; False if it was there. Raises ``OSError``."""
    try:
        os.mkdir(path, modes.directory)
    except FileExistsError:
        return False
    if modes.gid is not None:
        os.chown(path, -1 if modes.uid is None else modes.uid, modes.gid)
        os.chmod(path, modes.directory)
    return True
