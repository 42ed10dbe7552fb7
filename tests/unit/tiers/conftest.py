"""Servers of LMCache's back ends, one of each per module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support import lmcache_backends as backends

from kvtier.harness.lmcache_servers import LMCacheProcess, RedisProcess


@pytest.fixture(scope="module")
def child() -> Iterator[backends.ReusedChild]:
    """LMCache's child process, used by one tier after the other."""
    backends.require_lmcache()
    child = backends.ReusedChild()
    yield child
    child.end()


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    """An empty Redis on loopback."""
    backends.require_redis()
    server = RedisProcess(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LMCacheProcess]:
    """LMCache's own server on loopback."""
    backends.require_lmcache()
    server = LMCacheProcess(tmp_path_factory.mktemp("lmcache"))
    server.start()
    yield server
    server.kill()
