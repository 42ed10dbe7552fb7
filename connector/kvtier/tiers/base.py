"""The interface of a tier.

A tier stores objects: the bytes of one chunk of one KV cache group, of all local ranks. It reports
what it holds, reads an object into the caller's memory, writes one from it, and deletes. It decides
no policy: when to store, what to keep for whom, how long to wait and whom to notify is up to the
store.

Threads. ``contains``, ``keys``, ``usage`` and ``touch`` answer from memory within microseconds and
may be called from any thread. ``open``, ``probe``, ``read``, ``write``, ``delete``, ``maintain``
and ``check`` may block for as long as the storage below blocks. The store calls them from I/O
threads that it can afford to lose, several at once.

Memory. The caller guarantees that the memory passed to ``read`` and ``write`` stays valid and
belongs to this call until it returns, however long that takes. A read that fails may leave any
content in that memory.

Errors. Every failure of the storage below is raised as one of the ``TierError`` classes; no other
exception leaves a tier. Each tier maps foreign errors in one place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

ALIGNMENT_BYTES = 4096
"""Shards start at multiples of this in a slot and in a file, so that a buffer serves direct I/O
without a copy."""


def aligned(size_bytes: int) -> int:
    """``size_bytes`` rounded up to ``ALIGNMENT_BYTES``."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """Identifies an object: its namespace (32 hex digits) and its key there (1 to 64 bytes)."""

    namespace: str
    key: bytes


@dataclass(frozen=True, slots=True)
class ObjectMeta:
    """What is needed to read and verify an object.

    ``shard_bytes[i]`` is the exact size of rank i's shard. In memory and in files shard i starts at
    the sum of the aligned sizes before it. ``checksums[i]`` covers those bytes without padding.
    ``previous``: key of the object that precedes this one in its prefix, for the order of eviction;
    empty if it is the first or that is not known. A tier need not store it. ``tenant``: whom it
    belongs to (``kvtier.tenants``), empty if to no tenant. ``expires_at``: when it must no longer
    be used, in seconds since the epoch; 0: never. Only tiers that ``expires`` store that.
    ``limited``: a request wants it to be in no other secondary tier than those that it was written
    to; every tier stores that.
    """

    shard_bytes: tuple[int, ...]
    checksum_kind: str
    checksums: tuple[bytes, ...]
    previous: bytes = field(default=b"", compare=False)
    tenant: bytes = field(default=b"", compare=False)
    expires_at: int = field(default=0, compare=False)
    limited: bool = field(default=False, compare=False)

    @property
    def payload_bytes(self) -> int:
        """Size with every shard aligned, as in a slot and in a file after its header."""
        return sum(aligned(size) for size in self.shard_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Memory for an object whose shards lie in several parts of the host pool.

    ``views[i]``: shard i with the padding after it, page-aligned. One after the other they are the
    payload that a contiguous buffer holds.
    """

    views: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        """Size of the payload in bytes."""
        return sum(view.nbytes for view in self.views)


Payload = memoryview | Pieces
"""The memory of one object. ``tiers/pieces.py`` has what treats both alike."""


class ObjectFacts(NamedTuple):
    """What the header of an object says beyond its content: whom it belongs to, empty if to no
    tenant, and when it expires, in seconds since the epoch, 0: never."""

    tenant: bytes = b""
    expires_at: int = 0


NO_FACTS = ObjectFacts()


@dataclass(frozen=True, slots=True)
class TierCapabilities:
    """What a tier can do. ``persistent``: objects survive this process. ``shared``: other processes
    write there too. ``indexed``: ``contains`` knows every object; otherwise ``probe`` may find one
    that it does not know. ``expires``: what has expired is never read, and is removed; other tiers
    are given no such objects. ``tenants``: it bounds what each tenant holds
    (``TierLimits.tenant_percent``). ``scattered``: ``read`` and ``write`` take ``Pieces``; other
    tiers are given one buffer, and the bytes are copied once more.
    """

    persistent: bool
    shared: bool
    indexed: bool
    expires: bool = False
    tenants: bool = False
    scattered: bool = False


@dataclass(frozen=True, slots=True)
class TierUsage:
    """Bytes are what the tier is charged for, including headers and temporary files.
    ``unindexed_total``: how many objects found no room in the index since the tier was opened,
    including those that were indexed later.
    """

    used_bytes: int
    capacity_bytes: int
    objects: int
    unindexed_total: int = 0


