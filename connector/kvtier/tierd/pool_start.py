"""The host pool's beginning, which takes a while where it has a hundred gigabytes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvtier.store.records import SlotTable
from kvtier.tierd.building import memory_document
from kvtier.tierd.pool import PoolFile
from kvtier.tierd.rundir import RunDirectory, sweep
from kvtier.tierd.takeover import open_table
from kvtier.tierd.wire import POOL_NAME
from kvtier.topology.models import Structural

_log = logging.getLogger("kvtier.tierd")


class PoolStart:
    """Allocates the pool on a thread of its own, after making room: dead engines' pools are removed first. ``done`` is called on
    that thread at the end, whatever came of it: ``error`` says why there is no ``pool``."""

    def __init__(self, run: RunDirectory, structural: Structural, done: Callable[[], None]) -> None:
        self.pool: PoolFile | None = None
        self.table: SlotTable | None = None
        self.error = ""
        self.finished = False
        self._run = run
        self._memory = memory_document(structural)
        self._topology = structural.content_hash
        self._done = done
        self._stop = threading.Event()
        threading.Thread(target=self._start, name="kvtier-pool", daemon=True).start()

    def _start(self) -> None:
        try:
            if not self._run.shared:
                sweep(self._run.path)
            path = self._run.path / POOL_NAME
            mode, persists = self._run.file_mode, self._memory.persistence == "Pod"
            pool = PoolFile(path, self._memory.capacity_bytes, mode, lambda: not self._stop.is_set())
            self.table = open_table(self._run.path, mode, pool, self._topology, persists)
            self.pool = pool
            self.pool.touch_in_background()
        except OSError as error:
            self.error = f"the host pool cannot be allocated in {self._run.path}: {error}"
            _log.error("%s", self.error)
        except Exception as error:  # noqa: BLE001
            # Whatever it is: a thread that ends without a word would keep everybody waiting for the pool.
            self.error = f"the host pool cannot be allocated in {self._run.path}: {error!r}"
            _log.exception("%s", self.error)
        self.finished = True
        self._done()

    def stop(self) -> None:
        """Ends allocating at the next piece."""
        self._stop.set()
