"""One rank's LMCache engine: stores and loads chunks, and holds commit markers.

Calls block for as long as LMCache does, so they run on threads of their own. They raise nothing:
LMCache raises whatever its back ends raise, and each failure has a reason here.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from kvtier.engines.lmcache.block_copier import BlockCopier
from kvtier.engines.lmcache.bytes_connector import (
    KEYS_OPTION,
    BytesConnector,
    KeyDatabase,
    metadata_for,
)
from kvtier.engines.lmcache.objects import (
    MARKER_BYTES,
    ObjectShape,
    chunk_hash,
    pack_marker,
    unpack_marker,
)
from kvtier.engines.lmcache.transfers import LoadTransfer, StoreTransfer

VISIBLE_SECONDS = 10.0
"""How long a stored object may take until its back end has it."""
MISSING_SECONDS = 0.1
"""How long a failed load is delayed to find out what else has been lost."""
_POLL_SECONDS = 0.002
_MARKER_KIND = b"marker"
T = TypeVar("T")
_log = logging.getLogger("kvtier.lmcache")


class RankCache:
    """An LMCache engine for one rank's objects.

    ``engine``: LMCache's, made by ``open_cache``. Threads: one for stores, one for loads, one for
    markers, at the same time.
    """

    def __init__(self, engine: Any, database: KeyDatabase, namespace: str, chunk: int) -> None:
        self._engine = engine
        self._storage = engine.storage_manager
        self._database = database
        self._namespace = namespace
        self._chunk_tokens = chunk

    def store(self, transfer: StoreTransfer) -> str:
        """Stores one chunk. Returns why it is not there; empty if a back end has it."""
        try:
            key = self._database.key(chunk_hash(transfer.key))
            # LMCache keeps what it has, and that may be a shard of an earlier store.
            self._remove(key)
            self._engine.store(
                [0] * self._chunk_tokens,
                request_configs={KEYS_OPTION: (transfer.key,)},
                transfer=transfer,
            )
            if transfer.copied:
                return "" if self._visible(key) else "not_visible"
            self._remove(key)
            return transfer.failure or "no_room"
        except Exception as error:  # noqa: BLE001 - the back ends raise whatever their libraries do
            _log.warning(
                "KVTier: LMCache cannot store a chunk: %s: %s", type(error).__name__, error
            )
            return "storage_failed"
        finally:
            transfer.gate.close()

    def _remove(self, key: Any) -> None:
        """Removes an object from every back end; some report one that is not there as an error."""
        if self._storage.contains(key) is not None:
            self._storage.remove(key)

    def _visible(self, key: Any) -> bool:
        """Waits until a back end has the object: LMCache writes in the background."""
        until = time.monotonic() + VISIBLE_SECONDS
        while self._storage.contains(key) is None:
            if time.monotonic() > until:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def load(self, transfer: LoadTransfer) -> None:
        """Loads chunks up to the first that is not there or does not verify."""
        try:
            self._engine.retrieve(
                [0] * (self._chunk_tokens * len(transfer.keys)),
                request_configs={KEYS_OPTION: transfer.keys},
                transfer=transfer,
            )
            if transfer.loaded < len(transfer.keys) and not transfer.failure:
                transfer.failure = "missing"
            for index in transfer.damaged:
                self._remove(self._database.key(chunk_hash(transfer.keys[index])))
            if transfer.failure in ("missing", "damaged"):
                self._find_missing(transfer)
        except Exception as error:  # noqa: BLE001
            _log.warning("KVTier: LMCache cannot load: %s: %s", type(error).__name__, error)
            transfer.failure = transfer.failure or "storage_failed"
        finally:
            transfer.gate.close()

    def _find_missing(self, transfer: LoadTransfer) -> None:
        """Notes which chunks of a failed load are not there, as far as that can be told in time."""
        until = time.monotonic() + MISSING_SECONDS
        transfer.missing.append(transfer.loaded)
        for index in range(transfer.loaded + 1, len(transfer.keys)):
            if time.monotonic() > until or not transfer.gate.is_open:
                return
            if self._storage.contains(self._database.key(chunk_hash(transfer.keys[index]))) is None:
                transfer.missing.append(index)

    # Markers (``kvtier.lookup.index``).

    def write(self, key: bytes, store: int) -> bool:
        """Writes the commit marker of a chunk. Raises ``OSError``."""
        return _mapped(lambda: self._write(key, store))

    def _write(self, key: bytes, store: int) -> bool:
        name = self._database.key(chunk_hash(key, _MARKER_KIND))
        self._remove(name)
        shape = torch.Size((1, 1, 1, MARKER_BYTES))
        memory_obj = self._storage.allocate([shape], [torch.uint8], busy_loop=False)
        if memory_obj is None:
            return False
        content = pack_marker(self._namespace, key, store)
        memory_obj.tensor.view(-1)[:] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self._storage.batched_put([name], [memory_obj])
        return True

    def read(self, key: bytes) -> int:
        """Returns the store that the marker of a chunk names, or 0. Raises ``OSError``."""
        return _mapped(lambda: self._read(key))

    def _read(self, key: bytes) -> int:
        name = self._database.key(chunk_hash(key, _MARKER_KIND))
        if self._storage.contains(name) is None:
            return 0
        memory_obj = self._storage.get(name)
        if memory_obj is None:
            return 0
        try:
            content = bytes(memory_obj.tensor.view(-1).view(torch.uint8).numpy())
        finally:
            memory_obj.ref_count_down()
        return unpack_marker(content, self._namespace, key)

    def remove(self, key: bytes) -> None:
        """Removes the marker of a chunk. Raises ``OSError``."""
        name = self._database.key(chunk_hash(key, _MARKER_KIND))
        _mapped(lambda: self._remove(name))

    def holds(self, key: bytes) -> bool:
        """Whether a back end says that it has this rank's shard. Raises ``OSError``."""
        name = self._database.key(chunk_hash(key))
        return _mapped(lambda: self._storage.contains(name)) is not None

    def close(self) -> None:
        """Closes LMCache's engine. Raises nothing."""
        try:
            self._engine.close()
        except Exception as error:  # noqa: BLE001
            _log.warning("KVTier: LMCache cannot be closed: %s", error)


def _mapped(call: Callable[[], T]) -> T:
    """Turns whatever LMCache raises into ``OSError``."""
    try:
        return call()
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def open_cache(
    config_file: Path, namespace: str, ranks: int, rank: int, copier: BlockCopier, chunk: int
) -> RankCache:
    """Creates LMCache's engine for one rank. Importing LMCache takes seconds.

    Raises whatever LMCache raises.
    """
    # LMCache reports its use to its makers unless this is set.
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    from lmcache.v1.cache_engine import LMCacheEngine
    from lmcache.v1.config import LMCacheEngineConfig

    config = LMCacheEngineConfig.from_file(str(config_file))
    shape = ObjectShape(chunk, copier.shard_bytes)
    metadata = metadata_for(namespace, ranks, rank, shape)
    database = KeyDatabase(metadata, chunk)
    connector = BytesConnector(shape, copier, namespace)
    engine = LMCacheEngine(
        config, metadata, database, connector, lambda _tensor, _rank: None, lambda each, _rank: each
    )
    engine.post_init()
    return RankCache(engine, database, namespace, chunk)
