"""Reads and writes whole files, with direct I/O where the mount supports it.

Object bytes are read once and then live in the host pool. A second copy in the page cache would
cost memory that is charged to the engine's pod.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvtier.errors import (
    TierCorruptError,
    TierError,
    TierMissError,
    TierNoSpaceError,
    TierUnavailableError,
)
from kvtier.tiers.base import ALIGNMENT_BYTES, Payload
from kvtier.tiers.filesystem.layout import Modes
from kvtier.tiers.pieces import views_of

_O_DIRECT = getattr(os, "O_DIRECT", 0)
NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
"""The file system is full or read-only. Existing files can be read."""
GONE = (errno.ENOENT, errno.ESTALE)
"""The file does not exist, or (NFS, FUSE) its handle is stale because another host has removed or
replaced the file or a directory above it."""


def tier_error(error: OSError, what: str) -> TierError:
    """Maps an ``OSError`` to a ``TierError``. The only place that does."""
    text = f"{what}: {error.strerror or error} ({errno.errorcode.get(error.errno or 0, '?')})"
    if error.errno == errno.ENOENT:
        return TierMissError(text)
    if error.errno in NO_SPACE:
        return TierNoSpaceError(text)
    return TierUnavailableError(text)


def is_aligned(payload: Payload) -> bool:
    """Whether direct I/O can use this memory."""
    return all(map(_is_aligned, views_of(payload)))


def _is_aligned(buffer: memoryview) -> bool:
    if buffer.nbytes % ALIGNMENT_BYTES:
        return False
    if not buffer.nbytes:
        return True
    if buffer.readonly:
        address: int = np.frombuffer(buffer, dtype=np.uint8).ctypes.data
    else:
        # A fifth of the time of the other way, for every object.
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return address % ALIGNMENT_BYTES == 0


def direct_io_supported(directory: Path) -> bool:
    """Whether files below ``directory`` can be written and read with O_DIRECT.

    Raises ``OSError`` if the directory is full or not even a plain file can be created.
    """
    path = directory / f".probe-direct-{os.getpid()}-{os.urandom(4).hex()}"
    page = mmap.mmap(-1, ALIGNMENT_BYTES)
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        if not _O_DIRECT:
            return False
        try:
            descriptor = os.open(path, os.O_RDWR | _O_DIRECT)
            try:
                page[:4] = b"kvtd"
                written = os.pwrite(descriptor, page, 0)
                page[:4] = b"\0\0\0\0"
                return (
                    written == len(page)
                    and os.preadv(descriptor, [page], 0) == len(page)
                    and page[:4] == b"kvtd"
                )
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno in NO_SPACE:
                raise
            return False
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
        page.close()


def read_file(path: str, header: memoryview, payload: Payload, direct: bool) -> float:
    """Fills both from a file of exactly that length. Returns its modification time.

    Raises ``OSError`` or ``TierCorruptError``.
    """
    try:
        return _read_file(path, header, payload, direct)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
    # Another host has just removed or replaced the file. Opening it by name again finds the new
    # one, or none.
    return _read_file(path, header, payload, direct)


def _read_file(path: str, header: memoryview, payload: Payload, direct: bool) -> float:
    # O_NONBLOCK: opening a pipe, which others can create in a shared directory, would block.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    flags |= _O_DIRECT if direct and is_aligned(payload) else 0
    descriptor = os.open(path, flags)
    try:
        found = os.fstat(descriptor)
        expected = header.nbytes + payload.nbytes
        if not stat.S_ISREG(found.st_mode):
            raise TierCorruptError(f"{path} is not a regular file")
        if found.st_size != expected:
            raise TierCorruptError(f"{path} has {found.st_size} bytes, expected {expected}")
        _transfer(descriptor, [header, *views_of(payload)], os.preadv)
        return found.st_mtime
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def new_file(path: str, *, modes: Modes, direct: bool, sync: bool) -> Iterator[int]:
    """Creates a file and yields its descriptor, for ``write_at``. Raises ``OSError``; the caller
    removes a partial file.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (_O_DIRECT if direct else 0)
    descriptor = os.open(path, flags, modes.file)
    try:
        if modes.gid is not None:
            os.fchown(descriptor, -1, modes.gid)
            os.fchmod(descriptor, modes.file)
        yield descriptor
        if sync:
            os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


def write_at(descriptor: int, buffers: list[memoryview], position: int) -> None:
    """Writes all buffers, one after the other. Raises ``OSError``."""
    _transfer(descriptor, buffers, os.pwritev, position)


def write_file(
    path: str,
    header: memoryview,
    payload: Payload,
    *,
    modes: Modes,
    direct: bool,
    sync: bool,
) -> None:
    """Creates a file from both. Raises ``OSError``; the caller removes a partial file."""
    direct = direct and is_aligned(payload)
    with new_file(path, modes=modes, direct=direct, sync=sync) as descriptor:
        write_at(descriptor, [header, *views_of(payload)], 0)


def read_start(path: str, size_bytes: int) -> bytes:
    """The first bytes of a regular file, fewer if it is shorter. Raises ``OSError``."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return b""
        return os.pread(descriptor, size_bytes, 0)
    finally:
        os.close(descriptor)


def _transfer(descriptor: int, buffers: list[memoryview], call: object, position: int = 0) -> None:
    rest, left = buffers, sum(buffer.nbytes for buffer in buffers)
    while left:
        count: int = call(descriptor, rest, position)  # type: ignore[operator]
        if count <= 0:
            raise TierCorruptError("the file was truncated while it was read")
        left -= count
        position += count
        if left:
            rest = _without([buffer.cast("B") for buffer in rest], count)


def _without(buffers: list[memoryview], count: int) -> list[memoryview]:
    """The buffers without their first ``count`` bytes."""
    for number, buffer in enumerate(buffers):
        if count < buffer.nbytes:
            return [buffer[count:], *buffers[number + 1 :]]
        count -= buffer.nbytes
    return []
