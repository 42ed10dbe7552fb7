"""Keeps the index equal to what the back end holds.

Back ends that list their objects are listed, when the tier is opened and once a minute: so objects
of other pods are found, and those that the back end has evicted or lost are dropped.

At other back ends the tier keeps a catalog: ``BUCKETS`` lists of objects, each stored as an object
of its own with the header that makes it verifiable. A list is read, merged with the index and
written, so that several pods can share a back end: what one overwrites of another's, the other adds
again. A list that was written and is gone means that the back end has lost its objects.

Threads: ``load``, ``maintain`` and ``save_at_end`` on one thread at a time; the others on any.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterator

from kvtier.errors import TierCorruptError, TierError
from kvtier.tiers.base import ObjectMeta, ObjectRef, OnChange, aligned
from kvtier.tiers.checksum import preferred
from kvtier.tiers.filesystem.format import (
    HEADER_BYTES,
    read_header,
    verify_payload,
    write_header,
)
from kvtier.tiers.filesystem.index import Index
from kvtier.tiers.lmcache.wire import (
    CATALOG,
    ENTRY_BYTES,
    OVERHEAD_BYTES,
    LaneReply,
    LaneRequest,
    pack_entries,
    unpack_entries,
)

BUCKETS = 32
REFRESH_SECONDS = 60.0
LIST_SECONDS = 60.0
CATALOG_SECONDS = 5.0
END_SECONDS = 0.5
LIST_BYTES = 1 << 20
MAX_LIST_BYTES = 256 << 20
MAX_UNCERTAIN = 4096
"""Objects whose write has failed that are remembered for removal."""
_NAMESPACE = f"{0:032x}"
_log = logging.getLogger("kvtier.tiers.lmcache")

Call = Callable[[str, LaneRequest, bytes], LaneReply]
Read = Callable[[LaneRequest], tuple[LaneReply, bytes]]


def bucket_of(namespace: str, key: bytes) -> int:
    """The catalog's list of an object."""
    return zlib.crc32(key, int(namespace[:8], 16)) % BUCKETS


