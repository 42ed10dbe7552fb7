"""Damage to stored files: each function takes the path of an object's file and changes it.

A tier over files has to detect every one of ``DAMAGES``, at the latest when it reads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kvtier.tiers.base import ALIGNMENT_BYTES

Damage = Callable[[Path], None]


def flip(path: Path, offset: int, bit: int) -> None:
    """Flips one bit of a file, in place."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        byte = os.pread(descriptor, 1, offset)[0]
        os.pwrite(descriptor, bytes([byte ^ 1 << bit]), offset)
    finally:
        os.close(descriptor)


def truncated(path: Path) -> None:
    """A page is missing at the end."""
    os.truncate(path, path.stat().st_size - ALIGNMENT_BYTES)


def one_byte_shorter(path: Path) -> None:
    """A byte is missing at the end."""
    os.truncate(path, path.stat().st_size - 1)


def over_long(path: Path) -> None:
    """One page too many."""
    with path.open("ab") as file:
        file.write(bytes(ALIGNMENT_BYTES))


def one_byte_longer(path: Path) -> None:
    """One byte too many."""
    with path.open("ab") as file:
        file.write(b"x")


def empty(path: Path) -> None:
    """No content."""
    os.truncate(path, 0)


def zeros(path: Path) -> None:
    """The right size, never written, as some file systems leave it after a power failure."""
    path.write_bytes(bytes(path.stat().st_size))


def torn(path: Path) -> None:
    """The second half was never written."""
    size = path.stat().st_size
    os.truncate(path, size // 2)
    os.truncate(path, size)


def a_directory(path: Path) -> None:
    """A directory in place of the file."""
    path.unlink()
    path.mkdir()


def a_link_elsewhere(path: Path) -> None:
    """A symbolic link to the good file."""
    moved = path.with_suffix(".moved")
    path.rename(moved)
    path.symlink_to(moved)


DAMAGES: tuple[Damage, ...] = (
    truncated,
    one_byte_shorter,
    over_long,
    one_byte_longer,
    empty,
    zeros,
    torn,
    a_directory,
    a_link_elsewhere,
)
