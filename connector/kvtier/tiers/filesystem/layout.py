"""The layout of a tier's directory.

<root>/<namespace>/identity.json              why this namespace is separate, for people
<root>/<namespace>/index                      what the namespace holds (saved_index.py)
<root>/<namespace>/<2 hex>/<2 hex>/<key>.kv   one object (format.py)
<root>/.kvtier/janitor-<term>/ledger          the leader's record; the highest term leads
<root>/.kvtier/janitor-<term>/offer-<writer>.<number>   a grant that is not yet taken up
<root>/.kvtier/writers/<writer>/record        a writer's record
<root>/.kvtier/writers/<writer>/grant-<number>-<bytes>  a grant that it took up
<root>/.kvtier/janitor-<term>/announcements   what all writers announce (announcements.py)
<root>/.kvtier/writers/<writer>/announcements what that writer announces
<root>/.kvtier/writers/<writer>/t-<random>    a file being written; renamed when it is complete

Processes of different releases share a directory: names and formats do not change.
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
ANNOUNCEMENTS = "announcements"
IDENTITY = "identity.json"
SAVED_INDEX = "index"
WORKING_PREFIX = "t-"
DIRECTORY_BYTES = 4096
"""What a directory is charged: one block, as ext4 and xfs allocate it."""

_TERM = re.compile(r"janitor-(\d{1,200})")
_GRANT = re.compile(r"grant-(\d{1,18})-(\d{1,18})")


@dataclass(frozen=True, slots=True)
class Modes:
    """Permissions and ownership of created files. ``gid``, ``uid``: None for the process's own."""

    file: int
    directory: int
    gid: int | None
    uid: int | None = None


def term_path(root: Path, term: int) -> Path:
    """The directory of the leader of that term."""
    return root / CONTROL / f"janitor-{term}"


def terms_in(names: list[str]) -> list[int]:
    """The terms among the names in the control directory, ascending."""
    return sorted(int(match[1]) for name in names if (match := _TERM.fullmatch(name)))


def writers_path(root: Path) -> Path:
    """The directory that holds the writers' directories."""
    return root / CONTROL / WRITERS


def offer_name(writer: str, number: int) -> str:
    """Name of a grant in the leader's directory."""
    return f"offer-{writer}.{number}"


def grant_name(number: int, size_bytes: int) -> str:
    """Name of a grant in its writer's directory."""
    return f"grant-{number}-{size_bytes}"


def grants_in(names: list[str]) -> dict[int, int]:
    """The grants among the names in a writer's directory: bytes by number."""
    return {int(match[1]): int(match[2]) for name in names if (match := _GRANT.fullmatch(name))}


def make_directory(path: Path, modes: Modes) -> bool:
    """Creates one directory. False if it exists. Raises ``OSError``."""
    try:
        os.mkdir(path, modes.directory)
    except FileExistsError:
        return False
    if modes.gid is not None:
        os.chown(path, -1 if modes.uid is None else modes.uid, modes.gid)
        os.chmod(path, modes.directory)
    return True
