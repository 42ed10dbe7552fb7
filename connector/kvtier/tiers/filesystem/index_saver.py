"""Saves the index of a directory now and then, and restores it at the start (saved_index.py).

The leader saves, in granted bytes. A directory that is large enough for listing it to take long is
served from what was saved; of any other one only how often objects were used is taken. Nothing here
fails the tier: what cannot be saved or restored is logged, and the directory is scanned.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

from kvtier.errors import TierError
from kvtier.tiers.filesystem import saved_index
from kvtier.tiers.filesystem.directory import TierDirectory
from kvtier.tiers.filesystem.layout import SAVED_INDEX
from kvtier.tiers.filesystem.saved_index import InvalidIndexError, SavedIndex
from kvtier.tiers.isolation_keys import KeySet

_log = logging.getLogger("kvtier.tiers.filesystem")
_NAMESPACE = re.compile(r"[0-9a-f]{32}")
SAVE_SECONDS = 600.0
"""Between two saves. Objects that were stored later are found when the scan reaches them."""
MIN_OBJECTS = 20_000
"""A smaller directory is scanned in less than a second: it is not served from a saved index."""
_CHANGED_FRACTION = 50
"""A save is worthwhile when there were as many uses as this part of the objects."""
_MAX_CAPACITIES = 4
"""How many times the capacity a saved index may claim to hold."""
_CAPACITY_FRACTION = 64
"""Saved indexes take at most this part of the capacity."""

Publish = Callable[[str, int, Callable[[str], None]], None]
"""``publish(path, size, write)``: calls ``write`` with a temporary path for a file of at most
``size`` bytes, and puts it in the place of ``path``."""


class IndexSaver:
    """The saved indexes of one directory. One thread at a time; methods may block.

    ``keys``: returns the keys in effect, None if the tier has none. ``clock``: monotonic seconds.
    """

    def __init__(
        self, directory: TierDirectory, keys: Callable[[], KeySet | None], publish: Publish
    ) -> None:
        self.saves = 0
        self._directory = directory
        self._index = directory.index
        self._keys = keys
        self._publish = publish
        self._opened_at = directory.clock()
        self._saved_at = float("-inf")
        self._saved_uses = 0

    def restore(self) -> int:
        """Fills the index from saved ones and reports their objects; returns how many. The
        directory is to be scanned all the same."""
        found = self._read_all()
        if sum(map(len, found)) < MIN_OBJECTS:
            return 0
        restored = 0
        left_bytes = _MAX_CAPACITIES * self._directory.limits().capacity_bytes
        for each in saved_index.merged(found) if found else ():
            left_bytes -= each.size_bytes
            if left_bytes < 0:
                # Lowered since, or invented. The scan adds what exists.
                break
            if self._index.add_saved(each):
                restored += 1
                self._directory.on_change(each.namespace, each.key, True)
        if restored:
            self._saved_at, self._saved_uses = self._directory.clock(), self._index.uses
            _log.info(
                "%s: serving %d objects of a saved index; verifying it",
                self._directory.root,
                restored,
            )
        return restored

    def restore_uses(self) -> None:
        """Takes how often the indexed objects were used from saved indexes. For a directory that
        was scanned; not for a large one, whose saved index takes long to read."""
        if self._index.count >= MIN_OBJECTS:
            return
        for saved in self._read_all():
            for key, uses in saved.uses_by_key():
                if uses:
                    self._index.add_uses(saved.namespace, key, uses)

    def _read_all(self) -> list[SavedIndex]:
        found: list[SavedIndex] = []
        left = self._index.max_objects
        for name in self._namespaces():
            saved = self._read(name, left)
            if saved is not None and len(saved):
                left -= len(saved)
                found.append(saved)
        return found

    def _namespaces(self) -> list[str]:
        try:
            return sorted(filter(_NAMESPACE.fullmatch, os.listdir(self._directory.root)))
        except OSError:
            return []

    def _path(self, namespace: str) -> Path:
        return self._directory.root / namespace / SAVED_INDEX

    def _read(self, namespace: str, max_objects: int) -> SavedIndex | None:
        path = self._path(namespace)
        try:
            return saved_index.read(path, namespace, self._keys(), max_objects)
        except FileNotFoundError:
            return None
        except (OSError, InvalidIndexError, TierError) as error:
            _log.warning("%s is not used: %s", path, error)
            return None

    def save_due(self) -> None:
        """Saves the index if it is time. For the leader, while its index is complete."""
        now, uses = self._directory.clock(), self._index.uses
        changed = (uses - self._saved_uses) * _CHANGED_FRACTION
        count = self._index.count
        if now - self._saved_at < SAVE_SECONDS or not count or changed < count:
            return
        if count < MIN_OBJECTS and now - self._opened_at < SAVE_SECONDS:
            # No start waits for it.
            return
        self._saved_at, self._saved_uses = now, uses
        for namespace in self._index.namespaces():
            try:
                self._save(namespace)
            except (OSError, TierError) as error:
                _log.warning("%s was not saved: %s", self._path(namespace), error)

    def _save(self, namespace: str) -> None:
        keys, mode = self._keys(), self._directory.modes.file
        size = saved_index.size_bytes(self._index, namespace)
        if size * _CAPACITY_FRACTION > self._directory.limits().capacity_bytes:
            return

        def write(path: str) -> None:
            saved_index.write(path, self._index, namespace, keys, mode)
            gid = self._directory.modes.gid
            if gid is not None:
                os.chown(path, -1, gid)
                os.chmod(path, mode)

        self._publish(str(self._path(namespace)), size, write)
        self.saves += 1
