"""Measures a directory: rights, space, direct I/O and speed.

Runs as a child process, because a call to a dead mount may never return: ``python -m
kvtier.cli.doctor.probe DIR BYTES``, which prints JSON.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import stat
import sys
import time
from pathlib import Path
from typing import Any

from kvtier.tiers.filesystem.io import direct_io_supported

PIECE_BYTES = 1 << 20
LATENCY_READS = 32


def probe(directory: Path, size_bytes: int) -> dict[str, Any]:
    """Measures ``directory`` with a file of ``size_bytes`` (0: speed is not measured). Raises
    ``OSError``; the file is removed in any case.
    """
    found = directory.stat()
    volume = os.statvfs(directory)
    result: dict[str, Any] = {
        "directory": stat.S_ISDIR(found.st_mode),
        "uid": found.st_uid,
        "gid": found.st_gid,
        "mode": stat.S_IMODE(found.st_mode),
        "sizeBytes": volume.f_blocks * volume.f_frsize,
        "availableBytes": volume.f_bavail * volume.f_frsize,
        "files": volume.f_files,
        "availableFiles": volume.f_favail,
        "writable": False,
        "directIO": False,
    }
    try:
        result["directIO"] = direct_io_supported(directory)
        result["writable"] = True
    except OSError as error:
        result["writeError"] = error.strerror or str(error)
        return result
    size = min(size_bytes, result["availableBytes"] // 2) // PIECE_BYTES * PIECE_BYTES
    if size:
        result |= _speed(directory, size, direct=result["directIO"])
    return result


def _speed(directory: Path, size: int, *, direct: bool) -> dict[str, Any]:
    """Bytes per second of one thread, and the median latency of a read of one page."""
    path = directory / f".probe-speed-{os.getpid()}-{os.urandom(4).hex()}"
    flag = getattr(os, "O_DIRECT", 0) if direct else 0
    piece = mmap.mmap(-1, PIECE_BYTES)
    piece[:] = os.urandom(PIECE_BYTES)
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | flag, 0o600)
        try:
            began = time.monotonic()
            for offset in range(0, size, PIECE_BYTES):
                os.pwrite(descriptor, piece, offset)
            os.fdatasync(descriptor)
            written = time.monotonic() - began
        finally:
            os.close(descriptor)
        descriptor = os.open(path, os.O_RDONLY | flag)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.monotonic()
            for offset in range(0, size, PIECE_BYTES):
                os.preadv(descriptor, [piece], offset)
            read = time.monotonic() - began
            latency = _latency(descriptor, size)
        finally:
            os.close(descriptor)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
        piece.close()
    return {
        "testedBytes": size,
        "writeBytesPerSecond": round(size / max(written, 1e-9)),
        "readBytesPerSecond": round(size / max(read, 1e-9)),
        "readLatencySeconds": round(latency, 7),
    }


def _latency(descriptor: int, size: int) -> float:
    page = mmap.mmap(-1, mmap.PAGESIZE)
    times = []
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        for index in range(LATENCY_READS):
            offset = index * 7919 * mmap.PAGESIZE % size
            began = time.monotonic()
            os.preadv(descriptor, [page], offset)
            times.append(time.monotonic() - began)
    finally:
        page.close()
    return sorted(times)[len(times) // 2]


def main() -> int:
    """Prints the result, or ``{"error": ...}``."""
    try:
        print(json.dumps(probe(Path(sys.argv[1]), int(sys.argv[2]))))
    except OSError as error:
        print(json.dumps({"error": error.strerror or str(error), "errno": error.errno}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
