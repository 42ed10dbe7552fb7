"""The storage connectors of LMCache, as the child process calls them. The only module that imports
LMCache.

LMCache's connectors differ in how they fail: some raise, some log and return None, some leave a
connection in the middle of a message. Each back end here maps that to one outcome, and drops its
connection after every failure. A connector serves one operation at a time: two at once may read
each other's answers.

A lane's thread calls everything but ``interrupt``, which comes from the watchdog.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import BytesBufferMemoryObj, MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector import parse_remote_url

from kvtier.tiers.base import ObjectRef
from kvtier.tiers.lmcache.wire import MAX_KEY_BYTES, LaneReply, OpenRequest

CONNECT_SECONDS = 1.0
MODEL_PREFIX = "kvtier-"
"""Names start with this, so that KVTier's objects are told from those of engines that use LMCache
themselves."""
ABANDONED_SECONDS = 600.0
"""A temporary file that has not changed for this long belongs to a writer that was killed."""
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
_TOMBSTONE_BYTES = 1


def engine_key(space: str, key_hex: str) -> CacheEngineKey:
    """LMCache's key. A digit 1 before the key keeps its leading zeros, because the hash is an
    integer there."""
    return CacheEngineKey(MODEL_PREFIX + space, 1, 0, int("1" + key_hex, 16), torch.uint8)


def parse_name(name: str) -> ObjectRef | None:
    """The object of a name in the back end; None if it is none of KVTier's."""
    parts = name.split("@")
    if len(parts) != 5 or not parts[0].startswith(MODEL_PREFIX) or parts[4] != "uint8":
        return None
    namespace, key = parts[0].removeprefix(MODEL_PREFIX), parts[3]
    try:
        if len(namespace) != 32 or int(namespace, 16) == 0 or not key.startswith("1"):
            return None
        found = ObjectRef(namespace, bytes.fromhex(key[1:]))
    except ValueError:
        return None
    return found if 1 <= len(found.key) <= MAX_KEY_BYTES else None


class _Allocator:
    """What a connector takes for LMCache's CPU back end. Its memory is the lane's segment.

    ``size_bytes``: what the last read asked for. ``refused``: it asked for another kind or amount
    of memory than this tier writes, as a lying server makes it do.
    """

    def __init__(self) -> None:
        self.config = LMCacheEngineConfig.from_defaults()
        self.metadata = LMCacheMetadata("kvtier", 1, 1, 0, 0, torch.uint8, (1, 1, 256, 1, 1))
        self.view = memoryview(b"")
        self.size_bytes = 0
        self.refused = False

    def begin(self, view: memoryview) -> None:
        """A read into ``view`` starts."""
        self.view, self.size_bytes, self.refused = view, 0, False

    def allocate(self, shapes: Any, _dtypes: Any, fmt: Any, *_: Any, **__: Any) -> Any:
        """Memory for one object, or None."""
        shape = shapes[0] if isinstance(shapes, list) else shapes
        size = int(shape[0]) if len(shape) else 0
        if fmt != MemoryFormat.BINARY_BUFFER or not 0 < size <= len(self.view):
            self.refused = True
            return None
        self.size_bytes = size
        return BytesBufferMemoryObj(self.view[:size])


class StorageBackend(ABC):
    """One back end of LMCache for one lane."""

    can_list = False
    can_delete = False

    def __init__(self, target: OpenRequest) -> None:
        self.target = target
        self.loop = asyncio.new_event_loop()
        self.allocator = _Allocator()
        self._connector: Any = None

    @abstractmethod
    def connect(self) -> Any:
        """A new connector. May block for ``CONNECT_SECONDS``."""

    def connector(self) -> Any:
        """The connector, which is made when first needed."""
        if self._connector is None:
            self._connector = self.connect()
        return self._connector

    @property
    def connected(self) -> bool:
        """Whether there is a connection from an earlier operation."""
        return self._connector is not None

    def drop(self) -> None:
        """Drops the connection, because nothing is known about its state."""
        self._connector = None

    def interrupt(self) -> None:  # noqa: B027
        """Ends an operation that has missed its deadline, if it blocks outside the event loop. On
        the watchdog's thread."""

    def run(self, coroutine: Coroutine[Any, Any, Any], seconds: float) -> Any:
        """Runs a coroutine of the connector; raises ``TimeoutError`` after ``seconds``."""
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, seconds))

    def put(self, key: CacheEngineKey, view: memoryview, seconds: float) -> LaneReply:
        """Writes one object."""
        memory = BytesBufferMemoryObj(view)
        self.run(self.connector().put(key, memory), seconds)
        return LaneReply("done")

    def get(self, key: CacheEngineKey, view: memoryview, seconds: float) -> LaneReply:
        """Reads one object."""
        self.allocator.begin(view)
        found = self.run(self.connector().get(key), seconds)
        if self.allocator.refused:
            self.drop()
            return LaneReply("corrupt", text="the back end announces an object of another size")
        if found is None:
            return self.not_found(key)
        return LaneReply("found", self.allocator.size_bytes)

    def not_found(self, _key: CacheEngineKey) -> LaneReply:
        """What it means that the connector returned nothing."""
        return LaneReply("missing")

    def exists(self, key: CacheEngineKey, seconds: float) -> LaneReply:
        """Whether the back end has the object."""
        there = self.run(self.connector().exists(key), seconds)
        return LaneReply("found" if there else "missing")

    def delete(self, key: CacheEngineKey, seconds: float) -> LaneReply:
        """Removes one object."""
        return LaneReply("unsupported")

    def entries(self, seconds: float) -> Iterator[tuple[ObjectRef, int]]:
        """All objects of KVTier, with their sizes in bytes."""
        return iter(())


