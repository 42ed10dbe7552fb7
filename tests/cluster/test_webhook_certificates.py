"""Webhook certificates on a real API server: no call fails while they rotate."""

from __future__ import annotations

import asyncio
import concurrent.futures
import secrets
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import pytest
from tests.cluster import admission
from tests.cluster.admission import (
    CONFIGURATIONS,
    LABELLED,
    WebhookProcess,
    by_url,
    installed,
    pod,
    policy,
)
from tests.support import webhook_configurations as rendered

from kvtier_operator.api.names import POLICY_ANNOTATION
from kvtier_operator.certs import certificates
from kvtier_operator.certs.rotate import rotate_certificates
from kvtier_operator.kube.client import connect

LIFETIME_SECONDS, RENEW_BEFORE_SECONDS = 200, 40
SETTLE_SECONDS = certificates.settle_seconds(RENEW_BEFORE_SECONDS)


class Keeper:
    """The controller's part, in a thread, with a clock that can be set forward."""

    def __init__(self, cluster: Any, settings: Any) -> None:
        self._cluster, self._settings = cluster, settings
        self.ahead_seconds = 0.0
        self._loop = asyncio.new_event_loop()
        self._stop, self._changed = asyncio.Event(), asyncio.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._run(),), daemon=True
        )

    async def _run(self) -> None:
        async with connect(self._cluster.kubeconfig, self._cluster.context) as client:
            await rotate_certificates(
                client, self._settings, self._stop, changed=self._changed, wall_clock=self.now
            )

    def now(self) -> float:
        return time.time() + self.ahead_seconds

    def later(self, seconds: float) -> None:
        """Time passes, and the next round comes at once."""
        self.ahead_seconds += seconds
        self.look()

    def look(self) -> None:
        self._loop.call_soon_threadsafe(self._changed.set)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        self._loop.close()


@pytest.fixture
def namespace(full_cluster: Any, full_api: Any, nodes: ModuleType) -> Iterator[str]:
    """A labelled namespace with a policy."""
    name = nodes.make_namespace(full_api, f"certificates-{secrets.token_hex(3)}", LABELLED)
    with admission.definition(full_cluster, full_api, nodes):
        path = f"/apis/kvtier.io/v1alpha1/namespaces/{name}/kvtierpolicies"
        nodes.ok(full_api.request("POST", path, policy()))
        yield name
    full_api.request("DELETE", f"/api/v1/namespaces/{name}")


def options(namespace: str, configuration: str) -> dict[str, Any]:
    return {
        "namespace": namespace,
        "webhook": {
            "certificates": {
                "mode": "SelfManaged",
                "lifetimeSeconds": LIFETIME_SECONDS,
                "renewBeforeSeconds": RENEW_BEFORE_SECONDS,
                "mutatingConfiguration": configuration,
                "validatingConfiguration": configuration,
            }
        },
    }


def without_own_namespace(configuration: dict[str, Any]) -> dict[str, Any]:
    """The test's Secret is in the namespace of its pods, which the real webhook excludes."""
    for hook in configuration["webhooks"]:
        hook.get("namespaceSelector", {}).pop("matchExpressions", None)
    return configuration


