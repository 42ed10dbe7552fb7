"""Writes and follows the logs of announcements (``announcements``).

One thread per shared tier runs ``run_once`` a few times a second: it appends what this process has
published and removed to its own log, and applies what others have announced to the index. The
leader copies the frames of all writers into its log as they are, so it can neither change nor add
any where the tier has keys. A writer's frames are numbered: a reader that meets one again, in the
log of a new leader, passes over it.

Nothing here is under a lock of the maintenance, and a call that hangs delays announcements only.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from kvtier.errors import TierError
from kvtier.tiers.filesystem.announcement_format import (
    Announcement,
    Frame,
    RejectedError,
    decode_frame,
    encode_frames,
)
from kvtier.tiers.filesystem.announcement_ring import LogReader, LogWriter
from kvtier.tiers.filesystem.announcements import LogRole
from kvtier.tiers.filesystem.directory import TierDirectory
from kvtier.tiers.filesystem.io import GONE
from kvtier.tiers.filesystem.layout import ANNOUNCEMENTS, writers_path
from kvtier.tiers.isolation_keys import KeySet

POLL_SECONDS = 0.2
"""From one process over the leader to another: two polls, and the writer's, which follows a
publication at once."""
MIN_PAUSE_SECONDS = 0.1
"""Between two polls of a writer that always has something to announce."""
_MAX_SENT = 4_096
_WRITER_POLL_BLOCKS = 32
"""Of one writer in one poll of the leader, so that one that floods its log does not displace the
others'."""
_MAX_COPIED = 8_192
"""Frames that the leader keeps to copy while its log cannot be written."""
_MAX_WRITERS = 1_024
"""Whose numbers are remembered."""

_log = logging.getLogger("kvtier.tiers.filesystem")