class ServerBackend(StorageBackend):
    """``lm://``: a server of LMCache, which has neither deletion nor lists nor acknowledgements."""

    def connect(self) -> Any:
        from lmcache.v1.storage_backend.connector.lm_connector import LMCServerConnector

        address = parse_remote_url(self.target.url)
        connector = LMCServerConnector(address.host, address.port, self.loop, self.allocator)
        connector.client_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connector

    def run(self, coroutine: Coroutine[Any, Any, Any], seconds: float) -> Any:
        channel = self._connector.client_socket
        channel.settimeout(seconds)
        # The server sends an answer in two parts, and the second waits until the first is
        # acknowledged: 40 ms, if the kernel delays that. The option holds for a while only.
        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return super().run(coroutine, seconds)

    def drop(self) -> None:
        if self._connector is not None:
            self._connector.client_socket.close()
        super().drop()

    def interrupt(self) -> None:
        connector = self._connector
        if connector is not None:
            with contextlib.suppress(OSError):
                connector.client_socket.shutdown(socket.SHUT_RDWR)

    def put(self, key: CacheEngineKey, view: memoryview, seconds: float) -> LaneReply:
        super().put(key, view, seconds)
        # The server handles the requests of a connection in order and acknowledges no write, so
        # that an answer to the next request is the acknowledgement.
        if self.exists(key, seconds).outcome != "found":
            return LaneReply("unavailable", text="the server does not have what was written")
        return LaneReply("done")

    def get(self, key: CacheEngineKey, view: memoryview, seconds: float) -> LaneReply:
        reply = super().get(key, view, seconds)
        if reply.outcome == "found" and reply.size_bytes == _TOMBSTONE_BYTES:
            return LaneReply("missing")
        return reply

    def not_found(self, _key: CacheEngineKey) -> LaneReply:
        if not self.allocator.size_bytes:
            return LaneReply("missing")
        self.drop()
        return LaneReply("unavailable", text="the server ended the connection within an object")

    def delete(self, key: CacheEngineKey, seconds: float) -> LaneReply:
        if self.exists(key, seconds).outcome == "missing":
            return LaneReply("done")
        return self.put(key, memoryview(bytes(_TOMBSTONE_BYTES)), seconds)


class RedisBackend(StorageBackend):
    """``redis://`` and ``rediss://``: Redis or Valkey. LMCache stores two values per object: its
    own metadata, and the bytes."""

    can_list = True
    can_delete = True

    def __init__(self, target: OpenRequest) -> None:
        super().__init__(target)
        self._orphans: set[bytes] = set()

    def connect(self) -> Any:
        from lmcache.v1.storage_backend.connector.redis_connector import RedisConnector

        return RedisConnector(_with_credentials(self.target), self.loop, self.allocator)

    def drop(self) -> None:
        connector, self._connector = self._connector, None
        if connector is None:
            return
        for worker in asyncio.all_tasks(self.loop):
            worker.cancel()
        with contextlib.suppress(Exception):
            self.run(connector.connection.connection_pool.disconnect(), CONNECT_SECONDS)

    def delete(self, key: CacheEngineKey, seconds: float) -> LaneReply:
        name = key.to_string()
        command = self.connector().connection.delete(name + "metadata", name + "kv_bytes")
        self.run(command, seconds)
        return LaneReply("done")

    def entries(self, seconds: float) -> Iterator[tuple[ObjectRef, int]]:
        return iter(self.run(self._scan(), seconds))

    async def _scan(self) -> list[tuple[ObjectRef, int]]:
        """Objects with both values. Bytes whose metadata is absent in two lists in a row were left
        by a writer that was killed, and are removed."""
        redis = self.connector().connection
        described: set[bytes] = set()
        stored: set[bytes] = set()
        async for name in redis.scan_iter(match=MODEL_PREFIX + "*", count=1000):
            if name.endswith(b"metadata"):
                described.add(name.removesuffix(b"metadata"))
            elif name.endswith(b"kv_bytes"):
                stored.add(name.removesuffix(b"kv_bytes"))
        orphans = stored - described
        for name in orphans & self._orphans:
            await redis.delete(name + b"kv_bytes")
        self._orphans = orphans
        found = []
        names = sorted(described & stored)
        for start in range(0, len(names), 1000):
            part = names[start : start + 1000]
            pipeline = redis.pipeline(transaction=False)
            for name in part:
                pipeline.strlen(name + b"kv_bytes")
            for name, size in zip(part, await pipeline.execute(), strict=True):
                ref = parse_name(name.decode(errors="replace"))
                if ref is not None and size:
                    found.append((ref, int(size)))
        return found


