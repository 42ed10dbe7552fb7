"""Keeping the webhook's own certificate: the Secret it lies in, and the ``caBundle`` of both webhook configurations.

The controller does this, so that the webhook writes nothing. What is to be done is decided in
``kvtier_operator.certs.certificates``; this reads, asks it, and writes. All state is in the Secret and in the
configurations, so it may be killed at any point, and two that run at once do each other no harm: a Secret is created or
changed only in the state in which it was read.
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
LOOK_SECONDS = 20.0
"""How long a caBundle that somebody took away may be missing. Three small reads each time."""
RETRY_SECONDS = (1.0, 30.0)
"""After an error: first this long, doubled up to that."""
MAX_ROUNDS = 4
"""A change of the Secret is followed by another look at once; more changes than a rotation has steps are a quarrel."""


class CertificateMetrics(Protocol):
    """What is counted, by whoever keeps metrics."""

    def certificate_ends(self, seconds: float) -> None:
        """The serving certificate ends then (seconds since 1970)."""

    def certificate_failed(self) -> None:
        """A round could not be finished."""


@dataclass(frozen=True, slots=True)
class _NoMetrics:
    def certificate_ends(self, seconds: float) -> None:
        pass

    def certificate_failed(self) -> None:
        pass


async def keep_certificates(
    client: Client,
    settings: Settings,
    stop: asyncio.Event,
    *,
    changed: asyncio.Event | None = None,
    wall_clock: Callable[[], float] = time.time,
    metrics: CertificateMetrics | None = None,
) -> None:
    """Until ``stop``: makes, renews and repairs. Returns at once where certificates are mounted. ``changed``: set by
    whoever sees the Secret or a configuration change; without it, changes are found within ``LOOK_SECONDS``.
    """
    if settings.webhook.certificates.mode is not CertificateMode.SELF_MANAGED:
        return
    keeper = CertificateKeeper(client, settings, wall_clock)
    counted = metrics or _NoMetrics()
    back_off = RETRY_SECONDS[0]
    while not stop.is_set():
        try:
            wait = min(LOOK_SECONDS, await keeper.round())
            back_off = RETRY_SECONDS[0]
            counted.certificate_ends(keeper.ends)
        except ApiError as error:
            logger.warning("the webhook's certificate could not be looked after: %s", error)
            counted.certificate_failed()
            wait, back_off = back_off, min(RETRY_SECONDS[1], back_off * 2)
        await _first_of(stop, changed, wait)


class CertificateKeeper:
    """One round at a time. ``ends``: when the serving certificate ends, once a round was finished."""

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
        self._seen_since: tuple[str, float] = ("", 0.0)
        self.ends = 0.0

    async def round(self) -> float:
        """Looks at everything, does what is due; in how many seconds the next step is. Raises ``ApiError``."""
        for _ in range(MAX_ROUNDS):
            secret = await self._read()
            material = certificates.from_secret(secret)
            if material is None:
                # Replicas go on showing what they had until they see the new Secret: its CA stays trusted.
                material = KeyPair(b"", b"", await self._trusted())
            # First the bundle that is there, so that a step never runs ahead of what API servers trust.
            spread = bool(material.certificate) and await self._spread(material)
            step = certificates.step(
                material,
                self._names,
                self._wall_clock(),
                self._options.lifetime_seconds,
                self._options.renew_before_seconds,
                spread,
            )
            if not step.change:
                self.ends = certificates.expiry(step.material.certificate) or 0.0
                return step.wait_seconds
            if await self._write(secret, step.material):
                logger.info("the webhook's certificate: %s", step.change)
        return RETRY_SECONDS[0]

    async def _read(self) -> Object | None:
        try:
            return await self._client.get(
                SECRETS, self._settings.namespace, self._options.secret_name
            )
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def _write(self, secret: Object | None, material: KeyPair) -> bool:
        """Whether the Secret was still as it was read."""
        namespace, name = self._settings.namespace, self._options.secret_name
        data = certificates.secret_data(material)
        try:
            if secret is None:
                await self._client.create(SECRETS, namespace, _secret(namespace, name, data))
            else:
                version = secret["metadata"]["resourceVersion"]
                body = {
                    "metadata": {"resourceVersion": version, "labels": dict(MANAGED_BY)},
                    "data": data,
                }
                await self._client.patch(SECRETS, namespace, name, body)
        except ApiError as error:
            if error.status in (404, 409):
                return False
            raise
        return True

    async def _trusted(self) -> bytes:
        """The CAs that API servers trust at the moment."""
        found: list[bytes] = []
        for kind, name in self._configurations:
            configuration = await self._configuration(kind, name)
            for hook in (configuration or {}).get("webhooks") or ():
                bundle = certificates.from_bundle_field(_bundle(hook))
                if bundle not in found:
                    found.append(bundle)
        return b"".join(found)

    async def _configuration(self, kind: Kind, name: str) -> Object | None:
        try:
            return await self._client.get(kind, None, name)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def _spread(self, material: KeyPair) -> bool:
        """Whether both configurations have had this bundle for long enough; gives it to those that have another."""
        if not material.bundle or not certificates.trusts(material.bundle):
            # Nothing that an API server could use: what it has may still be right.
            return False
        field = certificates.bundle_field(material.bundle)
        there = True
        for kind, name in self._configurations:
            there = await self._bundled(kind, name, field) and there
        now = self._wall_clock()
        if not there or self._seen_since[0] != field:
            self._seen_since = (field, now)
        return now - self._seen_since[1] >= certificates.settle_seconds(
            self._options.renew_before_seconds
        )

    async def _bundled(self, kind: Kind, name: str, field: str) -> bool:
        """Whether it was there already."""
        found = await self._configuration(kind, name)
        if found is None:
            # Not installed (yet): nobody asks, so nobody has to trust.
            return True
        stale = [hook for hook in found.get("webhooks") or () if _bundle(hook) != field]
        if not stale:
            return True
        hooks = [
            {"name": hook["name"], "clientConfig": {"caBundle": field}}
            for hook in found["webhooks"]
        ]
        await self._client.apply(
            kind,
            {
                "apiVersion": kind.api_version,
                "kind": kind.kind,
                "metadata": {"name": name},
                "webhooks": hooks,
            },
        )
        logger.info("%s %s: caBundle written", kind.kind, name)
        return False


def _bundle(hook: Mapping[str, Any]) -> str:
    return str((hook.get("clientConfig") or {}).get("caBundle") or "")


def _secret(namespace: str, name: str, data: Mapping[str, str | None]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"namespace": namespace, "name": name, "labels": dict(MANAGED_BY)},
        "type": "Opaque",
        "data": {key: value for key, value in data.items() if value is not None},
    }


async def _first_of(stop: asyncio.Event, changed: asyncio.Event | None, seconds: float) -> None:
    events = [stop] if changed is None else [stop, changed]
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()
    if changed is not None:
        changed.clear()
