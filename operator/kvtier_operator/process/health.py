"""The operator's own HTTP: ``/metrics``, ``/healthz`` and ``/readyz`` on ``settings.monitoring``.

A check returns an empty text where all is well, else a sentence. Liveness says whether the process works (its loop
turns, no part of it is stuck); readiness also whether it has what it needs to do its work. Neither depends on a tier or
on a policy.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from kvtier_operator.settings import Monitoring

logger = logging.getLogger(__name__)

Check = Callable[[], str]


class Health:
    """Named checks, asked on the event loop whenever somebody asks for them; they must not wait."""

    def __init__(self) -> None:
        self._live: dict[str, Check] = {}
        self._ready: dict[str, Check] = {}

    def live(self, name: str, check: Check) -> None:
        """Adds a check whose failure means that the process should be restarted."""
        self._live[name] = check

    def ready(self, name: str, check: Check) -> None:
        """Adds a check whose failure means that the process cannot do its work at the moment."""
        self._ready[name] = check

    def problems(self, *, readiness: bool) -> dict[str, str]:
        """What is wrong, by name."""
        checks = self._live | (self._ready if readiness else {})
        return {name: text for name, check in checks.items() if (text := check())}


@contextlib.asynccontextmanager
async def serve(settings: Monitoring, registry: CollectorRegistry, health: Health) -> AsyncIterator[int]:
    """Serves for as long as the block runs; gives the port. Raises ``OSError`` where it cannot listen."""

    def answer(*, readiness: bool) -> web.Response:
        problems = health.problems(readiness=readiness)
        text = "".join(f"{name}: {problem}\n" for name, problem in sorted(problems.items())) or "ok\n"
        return web.Response(text=text, status=503 if problems else 200)

    async def healthz(_: web.Request) -> web.Response:
        return answer(readiness=False)

    async def readyz(_: web.Request) -> web.Response:
        return answer(readiness=True)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    application = web.Application()
    application.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, settings.host, settings.port)
        await site.start()
        port = int(runner.addresses[0][1])
        logger.info("health and metrics are served", extra={"port": port})
        yield port
    finally:
        await runner.cleanup()
