"""Images for the node: the released ones, built by ``tools/images``, and one that crashes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kvtier

REPOSITORY = Path(__file__).resolve().parents[2]
WRITER = Path(__file__).resolve().parent / "kubernetes" / "image"
PAYLOAD = f"kvtier/payload:{kvtier.__version__}"
"""As the chart names it; it has Python, tierd and ``kvtier.testing``."""
CRASHING = "registry.local/kvtier-crashing:1"


def shipped(home: Path) -> list[Path]:
    """Archives of operator and payload, under the names that the chart's values have."""
    subprocess.run(
        [sys.executable, str(REPOSITORY / "tools" / "images"), str(home)],
        check=True,
        capture_output=True,
    )
    return sorted(home.glob("*.tar"))


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
