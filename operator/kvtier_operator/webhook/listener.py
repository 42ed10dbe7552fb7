"""The admission server: HTTPS, two questions, and never a reason for a pod not to start.

Whatever goes wrong here, a pod is admitted as it came: what cannot be decided in time, what fails, what is not known
yet. Each of these is counted and logged. A policy is refused only for what is wrong with it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from kvtier_operator.certs.serve import ServingCertificate
from kvtier_operator.settings import Settings
from kvtier_operator.webhook import mutate, review, validate
from kvtier_operator.webhook.lister import WebhookLister
from kvtier_operator.webhook.metrics import WebhookMetrics
from kvtier_operator.webhook.review import Review

MUTATE_PATH = "/mutate"
VALIDATE_PATH = "/validate"
"""The paths in the webhook configurations."""
logger = logging.getLogger(__name__)

BUDGET_SECONDS = 1.0
"""A decision takes milliseconds; after a second something is wrong, and half of the API server's patience is left. Where
the API server says that it waits less than two seconds, half of that."""
READ_SECONDS = 1.0
"""Time for a request's body, from a peer that is the API server or nobody."""
THREADS = 4
"""Decisions are computing, not waiting: more threads would only take turns."""
MAX_OPEN = 256
"""Questions at a time. What comes beyond is admitted unchanged at once, rather than after waiting for the others."""
STUCK_SECONDS = 30.0
"""When every thread has computed for this long, none will ever answer: the process has to be started again."""
CLOSE_SECONDS = 3.0
"""How long closing waits for requests that are being answered."""

TIMEOUT = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")
Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Outcome:
    result: str
    answer: Answer


