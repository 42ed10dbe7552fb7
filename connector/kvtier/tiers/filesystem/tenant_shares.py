"""The shares of tenants in a directory, and the removal of what has expired.

Both follow the index of this process. A write makes room within its tenant's share before it
begins: it removes the ends of that tenant's least recently used prefixes. What exceeds a share
otherwise, because the share was lowered or another process has written, is removed by the leader of
the directory. What has expired is removed by whichever process finds it first.

Whom an object belongs to, and when it expires, is in its header. The index knows it of what this
process has written and of a saved index. Headers of other objects are read in the background, a few
at a time.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kvtier.errors import TierError, TierQuotaError
from kvtier.tenants import UNLIMITED, share_bytes
from kvtier.tiers.base import NO_FACTS, ObjectMeta, ObjectRef, TierLimits
from kvtier.tiers.filesystem import io
from kvtier.tiers.filesystem.format import HEADER_BYTES, facts_of
from kvtier.tiers.filesystem.index import Index, TenantClaim
from kvtier.tiers.filesystem.io import GONE
from kvtier.tiers.filesystem.walker import object_path

READ_SECONDS = 1.0
"""How long headers are read in one round. A round follows 5 s after the one before."""
READ_HEADERS = 20_000
READ_HEADERS_UNLIMITED = 1_000
"""The most in one round; the second without a limit for tenants, when only what expires is looked
for."""
REMOVED_PER_ROUND = 1_024
_PART = 64
_NO_FILE = (*GONE, errno.EACCES, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EPERM)


class TenantShares:
    """The shares of one directory. ``remove(namespace, key)`` deletes an object, and may raise
    ``TierError``. Any thread may call any method; ``maintain`` and ``claimed`` block on I/O."""

    def __init__(
        self,
        index: Index,
        root: Path,
        remove: Callable[[str, bytes], None],
        wall: Callable[[], float],
    ) -> None:
        self._index = index
        self._root = str(root)
        self._remove = remove
        self._wall = wall
        self._lock = threading.Lock()
        self._removed: Counter[str] = Counter()

    def configure(self, limits: TierLimits) -> None:
        """Applies changed limits. A lowered share is reached within rounds of maintenance."""
        self._index.set_tenant_limit(share_bytes(limits.capacity_bytes, limits.tenant_percent))

    def counts(self) -> Mapping[tuple[str, str], int]:
        """What was removed, by the name of a counter and its reason."""
        with self._lock:
            found = dict(self._removed)
        return {
            (name, ""): found.get(name, 0) for name in ("tier_expired", "tier_tenant_evictions")
        }

    def _note_removed(self, name: str) -> None:
        with self._lock:
            self._removed[name] += 1

    @contextlib.contextmanager
    def claimed(self, ref: ObjectRef, meta: ObjectMeta, size_bytes: int) -> Iterator[TenantClaim]:
        """Charges a file to its tenant's share until it is published, and makes room for it.

        Raises ``TierQuotaError`` if there is none: the tenant's other objects are being written, or
        the file follows all of them.
        """
        claim = self._claim(ref, meta, size_bytes)
        try:
            yield claim
        finally:
            self._index.unclaim(claim)

    def _claim(self, ref: ObjectRef, meta: ObjectMeta, size_bytes: int) -> TenantClaim:
        if size_bytes <= self._index.tenant_limit_bytes:
            for _ in range(REMOVED_PER_ROUND):
                claim = self._index.claim(meta.tenant, size_bytes)
                if claim is not None:
                    return claim
                victim = self._index.oldest_of(meta.tenant)
                if victim is None or victim == (ref.namespace, meta.previous):
                    break
                self._evict(*victim)
        raise TierQuotaError(
            f"{self._root}: tenant {meta.tenant.hex()} has no room for {size_bytes} bytes in its "
            f"share of {self._index.tenant_limit_bytes}"
        )

    def _evict(self, namespace: str, key: bytes) -> None:
        self._remove(namespace, key)
        self._note_removed("tier_tenant_evictions")

    def maintain(self, leads: bool) -> None:
        """One round. ``leads``: this process is the leader of the directory."""
        self._read_headers()
        for namespace, key in self._index.expired(self._wall(), REMOVED_PER_ROUND):
            with contextlib.suppress(TierError):
                self._remove(namespace, key)
                self._note_removed("tier_expired")
        for _ in range(REMOVED_PER_ROUND if leads else 0):
            victim = self._index.oldest_above_share()
            if victim is None:
                return
            self._evict(*victim)

    def _read_headers(self) -> None:
        limited = self._index.tenant_limit_bytes != UNLIMITED
        left = READ_HEADERS if limited else READ_HEADERS_UNLIMITED
        until = time.monotonic() + READ_SECONDS
        while left > 0 and self._index.unknown and time.monotonic() < until:
            names = self._index.next_unknown(min(_PART, left))
            left -= max(len(names), 1)
            for namespace, key in names:
                self._read_header(namespace, key)

    def _read_header(self, namespace: str, key: bytes) -> None:
        try:
            header = io.read_start(object_path(self._root, namespace, key), HEADER_BYTES)
        except OSError as error:
            if error.errno in _NO_FILE:
                # Scans and reads find out what is wrong with it.
                self._index.learn(namespace, key, NO_FACTS)
                return
            raise io.tier_error(error, self._root) from error
        # A damaged one is found when it is read.
        self._index.learn(namespace, key, facts_of(header) or NO_FACTS)
