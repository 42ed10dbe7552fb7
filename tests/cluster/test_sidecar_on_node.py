"""The sidecar image in a real pod: arbitrary users, two containers, kills, and termination."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

import kvtier
from kvtier.config.models import (
    Daemon,
    HttpEndpoint,
    Live,
    LiveTier,
    MemoryTierDocument,
    PolicyIdentity,
    Selection,
    Structural,
)
from kvtier.config.writer import document_text
from kvtier.harness.engine_process import http_request

IMAGE = f"kvtier/payload:{kvtier.__version__}"
PORT = 9400
TOKEN = "the-token"
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
ENGINE = [
    "python3",
    "-m",
    "kvtier.harness.stub_engine",
    "--topology",
    "/etc/kvtier/topology",
    "--keys",
    "20",
]
SECONDS = 60


def structural() -> str:
    """The annotation."""
    live = Live(
        generation=1, selection=Selection.WEIGHTED, min_load_tokens=0, tiers={"ram": LiveTier()}
    )
    document = Structural(
        policy=PolicyIdentity(namespace="sidecar", name="chat"),
        content_hash="0123abcd",
        daemon=Daemon.SIDECAR,
        run_directory="/run/kvtier",
        tiers=[MemoryTierDocument(name="ram", capacity_bytes=16 << 20)],
        http=HttpEndpoint(host="0.0.0.0", port=PORT),
        live=live,
    )
    return document_text(document)


def pod() -> dict[str, Any]:
    """As the webhook makes one: payload, sidecar, and an engine that is another user than both."""
    topology = {"name": "topology", "mountPath": "/etc/kvtier/topology", "readOnly": True}
    run = {"name": "run", "mountPath": "/run/kvtier"}
    payload = {"name": "payload", "mountPath": "/opt/kvtier/payload"}

    def container(
        name: str, command: list[str], mounts: list[dict[str, Any]], **more: Any
    ) -> dict[str, Any]:
        return {
            "name": name,
            "image": IMAGE,
            "imagePullPolicy": "Never",
            "command": command,
            "volumeMounts": mounts,
            "securityContext": {**RESTRICTED, **more.pop("securityContext", {})},
            "resources": {
                "requests": {"cpu": "50m", "memory": "128Mi"},
                "limits": {"cpu": "2", "memory": "256Mi"},
            },
            **more,
        }

    annotation = {
        "path": "structural.json",
        "fieldRef": {"fieldPath": "metadata.annotations['kvtier.io/structural']"},
    }
    return {
        "metadata": {"name": "engine", "annotations": {"kvtier.io/structural": structural()}},
        "spec": {
            "terminationGracePeriodSeconds": 20,
            "automountServiceAccountToken": False,
            "initContainers": [
                # OpenShift gives every namespace users of its own, without a name and in group 0.
                container(
                    "kvtier-payload",
                    ["kvtier-payload", "/opt/kvtier/payload"],
                    [payload],
                    securityContext={"runAsUser": 1_000_660_000, "runAsGroup": 0},
                ),
                container(
                    "kvtier-tierd",
                    ["kvtier-sidecar", "run", "--token-file", "/etc/kvtier/token/token"],
                    [
                        topology,
                        run,
                        {"name": "token", "mountPath": "/etc/kvtier/token", "readOnly": True},
                    ],
                    restartPolicy="Always",
                    lifecycle={"preStop": {"exec": {"command": ["kvtier-sidecar", "drain"]}}},
                ),
            ],
            "containers": [
                container(
                    "vllm",
                    ENGINE,
                    [topology, run, {**payload, "readOnly": True}],
                    securityContext={"runAsUser": 4_242},
                    # The payload has no test code, so that the stub engine comes from the image's
                    # own copy.
                    env=[{"name": "PYTHONPATH", "value": "/opt/kvtier/source"}],
                )
            ],
            "volumes": [
                {
                    "name": "topology",
                    "projected": {"sources": [{"downwardAPI": {"items": [annotation]}}]},
                },
                {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}},
                {"name": "payload", "emptyDir": {}},
                {"name": "token", "secret": {"secretName": "chat-token", "optional": True}},
            ],
        },
    }


class Running:
    """The pod, and what is seen of it from the node."""

    def __init__(self, cluster: Any, api: Any, path: str, nodes: ModuleType) -> None:
        self._cluster, self._api, self.path, self._nodes = cluster, api, path, nodes

    def object(self) -> dict[str, Any]:
        return dict(self._nodes.ok(self._api.request("GET", self.path)))

    def container(self, name: str) -> dict[str, Any]:
        found = self.object()["status"]
        both = (found.get("initContainerStatuses") or []) + (found.get("containerStatuses") or [])
        return next(
            (each for each in both if each["name"] == name), {"state": {}, "restartCount": 0}
        )

    def ask(self, path: str, token: str | None = TOKEN) -> tuple[int, str]:
        address = self.object()["status"].get("podIP", "")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            return http_request(PORT, "GET", path, timeout_seconds=5, host=address, headers=headers)
        except OSError as error:
            return 0, str(error)

    def status(self) -> dict[str, Any]:
        code, text = self.ask("/status")
        return dict(json.loads(text)) if code == 200 else {}

    def processes(self, name: str, module: str) -> list[psutil.Process]:
        """Processes of a container whose command names ``module``."""
        identity = self.container(name).get("containerID", "").rpartition("/")[2]
        found = []
        for process in psutil.process_iter():
            try:
                cgroups = Path(f"/proc/{process.pid}/cgroup").read_text()
                if identity and identity in cgroups and module in process.cmdline():
                    found.append(process)
            except (OSError, psutil.Error):
                continue
        return found

    def engine_report(self) -> dict[str, Any]:
        """The engine's last words."""
        name, namespace = self.path.split("/")[-1], self.path.split("/")[-3]
        lines = self._cluster.kubectl(
            "logs", "-n", namespace, name, "-c", "vllm", "--tail=20"
        ).splitlines()
        words = [line for line in lines if line.startswith("{")]
        return dict(json.loads(words[-1])) if words else {}

    def kill(self, name: str, module: str) -> None:
        (process,) = self.processes(name, module)
        process.send_signal(signal.SIGKILL)

    def usable(self) -> bool:
        sessions = self.status().get("sessions", [])
        return len(sessions) == 2 and all(each["ready"] for each in sessions)


