"""What a tier is.

A tier stores objects: the bytes of one chunk of one KV cache group, of all local ranks. It says what it holds, reads an
object into memory it is given, writes one from memory it is given, and deletes. It never decides policy: when to store,
what to evict for whom, how long to wait and whom to tell are the store's business.

Threads. ``contains``, ``keys`` and ``usage`` answer from memory, take microseconds and may be called from any thread.
``open``, ``probe``, ``read``, ``write``, ``delete``, ``maintain`` and ``check`` may block for as long as the storage below blocks; the store calls
them from I/O threads that it can afford to lose, several at once.

Memory. The store guarantees that the memory passed to ``read`` and ``write`` stays valid and belongs to this call until
it returns, however long that takes. A read that fails may leave anything in that memory.

Errors. Everything that the storage below can do wrong is raised as one of the ``TierError`` classes; nothing else leaves
a tier. The mapping from foreign errors is done in one place per tier.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

ALIGNMENT_BYTES = 4096
"""Shards start at multiples of this in a slot and in a file, so that one buffer serves direct I/O without a copy."""


def aligned(size_bytes: int) -> int:
    """``size_bytes`` rounded up to ``ALIGNMENT_BYTES``."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """Names one object: the namespace (32 hex digits) and the key within it (raw bytes, at most 64)."""

    namespace: str
    key: bytes


@dataclass(frozen=True, slots=True)
class ObjectMeta:
    """What is needed to read an object's bytes and to believe them.

    ``shard_bytes[i]`` is the exact size of rank i's shard; in memory and in files shard i starts at the sum of the
    aligned sizes before it. ``checksums[i]`` covers exactly those bytes, without padding.
    """

    shard_bytes: tuple[int, ...]
    checksum_kind: str
    checksums: tuple[bytes, ...]

    @property
    def payload_bytes(self) -> int:
        """Size of the object with every shard aligned: what it takes in a slot, and in a file after the header."""
        return sum(aligned(size) for size in self.shard_bytes)


@dataclass(frozen=True, slots=True)
class TierCapabilities:
    """What a tier can do. ``persistent``: survives this process. ``shared``: other processes write there too.
    ``indexed``: ``contains`` knows everything; otherwise a miss there may still be found by ``probe``."""

    persistent: bool
    shared: bool
    indexed: bool


@dataclass(frozen=True, slots=True)
class TierUsage:
    """Bytes are what the tier is charged for, headers and temporaries included. ``left_out_total``: how many objects its index had no room for, since
    it was opened; those it took in later count, too."""

    used_bytes: int
    capacity_bytes: int
    objects: int
    left_out_total: int = 0


@dataclass(frozen=True, slots=True)
class TierLimits:
    """The live settings that a tier itself has to know. Replaced as a whole, from any thread."""

    capacity_bytes: int
    high_watermark_percent: int = 90
    low_watermark_percent: int = 75
    retention_seconds: int = 604_800
    sync_data: bool = False


OnChange = Callable[[str, bytes, bool], None]
"""``on_change(namespace, key, present)``: an object appeared in, or left, the tier. Called from any thread, must not block."""


class Tier(ABC):
    """One place where objects live. See the module's text for threads, memory and errors."""

    name: str
    capabilities: TierCapabilities

    @abstractmethod
    def open(self, on_change: OnChange) -> None:
        """Makes the tier usable and builds its index, reporting every object found. May take long (a scan)."""

    @abstractmethod
    def close(self) -> None:
        """Stops using the storage. Does not wait for calls that hang."""

    @abstractmethod
    def configure(self, limits: TierLimits) -> None:
        """Takes over changed live settings."""

    @abstractmethod
    def contains(self, ref: ObjectRef) -> bool:
        """Whether the tier believes to hold the object. No I/O."""

    @abstractmethod
    def keys(self, namespace: str) -> Iterator[bytes]:
        """The keys held in a namespace, a snapshot. No I/O."""

    @abstractmethod
    def usage(self) -> TierUsage:
        """What the tier holds. No I/O."""

    @abstractmethod
    def probe(self, ref: ObjectRef) -> bool:
        """Looks for an object that the index does not know, at the storage itself."""

    @abstractmethod
    def read(self, ref: ObjectRef, into: memoryview) -> ObjectMeta:
        """Reads the object into ``into`` (as long as the object's payload, page-aligned) and verifies it.

        On return the bytes are proven to be those that were stored under exactly this namespace and key.
        Raises ``TierMissError``, ``TierCorruptError`` (the object is removed) or ``TierUnavailableError``.
        """

    @abstractmethod
    def write(self, ref: ObjectRef, payload: memoryview, meta: ObjectMeta) -> None:
        """Stores the object; on return it is visible as a whole, on error not at all.

        Writing an object that is already there is a success. Raises ``TierNoSpaceError`` or ``TierUnavailableError``.
        """

    @abstractmethod
    def delete(self, ref: ObjectRef) -> None:
        """Removes the object. One that is not there is a success."""

    @abstractmethod
    def touch(self, ref: ObjectRef) -> None:
        """Notes that the object was used (for eviction order). No I/O; unknown objects are ignored."""

    @abstractmethod
    def maintain(self) -> None:
        """Evicts down to the limits, sweeps what was abandoned. Called now and then; cheap when there is nothing to do."""

    @abstractmethod
    def check(self) -> None:
        """Writes a small probe object, reads it back, compares, deletes. Raises a ``TierError`` if anything is wrong."""