class DirectoryBackend(StorageBackend):
    """``fs://``: LMCache's own files in a directory."""

    can_list = True
    can_delete = True

    def connect(self) -> Any:
        from lmcache.v1.storage_backend.connector.fs_connector import FSConnector

        path = parse_remote_url(self.target.url).path
        return FSConnector(self.loop, self.allocator, self.allocator.config, base_paths_str=path)

    def get(self, key: CacheEngineKey, view: memoryview, seconds: float) -> LaneReply:
        until = time.monotonic() + seconds
        path = self.connector()._get_file_path(key)
        while True:
            before = _file_version(path)
            if before is None:
                return LaneReply("missing")
            reply = super().get(key, view, max(until - time.monotonic(), 0.0))
            if reply.outcome != "missing":
                return reply
            # The connector logs every error and returns None.
            after = _file_version(path)
            if after == before:
                return LaneReply("corrupt", text=f"{path} is truncated or damaged")
            if after is None or time.monotonic() > until:
                return LaneReply("missing")
            # Another thread or process replaced the file while it was read.

    def delete(self, key: CacheEngineKey, seconds: float) -> LaneReply:
        path = self.connector()._get_file_path(key)
        if not path.exists() or self.connector().remove_sync(key) or not path.exists():
            return LaneReply("done")
        return LaneReply("unavailable", text=f"cannot remove {path}")

    def entries(self, seconds: float) -> Iterator[tuple[ObjectRef, int]]:
        for root in self.connector().base_paths:
            with os.scandir(root) as files:
                for file in files:
                    yield from self._entry(file)

    @staticmethod
    def _entry(file: os.DirEntry[str]) -> Iterator[tuple[ObjectRef, int]]:
        name, _, kind = file.name.rpartition(".")
        if not name.startswith(MODEL_PREFIX) or kind not in ("data", "tmp"):
            return
        with contextlib.suppress(FileNotFoundError):
            status = file.stat(follow_symlinks=False)
            if kind == "tmp":
                if time.time() - status.st_mtime > ABANDONED_SECONDS:
                    os.unlink(file.path)
                return
            ref = parse_name(name)
            if ref is not None:
                yield ref, status.st_size


def _file_version(path: Path) -> tuple[int, int, int] | None:
    """What differs between two files that had the same name; None if there is none. Raises
    ``OSError``."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


BACKENDS: dict[str, type[StorageBackend]] = {
    "redis": RedisBackend,
    "rediss": RedisBackend,
    "lm": ServerBackend,
    "fs": DirectoryBackend,
}


def _with_credentials(target: OpenRequest) -> str:
    """The URL with user and password from the files of the credentials' directory, read again for
    each connection, because a Secret may change."""
    parts = urlsplit(target.url)
    if target.credentials_directory is None:
        return target.url
    directory = Path(target.credentials_directory)
    user, password = _secret(directory / "username"), _secret(directory / "password")
    network = parts.netloc
    if user or password:
        network = f"{quote(user, safe='')}:{quote(password, safe='')}@{network}"
    query, authority = parts.query, directory / "ca.crt"
    if parts.scheme == "rediss" and "ssl_ca_certs" not in query and authority.is_file():
        query = "&".join(filter(None, [query, f"ssl_ca_certs={quote(str(authority))}"]))
    return urlunsplit(parts._replace(netloc=network, query=query))


def _secret(path: Path) -> str:
    try:
        return path.read_text().rstrip("\n")
    except FileNotFoundError:
        return ""


def failure(error: BaseException) -> LaneReply:
    """The reply for an operation that raised. The only place that maps errors of LMCache and of
    the libraries below it."""
    text = f"{type(error).__name__}: {error}"[:500]
    if isinstance(error, OSError) and error.errno in _NO_SPACE:
        return LaneReply("no_space", text=text)
    if type(error).__name__ in ("OutOfMemoryError", "ReadOnlyError"):
        return LaneReply("no_space", text=text)
    return LaneReply("unavailable", text=text)
