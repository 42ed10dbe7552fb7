"""Records: small JSON documents that one process rewrites and others read.

A record is rewritten in place, not replaced: on NFS a new file under an old name can stay invisible
for as long as a client trusts its directory cache. On NFS it is read and written with direct I/O:
opening makes a client revalidate the content unless the server has granted it a delegation, and a
server does not recall that for a second mount on the same host.

Every record carries a checksum. A half-written record fails it and counts as absent, as does
anything else under the name, since other processes can write to the directory. The checksum proves
that a record is complete, not that it is valid: another release, or anyone with write access, may
have written it. ``is_writer`` and ``is_ledger`` check its fields; an invalid one counts as absent.
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

_DIGEST_CHARACTERS = 32
_HEAD_BYTES = _DIGEST_CHARACTERS + 12
_ATTEMPTS = 3
_FIRST_BYTES = 16_384
MAX_BYTES = 16 << 20
"""A ledger with a thousand writers takes about 100 KiB."""
_MAX_NUMBER = (1 << 63) - 1
_MAX_DIGITS = 18
_WRITER_NUMBERS = ("beat", "ask", "bytes", "least", "full", "recount")


def _encoded(document: dict[str, Any]) -> bytes:
    body = json.dumps(document, separators=(",", ":")).encode()
    digest = blake3_hex(body, _DIGEST_CHARACTERS)
    return f"{digest} {len(body):010d}\n".encode() + body


def create(path: Path, document: dict[str, Any], modes: Modes) -> None:
    """Creates the file. Raises ``OSError``, such as ``FileExistsError``."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, modes.file)
    try:
        if modes.gid is not None:
            os.fchown(descriptor, -1 if modes.uid is None else modes.uid, modes.gid)
            os.fchmod(descriptor, modes.file)
        bypass_cache(descriptor)
        os.pwrite(descriptor, _encoded(document), 0)
    finally:
        os.close(descriptor)


def rewrite(path: Path, document: dict[str, Any]) -> float:
    """Overwrites the file, which must exist. Returns its modification time by the file system's
    clock. Raises ``OSError``.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        bypass_cache(descriptor)
        os.pwrite(descriptor, _encoded(document), 0)
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)


def read(path: Path) -> dict[str, Any] | None:
    """The document. None if it is incomplete. Raises ``OSError``."""
    for _ in range(_ATTEMPTS):
        found = _decoded(_content(path))
        if found is not None:
            return found
    return None


def _content(path: Path) -> bytes:
    # O_NONBLOCK: opening a pipe in its place would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return b""
        if not bypass_cache(descriptor):
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return file.read(MAX_BYTES)
        size = _FIRST_BYTES
        while size <= MAX_BYTES:
            # The cached size may be as stale as the cached content.
            with mmap.mmap(-1, size) as page:
                count = os.preadv(descriptor, [page], 0)
                if count < size:
                    return page[:count]
            size *= 2
        return b""
    finally:
        os.close(descriptor)


def bypass_cache(descriptor: int) -> bool:
    """Turns on direct I/O if the file is on NFS."""
    if not is_nfs(os.fstat(descriptor).st_dev):
        return False
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | getattr(os, "O_DIRECT", 0))
    except OSError:
        return False
    return True


@functools.lru_cache(maxsize=64)
def is_nfs(device: int) -> bool:
    """Whether this device (``st_dev``) is an NFS mount of this process."""
    device_id = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == device_id:
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


# Validation.


def is_writer(document: Mapping[str, Any]) -> bool:
    """Whether a document is a valid writer's record (quota.py)."""
    return (
        all(_is_number(document.get(name)) for name in _WRITER_NUMBERS)
        and isinstance(document.get("closed"), bool)
        and _is_bytes_by_grant(document.get("used"))
        and _is_bytes_by_grant(document.get("settled"))
    )


def is_ledger(document: Mapping[str, Any]) -> bool:
    """Whether a document is a valid ledger (janitor.py)."""
    writers = document.get("writers")
    return (
        _is_number(document.get("beat"))
        and _is_number(document.get("recall"))
        and _is_number(document.get("quantum", 0))
        and (document.get("base") is None or _is_number(document.get("base")))
        and isinstance(document.get("released"), bool)
        and isinstance(document.get("holder"), str)
        and isinstance(writers, dict)
        and all(map(_is_answer, writers.values()))
    )


def _is_answer(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    answer, grants = value.get("answer"), value.get("open")
    return (
        isinstance(answer, list)
        and len(answer) == 2
        and all(map(_is_number, answer))
        and isinstance(grants, list)
        and all(map(_is_number, grants))
    )


def _is_bytes_by_grant(value: object) -> bool:
    return isinstance(value, dict) and all(
        key.isascii() and key.isdigit() and len(key) <= _MAX_DIGITS and _is_number(size)
        for key, size in value.items()
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_NUMBER
