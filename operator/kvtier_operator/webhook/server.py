"""The webhook process: caches, serving certificate, admission server and monitoring, from start to
graceful shutdown.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from kvtier_operator import runtime
from kvtier_operator.certs import certificates
from kvtier_operator.certs.serve import (
    CertificateDirectory,
    ServingCertificate,
    UnusableCertificateError,
)
from kvtier_operator.injection.existing_config import GROUP_LABEL
from kvtier_operator.injection.inject import inject
from kvtier_operator.kube import trim
from kvtier_operator.kube.lister import ChangeType, Lister, Watch
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
from kvtier_operator.kube.watcher import MakeWatcher, Watcher
from kvtier_operator.settings import CertificateMode, Settings
from kvtier_operator.webhook.listener import AdmissionServer
from kvtier_operator.webhook.lister import WebhookLister
from kvtier_operator.webhook.metrics import WebhookMetrics

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WebhookOptions:
    """What tests replace in a webhook. ``freeze`` is called once the caches are synced."""

    make_watcher: MakeWatcher = Watcher
    on_restart: Callable[[Kind, str], None] = lambda kind, reason: None
    wall_clock: Callable[[], float] = time.time
    freeze: Callable[[], None] = gc.freeze


async def serve(
    settings: Settings,
    client: Any,
    stop: asyncio.Event,
    *,
    registry: CollectorRegistry | None = None,
    options: WebhookOptions = WebhookOptions(),
) -> None:
    """Answers admission requests until ``stop`` is set, then drains.

    Raises ``OSError`` if a port is in use.
    """
    metrics = WebhookMetrics(registry or CollectorRegistry())
    serving = ServingCertificate(metrics.expires.set)
    secret = SecretFollower(settings, serving)

    def changed(kind: Kind, found: Object, change: ChangeType) -> None:
        if kind == SECRETS:
            secret.changed(found, change)
        else:
            lister.changed(kind, found, change)

    cache = Lister(watches(settings), changed)
    watcher = options.make_watcher(client, cache, on_restart=options.on_restart)
    lister = WebhookLister(cache, settings, options.wall_clock)
    server = AdmissionServer(settings, lister, serving, metrics, inject)
    state = runtime.Health()
    state.live("webhook", server.stuck)
    state.live("watches", watcher.stuck)
    state.ready("webhook", lambda: _why_not_ready(server, cache))
    following = [asyncio.ensure_future(watcher.run())]
    if settings.webhook.certificates.mode is CertificateMode.MOUNTED:
        directory = CertificateDirectory(settings.webhook.certificates.directory, serving)
        following.append(asyncio.ensure_future(directory.watch()))
    stopped, settled = (
        asyncio.ensure_future(stop.wait()),
        asyncio.ensure_future(_settle(cache, options.freeze)),
    )
    try:
        async with runtime.serve(settings.monitoring, metrics.registry, state):
            logger.info("serving admission requests", extra={"port": await server.start()})
            await asyncio.wait([stopped, *following], return_when=asyncio.FIRST_COMPLETED)
            await server.stop()
    finally:
        for each in (stopped, settled, *following):
            each.cancel()
        ended = await asyncio.gather(*following, return_exceptions=True)
    # These tasks run until cancelled. If one ends, the process ends with its error and is
    # restarted.
    for result in ended:
        if isinstance(result, Exception):
            raise result


def watches(settings: Settings) -> tuple[Watch, ...]:
    """What the webhook caches. Of pods only those of LeaderWorkerSet groups: admission compares
    siblings.
    """
    namespaces = settings.watch_namespaces
    followed = (
        Watch(POLICIES, namespaces, optional=True),
        Watch(NAMESPACES),
        Watch(LIMIT_RANGES, namespaces),
        Watch(QUOTAS, namespaces),
        Watch(NODES, trim=_only_scheduling),
        Watch(PODS, namespaces, labels=GROUP_LABEL, trim=_only_state),
    )
    if settings.webhook.certificates.mode is CertificateMode.MOUNTED:
        return followed
    name = settings.webhook.certificates.secret_name
    return (*followed, Watch(SECRETS, (settings.namespace,), fields=f"metadata.name={name}"))


class SecretFollower:
    """Loads the serving certificate from the Secret that the controller maintains."""

    def __init__(self, settings: Settings, serving: ServingCertificate) -> None:
        self._name = settings.webhook.certificates.secret_name
        self._serving = serving

    def changed(self, secret: Object, change: ChangeType) -> None:
        """Loads the key pair. After a deletion the current one stays in use until the controller
        recreates the Secret.
        """
        pair = certificates.from_secret(secret)
        if change is ChangeType.DELETED or pair is None:
            return
        try:
            if self._serving.load(pair.certificate, pair.key):
                logger.info("loaded serving certificate from Secret %s", self._name)
        except UnusableCertificateError as error:
            logger.warning(
                "cannot use Secret %s: %s; the controller replaces it", self._name, error
            )


async def _settle(cache: Lister, freeze: Callable[[], None]) -> None:
    """Excludes the initial contents of the caches from garbage collection, which would delay
    admissions in a large cluster.
    """
    await cache.wait_synced()
    gc.collect()
    freeze()


def _why_not_ready(server: AdmissionServer, cache: Lister) -> str:
    why = server.why_not_ready()
    problems = cache.problems() if why else {}
    return (
        "; ".join([why, *(f"{kind}: {problem}" for kind, problem in problems.items())])
        if why
        else ""
    )


def _only_scheduling(node: dict[str, Any]) -> Object:
    """What decides which pods the node can run: labels, taints, devices, and the kubelet."""
    kept = ("name", "uid", "resourceVersion", "labels")
    metadata = {key: node["metadata"].get(key) for key in kept}
    spec, status = node.get("spec") or {}, node.get("status") or {}
    version = (status.get("nodeInfo") or {}).get("kubeletVersion")
    allocatable = status.get("allocatable") or {}
    return trim.metadata(
        {
            "metadata": metadata,
            "spec": {key: spec[key] for key in ("unschedulable", "taints") if key in spec},
            "status": {
                "nodeInfo": {"kubeletVersion": version or ""},
                "allocatable": {key: allocatable[key] for key in allocatable if "/" in key},
            },
        }
    )


def _only_state(pod: dict[str, Any]) -> Object:
    """What is read from a sibling: its metadata and its phase."""
    return trim.metadata(
        {"metadata": pod["metadata"], "status": {"phase": (pod.get("status") or {}).get("phase")}}
    )
