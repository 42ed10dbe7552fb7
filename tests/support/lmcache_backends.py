"""The back ends of LMCache that tests use: real servers, a directory, and damage below the tier."""

from __future__ import annotations

import importlib.metadata
import socket
import struct
from pathlib import Path

import pytest

from kvtier.harness.lmcache_servers import LMCacheProcess, RedisProcess
from kvtier.tiers.base import ObjectRef
from kvtier.tiers.lmcache.process import ChildProcess
from kvtier.tiers.lmcache.wire import LMCACHE_VERSION


def require_lmcache() -> None:
    """Skips where LMCache cannot be installed."""
    try:
        found = importlib.metadata.version("lmcache")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("lmcache is not installed")
    assert found == LMCACHE_VERSION


def require_redis() -> None:
    """Skips without a Redis server."""
    if RedisProcess.program() is None:
        pytest.skip("no redis-server or valkey-server: apt-get install redis-server")


class ReusedChild(ChildProcess):
    """A child process that outlives its tier, because starting one takes seconds."""

    def close(self) -> None:
        """Leaves the process to the next tier."""

    def end(self) -> None:
        """Ends the process."""
        super().close()


def object_name(ref: ObjectRef) -> str:
    """The object's name in the back end."""
    return f"kvtier-{ref.namespace}@1@0@1{ref.key.hex()}@uint8"


class RedisClient:
    """The few commands of Redis that tests need."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), 10)
        self._file = self._socket.makefile("rb")

    def __call__(self, *arguments: str | bytes) -> bytes | int | list[bytes | int | None] | None:
        parts = [part.encode() if isinstance(part, str) else part for part in arguments]
        packet = b"*%d\r\n" % len(parts)
        for part in parts:
            packet += b"$%d\r\n%s\r\n" % (len(part), part)
        self._socket.sendall(packet)
        return self._answer()

    def _answer(self) -> bytes | int | list[bytes | int | None] | None:
        line = self._file.readline().rstrip(b"\r\n")
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b":":
            return int(rest)
        if kind == b"*":
            return [self._answer() for _ in range(int(rest))]
        if kind == b"$":
            return None if rest == b"-1" else self._file.read(int(rest) + 2)[:-2]
        raise RuntimeError(line.decode())

    def close(self) -> None:
        self._file.close()
        self._socket.close()


class LMCacheClient:
    """Reads and writes values of an LMCache server as its protocol has them."""

    PUT, GET = 1, 2

    def __init__(self, server: LMCacheProcess) -> None:
        self._socket = socket.create_connection(("127.0.0.1", server.port), 10)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def get(self, name: str) -> bytes | None:
        self._send(self.GET, name, 0)
        code, length, *_ = struct.unpack("9i", self._receive(36))
        return self._receive(length) if code == 200 else None

    def put(self, name: str, content: bytes) -> None:
        self._send(self.PUT, name, len(content))
        self._socket.sendall(content)
        # The next answer says that the write was handled.
        assert self.get(name) == content

    def _send(self, command: int, name: str, length: int) -> None:
        binary_buffer = 5
        packet = struct.pack("9i", command, length, binary_buffer, 0, 0, length, 0, 0, 0)
        self._socket.sendall(packet + name.encode().ljust(150))

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += self._socket.recv(size - len(data))
        return data

    def close(self) -> None:
        self._socket.close()


def flip_redis(port: int, ref: ObjectRef) -> None:
    """Changes one byte of an object's payload in Redis."""
    client = RedisClient(port)
    name = object_name(ref) + "kv_bytes"
    byte = client("GETRANGE", name, "5000", "5000")
    assert isinstance(byte, bytes)
    client("SETRANGE", name, "5000", bytes([byte[0] ^ 1]))
    client.close()


def flip_server(server: LMCacheProcess, ref: ObjectRef) -> None:
    """Changes one byte of an object's payload in an LMCache server."""
    client = LMCacheClient(server)
    found = client.get(object_name(ref))
    assert found is not None
    client.put(object_name(ref), found[:5000] + bytes([found[5000] ^ 1]) + found[5001:])
    client.close()


def object_file(root: Path, ref: ObjectRef) -> Path:
    """The object's file in a directory of LMCache."""
    return root / f"{object_name(ref)}.data"
