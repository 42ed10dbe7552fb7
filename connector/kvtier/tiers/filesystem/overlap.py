"""Verifies a large object while it is being read: one thread reads the next piece while another one
computes the checksum of those before it.

A read of one large object at a time would otherwise wait for its checksum, during which the storage
is idle. With several reads at a time the others keep the storage busy, so a tier has one thread for
this: a read that finds it taken computes its checksum itself, at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from kvtier.errors import TierUnverifiableError
from kvtier.tiers.base import ObjectMeta, ObjectRef
from kvtier.tiers.checksum import by_kind
from kvtier.tiers.filesystem.format import PayloadVerifier, read_fixed, read_shards

MIN_BYTES = 2 << 20
"""A smaller object is verified when it has been read: handing it over takes as long."""
PIECES = 8
"""Of an object: what remains to be verified at the end is one of them."""
MIN_PIECE_BYTES = 1 << 20


def piece_bytes(payload_bytes: int) -> int:
    """Bytes of a piece: a multiple of ``MIN_PIECE_BYTES``."""
    return max(payload_bytes // PIECES // MIN_PIECE_BYTES, 1) * MIN_PIECE_BYTES


class OverlappedVerifier:
    """The thread of one tier that verifies what others read. Any thread may call ``verify``; one
    at a time is served. The thread starts with the first object, and ends with this object."""

    def __init__(self) -> None:
        self._taken = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self.verified = 0
        """Objects, for tests."""

    def take(self) -> bool:
        """Takes the thread for one object, unless another one has it. Then ``give`` is due."""
        return self._taken.acquire(blocking=False)

    def give(self) -> None:
        """The object is verified, or is not."""
        self._taken.release()

    def verify(
        self, pieces: Iterator[int], header: memoryview, payload: memoryview, ref: ObjectRef
    ) -> ObjectMeta | None:
        """Verifies an object without a tag that was asked for. ``pieces`` reads: it yields how much
        of the payload was read, after the header. None if the object is encrypted.

        Raises what ``pieces`` raises, and ``TierCorruptError``, ``TierForeignError`` and
        ``TierUnverifiableError``. Returns when no thread uses the memory any longer.
        """
        last: Future[None] | None = None
        verifier: PayloadVerifier | None = None
        meta: ObjectMeta | None = None
        try:
            for end in pieces:
                if verifier is None:
                    fixed = read_fixed(header, ref, payload.nbytes)
                    if fixed.encrypted:
                        return None
                    meta = read_shards(header, fixed)
                    checksum = by_kind(meta.checksum_kind)
                    if checksum is None:
                        raise TierUnverifiableError(f"checksum {meta.checksum_kind} is not here")
                    verifier = PayloadVerifier(payload, meta, checksum)
                # Calls run one after the other.
                last = self._executor().submit(verifier.advance, end)
        finally:
            if last is not None:
                last.exception()
        if verifier is not None:
            verifier.finish()
        self.verified += 1
        return meta

    def _executor(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "kvtier-verify")
        return self._thread