@dataclass(frozen=True, slots=True)
class TierLimits:
    """The live settings of a tier. Replaced as a whole, from any thread.

    ``load_timeout_seconds``: how long a load from this tier may take. A tier that can end a read
    ends it then. ``min_free_bytes``, ``min_free_percent``: what stays free on the file system,
    whatever uses it; the larger of both. ``tenant_percent``: what one tenant may hold of the
    capacity.
    """

    capacity_bytes: int
    high_watermark_percent: int = 90
    low_watermark_percent: int = 75
    retention_seconds: int = 604_800
    sync_data: bool = False
    load_timeout_seconds: float = 5.0
    min_free_bytes: int = 0
    min_free_percent: int = 0
    tenant_percent: int = 100

    @property
    def keeps_free(self) -> bool:
        """Whether some space stays free."""
        return self.min_free_bytes > 0 or self.min_free_percent > 0

    def min_free(self, volume_bytes: int) -> int:
        """Bytes that stay free on a file system of ``volume_bytes``."""
        return max(self.min_free_bytes, volume_bytes * self.min_free_percent // 100)


OnChange = Callable[[str, bytes, bool], None]
"""``on_change(namespace, key, present)``: an object was added to or removed from the tier. Called
from any thread; must not block."""


class Tier(ABC):
    """Storage for objects. The module describes the rules for threads, memory and errors."""

    name: str
    capabilities: TierCapabilities

    @abstractmethod
    def open(self, on_change: OnChange) -> None:
        """Opens the storage, builds the index and reports every object. May take long (a scan)."""

    @abstractmethod
    def close(self) -> None:
        """Stops using the storage. Does not wait for calls that hang."""

    @abstractmethod
    def configure(self, limits: TierLimits) -> None:
        """Applies changed live settings."""

    @property
    def asks_on_miss(self) -> bool:
        """Whether a key that is not in the index may be in the storage nevertheless, so that it is
        worth a ``probe``. No I/O."""
        return False

    @abstractmethod
    def contains(self, ref: ObjectRef) -> bool:
        """Whether the object is in the index. No I/O."""

    @abstractmethod
    def keys(self, namespace: str) -> Iterator[bytes]:
        """The keys in a namespace, each one once that is there until the iteration ends; what is
        added or removed meanwhile may be missing or not. No I/O; a step takes microseconds."""

    @abstractmethod
    def usage(self) -> TierUsage:
        """What the tier holds. No I/O."""

    def volume(self) -> tuple[int, int]:
        """Size and free bytes of the file system that the tier is on, as of the last maintenance;
        zeros while they are unknown. No I/O."""
        return 0, 0

    def tenants(self) -> Mapping[bytes, int]:
        """Bytes of each tenant (``kvtier.tenants``), as far as the tier knows them. No I/O."""
        return {}

    def counts(self) -> Mapping[tuple[str, str], int]:
        """Totals since the tier was built that the tier itself counts: by the name of a counter
        (``store/counters.py``) and its reason. No I/O."""
        return {}

    @abstractmethod
    def probe(self, ref: ObjectRef) -> bool:
        """Looks up an object in the storage itself, and indexes it if it exists."""

    @abstractmethod
    def read(self, ref: ObjectRef, into: Payload) -> ObjectMeta:
        """Reads the object into ``into`` (the size of its payload, page-aligned) and verifies it.
        Only a tier that is ``scattered`` is given ``Pieces``.

        On return the bytes are those that were stored under this namespace and key. Raises
        ``TierMissError``, ``TierCorruptError`` (the object is removed) or ``TierUnavailableError``.
        """

    @abstractmethod
    def write(self, ref: ObjectRef, payload: Payload, meta: ObjectMeta) -> None:
        """Stores the object. On return it is visible as a whole, on an error not at all.

        Writing an object that exists succeeds. Raises ``TierNoSpaceError`` or
        ``TierUnavailableError``.
        """

    @abstractmethod
    def delete(self, ref: ObjectRef) -> None:
        """Removes the object. Removing one that does not exist succeeds."""

    @abstractmethod
    def touch(self, ref: ObjectRef, previous: bytes = b"") -> None:
        """The object was used; for the order of eviction. No I/O; unknown objects are ignored.

        ``previous``: key of the object that precedes it in its prefix, if that is known. An object
        is of no use without that one, which a tier therefore does not evict first.
        """

    @abstractmethod
    def maintain(self) -> None:
        """Evicts to the limits and removes abandoned files. Called periodically; cheap if idle."""

    @abstractmethod
    def check(self) -> None:
        """Writes, reads, compares and deletes a small object. Raises a ``TierError`` on failure."""


class ForwardingTier(Tier):
    """A tier that passes every call on to ``inner``. Subclasses change some of them."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.name = inner.name
        self.capabilities = inner.capabilities

    def open(self, on_change: OnChange) -> None:
        self.inner.open(on_change)

    def close(self) -> None:
        self.inner.close()

    def configure(self, limits: TierLimits) -> None:
        self.inner.configure(limits)

    @property
    def asks_on_miss(self) -> bool:
        return self.inner.asks_on_miss

    def contains(self, ref: ObjectRef) -> bool:
        return self.inner.contains(ref)

    def keys(self, namespace: str) -> Iterator[bytes]:
        return self.inner.keys(namespace)

    def usage(self) -> TierUsage:
        return self.inner.usage()

    def volume(self) -> tuple[int, int]:
        return self.inner.volume()

    def tenants(self) -> Mapping[bytes, int]:
        return self.inner.tenants()

    def counts(self) -> Mapping[tuple[str, str], int]:
        return self.inner.counts()

    def probe(self, ref: ObjectRef) -> bool:
        return self.inner.probe(ref)

    def read(self, ref: ObjectRef, into: Payload) -> ObjectMeta:
        return self.inner.read(ref, into)

    def write(self, ref: ObjectRef, payload: Payload, meta: ObjectMeta) -> None:
        self.inner.write(ref, payload, meta)

    def delete(self, ref: ObjectRef) -> None:
        self.inner.delete(ref)

    def touch(self, ref: ObjectRef, previous: bytes = b"") -> None:
        self.inner.touch(ref, previous)

    def maintain(self) -> None:
        self.inner.maintain()

    def check(self) -> None:
        self.inner.check()

    def describe_namespace(self, namespace: str, text: str) -> None:
        """Passes the description to a tier that stores it."""
        describe = getattr(self.inner, "describe_namespace", None)
        if describe is not None:
            describe(namespace, text)