def test_a_self_managed_certificate_is_rotated_under_load_without_one_failed_admission(
    full_api: Any, full_cluster: Any, nodes: ModuleType, namespace: str, tmp_path: Path
) -> None:
    process = WebhookProcess(tmp_path, full_cluster, options(namespace, namespace))
    settings = process.settings
    hooks = [
        without_own_namespace(by_url(each, process.port, b""))
        for each in (rendered.mutating(settings), rendered.validating(settings))
    ]
    pods = f"/api/v1/namespaces/{namespace}/pods?dryRun=All"
    secret = f"/api/v1/namespaces/{namespace}/secrets/{settings.webhook.certificates.secret_name}"

    def attached() -> bool:
        stored = nodes.ok(full_api.request("POST", pods, pod()))
        return POLICY_ANNOTATION in (stored["metadata"].get("annotations") or {})

    def material() -> certificates.KeyPair | None:
        return certificates.from_secret(full_api.request("GET", secret)[1])

    def serves() -> bool:
        found = material()
        if found is None or certificates.expiry(found.certificate) is None:
            return False
        return _der(found.certificate) == process.shown_certificate()

    with installed(full_api, *hooks), Keeper(full_cluster, settings) as keeper, process:
        nodes.wait_for("the first certificate is trusted", attached)
        first = material()
        assert first is not None
        results: list[bool] = []
        over = threading.Event()

        def load() -> None:
            while not over.is_set():
                results.append(attached())

        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            loads = [threads.submit(load) for _ in range(2)]
            try:
                keeper.later(LIFETIME_SECONDS - RENEW_BEFORE_SECONDS + 1)
                nodes.wait_for(
                    "a renewed certificate waits", lambda: (material() or first).next_certificate
                )
                assert process.shown_certificate() == _der(first.certificate)
                bundle = certificates.encode_bundle((material() or first).bundle)
                for kind in ("mutating", "validating"):
                    nodes.wait_for(
                        "the bundle is known",
                        lambda kind=kind: bundle in _bundles(full_api, kind, namespace),
                    )
                keeper.look()
                time.sleep(1)
                keeper.later(SETTLE_SECONDS)
                nodes.wait_for(
                    "the renewed certificate serves",
                    lambda: _serves_another(material(), first) and serves(),
                )
                seen = len(results)
                nodes.wait_for("more pods", lambda: len(results) > seen + 20)
            finally:
                over.set()
            for each in loads:
                each.result(30)
        assert len(results) > 40
        assert all(results), f"{results.count(False)} of {len(results)} pods were not attached"

        # Drift: the bundle is removed.
        path = f"{CONFIGURATIONS}/mutatingwebhookconfigurations/{namespace}"
        body = nodes.ok(full_api.request("GET", path))
        del body["webhooks"][0]["clientConfig"]["caBundle"]
        nodes.ok(full_api.request("PUT", path, body))
        keeper.look()
        nodes.wait_for(
            "the bundle is back", lambda: bundle in _bundles(full_api, "mutating", namespace)
        )
        nodes.wait_for("pods are attached again", attached)

        # The Secret is overwritten with an unusable pair.
        broken = {"data": {"tls.crt": "eA==", "tls.key": "eA=="}}
        nodes.ok(
            full_api.request("PATCH", secret, broken, content_type="application/merge-patch+json")
        )
        keeper.look()
        nodes.wait_for("a new certificate serves", serves)
        nodes.wait_for("pods are attached again", attached)
        assert process.metric("kvtier_webhook_certificate_expiry_timestamp_seconds") > time.time()


def test_a_mounted_certificate_is_replaced_without_a_restart(
    full_api: Any, full_cluster: Any, nodes: ModuleType, namespace: str, tmp_path: Path
) -> None:
    process = WebhookProcess(tmp_path, full_cluster)
    # cert-manager's injector has both CAs in the bundle while a certificate is renewed.
    process.mount()
    with process, installed(full_api, _named(admission.configurations(process)[0], namespace)):
        pods = f"/api/v1/namespaces/{namespace}/pods?dryRun=All"

        def attached() -> bool:
            stored = nodes.ok(full_api.request("POST", pods, pod()))
            return POLICY_ANNOTATION in (stored["metadata"].get("annotations") or {})

        nodes.wait_for("pods are attached", attached)
        before = process.shown_certificate()
        process.mount()
        nodes.wait_for(
            "another certificate is shown",
            lambda: process.shown_certificate() != before,
            seconds=20,
        )
        # Its CA is not known to the API server: pods start unchanged until the bundle has it.
        path = f"{CONFIGURATIONS}/mutatingwebhookconfigurations/{namespace}"
        body = nodes.ok(full_api.request("GET", path))
        body["webhooks"][0]["clientConfig"]["caBundle"] = certificates.encode_bundle(process.bundle)
        nodes.ok(full_api.request("PUT", path, body))
        nodes.wait_for("pods are attached", attached)


def _named(configuration: dict[str, Any], name: str) -> dict[str, Any]:
    configuration["metadata"]["name"] = name
    return configuration


def _bundles(api: Any, kind: str, name: str) -> list[str]:
    _, body = api.request("GET", f"{CONFIGURATIONS}/{kind}webhookconfigurations/{name}")
    return [hook["clientConfig"].get("caBundle", "") for hook in body["webhooks"]]


def _der(certificate: bytes) -> bytes:
    return ssl.PEM_cert_to_DER_cert(certificate.decode())


def _serves_another(found: certificates.KeyPair | None, first: certificates.KeyPair) -> bool:
    return found is not None and found.certificate != first.certificate