@pytest.fixture
def running(
    node_cluster: Any, node_api: Any, nodes: ModuleType, node_images: None
) -> Iterator[Running]:
    restricted = {"pod-security.kubernetes.io/enforce": "restricted"}
    namespace = nodes.make_namespace(node_api, f"sidecar-{os.getpid()}", restricted)
    pods = f"/api/v1/namespaces/{namespace}/pods"
    nodes.ok(node_api.request("POST", pods, pod()))
    yield Running(node_cluster, node_api, f"{pods}/engine", nodes)
    node_api.request("DELETE", f"/api/v1/namespaces/{namespace}")
    nodes.wait_for("the pod is gone", lambda: node_api.request("GET", f"{pods}/engine")[0] == 404)


def test_the_sidecar_survives_kills_of_tierd_and_engine_and_exits_with_its_pod(
    running: Running, node_api: Any, nodes: ModuleType
) -> None:
    def wait_for(what: str, ready: Callable[[], Any]) -> Any:
        return nodes.wait_for(what, ready, SECONDS)

    # Without the Secret every request is rejected, until the kubelet mounts it.
    wait_for("it answers", lambda: running.ask("/healthz")[0] == 200)
    assert [running.ask("/status")[0], running.ask("/metrics")[0]] == [401, 401]
    assert running.container("kvtier-payload")["state"]["terminated"]["exitCode"] == 0
    secrets = running.path.rpartition("/pods/")[0] + "/secrets"
    secret = {"metadata": {"name": "chat-token"}, "stringData": {"token": TOKEN}}
    nodes.ok(node_api.request("POST", secrets, secret))
    wait_for("the token is mounted and read", running.status)
    assert running.ask("/status", token=None)[0] == 401
    assert running.status()["contentHash"] == "0123abcd"

    # An engine of another user and another pid namespace is attached through the shared volume.
    wait_for("the engine is attached", running.usable)
    (tierd,) = running.processes("kvtier-tierd", "kvtier.tierd")
    (engine,) = running.processes("vllm", "kvtier.harness.stub_engine")
    assert (tierd.uids().real, engine.uids().real) == (65_532, 4_242)
    pool = Path(f"/proc/{tierd.pid}/root/run/kvtier/pool")
    inode, epoch = pool.stat().st_ino, running.status()["epoch"]

    # tierd dies: another one, over the same pool, and the container was not restarted.
    running.kill("kvtier-tierd", "kvtier.tierd")
    wait_for(
        "the next tierd serves the engine",
        lambda: running.status().get("epoch", 0) > epoch and running.usable(),
    )
    (again,) = running.processes("kvtier-tierd", "kvtier.tierd")
    assert Path(f"/proc/{again.pid}/root/run/kvtier/pool").stat().st_ino == inode
    assert running.container("kvtier-tierd")["restartCount"] == 0

    # The engine is killed. Its slots are freed at once and the next engine finds its objects.
    running.kill("vllm", "kvtier.harness.stub_engine")
    start = time.monotonic()
    wait_for(
        "no slot of the killed engine is held",
        lambda: (
            (status := running.status())
            and not status["quarantinedProcesses"]
            and status["pool"]["quarantined"] == 0
        ),
    )
    assert time.monotonic() - start < 20
    wait_for(
        "the next engine is attached",
        lambda: running.container("vllm")["restartCount"] == 1 and running.usable(),
    )
    wait_for("it loads", lambda: running.engine_report().get("loaded", 0) > 20)
    assert running.engine_report()["wrong"] == 0
    assert running.container("kvtier-tierd")["restartCount"] == 0

    # The pod ends: draining begins with the engine's SIGTERM, and the sidecar is gone soon after
    # the engine.
    nodes.ok(node_api.request("DELETE", running.path))
    start = time.monotonic()
    wait_for("the pod is gone", lambda: node_api.request("GET", running.path)[0] == 404)
    assert time.monotonic() - start < 15
