"""A log of announcements in one file of fixed size, whose oldest blocks are overwritten.

Block n is at place n modulo the number of blocks. A reader knows the next number that it expects,
so a poll that finds nothing new reads a few blocks at one place. A reader that has fallen behind by
more than the log holds, or finds it deleted, cut or damaged, counts the loss and goes on with what
is there; a scan finds what was missed.

The file is opened for each poll and closed again. An open file that another process of the same NFS
client removes would stay in its directory under another name, and that directory could not be
removed, which is how its owner is fenced. As with records, direct I/O reads past NFS's caches.

How far the owner has written is also in a record that readers see anyway (the owner's or the
ledger). A log that ends before that has lost blocks. A log begins with an empty block, and is not
opened before its owner has reported that one: an NFS client that has looked for a file in vain
does not see it for a while after it was created.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier.tiers.filesystem.announcement_format import (
    BLOCK_BYTES,
    MAX_BLOCKS,
    Block,
    decode_block,
    encode_block,
    pack_blocks,
)
from kvtier.tiers.filesystem.election import UNREADABLE
from kvtier.tiers.filesystem.layout import Modes
from kvtier.tiers.filesystem.record import bypass_cache

_POLL_BLOCKS = 4
_MAX_AHEAD = 1 << 16
"""A block whose number is further than this beyond what the owner has reported is not the owner's.
"""
AHEAD_POLLS = 100
"""Neither is one that the owner's reports have not come to after so many polls, ten seconds or
more: it reports every second."""


class LogWriter:
    """Appends to one log. One thread; raises ``OSError``. ``number``: of the next block; it goes on
    when the file is created again."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self._path: Path | None = None
        self._blocks = 0
        self._log_id = b""

    def append(self, path: Path, blocks: int, modes: Modes, frames: Sequence[bytes]) -> None:
        """Appends frames to the log of that many blocks. Creates the file where it is missing, in a
        directory that must exist, also if there are no frames. Frames beyond the size of the log
        are the oldest, and lost."""
        groups = pack_blocks(frames)
        if (path, blocks) != (self._path, self._blocks):
            self._log_id = b""
        flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = -1 if not self._log_id else os.open(path, flags)
        except FileNotFoundError:
            descriptor = -1
        if descriptor < 0:
            descriptor = os.open(path, flags | os.O_CREAT | os.O_TRUNC, modes.file)
            self._path, self._blocks, self._log_id = path, blocks, os.urandom(8)
            groups.insert(0, b"")
            if modes.gid is not None:
                os.fchown(descriptor, -1 if modes.uid is None else modes.uid, modes.gid)
                os.fchmod(descriptor, modes.file)
        try:
            bypass_cache(descriptor)
            for group in groups:
                data = encode_block(self._log_id, self.number, blocks, group)
                os.pwrite(descriptor, data, self.number % blocks * BLOCK_BYTES)
                self.number += 1
        finally:
            os.close(descriptor)

    def exists(self, path: Path, blocks: int) -> bool:
        """Whether this log was created, as far as its owner knows."""
        return bool(self._log_id) and (path, blocks) == (self._path, self._blocks)

    def discard(self) -> None:
        """Removes the file, if there is one."""
        if self._path is not None and self._log_id:
            self._log_id = b""
            try:
                os.unlink(self._path)
            except OSError as error:
                if error.errno not in UNREADABLE:
                    raise