class Stock:
    """What the back end holds. ``call`` makes a request with a payload; ``read`` one whose reply
    has content; both raise ``TierError``. ``refresh_seconds``: between comparisons. ``announcing``:
    held from a change of the index to its announcement."""

    def __init__(
        self,
        index: Index,
        call: Call,
        read: Read,
        on_change: OnChange,
        refresh_seconds: float = REFRESH_SECONDS,
        announcing: threading.Lock | None = None,
    ) -> None:
        self._index = index
        self._call = call
        self._read = read
        self._on_change = on_change
        self._refresh_seconds = refresh_seconds
        self._refresh_at = 0.0
        self._announcing = announcing or threading.Lock()
        self._lock = threading.Lock()
        self._dirty: set[int] = set()
        self._removed: dict[int, set[ObjectRef]] = {}
        self._written: set[int] = set()
        self._uncertain: dict[ObjectRef, None] = {}

    # For any thread.

    def added(self, ref: ObjectRef) -> None:
        """The object was stored."""
        bucket = bucket_of(ref.namespace, ref.key)
        with self._lock:
            self._dirty.add(bucket)
            self._removed.get(bucket, set()).discard(ref)
            self._uncertain.pop(ref, None)

    def removed(self, ref: ObjectRef) -> None:
        """The object no longer exists."""
        bucket = bucket_of(ref.namespace, ref.key)
        with self._lock:
            self._dirty.add(bucket)
            self._removed.setdefault(bucket, set()).add(ref)
            self._uncertain.pop(ref, None)

    def uncertain(self, ref: ObjectRef) -> None:
        """A write has failed, and the back end may hold the object all the same."""
        with self._lock:
            self._uncertain[ref] = None
            while len(self._uncertain) > MAX_UNCERTAIN:
                self._uncertain.pop(next(iter(self._uncertain)))

    # For the maintenance thread.

    def load(self, can_list: bool) -> None:
        """Indexes what the back end holds. Raises ``TierError``."""
        self._refresh_at = time.monotonic() + self._refresh_seconds
        if can_list:
            self._compare()
            return
        for bucket in range(BUCKETS):
            self._merge(bucket, self._load_bucket(bucket))

    def maintain(self, can_list: bool) -> None:
        """Removes what failed writes may have left, writes changed lists, and compares when it is
        time. Raises ``TierError``."""
        self._remove_uncertain()
        due = time.monotonic() >= self._refresh_at
        if due:
            self._refresh_at = time.monotonic() + self._refresh_seconds
        if can_list:
            with self._lock:
                self._dirty.clear()
                self._removed.clear()
            if due:
                self._compare()
            return
        for bucket in range(BUCKETS):
            if due or bucket in self._dirty:
                self._save_bucket(bucket)

    def save_at_end(self) -> None:
        """Writes changed lists, within ``END_SECONDS`` and without raising. They are not merged:
        what another pod has added meanwhile, it adds again."""
        deadline = time.monotonic() + END_SECONDS
        for bucket in sorted(self._dirty):
            if time.monotonic() > deadline:
                _log.warning("not all lists of objects were written before the end")
                return
            try:
                self._write_bucket(bucket, END_SECONDS)
            except TierError as error:
                _log.warning("cannot write the list of objects: %s", error)
                return

    def _remove_uncertain(self) -> None:
        with self._lock:
            waiting = list(self._uncertain)
        for ref in waiting:
            if not self._index.contains(ref.namespace, ref.key):
                request = LaneRequest(
                    "delete", ref.namespace, ref.key.hex(), seconds=CATALOG_SECONDS
                )
                self._call("service", request, b"")
            with self._lock:
                self._uncertain.pop(ref, None)

    # Back ends with lists.

    def _compare(self) -> None:
        self._index.begin_scan()
        for ref, size in self._list():
            if not self._index.mark_seen(ref.namespace, ref.key):
                self._discover(ref, aligned(size + OVERHEAD_BYTES))
        self._index.end_scan()
        for namespace, key in self._index.not_seen():
            self._drop(ObjectRef(namespace, key))

    def _list(self) -> Iterator[tuple[ObjectRef, int]]:
        start = 0
        while True:
            reply, content = self._read(
                LaneRequest("list", size_bytes=LIST_BYTES, seconds=LIST_SECONDS, start=start)
            )
            if reply.outcome != "done":
                raise TierCorruptError(f"list: {reply.outcome} {reply.text}")
            yield from unpack_entries(memoryview(content))
            start += len(content) // ENTRY_BYTES
            if not reply.more:
                return

    def _discover(self, ref: ObjectRef, charged: int) -> None:
        with self._announcing:
            if self._index.add_discovered(ref.namespace, ref.key, charged):
                self._on_change(ref.namespace, ref.key, True)

    def _drop(self, ref: ObjectRef) -> None:
        with self._announcing:
            if self._index.remove(ref.namespace, ref.key):
                self._on_change(ref.namespace, ref.key, False)

    # Back ends without lists.

    def _load_bucket(self, bucket: int) -> list[tuple[ObjectRef, int]] | None:
        """The stored list, None if there is none. A list that is damaged counts as empty."""
        ref = _catalog_ref(bucket)
        size = HEADER_BYTES
        while True:
            request = LaneRequest("get", CATALOG, f"{bucket:02x}", size, 0, CATALOG_SECONDS)
            reply, content = self._read(request)
            if reply.outcome != "corrupt" or size >= MAX_LIST_BYTES:
                break
            # It is larger than the segment, or damaged.
            size *= 8
        if reply.outcome == "missing":
            return None
        try:
            if reply.outcome != "found" or len(content) < HEADER_BYTES:
                raise TierCorruptError(f"list of {len(content)} bytes: {reply.text}")
            view = memoryview(content)
            payload = view[HEADER_BYTES:]
            meta = read_header(view[:HEADER_BYTES], ref, len(payload))
            verify_payload(payload, meta)
        except TierCorruptError as error:
            _log.warning("the list of objects %d is damaged and is replaced: %s", bucket, error)
            return []
        return list(unpack_entries(payload[: meta.shard_bytes[0]]))

    def _merge(self, bucket: int, found: list[tuple[ObjectRef, int]] | None) -> None:
        if found is None:
            return
        with self._lock:
            self._written.add(bucket)
            removed = set(self._removed.get(bucket, ()))
        for ref, charged in found:
            if ref not in removed:
                self._discover(ref, charged)

    def _save_bucket(self, bucket: int) -> None:
        found = self._load_bucket(bucket)
        if found is None and bucket in self._written:
            self._forget_all()
        self._merge(bucket, found)
        self._write_bucket(bucket, CATALOG_SECONDS)

    def _write_bucket(self, bucket: int, seconds: float) -> None:
        with self._lock:
            dirty = bucket in self._dirty
            self._dirty.discard(bucket)
            removed = self._removed.pop(bucket, set())
        if not dirty:
            return
        mine = [
            (ObjectRef(namespace, key), charged)
            for namespace, key, charged in self._index.entries()
            if bucket_of(namespace, key) == bucket
        ]
        content = _catalog(bucket, pack_entries(mine))
        request = LaneRequest("put", CATALOG, f"{bucket:02x}", len(content), 0, seconds)
        try:
            self._call("service", request, content)
        except TierError:
            with self._lock:
                self._dirty.add(bucket)
                self._removed.setdefault(bucket, set()).update(removed)
            raise
        with self._lock:
            self._written.add(bucket)

    def _forget_all(self) -> None:
        """The back end has lost its objects, as an LMCache server does that is restarted."""
        _log.warning("the back end has lost its list of objects: %d are dropped", self._index.count)
        with self._lock:
            self._written.clear()
            self._removed.clear()
        for namespace, key, _ in list(self._index.entries()):
            self._drop(ObjectRef(namespace, key))


def _catalog_ref(bucket: int) -> ObjectRef:
    return ObjectRef(_NAMESPACE, b"\xfd" + bytes([bucket]))


def _catalog(bucket: int, entries: bytes) -> bytes:
    checksum = preferred()
    payload = entries + bytes(aligned(len(entries)) - len(entries))
    meta = ObjectMeta((len(entries),), checksum.kind, (checksum.digest(memoryview(entries)),))
    content = bytearray(HEADER_BYTES) + payload
    write_header(memoryview(content)[:HEADER_BYTES], _catalog_ref(bucket), meta)
    return bytes(content)
