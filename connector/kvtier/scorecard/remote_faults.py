"""Faults of the server behind an lmcache tier, and of the process that runs LMCache.

The servers are real, on loopback: Redis and LMCache's own. A proxy stands before each, so that a
fault may be one of the network, and a server may come back at another port.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvtier.harness.lmcache_servers import (
    FaultyProxy,
    LMCacheProcess,
    RedisProcess,
    ServerProcess,
)
from kvtier.scorecard.testbed import FaultTestbed, Measurements

MEANS = "server"
SERVERS: dict[str, type[RedisProcess | LMCacheProcess]] = {
    "redis": RedisProcess,
    "lmcache": LMCacheProcess,
}
SLOW_BYTES_PER_SECOND = 100_000
CHILD_SECONDS = 90.0
"""tierd starts an ended process again after 60 s at most."""


class ServerUnavailableError(Exception):
    """The server cannot be started here. The message says why."""


@dataclass(frozen=True, slots=True)
class RemoteContext:
    """What a fault can use."""

    testbed: FaultTestbed
    server: ServerProcess
    proxy: FaultyProxy


RemoteFault = Callable[[RemoteContext, float, Measurements], None]


def installed() -> bool:
    """Whether LMCache is installed. Its rows are no part of the scorecard otherwise."""
    try:
        importlib.metadata.version("lmcache")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def names(server: str = "") -> list[str]:
    """The faults of one server, or of all."""
    return [name for name in REMOTE_FAULTS if name.startswith(server)] if installed() else []


@contextmanager
def testbed(name: str, home: Path) -> Iterator[RemoteContext]:
    """A server, a proxy before it and a tierd with an lmcache tier. Raises
    ``ServerUnavailableError``."""
    if name == "redis" and RedisProcess.program() is None:
        raise ServerUnavailableError("neither redis-server nor valkey-server is installed")
    with ExitStack() as stack:
        server = SERVERS[name](home / "server")
        try:
            server.start()
        except (OSError, TimeoutError) as error:
            raise ServerUnavailableError(str(error)) from error
        stack.callback(server.kill)
        proxy = FaultyProxy(server)
        stack.callback(proxy.close)
        empty = home / "files"
        empty.mkdir(parents=True)
        found = FaultTestbed(home / "testbed", empty, empty, lmcache_url=proxy.url)
        stack.callback(found.close)
        found.stored_bytes = lambda: _used_bytes(found)
        yield RemoteContext(found, server, proxy)


def _used_bytes(testbed: FaultTestbed) -> int:
    tiers = testbed.tierd.status().get("tiers", [])
    return max((int(tier["usedBytes"]) for tier in tiers if tier["name"] == "disk"), default=0)


def killed(context: RemoteContext, seconds: float, measurements: Measurements) -> None:
    """The server is killed, is absent for a while, and comes back without its objects."""
    context.server.kill()
    context.testbed.stream(seconds, measurements)
    context.server.start()


def suspended(context: RemoteContext, seconds: float, measurements: Measurements) -> None:
    """The server keeps its connections and answers nothing."""
    context.server.suspend()
    try:
        context.testbed.stream(seconds, measurements)
    finally:
        context.server.resume()


def by_proxy(mode: str) -> RemoteFault:
    """A fault of the network, or of what the server answers."""

    def run(context: RemoteContext, seconds: float, measurements: Measurements) -> None:
        context.proxy.bytes_per_second = SLOW_BYTES_PER_SECOND
        context.proxy.set(mode)
        try:
            context.testbed.stream(seconds, measurements)
        finally:
            context.proxy.set("")

    return run


def _child(context: RemoteContext) -> int:
    """The process that runs LMCache. After a fault before this one tierd may just be starting it
    again. Raises ``LookupError``."""
    deadline = time.monotonic() + CHILD_SECONDS
    while True:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(context.testbed.pid).children():
                if "kvtier.tiers.lmcache.child" in process.cmdline():
                    return process.pid
        if time.monotonic() > deadline:
            raise LookupError("tierd has no process that runs LMCache")
        time.sleep(0.1)


def child_signal(number: int) -> RemoteFault:
    """A fault of the process that runs LMCache. tierd itself must end one that is stopped."""

    def run(context: RemoteContext, seconds: float, measurements: Measurements) -> None:
        os.kill(_child(context), number)
        context.testbed.stream(seconds, measurements)

    return run


REMOTE_FAULTS: dict[str, RemoteFault] = {
    f"{server}-{name}": fault
    for server in SERVERS
    for name, fault in (
        ("slow", by_proxy("slow")),
        ("lies", by_proxy("lie")),
        ("garbles", by_proxy("garble")),
        ("cut-off", by_proxy("cut")),
        ("SIGSTOP", suspended),
        ("SIGKILL", killed),
        *(
            (("child-SIGKILL", child_signal(signal.SIGKILL)),)
            if server == "redis"
            else (("child-SIGSTOP", child_signal(signal.SIGSTOP)),)
        ),
    )
}
