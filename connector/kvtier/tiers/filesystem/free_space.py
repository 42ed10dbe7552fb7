"""Free space of a directory's file system: what ``minFree`` leaves for this tier.

Other files on the same file system are not in the ledger, so the capacity alone does not keep room
for them. Every writer therefore compares the free space with ``minFree`` before each file, and the
leader lowers the directory's limit to what the file system has for it, and evicts to that.

The free space is read at most every ``MAX_AGE_SECONDS``, and earlier, but not more often than every
``MIN_AGE_SECONDS``, where the bytes that this process has written since would exceed it. What other
processes write is thus obeyed within ``MAX_AGE_SECONDS`` by writers. The leader's next round of
maintenance follows within ``HEARTBEAT_SECONDS`` of that.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import TierMinFreeError
from kvtier.tiers.base import TierLimits

MAX_AGE_SECONDS = 1.0
MIN_AGE_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class _Reading:
    """Bytes of the file system at a time. ``written_bytes``: what this process had written."""

    size_bytes: int
    available_bytes: int
    at: float
    written_bytes: int


class FreeSpace:
    """The free space below ``root``. ``limits``: the live limits. ``clock``: monotonic seconds.

    Any thread may call any method; ``admit`` and ``allowed_bytes`` may block as long as the file
    system does. No lock is held meanwhile.
    """

    def __init__(
        self,
        root: Path,
        limits: Callable[[], TierLimits],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root = root
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._reading: _Reading | None = None
        self._writing_bytes = 0
        """Files that are being written: an unknown part of them is on the disk already."""
        self._written_bytes = 0
        self._allowed: _Reading | None = None
        self._own_bytes = 0

    # Writers.

    @contextmanager
    def admit(self, size_bytes: int) -> Iterator[None]:
        """Surrounds the writing of a file of ``size_bytes``. Raises ``TierMinFreeError`` if
        ``minFree`` leaves no room for it, or if the free space cannot be read.
        """
        limits = self._limits()
        if not limits.keeps_free:
            yield
            return
        self._enter(size_bytes, limits)
        try:
            yield
        finally:
            with self._lock:
                self._writing_bytes -= size_bytes
                self._written_bytes += size_bytes

    def _enter(self, size_bytes: int, limits: TierLimits) -> None:
        reading = self._read(MAX_AGE_SECONDS)
        for last in (False, True):
            min_free = limits.min_free(reading.size_bytes)
            with self._lock:
                own = self._writing_bytes + self._written_bytes - reading.written_bytes
                left = reading.available_bytes - own - min_free
                if left >= size_bytes:
                    self._writing_bytes += size_bytes
                    return
            if not last:
                reading = self._read(MIN_AGE_SECONDS)
        raise TierMinFreeError(
            f"{self._root}: the file system has {reading.available_bytes} bytes free, and minFree "
            f"keeps {min_free}: no room for {size_bytes}"
        )

    def _read(self, max_age_seconds: float) -> _Reading:
        now, reading = self._clock(), self._reading
        if reading is not None and now - reading.at < max_age_seconds:
            return reading
        before = self._written_bytes
        try:
            found = os.statvfs(self._root)
        except OSError as error:
            raise TierMinFreeError(
                f"{self._root}: cannot keep minFree, because the free space cannot be read: "
                f"{error.strerror or error}"
            ) from error
        if not found.f_blocks:
            raise TierMinFreeError(
                f"{self._root}: cannot keep minFree, because the file system does not report its "
                "size; set minFree to 0"
            )
        reading = _Reading(
            found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, now, before
        )
        self._reading = reading
        return reading

    # The leader.

    def follow(self, own_bytes: int) -> None:
        """Reads the free space for ``allowed_bytes``. ``own_bytes``: what the directory holds now.
        If it cannot be read, the previous answer stays.
        """
        if not self._limits().keeps_free:
            self._allowed = None
            return
        if self._allowed is not None and self._clock() - self._allowed.at < MAX_AGE_SECONDS / 2:
            return
        try:
            self._allowed = self._read(0.0)
        except TierMinFreeError:
            return
        self._own_bytes = own_bytes

    def allowed_bytes(self) -> int | None:
        """What the directory may hold by the last ``follow``; None if nothing limits it."""
        limits, reading = self._limits(), self._allowed
        if reading is None or not limits.keeps_free:
            return None
        left = reading.available_bytes - limits.min_free(reading.size_bytes)
        return max(self._own_bytes + left, 0)
