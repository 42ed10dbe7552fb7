"""The admission server: HTTPS endpoints that never keep a pod from starting.

A pod is admitted unchanged whenever a decision times out or fails, and while the caches are not
synced. Each of these is counted and logged. A policy is denied only for its own errors.

Everything runs on the event loop's thread except decisions, which run in a small thread pool. When
a decision exceeds its budget, the request is answered without it and the thread finishes on its
own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from kvtier.listening import listen
from kvtier_operator.certs.serve import ServingCertificate
from kvtier_operator.settings import Settings
from kvtier_operator.webhook import mutate, review, validate
from kvtier_operator.webhook.lister import WebhookLister
from kvtier_operator.webhook.metrics import WebhookMetrics
from kvtier_operator.webhook.review import AdmissionRequest
from kvtier_operator.webhook.validate import AdmissionDenied

MUTATE_PATH = "/mutate"
VALIDATE_PATH = "/validate"
"""The paths in the webhook configurations."""
logger = logging.getLogger(__name__)

BUDGET_SECONDS = 1.0
"""Time for a decision, which takes milliseconds: half of the default webhook timeout. If the API
server's timeout is below two seconds, the budget is half of it."""
READ_SECONDS = 1.0
"""Time to receive a request's body. An API server sends it at once."""
THREADS = 4
"""Decisions are CPU-bound, so more threads would not finish sooner."""
MAX_CONCURRENT_REQUESTS = 256
"""Requests beyond this are answered at once without a decision instead of being queued."""
STUCK_SECONDS = 30.0
"""If every thread has been busy for this long, the liveness check fails and the process is
restarted."""
CLOSE_SECONDS = 3.0
"""How long shutdown waits for requests in flight."""

TIMEOUT = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")
Response = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Outcome:
    result: str
    response: Response
    status: int = 200


