"""The lmcache tier: objects in a back end of LMCache, which a child process talks to.

An object is one value in the back end: the header of the file format (``filesystem/format.py``) and
the payload. So whatever the back end returns is verified here, after the bytes have been copied
into the slot, as if they had come from a file.

Accounting is the tier's own, because back ends have none: an index of what is stored, which
``_Stock`` keeps equal to the back end's content. Capacity holds for what is indexed; a write beyond
it evicts first.

Threads: see ``kvtier.tiers.base``. The tier has none of its own. Its process is started by
``open``, and again by ``maintain`` and ``check`` when it has ended.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import mmap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec

from kvtier.config.models import LMCacheTierDocument
from kvtier.errors import (
    KVTierError,
    TierCorruptError,
    TierMissError,
    TierNoSpaceError,
    TierUnavailableError,
)
from kvtier.processes import process_tag
from kvtier.tiers.base import (
    ObjectMeta,
    ObjectRef,
    OnChange,
    Payload,
    Tier,
    TierCapabilities,
    TierLimits,
    TierUsage,
    aligned,
)
from kvtier.tiers.checksum import preferred
from kvtier.tiers.filesystem.format import (
    HEADER_BYTES,
    clear_padding,
    read_header,
    verify_payload,
    write_header,
)
from kvtier.tiers.filesystem.index import MAX_INDEXED_OBJECTS, Index
from kvtier.tiers.lmcache.process import Backoff, ChildProcess
from kvtier.tiers.lmcache.stock import REFRESH_SECONDS, Stock
from kvtier.tiers.lmcache.wire import (
    LMCACHE_VERSION,
    MAX_KEY_BYTES,
    MAX_OBJECT_BYTES,
    OVERHEAD_BYTES,
    LaneReply,
    LaneRequest,
    OpenRequest,
)
from kvtier.tiers.pieces import gather, scatter

WRITE_SECONDS = 30.0
CHECK_SECONDS = 5.0
_LOCKS = 64
_CHECK_BYTES = 4096
_CHECK_NAMESPACE = f"{0:032x}"
_log = logging.getLogger("kvtier.tiers.lmcache")


def require_lmcache(version: Callable[[str], str] = importlib.metadata.version) -> None:
    """Raises ``KVTierError`` unless the package is installed in the right version. Does not import
    it."""
    try:
        found = version("lmcache")
    except importlib.metadata.PackageNotFoundError:
        raise KVTierError(
            f"the package lmcache is not installed: use an image with lmcache {LMCACHE_VERSION}"
        ) from None
    if found != LMCACHE_VERSION:
        raise KVTierError(f"the package lmcache is {found}: must be {LMCACHE_VERSION}")


def _ignore(_namespace: str, _key: bytes, _present: bool) -> None:
    return


class LMCacheTier(Tier):
    """A tier in a back end of LMCache. ``child``: the process, not yet started.

    The constructor does no I/O. Raises ``KVTierError`` without the right version of LMCache.
    """

    def __init__(
        self,
        document: LMCacheTierDocument,
        limits: TierLimits,
        child: ChildProcess | None = None,
        max_objects: int = MAX_INDEXED_OBJECTS,
        refresh_seconds: float = REFRESH_SECONDS,
    ) -> None:
        require_lmcache()
        self.name = document.name
        self.capabilities = TierCapabilities(
            persistent=True, shared=True, indexed=True, scattered=True
        )
        self.child = ChildProcess() if child is None else child
        self.scheme = document.url.partition(":")[0]
        self._target = OpenRequest(document.url, document.credentials_directory)
        self._limits = limits
        self._backoff = Backoff()
        self._stopping = False
        self._on_change: OnChange = _ignore
        self._index = Index(limits.capacity_bytes, max_objects, self._displaced)
        self._announcing = threading.Lock()
        """Guards ``_stored``, and keeps announcements in the order of the index's changes."""
        self._stock = Stock(
            self._index,
            self._call,
            self._fetch,
            lambda *change: self._on_change(*change),
            refresh_seconds,
            self._announcing,
        )
        self._locks = [threading.Lock() for _ in range(_LOCKS)]
        self._stored = [0] * _LOCKS
        """How often an object was stored, by the same stripes as the locks."""
        self._evicting = threading.Lock()

    @property
    def limitations(self) -> str:
        """What this back end cannot do, for the status; empty if nothing."""
        if self.scheme == "lm":
            return (
                "a server of LMCache neither deletes nor lists objects and keeps them in memory: "
                "evicted objects are overwritten with one byte and their keys remain, and the last "
                "stores before a crash of tierd may be forgotten"
            )
        return ""

    # Life cycle.

    def open(self, on_change: OnChange) -> None:
        """Starts the process and reports every object of the back end. Takes seconds, at most two
        minutes."""
        self._on_change = on_change
        self._start()
        self._stock.load(self.child.opened.can_list)

    def _start(self) -> None:
        if self._stopping:
            raise TierUnavailableError("the tier is closed")
        remaining = self._backoff.remaining_seconds
        if remaining > 0:
            raise TierUnavailableError(
                f"LMCache's process failed; its next start is in {remaining:.0f} s"
            )
        try:
            self.child.start(self._target)
        except TierUnavailableError:
            self._backoff.failed()
            raise

    def close(self) -> None:
        """Ends the process, after writing the list of objects where the back end has none."""
        if self.child.pid is not None and not self.child.opened.can_list:
            self._stock.save_at_end()
        self._stopping = True
        self.child.close()

    def configure(self, limits: TierLimits) -> None:
        """Applies changed limits. A lowered capacity is reached by the next ``maintain``."""
        self._limits = limits
        self._index.set_capacity(limits.capacity_bytes)

    # Queries without I/O.

    def contains(self, ref: ObjectRef) -> bool:
        """Whether the object is indexed."""
        return self._index.contains(ref.namespace, ref.key)

    def keys(self, namespace: str) -> Iterator[bytes]:
        """A namespace's keys, each that is there all the while."""
        return self._index.keys(namespace)

    def usage(self) -> TierUsage:
        """What is indexed, with the overhead of the back end."""
        return self._index.usage()

    def touch(self, ref: ObjectRef, previous: bytes = b"") -> None:
        """Makes the object the most recently used."""
        self._index.touch(ref.namespace, ref.key, previous)

    # Objects.

    @property
    def asks_on_miss(self) -> bool:
        """Always: other processes write to the back end, and it announces nothing."""
        return True

    def probe(self, ref: ObjectRef) -> bool:
        """Looks up an object that another process may have stored. Its size is known only when it
        is listed, so that it is charged as much as its header."""
        if len(ref.key) > MAX_KEY_BYTES:
            return False
        reply = self._call("read", _request("exists", ref, self._limits.load_timeout_seconds))
        if reply.outcome != "found":
            return False
        if not self.contains(ref):
            self._publish(ref, HEADER_BYTES)
        return True

    def read(self, ref: ObjectRef, into: Payload) -> ObjectMeta:
        """Reads and verifies the object; see the base class. Ends within the load timeout and a
        grace period."""
        seconds = self._limits.load_timeout_seconds
        if len(ref.key) > MAX_KEY_BYTES:
            raise TierMissError(f"keys of {len(ref.key)} bytes are not stored")
        stored = self._stored[_stripe(ref)]
        try:
            meta = self._read(ref, into, seconds)
        except TierCorruptError as error:
            if not self._discard(ref, stored):
                raise TierMissError(f"stored again while it was read: {error}") from error
            raise
        except TierMissError:
            self._forget(ref, stored)
            raise
        self._backoff.succeeded()
        self._index.touch(ref.namespace, ref.key)
        previous = self._index.previous(ref.namespace, ref.key)
        return replace(meta, previous=previous) if previous else meta

    def _read(self, ref: ObjectRef, into: Payload, seconds: float) -> ObjectMeta:
        size = HEADER_BYTES + into.nbytes
        with self.child.lane("read", seconds) as lane:
            segment = lane.view(size)
            request = _request("get", ref, seconds, size, lane.segment_bytes)
            reply = self._checked(self.child.call(lane, request))
            if reply.outcome == "missing":
                raise TierMissError(f"{self.name} does not have the object")
            if reply.outcome != "found" or reply.size_bytes != size:
                raise TierCorruptError(
                    f"object of {reply.size_bytes} bytes, expected {size}: {reply.text}"
                )
            header = memoryview(bytearray(segment[:HEADER_BYTES]))
            scatter(segment[HEADER_BYTES:size], into)
        # Verified where the engine reads it: the segment is the child's memory too.
        meta = read_header(header, ref, into.nbytes)
        verify_payload(into, meta)
        return meta

    def write(self, ref: ObjectRef, payload: Payload, meta: ObjectMeta) -> None:
        """Writes header and payload as one value; see the base class."""
        if self.contains(ref):
            self.touch(ref, meta.previous)
            return
        size = HEADER_BYTES + payload.nbytes
        if len(ref.key) > MAX_KEY_BYTES or size > MAX_OBJECT_BYTES:
            raise TierUnavailableError(
                f"key of {len(ref.key)} bytes, object of {size}: LMCache takes at most "
                f"{MAX_KEY_BYTES} and {MAX_OBJECT_BYTES}"
            )
        charged = aligned(size + OVERHEAD_BYTES)
        with self._exclusive(ref):
            if self.contains(ref):
                return
            self._admit(charged)
            try:
                self._write(ref, payload, meta)
            except BaseException:
                self._index.release(charged)
                self._stock.uncertain(ref)
                raise
            with self._announcing:
                self._stored[_stripe(ref)] += 1
                if self._index.publish(ref.namespace, ref.key, charged, meta.previous):
                    self._on_change(ref.namespace, ref.key, True)
                self._stock.added(ref)
        self._backoff.succeeded()

    def _write(self, ref: ObjectRef, payload: Payload, meta: ObjectMeta) -> None:
        size = HEADER_BYTES + payload.nbytes
        with self.child.lane("write", WRITE_SECONDS) as lane:
            segment = lane.view(size)
            try:
                write_header(segment[:HEADER_BYTES], ref, meta)
            except ValueError as error:
                raise TierUnavailableError(f"{self.name}: {error}") from error
            gather(payload, segment[HEADER_BYTES:])
            clear_padding(segment[HEADER_BYTES:], meta)
            request = _request("put", ref, WRITE_SECONDS, size, lane.segment_bytes)
            reply = self._checked(self.child.call(lane, request))
        if reply.outcome != "done":
            raise TierUnavailableError(f"{reply.outcome}: {reply.text}")

    def delete(self, ref: ObjectRef) -> None:
        """Removes the object from the back end, or overwrites it where that cannot delete."""
        if len(ref.key) > MAX_KEY_BYTES:
            return
        with self._exclusive(ref):
            self._delete(ref, "write")

    def _delete(self, ref: ObjectRef, kind: str) -> None:
        self._call(kind, _request("delete", ref, CHECK_SECONDS))
        self._forget(ref)

    # Capacity.

    def _admit(self, charged: int) -> None:
        """Reserves bytes, and evicts the least recently used objects for them.

        Raises ``TierNoSpaceError``.
        """
        capacity = self._limits.capacity_bytes
        if charged > capacity:
            raise TierNoSpaceError(f"object of {charged} bytes: the capacity is {capacity} bytes")
        with _Exclusive(self._evicting):
            surplus = self.usage().used_bytes + charged - capacity
            if surplus > 0:
                low = capacity * self._limits.low_watermark_percent // 100
                self._evict(max(surplus, self.usage().used_bytes - low))
            if self.usage().used_bytes + charged > self._limits.capacity_bytes:
                raise TierNoSpaceError(f"the tier is full with {self.usage().objects} objects")
            self._index.reserve(charged)

    def _evict(self, surplus_bytes: int) -> None:
        """Evicts for at most ``WRITE_SECONDS``; call with ``_evicting`` held."""
        deadline = time.monotonic() + WRITE_SECONDS
        until = self.usage().used_bytes - surplus_bytes
        while self.usage().used_bytes > until:
            oldest = self._index.oldest()
            if oldest is None or self._stopping or time.monotonic() > deadline:
                return
            self._delete(ObjectRef(*oldest), "service")

    # Maintenance.

    def maintain(self) -> None:
        """Starts the process again if it has ended, evicts to the limits, and compares the index
        with the back end."""
        if self._stopping:
            return
        if self.child.pid is None:
            self._start()
        limits = self._limits
        used = self.usage().used_bytes
        if used > limits.capacity_bytes * limits.high_watermark_percent // 100:
            with _Exclusive(self._evicting):
                self._evict(used - limits.capacity_bytes * limits.low_watermark_percent // 100)
        self._stock.maintain(self.child.opened.can_list)
        self.child.trim()

    def check(self) -> None:
        """Writes, reads and removes one small object. Starts the process if none runs."""
        if self.child.pid is None:
            self._start()
        digest = preferred().digest(memoryview(bytes(_CHECK_BYTES)))
        meta = ObjectMeta((_CHECK_BYTES,), preferred().kind, (digest,))
        tag = hashlib.sha256(f"{process_tag()}/{self.name}".encode()).digest()[:8]
        ref = ObjectRef(_CHECK_NAMESPACE, b"\xfe" + tag)
        size = HEADER_BYTES + _CHECK_BYTES
        header, page = memoryview(bytearray(HEADER_BYTES)), memoryview(mmap.mmap(-1, _CHECK_BYTES))
        with self.child.lane("check", CHECK_SECONDS) as lane:
            segment = lane.view(size)
            write_header(segment[:HEADER_BYTES], ref, meta)
            segment[HEADER_BYTES:] = page
            for operation in ("put", "get"):
                request = _request(operation, ref, CHECK_SECONDS, size, lane.segment_bytes)
                reply = self._checked(self.child.call(lane, request))
                if reply.outcome not in ("done", "found"):
                    raise TierUnavailableError(f"{operation}: {reply.outcome} {reply.text}")
            header[:], page[:] = segment[:HEADER_BYTES], segment[HEADER_BYTES:]
            self._checked(self.child.call(lane, _request("delete", ref, CHECK_SECONDS)))
        verify_payload(page, read_header(header, ref, _CHECK_BYTES))
        self._backoff.succeeded()

    # Helpers.

    def _call(self, kind: str, request: LaneRequest, payload: bytes = b"") -> LaneReply:
        """A request on a lane of ``kind``. ``payload`` goes into the segment first."""
        with self.child.lane(kind, request.seconds) as lane:
            if payload:
                lane.view(len(payload))[:] = payload
                request = msgspec.structs.replace(request, segment_bytes=lane.segment_bytes)
            return self._checked(self.child.call(lane, request))

    def _fetch(self, request: LaneRequest) -> tuple[LaneReply, bytes]:
        """A request on the service lane whose reply has content."""
        with self.child.lane("service", request.seconds) as lane:
            segment = lane.view(request.size_bytes)
            request = msgspec.structs.replace(request, segment_bytes=lane.segment_bytes)
            reply = self._checked(self.child.call(lane, request))
            return reply, bytes(segment[: reply.size_bytes])

    def _checked(self, reply: LaneReply) -> LaneReply:
        """Raises for the outcomes that are the same for every operation."""
        if reply.outcome == "unavailable":
            raise TierUnavailableError(f"{self.scheme}: {reply.text}")
        if reply.outcome == "no_space":
            raise TierNoSpaceError(f"{self.scheme}: {reply.text}")
        return reply

    def _exclusive(self, ref: ObjectRef) -> _Exclusive:
        """Writes and deletes of one object exclude each other: LMCache's connectors assume it."""
        return _Exclusive(self._locks[_stripe(ref)])

    def _publish(self, ref: ObjectRef, charged: int) -> None:
        with self._announcing:
            if self._index.add(ref.namespace, ref.key, charged):
                self._on_change(ref.namespace, ref.key, True)

    def _discard(self, ref: ObjectRef, stored: int) -> bool:
        """Removes a corrupt object. If the back end does not respond, only from the index. False:
        it was stored again since ``stored`` was taken, and stays."""
        try:
            with self._exclusive(ref):
                if self._stored[_stripe(ref)] != stored:
                    return False
                self._delete(ref, "write")
        except (TierUnavailableError, TierNoSpaceError) as error:
            _log.warning("%s: cannot remove a corrupt object: %s", self.name, error)
            return self._forget(ref, stored)
        return True

    def _forget(self, ref: ObjectRef, stored: int | None = None) -> bool:
        """The object is gone. False: it was stored again since ``stored`` was taken."""
        with self._announcing:
            if stored is not None and self._stored[_stripe(ref)] != stored:
                return False
            self._stock.removed(ref)
            if self._index.remove(ref.namespace, ref.key):
                self._on_change(ref.namespace, ref.key, False)
        return True

    def _displaced(self, namespace: str, key: bytes) -> None:
        self._on_change(namespace, key, False)


class _Exclusive:
    """A lock that is waited for at most as long as a write may take."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=WRITE_SECONDS):
            raise TierUnavailableError("an operation on the same object, or an eviction, hangs")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _stripe(ref: ObjectRef) -> int:
    return hash(ref) % _LOCKS


def _request(
    operation: str, ref: ObjectRef, seconds: float, size_bytes: int = 0, segment_bytes: int = 0
) -> LaneRequest:
    return LaneRequest(
        operation,  # type: ignore[arg-type]
        ref.namespace,
        ref.key.hex(),
        size_bytes,
        segment_bytes,
        seconds,
    )
