"""What this process announces to the others that use its directory, and what it knows of the logs.

The shared part: everything that stores, removes or scans reports here, without I/O, and the
maintenance publishes the role of this process here. ``announcement_log`` does the I/O.

Every writer appends to a log in its own directory. The leader reads these logs and copies what is
new into one log beside its ledger, which all others follow. So a process makes the same few calls a
second however many others there are, and only the leader's grow with their number. No process
announces where the leader does not set bytes aside for logs: under a leader of an earlier release,
in a directory that is too small, or in a tier of one process.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.tiers.filesystem.announcement_format import BLOCK_BYTES, MAX_BLOCKS, Announcement

MAX_PENDING = 65_536
"""Announcements that wait to be written. More are lost, and found by the leader's next scan."""
MAX_WRITER_BLOCKS = 32
"""Six seconds of a writer that announces as often as it can."""
_MIN_WRITER_BLOCKS = 4
_MIN_LEADER_BLOCKS = 16
_LOG_FRACTION = 64
"""All logs together take at most this part of the capacity."""
_FOLLOWED_SECONDS = 10.0
"""A log that was last polled longer ago is not followed: its file system hangs."""
SPARE_WRITERS = 4
"""Writers that registered since the leader listed them have a log before they are counted."""


def log_blocks(capacity_bytes: int, writers: int) -> tuple[int, int]:
    """Blocks of each writer's log and of the leader's. Zeros: the directory is too small for
    logs."""
    half = capacity_bytes // _LOG_FRACTION // 2 // BLOCK_BYTES
    each = min(MAX_WRITER_BLOCKS, half // (writers + SPARE_WRITERS))
    leader = min(MAX_BLOCKS, half)
    if each < _MIN_WRITER_BLOCKS or leader < _MIN_LEADER_BLOCKS:
        return 0, 0
    return each, leader


def log_bytes(capacity_bytes: int, writers: int) -> int:
    """Bytes to set aside for the logs of so many writers and the leader's."""
    each, leader = log_blocks(capacity_bytes, writers)
    return (each * (writers + SPARE_WRITERS) + leader) * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class LogRole:
    """This process among those of the directory, as of its last round of maintenance.

    * ``path``: this writer's directory; None while it has none. ``term_path``: the leader's; None
      without a leader. ``leads``: this process is the leader.
    * ``writer_blocks``, ``leader_blocks``: sizes of the logs; 0: there are none.
    * ``expected``: how many blocks the leader's log had. ``writers``: the same for each other
      writer that announces, for the leader.
    * ``count``: how many writers the directory has. ``complete``: all of them announce.
    """

    path: Path | None = None
    term_path: Path | None = None
    leads: bool = False
    writer_blocks: int = 0
    leader_blocks: int = 0
    expected: int = 0
    writers: dict[str, int] = field(default_factory=dict)
    count: int = 1
    complete: bool = False


def role_in_ledger(ledger: dict[str, Any] | None) -> tuple[int, int, int, bool]:
    """From a leader's ledger: blocks of a writer's log and of the leader's, blocks that it has
    written, and whether all writers announce. Zeros where it says nothing valid."""
    logs = (ledger or {}).get("logs")
    if not isinstance(logs, list) or len(logs) != 4:
        return 0, 0, 0, False
    if not all(isinstance(value, int) and 0 <= value < 1 << 62 for value in logs):
        return 0, 0, 0, False
    each, leader, written, complete = logs
    if not 1 <= each <= MAX_BLOCKS or not 1 <= leader <= MAX_BLOCKS:
        return 0, 0, 0, False
    return each, leader, written, bool(complete)


def reported_blocks(record: dict[str, Any]) -> int | None:
    """From a writer's record: how many blocks its log has had; None: it does not announce."""
    found = record.get("log")
    if isinstance(found, int) and not isinstance(found, bool) and 0 <= found < 1 << 62:
        return found
    return None


class Announcements:
    """The state of one directory's announcements. Any thread may call any method; none does I/O.

    ``enabled``: other processes use the directory. ``role`` is replaced by the maintenance.
    ``clock``: monotonic seconds.
    """

    def __init__(self, enabled: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.enabled = enabled
        self.role = LogRole()
        self.wake = threading.Event()
        self._clock = clock
        self._written: dict[bool, tuple[Path | None, int]] = {}
        self._followed_at = float("-inf")
        self._lock = threading.Lock()
        self._pending: deque[Announcement] = deque()
        self._losses = 0
        self._repaired = 0
        self._counts: Counter[tuple[str, str]] = Counter()

    # Who stores and removes.

    def published(self, namespace: str, key: bytes, size_bytes: int, previous: bytes = b"") -> None:
        """An object has its final name. ``previous``: key of the object before it in its prefix."""
        self._put(Announcement(namespace, key, size_bytes, previous))

    def removed(self, namespace: str, key: bytes) -> None:
        """An object's file was removed."""
        self._put(Announcement(namespace, key, 0))

    def _put(self, entry: Announcement) -> None:
        if not self.enabled or (not self.role.writer_blocks and self.role.term_path is not None):
            # The leader sets no bytes aside for logs.
            return
        with self._lock:
            if len(self._pending) >= MAX_PENDING:
                self._counts["tier_announcements_lost", "not_sent"] += 1
                return
            self._pending.append(entry)
        self.wake.set()

    def take(self, limit: int) -> list[Announcement]:
        """The oldest entries that wait, ``limit`` at most."""
        with self._lock:
            return [self._pending.popleft() for _ in range(min(limit, len(self._pending)))]

    def restore(self, entries: list[Announcement]) -> None:
        """Puts back entries that could not be written."""
        with self._lock:
            self._pending.extendleft(reversed(entries))

    def clear(self) -> None:
        """Drops what waits, because there are no logs in this directory."""
        with self._lock:
            self._pending.clear()

    # The logs.

    def note_written(self, leads: bool, directory: Path | None, blocks: int) -> None:
        """The log in this directory has had so many blocks. ``leads``: it is the leader's."""
        self._written[leads] = (directory, blocks)

    def written(self, leads: bool, directory: Path) -> int:
        """How many blocks the log in this directory has had."""
        where, blocks = self._written.get(leads, (None, 0))
        return blocks if where == directory else 0

    def note_followed(self, works: bool) -> None:
        """The leader's log was polled, or cannot be."""
        self._followed_at = self._clock() if works else float("-inf")

    # Scans.

    @property
    def losses(self) -> int:
        """Rises when announcements of others were lost. A scan takes it when it starts, for
        ``repaired``."""
        return self._losses

    def repaired(self, losses: int) -> None:
        """A complete scan has ended that started when ``losses`` was this."""
        self._repaired = max(self._repaired, losses)

    @property
    def complete(self) -> bool:
        """Whether the index follows what every other process does without scans."""
        followed = self._clock() - self._followed_at < _FOLLOWED_SECONDS
        return followed and self.role.complete and self._repaired >= self._losses

    # Counts.

    def lose(self, reason: str, count: int = 1) -> None:
        """Announcements of others were lost or not accepted."""
        with self._lock:
            self._losses += 1
            self._counts["tier_announcements_lost", reason] += count

    def count(self, name: str, reason: str, count: int = 1) -> None:
        """Adds to a counter."""
        with self._lock:
            self._counts[name, reason] += count

    def counts(self) -> dict[tuple[str, str], int]:
        """Totals by name and reason."""
        with self._lock:
            return dict(self._counts)