class AdmissionServer:
    """Serves ``/mutate`` and ``/validate``, and ``/healthz`` and ``/readyz`` on the same port.

    All methods run on the event loop's thread.
    """

    def __init__(
        self,
        settings: Settings,
        lister: WebhookLister,
        serving: ServingCertificate,
        metrics: WebhookMetrics,
        decide: mutate.Decide,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._lister = lister
        self._serving = serving
        self._metrics = metrics
        self._decide = decide
        self._clock = clock
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="admission")
        self._running: dict[Future[Any], float] = {}
        self._open_requests = 0
        self._draining = False
        self._runner: web.AppRunner | None = None
        metrics.observe(self.ready, lister.counts)

    def ready(self) -> bool:
        """Whether this replica should receive requests."""
        return not self.why_not_ready()

    def why_not_ready(self) -> str:
        """What is missing, for ``/readyz``; empty if the replica is ready."""
        if self._draining:
            return "shutting down"
        if not self._serving.loaded:
            return "no serving certificate"
        return "" if self._lister.synced() else "caches are not synced"

    def stuck(self) -> str:
        """Why this process can no longer decide, for ``/healthz``; empty if it can."""
        now = self._clock()
        hung = sum(now - started > STUCK_SECONDS for started in self._running.values())
        return f"{hung} decisions have hung for {STUCK_SECONDS:g} s" if hung >= THREADS else ""

    async def start(self) -> int:
        """Starts to listen and returns the port. Raises ``OSError``."""
        application = web.Application(client_max_size=review.MAX_BODY_BYTES)
        application.router.add_post(MUTATE_PATH, self._mutate)
        application.router.add_post(VALIDATE_PATH, self._validate)
        application.router.add_get("/healthz", self._healthz)
        application.router.add_get("/readyz", self._readyz)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=CLOSE_SECONDS)
        await self._runner.setup()
        webhook = self._settings.webhook
        listener = listen(webhook.host, webhook.port)
        await web.SockSite(self._runner, listener, ssl_context=self._serving.context).start()
        port: int = self._runner.addresses[0][1]
        return port

    async def stop(self) -> None:
        """Shuts down gracefully: not ready at once, still answering during ``drainSeconds``, then
        closed.
        """
        self._draining = True
        if self._runner is not None:
            await asyncio.sleep(self._settings.webhook.drain_seconds)
            await self._runner.cleanup()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _mutate(self, request: web.Request) -> web.Response:
        return await self._handle(request, self._review_pod)

    async def _validate(self, request: web.Request) -> web.Response:
        return await self._handle(request, self._review_policy)

    async def _healthz(self, _: web.Request) -> web.Response:
        problem = self.stuck()
        return web.Response(text=f"{problem or 'ok'}\n", status=503 if problem else 200)

    async def _readyz(self, _: web.Request) -> web.Response:
        problem = self.why_not_ready()
        return web.Response(text=f"{problem or 'ok'}\n", status=503 if problem else 200)

    async def _handle(
        self, request: web.Request, decide: Callable[[AdmissionRequest], Awaitable[_Outcome]]
    ) -> web.Response:
        started = self._clock()
        self._open_requests += 1
        try:
            outcome = await self._review(request, decide)
        finally:
            self._open_requests -= 1
        self._metrics.answers.labels(request.path, outcome.result).inc()
        self._metrics.seconds.labels(request.path).observe(self._clock() - started)
        text = json.dumps(outcome.response)
        response = web.Response(text=text, content_type="application/json", status=outcome.status)
        if self._draining:
            response.force_close()
        return response

    async def _review(
        self, request: web.Request, decide: Callable[[AdmissionRequest], Awaitable[_Outcome]]
    ) -> _Outcome:
        """Decides within the budget; allows the request unchanged if that fails."""
        try:
            async with asyncio.timeout(READ_SECONDS):
                admission = review.parse(await request.read())
        except web.HTTPRequestEntityTooLarge:
            return _malformed(f"the body has more than {review.MAX_BODY_BYTES} bytes")
        except TimeoutError:
            return _malformed(f"no body received within {READ_SECONDS:g} s")
        except (review.InvalidReviewError, web.RequestPayloadError, ConnectionError) as error:
            logger.warning("malformed request to %s: %s", request.path, error)
            return _malformed(str(error))
        unchanged = review.allowed(admission.uid)
        if self._open_requests > MAX_CONCURRENT_REQUESTS:
            return _Outcome("Abandoned", unchanged)
        deciding = asyncio.ensure_future(decide(admission))
        timeout = parse_timeout(request.query.get("timeout", ""))
        budget = min(BUDGET_SECONDS, timeout / 2)
        await asyncio.wait((deciding,), timeout=budget)
        subject = f"{admission.kind} {admission.namespace}/{_name(admission)}"
        if not deciding.done():
            deciding.cancel()
            logger.error("abandoned the decision about %s after %g s", subject, budget)
            return _Outcome("Abandoned", unchanged)
        failure = deciding.exception()
        if failure is not None:
            logger.error("the decision about %s failed", subject, exc_info=failure)
            return _Outcome("Failed", unchanged)
        return deciding.result()

    async def _review_pod(self, admission: AdmissionRequest) -> _Outcome:
        if not self._lister.synced():
            return _Outcome("NotReady", review.allowed(admission.uid))
        request = mutate.mutation_request(admission, self._lister, self._settings)
        if request is None:
            return _Outcome("Unchanged", review.allowed(admission.uid))
        result: mutate.MutationResult = await self._in_thread(
            mutate.mutate, request, self._settings, self._decide
        )
        if result.result == "Skipped":
            self._metrics.skipped.labels(result.reason).inc()
        logger.info(
            "pod %s: %s%s",
            _name(admission),
            result.result,
            f": {result.message}" if result.message else "",
            extra={
                "namespace": admission.namespace,
                "policy": result.policy,
                "reason": result.reason,
                "dry_run": admission.dry_run,
            },
        )
        return _Outcome(result.result, review.allowed(admission.uid, patch=result.patch))

    async def _review_policy(self, admission: AdmissionRequest) -> _Outcome:
        policies = self._lister.policies(admission.namespace)
        labels = self._lister.namespace_labels(admission.namespace)
        result = await self._in_thread(
            validate.validate, admission, policies, self._settings, labels
        )
        if isinstance(result, AdmissionDenied):
            causes = [(error.field, error.message) for error in result.errors]
            response = review.denied(admission.uid, causes, warnings=result.warnings)
            return _Outcome("Denied", response)
        return _Outcome("Allowed", review.allowed(admission.uid, warnings=result.warnings))

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a function on another thread, so that the event loop can stop waiting for it."""
        loop = asyncio.get_running_loop()
        future = self._threads.submit(function, *arguments)
        self._running[future] = self._clock()
        future.add_done_callback(lambda done: _call_on_loop(loop, self._running.pop, done, None))
        return await asyncio.wrap_future(future)


def parse_timeout(text: str) -> float:
    """The API server's timeout in seconds, from ``?timeout=2s``; infinite if it is absent or
    unreadable.
    """
    match = TIMEOUT.fullmatch(text)
    return float(match[1]) * (0.001 if match[2] == "ms" else 1.0) if match else math.inf


def _malformed(message: str) -> _Outcome:
    return _Outcome("Malformed", {"error": message}, 400)


def _name(admission: AdmissionRequest) -> str:
    """The object's name. One with generateName has none yet."""
    return admission.name or "(generated name)"


def _call_on_loop(
    loop: asyncio.AbstractEventLoop, call: Callable[..., Any], *arguments: Any
) -> None:
    """Calls from a thread that may outlive the event loop."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call, *arguments)
