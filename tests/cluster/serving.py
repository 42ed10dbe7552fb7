"""Engines in pods on this machine's node: images, requests, tier status, killing a container."""

from __future__ import annotations

import base64
import json
import re
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from nodes import ok, wait_for

from kvtier.harness.engine_process import EngineClient, EngineProcessError

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples" / "engine-pod.yaml"
ENGINE_PORT = 8000
STATUS_PORT = 9400
START_SECONDS = 300
LOADED = "vllm:kvtier_loaded_tokens_total"


def engine_deployment(model: Path, name: str = "chat") -> dict[str, Any]:
    """``examples/engine-pod.yaml`` with the interpreter that runs this, and ``model``. A directory
    is mounted once: Debian's interpreter is in /usr, which the example mounts anyway.
    """
    venv = Path(sys.prefix)
    text = EXAMPLE.read_text(encoding="utf-8")
    for word, value in (("VENV", venv), ("PYTHON_HOME", Path(sys.base_prefix)), ("MODEL", model)):
        text = re.sub(rf"\b{word}\b", str(value), text)
    body = yaml.safe_load(text)
    body["metadata"]["name"] = name
    body["spec"]["selector"]["matchLabels"]["app"] = name
    body["spec"]["template"]["metadata"]["labels"]["app"] = name
    for container in body["spec"]["template"]["spec"]["containers"]:
        by_path = {mount["mountPath"]: mount for mount in reversed(container["volumeMounts"])}
        container["volumeMounts"] = list(reversed(by_path.values()))
    return dict(body)


def pods_of(api: Any, namespace: str, app: str) -> list[dict[str, Any]]:
    """Pods of an app that are not being deleted."""
    found = ok(api.request("GET", f"/api/v1/namespaces/{namespace}/pods?labelSelector=app={app}"))[
        "items"
    ]
    return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]


def container_status(pod: dict[str, Any], name: str) -> dict[str, Any]:
    """The status of a container or init container; empty before the kubelet knows it."""
    status = pod.get("status", {})
    entries = [*status.get("containerStatuses", ()), *status.get("initContainerStatuses", ())]
    return next((each for each in entries if each["name"] == name), {})


class EnginePod:
    """The one pod of an app, and the engine in it."""

    def __init__(self, cluster: Any, api: Any, namespace: str, app: str, model: Path) -> None:
        self._cluster, self._api = cluster, api
        self.namespace, self.app, self._model = namespace, app, model

    def now(self) -> dict[str, Any]:
        """The pod as the API server has it; fails where there is none."""
        pods = pods_of(self._api, self.namespace, self.app)
        if len(pods) != 1:
            raise AssertionError(f"{len(pods)} pods of {self.app} instead of one")
        return pods[0]

    def wait_ready(
        self, seconds: float = START_SECONDS, restarts: int = 0, other_than: str = ""
    ) -> dict[str, Any]:
        """Waits until the engine's container is ready, after ``restarts`` restarts, in a pod whose
        uid is not ``other_than``. The error names the cause.
        """

        def ready() -> Any:
            pods = pods_of(self._api, self.namespace, self.app)
            if len(pods) != 1 or pods[0]["metadata"]["uid"] == other_than:
                return None
            status = container_status(pods[0], "vllm")
            return pods[0] if status.get("ready") and status["restartCount"] >= restarts else None

        try:
            found = wait_for(f"pod of {self.app} is ready", ready, seconds, period=0.5)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.explain()}") from None
        return dict(found)

    def explain(self) -> str:
        """What a person would look at first: description and logs."""
        parts = [
            self._cluster.kubectl(
                "-n", self.namespace, "describe", "pods", "-l", f"app={self.app}", check=False
            )[-6000:]
        ]
        for container in ("vllm", "kvtier-tierd", "kvtier-payload"):
            options = (
                "-n",
                self.namespace,
                "logs",
                "-l",
                f"app={self.app}",
                "-c",
                container,
                "--tail=60",
            )
            parts.append(
                f"--- {container}\n" + self._cluster.kubectl(*options, check=False)[-6000:]
            )
        return "\n".join(parts)

    def client(self) -> EngineClient:
        """Asks the engine of the pod that there is now."""
        return EngineClient(self.now()["status"]["podIP"], ENGINE_PORT, str(self._model))

    def status(self, policy: str) -> dict[str, Any]:
        """tierd's ``/status``, with the policy's token. Raises ``OSError``."""
        secret = ok(
            self._api.request("GET", f"/api/v1/namespaces/{self.namespace}/secrets/{policy}-token")
        )
        token = base64.b64decode(secret["data"]["token"]).decode()
        address = f"http://{self.now()['status']['podIP']}:{STATUS_PORT}/status"
        request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=5) as answer:
            return dict(json.load(answer))

    def attached(self, policy: str) -> bool:
        """Whether the engine's scheduler and worker have sessions with tierd that are ready."""
        try:
            roles = {each["role"] for each in self.status(policy)["sessions"] if each["ready"]}
        except (OSError, AssertionError):
            return False
        return roles >= {"scheduler", "worker"}

    def kill_container(self, name: str = "vllm") -> None:
        """Sends SIGKILL to a container's processes. The kubelet restarts the container."""
        identifier = container_status(self.now(), name)["containerID"].removeprefix("containerd://")
        self._cluster.ctr("task", "kill", "--all", "--signal", "SIGKILL", identifier)

    def memory_limit(self, name: str = "vllm") -> int:
        """Bytes that the container's cgroup allows, as the kernel has it."""
        identifier = container_status(self.now(), name)["containerID"].removeprefix("containerd://")
        for hierarchy, file in (
            ("memory/kubepods", "memory.limit_in_bytes"),
            ("kubepods", "memory.max"),
        ):
            for folder in Path("/sys/fs/cgroup").joinpath(hierarchy).rglob(f"*{identifier}*"):
                return int((folder / file).read_text())
        raise AssertionError(f"no cgroup of {name}")


def loaded_tokens(client: EngineClient) -> dict[str, int]:
    """Tokens whose load has completed, by tier, as the engine's own counters say."""
    found: dict[str, int] = {}
    for name, value in client.metrics().items():
        if matched := re.fullmatch(rf'{LOADED}\{{.*tier="([^"]+)".*\}}', name):
            found[matched[1]] = found.get(matched[1], 0) + int(value)
    return found


def ask(
    client: EngineClient, tokens: list[int], new_tokens: int, seconds: float = 120
) -> tuple[tuple[int, ...], dict[str, int], float]:
    """One prompt: the answer's tokens, tokens loaded for it by tier, and seconds to the first
    token. There are no other requests.
    """
    before, finished = (
        loaded_tokens(client),
        client.metrics().get("vllm:request_success_total", 0.0),
    )
    answer = client.complete(tokens, new_tokens, timeout_seconds=seconds)
    deadline = time.monotonic() + 10
    while (
        client.metrics().get("vllm:request_success_total", 0.0) <= finished
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    after = loaded_tokens(client)
    return (
        answer.tokens,
        {tier: after[tier] - before.get(tier, 0) for tier in after},
        answer.first_token_seconds,
    )


__all__ = [
    "EnginePod",
    "EngineProcessError",
    "ask",
    "container_status",
    "engine_deployment",
    "loaded_tokens",
    "pods_of",
]
