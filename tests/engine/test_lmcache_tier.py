"""RAM and an lmcache tier under a real engine: the tokens are those of an engine without KVTier,
after a restart of everything but the server, and while the server hangs or lies."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from tests.support.lmcache_backends import require_lmcache, require_redis

from kvtier.config.models import Daemon
from kvtier.harness.engine_requests import ReferenceEngine
from kvtier.harness.engine_testbed import CHUNK_TOKENS, EngineOptions, EngineTestbed
from kvtier.harness.lmcache_servers import (
    FaultyProxy,
    LMCacheProcess,
    RedisProcess,
    ServerProcess,
)
from kvtier.harness.tiny_model import prompt

CHUNKS = 9


def restart(case: EngineTestbed) -> None:
    """A new engine and a new tierd, as in a new pod: only the server has survived."""
    if case.engine is not None:
        case.engine.kill()
        case.stop_daemon(signal.SIGTERM)
        shutil.rmtree(case.run_directory, ignore_errors=True)
    case.start_daemon()
    case.start()
    case.wait_attached()


@pytest.mark.parametrize("kind", [RedisProcess, LMCacheProcess])
def test_tokens_are_identical_with_ram_and_lmcache(
    kind: type[ServerProcess],
    model: Path,
    payload: Path,
    scratch: Path,
    plain: ReferenceEngine,
) -> None:
    require_lmcache()
    if kind is RedisProcess:
        require_redis()
    home = scratch / f"lmcache-tier-{kind.scheme}"
    server = kind(home / "server")
    server.start()
    proxy = FaultyProxy(server)
    options = EngineOptions(daemon=Daemon.SIDECAR, lmcache_url=proxy.url)
    case = EngineTestbed(home / "case", model, payload, options)
    tokens = prompt(CHUNKS * CHUNK_TOKENS + 5, 700)
    try:
        restart(case)
        assert case.requests().run(tokens) == plain.tokens(tokens)
        case.settle_stores()

        restart(case)
        with case.loads("disk") as loads:
            assert case.requests().run(tokens) == plain.tokens(tokens)
        assert loads.tokens == CHUNKS * CHUNK_TOKENS

        # A server that hangs costs a wait within the deadline; one that lies costs the objects.
        hung, lied = (prompt(CHUNKS * CHUNK_TOKENS, 701 + index) for index in range(2))
        for other in (hung, lied):
            assert case.requests().run(other) == plain.tokens(other)
        case.settle_stores()
        case.retune(2, load_timeout_seconds=2)
        restart(case)
        for mode, other in (("hang", hung), ("lie", lied)):
            proxy.set(mode)
            with case.loads("disk") as loads:
                assert case.requests().run(other) == plain.tokens(other)
            assert loads.tokens == 0
            proxy.set("")
            # The breaker opens on a hang, and closes when a check succeeds.
            case.wait_attached()
        # A busy machine may take longer than that.
        case.retune(3, load_timeout_seconds=120)
        case.wait_for(
            lambda: (case.status() or {}).get("appliedGeneration") == 3, "the value is not applied"
        )
        case.wait_attached()
        with case.loads("disk") as loads:
            assert case.requests().run(tokens) == plain.tokens(tokens)
        assert loads.tokens == CHUNKS * CHUNK_TOKENS
    finally:
        case.close()
        proxy.close()
        server.kill()
