"""Mounts of this process, read without touching them: a dead mount would not answer."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MOUNT_INFO = Path("/proc/self/mountinfo")
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One mount. ``options``: of the mount and of its file system."""

    directory: str
    kind: str
    source: str
    options: frozenset[str]

    @property
    def is_nfs(self) -> bool:
        """Whether it is NFS of any version."""
        return self.kind in ("nfs", "nfs4")

    @property
    def is_read_only(self) -> bool:
        """Whether nothing can be written."""
        return "ro" in self.options


def parse(lines: Iterable[str]) -> list[Mount]:
    """The mounts in lines of ``mountinfo``. Lines of another form are left out."""
    found = []
    for line in lines:
        before, separator, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if not separator or len(left) < 6 or len(right) < 2:
            continue
        options = frozenset([*left[5].split(","), *(right[2].split(",") if len(right) > 2 else ())])
        found.append(Mount(_unescaped(left[4]), right[0], _unescaped(right[1]), options))
    return found


def mounts() -> list[Mount]:
    """The mounts of this process; none if they cannot be read."""
    try:
        return parse(MOUNT_INFO.read_text(encoding="utf-8", errors="replace").splitlines())
    except OSError:
        return []


def mount_of(path: str, found: Iterable[Mount]) -> Mount | None:
    """The mount that a path is on, by its name only: symbolic links are not followed."""
    wanted = os.path.abspath(path)
    best: Mount | None = None
    for each in found:
        prefix = each.directory.rstrip("/")
        covers = wanted == each.directory or wanted.startswith(f"{prefix}/")
        # Of several mounts at one place the last counts.
        if covers and (best is None or len(each.directory) >= len(best.directory)):
            best = each
    return best


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)
