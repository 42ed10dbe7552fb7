"""Images for the node: those that are released, and one that crashes."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import kvtier

REPOSITORY = Path(__file__).resolve().parents[2]
# As a part of `make demo-cluster` this runs without the root of the checkout in the path.
sys.path.append(str(REPOSITORY))

from tools.imagebuild import builder  # noqa: E402

WRITER = Path(__file__).resolve().parent / "kubernetes" / "image"
PAYLOAD = f"kvtier/payload:{kvtier.__version__}"
"""As the chart names it; it has Python, tierd and ``kvtier.testing``."""
BUILD_SECONDS = 1200
KEPT = 4
CRASHING = "registry.local/kvtier-crashing:1"


class NoImagesError(Exception):
    """Images cannot be built on this machine. The message says what is missing."""


def shipped() -> list[Path]:
    """Archives of operator and payload, under the names that the chart's values have, as ``make
    images`` builds them. They are kept in the cache until what they are built from changes. Raises
    ``NoImagesError``.
    """
    reason = builder.missing()
    if reason:
        raise NoImagesError(f"no images for the node: {reason}")
    cache = builder.cache_directory()
    kept = cache / "for-tests" / builder.inputs_digest(kvtier.__version__)
    names = [f"kvtier-{name}-{builder.own_architecture()}.tar" for name in builder.IMAGES]
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "for-tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all((kept / name).exists() for name in names):
            staging = kept.with_suffix(".building")
            shutil.rmtree(staging, ignore_errors=True)
            command = [sys.executable, str(REPOSITORY / "tools" / "images"), str(staging)]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False
            )
            if done.returncode:
                raise AssertionError(f"images were not built: {done.stderr.strip()}")
            shutil.rmtree(kept, ignore_errors=True)
            staging.rename(kept)
            _remove_old(kept.parent)
    os.utime(kept)
    return [kept / name for name in names]


def _remove_old(directory: Path) -> None:
    """Keeps the archives of the last few checkouts."""
    found = sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for each in found[KEPT:]:
        shutil.rmtree(each, ignore_errors=True)


def crashing(home: Path) -> Path | None:
    """An archive whose ``kvtier-sidecar`` exits with status 1. None on unsupported machines."""
    if os.uname().machine != "x86_64":
        return None
    home.mkdir(parents=True, exist_ok=True)
    program, archive = home / "kvtier-sidecar", home / "crashing.tar"
    program.write_bytes(_exiting_program())
    program.chmod(0o755)
    places = [f"/usr/local/bin/kvtier-sidecar={program}"]
    subprocess.run([sys.executable, str(WRITER), CRASHING, str(archive), *places], check=True)
    return archive


def _exiting_program() -> bytes:
    """An ELF file for Linux on x86-64 that only calls ``exit(1)`` and needs no library or shell."""
    code = bytes.fromhex("bf01000000b83c0000000f05")  # mov edi, 1; mov eax, 60; syscall
    address, header = 0x400000, 64 + 56
    size = (header + len(code)).to_bytes(8, "little")
    elf = (
        b"\x7fELF"
        + bytes([2, 1, 1, 0])
        + bytes(8)
        + (2).to_bytes(2, "little")
        + (62).to_bytes(2, "little")
    )
    elf += (
        (1).to_bytes(4, "little")
        + (address + header).to_bytes(8, "little")
        + (64).to_bytes(8, "little")
        + bytes(12)
    )
    elf += b"".join(value.to_bytes(2, "little") for value in (64, 56, 1, 0, 0, 0))
    segment = (1).to_bytes(4, "little") + (5).to_bytes(4, "little") + bytes(8)
    segment += address.to_bytes(8, "little") * 2 + size * 2 + (0x1000).to_bytes(8, "little")
    return elf + segment + code