class AdmissionServer:
    """Answers questions from what ``knowledge`` holds. Used on the event loop's thread."""

    def __init__(
        self,
        settings: Settings,
        knowledge: WebhookLister,
        serving: ServingCertificate,
        metrics: WebhookMetrics,
        decide: mutate.Attach,
        *,
        clock: Callable[[], float] = time.monotonic,
        budget_seconds: float = BUDGET_SECONDS,
    ) -> None:
        self._settings = settings
        self._knowledge = knowledge
        self._serving = serving
        self._metrics = metrics
        self._decide = decide
        self._clock = clock
        self._budget_seconds = budget_seconds
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="admission")
        self._computing: dict[Future[Any], float] = {}
        self._open = 0
        self._draining = False
        self._runner: web.AppRunner | None = None
        metrics.follow(self.ready, knowledge.counts)

    def ready(self) -> bool:
        """Whether this replica should be asked: it has a certificate, it knows the cluster, it is not about to go."""
        return not self.why_not_ready()

    def why_not_ready(self) -> str:
        """What is missing, in a few words; empty if nothing is."""
        if self._draining:
            return "stopping"
        if not self._serving.loaded:
            return "no certificate yet"
        return "" if self._knowledge.synced() else "caches are not synced yet"

    def stuck(self) -> str:
        """Why this process cannot decide any more, however long one waits; empty if it can."""
        long = [
            began for began in self._computing.values() if self._clock() - began > STUCK_SECONDS
        ]
        return (
            f"{len(long)} decisions have hung for {STUCK_SECONDS:g} s"
            if len(long) >= THREADS
            else ""
        )

    async def start(self) -> int:
        """Listens; the port."""
        application = web.Application(client_max_size=review.MAX_BODY_BYTES)
        application.router.add_post(MUTATE_PATH, self._mutate)
        application.router.add_post(VALIDATE_PATH, self._validate)
        application.router.add_get("/healthz", self._healthz)
        application.router.add_get("/readyz", self._readyz)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=CLOSE_SECONDS)
        await self._runner.setup()
        webhook = self._settings.webhook
        await web.TCPSite(
            self._runner, webhook.host, webhook.port, ssl_context=self._serving.context
        ).start()
        port: int = self._runner.addresses[0][1]
        return port

    async def stop(self) -> None:
        """Not ready from now on; goes on answering until other replicas are asked instead, then closes."""
        self._draining = True
        if self._runner is not None:
            await asyncio.sleep(self._settings.webhook.drain_seconds)
            await self._runner.cleanup()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _mutate(self, request: web.Request) -> web.Response:
        return await self._asked(request, self._about_a_pod)

    async def _validate(self, request: web.Request) -> web.Response:
        return await self._asked(request, self._about_a_policy)

    async def _healthz(self, _: web.Request) -> web.Response:
        why = self.stuck()
        return web.Response(text=f"{why or 'ok'}\n", status=503 if why else 200)

    async def _readyz(self, _: web.Request) -> web.Response:
        why = self.why_not_ready()
        return web.Response(text=f"{why or 'ok'}\n", status=503 if why else 200)

    async def _asked(self, request: web.Request, about: Callable[[Review], Any]) -> web.Response:
        started = self._clock()
        self._open += 1
        try:
            result, status, answer = await self._answered(request, about)
        finally:
            self._open -= 1
        self._metrics.answers.labels(request.path, result).inc()
        self._metrics.seconds.labels(request.path).observe(self._clock() - started)
        response = web.Response(
            text=json.dumps(answer), content_type="application/json", status=status
        )
        if self._draining:
            response.force_close()
        return response

    async def _answered(
        self, request: web.Request, about: Callable[[Review], Any]
    ) -> tuple[str, int, Answer]:
        try:
            async with asyncio.timeout(READ_SECONDS):
                asked = review.parse(await request.read())
        except web.HTTPRequestEntityTooLarge:
            return "Malformed", 400, {"error": f"more than {review.MAX_BODY_BYTES} bytes"}
        except TimeoutError:
            return "Malformed", 400, {"error": f"no body within {READ_SECONDS:g} s"}
        except (review.MalformedError, web.RequestPayloadError, ConnectionError) as error:
            logger.warning("a request to %s is malformed: %s", request.path, error)
            return "Malformed", 400, {"error": str(error)}
        unchanged = review.allowed(asked.uid)
        if self._open > MAX_OPEN:
            return "Abandoned", 200, unchanged
        deciding = asyncio.ensure_future(about(asked))
        budget = min(self._budget_seconds, patience(request.query.get("timeout", "")) / 2)
        await asyncio.wait((deciding,), timeout=budget)
        if not deciding.done():
            deciding.cancel()
            logger.error(
                "a decision about %s %s in %s took longer than %g s and was abandoned",
                asked.kind, asked.name or "(no name yet)", asked.namespace, budget,
            )  # fmt: skip
            return "Abandoned", 200, unchanged
        failure = deciding.exception()
        if failure is not None:
            logger.error(
                "a decision about %s %s in %s failed", asked.kind, asked.name or "(no name yet)", asked.namespace,
                exc_info=failure,
            )  # fmt: skip
            return "Failed", 200, unchanged
        outcome: _Outcome = deciding.result()
        return outcome.result, 200, outcome.answer

    async def _about_a_pod(self, asked: Review) -> _Outcome:
        if not self._knowledge.synced():
            return _Outcome("NotReady", review.allowed(asked.uid))
        question = mutate.question(asked, self._knowledge, self._settings)
        if question is None:
            return _Outcome("Unchanged", review.allowed(asked.uid))
        verdict = await self._computed(mutate.answer, question, self._settings, self._decide)
        if verdict.result == "Skipped":
            self._metrics.skipped.labels(verdict.reason).inc()
        logger.info(
            "pod %s: %s%s", asked.name or "(no name yet)", verdict.result, f": {verdict.message}" if verdict.message else "",
            extra={"namespace": asked.namespace, "policy": verdict.policy, "reason": verdict.reason, "dry_run": asked.dry_run},
        )  # fmt: skip
        return _Outcome(verdict.result, review.allowed(asked.uid, patch=verdict.patch))

    async def _about_a_policy(self, asked: Review) -> _Outcome:
        others, labels = (
            self._knowledge.policies(asked.namespace),
            self._knowledge.namespace_labels(asked.namespace),
        )
        found = await self._computed(validate.examine, asked, others, self._settings, labels)
        if found.refusals:
            causes = [(refusal.field, refusal.message) for refusal in found.refusals]
            return _Outcome("Refused", review.refused(asked.uid, causes, warnings=found.warnings))
        return _Outcome("Accepted", review.allowed(asked.uid, warnings=found.warnings))

    async def _computed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """On another thread, so that the loop can give up waiting; the thread ends by itself."""
        loop = asyncio.get_running_loop()
        computing = self._threads.submit(function, *arguments)
        self._computing[computing] = self._clock()
        computing.add_done_callback(lambda done: _on_loop(loop, self._computing.pop, done, None))
        return await asyncio.wrap_future(computing)


def patience(timeout: str) -> float:
    """Seconds that the API server waits, as it says in ``?timeout=2s``; for ever where it says nothing that is read
    here.
    """
    said = TIMEOUT.fullmatch(timeout)
    return float(said[1]) * (0.001 if said[2] == "ms" else 1.0) if said else math.inf


def _on_loop(loop: asyncio.AbstractEventLoop, call: Callable[..., Any], *arguments: Any) -> None:
    """From a thread that may end after the loop did."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call, *arguments)
