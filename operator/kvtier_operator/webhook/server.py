"""The webhook's process: caches, certificate, admission server and monitoring, from start to a graceful stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry

from kvtier_operator import runtime
from kvtier_operator.certs import certificates
from kvtier_operator.certs.serve import CertificateDirectory, ServingCertificate, UnusableError
from kvtier_operator.injection.existing_config import GROUP_LABEL
from kvtier_operator.injection.inject import inject
from kvtier_operator.kube import trim
from kvtier_operator.kube.cache import Change, Watch, WatchedCache
from kvtier_operator.kube.client import ApiClient
from kvtier_operator.kube.resources import (
    LIMIT_RANGES,
    NAMESPACES,
    NODES,
    PODS,
    POLICIES,
    QUOTAS,
    SECRETS,
    Kind,
    Object,
)
from kvtier_operator.settings import CertificateMode, Settings
from kvtier_operator.webhook.listener import AdmissionServer
from kvtier_operator.webhook.lister import WebhookLister
from kvtier_operator.webhook.metrics import WebhookMetrics

logger = logging.getLogger(__name__)


async def serve(
    settings: Settings,
    client: ApiClient,
    stop: asyncio.Event,
    *,
    registry: CollectorRegistry | None = None,
    on_restart: Callable[[Kind, str], None] = lambda kind, reason: None,
    wall_clock: Callable[[], float] = time.time,
    freeze: Callable[[], None] = gc.freeze,
) -> None:
    """Answers admission requests until ``stop`` is set, and then until no API server asks this replica any more.

    Raises ``OSError`` where a port cannot be had.
    """
    metrics = WebhookMetrics(registry or CollectorRegistry())
    serving = ServingCertificate(metrics.expires.set)
    secret = SecretFollower(settings, serving)

    def changed(kind: Kind, found: Object, change: Change) -> None:
        if kind == SECRETS:
            secret.changed(found, change)
        else:
            knowledge.changed(kind, found, change)

    cache = WatchedCache(client, watches(settings), changed, on_restart=on_restart)
    knowledge = WebhookLister(cache, settings, wall_clock)
    server = AdmissionServer(settings, knowledge, serving, metrics, inject)
    state = runtime.Health()
    state.live("webhook", server.stuck)
    state.ready("webhook", lambda: _why_not_ready(server, cache))
    following = [asyncio.ensure_future(cache.run())]
    if settings.webhook.certificates.mode is CertificateMode.MOUNTED:
        directory = CertificateDirectory(settings.webhook.certificates.directory, serving)
        following.append(asyncio.ensure_future(directory.follow()))
    stopped, settled = (
        asyncio.ensure_future(stop.wait()),
        asyncio.ensure_future(_settle(cache, freeze)),
    )
    try:
        async with runtime.serve(settings.monitoring, metrics.registry, state):
            logger.info("admission requests are answered", extra={"port": await server.start()})
            await asyncio.wait([stopped, *following], return_when=asyncio.FIRST_COMPLETED)
            await server.stop()
    finally:
        for each in (stopped, settled, *following):
            each.cancel()
        ended = await asyncio.gather(*following, return_exceptions=True)
    # What follows never ends by itself: if it did, the process ends with it and is started again.
    for result in ended:
        if isinstance(result, Exception):
            raise result


def watches(settings: Settings) -> tuple[Watch, ...]:
    """What the webhook holds copies of. Pods only where admission needs their like: groups of LeaderWorkerSets."""
    namespaces = settings.watch_namespaces
    followed = (
        Watch(POLICIES, namespaces, optional=True),
        Watch(NAMESPACES),
        Watch(LIMIT_RANGES, namespaces),
        Watch(QUOTAS, namespaces),
        Watch(NODES, trim=_only_version),
        Watch(PODS, namespaces, labels=GROUP_LABEL, trim=_only_state),
    )
    if settings.webhook.certificates.mode is CertificateMode.MOUNTED:
        return followed
    name = settings.webhook.certificates.secret_name
    return (*followed, Watch(SECRETS, (settings.namespace,), fields=f"metadata.name={name}"))


class SecretFollower:
    """Takes the serving certificate from the Secret that the controller keeps."""

    def __init__(self, settings: Settings, serving: ServingCertificate) -> None:
        self._name = settings.webhook.certificates.secret_name
        self._serving = serving

    def changed(self, secret: Object, change: Change) -> None:
        """One that was deleted is made again; until then what serves goes on serving."""
        material = certificates.from_secret(secret)
        if change is Change.DELETED or material is None:
            return
        try:
            if self._serving.take(material.certificate, material.key):
                logger.info("serving certificate taken from Secret %s", self._name)
        except UnusableError as error:
            logger.warning("Secret %s: %s; it is replaced by the controller", self._name, error)


async def _settle(cache: WatchedCache, freeze: Callable[[], None]) -> None:
    """What a large cluster fills the caches with stays: the garbage collector need not look through it again and again,
    and hold up an admission each time.
    """
    await cache.wait_synced()
    gc.collect()
    freeze()


def _why_not_ready(server: AdmissionServer, cache: WatchedCache) -> str:
    why = server.why_not_ready()
    problems = cache.problems() if why else {}
    return (
        "; ".join([why, *(f"{kind}: {problem}" for kind, problem in problems.items())])
        if why
        else ""
    )


def _only_version(node: dict[str, Any]) -> Object:
    metadata = {key: node["metadata"].get(key) for key in ("name", "uid", "resourceVersion")}
    version = ((node.get("status") or {}).get("nodeInfo") or {}).get("kubeletVersion")
    return trim.metadata(
        {"metadata": metadata, "status": {"nodeInfo": {"kubeletVersion": version or ""}}}
    )


def _only_state(pod: dict[str, Any]) -> Object:
    """What a sibling is asked for: what it was given, and whether it lives."""
    return trim.metadata(
        {"metadata": pod["metadata"], "status": {"phase": (pod.get("status") or {}).get("phase")}}
    )
