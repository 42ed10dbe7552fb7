"""Checksums of objects.

XXH3-128 if the ``xxhash`` library is installed (26 to 35 GB/s per core), else BLAKE3 (4.4 GB/s).
The object records which one was used. Both detect flipped, missing and foreign bytes; neither
protects against an adversary who can write to the storage.
"""

from __future__ import annotations

from typing import Protocol

from kvtier.hashing import blake3_digest

try:
    import xxhash
except ImportError:
    _HAS_XXHASH = False
else:
    _HAS_XXHASH = True

DIGEST_BYTES = 16


class Checksum(Protocol):
    """One algorithm. ``digest`` is thread-safe and releases the GIL on large inputs."""

    @property
    def kind(self) -> str:
        """Name of the algorithm, as recorded in objects."""
        ...

    def digest(self, data: memoryview) -> bytes:
        """``DIGEST_BYTES`` over exactly these bytes."""
        ...


class Blake3:
    """BLAKE3, truncated to 128 bits."""

    kind = "blake3"

    def digest(self, data: memoryview) -> bytes:
        """``DIGEST_BYTES`` over exactly these bytes."""
        return blake3_digest(data, DIGEST_BYTES)


class Xxh3:
    """XXH3-128. Requires xxhash."""

    kind = "xxh3-128"

    def digest(self, data: memoryview) -> bytes:
        """``DIGEST_BYTES`` over exactly these bytes."""
        return xxhash.xxh3_128_digest(data)


def preferred() -> Checksum:
    """The fastest installed algorithm, for writing."""
    return Xxh3() if _HAS_XXHASH else Blake3()


def by_kind(kind: str) -> Checksum | None:
    """The algorithm of that kind. None if it is not installed."""
    if kind == Blake3.kind:
        return Blake3()
    if kind == Xxh3.kind and _HAS_XXHASH:
        return Xxh3()
    return None
