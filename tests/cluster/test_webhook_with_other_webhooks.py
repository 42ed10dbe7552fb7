"""Other mutating webhooks before and after KVTier's: neither reverts the changes of the other."""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.cluster import admission
from tests.cluster.admission import LABELLED, WebhookProcess, installed, pod, policy

from kvtier_operator.api.names import POLICY_ANNOTATION, STRUCTURAL_ANNOTATION, TIERD_CONTAINER
from kvtier_operator.certs import certificates

Patch = Callable[[dict[str, Any]], list[dict[str, Any]]]


@contextlib.contextmanager
def another_webhook(
    api: Any, home: Path, name: str, namespace: str, patch: Patch
) -> Iterator[list[str]]:
    """A second mutating webhook; webhooks are called in the order of the configurations' names.
    Yields the container names that it saw, one entry per call.
    """
    issued = certificates.issue(("127.0.0.1",), time.time(), 3600)
    pair = home / f"{name}.pem"
    pair.write_bytes(issued.certificate + issued.key)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pair)
    seen: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            review_request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))[
                "request"
            ]
            seen.append(
                " ".join(each["name"] for each in review_request["object"]["spec"]["containers"])
            )
            operations = base64.b64encode(
                json.dumps(patch(review_request["object"])).encode()
            ).decode()
            response = {
                "uid": review_request["uid"],
                "allowed": True,
                "patchType": "JSONPatch",
                "patch": operations,
            }
            answer = {
                "apiVersion": "admission.k8s.io/v1",
                "kind": "AdmissionReview",
                "response": response,
            }
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    configuration = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": name},
        "webhooks": [
            {
                "name": "mesh.example.com",
                "admissionReviewVersions": ["v1"],
                "clientConfig": {
                    "url": f"https://127.0.0.1:{server.server_port}/",
                    "caBundle": certificates.encode_bundle(issued.authority),
                },
                "rules": [
                    {
                        "apiGroups": [""],
                        "apiVersions": ["v1"],
                        "resources": ["pods"],
                        "operations": ["CREATE"],
                    }
                ],
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
                "failurePolicy": "Fail",
                "reinvocationPolicy": "Never",
                "sideEffects": "None",
                "timeoutSeconds": 10,
            }
        ],
    }
    try:
        with installed(api, configuration):
            yield seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def add_proxy(found: dict[str, Any]) -> list[dict[str, Any]]:
    """What a mesh does: its container comes first."""
    if any(each["name"] == "proxy" for each in found["spec"]["containers"]):
        return []
    return [
        {"op": "add", "path": "/spec/containers/0", "value": {"name": "proxy", "image": "mesh:1"}}
    ]


def add_label(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"op": "add", "path": "/metadata/labels/app", "value": "engine"}]


@pytest.fixture
def create(
    full_cluster: Any, full_api: Any, nodes: ModuleType, tmp_path: Path
) -> Iterator[tuple[str, Callable[..., Any]]]:
    """A labelled namespace with a policy that the webhook knows, and how pods are made there."""
    namespace = nodes.make_namespace(full_api, f"beside-{secrets.token_hex(3)}", LABELLED)
    pods = f"/api/v1/namespaces/{namespace}/pods?dryRun=All"

    def made(document: dict[str, Any]) -> Any:
        return nodes.ok(full_api.request("POST", pods, document))

    with admission.definition(full_cluster, full_api, nodes):
        path = f"/apis/kvtier.io/v1alpha1/namespaces/{namespace}/kvtierpolicies"
        nodes.ok(full_api.request("POST", path, policy()))
        process = WebhookProcess(tmp_path / "webhook", full_cluster)
        with process, installed(full_api, *admission.configurations(process)):
            nodes.wait_for("pods are attached", lambda: _attached(made(pod())))
            yield namespace, made
    full_api.request("DELETE", f"/api/v1/namespaces/{namespace}")


@pytest.mark.parametrize("name", ["a-mesh", "z-mesh"])
def test_a_container_that_a_mesh_adds_before_or_after_is_not_the_engine(
    full_api: Any,
    nodes: ModuleType,
    tmp_path: Path,
    create: tuple[str, Callable[..., Any]],
    name: str,
) -> None:
    namespace, made = create
    with another_webhook(full_api, tmp_path, name, namespace, add_proxy) as seen:
        nodes.wait_for("the mesh is asked", lambda: made(pod()) and seen)
        stored = made(pod())
    assert _attached(stored)
    containers = {each["name"]: each for each in stored["spec"]["containers"]}
    assert "KVTIER_TOPOLOGY" in _variables(containers["vllm"])
    assert "KVTIER_TOPOLOGY" not in _variables(containers["proxy"])
    every = [
        each["name"]
        for each in (*stored["spec"]["containers"], *stored["spec"].get("initContainers", []))
    ]
    assert len(set(every)) == len(every)
    assert every.count(TIERD_CONTAINER) == 1


def test_an_engine_added_by_a_later_webhook_is_injected_on_reinvocation(
    full_api: Any, nodes: ModuleType, tmp_path: Path, create: tuple[str, Callable[..., Any]]
) -> None:
    namespace, made = create
    other = pod({"team": "a"})
    assert not _attached(made(other))
    with another_webhook(full_api, tmp_path, "z-labels", namespace, add_label) as seen:
        nodes.wait_for("the other webhook is asked", lambda: made(other) and seen)
        stored = made(other)
    assert _attached(stored)
    assert stored["metadata"]["annotations"][POLICY_ANNOTATION] == "chat"


def _attached(stored: Any) -> bool:
    return STRUCTURAL_ANNOTATION in (stored["metadata"].get("annotations") or {})


def _variables(container: dict[str, Any]) -> set[str]:
    return {each["name"] for each in container.get("env", [])}
