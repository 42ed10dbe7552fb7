"""Objects whose shards lie in several places of the host pool, and tiers that want one buffer.

With a pool that is laid out in parts (``kvtier.store.pool_layout``) each shard of an object has its
own part. What a tier stores is the same either way: the shards one after the other, each at an
aligned offset.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvtier.errors import TierCorruptError
from kvtier.tiers.base import ObjectMeta, ObjectRef, Payload, Pieces, Tier, aligned


def views_of(payload: Payload) -> list[memoryview]:
    """The buffers that make up the payload, in order."""
    return list(payload.views) if isinstance(payload, Pieces) else [payload]


def shards_of(payload: Payload, shard_bytes: Sequence[int]) -> Iterator[memoryview]:
    """Each shard, with the padding after it. ``shard_bytes``: exact sizes.

    Raises ``TierCorruptError`` if pieces are not of these shards.
    """
    if isinstance(payload, Pieces):
        found = [view.nbytes for view in payload.views]
        expected = [aligned(size) for size in shard_bytes]
        if found != expected:
            raise TierCorruptError(f"pieces of {found} bytes for shards of {expected}")
        yield from payload.views
        return
    start = 0
    for size in shard_bytes:
        end = start + aligned(size)
        yield payload[start:end]
        start = end


def chunks_of(payload: Payload, size_bytes: int) -> Iterator[memoryview]:
    """The payload in order, in views of at most ``size_bytes``."""
    for view in views_of(payload):
        for start in range(0, view.nbytes, size_bytes):
            yield view[start : start + size_bytes]


def gather(payload: Payload, into: memoryview) -> None:
    """Copies the payload into one buffer of its size."""
    start = 0
    for view in views_of(payload):
        into[start : start + view.nbytes] = view
        start += view.nbytes


def scatter(source: memoryview, into: Payload) -> None:
    """Copies one buffer of the payload's size into the payload."""
    start = 0
    for view in views_of(into):
        view[:] = source[start : start + view.nbytes]
        start += view.nbytes


def reader_of(tier: Tier, into: Payload) -> Callable[[ObjectRef, Payload], ObjectMeta]:
    """``tier.read``, or what does the same with a buffer of its own for a tier that takes no
    pieces."""
    direct = tier.capabilities.scattered or isinstance(into, memoryview)
    return tier.read if direct else partial(_read_gathered, tier)


def writer_of(tier: Tier, payload: Payload) -> Callable[[ObjectRef, Payload, ObjectMeta], None]:
    """``tier.write``, or what does the same with a buffer of its own for a tier that takes no
    pieces."""
    direct = tier.capabilities.scattered or isinstance(payload, memoryview)
    return tier.write if direct else partial(_write_gathered, tier)


def _read_gathered(tier: Tier, ref: ObjectRef, into: Payload) -> ObjectMeta:
    # Not on the heap: direct I/O needs aligned memory.
    buffer = memoryview(mmap.mmap(-1, into.nbytes))
    meta = tier.read(ref, buffer)
    scatter(buffer, into)
    return meta


def _write_gathered(tier: Tier, ref: ObjectRef, payload: Payload, meta: ObjectMeta) -> None:
    buffer = memoryview(mmap.mmap(-1, payload.nbytes))
    gather(payload, buffer)
    tier.write(ref, buffer, meta)
