"""The webhook as a local process that the API server calls over loopback."""

from __future__ import annotations

import contextlib
import copy
import http.client
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml
from tests.support import webhook_configurations

from kvtier_operator.api import crd
from kvtier_operator.api.names import INJECT_LABEL
from kvtier_operator.certs import certificates
from kvtier_operator.settings import Settings

REPOSITORY = Path(__file__).resolve().parents[2]
START_SECONDS = 60
STOP_SECONDS = 20
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1"
LABELLED = {INJECT_LABEL: "enabled"}


def free_port() -> int:
    """One that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class WebhookProcess:
    """``kvtier-operator webhook`` for as long as the block runs. ``options``: settings beside
    addresses and certificates; by default the certificate is mounted, and made here.
    """

    def __init__(self, home: Path, cluster: Any, options: Mapping[str, Any] | None = None) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self._home, self._cluster = home, cluster
        self.port, self.monitoring_port = free_port(), free_port()
        self.directory = home / "certificates"
        document: dict[str, Any] = copy.deepcopy(dict(options or {}))
        document.setdefault("monitoring", {}).update(host="127.0.0.1", port=self.monitoring_port)
        webhook = document.setdefault("webhook", {})
        webhook.setdefault("drainSeconds", 0.2)
        webhook.update(host="127.0.0.1", port=self.port)
        chosen = webhook.setdefault("certificates", {"mode": "Mounted"})
        # Beside what a chart has installed: "kvtier" itself is the chart's.
        name = f"kvtier-{secrets.token_hex(3)}"
        for configuration in ("mutatingConfiguration", "validatingConfiguration"):
            chosen.setdefault(configuration, name)
        chosen.update(directory=str(self.directory), extraNames=["127.0.0.1"])
        self._file = home / "settings.yaml"
        self._file.write_text(yaml.safe_dump(document))
        self.settings = Settings.model_validate(document)
        self.bundle = b""
        if chosen["mode"] == "Mounted":
            self.mount()
        self.log = home / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def mount(self) -> None:
        """Replaces the certificate as the kubelet does: all files at once, by a link."""
        issued = certificates.issue(("127.0.0.1",), time.time(), 3600)
        version = self.directory / f"..{time.monotonic_ns()}"
        version.mkdir(parents=True)
        for name, content in (
            ("tls.crt", issued.certificate),
            ("tls.key", issued.key),
            ("ca.crt", issued.authority),
        ):
            (version / name).write_bytes(content)
            if not (self.directory / name).is_symlink():
                (self.directory / name).symlink_to(Path("..data") / name)
        link = self.directory / "..data_tmp"
        link.symlink_to(version.name)
        link.rename(self.directory / "..data")
        self.bundle = issued.authority + self.bundle

    def make_secret(self) -> dict[str, str | None]:
        """The data of a Secret with a new certificate, as the controller would keep it."""
        issued = certificates.issue(("127.0.0.1",), time.time(), 3600)
        self.bundle = issued.authority
        return certificates.secret_data(
            certificates.KeyPair(issued.certificate, issued.key, issued.authority)
        )

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            # The block is never entered, so no other code would end the process.
            self.stop(signal.SIGKILL)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self, wait: bool = True) -> None:
        """Starts it; returns once it is ready."""
        command = [
            sys.executable,
            "-m",
            "kvtier_operator.main",
            "webhook",
            "--settings",
            str(self._file),
        ]
        command += [
            "--kubeconfig",
            str(self._cluster.kubeconfig),
            "--context",
            self._cluster.context,
        ]
        paths = [
            str(REPOSITORY / "connector"),
            str(REPOSITORY / "operator"),
            os.environ.get("PYTHONPATH", ""),
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Until caches and certificate are there."""
        deadline = time.monotonic() + START_SECONDS
        while self.monitoring("/readyz")[0] != 200:
            if (
                self.process is None
                or self.process.poll() is not None
                or time.monotonic() > deadline
            ):
                raise AssertionError(
                    f"the webhook did not become ready:\n{self.log.read_text()[-4000:]}"
                )
            time.sleep(0.1)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ends it; its exit status."""
        if self.process is None:
            return 0
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(number)
        try:
            return self.process.wait(STOP_SECONDS)
        finally:
            self.process.kill()
            self.process.wait()
            self.process = None

    def monitoring(self, path: str) -> tuple[int, str]:
        """What the monitoring port answers; status 0 if there is no answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.monitoring_port, timeout=5)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except OSError:
            return 0, ""
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        """A sample by its name with labels, as it is printed; 0 where there is none."""
        for line in self.monitoring("/metrics")[1].splitlines():
            if line.startswith(f"{name} "):
                return float(line.rsplit(" ", 1)[1])
        return 0.0

    def shown_certificate(self) -> bytes:
        """The certificate that a new connection is shown, as DER."""
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with (
            socket.create_connection(("127.0.0.1", self.port), timeout=5) as plain,
            context.wrap_socket(plain) as tls,
        ):
            return tls.getpeercert(binary_form=True) or b""


