"""The controller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from kvtier_operator.cluster.cache import WatchedCache
from kvtier_operator.cluster.client import ApiClient
from kvtier_operator.cluster.contract import Kind
from kvtier_operator.process.health import Health
from kvtier_operator.reconcile.watches import watches
from kvtier_operator.settings import Settings


async def control(
    settings: Settings,
    client: ApiClient,
    stop: asyncio.Event,
    *,
    registry: CollectorRegistry,
    health: Health,
    on_restart: Callable[[Kind, str], None] = lambda kind, reason: None,
) -> None:
    """Follows policies until ``stop`` is set."""
    cache = WatchedCache(client, watches(settings), on_restart=on_restart)
    health.ready("caches", lambda: "; ".join(f"{kind}: {text}" for kind, text in cache.problems().items()))
    following = asyncio.ensure_future(cache.run())
    await stop.wait()
    following.cancel()
