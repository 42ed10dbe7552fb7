"""Objects for tests of tiers. Apart from the conformance suite because the fault commands use them
where pytest is not installed.
"""

from __future__ import annotations

import mmap

from kvtier.tiers.base import ObjectMeta, ObjectRef, Pieces, aligned
from kvtier.tiers.checksum import preferred

NAMESPACE = "0123456789abcdef" * 2


def buffer(size_bytes: int) -> memoryview:
    """Page-aligned memory, like a slot."""
    return memoryview(mmap.mmap(-1, size_bytes))


def in_pieces(shards: tuple[int, ...]) -> Pieces:
    """Page-aligned memory for these shards, each apart, like a slot in a pool with parts."""
    return Pieces(tuple(buffer(aligned(size)) for size in shards))


def make_object(
    seed: int, shards: tuple[int, ...] = (8_192,)
) -> tuple[ObjectRef, memoryview, ObjectMeta]:
    """An object whose bytes derive from ``seed``, in a new buffer."""
    payload = buffer(sum(aligned(size) for size in shards))
    checksum, digests, start = preferred(), [], 0
    for number, size in enumerate(shards):
        pattern = (seed * 64 + number).to_bytes(8, "little")
        payload[start : start + size] = (pattern * (size // 8 + 1))[:size]
        digests.append(checksum.digest(payload[start : start + size]))
        start += aligned(size)
    ref = ObjectRef(NAMESPACE, bytes([0]) + seed.to_bytes(32, "big"))
    return ref, payload, ObjectMeta(shards, checksum.kind, tuple(digests))
