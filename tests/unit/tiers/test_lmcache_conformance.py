"""The conformance suite on LMCache's back ends: a directory, Redis, and its own server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import lmcache_backends as backends

from kvtier.config.models import LMCacheTierDocument
from kvtier.harness.lmcache_servers import LMCacheProcess, RedisProcess
from kvtier.testing.conformance import TierSuite
from kvtier.testing.damage import flip
from kvtier.tiers.base import ObjectRef, Tier, TierLimits
from kvtier.tiers.lmcache import LMCacheTier

pytestmark = pytest.mark.slow


class LMCacheSuite(TierSuite):
    """``url`` and ``child`` come from fixtures, before ``make`` is called."""

    url = ""
    child: backends.ReusedChild

    def make(self, tmp_path: Path) -> Tier:
        document = LMCacheTierDocument(name="remote", url=self.url)
        return LMCacheTier(document, TierLimits(1 << 30), self.child)


class TestDirectory(LMCacheSuite):
    @pytest.fixture(autouse=True)
    def _directory(self, child: backends.ReusedChild, tmp_path: Path) -> None:
        self.child = child
        self.url = f"fs://localhost:0{tmp_path}/objects"

    def damage(self, tier: Tier, ref: ObjectRef, tmp_path: Path) -> None:
        flip(backends.object_file(tmp_path / "objects", ref), 5_000, 3)


class TestRedis(LMCacheSuite):
    @pytest.fixture(autouse=True)
    def _server(self, child: backends.ReusedChild, redis: RedisProcess) -> None:
        self.child, self.port = child, redis.port
        self.url = redis.url
        client = backends.RedisClient(redis.port)
        client("FLUSHALL")
        client.close()

    def damage(self, tier: Tier, ref: ObjectRef, tmp_path: Path) -> None:
        backends.flip_redis(self.port, ref)


class TestLMCacheServer(LMCacheSuite):
    @pytest.fixture(autouse=True)
    def _server(
        self, child: backends.ReusedChild, server: LMCacheProcess, tmp_path: Path
    ) -> Iterator[None]:
        self.child, self.server, self.url = child, server, server.url
        yield
        # The server cannot be emptied: the lists of objects are, so that none is found.
        client = backends.LMCacheClient(server)
        for bucket in range(32):
            client.put(f"kvtier-catalog@1@0@1{bucket:02x}@uint8", b"\0")
        client.close()

    def make(self, tmp_path: Path) -> Tier:
        tier = super().make(tmp_path)
        assert isinstance(tier, LMCacheTier)
        assert "neither deletes nor lists" in tier.limitations
        return tier

    def damage(self, tier: Tier, ref: ObjectRef, tmp_path: Path) -> None:
        backends.flip_server(self.server, ref)