class LogReader:
    """Follows one log. One thread; raises ``OSError`` other than a missing file.

    ``on_loss(reason)``: blocks were lost: ``lost`` (the file is gone), ``truncated``, ``corrupt``
    or ``overrun``. A log that is read for the first time yields all that it holds.
    """

    def __init__(self, path: Path, on_loss: Callable[[str], None]) -> None:
        self._path = path
        self._on_loss = on_loss
        self._next: int | None = None
        self._log_id = b""
        self._blocks = 0
        self._reached, self._polls_ahead = 0, 0
        """Where the reader was so many polls ago, which no report has come to."""
        self._passed_over: tuple[bytes, int] | None = None
        """Log id and number of a block that another process has put into the log."""

    def skip(self, expected: int) -> None:
        """Passes over what the log holds now. ``expected``: as for ``poll``. Raises ``OSError``."""
        descriptor = self._open()
        if descriptor is None:
            return
        try:
            found = self._read_all(descriptor, expected)
        finally:
            os.close(descriptor)
        if found:
            self._go_to(found[-1])

    def poll(self, expected: int, max_blocks: int = MAX_BLOCKS) -> list[bytes]:
        """The frames since the last call, of about ``max_blocks`` blocks at most. ``expected``: how
        many blocks the owner had reported before this call."""
        if self._next is None and not expected:
            return []
        descriptor = self._open()
        if descriptor is None:
            known = self._next or 0
            if self._log_id or expected > known:
                self._on_loss("lost")
                self._next, self._log_id = max(expected, known), b""
            return []
        try:
            if self._is_ahead(expected):
                # What is in the place of the log, or of a block of it, is not the owner's.
                self._on_loss("corrupt")
                self._next, self._log_id = None, b""
                return self._restart(descriptor, expected, "", max_ahead=0)
            if self._next is None or not self._log_id:
                return self._restart(descriptor, expected, "lost")
            frames, reason = self._read_on(descriptor, expected, max_blocks)
            return frames + self._restart(descriptor, expected, reason) if reason else frames
        finally:
            os.close(descriptor)

    def _open(self) -> int | None:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(self._path, flags)
        except OSError as error:
            if error.errno in UNREADABLE:
                return None
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            return None
        bypass_cache(descriptor)
        return descriptor

    def _is_ahead(self, expected: int) -> bool:
        """Whether the owner's reports have not come to where this reader was long ago."""
        if self._reached <= expected:
            self._reached, self._polls_ahead = self._next or 0, 0
            return False
        self._polls_ahead += 1
        if self._polls_ahead <= AHEAD_POLLS:
            return False
        self._reached, self._polls_ahead = 0, 0
        return True

    def _go_to(self, block: Block) -> None:
        self._next = block.number + 1
        self._log_id, self._blocks = block.log_id, block.blocks

    def _read_on(self, descriptor: int, expected: int, max_blocks: int) -> tuple[list[bytes], str]:
        """The frames from the next number on, and why the log cannot be followed from there, if it
        cannot."""
        frames: list[bytes] = []
        count, taken = _POLL_BLOCKS, 0
        while taken < max_blocks:
            number = self._next or 0
            place = number % self._blocks
            count = min(count, self._blocks - place)
            data = os.pread(descriptor, count * BLOCK_BYTES, place * BLOCK_BYTES)
            for start in range(0, count * BLOCK_BYTES, BLOCK_BYTES):
                piece = data[start : start + BLOCK_BYTES]
                block = decode_block(piece)
                number = self._next or 0
                if block is not None and (block.log_id, block.number) == (self._log_id, number):
                    frames += block.frames
                    self._go_to(block)
                    taken += 1
                    continue
                if block is not None and (block.log_id, block.number) == self._passed_over:
                    return frames, ""
                if block is not None and block.log_id != self._log_id:
                    self._passed_over = block.log_id, block.number
                    return frames, "lost"
                if block is not None and number < block.number <= expected + _MAX_AHEAD:
                    return frames, "overrun"
                if number < expected:
                    return frames, "corrupt" if piece.strip(b"\0") else "truncated"
                # Nothing new, or a block that is being written.
                return frames, ""
            count = min(max_blocks - taken, MAX_BLOCKS)
        return frames, ""

    def _restart(
        self, descriptor: int, expected: int, reason: str, max_ahead: int = _MAX_AHEAD
    ) -> list[bytes]:
        """Goes on with what the log holds. Counts a loss if that does not begin where the reader
        was."""
        known = self._next
        found = self._read_all(descriptor, expected, max_ahead)
        if known is not None and found and found[-1].number + 1 < known > expected:
            # What was read last was not the owner's. Frames that are met again are passed over.
            self._on_loss("corrupt")
            known = None
        fresh = [block for block in found if known is None or block.number >= known]
        if known is not None and (fresh[0].number if fresh else expected) > known:
            self._on_loss(reason)
        if fresh:
            self._go_to(fresh[-1])
        else:
            self._next = max(expected, known or 0)
            if found:
                self._log_id, self._blocks = found[-1].log_id, found[-1].blocks
        return [frame for block in fresh for frame in block.frames]

    def _read_all(self, descriptor: int, expected: int, max_ahead: int = _MAX_AHEAD) -> list[Block]:
        """The complete blocks of one life of the log, in order of their numbers: the one that the
        owner has reported, or the latest."""
        blocks: list[Block] = []
        data = os.pread(descriptor, MAX_BLOCKS * BLOCK_BYTES, 0)
        for start in range(0, len(data), BLOCK_BYTES):
            block = decode_block(data[start : start + BLOCK_BYTES])
            if (
                block is not None
                and block.number % block.blocks == start // BLOCK_BYTES
                and block.number <= expected + max_ahead
            ):
                blocks.append(block)
        blocks.sort(key=lambda block: (_is_reported(block, expected), block.number))
        found = [block for block in blocks if block.log_id == blocks[-1].log_id]
        return sorted(found, key=lambda block: block.number)


def _is_reported(block: Block, expected: int) -> bool:
    """Whether a log that has had ``expected`` blocks may still have this one."""
    return expected - block.blocks <= block.number < expected
