"""What all parts of the store work with, and what they need from outside."""

from __future__ import annotations

import hashlib
from typing import Protocol

from kvtier.store.contract import Clock, IoExecutor, StoreCounters, StoreEvent
from kvtier.store.timers import Timers

NOTHING = memoryview(b"")


class Checksums(Protocol):
    """How objects are sealed. Called on I/O threads, several at once."""

    @property
    def kind(self) -> str:
        """Name of the algorithm, as it stands in ``ObjectMeta.checksum_kind``."""
        ...

    def digest(self, data: memoryview) -> bytes:
        """Checksum over exactly these bytes."""
        ...


class PlainChecksums:
    """BLAKE2b-128 from the standard library: for tests and simulations that bring nothing else."""

    kind = "blake2b-128"

    def digest(self, data: memoryview) -> bytes:
        """Checksum over exactly these bytes."""
        return hashlib.blake2b(data, digest_size=16).digest()


class Shared:
    """State that belongs to the store as a whole. Owner's thread only, except ``view``.

    ``fenced``: no slot may be granted, evicted, hashed or read into, because workers of the pool's last tierd may still
    write anywhere (DATAPATH 4).
    """

    def __init__(
        self,
        memory: memoryview | None,
        io: IoExecutor,
        clock: Clock,
        checksums: Checksums,
        counters: StoreCounters,
        fenced: bool,
    ) -> None:
        self.io = io
        self.clock = clock
        self.checksums = checksums
        self.counters = counters
        self.fenced = fenced
        self.timers = Timers()
        self.events: list[StoreEvent] = []
        self._memory = memory

    def view(self, offset: int, size: int) -> memoryview:
        """``size`` bytes of the pool from ``offset``; empty where the store runs without memory. Any thread."""
        return NOTHING if self._memory is None else self._memory[offset : offset + size]

    def emit(self, event: StoreEvent) -> None:
        """Queues an event for the owner."""
        self.events.append(event)

    def count(self, name: str, tier: str = "", reason: str = "", by: int = 1) -> None:
        """Adds to a counter."""
        self.counters.add(name, tier, reason, by)

    def violation(self, reason: str) -> None:
        """Counts something that a correct client does not do. It has no other effect."""
        self.counters.add("protocol_violations", "", reason)
