"""The controller's rotation of the webhook's certificate: the Secret, and ``caBundle`` in both
webhook configurations.

The controller rotates, so that the webhook needs no write permission.
``kvtier_operator.certs.certificates`` decides each step; this module reads the cluster and writes
the result. All state is in the Secret and the configurations, so the controller may be killed at
any point. Two controllers at once do no harm: the Secret is created or updated only at the resource
version that was read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvtier_operator.certs import certificates
from kvtier_operator.certs.certificates import KeyPair
from kvtier_operator.kube.resources import (
    MUTATING_WEBHOOKS,
    SECRETS,
    VALIDATING_WEBHOOKS,
    ApiError,
    Client,
    Kind,
    Object,
)
from kvtier_operator.render.volumes import MANAGED_BY
from kvtier_operator.settings import CertificateMode, Settings

logger = logging.getLogger(__name__)
RESYNC_SECONDS = 20.0
"""How long a caBundle that was removed stays missing. Each resync takes three small reads."""
RETRY_SECONDS = (1.0, 30.0)
"""Delay after an error: the first, and the maximum up to which it doubles."""
MAX_STEPS = 4
"""Steps of one reconcile. A rotation has fewer; more means that another writer changes the Secret
too."""


class CertificateMetrics(Protocol):
    """Receives the outcome of each reconcile."""

    def certificate_ends(self, seconds: float) -> None:
        """The serving certificate expires then (Unix time)."""

    def certificate_failed(self) -> None:
        """A reconcile failed."""


@dataclass(frozen=True, slots=True)
class _NoMetrics:
    def certificate_ends(self, seconds: float) -> None:
        pass

    def certificate_failed(self) -> None:
        pass


async def rotate_certificates(
    client: Client,
    settings: Settings,
    stop: asyncio.Event,
    *,
    changed: asyncio.Event | None = None,
    wall_clock: Callable[[], float] = time.time,
    metrics: CertificateMetrics | None = None,
) -> None:
    """Issues, renews and repairs the certificate until ``stop`` is set. Returns at once if
    certificates are mounted.

    ``changed`` triggers a reconcile when the Secret or a configuration changes. Without it, a
    change is found within ``RESYNC_SECONDS``.
    """
    if settings.webhook.certificates.mode is not CertificateMode.SELF_MANAGED:
        return
    rotation = CertificateRotation(client, settings, wall_clock)
    outcome = metrics or _NoMetrics()
    back_off = RETRY_SECONDS[0]
    while not stop.is_set():
        try:
            wait = min(RESYNC_SECONDS, await rotation.reconcile())
            back_off = RETRY_SECONDS[0]
            outcome.certificate_ends(rotation.expiry)
        except ApiError as error:
            logger.warning("cannot reconcile the webhook certificate: %s", error)
            outcome.certificate_failed()
            wait, back_off = back_off, min(RETRY_SECONDS[1], back_off * 2)
        await _wait_for_event(stop, changed, wait)


class CertificateRotation:
    """Reconciles the Secret and the webhook configurations.

    ``expiry`` is that of the serving certificate (Unix time) after the first complete reconcile.
    """

    def __init__(self, client: Client, settings: Settings, wall_clock: Callable[[], float]) -> None:
        self._client = client
        self._settings = settings
        self._options = settings.webhook.certificates
        self._configurations = (
            (MUTATING_WEBHOOKS, self._options.mutating_configuration),
            (VALIDATING_WEBHOOKS, self._options.validating_configuration),
        )
        self._names = certificates.server_names(settings)
        self._wall_clock = wall_clock
        self._distributed_since: tuple[str, float] = ("", 0.0)
        self.expiry = 0.0

    async def reconcile(self) -> float:
        """Performs all steps that are due. Returns the seconds until the next one. Raises
        ``ApiError``.
        """
        for _ in range(MAX_STEPS):
            secret = await self._read_secret()
            pair = certificates.from_secret(secret)
            if pair is None:
                # Replicas serve the previous certificate until they see the new Secret, so its CA
                # stays trusted.
                pair = KeyPair(b"", b"", await self._trusted_bundle())
            # The current bundle goes first, so that no step runs ahead of what API servers trust.
            distributed = bool(pair.certificate) and await self._distribute(pair)
            step = certificates.next_step(
                pair,
                self._names,
                self._wall_clock(),
                self._options.lifetime_seconds,
                self._options.renew_before_seconds,
                distributed,
            )
            if not step.change:
                self.expiry = certificates.expiry(step.pair.certificate) or 0.0
                return step.wait_seconds
            if await self._write_secret(secret, step.pair):
                logger.info("%s", step.change)
        return RETRY_SECONDS[0]

    async def _read_secret(self) -> Object | None:
        return await self._get(SECRETS, self._settings.namespace, self._options.secret_name)

    async def _get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        try:
            return await self._client.get(kind, namespace, name)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def _write_secret(self, secret: Object | None, pair: KeyPair) -> bool:
        """Creates or updates the Secret. Returns False if it changed since it was read."""
        namespace, name = self._settings.namespace, self._options.secret_name
        data = certificates.secret_data(pair)
        try:
            if secret is None:
                await self._client.create(SECRETS, namespace, _secret(namespace, name, data))
            else:
                version = secret["metadata"]["resourceVersion"]
                metadata = {"resourceVersion": version, "labels": dict(MANAGED_BY)}
                body = {"metadata": metadata, "data": data}
                await self._client.patch(SECRETS, namespace, name, body)
        except ApiError as error:
            if error.status in (404, 409):
                return False
            raise
        return True

    async def _trusted_bundle(self) -> bytes:
        """The CAs in the webhook configurations, which API servers trust now."""
        bundles: list[bytes] = []
        for kind, name in self._configurations:
            configuration = await self._get(kind, None, name)
            for hook in (configuration or {}).get("webhooks") or ():
                bundle = certificates.decode_bundle(_ca_bundle(hook))
                if bundle not in bundles:
                    bundles.append(bundle)
        return b"".join(bundles)

    async def _distribute(self, pair: KeyPair) -> bool:
        """Writes the bundle to the configurations. Returns whether all have had it for the settle
        time.
        """
        if not pair.bundle or not certificates.is_loadable(pair.bundle):
            # API servers could not use it; the bundle that they have may still be valid.
            return False
        bundle = certificates.encode_bundle(pair.bundle)
        unchanged = True
        for kind, name in self._configurations:
            unchanged = await self._write_bundle(kind, name, bundle) and unchanged
        now = self._wall_clock()
        if not unchanged or self._distributed_since[0] != bundle:
            self._distributed_since = (bundle, now)
        settle = certificates.settle_seconds(self._options.renew_before_seconds)
        return now - self._distributed_since[1] >= settle

    async def _write_bundle(self, kind: Kind, name: str, bundle: str) -> bool:
        """Returns whether the configuration already had the bundle."""
        configuration = await self._get(kind, None, name)
        if configuration is None:
            # Without a configuration no API server calls the webhook.
            return True
        hooks = configuration.get("webhooks") or ()
        if all(_ca_bundle(hook) == bundle for hook in hooks):
            return True
        applied = [{"name": hook["name"], "clientConfig": {"caBundle": bundle}} for hook in hooks]
        await self._client.apply(
            kind,
            {
                "apiVersion": kind.api_version,
                "kind": kind.kind,
                "metadata": {"name": name},
                "webhooks": applied,
            },
        )
        logger.info("updated caBundle of %s %s", kind.kind, name)
        return False


def _ca_bundle(hook: Mapping[str, Any]) -> str:
    return str((hook.get("clientConfig") or {}).get("caBundle") or "")


def _secret(namespace: str, name: str, data: Mapping[str, str | None]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"namespace": namespace, "name": name, "labels": dict(MANAGED_BY)},
        "type": "Opaque",
        "data": {key: value for key, value in data.items() if value is not None},
    }


async def _wait_for_event(
    stop: asyncio.Event, changed: asyncio.Event | None, seconds: float
) -> None:
    events = [stop] if changed is None else [stop, changed]
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    if changed is not None:
        changed.clear()
