"""Whether a record of another process is one of those that are understood here.

Its checksum shows that it is whole, not what it says: a process of another version may have written it, or whoever may write to the
directory. One that is not understood counts as not there.

Small documents that one process rewrites and others read.

They are rewritten in place, not replaced: a new file under an old name could stay unseen for as long as an NFS client trusts its directory.
On NFS they are read and written past the page cache. Opening makes a client ask whether the content has changed, except where the server
has given it a delegation, and a server does not take that back for a second mount of the same host. What is half written does not have its
checksum and counts as not there; so does whatever else stands under the name, since others can write to the directory.
"""

from __future__ import annotations

import fcntl
import functools
import json
import mmap
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtier.hashing import blake3_hex
from kvtier.tiers.filesystem.layout import Modes

_MAX_NUMBER = (1 << 63) - 1
_MAX_DIGITS = 18
_WRITER_NUMBERS = ("beat", "ask", "bytes", "least", "full", "recount")


def is_writer(document: Mapping[str, Any]) -> bool:
    """A writer's record (writer.py)."""
    return (
        all(_number(document.get(name)) for name in _WRITER_NUMBERS)
        and isinstance(document.get("closed"), bool)
        and _by_grant(document.get("used"))
        and _by_grant(document.get("settled"))
    )


def is_ledger(document: Mapping[str, Any]) -> bool:
    """A janitor's record (janitor.py)."""
    writers = document.get("writers")
    return (
        _number(document.get("beat"))
        and _number(document.get("recall"))
        and _number(document.get("quantum", 0))
        and (document.get("base") is None or _number(document.get("base")))
        and isinstance(document.get("released"), bool)
        and isinstance(document.get("holder"), str)
        and isinstance(writers, dict)
        and all(map(_answered, writers.values()))
    )


def _answered(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    answer, grants = value.get("answer"), value.get("open")
    return (
        isinstance(answer, list)
        and len(answer) == 2
        and all(map(_number, answer))
        and isinstance(grants, list)
        and all(map(_number, grants))
    )


def _by_grant(value: object) -> bool:
    return isinstance(value, dict) and all(
        key.isascii() and key.isdigit() and len(key) <= _MAX_DIGITS and _number(size)
        for key, size in value.items()
    )


def _number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_NUMBER


_DIGEST_CHARACTERS = 32
_HEAD_BYTES = _DIGEST_CHARACTERS + 12
_ATTEMPTS = 3
_FIRST_BYTES = 16_384
MAX_BYTES = 16 << 20
"""A janitor's record with a thousand writers has some 100 KiB."""


def _encoded(document: dict[str, Any]) -> bytes:
    body = json.dumps(document, separators=(",", ":")).encode()
    digest = blake3_hex(body, _DIGEST_CHARACTERS)
    return f"{digest} {len(body):010d}\n".encode() + body


def create(path: Path, document: dict[str, Any], modes: Modes) -> None:
    """Makes the file. Raises ``OSError``, ``FileExistsError`` among them."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, modes.file)
    try:
        if modes.gid is not None:
            os.fchown(descriptor, -1 if modes.uid is None else modes.uid, modes.gid)
            os.fchmod(descriptor, modes.file)
        _past_cache(descriptor)
        os.pwrite(descriptor, _encoded(document), 0)
    finally:
        os.close(descriptor)


def rewrite(path: Path, document: dict[str, Any]) -> float:
    """Writes over the file, which must be there: the file system's time of it. Raises ``OSError``."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        _past_cache(descriptor)
        os.pwrite(descriptor, _encoded(document), 0)
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)


def read(path: Path) -> dict[str, Any] | None:
    """The document; None if it is not whole. Raises ``OSError``."""
    for _ in range(_ATTEMPTS):
        found = _decoded(_content(path))
        if found is not None:
            return found
    return None


def _content(path: Path) -> bytes:
    # O_NONBLOCK: opening a pipe in its place would wait for somebody who writes.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return b""
        if not _past_cache(descriptor):
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return file.read(MAX_BYTES)
        size = _FIRST_BYTES
        while size <= MAX_BYTES:
            # What is known of the file's size is as old as what is known of its content.
            with mmap.mmap(-1, size) as page:
                count = os.preadv(descriptor, [page], 0)
                if count < size:
                    return page[:count]
            size *= 2
        return b""
    finally:
        os.close(descriptor)


def _past_cache(descriptor: int) -> bool:
    """Has the descriptor go to the server, if its file is on one."""
    if not _is_remote(os.fstat(descriptor).st_dev):
        return False
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | getattr(os, "O_DIRECT", 0))
    except OSError:
        return False
    return True


@functools.lru_cache(maxsize=64)
def _is_remote(device: int) -> bool:
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == wanted:
            return kind.split()[0].startswith("nfs")
    return False


def _decoded(content: bytes) -> dict[str, Any] | None:
    head, body = content[:_HEAD_BYTES], content[_HEAD_BYTES:]
    try:
        digest, length = head.decode().split()
        body = body[: int(length)]
        if blake3_hex(body, _DIGEST_CHARACTERS) != digest:
            return None
        document = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None
