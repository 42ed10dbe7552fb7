"""A tier in a dictionary, for tests of the store. It passes the conformance suite of tiers."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from kvtier.errors import TierCorruptError, TierMissError, TierNoSpaceError
from kvtier.tiers.base import (
    ObjectMeta,
    ObjectRef,
    OnChange,
    Tier,
    TierCapabilities,
    TierLimits,
    TierUsage,
)
from kvtier.tiers.checksum import by_kind


def _ignore(_namespace: str, _key: bytes, _present: bool) -> None:
    return


class DictTier(Tier):
    """Stores objects in this process. Tests may change ``objects`` to simulate broken storage."""

    def __init__(self, name: str = "dict", capacity_bytes: int = 1 << 30) -> None:
        self.name = name
        self.capabilities = TierCapabilities(
            persistent=False, shared=False, indexed=True, expires=True
        )
        self.objects: dict[ObjectRef, tuple[bytes, ObjectMeta]] = {}
        self._lock = threading.Lock()
        self._capacity = capacity_bytes
        self._on_change: OnChange = _ignore

    def open(self, on_change: OnChange) -> None:
        """Reports what is there."""
        self._on_change = on_change
        for ref in list(self.objects):
            on_change(ref.namespace, ref.key, True)

    def close(self) -> None:
        """Nothing to do."""

    def configure(self, limits: TierLimits) -> None:
        """Applies the capacity."""
        self._capacity = limits.capacity_bytes

    def contains(self, ref: ObjectRef) -> bool:
        """Whether the object is there."""
        return ref in self.objects

    def keys(self, namespace: str) -> Iterator[bytes]:
        """Keys of a namespace."""
        return iter([ref.key for ref in list(self.objects) if ref.namespace == namespace])

    def usage(self) -> TierUsage:
        """Payload bytes."""
        with self._lock:
            return TierUsage(
                sum(len(data) for data, _ in self.objects.values()),
                self._capacity,
                len(self.objects),
            )

    def probe(self, ref: ObjectRef) -> bool:
        """The same as ``contains``."""
        return ref in self.objects

    def read(self, ref: ObjectRef, into: memoryview) -> ObjectMeta:
        """Copies and verifies."""
        found = self.objects.get(ref)
        if found is None:
            self._remove(ref)
            raise TierMissError(f"{ref.key.hex()} does not exist")
        data, meta = found
        checksum = by_kind(meta.checksum_kind)
        good = checksum is not None and len(data) == len(into)
        start = 0
        for size, digest in zip(meta.shard_bytes, meta.checksums, strict=True):
            good = (
                good
                and checksum is not None
                and checksum.digest(memoryview(data)[start : start + size]) == digest
            )
            start += -(-size // 4096) * 4096
        if not good:
            self._remove(ref)
            raise TierCorruptError(f"{ref.key.hex()} is corrupt")
        into[:] = data
        return meta

    def write(self, ref: ObjectRef, payload: memoryview, meta: ObjectMeta) -> None:
        """Stores a copy."""
        with self._lock:
            if ref in self.objects:
                return
            if (
                sum(len(data) for data, _ in self.objects.values()) + payload.nbytes
                > self._capacity
            ):
                raise TierNoSpaceError(f"{self.name} is full")
            self.objects[ref] = (bytes(payload), meta)
        self._on_change(ref.namespace, ref.key, True)

    def delete(self, ref: ObjectRef) -> None:
        """Removes the object."""
        self._remove(ref)

    def _remove(self, ref: ObjectRef) -> None:
        with self._lock:
            existed = self.objects.pop(ref, None) is not None
        if existed:
            self._on_change(ref.namespace, ref.key, False)

    def touch(self, ref: ObjectRef, previous: bytes = b"") -> None:
        """Ignored: there is no eviction."""

    def maintain(self) -> None:
        """Nothing to do."""

    def check(self) -> None:
        """Always succeeds."""