@contextlib.contextmanager
def definition(cluster: Any, api: Any, nodes: Any) -> Iterator[None]:
    """Serves the CRD while the block runs. A cluster that the tests own keeps it afterwards."""
    document = crd.definition()
    path = f"{DEFINITIONS}/{document['metadata']['name']}"
    query = "?fieldManager=kvtier-tests&force=true"
    status, body = api.request(
        "PATCH", path + query, document, content_type="application/apply-patch+yaml"
    )
    assert status in (200, 201), body
    listed = f"/apis/{crd.GROUP}/{crd.VERSION}/{crd.PLURAL}"
    nodes.wait_for("policies are served", lambda: api.request("GET", listed)[0] == 200)
    yield
    if status == 201 and not cluster.own:
        api.request("DELETE", path)


def by_url(configuration: dict[str, Any], port: int, bundle: bytes) -> dict[str, Any]:
    """The configuration with the Service replaced by loopback. An empty bundle is left out."""
    changed = copy.deepcopy(configuration)
    for hook in changed["webhooks"]:
        path = hook["clientConfig"]["service"]["path"]
        hook["clientConfig"] = {"url": f"https://127.0.0.1:{port}{path}"}
        if bundle:
            hook["clientConfig"]["caBundle"] = certificates.encode_bundle(bundle)
    return changed


@contextlib.contextmanager
def installed(api: Any, *configurations: dict[str, Any]) -> Iterator[None]:
    """Webhook configurations that apply while the block runs. The API server watches them."""
    paths = []
    try:
        for configuration in configurations:
            plural = configuration["kind"].lower() + "s"
            status, body = api.request("POST", f"{CONFIGURATIONS}/{plural}", configuration)
            assert status == 201, body
            paths.append(f"{CONFIGURATIONS}/{plural}/{configuration['metadata']['name']}")
        yield
    finally:
        for path in paths:
            api.request("DELETE", path)


def configurations(webhook: WebhookProcess) -> list[dict[str, Any]]:
    """Both, as the chart has them, but for the address."""
    rendered = (
        webhook_configurations.mutating(webhook.settings),
        webhook_configurations.validating(webhook.settings),
    )
    return [by_url(each, webhook.port, webhook.bundle) for each in rendered]


def pod(labels: Mapping[str, str] | None = None, **metadata: Any) -> dict[str, Any]:
    """An engine's pod, as its owner writes it."""
    return {
        "metadata": {
            "generateName": "engine-",
            "labels": dict(labels or {"app": "engine"}),
            **metadata,
        },
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [
                {
                    "name": "vllm",
                    "image": "registry.example/vllm:1",
                    "command": ["vllm", "serve", "model"],
                    "resources": {"limits": {"cpu": "4", "memory": "16Gi"}},
                }
            ],
        },
    }


def policy(
    name: str = "chat", labels: Mapping[str, str] | None = None, **spec: Any
) -> dict[str, Any]:
    """A policy with a RAM tier alone."""
    return {
        "apiVersion": "kvtier.io/v1alpha1",
        "kind": "KVTierPolicy",
        "metadata": {"name": name},
        "spec": {
            "podSelector": {"matchLabels": dict(labels or {"app": "engine"})},
            "tiers": [{"name": "ram", "memory": {"capacity": "1Gi"}}],
            **spec,
        },
    }
