"""The thread that turns a keeper, and room for its records where the file system has none left."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING

from kvtier.errors import TierError
from kvtier.tiers.filesystem.direct import GONE
from kvtier.tiers.filesystem.index import Index
from kvtier.tiers.filesystem.scan import object_path

if TYPE_CHECKING:
    from kvtier.tiers.filesystem.keeper import Keeper

_log = logging.getLogger("kvtier.tiers.filesystem")

_PERCENT = 5


def make_room(root: str, index: Index) -> list[tuple[str, bytes, str, int]]:
    """Removes the objects that were used longest ago, a part of what there is: namespace, key, path and bytes of each. Everybody may do so
    at any time; it is for one whose records find no room, and who could not evict in order without them. Raises ``OSError``."""
    removed = []
    wanted = max(index.usage().used_bytes * _PERCENT // 100, 1)
    for namespace, key, _ in index.oldest(wanted):
        path = object_path(root, namespace, key)
        try:
            size = os.lstat(path).st_size
            os.unlink(path)
        except OSError as error:
            if error.errno not in GONE:
                raise
            size = 0
        removed.append((namespace, key, path, size))
    return removed


def keep_turning(keeper_of: weakref.ref[Keeper], wake: threading.Event) -> None:
    """The thread. It keeps no tier alive: one that was dropped without being closed ends it."""
    while True:
        keeper = keeper_of()
        if keeper is None:
            return
        pause = keeper.pause_seconds()
        del keeper
        wake.wait(pause)
        wake.clear()
        keeper = keeper_of()
        if keeper is None:
            return
        try:
            if keeper.stopping:
                keeper.leave()
                return
            keeper.turn()
            keeper.last_error = ""
        except TierError as error:
            if str(error) != keeper.last_error:
                _log.warning("%s", error)
            keeper.last_error = str(error)
        except Exception as error:  # noqa: BLE001
            # A bug must not end the thread that keeps the leases: others would take this process for dead, again and again.
            if repr(error) != keeper.last_error:
                _log.exception("the file tier's upkeep failed and goes on")
            keeper.last_error = repr(error)
