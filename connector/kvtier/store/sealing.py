"""Sealing: checksums over objects that engines delivered, on threads of their own.

Only sealed objects go to lower tiers (DATAPATH 7). An object is pinned while it waits and while it is hashed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from kvtier.store.jobs import Job
from kvtier.store.memory import Entry, MemoryTable
from kvtier.store.shared import Shared
from kvtier.tiers.base import ObjectMeta, aligned

SEALING_BIT = 1
"""In ``Entry.busy``."""
MAX_SUBMITTED = 4
"""Calls handed to the executor at a time: enough for two threads never to wait for the owner."""


class Sealer:
    """Objects on their way to a checksum. Owner's thread only. ``on_sealed`` gets each object that has one, still
    pinned."""

    def __init__(self, shared: Shared, table: MemoryTable, max_pending_bytes: int) -> None:
        self.on_sealed: Callable[[Entry], None] | None = None
        self._shared = shared
        self._table = table
        self._max_pending_bytes = max_pending_bytes
        self._queue: deque[Entry] = deque()
        self._submitted = 0
        self.pending_bytes = 0

    def __len__(self) -> int:
        """Objects that wait or are being hashed."""
        return len(self._queue) + self._submitted

    def add(self, entry: Entry) -> None:
        """Seals the object some time, unless it is sealed or more is waiting already than may be pinned for it."""
        if entry.meta is not None or entry.kept is not None or entry.busy & SEALING_BIT:
            return
        size = entry.slot.segment.kind.slot_bytes
        if self.pending_bytes + size > self._max_pending_bytes:
            self._shared.count("seals_dropped", "", "too_many_pending")
            return
        self.pending_bytes += size
        entry.busy |= SEALING_BIT
        self._table.pin(entry)
        self._queue.append(entry)
        self.run()

    def run(self) -> None:
        """Submits what may be submitted."""
        while self._queue and self._submitted < MAX_SUBMITTED and not self._shared.fenced:
            entry = self._queue.popleft()
            self._submitted += 1
            work = partial(self._hash, entry.slot.offset, entry.shard_bytes)
            Job(self._shared.clock, work, partial(self._hashed, entry)).submit(self._shared.io, "hash")

    def _hash(self, offset: int, shard_bytes: tuple[int, ...]) -> ObjectMeta:
        """Runs on an I/O thread."""
        checksums = self._shared.checksums
        digests = []
        for size in shard_bytes:
            digests.append(checksums.digest(self._shared.view(offset, size)))
            offset += aligned(size)
        return ObjectMeta(shard_bytes, checksums.kind, tuple(digests))

    def _hashed(self, entry: Entry, result: object, error: BaseException | None) -> None:
        self._submitted -= 1
        self.pending_bytes -= entry.slot.segment.kind.slot_bytes
        entry.busy &= ~SEALING_BIT
        if isinstance(result, ObjectMeta) and error is None:
            entry.meta = result
            self._shared.count("seals")
            self._shared.record(entry)
            if self.on_sealed is not None:
                self.on_sealed(entry)
        else:
            self._shared.count("seals_failed")
            if error is not None:
                self._shared.unexpected.note("sealing", error)
        self._table.unpin(entry)
        self.run()
