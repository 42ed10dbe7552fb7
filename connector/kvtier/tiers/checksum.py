"""Checksums of objects.

XXH3-128 if the ``xxhash`` library is installed (26 to 35 GB/s per core), else BLAKE3 (4.4 GB/s).
The object records which one was used. Both detect flipped, missing and foreign bytes; neither
protects against an adversary who can write to the storage.
"""

from __future__ import annotations

from typing import Protocol, cast

from blake3 import blake3

from kvtier.hashing import blake3_digest

try:
    import xxhash
except ImportError:
    _HAS_XXHASH = False
else:
    _HAS_XXHASH = True

DIGEST_BYTES = 16


class Hasher(Protocol):
    """A checksum that is computed piece by piece. One thread at a time; ``update`` releases the GIL
    on large inputs."""

    def update(self, data: memoryview) -> None:
        """Continues with these bytes."""
        ...

    def digest(self) -> bytes:
        """``DIGEST_BYTES`` over all bytes so far."""
        ...


class Checksum(Protocol):
    """One algorithm. ``digest`` is thread-safe and releases the GIL on large inputs."""

    @property
    def kind(self) -> str:
        """Name of the algorithm, as recorded in objects."""
        ...

    def digest(self, data: memoryview) -> bytes:
        """``DIGEST_BYTES`` over exactly these bytes."""
        ...

    def hasher(self) -> Hasher:
        """For the same digest, piece by piece."""
        ...


class Blake3:
    """BLAKE3, truncated to 128 bits."""

    kind = "blake3"

    def digest(self, data: memoryview) -> bytes:
        """``DIGEST_BYTES`` over exactly these bytes."""
        return blake3_digest(data, DIGEST_BYTES)

    def hasher(self) -> Hasher:
        """For the same digest, piece by piece."""
        return _Blake3Hasher()


class _Blake3Hasher:
    def __init__(self) -> None:
        self._state = blake3()

    def update(self, data: memoryview) -> None:
        self._state.update(data)

    def digest(self) -> bytes:
        return self._state.digest(DIGEST_BYTES)


class Xxh3:
    """XXH3-128. Requires xxhash."""

    kind = "xxh3-128"

    def digest(self, data: memoryview) -> bytes:
        """``DIGEST_BYTES`` over exactly these bytes."""
        return xxhash.xxh3_128_digest(data)

    def hasher(self) -> Hasher:
        """For the same digest, piece by piece."""
        return cast("Hasher", xxhash.xxh3_128())


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
