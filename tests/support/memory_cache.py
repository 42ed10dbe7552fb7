"""A rank's cache in memory in place of LMCache's engine, which loses and damages what a test says.

It copies real blocks, and seals and verifies objects as the real one does.
"""

from __future__ import annotations

import threading
from random import Random
from typing import Any

from kvtier.engines.lmcache.block_copier import BlockCopier
from kvtier.engines.lmcache.objects import (
    ObjectShape,
    object_ref,
    seal_object,
    shard_of,
    verify_object,
)
from kvtier.engines.lmcache.transfers import LoadTransfer, StoreTransfer
from kvtier.errors import TierError


class Storage:
    """What a back end holds, across restarts of the engine. ``ranks[r]``: shards of rank r."""

    def __init__(self, ranks: int) -> None:
        self.lock = threading.Lock()
        self.ranks: list[dict[bytes, bytearray]] = [{} for _ in range(ranks)]
        self.markers: dict[bytes, int] = {}

    def disturb(self, random: Random) -> str:
        """Loses or damages something of one rank. Returns what."""
        with self.lock:
            shards = random.choice(self.ranks)
            if not shards:
                return ""
            key = random.choice(list(shards))
            if random.random() < 0.5:
                del shards[key]
                return "lost"
            shards[key][random.randrange(4096 + 16)] ^= 1 + random.randrange(255)
            return "damaged"


class MemoryCache:
    """One rank's cache. The form of ``RankCache``."""

    def __init__(self, storage: Storage, rank: int, copier: BlockCopier, chunk: int) -> None:
        self._storage = storage
        self._shards = storage.ranks[rank]
        self._copier = copier
        self._shape = ObjectShape(chunk, copier.shard_bytes)
        self._namespace = f"{rank:032x}"
        self.store_fails = 0.0
        self._random = Random(rank)

    def store(self, transfer: StoreTransfer) -> str:
        try:
            if self._random.random() < self.store_fails:
                return "no_room"
            content = bytearray(self._shape.object_bytes)
            view = memoryview(content)
            shard = shard_of(view, self._shape)
            if not transfer.gate.run(
                lambda: self._copier.store(transfer.run, shard, transfer.fence)
            ):
                return "out_of_time"
            ref = object_ref(self._namespace, transfer.key, transfer.store)
            seal_object(view, self._shape, ref)
            with self._storage.lock:
                self._shards[transfer.key] = content
            return ""
        finally:
            transfer.gate.close()

    def load(self, transfer: LoadTransfer) -> None:
        try:
            for index, key in enumerate(transfer.keys):
                with self._storage.lock:
                    content = bytes(self._shards.get(key, b""))
                if not content:
                    transfer.failure = "missing"
                    return
                view = memoryview(content)
                ref = object_ref(self._namespace, key, transfer.stores[index])
                try:
                    verify_object(view, self._shape, ref)
                except TierError:
                    with self._storage.lock:
                        self._shards.pop(key, None)
                    transfer.failure = "damaged"
                    return
                run, shard = transfer.runs[index], shard_of(view, self._shape)
                if not self._copy(transfer, run, shard):
                    return
                transfer.loaded = index + 1
        finally:
            if transfer.failure in ("missing", "damaged"):
                self._find_missing(transfer)
            transfer.gate.close()

    def _find_missing(self, transfer: LoadTransfer) -> None:
        for index in range(transfer.loaded, len(transfer.keys)):
            with self._storage.lock:
                if transfer.keys[index] not in self._shards:
                    transfer.missing.append(index)

    def _copy(self, transfer: LoadTransfer, run: Any, shard: memoryview) -> bool:
        if transfer.gate.run(lambda: self._copier.load(run, shard, transfer.fence)):
            return True
        transfer.failure = "out_of_time"
        return False

    def write(self, key: bytes, store: int) -> bool:
        with self._storage.lock:
            self._storage.markers[key] = store
        return True

    def read(self, key: bytes) -> int:
        with self._storage.lock:
            return self._storage.markers.get(key, 0)

    def remove(self, key: bytes) -> None:
        with self._storage.lock:
            self._storage.markers.pop(key, None)

    def holds(self, key: bytes) -> bool:
        with self._storage.lock:
            return key in self._shards

    def close(self) -> None:
        """Nothing to do."""