class AnnouncementLog:
    """The logs of one directory. ``keys``: returns the keys in effect, None if the tier has none;
    raises ``TierKeyMissingError``.

    ``run_once`` is called by one thread at a time.
    """

    def __init__(
        self, directory: TierDirectory, keys: Callable[[], KeySet | None] = lambda: None
    ) -> None:
        self._directory = directory
        self._shared = directory.announcements
        self._keys = keys
        self._writer_id = int.from_bytes(os.urandom(8), "little")
        self._next_frame = 0
        self._own = LogWriter()
        self._leader = LogWriter()
        self._term_path: Path | None = None
        self._followed: LogReader | None = None
        self._readers: dict[str, LogReader] = {}
        self._to_copy: list[bytes] = []
        self._numbers: OrderedDict[int, int] = OrderedDict()
        self._passed_on = 0
        self._thread: threading.Thread | None = None
        self._stopping = False

    # The thread.

    def start(self) -> None:
        """Starts the thread, if other processes use the directory. It keeps no tier alive."""
        self._stopping = False
        if not self._shared.enabled or (self._thread is not None and self._thread.is_alive()):
            return
        self._thread = threading.Thread(
            target=_loop,
            args=(weakref.ref(self), self._shared.wake, self._directory.pace),
            name="kvtier-announcements",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread. Does not wait."""
        self._stopping = True
        self._shared.wake.set()

    @property
    def stopping(self) -> bool:
        """Whether the tier was closed."""
        return self._stopping

    def skip(self) -> None:
        """Passes over what others have announced so far: a scan follows, which finds it."""
        role = self._shared.role
        if not self._shared.enabled or role.leads or role.term_path is None or not role.expected:
            return
        self._follow(role.term_path)
        if self._followed is not None:
            try:
                self._followed.skip(role.expected)
            except OSError as error:
                self._shared.lose("unreadable")
                _log.warning("%s: cannot read announcements: %s", self._directory.root, error)

    @property
    def passed_on(self) -> bool:
        """Whether all that this process has sent is in the leader's log, as of the last round."""
        return self._passed_on >= self._next_frame

    def run_once(self) -> None:
        """Sends, copies and follows. Raises ``OSError``."""
        role = self._shared.role
        if not self._shared.enabled or role.term_path is None:
            self._shared.note_followed(False)
            return
        if not role.writer_blocks:
            self._shared.clear()
            self._shared.note_followed(False)
            self._own.discard()
            return
        self._follow(role.term_path)
        frames = self._send(role)
        if role.leads:
            self._copy(role, frames)
        elif self._followed is not None:
            for frame in self._followed.poll(role.expected):
                self._apply(frame)
        self._shared.note_followed(True)

    def failed(self) -> None:
        """A round has failed: scans find what is missed meanwhile."""
        self._shared.note_followed(False)

    def _follow(self, term_path: Path) -> None:
        """Turns to the log of another leader."""
        if term_path == self._term_path:
            return
        self._term_path = term_path
        self._followed = LogReader(term_path / ANNOUNCEMENTS, self._shared.lose)
        self._leader = LogWriter()
        self._to_copy.clear()
        self._readers.clear()

    # Sending.

    def _send(self, role: LogRole) -> list[bytes]:
        """Writes what waits to this process's log; returns it as frames."""
        if role.path is None:
            return []
        path = role.path / ANNOUNCEMENTS
        entries = self._shared.take(_MAX_SENT)
        if not entries and self._own.exists(path, role.writer_blocks):
            return []
        try:
            frames = encode_frames(entries, self._writer_id, self._next_frame, self._keys())
        except TierError:
            # Without keys nothing is stored either.
            self._shared.count("tier_announcements_lost", "not_sent", len(entries))
            return []
        # Numbers are not used again: a part of the frames may be written.
        self._next_frame += len(frames)
        try:
            self._own.append(path, role.writer_blocks, self._directory.modes, frames)
        except OSError as error:
            self._shared.restore(entries)
            if error.errno in GONE:
                # Fenced: the maintenance registers again, under a new name.
                return []
            raise
        finally:
            self._shared.note_written(False, role.path, self._own.number)
        self._shared.count("tier_announcements", "sent", len(entries))
        return frames

    # The leader.

    def _copy(self, role: LogRole, own: list[bytes]) -> None:
        """Applies what the other writers have announced, and copies it for the followers."""
        self._to_copy += own
        root = writers_path(self._directory.root)
        for name in list(self._readers):
            if name not in role.writers:
                del self._readers[name]
        for name, expected in role.writers.items():
            reader = self._readers.get(name)
            if reader is None:
                reader = LogReader(root / name / ANNOUNCEMENTS, self._shared.lose)
                self._readers[name] = reader
            try:
                found = reader.poll(expected, _WRITER_POLL_BLOCKS)
            except OSError as error:
                self._shared.lose("unreadable")
                _log.debug("%s: cannot read announcements of %s: %s", root, name, error)
                continue
            for frame in found:
                self._apply(frame)
            self._to_copy += found
        if len(self._to_copy) > _MAX_COPIED:
            # Followers see that a block is missing, and scan.
            self._shared.count("tier_announcements_lost", "not_sent")
            del self._to_copy[:-_MAX_COPIED]
            self._leader.number += 1
        if self._term_path is None:
            return
        path = self._term_path / ANNOUNCEMENTS
        if not self._to_copy and self._leader.exists(path, role.leader_blocks):
            return
        try:
            self._leader.append(path, role.leader_blocks, self._directory.modes, self._to_copy)
            self._to_copy.clear()
            self._passed_on = self._next_frame
        except OSError as error:
            if error.errno not in GONE:
                raise
            # Another process leads: it reads the writers' logs itself.
        finally:
            self._shared.note_written(True, self._term_path, self._leader.number)

    # Following.

    def _apply(self, raw: bytes) -> None:
        try:
            frame = decode_frame(raw, self._keys())
        except RejectedError as error:
            self._shared.lose(error.reason)
            return
        except TierError:
            self._shared.lose("no_key")
            return
        if self._is_known(frame):
            return
        for entry in frame.entries:
            self._apply_entry(entry)
        self._shared.count("tier_announcements", "received", len(frame.entries))

    def _is_known(self, frame: Frame) -> bool:
        if frame.writer == self._writer_id:
            self._passed_on = max(self._passed_on, frame.number + 1)
            return True
        last = self._numbers.pop(frame.writer, -1)
        self._numbers[frame.writer] = max(last, frame.number)
        if len(self._numbers) > _MAX_WRITERS:
            self._numbers.popitem(last=False)
        return frame.number <= last

    def _apply_entry(self, entry: Announcement) -> None:
        directory = self._directory
        if not entry.size_bytes:
            directory.drop(entry.namespace, entry.key)
        elif directory.index.add(entry.namespace, entry.key, entry.size_bytes, entry.previous):
            directory.on_change(entry.namespace, entry.key, True)


def _loop(reference: weakref.ref[AnnouncementLog], wake: threading.Event, pace: float) -> None:
    last_error = ""
    pause = threading.Event()
    while True:
        wake.wait(POLL_SECONDS * pace)
        wake.clear()
        log = reference()
        if log is None or log.stopping:
            return
        try:
            log.run_once()
            last_error = ""
        except Exception as error:  # noqa: BLE001
            # What is not announced costs misses, and a bug must not end the thread.
            log.failed()
            if repr(error) != last_error:
                _log.warning("announcements: %s", error, exc_info=not isinstance(error, OSError))
            last_error = repr(error)
        del log
        pause.wait(MIN_PAUSE_SECONDS * pace)
