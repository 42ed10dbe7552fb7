"""What the modules that maintain a directory share: where it is, how its files are made, what is
indexed and which limits hold. A module of its own because janitor, scans and maintenance need it
and import each other in one direction only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.tiers.base import OnChange, TierLimits
from kvtier.tiers.filesystem.announcements import Announcements
from kvtier.tiers.filesystem.free_space import FreeSpace
from kvtier.tiers.filesystem.index import Index
from kvtier.tiers.filesystem.layout import Modes


def _no_change(_namespace: str, _key: bytes, _present: bool) -> None:
    return


@dataclass(frozen=True, slots=True)
class TierDirectory:
    """One tier's directory.

    ``limits``: the live limits. ``shared``: other processes write here. ``on_change`` announces
    objects that appeared or were removed. ``in_use``: namespaces of engines of this process.
    ``clock``: monotonic seconds, for leases. ``free_space``: keeps ``minFree``; None where the
    capacity alone limits. ``announcements``: what other processes are told. ``pace``: what pauses
    of background threads, and the wait for a grant, are multiplied by.
    """

    root: Path
    modes: Modes
    index: Index
    limits: Callable[[], TierLimits]
    shared: bool
    on_change: OnChange = _no_change
    in_use: Callable[[], Container[str]] = frozenset
    clock: Callable[[], float] = time.monotonic
    announcements: Announcements = field(default_factory=lambda: Announcements(False))
    free_space: FreeSpace | None = None
    pace: float = 1.0

    def drop(self, namespace: str, key: bytes) -> None:
        """The object no longer exists: removes it from the index and announces it."""
        if self.index.remove(namespace, key):
            self.on_change(namespace, key, False)
